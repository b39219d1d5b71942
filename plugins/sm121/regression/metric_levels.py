"""Levels of a metric over stored runs, and falls from its best level."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sm121.core.level_settings import Regression
from sm121.core.numbers import number
from sm121.core.verdict import Verdict
from sm121.measure.statistics import Floats
from sm121.regression.change import Change, is_price, relative_loss
from sm121.run.details import Series, SeriesPoint
from sm121.run.stored_run import StoredMetric, StoredRun

#: The fewest runs in which a change of level is looked for.
SERIES = 6
#: The fewest runs on one level.
_SEGMENT = 2
#: The fewest runs of a level that is compared, and the runs of each median that may be the best
#: level of a history: no single lucky run is one.
_ANCHOR = 3
#: Runs that make the level now.
_RECENT = 5
#: Starts of which the best counts. If one start in four is slow, four in a row are slow once in 250
#: times.
_SLOW_STARTS = 4
#: The smallest change between levels of at least `SERIES` runs that is shown, as a fraction.
_STEP = 0.03
#: The largest distance of two runs whose difference shows how much runs differ, even if
#: neighbouring runs are alike.
_LAGS = 3
#: Runs that a series needs for each such distance.
_RUNS_OF_LAG = 8
#: Runs in a chart.
_MOST_RUNS = 60
#: Scales a median absolute deviation to the standard deviation of a normal distribution.
_DEVIATION = 1.4826


class Segment(NamedTuple):
    """Runs of a series on one level.

    Attributes:
        start: The index of the first run.
        end: The index behind the last run.
    """

    start: int
    end: int


class SeriesLevel(NamedTuple):
    """A level of a series.

    Attributes:
        start: The index of its first run.
        end: The index behind its last run.
        median: The median of its runs.
    """

    start: int
    end: int
    median: float

    @property
    def runs(self) -> int:
        """The number of its runs."""
        return self.end - self.start


class _Fall(NamedTuple):
    """The best level of a metric, the level now, the first run behind the best, and the limit."""

    best: float
    level: float
    at: int
    allowed: float


def find_falls(
    current: Mapping[str, StoredMetric], history: Sequence[StoredRun], limits: Regression
) -> list[Change]:
    """Return the metrics whose level is worse than the best level of the whole history.

    The fall may be a step that an earlier run let through, or a creep by steps that are each within
    the threshold. A value of 0 and a price of rounding are left to `trend.compare`.

    Args:
        current: The metrics of this run by name.
        history: Comparable runs, oldest first, without this run.
        limits: The profile's limits.

    Returns:
        One failed change for each such metric.
    """
    falls = []
    for name, metric in current.items():
        runs = [run for run in history if _has_value(run, metric)]
        values = [run.metrics[name].value for run in runs] + [metric.value]
        if len(values) < SERIES or not metric.value > 0.0 or is_price(name):
            continue
        fall = _fall(metric, values, limits)
        if fall is None:
            continue
        since = runs[fall.at].name if fall.at < len(runs) else "this run"
        loss = relative_loss(fall.level, fall.best, metric.higher_is_better)
        falls.append(
            Change(
                metric=name,
                unit=metric.unit,
                higher_is_better=metric.higher_is_better,
                a=fall.best,
                b=fall.level,
                ratio=fall.level / fall.best,
                pairs=fall.at,
                allowed=fall.allowed,
                verdict=Verdict.FAIL,
                words=(
                    f"the level went from {number(fall.best)} to {number(fall.level)} "
                    f"{metric.unit} ({loss:.1%} worse, {fall.allowed:.0%} allowed), "
                    f"beginning with {since}"
                ),
            )
        )
    return falls


def _has_value(run: StoredRun, metric: StoredMetric) -> bool:
    """Return whether a run has a positive value of the same metric."""
    stored = run.find(metric)
    return stored is not None and stored.value > 0.0


def _fall(metric: StoredMetric, values: Sequence[float], limits: Regression) -> _Fall | None:
    """Return a fall of a metric by more than is allowed, or None.

    The level now is the better of this run and the median of the last runs. For a rate or a time it
    is the best of four starts, so that slow starts are no fall and a good run ends one. More is
    allowed where runs differ by more: in 1,000 simulated histories of 60 runs without a trend,
    fewer than one is red.
    """
    chance = _chance(values)
    for fall in (_step(metric, values, limits, chance), _creep(metric, values, limits, chance)):
        if fall is None:
            continue
        if relative_loss(fall.level, fall.best, metric.higher_is_better) > fall.allowed:
            return fall
    return None


def _step(
    metric: StoredMetric, values: Sequence[float], limits: Regression, chance: float
) -> _Fall | None:
    """Return the distance of the last level from the best one, levels being those between changes.

    A percentile has none, since its scatter hides the changes.
    """
    if (metric.quantile or 0.5) > 0.5:
        return None
    levels = _levels(values)
    anchors = [level for level in levels if level.runs >= _ANCHOR]
    if not anchors:
        return None
    better = max if metric.higher_is_better else min
    best = better(anchors, key=lambda level: level.median)
    last = levels[-1]
    by_chance = chance * float(np.sqrt(1.0 / last.runs + 1.0 / _ANCHOR))
    allowed = max(limits.allowed(metric.name), by_chance)
    level = last.median
    if limits.of_starts(metric.name, metric.unit) > 0.0:
        level = better(level, *values[-_SLOW_STARTS:])
    return _Fall(best.median, level, best.end, allowed)


def _creep(
    metric: StoredMetric, values: Sequence[float], limits: Regression, chance: float
) -> _Fall:
    """Return the distance of the level now from the best median of three runs in a row."""
    better = max if metric.higher_is_better else min
    starts = values[-1:]
    if limits.of_starts(metric.name, metric.unit) > 0.0:
        starts = values[-_SLOW_STARTS:]
    anchors = [
        float(np.median(values[start : start + _ANCHOR])) for start in range(len(values) - _ANCHOR)
    ]
    best = better(anchors)
    return _Fall(
        best=best,
        level=better(*starts, float(np.median(values[-_RECENT:]))),
        at=anchors.index(best) + _ANCHOR,
        allowed=max(limits.of_anchor(metric.name), chance),
    )


def _chance(values: Sequence[float]) -> float:
    """Return how much worse the level of some runs may be by chance, as a fraction.

    It is four standard deviations of a run, and more if few runs show the deviation. The
    deviation is taken from differences of runs, which contain no trend and little of a step.
    """
    logs = np.log(values)
    lags = min(_LAGS, max(1, len(logs) // _RUNS_OF_LAG))
    means = []
    for lag in range(1, 1 + lags):
        steps = logs[lag:] - logs[:-lag]
        sizes = np.abs(steps - np.median(steps))
        means.append(float(np.minimum(sizes, 4.0 * np.median(sizes)).mean()))
    noise = max(means) * np.sqrt(np.pi) / 2.0
    return float(np.expm1((4.0 + 18.0 / (len(values) - 1)) * noise))


def segments(values: Sequence[float]) -> list[Segment]:
    """Return the piecewise constant levels of a series.

    The fit is least squares on logarithms with a price for each change. The price follows from the
    noise from run to run.

    Args:
        values: Positive values, oldest first, at least two.

    Returns:
        The segments in order; each has at least two runs.
    """
    logs: Floats = np.log(np.asarray(values, dtype=np.float64))
    count = len(logs)
    steps = np.diff(logs)
    # Robust, so that the changes themselves do not count as noise; never below 0.1 %.
    deviation = _DEVIATION * float(np.median(np.abs(steps - np.median(steps)))) / np.sqrt(2.0)
    noise = max(deviation, 1e-3)
    price = 3.0 * noise**2 * np.log(count) * 2.0
    sums = np.concatenate([[0.0], np.cumsum(logs)])
    squares = np.concatenate([[0.0], np.cumsum(logs**2)])

    best = np.append(0.0, np.full(count, np.inf))
    previous = [0] * (count + 1)
    for end in range(_SEGMENT, count + 1):
        starts = np.arange(end - _SEGMENT + 1)
        totals = sums[end] - sums[starts]
        costs = best[starts] + squares[end] - squares[starts] - totals**2 / (end - starts)
        costs[1:] += price
        previous[end] = int(costs.argmin())
        best[end] = costs[previous[end]]
    parts = []
    end = count
    while end > 0:
        parts.append(Segment(previous[end], end))
        end = previous[end]
    return parts[::-1]


def _levels(values: Sequence[float]) -> list[SeriesLevel]:
    """Return the levels of `segments` with their medians."""
    return [_level(values, part.start, part.end) for part in segments(values)]


def _level(values: Sequence[float], start: int, end: int) -> SeriesLevel:
    return SeriesLevel(start, end, float(np.median(values[start:end])))


def levels_of(
    values: Sequence[float], *, higher_is_better: bool, limits: Regression
) -> list[SeriesLevel]:
    """Return the levels of a series between the changes that are no scatter.

    At each change both the medians and the best runs differ, so that slow starts are no change.
    They differ by 3 % if both levels have six runs, otherwise by more than starts of one build do.
    One series in 100 without a change, with the noise of starts, has a change by this rule.

    Args:
        values: The values, oldest first, at least one.
        higher_is_better: Whether it is a rate, rather than a time.
        limits: The profile's limits.

    Returns:
        The levels in order; one level if the series is short or has a value that is not positive.
    """
    if len(values) < SERIES or not min(values) > 0.0:
        return [_level(values, 0, len(values))]
    chance = _chance(values)
    levels = _levels(values)
    while len(levels) > 1:
        excesses = []
        for before, after in itertools.pairwise(levels):
            best = max if higher_is_better else min
            best_before = best(values[before.start : before.end])
            best_after = best(values[after.start : after.end])
            bests = float(np.log(best_after / best_before))
            excesses.append(_excess(before, after, bests, chance, limits))
        weakest = min(range(len(excesses)), key=excesses.__getitem__)
        if excesses[weakest] > 1.0:
            break
        merged = _level(values, levels[weakest].start, levels[weakest + 1].end)
        levels[weakest : weakest + 2] = [merged]
    return levels


def _excess(
    before: SeriesLevel, after: SeriesLevel, bests: float, chance: float, limits: Regression
) -> float:
    """Return a change of level as a multiple of the smallest change that is no scatter.

    ``bests`` is the logarithm of the ratio of the best runs of both levels.
    """
    floor = _STEP if min(before.runs, after.runs) >= SERIES else limits.starts_differ_by
    needed = max(floor, chance * float(np.sqrt(1 / before.runs + 1 / after.runs)))
    medians = float(np.log(after.median / before.median))
    change = float(min(abs(medians), bests * np.sign(medians)))
    if needed == 0.0:  # runs and starts that do not differ have no scatter
        return math.inf if change > 0.0 else 0.0
    return change / needed


def series_of(
    current: Mapping[str, StoredMetric], history: Sequence[StoredRun], started: str
) -> dict[str, Series]:
    """Return each metric of this run over the stored runs, for a chart.

    Args:
        current: The metrics of this run by name.
        history: The stored runs, oldest first.
        started: When this run started (ISO 8601).

    Returns:
        By metric at most 60 stored runs and this run, oldest first.
    """
    series = {}
    for name, metric in current.items():
        having = [run for run in history if name in run.metrics]
        points = []
        for run in having[-_MOST_RUNS:]:
            value = run.metrics[name].value
            points.append(SeriesPoint(run=run.name, when=run.file.started, value=value))
        points.append(SeriesPoint(run="this run", when=started, value=metric.value))
        series[name] = Series(
            unit=metric.unit, higher_is_better=metric.higher_is_better, points=points
        )
    return series
