"""Whether two failures of one test are the same: what was seen, without what differs by chance."""

from __future__ import annotations

import re

#: What says where or when something was, and not what: the longest first.
_PLACES = re.compile(
    r"""
    https?://\S+
    | \b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b       # a UUID
    | \b(?:chatcmpl|cmpl|resp|rs|msg|fc|call|req|chatcmpl-tool)[-_][\w-]{6,}
    | (?<![\w.])(?:/[\w.@+-]+){2,}/?                         # a path
    | \b\d{4}-\d\d-\d\dT?\s?\d\d:\d\d(?::\d\d)?[\w.:+]*      # a time
    | \b\d\d:\d\d:\d\d\b
    | \b0x[0-9a-f]+\b
    | \b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b      # a digest
    """,
    re.VERBOSE | re.IGNORECASE,
)
#: A number with a fraction or an exponent, or one of four digits and more: measured or counted.
#: Shorter ones are kept: an HTTP status, a number of choices, a position.
_MEASURED = re.compile(r"(?<![\w.])-?(?:\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+|\d{4,})(?![\w])", re.I)
#: Whole numbers with one of these units were measured, too.
_WITH_UNIT = re.compile(r"(?<![\w.])-?\d+(?= ?(?:ms|s|nats|tok/s|[KMG]iB|bytes|%)(?!\w))")
_WAIVED = re.compile(r"^(?:not )?waived(?: until \S+ \(\S+\)|, since .*? never is): ")
#: Two measured numbers are alike within this factor.
_FACTOR = 2.0


def alike(one: str, other: str) -> bool:
    """Whether two messages of one test say the same: the same words and small whole numbers, and
    what was measured within a factor of 2."""
    (words, numbers), (others, other_numbers) = _normal(one), _normal(other)
    return words == others and all(_near(a, b) for a, b in zip(numbers, other_numbers, strict=True))


def _normal(message: str) -> tuple[str, list[float]]:
    """The words of a message, and what was measured."""
    text = _PLACES.sub("<>", _WAIVED.sub("", message))
    numbers: list[float] = []

    def taken(match: re.Match[str]) -> str:
        numbers.append(float(match[0]))
        return "#"

    text = re.sub(f"{_MEASURED.pattern}|{_WITH_UNIT.pattern}", taken, text, flags=re.I)
    return " ".join(text.split()), numbers


def _near(one: float, other: float) -> bool:
    if one == other:
        return True
    return one * other > 0.0 and 1 / _FACTOR <= one / other <= _FACTOR
