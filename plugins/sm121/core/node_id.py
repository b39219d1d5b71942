"""Parse the node ids of pytest: ``tests/test_smoke.py::test_models[chat]``."""


def name_of(node_id: str) -> str:
    """Return the name of a test with its parameters, without its file and its class.

    Args:
        node_id: The node id. A text without a file is returned unchanged.
    """
    path, bracket, parameters = node_id.partition("[")  # parameters may contain any character
    return f"{path.rpartition('::')[2]}{bracket}{parameters}"


def function_of(node_id: str) -> str:
    """Return the name of a test's function, without its parameters.

    Args:
        node_id: The node id.
    """
    return name_of(node_id.partition("[")[0])
