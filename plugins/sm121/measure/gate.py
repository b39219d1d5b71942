"""Gates: from samples to a verdict, however often one looks.

A gate may be asked after every round. It looks only at fixed numbers of rounds (`looks`), and each
look may err with a share of `ERROR`, so that all looks together err at most that often. There are
two ways to a decision at a look, with half of the share each:

* Student's t on the samples: quick when the rounds agree, and trusts that they are about normal;
* the sign test on the median: needs eleven rounds or more, and trusts nothing but independence.

Neither decides unless the plain interval of the median clears the threshold too. So a few slow
rounds can neither fail a good engine nor hide a bad one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import special, stats

from sm121.core.profile import Gate
from sm121.core.verdict import Verdict
from sm121.measure import statistics
from sm121.measure.statistics import Estimate, Floats

Grade = Literal["minimum", "target", "stretch"]

#: Chance of a wrong PASS when the truth is just below the threshold, and of a wrong FAIL above it.
ERROR = 0.01
FIRST_LOOK = 5
_GROWTH = 1.4
#: Of a gate on a tail, at its bound; at 299 requests with none over, the risk is 5 %.
_LAST_TAIL_RISK = 0.01


@dataclass(frozen=True)
class Decision:
    """What a gate says, and why. ``grade`` is the highest threshold that the interval clears."""

    verdict: Verdict
    grade: Grade | None
    estimate: Estimate
    reason: str


def looks(maximum_rounds: int) -> tuple[int, ...]:
    """The numbers of rounds at which a gate looks; the last one is the bound."""
    found = []
    at: float = FIRST_LOOK
    while at < maximum_rounds:
        found.append(round(at))
        at *= _GROWTH
    if found and maximum_rounds < found[-1] * 1.15:
        found.pop()  # a look for so few more rounds would only take its share from the others
    return (*found, maximum_rounds)


def next_look(rounds: int, maximum_rounds: int) -> int:
    """How many rounds a gate that is not decided after ``rounds`` wants to see next."""
    return next((at for at in looks(maximum_rounds) if at > rounds), maximum_rounds)


def decide(samples: Sequence[float], gate: Gate, *, maximum_rounds: int) -> Decision | None:
    """Decide, or None: more rounds are needed (`next_look` says how many).

    A request that failed is an infinite time, or a rate of 0. With ``maximum_rounds`` of 1 the
    quantity exists once (a start, a peak), and its value decides without an interval.

    Raises:
        ValueError: no samples, or a sample that is no number.
    """
    estimate = statistics.estimate(samples)
    threshold, higher_is_better = _threshold(gate)
    seen = f"required: {_requirement(gate)}; seen: {_describe(estimate, gate)}"

    def decided(above: bool, how: str) -> Decision:
        if above != higher_is_better:
            return Decision(Verdict.FAIL, None, estimate, seen + how)
        return Decision(Verdict.PASS, _grade(estimate, gate), estimate, seen + how)

    if maximum_rounds == 1:
        at_threshold = estimate.value == threshold
        return decided(estimate.value > threshold or (at_threshold and higher_is_better), "")
    planned = looks(maximum_rounds)
    share = ERROR / len(planned)
    for at in planned:
        if len(samples) < at:
            return None
        side = _side(np.asarray(samples[:at], dtype=np.float64), threshold, share)
        if side is not None:
            return decided(side, f"; decided at {at} rounds")
    why = f": the bound of {maximum_rounds} rounds is reached and the noise allows no decision"
    return Decision(Verdict.INCONCLUSIVE, None, estimate, seen + why)


def _side(values: Floats, threshold: float, share: float) -> bool | None:
    """Whether the median is above the threshold; None while that is open."""
    ordered = np.sort(values)
    rank, _ = statistics.median_ranks(len(ordered))
    low, high = ordered[rank], ordered[len(ordered) - 1 - rank]
    if not (low > threshold or high < threshold):
        return None
    above = bool(low > threshold)
    sign = 1.0 if above else -1.0
    favour = int((sign * (values - threshold) > 0.0).sum())
    against = int((sign * (values - threshold) < 0.0).sum())
    # Chance of so many on one side if the median were at the threshold.
    if special.bdtr(against, favour + against, 0.5) < share / 2:
        return above
    return above if _t_risk(values, threshold, sign) < share / 2 else None


def _t_risk(values: Floats, threshold: float, sign: float) -> float:
    """Chance of samples so far on one side if their mean were at the threshold."""
    if not np.isfinite(values).all():
        return 1.0
    spread = float(values.std(ddof=1))
    distance = sign * (float(values.mean()) - threshold)
    if spread == 0.0:
        return 0.0 if distance > 0.0 else 1.0
    statistic = distance / spread * np.sqrt(len(values))
    return float(special.stdtr(len(values) - 1, -statistic))


def _grade(estimate: Estimate, gate: Gate) -> Grade | None:
    """The highest grade that the whole interval reaches; of a time, there is only one."""
    if gate.minimum is None:
        return "minimum"
    low = estimate.value if estimate.ci_low is None else estimate.ci_low
    if gate.stretch is not None and low >= gate.stretch:
        return "stretch"
    if gate.target is not None and low >= gate.target:
        return "target"
    return "minimum"


def requests_needed(fraction: float) -> int:
    """How many requests, none of them over a bound, show with 95 % confidence that the ``fraction``
    quantile is within it. For the 99th percentile: 299."""
    return math.ceil(math.log(1.0 - statistics.CONFIDENCE) / math.log(fraction))


def decide_tail(
    samples: Sequence[float],
    gate: Gate,
    *,
    fraction: float,
    maximum_requests: int | None = None,
) -> Decision | None:
    """Decide on a quantile (0.99 for a p99) of pooled requests, given a gate with ``at_most``.

    Without ``maximum_requests`` nothing more is asked for: the verdict is that of the requests
    there are, and the estimate's ``confidence`` says how much they can show. With it, None means
    that more requests are needed.

    Raises:
        ValueError: no samples, or the gate is no bound on a time.
    """
    if gate.at_most is None:
        raise ValueError(f"{gate.metric}: a tail needs at_most")
    values = np.sort(np.asarray(samples, dtype=np.float64))
    count, over = len(values), int((values > gate.at_most).sum())
    # Chance of so few over the bound if the quantile were outside it, and of so many if within.
    risk_of_pass = float(stats.binom.cdf(over, count, 1.0 - fraction))
    risk_of_fail = float(stats.binom.sf(over - 1, count, 1.0 - fraction)) if over else 1.0
    interval = statistics.estimate_quantile(samples, fraction)
    # Not that of the interval: how surely the quantile is within the bound.
    estimate = replace(interval, confidence=1.0 - risk_of_pass)
    needed = requests_needed(fraction)
    what = (
        f"required: {_requirement(gate)}; seen: {interval.value:.4g} {gate.unit}, {over} of "
        f"{count} requests over the bound"
    )

    def decided(verdict: Verdict, how: str) -> Decision:
        grade: Grade | None = "minimum" if verdict is Verdict.PASS else None
        return Decision(verdict, grade, estimate, what + how)

    if risk_of_fail < ERROR:
        return decided(Verdict.FAIL, "")
    if over == 0 and count >= needed:
        return decided(Verdict.PASS, "; shown with 95 % confidence")
    if maximum_requests is not None:
        if count < maximum_requests:
            return None
        if risk_of_pass <= _LAST_TAIL_RISK:
            return decided(Verdict.PASS, "; shown with 99 %")
        return decided(Verdict.INCONCLUSIVE, ": that decides nothing")
    return decided(
        Verdict.PASS if interval.value <= gate.at_most else Verdict.INCONCLUSIVE,
        f"; {count} requests show it with {estimate.confidence:.0%} confidence; 95 % takes "
        f"{needed} with none over (--tails gathers them)",
    )


def _threshold(gate: Gate) -> tuple[float, bool]:
    if gate.minimum is not None:
        return gate.minimum, True
    assert gate.at_most is not None  # the profile's own rule
    return gate.at_most, False


def _requirement(gate: Gate) -> str:
    threshold, higher = _threshold(gate)
    return f"{gate.metric} {'>=' if higher else '<='} {threshold:g} {gate.unit}"


def _describe(estimate: Estimate, gate: Gate) -> str:
    if estimate.ci_low is None or estimate.confidence is None:
        return f"{estimate.value:.4g} {gate.unit} (once)"
    return (
        f"{estimate.value:.4g} {gate.unit} [{estimate.ci_low:.4g}, {estimate.ci_high:.4g}] "
        f"({estimate.confidence:.1%}, {estimate.rounds} rounds)"
    )
