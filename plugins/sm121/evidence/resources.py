"""Sample the resources that a server's process tree uses during a run."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import psutil
from pydantic import BaseModel

#: The number of samples that are kept. They cover two hours at the default interval.
_KEPT_SAMPLES = 3600


class Resources(BaseModel):
    """The peaks over all samples. They are null before the first sample."""

    samples: int = 0
    interval_s: float
    tree_rss_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    """The peak of the GPU memory; null if there is no GPU, or if the server's share is unknown."""
    memory_peak_bytes: int | None = None
    """The peak of the sum of host and GPU memory; null if one of them is unknown."""
    memory_source: str | None = None
    """How the memory was determined, or the reason why it is unknown."""
    mem_available_min_bytes: int | None = None
    cpu_percent_peak: float | None = None
    cpu_seconds: float | None = None


@dataclass(frozen=True)
class ServerMemory:
    """The memory that a server uses at one point in time, in bytes; None if it is unknown.

    Attributes:
        device: The GPU memory. This is also None if the GPU shares the system's memory and the
            driver does not report the memory of each process.
        total: The memory of the host and the GPUs together.
        source: How these values were determined, or the reason why they are unknown.
    """

    device: int | None
    total: int | None
    source: str


class MemorySample(NamedTuple):
    """The memory at one point in time.

    Attributes:
        at_s: The time, by ``time.monotonic``.
        rss_bytes: The resident memory of the process tree, in bytes.
        available_bytes: The available memory of the machine, in bytes.
    """

    at_s: float
    rss_bytes: int
    available_bytes: int


@dataclass
class _TreeUse:
    """The resources of a process tree at one point in time."""

    rss_bytes: int
    #: The CPU time of each process since its start, in seconds; the keys are pids.
    cpu_s: dict[int, float]


class ResourceSampler(threading.Thread):
    """Samples a changing set of processes until it is stopped.

    Args:
        processes: Returns the processes.
        held: Returns the memory that a server uses, given the pids and the resident bytes of its
            processes. If None, only resident memory is sampled.
        interval_s: The time between two samples, in seconds.
        floor_bytes: The memory that must at least be available, in bytes.
        nodes: Returns the available bytes of each other node; the keys are the nodes' names.
        on_floor: Called at each sample with less available memory than `floor_bytes`, on this
            machine or on another node.
        on_trouble: Called once, at the first sample that could not be taken.

    Attributes:
        resources: The peaks so far.
        history: The last memory samples.
    """

    def __init__(
        self,
        processes: Callable[[], Iterable[psutil.Process]],
        *,
        held: Callable[[Collection[int], int], ServerMemory] | None = None,
        interval_s: float = 2.0,
        floor_bytes: float = 0.0,
        nodes: Callable[[], Mapping[str, int]] = dict,
        on_floor: Callable[[str], None] = lambda _text: None,
        on_trouble: Callable[[str], None] = lambda _text: None,
    ) -> None:
        super().__init__(name="sm121-resources", daemon=True)
        self._processes = processes
        self._read_memory = held
        self._ended = threading.Event()
        self._previous_cpu_s: dict[int, float] = {}
        self.resources = Resources(interval_s=interval_s)
        self._floor_bytes = floor_bytes
        self._nodes = nodes
        self._on_floor = on_floor
        self._on_trouble = on_trouble
        self._trouble_reported = False
        self.history: deque[MemorySample] = deque(maxlen=_KEPT_SAMPLES)

    def run(self) -> None:
        """Sample until `stop` is called."""
        while not self._ended.wait(self.resources.interval_s):
            try:
                self.sample()
            except Exception as error:  # noqa: BLE001 - the next sample checks the floor again
                if not self._trouble_reported:
                    self._trouble_reported = True
                    self._on_trouble(
                        "the memory of the server's processes was not sampled all of the time "
                        f"({type(error).__name__}: {error})"
                    )

    def sample(self) -> None:
        """Take one sample. The available memory is checked even if no server runs."""
        available = psutil.virtual_memory().available
        self._check_floor("", available)
        for node, size in self._nodes().items():
            self._check_floor(f"{node}: ", size)
        use = self._read_use()
        if not use.cpu_s:
            return
        totals = self.resources
        self.history.append(MemorySample(round(time.monotonic(), 2), use.rss_bytes, available))
        totals.tree_rss_peak_bytes = max(use.rss_bytes, totals.tree_rss_peak_bytes or 0)
        if self._read_memory is not None:
            self._add_memory(self._read_memory(set(use.cpu_s), use.rss_bytes))
        totals.mem_available_min_bytes = min(available, totals.mem_available_min_bytes or available)
        self._add_cpu(use.cpu_s)
        totals.samples += 1

    def _check_floor(self, where: str, available: int) -> None:
        if available < self._floor_bytes:
            self._on_floor(
                f"{where}MemAvailable: expected at least {self._floor_bytes / 2**30:.2f} GiB, got "
                f"{available / 2**30:.2f} GiB: the suite ends the run before the machine "
                "freezes"
            )

    def _read_use(self) -> _TreeUse:
        use = _TreeUse(rss_bytes=0, cpu_s={})
        for process in self._processes():
            try:
                with process.oneshot():
                    rss_bytes = process.memory_info().rss
                    times = process.cpu_times()
            except (psutil.Error, OSError):
                continue  # the process has ended, or belongs to another user
            use.rss_bytes += rss_bytes
            use.cpu_s[process.pid] = times.user + times.system
        return use

    def _add_memory(self, memory: ServerMemory) -> None:
        totals = self.resources
        if memory.source != totals.memory_source:
            # Peaks that were determined in different ways are not comparable.
            totals.device_peak_bytes = None
            totals.memory_peak_bytes = None
            totals.memory_source = memory.source
        if memory.device is not None:
            totals.device_peak_bytes = max(memory.device, totals.device_peak_bytes or 0)
        if memory.total is not None:
            totals.memory_peak_bytes = max(memory.total, totals.memory_peak_bytes or 0)

    def _add_cpu(self, cpu_s: dict[int, float]) -> None:
        """Add the CPU time since the last sample."""
        totals = self.resources
        used_s = 0.0
        for pid, seconds in cpu_s.items():
            used_s += seconds - self._previous_cpu_s.get(pid, 0.0)
        if self._previous_cpu_s:
            percent = round(100.0 * used_s / totals.interval_s, 1)
            totals.cpu_percent_peak = max(percent, totals.cpu_percent_peak or 0.0)
        totals.cpu_seconds = round((totals.cpu_seconds or 0.0) + used_s, 2)
        self._previous_cpu_s = cpu_s

    def stop(self) -> None:
        """Stop sampling."""
        self._ended.set()
