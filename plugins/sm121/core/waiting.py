"""Waiting for something that takes its time."""

import time
from collections.abc import Callable


def until(holds: Callable[[], object], within_s: float, *, every_s: float = 0.1) -> bool:
    """Whether something holds in time; it is asked at least once."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_s)
    return True
