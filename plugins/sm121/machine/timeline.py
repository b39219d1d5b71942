"""Sample a server's memory once per second: processes, device, machine, KV cache."""

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

#: The time between samples, in seconds.
_EVERY_S = 1.0
#: The maximum number of samples. If it is exceeded, every second sample of the older half is
#: dropped.
_MOST_SAMPLES = 24 * 3600


@dataclass(frozen=True)
class TimelineSample:
    """One sample. Values that could not be read are None."""

    at_s: float
    #: The number of requests that had ended.
    completed: int
    processes: int
    rss_bytes: int
    #: The proportional set size: shared pages are divided between the processes that share them.
    pss_bytes: int | None
    handles: int | None
    device_bytes: int | None
    available_bytes: int
    cache_usage: float | None
    running: float | None
    waiting: float | None
    #: The memory that only the server's own processes can change. It is like `pss_bytes`, but pages
    #: of files count in full, because other programs that start or end change the server's share of
    #: a library.
    held_bytes: int | None = None


@dataclass
class ServerDeviceMemory:
    """The device memory of a server's processes, and how it was determined."""

    #: The source of the last value, or the reason why there is none.
    source: str = "not read yet"

    def used(self, pids: set[int]) -> int | None:
        """Return the device memory that processes use, in bytes.

        On a GB10, NVML returns N/A: device memory is system memory, which MemAvailable covers.

        Args:
            pids: The processes.

        Returns:
            The bytes; None if they are unknown.
        """
        reading = device_memory.read_devices()
        if reading is None:
            self.source = "no NVIDIA driver: the server only has the memory of its processes"
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
            self.source = (
                f"NVML shows {count} GPUs, but not how much of their memory the server uses"
            )
            return None
        # In a container, NVML's pids differ, so the value is that of the whole GPU. Other processes
        # may use some of this memory.
        self.source = "NVML, of the whole GPU"
        return reading.used[0]


@dataclass(eq=False, repr=False)
class Timeline(threading.Thread):
    """A thread that samples a server until it is stopped.

    Attributes:
        processes: Returns the server's processes; called for each sample.
        endpoint: The server, whose /metrics are read.
        completed: Returns the number of requests that have ended.
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
    samples: list[TimelineSample] = field(default_factory=list)
    #: The last answer of the server's /metrics.
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
                f"MemAvailable: expected at least {floor / 2**30:.2f} GiB, got "
                f"{available / 2**30:.2f} GiB: the suite ends the run before the machine freezes"
            )
        rss = 0
        pss = 0
        held = 0
        handles = 0
        pids = set()
        for process in self.processes():
            try:
                rss += process.memory_info().rss
                rollup = _bytes_in(Path(f"/proc/{process.pid}/smaps_rollup"))
                status = _bytes_in(Path(f"/proc/{process.pid}/status"))
                pss += rollup.get("Pss", 0)
                if "Pss_Anon" in rollup:  # this line exists since Linux 5.4
                    held += rollup["Pss_Anon"] + rollup["Pss_Shmem"] + status.get("RssFile", 0)
                handles += process.num_fds() + process.num_threads()
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
            pids.add(process.pid)
        metrics = self._read_metrics(http)
        sample = TimelineSample(
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
            held_bytes=held or None,
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
            values = counters.parse_counters(answer.text).values
        except (httpx.HTTPError, ValueError):
            return {}
        self.metrics = answer.text
        return values

    def stop(self) -> None:
        """Stop sampling."""
        self._ended.set()
        if self.is_alive():
            self.join(timeout=10.0)

    def since(self, index: int) -> list[TimelineSample]:
        """Return the samples from an index on in which the server had processes.

        Args:
            index: The index of the first sample in `samples`.
        """
        return [sample for sample in self.samples[index:] if sample.processes]

    def record(self) -> dict[str, Any]:
        """Return the content of memory.json, without the growth."""
        return {
            "every_s": _EVERY_S,
            "device_memory": self.device.source,
            "samples": [asdict(sample) for sample in self.samples],
        }


def _bytes_in(file: Path) -> dict[str, int]:
    """Return the sizes in a file of /proc, in bytes, by their names."""
    sizes: dict[str, int] = {}
    for line in file.read_text("utf-8", "replace").splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            sizes[words[0].rstrip(":")] = 1024 * int(words[1])
    return sizes
