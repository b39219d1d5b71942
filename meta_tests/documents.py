"""Create copies of JSON documents with changed values."""

import copy
from functools import reduce
from operator import getitem
from typing import Any


def altered(document: Any, changes: dict[str, Any]) -> Any:
    """Return a copy of a JSON document with other values.

    Args:
        document: What ``json.loads`` returned.
        changes: The new values. The keys are their places, for example ``tests.0.verdict``.

    Raises:
        AssertionError: A place is not in the document.
    """
    document = copy.deepcopy(document)
    for path, value in changes.items():
        *parents, key = (int(part) if part.isdigit() else part for part in path.split("."))
        parent = reduce(getitem, parents, document)
        assert isinstance(key, int) or key in parent, f"{path}: no such place in the document"
        parent[key] = value
    return document
