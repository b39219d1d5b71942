"""How much memory a server holds while it runs, of the host and of its GPUs."""

from collections.abc import Collection

import psutil

from sm121.engines.device_memory import read_devices
from sm121.evidence.resources import ServerMemory

_RESIDENT = "resident memory of the processes"


class ServerMemoryReader:
    """Reads how much memory a server holds.

    It must be made before the server is started: if NVML shows no process's share of a GPU, all
    memory that came into use since then counts as the server's.

    Args:
        gpu: Whether the server computes on a GPU. Otherwise its resident memory is all it holds.
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
            resident: Their resident memory together, in bytes.
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
            # None: the server is not on the GPU yet, or no longer.
            total = None if own_bytes is None else resident + own_bytes
            return ServerMemory(own_bytes, total, f"{_RESIDENT}, and NVML by process")
        if memory.used is not None and self._used is not None:
            more = max(0, sum(memory.used) - sum(self._used))
            source = (
                f"{_RESIDENT}, and the GPU memory in use by NVML minus the use before the server "
                "(NVML does not report memory by process)"
            )
            return ServerMemory(more, resident + more, source)
        if memory.used is None and memory.refused is not None:  # GB10: one memory for both
            more = max(resident, self._available - psutil.virtual_memory().available)
            source = (
                "the decrease of the machine's available memory since before the server: GPU "
                "and host share the memory, and NVML does not report it by process "
                f"({memory.refused})"
            )
            return ServerMemory(None, more, source)
        return ServerMemory(
            None, None, ("not known: NVML was not available before the server started")
        )
