"""Memory of the machine, before a server and after it."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Memory:
    """Memory at one moment, in bytes."""

    available: int
    #: Sum of what is resident in all processes.
    resident: int
    #: Free memory of the first GPU; None without one, and where NVML has no answer (GB10: its
    #: memory is the system's, so that ``available`` covers it).
    device_free: int | None

    @classmethod
    def now(cls) -> Memory:
        """Read it."""
        resident = 0
        for process in psutil.process_iter(["memory_info"]):
            info = process.info["memory_info"]
            resident += info.rss if info is not None else 0
        return cls(psutil.virtual_memory().available, resident, _device_free())

    def missing(self, later: Memory, *, slack: int) -> int:
        """What has not come back, beyond ``slack``; 0 when it has.

        System memory that is resident in living processes is theirs, and not missing: what counts
        is what nobody holds and yet is gone, as a driver keeps it on unified memory.
        """
        grown = max(0, later.resident - self.resident)
        losses = [(self.available - later.available) - grown]
        if self.device_free is not None and later.device_free is not None:
            losses.append(self.device_free - later.device_free)
        worst = max(losses)
        return worst if worst > slack else 0


def _device_free() -> int | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver: no device memory to speak of
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except pynvml.NVMLError:  # GB10 answers "not supported"
        return None
    finally:
        pynvml.nvmlShutdown()
