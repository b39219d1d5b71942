"""Lock files, which keep processes of one user from doing the same thing at once."""

import fcntl
import os
from pathlib import Path
from typing import IO

#: The lock file in a folder to which servers write. Each server's supervisor holds a shared lock.
SERVERS = ".servers.lock"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def open_lock(path: Path, mode: int = 0o600) -> IO[str]:
    """Open a lock file; create it if it does not exist.

    Args:
        path: The file.
        mode: The permissions of a new file.

    Raises:
        OSError: The file cannot be opened, or is a link.
    """
    return os.fdopen(os.open(path, _FLAGS, mode), "r+")


def try_lock(lock: IO[str], kind: int) -> bool:
    """Take a lock without waiting.

    Args:
        lock: A file from `open_lock`.
        kind: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.

    Returns:
        Whether this process got the lock.
    """
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
