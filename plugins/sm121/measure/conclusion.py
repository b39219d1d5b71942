"""Derive the verdict on a measurement, and on the measured build, from a gate's decision."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.measure import gate as gates
from sm121.measure import statistics
from sm121.measure.gate import Decision, Gate
from sm121.measure.measurement import COUNTED, Measurement
from sm121.measure.statistics import Estimate

#: The minimum number of earlier starts for estimating how much the starts of a build differ.
FEWEST_STARTS = 5


def over_starts(
    decision: Decision, gate: Gate, measurement: Measurement, levels: Sequence[float] | None
) -> Decision:
    """Judge a build by the rate of one start, given how much the build's starts differ.

    Rounds after one start show only the rate of that start; other starts of the same build have
    other rates. A decision on the build therefore requires that the rate differs from the threshold
    by more than starts differ. This is tested with Student's t on the logarithms of the earlier
    starts' rates, with the gate's own error probability. It applies only to decode and prefill
    rates.

    Args:
        decision: The decision on the rounds of this start.
        gate: The gate.
        measurement: What was measured.
        levels: The rates of earlier starts of this build on this machine; None if no runs are
            stored.

    Returns:
        The same decision, with a note on the number of starts. If the rate differs from the
        threshold by less than starts differ, the verdict is INCONCLUSIVE.
    """
    if measurement.unit != "tok/s" or measurement.is_tail or gate.unit != measurement.unit:
        return decision
    if decision.verdict not in (Verdict.PASS, Verdict.FAIL):
        return decision
    count = len(levels or ())
    if count < FEWEST_STARTS:
        return replace(decision, fact=_noted(decision.fact, "measured in one start"))
    from scipy import special  # only needed with earlier starts: sm121.clock does not require scipy

    logs = np.log(np.asarray(levels, dtype=np.float64))
    spread = max(float(logs.std(ddof=1)), gates.RESOLUTION)
    reach = float(-special.stdtrit(count - 1, gates.ERROR)) * spread
    threshold, _ = gates.threshold_of(gate)
    described = f"{count} earlier starts differ by {spread:.1%} (standard deviation)"
    if abs(math.log(decision.estimate.value / threshold)) > reach:
        fact = _noted(decision.fact, described)
        return replace(decision, fact=fact, start_spread=spread)
    undecided = (
        f"{described}: one start does not decide about the build, unless its rate is "
        f"more than {reach:.1%} from the threshold. --ab compares builds over several starts"
    )
    return replace(
        decision,
        verdict=Verdict.INCONCLUSIVE,
        grade=None,
        fact=_noted(decision.fact, undecided),
        start_spread=spread,
    )


def estimate_of(measurement: Measurement) -> Estimate | None:
    """Return the value of a measurement and its interval.

    Args:
        measurement: The measurement. Its value is the mean, the median or another quantile of the
            samples.

    Returns:
        The estimate; None if there is no sample, or one is NaN.
    """
    if not measurement.samples or any(math.isnan(sample) for sample in measurement.samples):
        return None
    if measurement.is_mean:
        return statistics.estimate_mean(measurement.samples)
    if measurement.quantile is None or measurement.quantile == 0.5:
        return statistics.estimate(measurement.samples)
    return statistics.estimate_quantile(measurement.samples, measurement.quantile)


def conclude(
    measurement: Measurement,
    decision: Decision | None,
    *,
    gated: bool,
    against: Sequence[str],
    refuted: Collection[Verdict],
    box: str | None,
) -> tuple[Verdict, Fact | None]:
    """Return the verdict on a measurement and its reason.

    Args:
        measurement: The measurement.
        decision: The decision of its gate; None if there is no gate, or if the samples are invalid.
        gated: Whether the metric has a gate.
        against: The reasons why the samples are invalid.
        refuted: The verdicts that do not count for timed values, because the machine is degraded.
        box: Why the machine is degraded.

    Returns:
        The verdict and its reason. If the machine was busy and the metric has no gate, the verdict
        is NOT_RUN. For a PASS without a gate, the reason is None.
    """
    name = measurement.name
    if against and not gated and len(against) == len(measurement.invalid) and measurement.unsteady:
        return Verdict.NOT_RUN, Fact("", f"measured on a busy machine: {'; '.join(against)}", name)
    if against:
        return Verdict.INVALID, Fact("", "; ".join(against), name)
    timed = measurement.unit not in COUNTED
    if decision is None:
        if timed and refuted:
            return Verdict.NOT_RUN, Fact("", f"measured on a busy machine: {box}", name)
        return Verdict.PASS, None
    if timed and decision.verdict in refuted:
        return Verdict.INCONCLUSIVE, Fact("", f"the machine is DEGRADED: {box}", name)
    if measurement.clock == "chunks" and measurement.unit == "tok/s":
        observed = (
            "chunks were counted instead of tokens, since the server sends neither token ids nor "
            "usage; no gate decides on a number of chunks"
        )
        return Verdict.INCONCLUSIVE, Fact("", observed, name, evidence=decision.reason)
    return decision.verdict, decision.fact


def _noted(fact: Fact, text: str) -> Fact:
    return replace(fact, evidence="; ".join(filter(None, (fact.evidence, text))))
