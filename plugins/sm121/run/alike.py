"""Whether two failures of one test are the same: what was seen, without what differs by chance."""

from __future__ import annotations

import re

from sm121.core import digest

#: What says where or when something was, and not what.
_PLACES = re.compile(
    r"""
    (?<=//)[\w.-]+:\d+                                       # host and port of a URL
    | \b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b        # a UUID
    | \b(?:chatcmpl|cmpl|resp|rs|msg|fc|call|req)[-_](?:tool[-_])?  # an id: long, and by chance
      (?:[0-9a-f]{8,}[\w-]*|(?=[A-Za-z]*\d)[A-Za-z0-9]{20,})
    | (?<![\w./])/(?!v\d)(?:[\w.@+-]+/)+[\w.@+-]*\d[\w.@+-]*(?![\w.@+/-])  # a path, no route;
    | (?<![\w./])/(?!v\d)(?:[\w.@+-]+/)+(?=[\w.@+-]*)          # of a name without digits it stays
    | \b[\w-]+\.log\b
    | \b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?[\w.:+]*       # a time
    | (?:(?<=current\ date:\ )|(?<=today\ is\ ))\d{4}-\d\d-\d\d  # in harmony's system message
    | \b\d\d:\d\d:\d\d\b
    | \b0x[0-9a-f]+\b
    | \b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{12,}\b     # a digest
    | (?<=\bpid[ =:])\d+
    | (?<=\bport[ =:])\d+
    | (?<=\bcreated["']:)\s*\d+ | (?<=ed_at["']:)\s*\d+(?:\.\d+)?
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
#: What was said, word by word: a number in it is no measurement.
_QUOTED = re.compile(r"(?<!\w)'[^'\n]*'(?!\w)|(?<!\w)\"[^\"\n]*\"(?!\w)")
#: Two measured numbers are alike within this factor.
_FACTOR = 2.0
_LETTERS = str.maketrans("0123456789abcdef", "ghijklmnopqrstuv")


def alike(one: str, other: str) -> bool:
    """Whether two messages of one test say the same: the same words and whole numbers, and what was
    measured within a factor of 2."""
    return same_words(one, other) and all(
        _near(a, b) for a, b in zip(_normal(one)[1], _normal(other)[1], strict=True)
    )


def same_words(one: str, other: str) -> bool:
    """Whether two messages say the same, whatever was measured."""
    return _normal(one)[0] == _normal(other)[0]


def mark(text: str) -> str:
    """A digest of the words of a text, in letters that `alike` takes for a word."""
    return digest.of([_normal(text)[0]]).translate(_LETTERS)


def _normal(message: str) -> tuple[str, list[float]]:
    """The words of a message, and what was measured."""
    numbers: list[float] = []
    plain = _PLACES.sub("<>", message)
    quoted = [match.span() for match in _QUOTED.finditer(plain)]

    def taken(match: re.Match[str]) -> str:
        if any(begin <= match.start() < end for begin, end in quoted):
            return match[0]
        numbers.append(float(match[0]))
        return "#"

    return " ".join(_MEASURED.sub(taken, plain).split()), numbers


def _near(one: float, other: float) -> bool:
    if one == other:
        return True
    return one * other > 0.0 and 1 / _FACTOR <= one / other <= _FACTOR
