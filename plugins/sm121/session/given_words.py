"""Splits option values in the same way as a shell."""

import shlex

from sm121.core.errors import UsageError


def split(name: str, text: str) -> list[str]:
    """Split the value of an option in the same way as a shell.

    Args:
        name: The option.
        text: The value.

    Raises:
        UsageError: The text has an unclosed quote.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{name} {text}: {error}") from error
