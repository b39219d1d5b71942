"""Text from a model or a log, so that a file or a terminal shows it and obeys none of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def printable(text: str) -> str:
    """The text with control characters, reversals of direction and half surrogates written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def readable(value: Any) -> Any:
    """A value of JSON. Half a surrogate pair, from a model or a path, is written out: it would make
    a file that no parser reads."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {readable(key): readable(item) for key, item in value.items()}
    return [readable(item) for item in value] if isinstance(value, list) else value


def some_of(texts: Sequence[str], limit: int) -> str:
    """The first texts of what may be a long list, and how many there are beside them."""
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more
