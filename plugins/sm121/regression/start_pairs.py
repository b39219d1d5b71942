"""B against A over pairs of starts: the verdict follows from the interval of the ratio."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sm121.core.numbers import number
from sm121.core.verdict import Verdict
from sm121.measure.statistics import CONFIDENCE, Floats
from sm121.regression.ab import MetricOfStart, Visit
from sm121.regression.change import Change, is_price, price_change


class PairedMean(NamedTuple):
    """A mean over pairs of starts with its interval.

    Attributes:
        value: The mean.
        low: The lower bound; None with fewer than two pairs.
        high: The upper bound; None with fewer than two pairs.
    """

    value: float
    low: float | None
    high: float | None


def compare_starts(
    visits: Sequence[Visit], allowed: Mapping[str, float], *, default: float, looks: int = 1
) -> list[Change]:
    """Return the change of B against A in every metric that each measurement of A and B contains.

    Args:
        visits: The starts of both sides, in order. The n-th starts of A and B form a pair.
        allowed: How much worse B may be, by metric: as a fraction; for a price, in its unit.
        default: How much worse B may be in all other metrics, as a fraction.
        looks: The number of interim tests as measurements are added. They share the error
            probability equally.
    """
    starts_of_a = [visit.metrics for visit in visits if visit.side == "A"]
    starts_of_b = [visit.metrics for visit in visits if visit.side == "B"]
    pairs = min(len(starts_of_a), len(starts_of_b))
    if not pairs:
        return []
    changes = []
    for name in starts_of_a[0]:
        a = [start[name] for start in starts_of_a[:pairs] if name in start]
        b = [start[name] for start in starts_of_b[:pairs] if name in start]
        if len(a) == len(b) == pairs:
            limit = allowed.get(name, default)
            changes.append(_compare_pairs(name, a, b, limit, looks))
    return changes


def _compare_pairs(
    name: str, a: Sequence[MetricOfStart], b: Sequence[MetricOfStart], allowed: float, looks: int
) -> Change:
    """Return the change of one metric, from equally many starts of both sides."""
    first = np.array([start.value for start in a])
    second = np.array([start.value for start in b])
    if is_price(name):
        return price_change(name, float(first.mean()), float(second.mean()), allowed, len(first))
    change = Change(
        metric=name,
        unit=a[0].unit,
        higher_is_better=a[0].higher_is_better,
        a=float(np.median(first)),
        b=float(np.median(second)),
        pairs=len(first),
        allowed=allowed,
        verdict=Verdict.INCONCLUSIVE,
    )
    if min(first.min(), second.min()) > 0:
        logs = _mean(np.log(second) - np.log(first), looks)
        change = replace(
            change,
            ratio=float(np.exp(logs.value)),
            ci_low=_exponential(logs.low),
            ci_high=_exponential(logs.high),
        )
    if change.interval is not None:
        worst, best = change.interval
        verdict = verdict_of(holds=worst >= -allowed, fails=best < -allowed)
        change = replace(change, verdict=verdict)
    words = (
        f"A {number(change.a)}, B {number(change.b)} {change.unit}; "
        f"B/A {change.shown_ratio} over {len(first)} pairs of starts; {allowed:.0%} worse allowed"
    )
    return replace(change, words=words)


def verdict_of(*, holds: bool, fails: bool) -> Verdict:
    """Return the verdict on an interval that is compared with a bound.

    Args:
        holds: Whether the whole interval is on the right side of the bound.
        fails: Whether the whole interval is on the wrong side.
    """
    if holds:
        return Verdict.PASS
    if fails:
        return Verdict.FAIL
    return Verdict.INCONCLUSIVE


def difference_of_pairs(visits: Sequence[Visit], metric: str, looks: int) -> PairedMean:
    """Return the mean of B - A over pairs of starts.

    Args:
        visits: The starts of both sides, in order. Starts without the metric are ignored.
        metric: The metric's name.
        looks: See `compare_starts`.
    """
    having = [visit for visit in visits if metric in visit.metrics]
    a = [visit.metrics[metric].value for visit in having if visit.side == "A"]
    b = [visit.metrics[metric].value for visit in having if visit.side == "B"]
    return _mean(np.array([now - before for before, now in zip(a, b, strict=False)]), looks)


def _mean(values: Floats, looks: int) -> PairedMean:
    """Return the mean of values with its interval by Student's t."""
    middle = float(values.mean())
    count = len(values)
    if count < 2:
        return PairedMean(middle, None, None)
    from scipy import special  # imported here: it takes 0.1 s, which other runs save

    critical = float(-special.stdtrit(count - 1, (1.0 - CONFIDENCE) / 2.0 / looks))
    reach = critical * float(values.std(ddof=1)) / float(np.sqrt(count))
    return PairedMean(middle, middle - reach, middle + reach)


def _exponential(log: float | None) -> float | None:
    if log is None:
        return None
    return float(np.exp(log))
