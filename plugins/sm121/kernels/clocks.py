"""Clocks for a kernel: what is taken is the time that the device worked, out of a cold cache."""

import functools
import time
from typing import Any

import numpy as np
import torch

from sm121.measure import stream_bandwidth

_HOLD_CYCLES = 2_000_000
"""About a millisecond in which the GPU waits while the host enqueues what is timed, so that the
host's own slowness is not in the result."""


class HostClock:
    """perf_counter, and a read of several times the last-level cache before each round."""

    how = "perf_counter, cold last-level cache"

    def __init__(self) -> None:
        self._other = np.ones(3 * stream_bandwidth.last_level_cache_bytes() // 8, dtype=np.int64)

    def now(self) -> float:
        return time.perf_counter()

    def before(self) -> None:
        np.bitwise_or.reduce(self._other)


class _Moment:
    """An event on the GPU's time line; a difference of two waits for the later one."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: "_Moment") -> float:
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class EventClock:
    """CUDA events around the enqueued work, with the L2 cache overwritten before each round."""

    how = "CUDA events, cold L2 cache"

    def __init__(self, device: str) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.empty(max(4 * cache, 64 << 20), dtype=torch.uint8, device=device)

    def now(self) -> Any:
        return _Moment()

    def before(self) -> None:
        torch.cuda.synchronize()
        self._other.zero_()
        torch.cuda._sleep(_HOLD_CYCLES)


@functools.cache
def clock_of(device: str) -> HostClock | EventClock:
    """The clock for a provider's device: one for all tests, for pytest-benchmark keeps the timer of
    each of them to the end of the session, and a timer holds gigabytes where caches are large."""
    return HostClock() if device == "cpu" else EventClock(device)
