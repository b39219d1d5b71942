"""Memory of the machine's GPUs, read from the driver's NVML."""

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sm121.core.architecture import opened_nvml


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of all GPUs, in bytes.

    On a GB10, NVML reports some values as "not supported"; these are None.
    """

    #: The memory in use on each GPU, by all processes together.
    used: tuple[int, ...] | None
    #: For each GPU and pid, the GPU memory that the process holds; None if NVML does not report it.
    by_process: dict[tuple[int, int], int | None]
    #: Whether NVML reported both graphics and compute processes (those visible from this
    #: namespace).
    all_kinds: bool
    #: The error of NVML if a query failed.
    refused: str | None = None

    def held(self, pids: Collection[int] | None = None) -> int | None:
        """Return how many bytes the processes hold, or None if NVML does not report all of them.

        Args:
            pids: The processes; None for all.
        """
        sizes = []
        for (_gpu, pid), size in self.by_process.items():
            if pids is None or pid in pids:
                sizes.append(size)
        is_whole = self.all_kinds if pids is None else bool(sizes)
        if not is_whole or None in sizes:
            return None
        return sum(filter(None, sizes))


def read_computing_pids() -> dict[int, set[int]] | None:
    """Return the pids of the compute processes on each GPU; the keys are the GPUs' indices.

    Processes that only use graphics, such as those of a desktop, are left out.

    Returns:
        None if NVML does not report them.
    """
    import pynvml

    pids: dict[int, set[int]] = {}
    try:
        with opened_nvml():
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                pids[index] = {int(process.pid) for process in processes}
    except pynvml.NVMLError:
        return None
    return pids


def read_devices() -> DeviceMemory | None:
    """Read the memory of all GPUs; None without a driver or a GPU."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError), opened_nvml():
        try:
            count = pynvml.nvmlDeviceGetCount()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            return _read_handles(pynvml, handles) if handles else None
        except pynvml.NVMLError as error:
            return DeviceMemory(None, {}, False, str(error))
    return None  # without a driver there is no device memory


def _read_handles(pynvml: Any, handles: list[Any]) -> DeviceMemory:
    used: tuple[int, ...] | None = None
    # A process that uses both graphics and compute is counted once.
    by_process: dict[tuple[int, int], int | None] = {}
    all_kinds = True
    refused = None
    try:
        used = tuple(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    except pynvml.NVMLError as error:
        refused = str(error)
    for index, handle in enumerate(handles):
        for list_processes in (
            pynvml.nvmlDeviceGetComputeRunningProcesses,
            pynvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            try:
                processes = list_processes(handle)
            except pynvml.NVMLError as error:
                all_kinds = False
                refused = str(error)
                continue
            for process in processes:
                used_bytes = process.usedGpuMemory
                if used_bytes is None:
                    by_process.setdefault((index, process.pid), None)
                else:
                    by_process[index, process.pid] = int(used_bytes)
    return DeviceMemory(used, by_process, all_kinds, refused)
