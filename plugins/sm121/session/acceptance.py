"""Watches the acceptance rate of draft tokens on a running server, by reading its counters.

The watch reads `/metrics` every ten seconds in a separate thread. If a reading fails, the watch
records the reason and continues. `AcceptanceWatch.taken` returns the results and the number of
failed readings.
"""

import contextlib
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx

from sm121.core.errors import Sm121Error
from sm121.core.server import Endpoint
from sm121.measure import counters

SAMPLE_EVERY_S = 10.0
#: Acceptance is judged over rolling windows of this length, if they have enough drafts.
WINDOW_S = 60.0
_LEAST_DRAFT_TOKENS = 200
#: A window below this share of the usual acceptance is a deviation. The usual acceptance is the
#: median of earlier windows that do not overlap.
_LEAST_SHARE = 0.5
_WINDOWS_NEEDED = 5
_WINDOWS_KEPT = 1000


@dataclass(frozen=True)
class AcceptanceReadings:
    """What the watch has found since the last call of `taken`.

    Attributes:
        lowest: The lowest share of accepted draft tokens of a window. None: no window had enough
            drafts.
        deviation: The worst window of low acceptance, in words. None: there was none.
        missed: How many readings failed.
        why_missed: The error of the last reading that failed.
        blind_s: For a server with speculative decoding, the longest time without a successful
            reading, in seconds. 0.0: every reading succeeded, or the server has no counters of
            drafts.
    """

    lowest: float | None = None
    deviation: str | None = None
    missed: int = 0
    why_missed: str | None = None
    blind_s: float = 0.0

    @property
    def not_watched(self) -> str | None:
        """Why the watch may have missed a window of low acceptance; None if it has missed none."""
        if self.blind_s < WINDOW_S:
            return None
        return (
            f"acceptance of draft tokens: expected /metrics every {SAMPLE_EVERY_S:g} s, got no "
            f"reading for {self.blind_s:.0f} s ({self.why_missed}). Look at /metrics of the server"
        )


@dataclass(frozen=True)
class _Sample:
    """A reading of the counters, and when it was read."""

    at_s: float
    counters: counters.Counters


@dataclass(frozen=True)
class _Window:
    """The share of accepted draft tokens between two readings."""

    begins_s: float
    ends_s: float
    share: float


class Acceptance:
    """The acceptance of draft tokens over rolling windows of a minute.

    Each reading of the counters ends one window.
    """

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        #: The acceptance of windows that do not overlap, and the time at which the last of them
        #: ended.
        self._usual: deque[float] = deque(maxlen=_WINDOWS_KEPT)
        self._usual_until_s = -math.inf
        #: The window with the lowest acceptance since the last call of `taken`, and the one that an
        #: earlier call has reported.
        self._worst: _Window | None = None
        self._told: _Window | None = None
        self._drafts = False
        self._read_at_s: float | None = None
        self._lowest: float | None = None
        self._deviation: str | None = None
        self._missed = 0
        self._why_missed: str | None = None
        self._blind_s = 0.0

    def take(self, at_s: float, now: counters.Counters) -> None:
        """Add a reading of the counters, and judge the window that ends with it.

        Args:
            at_s: When it was read, by a monotonic clock.
            now: The reading. If a counter is lower than before, the windows begin anew, because the
                server was restarted.
        """
        self._read_at_s = at_s
        self._drafts = self._drafts or now.values.get("draft_tokens", 0.0) > 0.0
        if self._samples and _fell(self._samples[-1].counters, now):
            self._samples.clear()
        self._samples.append(_Sample(at_s, now))
        # The window begins with the newest reading that is at least `WINDOW_S` old.
        while len(self._samples) > 1 and at_s - self._samples[1].at_s >= WINDOW_S:
            self._samples.popleft()
        first = self._samples[0]
        if at_s - first.at_s < WINDOW_S:
            return
        delta = now.since(first.counters)
        drafted = delta.get("draft_tokens", 0.0)
        if drafted >= _LEAST_DRAFT_TOKENS:
            share = delta.get("accepted_tokens", 0.0) / drafted
            self._add_window(_Window(first.at_s, at_s, share))

    def miss(self, at_s: float, why: str) -> None:
        """Count a reading that failed.

        The earlier readings are kept. The counters continue without readings, so the window that
        ends with the next reading includes the missed time.

        Args:
            at_s: When it failed, by the same clock.
            why: The error.
        """
        self._missed += 1
        self._why_missed = why
        if self._drafts and self._read_at_s is not None:
            self._blind_s = max(self._blind_s, at_s - self._read_at_s)

    def taken(self) -> AcceptanceReadings:
        """Return what was found since the last call."""
        result = AcceptanceReadings(
            lowest=self._lowest,
            deviation=self._deviation,
            missed=self._missed,
            why_missed=self._why_missed,
            blind_s=self._blind_s,
        )
        if self._deviation is not None:
            self._told = self._worst
        self._lowest = self._deviation = self._why_missed = self._worst = None
        self._missed = 0
        self._blind_s = 0.0
        return result

    def _add_window(self, window: _Window) -> None:
        told = self._told
        if told is not None and window.begins_s < told.ends_s and window.share >= told.share:
            return  # was reported with the previous round
        if self._lowest is None or window.share < self._lowest:
            self._lowest = window.share
        if len(self._usual) >= _WINDOWS_NEEDED:
            self._judge(window, statistics.median(self._usual))
        if window.begins_s >= self._usual_until_s:
            self._usual.append(window.share)
            self._usual_until_s = window.ends_s

    def _judge(self, window: _Window, usual: float) -> None:
        """Record the window if its share is below the limit and is the lowest share so far."""
        if window.share >= _LEAST_SHARE * usual:
            return
        if self._worst is not None and window.share >= self._worst.share:
            return
        self._worst = window
        self._deviation = (
            f"acceptance of draft tokens: expected at least {_LEAST_SHARE * usual:.0%} "
            f"(half of the usual {usual:.0%}), got {window.share:.0%} for a minute"
        )


class AcceptanceWatch:
    """A thread that reads a server's counters until it is stopped."""

    def __init__(self, read: Callable[[], counters.Counters]) -> None:
        """Create the watch. `running` starts it.

        Args:
            read: A function that reads the counters. Any exception counts as a failed reading.
        """
        self._read = read
        self._acceptance = Acceptance()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="acceptance", daemon=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch for as long as the block lasts."""
        self._thread.start()
        try:
            yield
        finally:
            self._stopped.set()

    def taken(self) -> AcceptanceReadings:
        """Return what was found since the last call."""
        with self._lock:
            return self._acceptance.taken()

    def _sample(self) -> None:
        while not self._stopped.wait(SAMPLE_EVERY_S):
            try:
                now = self._read()
            except Exception as error:  # noqa: BLE001 - `taken` reports any error
                why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                with self._lock:
                    self._acceptance.miss(time.monotonic(), why)
            else:
                with self._lock:
                    self._acceptance.take(time.monotonic(), now)


def read_counters(endpoint: Endpoint) -> counters.Counters:
    """Read the counters of a server now.

    Args:
        endpoint: The server.

    Returns:
        Its counters.

    Raises:
        Sm121Error: The page has another status than 200, or none of the known counters.
        httpx.HTTPError: The page was not received, or only a part of it.
    """
    with endpoint.http(timeout_s=SAMPLE_EVERY_S) as http:
        answer = http.get("/metrics")
    if answer.status_code != httpx.codes.OK:
        raise Sm121Error(f"/metrics: expected status 200, got {answer.status_code}")
    now = counters.parse_counters(answer.text)
    if not now.values:
        raise Sm121Error("/metrics: expected the engine's counters, got none")
    return now


def _fell(before: counters.Counters, now: counters.Counters) -> bool:
    """Return whether a counter decreased between two readings, because the server was restarted."""
    name = "draft_tokens"
    return now.values.get(name, 0.0) < before.values.get(name, 0.0)
