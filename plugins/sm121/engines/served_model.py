"""Whether the model of an attached server may be the profile's, by the names that it goes by."""

import re
from collections.abc import Collection

#: Parameters, as names of models state them: 120b, 0.6B, 30B-A3B.
_SIZE = re.compile(r"(?<![a-z0-9.])a?(\d+(?:\.\d+)?b)(?![a-z0-9])")


def is_named(name: str, expected: str) -> bool:
    """Whether a name contains the expected one, as openai/gpt-oss-120b contains gpt-oss-120b."""
    return expected.lower() in name.lower()


def contradiction(names: Collection[str], expected: str, others: Collection[str]) -> str | None:
    """The first name that states another model than the expected one, by its size or as the model
    of another profile; None: no name does.

    Args:
        names: What the server calls its model: served name, root, the model of its log.
        expected: The served name of the profile.
        others: The served names of all profiles.
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
