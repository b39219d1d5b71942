"""Compare the memory of the machine before and after a server, to find memory that was not freed.

- Memory that a living process holds is not missing.
- Memory that is not free, and certainly held by no process, is missing.
- Memory that an invisible process may hold is not proven to be missing.
"""

import os
import re
import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path

from sm121.engines.device_memory import read_devices

#: The initial pid namespace (PROC_PID_INIT_INO of linux/proc_ns.h). A process in another namespace
#: cannot see all processes that hold a GPU's memory.
_OF_THE_MACHINE = "pid:[4026531836]"
_MEMINFO = Path("/proc/meminfo")
#: Since Linux 6.7, up to an eighth of the memory may stay in per-CPU lists for minutes after it was
#: freed. MemAvailable does not include it.
_ZONES = Path("/proc/zoneinfo")
#: Lines of /proc/meminfo that only living processes, huge pages and the balloon of a virtual
#: machine can raise. They count every process of the machine, also those of other containers.
_HELD = ("AnonPages", "KernelStack", "PageTables", "SecPageTables", "Hugetlb", "Balloon")
#: Files in memory, and locked pages. The kernel does not report their owners.
_SHARED = ("Shmem", "Unevictable")
#: A smaller loss is not reported, because the page cache and other processes change the available
#: memory, too.
_SLACK_BYTES = 1 << 30
#: Seconds between two readings while the suite waits for memory to be freed.
_LOOK_EVERY_S = 0.2
#: A loss below this share of the server's memory may be due to any process.
_LITTLE = 0.05


@dataclass(frozen=True)
class Returned:
    """The memory that was not freed after a stop. The default values mean that all was freed."""

    #: The memory that was not freed, in bytes, although no process holds it.
    missing_bytes: int = 0
    #: The memory that was not freed, in bytes, and that a process which the suite cannot see may
    #: hold.
    unproven_bytes: int = 0
    #: Which memory `unproven_bytes` is about, for messages.
    where: str = ""
    #: Whether this much memory may remain in use after a healthy stop. Such a loss is a fault only
    #: if it occurs after two stops in a row.
    usual: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all memory was freed: no memory is missing, and no memory may be missing."""
        return not (self.missing_bytes or self.unproven_bytes)

    def with_other(self, other: "Returned", name: str) -> "Returned":
        """Add the memory that another machine has not given back.

        Args:
            other: The memory of that machine.
            name: The name of that machine, for messages.

        Returns:
            The sum of the missing bytes of both machines, and the larger number of unproven bytes.
        """
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
            f"{self.where} is free than before the server started, and the suite cannot see "
            "which processes hold it"
        )


@dataclass(frozen=True)
class DeviceUse:
    """Memory of all GPUs, in bytes."""

    #: The memory in use. None if NVML does not report it, as on GB10, where CPU and GPU share the
    #: system's memory (`Memory.available`).
    used: int | None
    #: The part that living processes of all users hold. None if it is unknown.
    held: int | None


@dataclass(frozen=True)
class _Loss:
    """How much the free memory of the machine, or of its GPUs, decreased between two readings."""

    #: The memory that was not freed, in bytes, although no process holds it.
    missing: int
    #: The memory that was not freed, in bytes, and that a process which the suite cannot see may
    #: hold.
    unproven: int
    #: Which memory decreased, for messages.
    where: str


@dataclass(frozen=True)
class Memory:
    """A reading of the memory of the machine and of its GPUs, in bytes."""

    #: MemAvailable, plus the freed memory in the per-CPU lists.
    available: int
    #: Bytes held by living processes of all users and containers. None if the kernel does not
    #: report it.
    held: int | None
    #: Files in memory and locked pages of all processes.
    shared: int
    #: The memory of the GPUs; None if there is no GPU.
    device: DeviceUse | None

    @classmethod
    def now(cls) -> "Memory":
        """Read the memory of the machine and of its GPUs."""
        pairs = re.findall(r"^(\S+):\s+(\d+) kB$", _MEMINFO.read_text("ascii"), re.MULTILINE)
        lines = {name: int(kib) * 1024 for name, kib in pairs}
        held = None
        if _HELD[0] in lines:
            held = sum(lines.get(name, 0) for name in _HELD)
        shared = sum(lines.get(name, 0) for name in _SHARED)
        available = lines["MemAvailable"] + _waiting_in_zones()
        return cls(available, held, shared, _device_use())

    def returned(self, later: "Memory", at_work: "Memory | None" = None) -> "Returned":
        """Compare the memory after a stop with this reading, made before the start.

        Memory that living processes hold is not missing. Memory counts as missing only if it is not
        free although no process holds it. An example is unified memory that the driver keeps.

        Args:
            later: The memory after the stop.
            at_work: The memory just before the stop; None if the server had ended by itself.
        """
        losses = self._losses(later)
        missing = max(loss.missing for loss in losses)
        if missing > _SLACK_BYTES:
            return Returned(missing_bytes=missing)
        largest = max(losses, key=lambda loss: loss.unproven)
        if largest.unproven <= _SLACK_BYTES:
            return Returned()
        return Returned(
            unproven_bytes=largest.unproven,
            where=largest.where,
            usual=largest.unproven <= self._usual(later, at_work),
        )

    def returned_within(self, patience_s: float, at_work: "Memory | None" = None) -> "Returned":
        """Wait until all memory is freed, and return the part that was not freed in time.

        Args:
            patience_s: How long to wait, in seconds.
            at_work: The memory just before the stop; None if the server had ended by itself.
        """
        deadline = time.monotonic() + patience_s
        while True:
            returned = self.returned(Memory.now(), at_work)
            if returned.is_whole or time.monotonic() >= deadline:
                return returned
            time.sleep(_LOOK_EVERY_S)

    def _usual(self, later: "Memory", at_work: "Memory | None") -> int:
        """Return how many bytes may be missing after a healthy stop.

        The result is 0 if all processes that hold GPU memory are visible. Otherwise it allows for
        memory that the driver keeps after its first use, and for memory of other processes.
        """
        before = self.device
        after = later.device
        if before is None or after is None or None not in (before.held, after.held):
            return 0
        took = 0
        if at_work is not None and at_work.device is not None:
            took = self.available - at_work.available
            if before.used is not None and at_work.device.used is not None:
                took = at_work.device.used - before.used
        return max(2 * _SLACK_BYTES, int(took * _LITTLE))

    def _losses(self, later: "Memory") -> list[_Loss]:
        """Return the loss of the machine's memory, and that of separate GPU memory."""
        decrease = self.available - later.available
        decrease -= max(0, (later.held or 0) - (self.held or 0))
        is_known = self.held is not None and later.held is not None
        certain = decrease - max(0, later.shared - self.shared)
        system = _Loss(certain if is_known else 0, decrease, "memory of the machine")
        before = self.device
        after = later.device
        if before is None or after is None:
            return [system]
        is_shown = before.held is not None and after.held is not None
        on_device = max(0, (after.held or 0) - (before.held or 0)) if is_shown else 0
        if before.used is None or after.used is None:  # CPU and GPU share one memory
            missing = certain - on_device if is_known and is_shown else 0
            return [_Loss(missing, decrease - on_device, "device memory")]
        used = after.used - before.used - on_device
        return [system, _Loss(used if is_shown else 0, used, "device memory")]


def _waiting_in_zones() -> int:
    """Return the number of freed bytes in the per-CPU lists; 0 if the lists cannot be read."""
    if not os.access(_ZONES, os.R_OK):
        return 0
    counts = re.findall(r"^\s+count:\s+(\d+)$", _ZONES.read_text("ascii"), re.MULTILINE)
    return sum(map(int, counts)) * resource.getpagesize()


def _device_use() -> DeviceUse | None:
    reading = read_devices()
    if reading is None:
        return None
    used = sum(reading.used) if reading.used is not None else None
    held = reading.held() if _namespace() == _OF_THE_MACHINE else None
    return DeviceUse(used, held)


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())
