"""Estimates the remaining time of a run.

The remaining time is the duration of the checks that have not ended, minus the time that the
running check has already taken. Two events change the estimate:

1. The first start of a server shows how fast the machine is, and scales all durations that were not
   measured on this machine. A start that takes longer than usual changes the scale even before it
   has ended.
2. If a check takes longer than expected, the remaining time stands still. The forecasts of other
   checks do not change.

The displayed time rises by no more than a tenth in ten seconds. If the run takes over a tenth
longer than its forecast, it is displayed as slower than the forecast. In two cases, only a lower
bound is displayed: while a start or a check takes longer than expected, because its end is unknown;
and as long as the slowly rising number of a slower run is smaller than the estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sm121.core.time_range import NO_TIME, TimeRange
from sm121.engines.pool import StartReport
from sm121.session.forecast import ExpectedDuration, Forecast

#: The displayed time may rise by this factor within `_RISE_S` seconds.
_RISE = 1.1
_RISE_S = 10.0
#: A run counts as slower than its forecast if it takes over a tenth longer, and at least this many
#: seconds longer, because a few seconds of a short run are not significant.
_SLACK_S = 10.0
#: The forecast is scaled by the duration of the first start, within these bounds. A duration beyond
#: them shows a slow disk or a hang instead.
_LEAST_SCALE = 0.5
_MOST_SCALE = 4.0


@dataclass(frozen=True)
class Left:
    """The remaining time, as it is displayed.

    Attributes:
        time: The time.
        is_slower: Whether the run takes more than a tenth longer than its forecast.
        is_least: Whether ``time.low`` is a lower bound, and ``time.high`` has no meaning.
    """

    time: TimeRange
    is_slower: bool = False
    is_least: bool = False


class Remaining:
    """The remaining time of a run.

    Args:
        forecast: The forecast of the run.
        starts: The starts of the run's servers so far. The list grows during the run.
    """

    def __init__(self, forecast: Forecast, starts: Sequence[StartReport] = ()) -> None:
        self._usual_s = forecast.usual_start_s
        self._starts = starts
        self._is_known = forecast.time is not None
        self._open = {each.check.id: each for each in forecast.expected}
        self._began: dict[str, float] = {}
        #: For each configuration, the checks that will start it, in their order.
        self._starters: dict[str, list[str]] = {}
        for each in forecast.expected:
            for name in each.starts:
                self._starters.setdefault(name, []).append(each.check.id)
        #: The configurations that were started at least once.
        self._started: set[str] = set()
        self._starts_seen = 0
        self._scale: float | None = None
        #: The remaining time that was displayed last, and when it was displayed.
        self._shown: tuple[Left, float] | None = None
        #: The latest end of the run according to its first forecast (a value of `shown`'s
        #: argument).
        self._latest_end: float | None = None

    def begin(self, check: str, now: float) -> None:
        """Record that a check begins.

        Args:
            check: Its id.
            now: The time, by the clock of `estimate`.
        """
        self._began[check] = now

    def end(self, check: str) -> None:
        """Record that a check has ended, with any outcome.

        Args:
            check: Its id.
        """
        self._look_at_starts()
        self._began.pop(check, None)
        ended = self._open.pop(check, None)
        if ended is not None:
            for name in self._waits_for(ended):
                self._starters[name].remove(check)
            self._started.update(ended.starts)

    def estimate(self, now: float) -> TimeRange | None:
        """Return the current estimate of the remaining time; None if nothing is known.

        Args:
            now: The time, by the clock of `begin`.
        """
        if not self._is_known:
            return None
        self._look_at_starts()
        scale = self._scale_at(now)
        whole = NO_TIME
        for name, each in list(self._open.items()):
            time = self._of(each, scale)
            began = self._began.get(name)
            if began is not None:
                ran = now - began
                time = TimeRange(max(time.low - ran, 0.0), max(time.high - ran, 0.0))
            whole += time
        return whole

    def shown(self, now: float) -> Left | None:
        """Return the remaining time for the display, without jumps; None if nothing is known.

        Args:
            now: The time, by the clock of `begin`.
        """
        time = self.estimate(now)
        if time is None:
            return None
        if self._latest_end is None:
            self._latest_end = now + time.high + max((_RISE - 1.0) * time.high, _SLACK_S)
        is_slower = now + time.high > self._latest_end
        left = Left(time, is_slower, is_least=is_slower and self._is_over(now))
        if self._shown is not None:
            left = self._slowly_risen(left, self._shown, now)
        self._shown = left, now
        return left

    def _slowly_risen(self, left: Left, shown: tuple[Left, float], now: float) -> Left:
        """Return the remaining time without a jump from the one that was shown before."""
        before, at = shown
        most = _RISE ** min((now - at) / _RISE_S, 1.0)
        low = min(left.time.low, before.time.low * most)
        high = left.time.high
        if not before.is_least:
            high = min(high, before.time.high * most)
        if left.is_slower and TimeRange(low, high) != left.time:
            return replace(left, time=TimeRange(low, left.time.high), is_least=True)
        return replace(left, time=TimeRange(low, high))

    def _is_over(self, now: float) -> bool:
        """Whether a running start or check has already taken longer than expected."""
        scale = self._scale_at(now)
        if self._scale is None and scale > 1.0:
            return True
        for name, began in list(self._began.items()):
            each = self._open.get(name)
            if each is not None and now - began > self._of(each, scale).high:
                return True
        return False

    def _of(self, each: ExpectedDuration, scale: float) -> TimeRange:
        """Return the duration of a check with the starts that it still needs."""
        assert each.time is not None
        time = each.time
        if not each.timed and each.check.lasts is None:
            time *= scale
        for name in self._waits_for(each):
            start = each.starts[name]
            if start is None:
                continue
            is_measured = start.low == start.high
            time += start if is_measured else start * scale
        return time

    def _scale_at(self, now: float) -> float:
        """Return the factor of this machine's durations to the expected ones, from the first start.

        The factor is estimated even before that start has ended.
        """
        if self._scale is not None:
            return self._scale
        scale = 1.0
        for name, began in list(self._began.items()):
            each = self._open.get(name)
            if each is None:
                continue
            waits_for = self._waits_for(each)
            if len(waits_for) != 1:
                continue
            usual = self._usual_s.get(waits_for[0])
            if usual:
                scale = max(scale, (now - began) / usual)
        return min(scale, _MOST_SCALE)

    def _look_at_starts(self) -> None:
        """Record the new starts. The first start without compilation sets the scale."""
        for start in list(self._starts[self._starts_seen :]):
            self._starts_seen += 1
            if start.startup_s is None or not self._take_start(start.configuration):
                continue
            for name in self._began:  # the check itself begins after the start of its server
                self._began[name] += start.startup_s
            usual = self._usual_s.get(start.configuration)
            if self._scale is None and usual and not start.compiled:
                scale = start.startup_s / usual
                self._scale = min(max(scale, _LEAST_SCALE), _MOST_SCALE)

    def _take_start(self, configuration: str) -> bool:
        """Record a start. Return whether it was forecast, or is the configuration's first start.

        Another start, such as a restart after a crash, is not the one that a later check waits for.
        """
        is_first = configuration not in self._started
        starters = self._starters.get(configuration, [])
        begun = [check for check in starters if check in self._began]
        ended = begun or (starters if is_first else [])
        self._started.add(configuration)
        if ended:
            starters.remove(ended[0])
        return is_first or bool(ended)

    def _waits_for(self, each: ExpectedDuration) -> list[str]:
        """Return the configurations that a check will start."""
        return [name for name in each.starts if each.check.id in self._starters[name]]
