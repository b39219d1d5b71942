"""What NVML says of the memory of all GPUs at one moment."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sm121.core.architecture import opened_nvml


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
        """What processes hold together: of those pids, or all. None where not all of it is shown,
        or none of those pids is there."""
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
                found = ask(handle)
            except pynvml.NVMLError as error:
                all_kinds, refused = False, str(error)
                continue
            for process in found:
                shown = process.usedGpuMemory
                if shown is None:
                    by_process.setdefault((index, process.pid), None)
                else:
                    by_process[index, process.pid] = int(shown)
    return DeviceMemory(used, by_process, all_kinds, refused)
