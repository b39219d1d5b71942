"""What the server's memory did under load: which quantities must not grow, and what is kept."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import Field

from sm121.core.data_file import Record
from sm121.core.files import write_text
from sm121.core.level_settings import StressSizes
from sm121.core.verdict import worst
from sm121.measure import growth
from sm121.measure.growth import Growth
from sm121.run.record import RunRecord
from sm121.run.verdict_file import MemoryReport
from sm121.stress.timeline import Sample, Timeline

MEMORY_JSON = "memory.json"
HANDLES = "open handles"
#: A tenth of a process that is hardly there is no growth to speak of.
_LEAST_GROWTH_BYTES = 64 << 20
_LEAST_GROWTH_HANDLES = 20.0
#: Points of the curve in verdict.json.
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
    """The growth of each quantity that the samples have.

    Args:
        samples: of the steady part of a load.
        limits: how much may grow, over the steady part and with each request.
        machine_bytes: memory of the machine, where a GPU computes. It is judged as a whole when
            nothing says what the device holds: on GB10 device memory is the system's, and in no
            process. None on a CPU, where the processes hold all of it and the rest is others'.
    """
    completed = [sample.completed for sample in samples]
    growths: list[Growth] = []

    def judge(
        name: str, values: Sequence[float | None], least: float, most: float, per_request: float
    ) -> None:
        numbers = [value for value in values if value is not None]
        if numbers:
            share = limits.memory_growth_fraction.value * statistics.median(numbers)
            total = min(max(share, least), most)
            growths.append(
                growth.judge(
                    name, completed, values, limit_total=total, limit_per_request=per_request
                )
            )

    series: dict[str, list[float | None]] = {
        "bytes of the processes": [s.pss_bytes or s.rss_bytes for s in samples],
        "bytes of the device": [s.device_bytes for s in samples],
    }
    if machine_bytes is not None and growth.is_silent(series["bytes of the device"]):
        series["bytes of the machine"] = [machine_bytes - s.available_bytes for s in samples]
    most_bytes = limits.memory_growth_gb.value * 1e9
    bytes_per_request = limits.memory_growth_kib_per_request.value * 1024
    for name, values in series.items():
        judge(name, values, _LEAST_GROWTH_BYTES, most_bytes, bytes_per_request)
    handles_per_request = limits.handles_growth_per_request.value
    handles = [sample.handles for sample in samples]
    judge(HANDLES, handles, _LEAST_GROWTH_HANDLES, float("inf"), handles_per_request)
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
