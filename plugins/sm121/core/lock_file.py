"""Lock files, which keep processes of one user from doing the same thing at once."""

import fcntl
import os
from pathlib import Path
from typing import IO

#: In a folder that servers write to: held, shared, by the supervisor of each as long as it lives.
SERVERS = ".servers.lock"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def open_lock(path: Path, mode: int = 0o600) -> IO[str]:
    """Open a lock file, made if needed. Raises OSError: it cannot be opened, or is a link."""
    return os.fdopen(os.open(path, _FLAGS, mode), "r+")


def try_lock(lock: IO[str], kind: int) -> bool:
    """Take it (``fcntl.LOCK_SH`` or ``LOCK_EX``) if that is possible at once."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
