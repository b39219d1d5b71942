"""Levels of a metric over stored runs, and falls from its best level."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sm121.core.level_settings import Regression
from sm121.core.numbers import number
from sm121.core.verdict import Verdict
from sm121.measure.statistics import Floats, relative_loss
from sm121.regression.change import Change, is_price
from sm121.run.details import Series, SeriesPoint
from sm121.run.stored_run import StoredMetric, StoredRun

#: Minimum number of runs for detecting a change of level.
SERIES = 6
#: Minimum number of runs on one level.
_SEGMENT = 2
#: Minimum number of runs of a best level, and the window of its running median, so that a single
#: lucky run is no best level.
_ANCHOR = 3
#: Number of last runs whose median is the current level.
_RECENT = 5
#: Number of last starts of which the best counts. If one start in four is slow, all four of them
#: are slow with a probability of 1 in 250.
_SLOW_STARTS = 4
#: Minimum change between levels of at least `SERIES` runs that is shown, as a fraction.
_STEP = 0.03
#: The noise is estimated from differences of runs up to this many runs apart, since neighbouring
#: runs may be correlated.
_LAGS = 3
#: If a series has fewer than `_LAGS` times this number of runs, only shorter distances are used.
_RUNS_OF_LAG = 8
#: Maximum number of stored runs in a chart.
_MOST_RUNS = 60
#: Scales a median absolute deviation to the standard deviation of a normal distribution.
_DEVIATION = 1.4826


class Segment(NamedTuple):
    """Consecutive runs of a series that have one level.

    Attributes:
        start: The index of the first run.
        end: The index after the last run.
    """

    start: int
    end: int


class SeriesLevel(NamedTuple):
    """A level of a series.

    Attributes:
        start: The index of its first run.
        end: The index after its last run.
        median: The median of its runs' values.
    """

    start: int
    end: int
    median: float

    @property
    def runs(self) -> int:
        """The number of the level's runs."""
        return self.end - self.start


class _Fall(NamedTuple):
    """The best and the current level, the index of the first run after the best, and the limit."""

    best: float
    level: float
    at: int
    allowed: float


def find_falls(
    current: Mapping[str, StoredMetric], history: Sequence[StoredRun], limits: Regression
) -> list[Change]:
    """Return the metrics whose level is worse than the best level of the whole history.

    The fall may be a step that an earlier run did not report, or a slow decline by steps that are
    each within the threshold. Values of 0 and prices of rounding are judged by `trend.compare`.

    Args:
        current: The metrics of this run by name.
        history: Comparable runs, oldest first, without this run.
        limits: The profile's limits.

    Returns:
        One change with the verdict FAIL per such metric.
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
    """Return a fall of a metric beyond its limit, or None.

    The current level is the better of this run and the median of the last runs. For a rate or a
    time, the best of the last four starts also counts, so that slow starts are no fall and one good
    run ends it. The limit grows with the noise of the runs: of 1,000 simulated histories of 60 runs
    without a trend, fewer than one fails.
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
    """Compare the last level with the best one; a level is the runs between two changes.

    Return None for a percentile: its noise hides the changes.
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
    """Compare the current level with the best median of three consecutive runs."""
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

    This is four standard deviations of a run, and more if there are few runs. The deviation is
    estimated from differences between runs, which contain no trend and little of a step.
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

    The fit is least squares on logarithms, with a penalty per change of level. The penalty is
    proportional to the variance of the noise between runs.

    Args:
        values: Positive values, oldest first, at least two.

    Returns:
        The segments in order; each has at least two runs.
    """
    logs: Floats = np.log(np.asarray(values, dtype=np.float64))
    count = len(logs)
    steps = np.diff(logs)
    # A robust estimate, so that changes of level do not count as noise; at least 0.1 %.
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
    """Return the levels of a series, without changes that noise can explain.

    A change requires that both the medians and the best runs of the two levels differ, so that slow
    starts are no change: by 3 % if both levels have six runs, else by more than the starts of one
    build differ. In simulations, 1 % of the series with only the noise of starts show a change.

    Args:
        values: The values, oldest first, at least one.
        higher_is_better: True for a rate, False for a time.
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
    """Return a change of level as a multiple of the smallest significant change.

    ``bests`` is the logarithm of the ratio of the best runs of both levels.
    """
    floor = _STEP if min(before.runs, after.runs) >= SERIES else limits.starts_differ_by
    needed = max(floor, chance * float(np.sqrt(1 / before.runs + 1 / after.runs)))
    medians = float(np.log(after.median / before.median))
    change = float(min(abs(medians), bests * np.sign(medians)))
    if needed == 0.0:  # no noise at all: every change is significant
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
        The series by metric: at most 60 stored runs and this run, oldest first.
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
