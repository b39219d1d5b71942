"""What NVML says of the memory of all GPUs at one moment, and what a server holds in all."""

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import psutil

from sm121.core.architecture import opened_nvml
from sm121.evidence.resources import ServerMemory


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes. GB10's NVML answers "not supported" to some of it: None."""

    #: Of each GPU, whoever holds it.
    used: tuple[int, ...] | None
    #: What a process holds of a GPU, by GPU and pid; None where that is not shown.
    by_process: dict[tuple[int, int], int | None]
    #: Whether all kinds of processes were shown, as far as they are seen from here.
    all_kinds: bool
    #: What NVML said where it did not answer.
    refused: str | None = None

    def held(self, pids: Collection[int] | None = None) -> int | None:
        """What all processes, or those of `pids`, hold; None where not all of it is shown."""
        sizes = [
            size for (_gpu, pid), size in self.by_process.items() if pids is None or pid in pids
        ]
        if pids is None and not self.all_kinds:
            return None
        if None in sizes or (pids is not None and not sizes):
            return None
        return sum(size for size in sizes if size is not None)


def computing() -> dict[int, set[int]] | None:
    """Pids of the processes that compute on each GPU, by the GPU's index. What only draws, as a
    desktop does, is left out. None where NVML does not say."""
    import pynvml

    try:
        with opened_nvml():
            return {
                index: {
                    int(process.pid)
                    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(
                        pynvml.nvmlDeviceGetHandleByIndex(index)
                    )
                }
                for index in range(pynvml.nvmlDeviceGetCount())
            }
    except pynvml.NVMLError:
        return None


def read() -> DeviceMemory | None:
    """Ask NVML. None without a driver or a GPU."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError), opened_nvml():
        try:
            count = pynvml.nvmlDeviceGetCount()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            return _of(pynvml, handles) if handles else None
        except pynvml.NVMLError as error:
            return DeviceMemory(None, {}, False, str(error))
    return None  # no driver: no device memory to speak of


def _of(pynvml: Any, handles: list[Any]) -> DeviceMemory:
    used: tuple[int, ...] | None = None
    by_process: dict[tuple[int, int], int | None] = {}  # who draws and computes is counted once
    all_kinds, refused = True, None
    try:
        used = tuple(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    except pynvml.NVMLError as error:
        refused = str(error)
    for index, handle in enumerate(handles):
        for ask in (
            pynvml.nvmlDeviceGetComputeRunningProcesses,
            pynvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            try:
                processes = ask(handle)
            except pynvml.NVMLError as error:
                all_kinds, refused = False, str(error)
                continue
            for process in processes:
                used_bytes = process.usedGpuMemory
                if used_bytes is None:
                    by_process.setdefault((index, process.pid), None)
                else:
                    by_process[index, process.pid] = int(used_bytes)
    return DeviceMemory(used, by_process, all_kinds, refused)


class ServerMemoryReader:
    """Reads what a server holds. Made before the server is started: where no process's share of a
    GPU is told, what is in use since then is taken for the server's. `gpu`: whether the server
    computes on a GPU. Else its resident memory is all there is."""

    def __init__(self, *, gpu: bool) -> None:
        self._gpu = gpu
        self._available = psutil.virtual_memory().available
        before = read() if gpu else None
        self._used = before.used if before is not None else None
        self._by_process = False

    def read(self, pids: Collection[int], resident: int) -> ServerMemory:
        """Read it now: of a server's processes `pids` with `resident` bytes of memory together."""
        if not self._gpu:
            return ServerMemory(None, resident, "resident memory of the processes")
        memory = read()
        if memory is None:
            return ServerMemory(None, None, "not known: NVML finds no driver")
        own_bytes = memory.held(pids)
        if own_bytes is not None or self._by_process:  # else it is not on the GPU yet, or no more
            self._by_process = True
            total = None if own_bytes is None else resident + own_bytes
            return ServerMemory(
                own_bytes, total, "resident memory of the processes, and NVML by process"
            )
        if memory.used is not None and self._used is not None:
            more = max(0, sum(memory.used) - sum(self._used))
            source = (
                "resident memory of the processes, and what NVML shows in use on the GPU beyond "
                "what was before the server (it shows no process's share)"
            )
            return ServerMemory(more, resident + more, source)
        if memory.used is None and memory.refused is not None:  # GB10: one memory for both
            more = max(resident, self._available - psutil.virtual_memory().available)
            source = (
                "what less of the machine's memory is available than before the server: the GPU's "
                f"is the system's, and NVML shows no process's share ({memory.refused})"
            )
            return ServerMemory(None, more, source)
        return ServerMemory(None, None, "not known: NVML was not to be had before the server")
