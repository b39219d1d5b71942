"""Read how much host and GPU memory a server holds while it runs."""

from collections.abc import Collection

import psutil

from sm121.engines.device_memory import read_devices
from sm121.evidence.resources import ServerMemory

_RESIDENT = "resident memory of the processes"


class ServerMemoryReader:
    """Reads how much memory a server holds.

    Create the reader before the server is started. If NVML does not report the GPU memory of each
    process, all GPU memory that came into use since then counts as the server's.

    Args:
        gpu: Whether the server computes on a GPU. If not, the server holds only its resident
            memory.
    """

    def __init__(self, *, gpu: bool) -> None:
        self._gpu = gpu
        self._available = psutil.virtual_memory().available
        before = read_devices() if gpu else None
        self._used = before.used if before is not None else None
        self._by_process = False

    def read(self, pids: Collection[int], resident: int) -> ServerMemory:
        """Read how much the server holds now.

        Args:
            pids: The server's processes.
            resident: The sum of the processes' resident memory, in bytes.
        """
        if not self._gpu:
            return ServerMemory(None, resident, _RESIDENT)
        memory = read_devices()
        if memory is None:
            return ServerMemory(None, None, "not known: NVML finds no driver")
        own_bytes = memory.held(pids)
        if own_bytes is not None:
            self._by_process = True
        if self._by_process:
            # None means that the server does not use the GPU yet, or no longer.
            total = None if own_bytes is None else resident + own_bytes
            return ServerMemory(own_bytes, total, f"{_RESIDENT}, plus their GPU memory (NVML)")
        if memory.used is not None and self._used is not None:
            more = max(0, sum(memory.used) - sum(self._used))
            source = (
                f"{_RESIDENT}, plus the increase of the used GPU memory since before the server "
                "started (NVML does not report memory by process)"
            )
            return ServerMemory(more, resident + more, source)
        if memory.used is None and memory.refused is not None:  # GB10: CPU and GPU share the memory
            more = max(resident, self._available - psutil.virtual_memory().available)
            source = (
                "the decrease of the machine's available memory since before the server started: "
                "GPU and host share the memory, and NVML does not report it by process "
                f"({memory.refused})"
            )
            return ServerMemory(None, more, source)
        return ServerMemory(
            None, None, ("not known: NVML was not available before the server started")
        )
