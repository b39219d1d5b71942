"""A lock with which only one run of a user measures on this machine at a time.

The lock ends with the process of the run.
"""

import datetime
import fcntl
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import IO

from sm121.core.errors import UsageError
from sm121.core.lock_file import open_lock, try_lock

#: The variable with the folder of the lock file (default: the temporary folder). Containers on one
#: machine that have separate temporary folders can name a shared folder.
FOLDER = "SM121_LOCKS"
#: The levels whose verdicts depend on timings.
_TIMED_LEVELS = frozenset({"stress", "performance", "regression", "matrix"})


def measures(level: str, fixtures: Collection[str]) -> bool:
    """Return whether a test's verdict depends on timings.

    Args:
        level: The level of the test.
        fixtures: The names of its fixtures.
    """
    # A test of the accuracy cost measures no time.
    is_benchmark = "benchmark" in fixtures and "price_of_rounding" not in fixtures
    return level in _TIMED_LEVELS or is_benchmark


def name() -> str:
    """Return the name of the lock file. After a run, the file stays, but it is not locked."""
    # The user's id, because in a container a user may have no name, and `sudo -E` keeps another
    # user's.
    return f"sm121-{os.getuid()}-measures.lock"


def lock_machine(folder: Path | None = None) -> IO[str]:
    """Lock the machine for measuring, until the returned file is closed.

    Args:
        folder: The folder of the lock file (default: the variable `FOLDER`, else the temporary
            folder).

    Returns:
        The lock file, which contains the pid of this process and the time.

    Raises:
        UsageError: Another run is measuring, or the lock file cannot be opened, for example because
            it is a link.
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
        holder = lock.read(80) or "pid unknown"
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
