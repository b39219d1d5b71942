"""The API key of an attached server, as the user gives it."""

import os
from pathlib import Path

from sm121.core.errors import UsageError
from sm121.core.options import Option

#: The environment variables with the key. OpenAI's clients read the second one.
_KEY_VARIABLES = ("SM121_API_KEY", "OPENAI_API_KEY")


def api_key(option: Option) -> str | None:
    """Read the key of the attached server: from the option, a file, or one of `_KEY_VARIABLES`.

    Args:
        option: A function that returns the value of an option.

    Returns:
        The key; None if the user gave none.

    Raises:
        UsageError: The value cannot be an API key. The message does not contain the value.
    """
    key = option("--api-key")
    file = option("--api-key-file")
    if key and file:
        raise UsageError("--api-key and --api-key-file: expected one of them, got both")
    if file:
        return _refuse_malformed(f"--api-key-file {file}", _content(file))
    if key:
        return _refuse_malformed("--api-key", key)
    for name in _KEY_VARIABLES:
        key = os.environ.get(name, "").strip()
        if key:
            return _refuse_malformed(name, key)
    return None


def _content(file: str) -> str:
    try:
        return Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise UsageError(
            f"--api-key-file {file}: expected a file with the key ({reason})"
        ) from error


def _refuse_malformed(source: str, key: str) -> str:
    """Return the key.

    If it is malformed, raise UsageError with the option or variable it is from.
    """
    if not key or not (key.isascii() and key.isprintable()):
        raise UsageError(f"{source}: expected a key, one line of ASCII characters")
    return key
