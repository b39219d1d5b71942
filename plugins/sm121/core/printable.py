"""Escape text from a model or a log, so that no terminal or parser interprets it."""

from collections.abc import Sequence


def printable(text: str) -> str:
    """Return a text with escapes for control characters, bidi marks and lone surrogates.

    Args:
        text: The text. Line breaks and tabs are escaped, too.
    """
    signs = []
    for sign in text:
        signs.append(sign if sign.isprintable() else sign.encode("unicode_escape").decode())
    return "".join(signs)


def some_of(texts: Sequence[str], limit: int) -> str:
    """Join the first texts with commas, and append how many more there are.

    Args:
        texts: The texts.
        limit: The number of texts to join.
    """
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more
