"""The sections of verdict.json on the machine, its memory and the crashes."""

from pydantic import Field

from sm121.core.data_file import Record
from sm121.core.verdict import Verdict
from sm121.machine.box import Reading
from sm121.measure.growth import Growth

#: The kind of a crash in which the suite ended the run because the machine had too little memory.
MEMORY_FLOOR = "memory_floor"


class BoxReport(Record):
    """The state of the machine; UNKNOWN until it was measured."""

    state: str = "UNKNOWN"
    reason: str | None = "the machine was not measured"
    remedy: str | None = None
    """What to do first if the machine is DEGRADED."""
    before: Reading | None = None
    after: Reading | None = None
    load_during: float | None = None
    """The share of the CPU that processes outside the run used between the readings."""

    @property
    def looked_at(self) -> bool:
        """Whether the run measured the state of the machine."""
        return self != BoxReport()


class MemoryReport(Record):
    """The memory under load: its growth and the points of a chart; ``file`` has all samples."""

    file: str
    device_memory: str
    """The source of the device's memory, or why there is none."""
    samples: int
    peak_bytes: int | None = None
    available_min_bytes: int | None = None
    growth: list[Growth] = Field(default_factory=list)
    curve: list[tuple[float, int, int, float | None]] = Field(default_factory=list)
    """(seconds, bytes of the server's processes, bytes available, share of the KV cache used)."""
    verdict: Verdict = Verdict.NOT_RUN


class CrashReport(Record):
    """The abnormal end of a process, and its crash bundle."""

    kind: str
    summary: str
    owner: str
    happened: str = ""
    """What happened, without the cause: "the server died"; empty in older files."""
    test: str | None = None
    bundle: str | None = None
    """The folder of the bundle in the report directory; null if it could not be written."""
