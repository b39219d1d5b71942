"""Memory of the machine, before a server and after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

#: The first of all namespaces (PROC_PID_INIT_INO of linux/proc_ns.h): from inside another one the
#: processes that hold a GPU's memory are not all to be seen.
_OF_THE_MACHINE = "pid:[4026531836]"


@dataclass(frozen=True)
class DeviceUse:
    """Memory of all GPUs, in bytes."""

    #: None where NVML has no answer. GB10's memory is the system's: `Memory.available` covers it.
    used: int | None
    #: What living processes hold of it, whoever they are. None where that cannot be known.
    held: int | None


@dataclass(frozen=True)
class Memory:
    """Memory at one moment, in bytes."""

    available: int
    #: Sum of what is resident in all processes.
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
        """Bytes that are gone, and whether it is known that nobody holds them."""
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
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver: no device memory to speak of
        return None
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return DeviceUse(_used(pynvml, handles), _held(pynvml, handles)) if handles else None
    except pynvml.NVMLError:
        return DeviceUse(None, None)
    finally:
        pynvml.nvmlShutdown()


def _used(pynvml: Any, handles: list[Any]) -> int | None:
    try:
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    except pynvml.NVMLError:  # GB10 answers "not supported"
        return None


def _held(pynvml: Any, handles: list[Any]) -> int | None:
    if _namespace() != _OF_THE_MACHINE:
        return None
    held: dict[tuple[int, int], int] = {}  # a process may draw and compute: it is counted once
    for index, handle in enumerate(handles):
        for ask in (
            pynvml.nvmlDeviceGetComputeRunningProcesses,
            pynvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            try:
                found = ask(handle)
            except pynvml.NVMLError:
                return None
            for process in found:
                if process.usedGpuMemory is None:
                    return None
                held[index, process.pid] = int(process.usedGpuMemory)
    return sum(held.values())


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())
