"""One device a worker, and one server a device, when several processes run the suite at once."""

import fcntl
import os
import re
from pathlib import Path
from typing import IO

from sm121.core.lock_file import open_lock

_VARIABLE = "CUDA_VISIBLE_DEVICES"


class DeviceLock:
    """Held from a server's start to its end: no other worker's server runs on the device then.
    Different runs take turns as a whole (`sm121.measure.turns`); a process that waited for both
    could wait for ever. `file`: of this device, in a folder that this run alone uses."""

    def __init__(self, file: Path) -> None:
        self._path = file
        self._held: IO[str] | None = None

    def acquire(self) -> None:
        """Wait until the device is ours; it may be already. Raises OSError: the lock file cannot be
        opened, or somebody has put a link in its place."""
        if self._held is None:
            file = open_lock(self._path)
            fcntl.flock(file, fcntl.LOCK_EX)
            self._held = file

    def release(self) -> None:
        """Let another worker have the device."""
        if self._held is not None:
            self._held.close()
            self._held = None


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


def lock(worker: str, directory: Path, count: int) -> DeviceLock:
    """The lock that a worker's servers hold while they run. `directory`: of the whole run."""
    name = re.sub(r"[^A-Za-z0-9]", "_", of_worker(worker, count) or "cpu")
    return DeviceLock(directory / f".device-{name}.lock")
