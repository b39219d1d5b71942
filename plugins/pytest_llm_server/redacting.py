"""Takes keys out of what pytest shows, which cuts long texts in their middle."""

from collections.abc import Iterable

from sm121.core.redaction import REDACTED

#: What pytest writes in place of the middle of a long text.
_CUT = "..."
#: Characters of the shortest piece of a key that is replaced beside a cut.
_LEAST = 6


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Return a text without secrets, and without pieces of them beside ``...``.

    Args:
        text: The text.
        secrets: The secrets.
    """
    for secret in secrets:
        parts = text.replace(secret, REDACTED).split(_CUT)
        last = len(parts) - 1
        clean = []
        for index, part in enumerate(parts):
            start = _beginning(part, secret) if index > 0 else 0
            # The end of a text is the beginning of its mirror image.
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
    """Return how many characters a part has at its beginning that are a piece of a secret."""
    length = 0
    while length < len(part) and part[: length + 1] in secret:
        length += 1
    return length if length >= _LEAST else 0
