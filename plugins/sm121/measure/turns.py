"""Several runs of the suite on one machine: what measures does so while none of the others works.

A lock for readers and writers between processes, on two files: tests that measure nothing share the
machine, one that measures has it alone. Who waits for it alone holds the door, so that those who
share it cannot pass him by for ever. The locks are the kernel's (flock): they end with the process.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from sm121.core.lock_file import open_lock, try_lock

_POLL_S = 0.1
#: Shorter waits are not worth a line; longer ones are said again and again.
_SAY_AFTER_S = 3.0
_SAY_EVERY_S = 60.0


class Share(Enum):
    """What a test needs of the machine."""

    SHARED = fcntl.LOCK_SH
    ALONE = fcntl.LOCK_EX


class Turns:
    """The machine's turns, as one process takes them.

    Args:
        say: called with a line while it waits.
        folder: where the lock files are; the same for all that are to take turns.

    Raises:
        OSError: a lock file cannot be opened, or somebody has put a link in its place.
    """

    def __init__(self, say: Callable[[str], None], folder: Path | None = None) -> None:
        self._say = say
        folder = folder or Path(tempfile.gettempdir())
        # By number: in a container a user may have no name, and `sudo -E` keeps the other's.
        name = f"sm121-{os.getuid()}-turn"
        self._door = open_lock(folder / f"{name}-door.lock")
        self._machine = open_lock(folder / f"{name}.lock")
        self.held: Share | None = None

    def take(self, share: Share) -> None:
        """Wait until the machine is ours in that way; what was held otherwise is released first."""
        if self.held is share:
            return
        self.release()
        since = time.monotonic()
        told = since + _SAY_AFTER_S - _SAY_EVERY_S
        for lock, kind in ((self._door, fcntl.LOCK_EX), (self._machine, share.value)):
            while not try_lock(lock, kind):
                if time.monotonic() - told >= _SAY_EVERY_S:
                    told = time.monotonic()
                    self._say(self._waiting(share, told - since))
                time.sleep(_POLL_S)
        fcntl.flock(self._door, fcntl.LOCK_UN)
        self.held = share
        if share is Share.ALONE:
            self._machine.seek(0)
            self._machine.truncate()
            self._machine.write(str(os.getpid()))
            self._machine.flush()

    def release(self) -> None:
        """Let others work."""
        if self.held is not None:
            fcntl.flock(self._machine, fcntl.LOCK_UN)
            self.held = None

    def close(self) -> None:
        """Release it, and take no more turns."""
        self.held = None
        self._machine.close()
        self._door.close()

    def _waiting(self, share: Share, seconds: float) -> str:
        what = (
            "this one measures and waits until they have ended their test"
            if share is Share.ALONE
            else f"one of them measures (pid {self._measuring()}), and this one waits for its end"
        )
        return (
            f"other runs of the suite are on this machine: {what}; {seconds:.0f} s so far "
            "(--beside-others does not wait)"
        )

    def _measuring(self) -> str:
        self._machine.seek(0)
        return self._machine.read(20) or "unknown"
