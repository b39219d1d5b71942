"""What the server's memory did under load: which quantities must not grow, and what is kept."""

import statistics
from collections.abc import Sequence
from math import inf

import psutil
from pydantic import Field

from sm121.core.data_file import Record
from sm121.core.files import write_text
from sm121.core.level_settings import StressSizes
from sm121.core.verdict import Verdict, worst
from sm121.measure import growth
from sm121.measure.growth import Growth
from sm121.measure.timeline import Sample, Timeline
from sm121.run.record import RunRecord
from sm121.run.verdict_file import MemoryReport

MEMORY_JSON = "memory.json"
HANDLES = "open handles and threads"
#: A tenth of a process that is hardly there is no growth to speak of.
_LEAST_GROWTH_BYTES = 64 << 20
_LEAST_GROWTH_HANDLES = 20.0
#: Less than this in a load is the heap's own, however evenly it comes.
_LEAST_LEAK_BYTES = 4 << 20
_CURVE_POINTS = 200


class MemoryFile(Record):
    """The whole of memory.json: every sample of the memory over the run."""

    every_s: float
    device_memory: str
    """Where the device's memory is read, or why it is not."""
    samples: list[Sample]
    growth: list[Growth] = Field(default_factory=list)


def judged(
    samples: Sequence[Sample], limits: StressSizes, *, machine_bytes: int | None = None
) -> list[Growth]:
    """The growth of each quantity in the `samples` of a load's steady part. `limits`: how much may
    grow, over it and with each request. `machine_bytes`: of the machine, where a GPU computes:
    judged as a whole when nothing says what the device holds: on GB10 device memory is the
    system's. None on a CPU, where the processes hold all of it and the rest is others'."""
    completed = [sample.completed for sample in samples]
    requests = max(completed[-1] - completed[0], 1)
    requests_a_day = 86_400 * requests / (samples[-1].at_s - samples[0].at_s or 1.0)
    a_day = limits.memory_growth_per_day.value * (machine_bytes or psutil.virtual_memory().total)
    most, each = limits.memory_growth_gb.value * 1e9, limits.memory_growth_kib_per_request.value
    even = max(a_day / requests_a_day, _LEAST_LEAK_BYTES / requests)
    of_bytes = (_LEAST_GROWTH_BYTES, most, each * 1024, even)
    of_handles = (_LEAST_GROWTH_HANDLES, inf, limits.handles_growth_per_request.value, inf)
    series: dict[str, list[float | None]] = {
        "bytes of the processes": [s.pss_bytes or s.rss_bytes for s in samples],
        "bytes of the device": [s.device_bytes for s in samples],
    }
    if machine_bytes is not None and growth.is_silent(series["bytes of the device"]):
        series["bytes of the machine"] = [machine_bytes - s.available_bytes for s in samples]
    series[HANDLES] = [sample.handles for sample in samples]
    growths: list[Growth] = []
    for name, values in series.items():
        if not (numbers := [value for value in values if value is not None]):
            continue
        least, most, each, even = of_handles if name == HANDLES else of_bytes
        share = limits.memory_growth_fraction.value * statistics.median(numbers)
        growing = growth.judge(
            name, completed, values,
            limit_total=min(max(share, least), most), limit_per_request=each, limit_even=even,
            least_total=least if name == HANDLES else 0.0,
        )  # fmt: skip
        if growing.verdict is not Verdict.PASS and (low := growing.per_request_low or 0.0) > even:
            day = f"{low * requests_a_day / 2**30:.3g} GiB a day at the rate of this load"
            growing.reason += f"; {day}, allowed {a_day / 2**30:.3g} GiB"
        growths.append(growing)
    return growths


def keep(record: RunRecord, timeline: Timeline, growths: list[Growth]) -> None:
    """Write memory.json, and its summary into verdict.json."""
    target = record.directory / MEMORY_JSON
    write_text(MemoryFile(**timeline.record(), growth=growths).model_dump_json() + "\n", target)
    samples = timeline.since(0)
    record.file.memory = MemoryReport(
        file=target.name,
        device_memory=timeline.device.source,
        samples=len(samples),
        peak_bytes=max((s.pss_bytes or s.rss_bytes for s in samples), default=None),
        available_min_bytes=min((s.available_bytes for s in samples), default=None),
        growth=growths,
        curve=[
            (s.at_s, s.pss_bytes or s.rss_bytes, s.available_bytes, s.cache_usage)
            for s in samples[:: max(1, -(-len(samples) // _CURVE_POINTS))]
        ],
        verdict=worst(g.verdict for g in growths),
    )
