"""What NVML says of the memory of all GPUs at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes. GB10's NVML answers "not supported" to some of it: None."""

    #: Of each GPU, whoever holds it.
    used: tuple[int, ...] | None
    #: What a process is shown to hold of a GPU, by GPU and pid.
    by_process: dict[tuple[int, int], int]
    #: Whether that is all that processes hold, as far as they are seen from here.
    complete: bool
    #: What NVML said where it did not answer.
    refused: str | None = None


def read() -> DeviceMemory | None:
    """Ask NVML. None without a driver or a GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver: no device memory to speak of
        return None
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return _of(pynvml, handles) if handles else None
    except pynvml.NVMLError as error:
        return DeviceMemory(None, {}, False, str(error))
    finally:
        pynvml.nvmlShutdown()


def _of(pynvml: Any, handles: list[Any]) -> DeviceMemory:
    used: tuple[int, ...] | None = None
    by_process: dict[tuple[int, int], int] = {}  # who draws and computes is counted once
    complete, refused = True, None
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
                complete, refused = False, str(error)
                continue
            for process in found:
                if process.usedGpuMemory is None:
                    complete = False
                else:
                    by_process[index, process.pid] = int(process.usedGpuMemory)
    return DeviceMemory(used, by_process, complete, refused)
