"""Memory of the machine and of its GPUs, before a server and after it: what has not come back, and
who holds it. What a living process holds is its own. What is certainly held by nobody and yet gone
is missing. What may be held by a process that cannot be seen from here is not proven."""

import contextlib
import os
import re
import resource
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from sm121.core.architecture import opened_nvml
from sm121.evidence.resources import ServerMemory

#: The first of all namespaces (PROC_PID_INIT_INO of linux/proc_ns.h): from inside another one the
#: processes that hold a GPU's memory are not all to be seen.
_OF_THE_MACHINE = "pid:[4026531836]"
_MEMINFO = Path("/proc/meminfo")
#: Since Linux 6.7 up to an eighth of the memory waits in lists of each CPU after it was freed, for
#: minutes, and is not in MemAvailable.
_ZONES = Path("/proc/zoneinfo")
#: Lines of /proc/meminfo that only living processes, huge pages and the balloon of a virtual
#: machine can raise. They count every process of the machine, also those of other containers.
_HELD = ("AnonPages", "KernelStack", "PageTables", "SecPageTables", "Hugetlb", "Balloon")
#: The page cache and other processes change what is available. Less than this is not missed.
_SLACK_BYTES = 1 << 30
#: Of what a server held: less than this may be anybody's.
_LITTLE = 0.05
#: Files in memory, and pages that are locked there. The kernel does not say whose they are.
_SHARED = ("Shmem", "Unevictable")


@dataclass(frozen=True)
class Returned:
    """What of the memory is free again after a stop; without fields, all of it."""

    #: Gone, and certainly held by nobody.
    missing_bytes: int = 0
    #: Gone, and not proven to be held by somebody or by nobody.
    unproven_bytes: int = 0
    #: Which memory is not proven.
    where: str = ""
    #: Whether a healthy stop may seem to leave so much, as long as the next one does not.
    usual: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing or unproven."""
        return not (self.missing_bytes or self.unproven_bytes)

    def with_other(self, other: "Returned", name: str) -> "Returned":
        """Return this with what another machine of that name has not given back."""
        missing = self.missing_bytes + other.missing_bytes
        if other.unproven_bytes <= self.unproven_bytes:
            return replace(self, missing_bytes=missing)
        where = f"{other.where} of {name}"
        return replace(other, missing_bytes=missing, where=where)

    def __str__(self) -> str:
        if not self.unproven_bytes:
            return f"{self.missing_bytes / 2**30:.1f} GiB of memory are missing"
        return (
            f"not proven that all memory came back: {self.unproven_bytes / 2**30:.1f} GiB less "
            f"{self.where} is free than before the server, and the processes that may hold it "
            "cannot be seen"
        )


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

    #: MemAvailable, and what was freed and waits in lists of a CPU.
    available: int
    #: What living processes hold, of any user and container. None where the kernel does not say.
    held: int | None
    #: Files in memory and locked pages, whoever made them.
    shared: int
    #: None without a GPU.
    device: DeviceUse | None

    @classmethod
    def now(cls) -> "Memory":
        """Read it."""
        pairs = re.findall(r"^(\S+):\s+(\d+) kB$", _MEMINFO.read_text("ascii"), re.MULTILINE)
        lines = {name: int(kib) * 1024 for name, kib in pairs}
        in_use = sum(lines.get(name, 0) for name in _HELD) if _HELD[0] in lines else None
        shared = sum(lines.get(name, 0) for name in _SHARED)
        waiting = 0
        if os.access(_ZONES, os.R_OK):
            counts = re.findall(r"^\s+count:\s+(\d+)$", _ZONES.read_text("ascii"), re.MULTILINE)
            waiting = sum(map(int, counts)) * resource.getpagesize()
        return cls(lines["MemAvailable"] + waiting, in_use, shared, _device_use())

    def returned(self, later: "Memory", at_work: "Memory | None" = None) -> "Returned":
        """Compare the memory after a stop with this reading, made before the start.

        Memory that living processes hold is theirs, and not missing: what counts is what nobody
        holds and yet is gone, as a driver keeps it on unified memory.

        Args:
            later: after the stop.
            at_work: just before the stop; None if the server had ended by itself.
        """
        losses = self._losses(later)
        lost = max(lost for lost, _unseen, _where in losses)
        if lost > _SLACK_BYTES:
            return Returned(missing_bytes=lost)
        unseen, where = max((unseen, where) for _lost, unseen, where in losses)
        if unseen <= _SLACK_BYTES:
            return Returned()
        return Returned(
            unproven_bytes=unseen,
            where=where,
            usual=unseen <= self._usual(later, at_work),
        )

    def _usual(self, later: "Memory", at_work: "Memory | None") -> int:
        """Return how many bytes a healthy stop may seem to leave, in bytes.

        It is 0 unless the holders of a GPU's memory cannot be seen from here. There a driver keeps
        some after its first use, and others live on the machine.
        """
        before, after = self.device, later.device
        if before is None or after is None or None not in (before.held, after.held):
            return 0
        took = 0
        if at_work is not None and at_work.device is not None:
            took = self.available - at_work.available
            if before.used is not None and at_work.device.used is not None:
                took = at_work.device.used - before.used
        return max(2 * _SLACK_BYTES, int(took * _LITTLE))

    def _losses(self, later: "Memory") -> list[tuple[int, int, str]]:
        """Of each memory: bytes that are gone and held by nobody for certain, bytes that are gone
        and not known to be held by anybody, and the memory's name."""
        decrease = self.available - later.available
        decrease -= max(0, (later.held or 0) - (self.held or 0))
        certain = decrease - max(0, later.shared - self.shared)
        system = "memory of the machine"
        is_known = self.held is not None and later.held is not None
        before, after = self.device, later.device
        if before is None or after is None:
            return [(certain if is_known else 0, decrease, system)]
        is_shown = before.held is not None and after.held is not None
        on_device = max(0, (after.held or 0) - (before.held or 0)) if is_shown else 0
        device = "device memory"
        if before.used is None or after.used is None:  # unified: a device's holders hold the system
            lost = certain - on_device if is_known and is_shown else 0
            return [(lost, decrease - on_device, device)]
        used = after.used - before.used - on_device
        of_system = (certain if is_known else 0, decrease, system)
        return [of_system, (used if is_shown else 0, used, device)]


def _device_use() -> DeviceUse | None:
    reading = read_devices()
    if reading is None:
        return None
    in_use = reading.held() if _namespace() == _OF_THE_MACHINE else None
    return DeviceUse(sum(reading.used) if reading.used is not None else None, in_use)


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


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
        is_whole = self.all_kinds if pids is None else bool(sizes)
        return sum(filter(None, sizes)) if is_whole and None not in sizes else None


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


def read_devices() -> DeviceMemory | None:
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
        before = read_devices() if gpu else None
        self._used = before.used if before is not None else None
        self._by_process = False

    def read(self, pids: Collection[int], resident: int) -> ServerMemory:
        """Read it now: of a server's processes `pids` with `resident` bytes of memory together."""
        if not self._gpu:
            return ServerMemory(None, resident, "resident memory of the processes")
        memory = read_devices()
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
