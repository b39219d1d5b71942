"""Remove API keys from pytest's output, which truncates long texts in the middle."""

from collections.abc import Iterable

from sm121.core.redaction import REDACTED

#: The marker that pytest inserts where it has truncated a text.
_CUT = "..."
#: Fragments of a key beside a truncation are replaced if they have at least this many characters.
_LEAST = 6


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Remove secrets from a text, and fragments of secrets beside ``...``.

    Args:
        text: The text.
        secrets: The secrets to remove.
    """
    for secret in secrets:
        parts = text.replace(secret, REDACTED).split(_CUT)
        last = len(parts) - 1
        clean = []
        for index, part in enumerate(parts):
            start = _beginning(part, secret) if index > 0 else 0
            # Check the reversed texts, so that the end of the part is checked like a beginning.
            end = _beginning(part[::-1], secret[::-1]) if index < last else 0
            shown = part[start : len(part) - end]
            if start:
                shown = REDACTED + shown
            if end:
                shown += REDACTED
            clean.append(shown)
        text = _CUT.join(clean)
    return text


def _beginning(part: str, secret: str) -> int:
    """Return the length of the secret's fragment at the start of a part; 0 if it is too short."""
    length = 0
    while length < len(part) and part[: length + 1] in secret:
        length += 1
    return length if length >= _LEAST else 0
