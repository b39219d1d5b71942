"""Whether two failures of one test are the same: what was seen, without what differs by chance."""

from __future__ import annotations

import re

#: What says where or when something was, and not what.
_PLACES = re.compile(
    r"""
    (?<=//)[\w.-]+:\d+                                       # host and port of a URL
    | \b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b        # a UUID
    | \b(?:chatcmpl|cmpl|resp|rs|msg|fc|call|req)[-_](?=[\w-]*\d)[\w-]{6,}
    | (?<![\w./])/(?!v\d)(?:[\w.@+-]+/)+[\w.@+-]*            # a path, no route of the API
    | \b[\w-]+\.log\b
    | \b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?[\w.:+]*)?  # a day, or a time
    | \b\d\d:\d\d:\d\d\b
    | \b0x[0-9a-f]+\b
    | \b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b      # a digest
    | (?<=\bpid[ =:])\d+
    | (?<=\bport[ =:])\d+
    | (?<="created":)\s*\d+ | (?<='created':)\s*\d+
    """,
    re.VERBOSE | re.IGNORECASE,
)
#: A number with a fraction or an exponent, or with a unit: measured. Others are kept as they are:
#: an HTTP status, a token, a position, how many of how many.
_MEASURED = re.compile(
    r"(?<![\w.])-?(?:\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+"
    r"|\d+(?= ?(?:ms|s|nats|tok/s|[KMG]i?B|bytes|%)(?!\w)))(?!\w)"
    r"|(?<![\w.])-?\d+\.\d+(?:e[-+]?\d+)?(?=(?:ms|s|%)(?!\w))",
    re.IGNORECASE,
)
#: Two measured numbers are alike within this factor.
_FACTOR = 2.0


def alike(one: str, other: str) -> bool:
    """Whether two messages of one test say the same: the same words and whole numbers, and what was
    measured within a factor of 2."""
    (words, numbers), (others, other_numbers) = _normal(one), _normal(other)
    return words == others and all(_near(a, b) for a, b in zip(numbers, other_numbers, strict=True))


def _normal(message: str) -> tuple[str, list[float]]:
    """The words of a message, and what was measured."""
    numbers: list[float] = []

    def taken(match: re.Match[str]) -> str:
        numbers.append(float(match[0]))
        return "#"

    return " ".join(_MEASURED.sub(taken, _PLACES.sub("<>", message)).split()), numbers


def _near(one: float, other: float) -> bool:
    if one == other:
        return True
    return one * other > 0.0 and 1 / _FACTOR <= one / other <= _FACTOR
