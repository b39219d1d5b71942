"""Suggest a name for a misspelt word."""

import difflib
from collections.abc import Iterable

#: The least similarity of a suggestion (`difflib.SequenceMatcher.ratio`).
_SIMILAR = 0.7


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown word.

    Args:
        word: The word that a user typed.
        names: The words that exist.

    Returns:
        ``; did you mean NAME?``, or an empty text if no name is similar.
    """
    similar = difflib.get_close_matches(word, names, n=1, cutoff=_SIMILAR)
    return f"; did you mean {similar[0]}?" if similar else ""
