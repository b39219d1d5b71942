"""The API key of the servers that the suite starts."""

import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

_NAME = "sm121-api-key"
_KEY = re.compile(r"[\w-]{32}")


def new() -> str:
    """Return a random API key of 32 hexadecimal digits.

    It must not begin with a hyphen: SGLang accepts the key only as an argument, and argparse reads
    such a value as an option.
    """
    return secrets.token_hex(16)


def kept(folder: Path) -> str:
    """Return a random API key, which is stored in an engine's cache and reused while that exists.

    vLLM 0.24 includes VLLM_API_KEY in the key of its torch.compile cache
    (``envs.compile_factors``), so it would compile everything again for a new API key. vLLM 0.32
    does not.

    Args:
        folder: The engine's cache. If other users can read the file with the key, a new key is
            made.
    """
    file = folder / _NAME
    made = new()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            _write(file, made)
        with file.open(encoding="ascii") as opened:
            key = opened.read(100)
            state = os.fstat(opened.fileno())
    except (OSError, UnicodeDecodeError):
        return made
    is_private = state.st_uid == os.getuid() and not stat.S_IMODE(state.st_mode) & 0o077
    return key if is_private and _KEY.fullmatch(key) else made


def _write(file: Path, text: str) -> None:
    """Write a file atomically. If several processes write it, the first one's file stays."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=_NAME)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as opened:
            opened.write(text)
        os.link(name, file)
    except FileExistsError:
        return
    finally:
        Path(name).unlink()
