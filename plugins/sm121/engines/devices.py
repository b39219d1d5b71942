"""One device a worker, and one server a device, when several processes run the suite at once."""

from __future__ import annotations

import fcntl
import getpass
import os
import re
import tempfile
from pathlib import Path
from typing import IO

_VARIABLE = "CUDA_VISIBLE_DEVICES"


class DeviceLock:
    """Held from a server's start to its end: no other worker's server runs on the device then, so
    that none of them is measured beside another."""

    def __init__(self, name: str) -> None:
        safe = re.sub(r"[^A-Za-z0-9]", "_", name)
        self._path = Path(tempfile.gettempdir()) / f"sm121-{getpass.getuser()}-device-{safe}.lock"
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Wait until the device is ours; it may be already."""
        if self._file is None:
            file = self._path.open("w")
            fcntl.flock(file, fcntl.LOCK_EX)
            self._file = file

    def release(self) -> None:
        """Let others have it."""
        if self._file is not None:
            self._file.close()
            self._file = None


def of_worker(worker: str | None, count: int) -> str | None:
    """The device of one of pytest-xdist's workers (``gw3``); None without workers or GPUs.

    ``CUDA_VISIBLE_DEVICES`` names the devices that there are, else they are counted from 0.
    """
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


def lock(worker: str | None, count: int) -> DeviceLock | None:
    """What a worker's servers hold; None where nobody else runs."""
    if worker is None:
        return None
    return DeviceLock(of_worker(worker, count) or "cpu")
