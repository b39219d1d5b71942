"""The one judge of a change: a run against stored ones, and B against A by pairs of starts. Against
stored runs a metric has regressed when three things hold: its median is worse than the median of
the last runs by more than the threshold; its samples are worse than the latest run's by a
Mann-Whitney test; and it lies outside what the runs differ by anyway. The first alone is
INCONCLUSIVE. Against another side, the whole interval of the ratio decides."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import comb

import numpy as np
from scipy import special

from sm121.core.level_settings import Regression
from sm121.core.numbers import number
from sm121.core.verdict import Verdict
from sm121.measure import statistics
from sm121.measure.statistics import CONFIDENCE, Floats
from sm121.regression.ab import MetricOfStart, Visit
from sm121.regression.change import Change, Missing, compare_prices, is_price, price_change
from sm121.run.details import Series, SeriesPoint
from sm121.run.stored_run import StoredMetric, StoredRun

#: Runs that make the level to compare with.
_RECENT = 5
#: Runs whose scatter says anything.
_SCATTER = 3
_SIGNIFICANT = 0.01
_BETWEEN_RUNS = 0.05
#: Runs in which a change of level can be seen, and the fewest on a level.
SERIES, _SEGMENT = 6, 2
#: A change of level between levels of so many runs that is told, as a fraction.
_STEP = 0.03
#: Runs in a row whose median may be the best level of a history.
_ANCHOR = 3
#: Where one start in four is slow, so many in a row are slow once in 250 times, and none of so many
#: is slow once in 100 times.
_SLOW_STARTS, _STARTS = 4, 16
#: Runs apart by at most so many tell by how much runs differ, also where neighbours are alike, and
#: for each that many runs.
_LAGS, _RUNS_OF_LAG = 3, 8
#: Why a metric is judged so where fewer runs are stored than show a scatter.
_WITHOUT_SCATTER = {
    Verdict.FAIL: "; twice as bad is beyond doubt",
    Verdict.INCONCLUSIVE: (
        f"; the scatter of {_SCATTER} stored runs would decide: store more of a build that you "
        "trust, or run again"
    ),
    Verdict.NOT_RUN: (
        "; not judged: a percentile, or too few samples a run; from "
        f"{_SCATTER} stored runs on, their scatter decides"
    ),
}
_MOST_RUNS = 60


def compare(
    current: Mapping[str, StoredMetric], history: Sequence[StoredRun], limits: Regression
) -> list[Change]:
    """Each metric that the history has too, against its last runs. `history`: comparable runs,
    oldest first, without the current one."""
    earlier = {
        name: [run.metrics[name] for run in history if _has(run, metric)]
        for name, metric in current.items()
    }
    return [
        compare_prices(current[name], metrics, limits)
        if is_price(name)
        else _over_starts(
            _compare(current[name], metrics[-_RECENT:], limits.allowed(name)), metrics, limits
        )
        for name, metrics in earlier.items()
        if metrics
    ]


def _has(run: StoredRun, metric: StoredMetric) -> bool:
    """Whether a run measured a metric; a kernel's time at the same sizes."""
    stored = run.metrics.get(metric.name)
    return stored is not None and stored.case == metric.case


def _over_starts(change: Change, stored: Sequence[StoredMetric], limits: Regression) -> Change:
    """A run is one start. What is worse than allowed fails where it is worse than each stored start
    by more than starts of one build differ, or, where so many are stored that they have shown it,
    by half of what is allowed. What is worse than each of some starts, and than the best of them by
    more than is allowed, is no success, though most of them may have been slow."""
    differ_by, allowed = limits.of_starts(change.metric, change.unit), change.allowed or 0.0
    if not differ_by or not change.b:
        return change
    values = sorted(metric.value for metric in stored[-_STARTS:])
    ends = (values[0], values[-1]) if change.higher_is_better else (values[-1], values[0])
    beyond_worst, beyond_best = (_worse(change.b, end, change.higher_is_better) for end in ends)
    slow = beyond_worst > allowed / 3.0 and beyond_best > allowed and len(values) >= _SCATTER
    verdict = change.verdict
    if verdict is Verdict.FAIL:
        settled = beyond_worst > (differ_by if len(values) < _STARTS else allowed / 2.0)
        verdict = Verdict.FAIL if settled else Verdict.INCONCLUSIVE
    elif verdict is Verdict.PASS and slow:
        verdict = Verdict.INCONCLUSIVE
    level = float(np.median([metric.value for metric in stored[-_RECENT:]]))
    is_apart = abs(_worse(change.b, level, change.higher_is_better)) > allowed
    if beyond_best < -2.0 * differ_by or (not is_apart and verdict is change.verdict):
        return change
    text = f"{change.text}; {_one_start(change, verdict, values, limits)}"
    return replace(change, verdict=verdict, text=text)


def _one_start(
    change: Change, verdict: Verdict, values: Sequence[float], limits: Regression
) -> str:
    """What one start shows that is further from its level than allowed: autotuning gives one build
    a fast or a slow set of kernels at each start. `values`: of the stored starts, sorted."""
    known = f"starts of one build differ by up to {limits.starts_differ_by:.0%}"
    if values[-1] > values[0] * (1.0 + (change.allowed or 0.0)):
        ends = f"{number(values[0])} and {number(values[-1])} {change.unit}"
        known += f", and the {len(values)} stored ones are between {ends}"
    if verdict is Verdict.FAIL:
        why = "and worse than each stored one by more"
    elif verdict is Verdict.PASS:
        why = "and shows no improvement"
    else:
        return f"it is one start, and {known}: --ab decides over pairs of starts"
    return f"{known}; it is one start, {why}: --ab decides over pairs of starts"


def _compare(now: StoredMetric, earlier: Sequence[StoredMetric], allowed: float) -> Change:
    latest = earlier[-1]
    level = float(np.median([metric.value for metric in earlier]))

    def change(verdict: Verdict, text: str, ratio: float | None = None) -> Change:
        return Change(
            now.name, now.unit, now.higher_is_better, level, now.value, ratio,
            pairs=len(earlier), allowed=allowed, verdict=verdict, text=text,
        )  # fmt: skip

    if not now.value > 0.0:
        text = f"{now.name}: {now.value:g} {now.unit}, which is nothing"
        if now.value == 0.0 and all(metric.value == 0.0 for metric in earlier):
            return change(Verdict.PASS, f"{text}, as before")
        return change(Verdict.FAIL, text)
    worse = _worse(now.value, level, now.higher_is_better)
    bounds = interval(now, latest)
    ratio = f", ratio to the latest {bounds[0]:.3f} to {bounds[1]:.3f} (95 %)" if bounds else ""
    text = (
        f"{now.name}: {number(now.value)} {now.unit}{now.of_bound} against {number(level)}"
        f"{latest.of_bound} ({len(earlier)} stored runs), {abs(worse):.1%} "
        f"{'worse' if worse > 0 else 'better'}{ratio}; {allowed:.0%} allowed"
    )
    verdict, why = Verdict.PASS, ""
    if worse > allowed:
        text += drafts_or_kernels(now, latest, allowed)
        verdict, why = _beyond(now, earlier, level, allowed)
    return change(verdict, text + why, now.value / level if level else None)


def _beyond(
    now: StoredMetric, earlier: Sequence[StoredMetric], level: float, allowed: float
) -> tuple[Verdict, str]:
    """The verdict on a metric that is worse than allowed, and why. NOT_RUN: nothing can tell."""
    latest = earlier[-1]
    risk, between = _mann_whitney(now, latest), _outside(now, earlier)
    tail = _needs_scatter(now, latest)
    if tail and between is None:
        verdict = _without_scatter(now, latest, level, allowed)
        return verdict, _WITHOUT_SCATTER[verdict]
    # Of a percentile or of few samples, the scatter of the runs alone can decide.
    evidence = "one value a run" if risk is None else f"Mann-Whitney p = {risk:.2g}"
    if between is not None:
        evidence += f", chance among the stored runs {between:.2g}"
    unlikely = tail or (risk is not None and risk < _SIGNIFICANT)
    if unlikely and (between is None or between < _BETWEEN_RUNS):
        return Verdict.FAIL, f"; {evidence}"
    why = f"; it may be noise ({evidence}): more rounds, or a quieter machine"
    return Verdict.INCONCLUSIVE, why


def not_judged(runs: Sequence[StoredRun]) -> tuple[list[str], int]:
    """The metrics of the last of these runs of which only what is twice as bad is red, since too
    few runs have them, and how many runs more it takes."""
    metrics = [m for m in runs[-1].metrics.values() if _needs_scatter(m, m)]
    more = {m.name: _SCATTER - sum(m.name in run.metrics for run in runs) for m in metrics}
    return [name for name in more if more[name] > 0], max([0, *more.values()])


def drafts_or_kernels(now: StoredMetric, before: StoredMetric, allowed: float) -> str:
    """Whether a rate fell because fewer drafts are accepted, or because steps are slower; empty
    where it is no rate with speculation."""
    one, other = before.accepted_length, now.accepted_length
    if now.unit != "tok/s" or not one or not other or not before.value:
        return ""
    steps = (now.value / other) / (before.value / one)
    slower = 1.0 - steps
    if other >= one * (1.0 - allowed):
        return f"; acceptance is as before ({one:.2f}, now {other:.2f} tokens a step)"
    return f"; acceptance fell from {one:.2f} to {other:.2f} tokens a step, and " + (
        f"the steps are no slower ({-slower:+.1%}): the drafts are worse, not the kernels"
        if slower <= allowed
        else f"the steps are slower, too ({-slower:+.1%})"
    )


def _mann_whitney(now: StoredMetric, before: StoredMetric) -> float | None:
    """Chance that samples of one distribution look so much worse; None with one value a run."""
    if min(len(now.samples), len(before.samples)) < 2:
        return None
    from scipy import stats  # half a second, which a run that compares nothing need not spend

    alternative = "less" if now.higher_is_better else "greater"
    method = "exact" if len(now.samples) + len(before.samples) <= 40 else "asymptotic"
    result = stats.mannwhitneyu(now.samples, before.samples, alternative=alternative, method=method)
    return float(result.pvalue)


def _needs_scatter(now: StoredMetric, before: StoredMetric) -> bool:
    """Whether samples decide nothing: of a percentile, or so few that no test is significant."""
    few, many = sorted((len(now.samples), len(before.samples)))
    return (now.quantile or 0.5) > 0.5 or 1.0 / comb(few + many, few) >= _SIGNIFICANT


def _without_scatter(
    now: StoredMetric, latest: StoredMetric, level: float, allowed: float
) -> Verdict:
    """The verdict on it where too few runs are stored. Twice as bad is beyond doubt, unless a
    single sample of several makes it so. Few samples are no success where each is worse than each
    of the latest run's, and all of it by twice what is allowed."""
    sign = 1.0 if now.higher_is_better else -1.0  # larger is better of what it multiplies
    half = level * 2.0**-sign
    if sign * now.value <= sign * half:
        doubled = [sample for sample in now.samples if sign * sample <= sign * half]
        return Verdict.FAIL if doubled[1:] or not now.samples[1:] else Verdict.INCONCLUSIVE
    apart = max(sign * v for v in now.samples) < min(sign * v for v in latest.samples)
    worse = _worse(now.value, level, now.higher_is_better)
    if (now.quantile or 0.5) > 0.5 or worse <= 2.0 * allowed or not apart:
        return Verdict.NOT_RUN
    return Verdict.INCONCLUSIVE


def _outside(now: StoredMetric, earlier: Sequence[StoredMetric]) -> float | None:
    """Chance of one more run so bad, from the scatter of the runs; None with too few of them."""
    if len(earlier) < _SCATTER:
        return None
    levels = np.log([metric.value for metric in earlier])
    spread = float(levels.std(ddof=1))
    distance = float(levels.mean() - np.log(now.value))
    if not now.higher_is_better:
        distance = -distance
    if spread == 0.0:
        return 0.0 if distance > 0 else 1.0
    scale = spread * np.sqrt(1.0 + 1.0 / len(levels))
    return float(special.stdtr(len(levels) - 1, -distance / scale))


def interval(now: StoredMetric, before: StoredMetric) -> tuple[float, float] | None:
    """The 95 % interval of the ratio of two medians, by the samples of both runs; None for another
    percentile, and for fewer than two samples on a side. What differs from start to start is not in
    it: one start is one start, however many samples it has."""
    if min(len(now.samples), len(before.samples)) < 2 or (now.quantile or 0.5) != 0.5:
        return None
    _, low, high = statistics.ratio_interval(now.samples, before.samples)
    return low, high


def _worse(now: float, before: float, higher_is_better: bool) -> float:
    if before == 0.0:
        return 0.0 if now == 0.0 or higher_is_better else float("inf")
    return 1.0 - now / before if higher_is_better else now / before - 1.0


def missing(current: Mapping[str, StoredMetric], baseline: StoredRun) -> list[Missing]:
    """The metrics that the baseline has and this run has not."""
    return [Missing(name, baseline.name) for name in baseline.metrics if name not in current]


def changes(
    current: Mapping[str, StoredMetric], history: Sequence[StoredRun], limits: Regression
) -> list[Change]:
    """Metrics whose level is worse than the best of the whole history, by a step that was let
    through or by steps that are each within the threshold."""
    fallen = []
    for name, metric in current.items():
        runs = [run for run in history if _has(run, metric) and run.metrics[name].value > 0.0]
        values = [run.metrics[name].value for run in runs] + [metric.value]
        if len(values) < SERIES or not metric.value > 0.0 or is_price(name):
            continue  # `compare` says of a value of 0, and of a price, that it is worse than any
        fall = _fall(metric, values, limits)
        if fall is None:
            continue
        best, level, at, allowed = fall
        since = runs[at].name if at < len(runs) else "this run"
        text = (
            f"{name}: the level went from {number(best)} to {number(level)} {metric.unit} "
            f"({_worse(level, best, metric.higher_is_better):.1%} worse, {allowed:.0%} allowed), "
            f"beginning with {since}"
        )
        fallen.append(Change(
            name, metric.unit, metric.higher_is_better, best, level, level / best,
            pairs=at, allowed=allowed, verdict=Verdict.FAIL, text=text,
        ))  # fmt: skip
    return fallen


def _fall(
    metric: StoredMetric, values: Sequence[float], limits: Regression
) -> tuple[float, float, int, float] | None:
    """The best level of a metric, the level now, the first run behind the best, and what is
    allowed, if the level now is worse than that.

    A step: levels are those between two changes; not of a percentile, whose scatter hides them. A
    creep: the best level stays however long ago it was. It is the best median of three runs in a
    row, so that no lucky run is one. The level now is the better of this run and the median of the
    last five, and of what is timed the best of four starts, so that slow starts are no creep, and
    none is left where this run is good again. More is allowed where runs differ by more: of 1,000
    simulated runs without a trend, in histories of 60, less than one is red."""
    better, chance = max if metric.higher_is_better else min, _chance(values)
    is_timed = limits.of_starts(metric.name, metric.unit) > 0.0
    starts = values[-_SLOW_STARTS:] if is_timed else values[-1:]
    levels: list[tuple[float, float, int, float]] = []
    parts = segments(values) if (metric.quantile or 0.5) <= 0.5 else []
    medians = {end: float(np.median(values[start:end])) for start, end in parts}
    robust = [end for start, end in parts if end - start >= _ANCHOR]
    if robust:
        at = better(robust, key=medians.__getitem__)
        by_chance = chance * np.sqrt(1.0 / (len(values) - parts[-1][0]) + 1.0 / _ANCHOR)
        allowed = max(limits.allowed(metric.name), by_chance)
        level = medians[len(values)]
        level = better(level, *starts) if is_timed else level
        levels.append((medians[at], level, at, allowed))
    anchors = [float(np.median(values[i : i + _ANCHOR])) for i in range(len(values) - _ANCHOR)]
    level = better(*starts, float(np.median(values[-_RECENT:])))
    at, allowed = anchors.index(better(anchors)) + _ANCHOR, limits.of_anchor(metric.name)
    levels.append((better(anchors), level, at, max(allowed, chance)))
    higher = metric.higher_is_better
    return next((each for each in levels if _worse(each[1], each[0], higher) > each[3]), None)


def _chance(values: Sequence[float]) -> float:
    """How much worse the level of some runs may be by chance, as a fraction: four standard
    deviations of a run, and more where few runs tell it. It is taken from differences of runs: no
    trend is in it, and of a step little."""
    logs = np.log(values)
    means = []
    for lag in range(1, 1 + min(_LAGS, max(1, len(logs) // _RUNS_OF_LAG))):
        steps = logs[lag:] - logs[:-lag]
        sizes = np.abs(steps - np.median(steps))
        means.append(float(np.minimum(sizes, 4.0 * np.median(sizes)).mean()))
    noise = max(means) * np.sqrt(np.pi) / 2.0
    return float(np.expm1((4.0 + 18.0 / (len(values) - 1)) * noise))


def segments(values: Sequence[float]) -> list[tuple[int, int]]:
    """The piecewise constant levels of a series, as (start, end): least squares on logarithms with
    a price for each change, which is judged by the noise from run to run."""
    logs: Floats = np.log(np.asarray(values, dtype=np.float64))
    count = len(logs)
    steps = np.diff(logs)
    # Robust, so that the changes themselves do not count as noise; never below 0.1 %.
    noise = max(1.4826 * float(np.median(np.abs(steps - np.median(steps)))) / np.sqrt(2.0), 1e-3)
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
        parts.append((previous[end], end))
        end = previous[end]
    return parts[::-1]


def levels_of(
    values: Sequence[float], *, higher_is_better: bool, limits: Regression
) -> list[tuple[int, int, float]]:
    """The levels of a series that a reader may rely on, as (start, end, median): of `segments`,
    those between changes that are no scatter. Of each change both the medians and the best runs
    differ, so that slow starts are none; by 3 % where both levels have six runs, else by more than
    starts differ. Of series without a change, with the noise of starts, one in 100 has one."""
    levels = [(0, len(values), float(np.median(values)))]
    if len(values) < SERIES or not min(values) > 0.0:
        return levels
    best, chance = max if higher_is_better else min, _chance(values)
    levels = [(a, b, float(np.median(values[a:b]))) for a, b in segments(values)]

    def excess(number: int) -> float:
        (a, middle, before), (_, b, after) = levels[number : number + 2]
        floor = _STEP if min(middle - a, b - middle) >= SERIES else limits.starts_differ_by
        needed = max(floor, chance * np.sqrt(1 / (middle - a) + 1 / (b - middle)))
        medians = np.log(after / before)
        bests = np.log(best(values[middle:b]) / best(values[a:middle]))
        return float(min(abs(medians), bests * np.sign(medians)) / needed)

    while len(levels) > 1 and excess(weakest := min(range(len(levels) - 1), key=excess)) <= 1.0:
        start, end = levels[weakest][0], levels[weakest + 1][1]
        levels[weakest : weakest + 2] = [(start, end, float(np.median(values[start:end])))]
    return levels


def series_of(
    current: Mapping[str, StoredMetric], history: Sequence[StoredRun], started: str
) -> dict[str, Series]:
    """Each metric of this run over the stored ones, oldest first."""
    series = {}
    for name, metric in current.items():
        runs = [run for run in history if name in run.metrics][-_MOST_RUNS:]
        values = [(run.name, run.file.started, run.metrics[name].value) for run in runs]
        series[name] = Series(
            unit=metric.unit,
            higher_is_better=metric.higher_is_better,
            points=[
                SeriesPoint(run=run, when=when, value=value)
                for run, when, value in [*values, ("this run", started, metric.value)]
            ],
        )
    return series


def compare_starts(
    visits: Sequence[Visit], allowed: Mapping[str, float], *, default: float, looks: int = 1
) -> list[Change]:
    """Every metric that all visits have, B against A. ``allowed``: how much worse B may be, by
    metric, ``default`` for the others; ``looks``: how often this is asked as visits are added: each
    look gets its share of the error."""
    a, b = ([visit.metrics for visit in visits if visit.side == side] for side in "AB")
    pairs = [*zip(a, b, strict=False)]
    return [
        _compare_pairs(
            name,
            [one[name] for one, _ in pairs],
            [other[name] for _, other in pairs],
            allowed.get(name, default),
            looks,
        )
        for name in (a[0] if pairs else ())
        if all(name in one and name in other for one, other in pairs)
    ]


def _compare_pairs(
    name: str, a: Sequence[MetricOfStart], b: Sequence[MetricOfStart], allowed: float, looks: int
) -> Change:
    first = np.array([start.value for start in a])
    second = np.array([start.value for start in b])
    if is_price(name):
        means = float(first.mean()), float(second.mean())
        return price_change(name, *means, allowed, len(first))
    ratio = low = high = None
    if min(first.min(), second.min()) > 0:
        logs = _mean(np.log(second) - np.log(first), looks)
        ratio, low, high = (None if log is None else float(np.exp(log)) for log in logs)
    change = Change(
        name, a[0].unit, a[0].higher_is_better, float(np.median(first)), float(np.median(second)),
        ratio, low, high, len(first), allowed, Verdict.INCONCLUSIVE,
    )  # fmt: skip
    if (better := change.interval) is not None:
        change = replace(change, verdict=verdict_of(better[0] >= -allowed, better[1] < -allowed))
    text = (
        f"{name}: A {number(change.a)}, B {number(change.b)} {change.unit}; "
        f"B/A {change.shown_ratio} over {len(first)} pairs of starts; {allowed:.0%} worse allowed"
    )
    return replace(change, text=text)


def verdict_of(holds: bool, fails: bool) -> Verdict:
    """PASS or FAIL; INCONCLUSIVE where the interval shows neither."""
    if holds:
        return Verdict.PASS
    return Verdict.FAIL if fails else Verdict.INCONCLUSIVE


#: A value with its interval, which so few values may not have.
Interval = tuple[float, float | None, float | None]


def difference_of_pairs(visits: Sequence[Visit], metric: str, looks: int) -> Interval:
    """Mean of B - A over pairs and its interval; None where a side lacks the metric. ``looks``: as
    of `compare_starts`."""
    a, b = (
        [v.metrics[metric].value for v in visits if v.side == side and metric in v.metrics]
        for side in "AB"
    )
    return _mean(np.array([now - before for before, now in zip(a, b, strict=False)]), looks)


def _mean(values: Floats, looks: int) -> Interval:
    middle, count = float(values.mean()), len(values)
    if count < 2:
        return middle, None, None
    critical = float(-special.stdtrit(count - 1, (1.0 - CONFIDENCE) / 2.0 / looks))
    reach = critical * float(values.std(ddof=1)) / float(np.sqrt(count))
    return middle, middle - reach, middle + reach
