"""What a page shows of memory.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sm121.measure.growth import Growth
from sm121.stress.memory import MemoryFile
from sm121.stress.timeline import Sample

#: Points that a chart shows; more only make the file larger.
_MOST = 1500
_LEVELS: dict[str, Callable[[Sample], float | None]] = {
    # Shared pages by their share first: the better sum over a tree of processes.
    "server's processes": lambda sample: sample.pss_bytes or sample.rss_bytes,
    "GPU memory in use": lambda sample: sample.device_bytes,
    "host memory available": lambda sample: sample.available_bytes,
}


@dataclass(frozen=True)
class MemoryTimeline:
    """What a page shows: levels in GiB over the seconds; a level that was not read is None."""

    seconds: tuple[float, ...]
    levels: dict[str, tuple[float | None, ...]]
    #: Share of the KV cache in use, 0 to 1; empty when no sample has it.
    cache: tuple[float | None, ...] = ()
    growth: tuple[Growth, ...] = ()


def timeline(file: MemoryFile) -> MemoryTimeline | None:
    """At most 1,500 of the samples, evenly; None when there is none."""
    samples = file.samples[:: max(1, len(file.samples) // _MOST)]
    if not samples:
        return None
    levels = {}
    for what, level in _LEVELS.items():
        sizes = [level(sample) for sample in samples]
        if any(size is not None for size in sizes):
            levels[what] = tuple(None if size is None else size / 2**30 for size in sizes)
    cache = tuple(sample.cache_usage for sample in samples)
    return MemoryTimeline(
        seconds=tuple(sample.at_s - samples[0].at_s for sample in samples),
        levels=levels,
        cache=cache if any(share is not None for share in cache) else (),
        growth=tuple(file.growth),
    )
