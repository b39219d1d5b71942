"""memory.json, as `sm121.stress.timeline` writes it: the memory while the server was watched."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sm121.stress.timeline import Sample

NAME = "memory.json"
_SAMPLES = TypeAdapter(list[Sample])
#: Points that a chart shows; more only make the file larger.
_MOST = 1500


@dataclass(frozen=True)
class MemoryTimeline:
    """Levels in GiB over the seconds of the run; a level that was not read is None."""

    seconds: tuple[float, ...]
    levels: dict[str, tuple[float | None, ...]]


def read(directory: Path) -> MemoryTimeline | None:
    """memory.json of a report directory; None where there is none that can be read."""
    try:
        raw = json.loads((directory / NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return of(raw.get("samples")) if isinstance(raw, dict) else None


def of(samples: Any) -> MemoryTimeline | None:
    """From the list of samples; None when there are none, or they are no samples."""
    try:
        rows = _SAMPLES.validate_python(samples)
    except ValidationError:
        return None
    rows = rows[:: max(1, len(rows) // _MOST)]
    if not rows:
        return None
    levels: dict[str, list[int | None]] = {
        # Proportional shares where the kernel gives them: shared pages count once.
        "server's processes": [row.pss_bytes or row.rss_bytes for row in rows],
        "GPU memory of the server": [row.device_bytes for row in rows],
        "host memory available": [row.available_bytes for row in rows],
    }
    return MemoryTimeline(
        tuple(row.at_s - rows[0].at_s for row in rows),
        {
            what: tuple(None if value is None else value / 2**30 for value in values)
            for what, values in levels.items()
            if any(value is not None for value in values)
        },
    )
