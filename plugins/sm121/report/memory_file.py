"""memory.json: the memory over the run. The one place that knows what its fields are called."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "memory.json"
#: Names under which samples, times and levels may be written, the first that is there counts.
_SAMPLES = ("samples", "timeline", "points")
_TIME = ("elapsed_s", "t_s", "seconds", "at_s", "time_s", "t", "time")
_LEVELS = {
    # Shared pages by their share first: the better sum over a tree of processes.
    "server's processes": ("pss_bytes", "tree_rss_bytes", "rss_bytes", "tree_rss", "rss"),
    "host memory in use": ("used_bytes", "mem_used_bytes", "host_used_bytes"),
    "host memory available": ("mem_available_bytes", "available_bytes", "mem_available"),
    "GPU memory in use": ("device_bytes", "gpu_used_bytes", "gpu_bytes", "device_used_bytes"),
    "KV cache in use": ("kv_cache_bytes", "kv_used_bytes"),
}
_GIB_LEVELS = {
    "server's processes": ("tree_rss_gib", "rss_gib"),
    "host memory in use": ("used_gib", "mem_used_gib", "host_used_gib"),
    "host memory available": ("mem_available_gib", "available_gib", "memory_available_gib"),
    "GPU memory in use": ("gpu_used_gib", "gpu_gib", "device_used_gib"),
}
_GROWTH = "growth"
_LABEL = ("phase", "label", "what", "test", "event")
#: Points that a chart shows; more only make the file larger.
_MOST = 1500


@dataclass(frozen=True)
class MemoryTimeline:
    """Levels in GiB over the seconds of the run; a level that was not read is None."""

    seconds: tuple[float, ...]
    levels: dict[str, tuple[float | None, ...]]
    #: When another phase began, and what it is called.
    phases: tuple[tuple[float, str], ...] = ()
    #: Quantities whose growth was judged: name, verdict, and why.
    growth: tuple[tuple[str, str, str], ...] = ()


def read(directory: Path) -> MemoryTimeline | None:
    """memory.json of a report directory; None where there is none, or nothing in it."""
    try:
        raw = json.loads((directory / NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    samples: Any = raw
    judged: Any = ()
    if isinstance(raw, dict):
        samples = next((raw[name] for name in _SAMPLES if isinstance(raw.get(name), list)), [])
        judged = raw.get(_GROWTH) or []
    return of(samples, judged) if isinstance(samples, list) else None


def of(samples: list[Any], judged: Any = ()) -> MemoryTimeline | None:
    """From the list of samples, and what was judged; None when no sample can be read."""
    rows = [row for row in samples if isinstance(row, dict) and _number(row, _TIME) is not None]
    step = max(1, len(rows) // _MOST)
    rows = rows[::step]
    if not rows:
        return None
    times = [_number(row, _TIME) or 0.0 for row in rows]
    start = times[0]
    levels = {}
    for what in _LEVELS:
        values = [_gib(row, what) for row in rows]
        if any(value is not None for value in values):
            levels[what] = tuple(values)
    phases: list[tuple[float, str]] = []
    for time, row in zip(times, rows, strict=True):
        label = next((str(row[name]) for name in _LABEL if row.get(name)), None)
        if label is not None and (not phases or phases[-1][1] != label):
            phases.append((time - start, label))
    if not levels:
        return None
    growth = tuple(
        (str(item.get("quantity", "")), str(item.get("verdict", "")), str(item.get("reason", "")))
        for item in (judged if isinstance(judged, (list, tuple)) else ())
        if isinstance(item, dict)
    )
    return MemoryTimeline(tuple(time - start for time in times), levels, tuple(phases), growth)


def _gib(row: dict[str, Any], what: str) -> float | None:
    size = _number(row, _LEVELS[what])
    return size / 2**30 if size is not None else _number(row, _GIB_LEVELS.get(what, ()))


def _number(row: dict[str, Any], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = row.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return None
