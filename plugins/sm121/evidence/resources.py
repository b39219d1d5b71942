"""What a server's process tree used, sampled beside the run."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import psutil
from pydantic import BaseModel


class Resources(BaseModel):
    """Peaks over all samples. Null before the first sample."""

    samples: int = 0
    interval_s: float
    tree_rss_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    """Of the GPUs' memory; null without a GPU, and where nothing says what the server holds."""
    memory_peak_bytes: int | None = None
    """Of the host's and the GPUs' memory together; null where one of them is not known."""
    memory_source: str | None = None
    """How the last of these was known, or why it is not."""
    mem_available_min_bytes: int | None = None
    cpu_percent_peak: float | None = None
    cpu_seconds: float | None = None


@dataclass(frozen=True)
class ServerMemory:
    """What a server holds at one moment, in bytes. None where it is not known."""

    #: Of the GPUs. None also where the GPU's memory is the system's and no process's share is told.
    device: int | None
    #: Of the host and the GPUs together.
    total: int | None
    #: How that is known.
    source: str


class ResourceSampler(threading.Thread):
    """Samples a changing set of ``processes`` until it is stopped. ``held``: what processes of
    these pids, with so many resident bytes, hold of all memory. ``on_floor``: called at each sample
    with less than ``floor_bytes`` available, here or on another node (``nodes``: bytes by its
    name). ``on_trouble``: called once, when a sample could not be taken."""

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
        self._previous: dict[int, float] = {}
        self.resources = Resources(interval_s=interval_s)
        self._floor, self._nodes = floor_bytes, nodes
        self._on_floor = on_floor
        self._on_trouble = on_trouble
        self._trouble_reported = False
        #: The last ones, as (time.monotonic, resident bytes, bytes available).
        self.history: deque[tuple[float, int, int]] = deque(maxlen=3600)

    def run(self) -> None:
        while not self._ended.wait(self.resources.interval_s):
            try:
                self.sample()
            except Exception as error:  # noqa: BLE001 - the next sample looks at the floor again
                if not self._trouble_reported:
                    self._trouble_reported = True
                    self._on_trouble(
                        "the memory of the server's processes was not sampled all of the time "
                        f"({type(error).__name__}: {error})"
                    )

    def sample(self) -> None:
        """Take one sample; the floor counts whether or not a server runs."""
        available = psutil.virtual_memory().available
        elsewhere = {f"{node}: ": size for node, size in self._nodes().items()}
        for where, size in {"": available, **elsewhere}.items():
            if size < self._floor:
                self._on_floor(
                    f"{where}MemAvailable is {size / 2**30:.2f} GiB, required at least "
                    f"{self._floor / 2**30:.2f} GiB: the run is ended before the machine wedges"
                )
        rss, used_s, times = 0, 0.0, {}
        for process in self._processes():
            try:
                with process.oneshot():
                    rss += process.memory_info().rss
                    cpu = process.cpu_times()
            except (psutil.Error, OSError):
                continue  # it has ended, or is not ours to read
            times[process.pid] = cpu.user + cpu.system
            used_s += times[process.pid] - self._previous.get(process.pid, 0.0)
        if not times:
            return
        totals = self.resources
        self.history.append((round(time.monotonic(), 2), rss, available))
        totals.tree_rss_peak_bytes = max(rss, totals.tree_rss_peak_bytes or 0)
        if self._read_memory is not None:
            memory = self._read_memory(set(times), rss)
            if memory.source != totals.memory_source:  # peaks are of one way to know it
                totals.device_peak_bytes = totals.memory_peak_bytes = None
                totals.memory_source = memory.source
            if memory.device is not None:
                totals.device_peak_bytes = max(memory.device, totals.device_peak_bytes or 0)
            if memory.total is not None:
                totals.memory_peak_bytes = max(memory.total, totals.memory_peak_bytes or 0)
        totals.mem_available_min_bytes = min(available, totals.mem_available_min_bytes or available)
        if self._previous:
            percent = round(100.0 * used_s / totals.interval_s, 1)
            totals.cpu_percent_peak = max(percent, totals.cpu_percent_peak or 0.0)
        totals.cpu_seconds = round((totals.cpu_seconds or 0.0) + used_s, 2)
        totals.samples += 1
        self._previous = times

    def stop(self) -> None:
        """Take no more samples."""
        self._ended.set()
