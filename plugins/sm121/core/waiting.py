"""Wait for a condition."""

import time
from collections.abc import Callable


def until(holds: Callable[[], object], within_s: float, *, every_s: float = 0.1) -> bool:
    """Wait until a condition holds.

    Args:
        holds: The condition. It is called at least once.
        within_s: The time limit, in seconds.
        every_s: The pause between two calls, in seconds.

    Returns:
        Whether the condition became true in time.
    """
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_s)
    return True
