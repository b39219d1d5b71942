"""This run against the history: what is worse, what is missing, where the level changed.

A metric has regressed when three things hold: its median is worse than the median of the last runs
by more than the threshold; its samples are worse than the latest run's by a Mann-Whitney test; and
it lies outside what the runs differ by anyway. The first alone is INCONCLUSIVE.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
from scipy import special

from sm121.core.level_settings import Regression
from sm121.core.numbers import number
from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.measure import statistics
from sm121.measure.statistics import Floats
from sm121.regression.history import StoredMetric, StoredRun
from sm121.run.verdict_file import ChangeReport

#: Runs that make the level to compare with.
_RECENT = 5
#: Runs whose scatter says anything.
_SCATTER = 3
_SIGNIFICANT = 0.01
_BETWEEN_RUNS = 0.05
#: Runs in which a change of level can be seen, and the fewest on a level.
_SERIES, _SEGMENT = 6, 2


@dataclass(frozen=True)
class MetricChange:
    """What is said of one metric. ``worse`` and ``allowed`` are fractions: 0.1 for 10 % worse."""

    metric: str
    verdict: Verdict
    worse: float | None
    text: str
    judged: bool = True
    unit: str = ""
    here: float | None = None
    before: float | None = None
    #: So many runs make the level ``before``.
    runs: int = 0
    allowed: float = 0.0

    @property
    def fact(self) -> Fact:
        """What does not hold of it."""
        return Fact(
            "worse than before by at most",
            about=self.metric,
            value=None if self.worse is None else 100 * self.worse,
            limit=100 * self.allowed,
            unit="%",
            evidence=self.text.removeprefix(f"{self.metric}: "),
        )

    def report(self, beside: str | None = None) -> ChangeReport:
        """As verdict.json has it, held against ``beside`` (the stored runs)."""
        runs = f"{self.runs} stored runs" if self.runs > 1 else "the stored run"
        return ChangeReport(
            metric=self.metric,
            unit=self.unit,
            here=self.here,
            before=self.before,
            worse=None if self.worse is None else statistics.finite(self.worse),
            allowed=self.allowed,
            beside=beside or runs,
            verdict=self.verdict,
        )


def compare(
    current: Mapping[str, StoredMetric], history: Sequence[StoredRun], limits: Regression
) -> list[MetricChange]:
    """Each metric that the history has too, against its last runs.

    Args:
        history: comparable runs, oldest first, without the current one.
    """
    found = []
    for name, metric in current.items():
        earlier = [run.metrics[name] for run in history if name in run.metrics]
        if earlier:
            found.append(_compare(metric, earlier[-_RECENT:], limits.allowed(name)))
    return found


def _compare(now: StoredMetric, earlier: Sequence[StoredMetric], allowed: float) -> MetricChange:
    level = float(np.median([metric.value for metric in earlier]))
    known: dict[str, Any] = {
        "unit": now.unit, "here": now.value, "before": level, "runs": len(earlier),
        "allowed": allowed,
    }  # fmt: skip
    if not now.value > 0.0:
        what = f"{now.name}: {now.value:g} {now.unit}, which is nothing"
        if now.value == 0.0 and all(metric.value == 0.0 for metric in earlier):
            return MetricChange(now.name, Verdict.PASS, 0.0, f"{what}, as before", **known)
        return MetricChange(now.name, Verdict.FAIL, None, what, **known)
    worse = _worse(now.value, level, now.higher_is_better)
    risk = _mann_whitney(now, earlier[-1])
    between = _outside(now, earlier)
    change = "worse" if worse > 0 else "better"
    what = (
        f"{now.name}: {number(now.value)} {now.unit}{now.of_bound} against {number(level)}"
        f"{earlier[-1].of_bound} ({len(earlier)} stored runs), "
        f"{abs(worse):.1%} {change}{_interval(now, earlier[-1])}; {allowed:.0%} allowed"
    )

    def said(verdict: Verdict, why: str = "", *, judged: bool = True) -> MetricChange:
        return MetricChange(now.name, verdict, worse, what + why, judged, **known)

    if worse <= allowed:
        return said(Verdict.PASS)
    what += drafts_or_kernels(now, earlier[-1], allowed)
    tail = (now.quantile or 0.5) > 0.5 or _least_risk(now, earlier[-1]) >= _SIGNIFICANT
    if tail and between is None and _beyond_doubt(now, earlier[-1], worse, allowed):
        return said(
            Verdict.INCONCLUSIVE,
            f"; the scatter of {_SCATTER} stored runs would decide: store more of a build that you "
            "trust, or run again",
        )
    if tail and between is None:
        return said(
            Verdict.PASS,
            "; not judged: a percentile, or too few samples a run; from "
            f"{_SCATTER} stored runs on, their scatter decides",
            judged=False,
        )
    evidence = "one value a run" if risk is None else f"Mann-Whitney p = {risk:.2g}"
    if between is not None:
        evidence += f", chance among the stored runs {between:.2g}"
    # Of a percentile or of few samples, the scatter of the runs alone can decide.
    unlikely = tail or (risk is not None and risk < _SIGNIFICANT)
    if unlikely and (between is None or between < _BETWEEN_RUNS):
        return said(Verdict.FAIL, f"; {evidence}")
    return said(
        Verdict.INCONCLUSIVE,
        f"; it may be noise ({evidence}): more rounds, or a quieter machine",
    )


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


def _least_risk(now: StoredMetric, before: StoredMetric) -> float:
    """The smallest p that so many samples can have, all of them on one side."""
    few, many = sorted((len(now.samples), len(before.samples)))
    return 1.0 / comb(few + many, few)


def _beyond_doubt(now: StoredMetric, before: StoredMetric, worse: float, allowed: float) -> bool:
    """Whether few samples are so much worse that it is no success: by twice what is allowed, and
    each of them than each of the latest run's. Of a percentile that says nothing."""
    if (now.quantile or 0.5) > 0.5 or worse <= 2.0 * allowed:
        return False
    if now.higher_is_better:
        return max(now.samples) < min(before.samples)
    return min(now.samples) > max(before.samples)


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


def _interval(now: StoredMetric, before: StoredMetric) -> str:
    if (found := interval(now, before)) is None:
        return ""
    return f", ratio to the latest {found[0]:.3f} to {found[1]:.3f} (95 %)"


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


def missing(current: Mapping[str, StoredMetric], baseline: StoredRun) -> list[str]:
    """Metrics that the baseline has and this run has not, a line each: a benchmark that vanished
    is no success."""
    found = []
    for name in baseline.metrics:
        if name in current:
            continue
        new = [other for other in current if other not in baseline.metrics]
        alike = difflib.get_close_matches(name, new, n=1, cutoff=0.5)
        hint = f"; is it {alike[0]} now?" if alike else ""
        found.append(f"{name} was measured in {baseline.name} and not in this run{hint}")
    return found


def changes(
    current: Mapping[str, StoredMetric], history: Sequence[StoredRun], limits: Regression
) -> list[MetricChange]:
    """Metrics whose level came down somewhere in the history and stayed down: what creeps by less
    than the threshold a run, or was let through once, is seen here."""
    found = []
    for name, metric in current.items():
        runs = [run for run in history if name in run.metrics]
        values = [run.metrics[name].value for run in runs] + [metric.value]
        if len(values) < _SERIES or (metric.quantile or 0.5) > 0.5 or not metric.value > 0.0:
            continue  # a value of 0 is worse than any run: `compare` says so
        parts = segments(values)
        levels = [float(np.median(values[start:end])) for start, end in parts]
        best = max(levels) if metric.higher_is_better else min(levels)
        worse = _worse(levels[-1], best, metric.higher_is_better)
        if len(parts) < 2 or worse <= limits.allowed(name):
            continue
        at = parts[levels.index(best)][1]
        since = runs[at].name if at < len(runs) else "this run"
        found.append(
            MetricChange(
                name,
                Verdict.FAIL,
                worse,
                f"{name}: the level went from {number(best)} to {number(levels[-1])} {metric.unit} "
                f"({worse:.1%} worse, {limits.allowed(name):.0%} allowed), beginning with {since}",
                unit=metric.unit,
                here=levels[-1],
                before=best,
                runs=at,
                allowed=limits.allowed(name),
            )
        )
    return found


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

    def cost(start: int, end: int) -> float:
        total = sums[end] - sums[start]
        return float(squares[end] - squares[start] - total**2 / (end - start))

    best = [0.0] + [np.inf] * count
    previous = [0] * (count + 1)
    for end in range(_SEGMENT, count + 1):
        for start in range(end - _SEGMENT + 1):
            value = best[start] + cost(start, end) + (price if start else 0.0)
            if value < best[end]:
                best[end], previous[end] = value, start
    parts = []
    end = count
    while end > 0:
        parts.append((previous[end], end))
        end = previous[end]
    return parts[::-1]
