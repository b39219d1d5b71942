"""Values of options that are split as a shell does."""

import shlex

from sm121.core.errors import UsageError


def split(name: str, text: str) -> list[str]:
    """Split the value of an option as a shell does.

    Args:
        name: The option.
        text: Its value.

    Raises:
        UsageError: The text has an open quote.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{name} {text}: {error}") from error
