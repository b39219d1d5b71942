"""When a shape is warm: the last requests took as long as each other, and none is still faster."""

from __future__ import annotations

from collections.abc import Sequence


def is_flat(times: Sequence[float], bound: float) -> bool:
    """Whether the last two times agree within the bound, and are no more than it from the best."""
    if len(times) < 2:
        return False
    before, last = times[-2:]
    best = min(times)
    return abs(last - before) <= bound * before and last <= best * (1.0 + bound)
