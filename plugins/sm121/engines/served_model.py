"""Whether the model of an attached server may be the profile's, by the model's names."""

import re
from collections.abc import Collection

#: Parameters, as names of models state them: 120b, 0.6B, 30B-A3B.
_SIZE = re.compile(r"(?<![a-z0-9.])a?(\d+(?:\.\d+)?b)(?![a-z0-9])")


def is_named(name: str, expected: str) -> bool:
    """Return whether a name contains the expected one, as openai/gpt-oss-120b has gpt-oss-120b.

    Args:
        name: A name of the served model.
        expected: The expected name; case does not count.
    """
    return expected.lower() in name.lower()


def contradiction(names: Collection[str], expected: str, others: Collection[str]) -> str | None:
    """Return the first name that states another model than the expected one.

    A name states another model by its size, or as the model of another profile.

    Args:
        names: The names of the served model: served name, root, the model of its log.
        expected: The served name of the profile.
        others: The served names of all profiles.

    Returns:
        The name; None if no name states another model.
    """
    sizes = {*_SIZE.findall(expected.lower())}
    for name in names:
        if is_named(name, expected):
            continue
        stated = {*_SIZE.findall(name.lower())}
        is_another = any(is_named(name, other) for other in others if other != expected)
        if is_another or (stated and not stated & sizes):
            return name
    return None
