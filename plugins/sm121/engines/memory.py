"""Memory of the machine, before a server and after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from sm121.engines import device_memory

#: The first of all namespaces (PROC_PID_INIT_INO of linux/proc_ns.h): from inside another one the
#: processes that hold a GPU's memory are not all to be seen.
_OF_THE_MACHINE = "pid:[4026531836]"


@dataclass(frozen=True)
class DeviceUse:
    """Memory of all GPUs, in bytes."""

    #: None where NVML has no answer. GB10's memory is the system's: `Memory.available` covers it.
    used: int | None
    #: What living processes hold of it, of any user. None where that cannot be known.
    held: int | None


@dataclass(frozen=True)
class Memory:
    """Memory at one moment, in bytes."""

    available: int
    #: Sum of the resident sizes of all processes.
    resident: int
    #: None without a GPU.
    device: DeviceUse | None

    @classmethod
    def now(cls) -> Memory:
        """Read it."""
        resident = 0
        for process in psutil.process_iter(["memory_info"]):
            info = process.info["memory_info"]
            resident += info.rss if info is not None else 0
        return cls(psutil.virtual_memory().available, resident, _device_use())

    def missing(self, later: Memory, *, slack: int) -> int:
        """What has certainly not come back, beyond ``slack``; 0 when it has.

        Memory that living processes hold is theirs, and not missing: what counts is what nobody
        holds and yet is gone, as a driver keeps it on unified memory.
        """
        worst = max((lost for lost, certain in self._losses(later) if certain), default=0)
        return worst if worst > slack else 0

    def doubt(self, later: Memory, *, slack: int) -> str | None:
        """What may not have come back, or may be held by a process that is not seen from here."""
        worst = max((lost for lost, certain in self._losses(later) if not certain), default=0)
        if worst <= slack:
            return None
        return (
            f"{worst / 2**30:.1f} GiB less device memory is free than before the server; whether "
            "other processes hold it cannot be known here (their share is not shown to this one)"
        )

    def _losses(self, later: Memory) -> list[tuple[int, bool]]:
        """Bytes that are gone, each with whether it is certain that no process holds them."""
        system = (self.available - later.available) - max(0, later.resident - self.resident)
        before, after = self.device, later.device
        if before is None or after is None:
            return [(system, True)]
        known = before.held is not None and after.held is not None
        held = max(0, (after.held or 0) - (before.held or 0)) if known else 0
        if before.used is None or after.used is None:  # unified: what a device holds is in no RSS
            return [(system - held, known)]
        return [(system, True), (after.used - before.used - held, known)]


def _device_use() -> DeviceUse | None:
    seen = device_memory.read()
    if seen is None:
        return None
    held = seen.held() if _namespace() == _OF_THE_MACHINE else None
    return DeviceUse(sum(seen.used) if seen.used is not None else None, held)


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())
