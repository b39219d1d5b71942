"""The name of a metric: ``tg32@d4096`` is ``tg32`` behind 4,096 tokens of context.

Names are keys of verdict.json, so that a stored run has nothing else to tell a metric by.
"""

#: Before the names of the metrics of an A/B comparison.
_AB = "ab:"


def of_ab(name: str) -> str:
    """Return the name under which an A/B comparison stores a metric of its sides.

    Args:
        name: The name of the metric of a side.
    """
    return f"{_AB}{name}"


def is_of_ab(name: str) -> bool:
    """Return whether a metric is of an A/B comparison.

    Args:
        name: Its name.
    """
    return name.startswith(_AB)


def without_depth(name: str) -> str:
    """Return a metric's name without the depth: ``price_kl`` of ``price_kl@d8192``.

    Args:
        name: The name, with or without a depth.
    """
    return name.partition("@")[0]


def depth_of(name: str) -> int | None:
    """Return the depth in a metric's name: 4096 of ``tg32@d4096``.

    Args:
        name: The name.

    Returns:
        The depth in tokens; None if the name has none.
    """
    depth = name.partition("@d")[2]
    return int(depth) if depth else None
