"""Text from a model or a log, so that a file or a terminal shows it and obeys none of it."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with control characters, reversals of direction and half surrogates written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
