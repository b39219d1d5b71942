"""The growth of the server's memory under load, and the file with its samples."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import psutil
from pydantic import Field

from sm121.core.data_file import Record
from sm121.core.files import write_text
from sm121.core.level_settings import StressSizes
from sm121.core.verdict import Verdict, worst
from sm121.machine.timeline import Timeline, TimelineSample
from sm121.measure import growth
from sm121.measure.growth import Growth
from sm121.run.events import MemoryRead
from sm121.run.machine_report import MemoryReport
from sm121.run.record import RunRecord

MEMORY_JSON = "memory.json"
HANDLES = "open handles and threads"
_PROCESSES = "bytes of the processes"
_DEVICE = "bytes of the device"
_MACHINE = "bytes of the machine"
#: The limit over the steady part is at least this, because a fraction of a small process's memory
#: is very little.
_LEAST_GROWTH_BYTES = 64 << 20
_LEAST_GROWTH_HANDLES = 20.0
#: Growth by less than this over a load is attributed to the heap, even if it is steady.
_LEAST_LEAK_BYTES = 4 << 20
#: Maximum number of points of the curve in verdict.json.
_CURVE_POINTS = 200
_DAY_S = 86_400


class MemoryFile(Record):
    """The content of memory.json: all samples of the memory over the run."""

    every_s: float
    device_memory: str
    """The source of the device's memory, or why it is unknown."""
    samples: list[TimelineSample]
    growth: list[Growth] = Field(default_factory=list)


@dataclass(frozen=True)
class _Limits:
    """The allowed growth of a quantity (see `growth.judge_growth`)."""

    #: The minimum of the limit over the steady part, which is a fraction of the quantity.
    least: float
    #: The maximum of the limit over the steady part.
    most: float
    per_request: float
    even: float
    #: The growth that is allowed for any number of requests.
    least_total: float = 0.0


def judged(
    samples: Sequence[TimelineSample], limits: StressSizes, *, machine_bytes: int | None = None
) -> list[Growth]:
    """Judge the growth of each quantity in the steady part of a load.

    Args:
        samples: The samples of the steady part; at least one.
        limits: How much each quantity may grow, over the steady part and per request.
        machine_bytes: The memory of the machine if the server uses a GPU. If the server's device
            memory is unknown, the used memory of the machine is judged: GB10 has only one memory.
            None on a CPU, where the server's processes hold all of its memory.

    Returns:
        The growth of each quantity with samples.
    """
    completed = [sample.completed for sample in samples]
    requests = max(completed[-1] - completed[0], 1)
    requests_a_day = _DAY_S * requests / (samples[-1].at_s - samples[0].at_s or 1.0)
    memory_bytes = machine_bytes or psutil.virtual_memory().total
    bytes_a_day = limits.memory_growth_per_day.value * memory_bytes
    of_bytes = _Limits(
        least=_LEAST_GROWTH_BYTES,
        most=limits.memory_growth_gb.value * 1e9,
        per_request=limits.memory_growth_kib_per_request.value * 1024,
        even=max(bytes_a_day / requests_a_day, _LEAST_LEAK_BYTES / requests),
    )
    of_handles = _Limits(
        least=_LEAST_GROWTH_HANDLES,
        most=inf,
        per_request=limits.handles_growth_per_request.value,
        even=inf,
        least_total=_LEAST_GROWTH_HANDLES,
    )
    growths: list[Growth] = []
    for name, values in _series(samples, machine_bytes).items():
        numbers = [value for value in values if value is not None]
        if not numbers:
            continue
        allowed = of_handles if name == HANDLES else of_bytes
        share = limits.memory_growth_fraction.value * statistics.median(numbers)
        growing = growth.judge_growth(
            name,
            completed,
            values,
            limit_total=min(max(share, allowed.least), allowed.most),
            limit_per_request=allowed.per_request,
            limit_even=allowed.even,
            least_total=allowed.least_total,
        )
        low = growing.per_request_low or 0.0
        if growing.verdict is not Verdict.PASS and low > allowed.even:
            day = f"{low * requests_a_day / 2**30:.3g} GiB a day at the rate of this load"
            growing.reason += f"; {day}, allowed {bytes_a_day / 2**30:.3g} GiB"
        growths.append(growing)
    return growths


def _series(
    samples: Sequence[TimelineSample], machine_bytes: int | None
) -> dict[str, list[float | None]]:
    """Return the values of each quantity over the samples."""
    series: dict[str, list[float | None]] = {
        _PROCESSES: [s.held_bytes or s.pss_bytes or s.rss_bytes for s in samples],
        _DEVICE: [sample.device_bytes for sample in samples],
    }
    if machine_bytes is not None and growth.is_silent(series[_DEVICE]):
        series[_MACHINE] = [machine_bytes - sample.available_bytes for sample in samples]
    series[HANDLES] = [sample.handles for sample in samples]
    return series


def write_memory(record: RunRecord, timeline: Timeline, growths: list[Growth]) -> None:
    """Write memory.json, and a summary to verdict.json.

    Args:
        record: The run.
        timeline: The samples.
        growths: The result of `judged`; empty if it was not called yet.

    Raises:
        OSError: The file cannot be written.
    """
    target = record.directory / MEMORY_JSON
    write_text(MemoryFile(**timeline.record(), growth=growths).model_dump_json() + "\n", target)
    samples = timeline.since(0)
    step = max(1, -(-len(samples) // _CURVE_POINTS))  # rounded up
    curve = []
    for sample in samples[::step]:
        held = sample.pss_bytes or sample.rss_bytes
        curve.append((sample.at_s, held, sample.available_bytes, sample.cache_usage))
    report = MemoryReport(
        file=target.name,
        device_memory=timeline.device.source,
        samples=len(samples),
        peak_bytes=max((s.pss_bytes or s.rss_bytes for s in samples), default=None),
        available_min_bytes=min((s.available_bytes for s in samples), default=None),
        growth=growths,
        curve=curve,
        verdict=worst(g.verdict for g in growths),
    )
    record.emit(MemoryRead(report))
