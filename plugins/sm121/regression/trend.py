"""A run compared with stored runs.

A metric has regressed against stored runs if all of these hold:

1. Its median is worse than the median of the last runs by more than the threshold.
2. Its samples are significantly worse than those of the latest run (Mann-Whitney test), and the
   whole interval of the loss is above the threshold.
3. It lies outside the scatter of the stored runs (Student's t).

If the first holds and another one does not, the verdict is INCONCLUSIVE.
`sm121.regression.metric_levels` compares the level of a metric with its best level in the history;
`sm121.regression.start_pairs` compares pairs of starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import comb
from typing import NamedTuple

import numpy as np

from sm121.core.level_settings import Regression
from sm121.core.numbers import number
from sm121.core.verdict import Verdict
from sm121.measure import statistics
from sm121.regression.change import Change, Missing, compare_prices, is_price
from sm121.run.stored_run import StoredMetric, StoredRun

#: Number of last stored runs whose median is the level to compare with.
_RECENT = 5
#: Minimum number of stored runs for estimating their scatter.
_SCATTER = 3
#: p-value of the Mann-Whitney test below which samples differ significantly.
_SIGNIFICANT = 0.01
#: p-value below which a run lies outside the scatter of the stored runs.
_BETWEEN_RUNS = 0.05
#: Number of stored starts that suffices to show how starts differ. If one start in four is slow, 16
#: starts contain no slow one with a probability of 1 in 100.
_STARTS = 16
#: The Mann-Whitney test is exact up to this number of samples of both runs together.
_EXACT = 40
#: The reason for INCONCLUSIVE if a loss is significant, but may be smaller than allowed.
_MAY_BE_ALLOWED = (
    ", but the interval reaches into the allowed loss: measure more rounds, or quiet the machine"
)
#: The reason for a verdict if there are too few stored runs to estimate their scatter.
_WITHOUT_SCATTER = {
    Verdict.FAIL: "; a metric that is twice as bad fails without a statistical test",
    Verdict.INCONCLUSIVE: (
        f"; at least {_SCATTER} stored runs are needed to know their scatter: store more runs of a "
        "build that you trust, or run again"
    ),
    Verdict.NOT_RUN: (
        f"; not judged, because it is a percentile or has too few samples per run; with {_SCATTER} "
        "or more stored runs, it is judged by their scatter"
    ),
}


class _Judgement(NamedTuple):
    """A verdict, the end of the sentence that gives the reason, and whether a loss may be noise."""

    verdict: Verdict
    reason: str
    may_be_noise: bool = False


class Unjudged(NamedTuple):
    """The metrics that cannot be judged yet, since too few runs contain them.

    Attributes:
        metrics: The names of the metrics.
        more_runs: How many more runs are needed to judge all of them.
    """

    metrics: list[str]
    more_runs: int


def compare(
    current: Mapping[str, StoredMetric], history: Sequence[StoredRun], limits: Regression
) -> list[Change]:
    """Return the change of each metric that the history also contains.

    Args:
        current: The metrics of this run by name.
        history: Comparable runs, oldest first, without this run.
        limits: The profile's limits.
    """
    changes = []
    for name, metric in current.items():
        stored = [run.find(metric) for run in history]
        earlier = [found for found in stored if found is not None]
        if not earlier:
            continue
        if is_price(name):
            changes.append(compare_prices(metric, earlier, limits))
            continue
        change = _compare(metric, earlier[-_RECENT:], limits.allowed(name))
        changes.append(_allow_for_one_start(change, earlier, limits))
    return changes


def _allow_for_one_start(
    change: Change, stored: Sequence[StoredMetric], limits: Regression
) -> Change:
    """Weaken a verdict that may come from a single fast or slow start: a run is one start.

    - A FAIL remains only if the run is worse than every stored start by more than starts of one
      build differ. With 16 stored starts, half of the allowed loss is enough instead.
    - A PASS becomes INCONCLUSIVE if the run is worse than all of at least three stored starts, and
      worse than the best of them by more than allowed: most stored starts may have been slow.
    """
    differ_by = limits.of_starts(change.metric, change.unit)
    if not differ_by or not change.b:
        return change
    higher = change.higher_is_better
    allowed = change.allowed or 0.0
    values = sorted(metric.value for metric in stored[-_STARTS:])
    worst = values[0]
    best = values[-1]
    if not higher:
        worst = values[-1]
        best = values[0]
    beyond_worst = statistics.relative_loss(change.b, worst, higher)
    beyond_best = statistics.relative_loss(change.b, best, higher)
    verdict = change.verdict
    if verdict is Verdict.FAIL:
        needed = differ_by if len(values) < _STARTS else allowed / 2.0
        if not beyond_worst > needed:
            verdict = Verdict.INCONCLUSIVE
    elif verdict is Verdict.PASS:
        is_slow = beyond_worst > allowed / 3.0 and beyond_best > allowed
        if is_slow and len(values) >= _SCATTER:
            verdict = Verdict.INCONCLUSIVE
    level = float(np.median([metric.value for metric in stored[-_RECENT:]]))
    is_apart = abs(statistics.relative_loss(change.b, level, higher)) > allowed
    is_changed = verdict is not change.verdict
    is_far_better = beyond_best < -2.0 * differ_by
    if is_far_better or not (is_apart or is_changed):
        return change
    words = f"{change.words}; {_one_start(change, verdict, values, limits)}"
    return replace(change, verdict=verdict, words=words)


def _one_start(
    change: Change, verdict: Verdict, values: Sequence[float], limits: Regression
) -> str:
    """Return an explanation if a run is farther from the level than allowed.

    Autotuning selects a fast or a slow set of kernels at each start of a build. ``values``: the
    sorted values of the stored starts.
    """
    known = f"starts of one build differ by up to {limits.starts_differ_by:.0%}"
    if values[-1] > values[0] * (1.0 + (change.allowed or 0.0)):
        ends = f"{number(values[0])} and {number(values[-1])} {change.unit}"
        known += f", and the {len(values)} stored ones are between {ends}"
    if verdict is Verdict.FAIL:
        why = "is worse than every stored one by more"
    elif verdict is Verdict.PASS:
        why = "does not show an improvement"
    else:
        return f"this one start does not decide, because {known}: --ab compares pairs of starts"
    return f"{known}; this one start {why}: --ab compares pairs of starts"


def _compare(now: StoredMetric, earlier: Sequence[StoredMetric], allowed: float) -> Change:
    """Return the change of a metric against the median of earlier runs, oldest first."""
    latest = earlier[-1]
    level = float(np.median([metric.value for metric in earlier]))
    change = Change(
        metric=now.name,
        unit=now.unit,
        higher_is_better=now.higher_is_better,
        a=level,
        b=now.value,
        pairs=len(earlier),
        allowed=allowed,
    )
    if not now.value > 0.0:
        words = f"{now.value:g} {now.unit}, which is not above 0"
        if now.value == 0.0 and all(metric.value == 0.0 for metric in earlier):
            return replace(change, verdict=Verdict.PASS, words=f"{words}, as before")
        return replace(change, verdict=Verdict.FAIL, words=words)
    worse = statistics.relative_loss(now.value, level, now.higher_is_better)
    direction = "worse" if worse > 0 else "better"
    shown_bounds = ""
    if level:
        change = replace(change, ratio=now.value / level)
        bounds = _interval(now, latest, level)
        if bounds is not None:
            low, high = bounds
            change = replace(change, ci_low=low, ci_high=high)
            shown_bounds = f", ratio {low:.3f} to {high:.3f} (95 %)"
    runs = "1 stored run" if len(earlier) == 1 else f"{len(earlier)} stored runs"
    words = (
        f"{number(now.value)} {now.unit}{now.of_bound} against {number(level)}"
        f"{latest.of_bound} ({runs}), {abs(worse):.1%} {direction}"
        f"{shown_bounds}; {allowed:.0%} allowed"
    )
    judgement = _Judgement(Verdict.PASS, "")
    if worse > allowed:
        words += drafts_or_kernels(now, latest, allowed)
        judgement = _judge_loss(now, earlier, change)
    return replace(
        change,
        verdict=judgement.verdict,
        words=words + judgement.reason,
        may_be_noise=judgement.may_be_noise,
    )


def _judge_loss(now: StoredMetric, earlier: Sequence[StoredMetric], change: Change) -> _Judgement:
    """Judge a metric that is worse than allowed; NOT_RUN if no evidence shows a regression."""
    level = change.a or 0.0
    allowed = change.allowed or 0.0
    latest = earlier[-1]
    needs_scatter = _needs_scatter(now, latest)
    risk_of_samples = _mann_whitney(now, latest)
    risk_of_runs = _risk_by_scatter(now, earlier)
    if needs_scatter and risk_of_runs is None:
        verdict = _judge_without_scatter(now, latest, level, allowed)
        return _Judgement(verdict, _WITHOUT_SCATTER[verdict])
    # For a percentile or few samples, only the scatter of the stored runs is evidence.
    evidence = "one value per run"
    if risk_of_samples is not None:
        evidence = f"Mann-Whitney p = {risk_of_samples:.2g}"
    if risk_of_runs is not None:
        evidence += f", p = {risk_of_runs:.2g} by the scatter of the stored runs"
    is_significant = risk_of_samples is not None and risk_of_samples < _SIGNIFICANT
    is_outside = risk_of_runs is None or risk_of_runs < _BETWEEN_RUNS
    if (needs_scatter or is_significant) and is_outside:
        if change.interval is not None and not needs_scatter:
            _, best = change.interval
            if best >= -allowed:  # for example, because the machine had two speeds
                return _Judgement(Verdict.INCONCLUSIVE, f"; {evidence}{_MAY_BE_ALLOWED}")
        return _Judgement(Verdict.FAIL, f"; {evidence}")
    reason = f"; it may be noise ({evidence}): measure more rounds, or quiet the machine"
    return _Judgement(Verdict.INCONCLUSIVE, reason, may_be_noise=True)


def not_judged(runs: Sequence[StoredRun]) -> Unjudged:
    """Return the metrics of the last run that have too little history to be judged.

    Their samples cannot show a significant difference, and fewer than three runs contain them.
    Such a metric only fails if it becomes twice as bad.

    Args:
        runs: The runs, oldest first, at least one.
    """
    metrics = []
    more_runs = 0
    for name, metric in runs[-1].metrics.items():
        if not _needs_scatter(metric, metric):
            continue
        missing_runs = _SCATTER - sum(name in run.metrics for run in runs)
        if missing_runs > 0:
            metrics.append(name)
            more_runs = max(more_runs, missing_runs)
    return Unjudged(metrics, more_runs)


def drafts_or_kernels(now: StoredMetric, before: StoredMetric, allowed: float) -> str:
    """Explain whether a rate fell because fewer drafts were accepted or because steps are slower.

    Args:
        now: The rate of this run.
        before: The rate of the latest stored run.
        allowed: How much worse the rate may be, as a fraction.

    Returns:
        The end of a sentence; empty unless both are rates with speculation.
    """
    accepted_before = before.accepted_length
    accepted_now = now.accepted_length
    if now.unit != "tok/s" or not accepted_before or not accepted_now or not before.value:
        return ""
    if accepted_now >= accepted_before * (1.0 - allowed):
        return (
            f"; acceptance is as before ({accepted_before:.2f}, now {accepted_now:.2f} tokens "
            "a step)"
        )
    steps = (now.value / accepted_now) / (before.value / accepted_before)
    slower = 1.0 - steps
    change = f"{-slower:+.1%} steps a second"
    fell = f"; acceptance fell from {accepted_before:.2f} to {accepted_now:.2f} tokens a step"
    if slower <= allowed:
        return (
            f"{fell}, and the steps are no slower ({change}): the drafts are worse, not the kernels"
        )
    return f"{fell}, and the steps are slower, too ({change})"


def _mann_whitney(now: StoredMetric, before: StoredMetric) -> float | None:
    """Return the one-sided p-value of the Mann-Whitney test that the samples are worse.

    None if a run has only one value.
    """
    if min(len(now.samples), len(before.samples)) < 2:
        return None
    # Imported here, because it takes half a second, and only runs that compare need it.
    from scipy import stats

    alternative = "less" if now.higher_is_better else "greater"
    method = "exact" if len(now.samples) + len(before.samples) <= _EXACT else "asymptotic"
    result = stats.mannwhitneyu(now.samples, before.samples, alternative=alternative, method=method)
    return float(result.pvalue)


def _is_percentile(metric: StoredMetric) -> bool:
    """Return whether a metric is a quantile above the median."""
    return (metric.quantile or 0.5) > 0.5


def _needs_scatter(now: StoredMetric, before: StoredMetric) -> bool:
    """Whether samples alone cannot show a change, as they are of a percentile or too few."""
    if _is_percentile(now):
        return True
    few, many = sorted((len(now.samples), len(before.samples)))
    # Compare integers, because with a thousand samples the number of orders is too large for a
    # float.
    return comb(few + many, few) <= round(1.0 / _SIGNIFICANT)


def _judge_without_scatter(
    now: StoredMetric, latest: StoredMetric, level: float, allowed: float
) -> Verdict:
    """Judge a loss without enough stored runs to estimate their scatter.

    - FAIL if the value is twice as bad. INCONCLUSIVE if only one of several samples is.
    - INCONCLUSIVE if all samples are worse than all samples of the latest run, and the value is
      worse by more than twice the allowed loss. Not for percentiles.
    - NOT_RUN otherwise.
    """
    sign = 1.0 if now.higher_is_better else -1.0  # after multiplying by this, larger is better
    half = level * 2.0**-sign
    if sign * now.value <= sign * half:
        doubled = [sample for sample in now.samples if sign * sample <= sign * half]
        if len(doubled) >= 2 or len(now.samples) < 2:
            return Verdict.FAIL
        return Verdict.INCONCLUSIVE
    best_now = max(sign * sample for sample in now.samples)
    worst_before = min(sign * sample for sample in latest.samples)
    worse = statistics.relative_loss(now.value, level, now.higher_is_better)
    if _is_percentile(now) or worse <= 2.0 * allowed or not best_now < worst_before:
        return Verdict.NOT_RUN
    return Verdict.INCONCLUSIVE


def _risk_by_scatter(now: StoredMetric, earlier: Sequence[StoredMetric]) -> float | None:
    """Return the probability that a run is this bad by chance, from the scatter of stored runs.

    The probability is that of Student's t; None if there are too few runs.
    """
    if len(earlier) < _SCATTER:
        return None
    levels = np.log([metric.value for metric in earlier])
    spread = float(levels.std(ddof=1))
    distance = float(levels.mean() - np.log(now.value))
    if not now.higher_is_better:
        distance = -distance
    if spread == 0.0:
        return 0.0 if distance > 0 else 1.0
    # Imported here, because it takes a tenth of a second, and only runs that compare need it.
    from scipy import special

    scale = spread * np.sqrt(1.0 + 1.0 / len(levels))
    return float(special.stdtr(len(levels) - 1, -distance / scale))


def _interval(now: StoredMetric, latest: StoredMetric, level: float) -> tuple[float, float] | None:
    """Return the 95 % interval of the ratio of a median to the level of the stored runs.

    The interval has the width of the ratio to the latest run, from the samples of both runs. It
    does not include the variation from start to start, since each run is one start. None if the
    metric is not a median, or if a run has fewer than two samples.
    """
    if min(len(now.samples), len(latest.samples)) < 2 or (now.quantile or 0.5) != 0.5:
        return None
    _, low, high = statistics.ratio_interval(now.samples, latest.samples)
    return low * latest.value / level, high * latest.value / level


def missing(current: Mapping[str, StoredMetric], baseline: StoredRun) -> list[Missing]:
    """Return the metrics that the baseline contains and this run lacks.

    Args:
        current: The metrics of this run by name.
        baseline: The stored run.
    """
    return [Missing(name, baseline.name) for name in baseline.metrics if name not in current]
