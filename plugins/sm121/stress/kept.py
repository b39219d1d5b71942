"""What a server keeps of its requests: which quantities of a timeline must not grow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sm121.measure import growth
from sm121.measure.growth import Growth
from sm121.stress.timeline import Sample

HANDLES = "open handles"
#: A tenth of a process that is hardly there is no growth to speak of.
_LEAST_GROWTH_BYTES = 64 << 20
_LEAST_GROWTH_HANDLES = 20.0


@dataclass(frozen=True)
class Limits:
    """How much may be kept, over the steady part and of each request."""

    #: Of the level, and at most so many bytes.
    fraction: float
    most_bytes: float
    bytes_per_request: float
    handles_per_request: float


def judged(
    samples: Sequence[Sample], limits: Limits, *, machine_bytes: int | None = None
) -> list[Growth]:
    """Each quantity of the samples that is known.

    Args:
        machine_bytes: memory of the machine, where a GPU computes. It is judged as a whole when
            nothing says what the device holds: on GB10 device memory is the system's, and in no
            process. None on a CPU, where the processes hold all of it and the rest is others'.
    """
    done = [sample.completed for sample in samples]
    series: dict[str, list[float | None]] = {
        "bytes of the processes": [s.pss_bytes or s.rss_bytes for s in samples],
        "bytes of the device": [s.device_bytes for s in samples],
    }
    silent = growth.is_silent(series["bytes of the device"])
    if machine_bytes is not None and silent:
        series["bytes of the machine"] = [machine_bytes - s.available_bytes for s in samples]
    found = []
    for name, values in series.items():
        known = [value for value in values if value is not None]
        if known:
            allowed = max(limits.fraction * statistics.median(known), _LEAST_GROWTH_BYTES)
            found.append(
                growth.judge(
                    name,
                    done,
                    values,
                    limit_total=min(allowed, limits.most_bytes),
                    limit_per_request=limits.bytes_per_request,
                )
            )
    handles = [sample.handles for sample in samples]
    known = [value for value in handles if value is not None]
    if known:
        allowed = max(_LEAST_GROWTH_HANDLES, limits.fraction * statistics.median(known))
        found.append(
            growth.judge(
                HANDLES,
                done,
                handles,
                limit_total=allowed,
                limit_per_request=limits.handles_per_request,
            )
        )
    return found
