"""Samples of a server's memory, one a second: processes, device, machine, KV cache."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from sm121.core.server import Endpoint
from sm121.engines import device_memory
from sm121.measure import counters

#: Seconds between samples.
_EVERY_S = 1.0
#: Most samples. Beyond them the older half loses every second one.
_MOST_SAMPLES = 24 * 3600


@dataclass(frozen=True)
class Sample:
    """One sample. Values that could not be read are None."""

    at_s: float
    #: Requests that had ended by then.
    completed: int
    processes: int
    rss_bytes: int
    #: Shared pages counted by their share; the better sum over a tree.
    pss_bytes: int | None
    handles: int | None
    device_bytes: int | None
    available_bytes: int
    cache_usage: float | None
    running: float | None
    waiting: float | None


@dataclass
class ServerDeviceMemory:
    """The device memory of a server's processes, and its source."""

    #: Where the last value was read, or why there is none.
    source: str = "not asked yet"

    def used(self, pids: set[int]) -> int | None:
        """Return the bytes of device memory that processes hold.

        NVML of GB10 returns N/A: its memory is the system's, and MemAvailable covers it.

        Args:
            pids: The processes.

        Returns:
            Bytes; None if no source has them.
        """
        reading = device_memory.read_devices()
        if reading is None:
            self.source = "no NVIDIA driver: the memory of the processes is all there is"
            return None
        by_process = reading.held(pids)
        if by_process is not None:
            self.source = "NVML, by process"
            return by_process
        if reading.used is None:
            self.source = (
                "MemAvailable: NVML has no answer, so device memory is the system's "
                f"({reading.refused})"
            )
            return None
        if len(reading.used) > 1:
            count = len(reading.used)
            self.source = f"NVML shows {count} GPUs, and not which of their memory is the server's"
            return None
        # In a container the pids are other ones. Others may hold some of it.
        self.source = "NVML, of the whole GPU"
        return reading.used[0]


@dataclass(eq=False, repr=False)
class Timeline(threading.Thread):
    """A thread that samples a server until it is stopped.

    Attributes:
        processes: Returns the server's processes at each sample.
        endpoint: The server, whose /metrics are read.
        completed: Returns how many requests have ended.
        floor_bytes: The available memory below which ``on_floor`` is called, once.
        on_floor: Called with a line about the memory.
    """

    processes: Callable[[], Iterable[psutil.Process]]
    endpoint: Endpoint
    completed: Callable[[], int]
    floor_bytes: float
    on_floor: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    device: ServerDeviceMemory = field(default_factory=ServerDeviceMemory)
    samples: list[Sample] = field(default_factory=list)
    #: The server's /metrics as they were last read.
    metrics: str | None = None

    def __post_init__(self) -> None:
        super().__init__(name="sm121-memory", daemon=True)
        self._ended = threading.Event()

    def run(self) -> None:
        """Sample once a second until `stop` is called."""
        with self.endpoint.http(timeout_s=2.0) as http:
            while not self._ended.wait(_EVERY_S):
                self.sample(http)

    def sample(self, http: httpx.Client) -> None:
        """Take one sample.

        Args:
            http: The client that reads /metrics.
        """
        available = psutil.virtual_memory().available
        if available < self.floor_bytes:
            floor = self.floor_bytes
            self.floor_bytes = 0.0
            self.on_floor(
                f"MemAvailable is {available / 2**30:.2f} GiB, required at least "
                f"{floor / 2**30:.2f} GiB: the run is ended before the machine wedges"
            )
        rss = 0
        pss = 0
        handles = 0
        pids = set()
        for process in self.processes():
            try:
                rss += process.memory_info().rss
                rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text("ascii").splitlines()
                for line in rollup:
                    if line.startswith("Pss:"):
                        pss += 1024 * int(line.split()[1])
                handles += process.num_fds() + process.num_threads()
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
            pids.add(process.pid)
        metrics = self._read_metrics(http)
        sample = Sample(
            at_s=round(time.monotonic() - self.began, 2),
            completed=self.completed(),
            processes=len(pids),
            rss_bytes=rss,
            pss_bytes=pss or None,
            handles=handles or None,
            device_bytes=self.device.used(pids),
            available_bytes=available,
            cache_usage=metrics.get("cache_usage"),
            running=metrics.get("running"),
            waiting=metrics.get("waiting"),
        )
        self.samples.append(sample)
        if len(self.samples) > _MOST_SAMPLES:
            half = len(self.samples) // 2
            self.samples[:half] = self.samples[:half:2]

    def _read_metrics(self, http: httpx.Client) -> dict[str, float]:
        try:
            answer = http.get("/metrics")
            if answer.status_code != 200:
                return {}
            values = counters.read(answer.text).values
        except (httpx.HTTPError, ValueError):
            return {}
        self.metrics = answer.text
        return values

    def stop(self) -> None:
        """Take no more samples."""
        self._ended.set()
        if self.is_alive():
            self.join(timeout=10.0)

    def since(self, index: int) -> list[Sample]:
        """Return the samples from an index on that have a process of the server."""
        return [sample for sample in self.samples[index:] if sample.processes]

    def record(self) -> dict[str, Any]:
        """Return memory.json without the growth."""
        return {
            "every_s": _EVERY_S,
            "device_memory": self.device.source,
            "samples": [asdict(sample) for sample in self.samples],
        }
