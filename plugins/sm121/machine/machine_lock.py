"""One run measures on a machine at a time: a lock of the user, which ends with its process."""

import datetime
import fcntl
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import IO

from sm121.core.errors import UsageError
from sm121.core.lock_file import open_lock, try_lock

#: The folder of the lock file, where it is not the temporary folder: containers that share a
#: machine and have a temporary folder each can name one that they share.
FOLDER = "SM121_LOCKS"
#: Levels whose verdicts rest on how long something took.
_TIMED_LEVELS = frozenset({"stress", "performance", "regression", "matrix"})


def measures(level: str, fixtures: Collection[str]) -> bool:
    """Whether a test's verdict rests on how long something took.

    Args:
        level: The level of the test.
        fixtures: The names of its fixtures.
    """
    is_benchmark = "benchmark" in fixtures and "price_of_rounding" not in fixtures  # not timed
    return level in _TIMED_LEVELS or is_benchmark


def name() -> str:
    """The name of the lock file. The file stays when its run has ended: only its lock ends."""
    # By number: in a container a user may have no name, and `sudo -E` keeps the other's.
    return f"sm121-{os.getuid()}-measures.lock"


def take(folder: Path | None = None) -> IO[str]:
    """Take the machine for measuring, until the returned file is closed.

    Args:
        folder: Where the lock file is (default: `FOLDER`, else the temporary folder).

    Returns:
        The lock file, which names this process and the time.

    Raises:
        UsageError: Another run measures here, or the lock file cannot be opened: it may be a link.
    """
    folder = folder or Path(os.environ.get(FOLDER) or tempfile.gettempdir())
    path = folder / name()
    try:
        lock = open_lock(path)
    except OSError as error:
        raise UsageError(
            f"lock {path}: expected a file of this user, got {error.strerror}. Remove it."
        ) from error
    if not try_lock(lock, fcntl.LOCK_EX):
        holder = lock.read(80) or "pid not known"
        lock.close()
        raise UsageError(
            f"this machine: expected one run that measures at a time, got another ({holder}). "
            "Wait for its end."
        )
    lock.truncate()
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    lock.write(f"pid {os.getpid()}, since {now}")
    lock.flush()
    return lock
