"""Turns between runs of the suite on one machine, a lock for readers and writers: tests that
measure nothing share the machine, a test that measures has it alone. Whoever waits for it holds a
first lock file, so that runs which come later cannot keep the machine busy for ever. Both are locks
of the kernel (flock), which end with the process that holds them."""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from sm121.core.lock_file import open_lock, try_lock

_POLL_S = 0.1
#: A shorter wait is not mentioned; a longer one is mentioned again and again.
_SAY_AFTER_S = 3.0
_SAY_EVERY_S = 60.0
#: Levels whose verdicts rest on how long something took.
_TIMED_LEVELS = frozenset({"stress", "performance", "regression", "matrix"})


class Turn(Enum):
    """How a test uses the machine."""

    SHARED = fcntl.LOCK_SH
    ALONE = fcntl.LOCK_EX


def needed(level: str, *, is_benchmark: bool, has_gpu_servers: bool) -> Turn:
    """How a test of a `level` uses the machine. `is_benchmark`: it measures, whatever its level;
    `has_gpu_servers`: all of the run has the machine alone: GB10 holds gpt-oss-120b once."""
    alone = has_gpu_servers or is_benchmark or level in _TIMED_LEVELS
    return Turn.ALONE if alone else Turn.SHARED


class Turns:
    """Takes turns for this process. `say`: called with a line while it waits; `folder`: where the
    lock files are; the same for all runs that are to take turns. Raises OSError: a lock file cannot
    be opened, or somebody has put a link in its place."""

    def __init__(self, say: Callable[[str], None], folder: Path | None = None) -> None:
        self._say = say
        folder = folder or Path(tempfile.gettempdir())
        # By number: in a container a user may have no name, and `sudo -E` keeps the other's.
        name = f"sm121-{os.getuid()}-turn"
        self._queue = open_lock(folder / f"{name}-door.lock")
        self._machine = open_lock(folder / f"{name}.lock")
        self.current: Turn | None = None

    def take(self, turn: Turn) -> None:
        """Wait for a turn. A turn of the other kind that is held is released first."""
        if self.current is turn:
            return
        self.release()
        since = time.monotonic()
        reported = since + _SAY_AFTER_S - _SAY_EVERY_S
        for lock, kind in ((self._queue, fcntl.LOCK_EX), (self._machine, turn.value)):
            while not try_lock(lock, kind):
                if time.monotonic() - reported >= _SAY_EVERY_S:
                    reported = time.monotonic()
                    self._say(self._waiting(turn, reported - since))
                time.sleep(_POLL_S)
        fcntl.flock(self._queue, fcntl.LOCK_UN)
        self.current = turn
        if turn is Turn.ALONE:
            self._machine.seek(0)
            self._machine.truncate()
            self._machine.write(str(os.getpid()))
            self._machine.flush()

    def end_test(self, following: Turn | None) -> None:
        """Release the machine, unless the test measured and the following one does too, or there is
        none (None): a run's measurements belong together, with its last look at the machine."""
        if self.current is Turn.SHARED or following is Turn.SHARED:
            self.release()

    def release(self) -> None:
        """Let other runs work."""
        if self.current is not None:
            fcntl.flock(self._machine, fcntl.LOCK_UN)
            self.current = None

    def close(self) -> None:
        """Release the machine, and take no more turns."""
        self.current = None
        self._machine.close()
        self._queue.close()

    def _waiting(self, turn: Turn, seconds: float) -> str:
        if turn is Turn.ALONE:
            reason = "this one measures and waits until they have ended their test"
        else:
            self._machine.seek(0)
            measuring = self._machine.read(20) or "unknown"
            reason = f"one of them measures (pid {measuring}), and this one waits for its end"
        return (
            f"other runs of the suite are on this machine: {reason}; {seconds:.0f} s so far "
            "(--share-machine does not wait)"
        )
