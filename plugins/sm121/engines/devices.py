"""One device a worker, and one server a device, when several processes run the suite at once."""

import fcntl
import os
import re
import tempfile
from pathlib import Path
from typing import IO

from sm121.core.lock_file import open_lock

_VARIABLE = "CUDA_VISIBLE_DEVICES"


class DeviceLock:
    """Held from a server's start to its end: no other worker's server runs on the device then. The
    lock is shared by the workers of one run only. Different runs take turns as a whole
    (`sm121.measure.turns`); a process that waited for both could wait for ever. `device`: its name;
    `run`: of which the workers are."""

    def __init__(self, device: str, run: str) -> None:
        safe = re.sub(r"[^A-Za-z0-9]", "_", f"{run}-{device}")
        name = f"sm121-{os.getuid()}-device-{safe}.lock"
        self._path = Path(tempfile.gettempdir()) / name
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Wait until the device is ours; it may be already. Raises OSError: the lock file cannot be
        opened, or somebody has put a link in its place."""
        while self._file is None:
            file = open_lock(self._path)
            fcntl.flock(file, fcntl.LOCK_EX)
            if self._is_there(file):
                self._file = file
            else:
                file.close()  # its last holder removed the file while we waited

    def release(self) -> None:
        """Release the device and remove the lock file."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def _is_there(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False


def of_worker(worker: str | None, count: int) -> str | None:
    """The device of one of pytest-xdist's workers (``gw3``); None without workers or GPUs.
    ``CUDA_VISIBLE_DEVICES`` names the devices that there are, else they are counted from 0."""
    number = re.fullmatch(r"gw(\d+)", worker or "")
    if number is None:
        return None
    visible = os.environ.get(_VARIABLE)
    names = visible.split(",") if visible else [str(n) for n in range(count)]
    return names[int(number[1]) % len(names)] if names else None


def environment(worker: str | None, count: int) -> tuple[tuple[str, str], ...]:
    """What a worker's servers are given, so that they are on its device."""
    device = of_worker(worker, count)
    return () if device is None else ((_VARIABLE, device),)


def lock(worker: str | None, run: str, count: int) -> DeviceLock | None:
    """The lock that a worker's servers hold while they run; None without workers."""
    if worker is None:
        return None
    return DeviceLock(of_worker(worker, count) or "cpu", run)
