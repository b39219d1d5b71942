"""The API key of an attached server, as the user gives it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sm121.core.errors import UsageError

#: The second is every client's.
_KEY_VARIABLES = ("SM121_API_KEY", "OPENAI_API_KEY")


def api_key(option: Callable[[str], Any]) -> str | None:
    """Read the key of the attached server: from the option, a file, or one of `_KEY_VARIABLES`.

    Args:
        option: Gives the value of an option.

    Returns:
        The key. None: the user gave none.

    Raises:
        UsageError: It is no key. The message does not show it.
    """
    key, file = option("--api-key"), option("--api-key-file")
    if key and file:
        raise UsageError("--api-key and --api-key-file: expected one of them")
    source = "--api-key" if key else f"--api-key-file {file}"
    if file:
        try:
            key = Path(file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise UsageError(f"{source}: expected a file with the key ({reason})") from error
    elif not key:
        keys = {name: os.environ.get(name, "").strip() for name in _KEY_VARIABLES}
        source, key = next((item for item in keys.items() if item[1]), ("", ""))
        if not key:
            return None
    if not key or not (key.isascii() and key.isprintable()):
        raise UsageError(f"{source}: expected a key, one line of ASCII characters")
    return str(key)
