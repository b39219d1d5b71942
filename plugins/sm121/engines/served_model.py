"""Compare the names of an attached server's model with the model of the profile."""

import re
from collections.abc import Collection

#: Numbers of parameters in the names of models, for example 120b, 0.6B or 30B-A3B.
_SIZE = re.compile(r"(?<![a-z0-9.])a?(\d+(?:\.\d+)?b)(?![a-z0-9])")


def is_named(name: str, expected: str) -> bool:
    """Return whether a name contains the expected one.

    For example, openai/gpt-oss-120b contains gpt-oss-120b.

    Args:
        name: A name of the served model.
        expected: The expected name; case does not count.
    """
    return expected.lower() in name.lower()


def contradiction(names: Collection[str], expected: str, others: Collection[str]) -> str | None:
    """Return the first name that belongs to another model than the expected one.

    A name belongs to another model if it contains another number of parameters, or if it is the
    name of another profile's model.

    Args:
        names: The names of the served model: served name, ``root`` in /v1/models, and name in the
            log.
        expected: The served name of the profile.
        others: The served names of all profiles.

    Returns:
        The name; None if no name belongs to another model.
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
