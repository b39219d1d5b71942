"""Suggest a name for a misspelt word."""

import difflib
from collections.abc import Iterable

#: The minimum similarity of a suggestion (`difflib.SequenceMatcher.ratio`).
_SIMILAR = 0.7
#: The minimum length of an abbreviation.
_SHORTEST = 2


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return the end of an error message about an unknown word.

    Args:
        word: The word that a user typed.
        names: The words that exist.

    Returns:
        ``; did you mean NAME?``, or an empty text if no name is similar. Case is ignored, and an
        unambiguous abbreviation, such as ``md`` for ``markdown``, counts as similar.
    """
    by_letters = {name.casefold(): name for name in names}
    written = word.casefold()
    similar = difflib.get_close_matches(written, by_letters, n=1, cutoff=_SIMILAR)
    if not similar:
        similar = [name for name in by_letters if _abbreviates(written, name)]
    return f"; did you mean {by_letters[similar[0]]}?" if len(similar) == 1 else ""


def _abbreviates(word: str, name: str) -> bool:
    """Check whether a word has a name's first letter, then other letters of it in their order."""
    if len(word) < _SHORTEST or word[0] != name[:1]:
        return False
    letters = iter(name)
    return all(letter in letters for letter in word)
