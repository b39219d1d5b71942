"""Gates: from samples to a verdict, however often one looks.

A gate may be asked after every round. Each planned look (`looks`) may err with a share of `ERROR`,
so that all looks together err at most that often. A decision has to hold in each of these ways:

* the interval of the median clears the threshold;
* so do the tokens over the time of a rate (the harmonic mean of its rounds), by Student's t. Its
  degrees of freedom are those of the rounds that are left when their correlation is taken off. (Of
  a time, or to fail, the sign test of the median will do: a failed request is an infinite time.);
* the margin to the threshold is more than what rounds with a memory may not have shown yet
  (`required_margin`): few rounds can all be of one state of a server that has two;
* the last rounds are not on the other side, however few they are.

What rests on simulation is in docs/tables/gate-errors.md, made by ``tools/gate_errors.py``."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import special

from sm121.core.profile_fields import Gate
from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.measure import statistics
from sm121.measure.measurement import COUNTED, EXISTS_ONCE, Measurement
from sm121.measure.statistics import Estimate, Floats

Grade = Literal["minimum", "target", "stretch"]
#: Measures until there are that many rounds (or requests) in all; returns the whole measurement.
More = Callable[[int], Measurement]

#: Chance of a wrong PASS when the truth is just below the threshold, and of a wrong FAIL above it.
ERROR = 0.01
FIRST_LOOK = 5
#: The rounds of the next looks. Of servers with one slow answer in five, 20 without are 1.2 %.
STEADY_LOOK = 20
_LOOKS = (FIRST_LOOK, STEADY_LOOK, 27, 38, 53, 74, 104)
_GROWTH = 1.4
#: To pass with fewer than so many rounds, a rate has to be above the threshold by more than this
#: fraction. At first: one answer in five at half speed. Then: one of two states 4 % apart.
_UNSEEN_TO_PASS = ((STEADY_LOOK, 0.20), (38, 0.015), (53, 0.010), (74, 0.006))
#: The same to fail, where the time that a decision takes matters less.
_UNSEEN_TO_FAIL = ((STEADY_LOOK, 0.06), (38, 0.025), (53, 0.012), (74, 0.006))
_UNSEEN_AT_LAST = 0.003
#: Rounds with a memory stand for so many independent ones at least.
_FEWEST_INDEPENDENT, _FEWEST_DEGREES, _MOST_CORRELATED = 2.0, 3.0, 0.95
#: Where a correlation is significant (one-sided, 5 %), it is taken for higher by so many of its
#: standard errors.
_SIGNIFICANT, _HIGHER = 1.645, 0.7
#: The ends of a run that must not be on the other side, in rounds, and by how many of their
#: standard errors they may be by chance.
_ENDS, _BY_CHANCE = (1, 2, 3, 5, 8, 13), 2.5
#: A spread of nothing is the clock's resolution, not certainty.
_RESOLUTION = 1e-4
#: Of all rounds, the share that may have been left out because the client was late.
_LEFT_OUT = 1 / 3
#: Fewer earlier starts than these do not show how much the starts of a build differ.
FEWEST_STARTS = 5
#: Of a gate on a tail, at its bound; at 299 requests with none over, the risk is 5 %.
_LAST_TAIL_RISK = 0.01


@dataclass(frozen=True)
class Decision:
    """What a gate says, and why. ``grade`` is the highest threshold that the interval clears."""

    verdict: Verdict
    grade: Grade | None
    estimate: Estimate
    fact: Fact
    """What is required and what was measured; of a PASS, too."""
    start_spread: float | None = None
    """Standard deviation of the logarithms of earlier starts' rates. None: one start is known."""

    @property
    def reason(self) -> str:
        """The fact for people."""
        return str(self.fact)


def looks(maximum_rounds: int) -> tuple[int, ...]:
    """The numbers of rounds at which a gate looks; the last one is the bound."""
    planned = [*_LOOKS]
    while planned[-1] < maximum_rounds:
        planned.append(round(planned[-1] * _GROWTH))
    earlier = [rounds for rounds in planned if rounds < maximum_rounds]
    if earlier and maximum_rounds < earlier[-1] * 1.15:
        earlier.pop()  # a look for so few more rounds would only take its share from the others
    return (*earlier, maximum_rounds)


def next_look(rounds: int, maximum_rounds: int) -> int:
    """How many rounds a gate that is not decided after ``rounds`` wants to see next."""
    return next((look for look in looks(maximum_rounds) if look > rounds), maximum_rounds)


def decide(
    samples: Sequence[float],
    gate: Gate,
    *,
    maximum_rounds: int,
    track: Sequence[float] = (),
    left_out: Sequence[tuple[float, float]] = (),
) -> Decision | None:
    """Decide, or None: more rounds are needed (`next_look`). A request that failed is an infinite
    time, or a rate of 0. With ``maximum_rounds`` of 1 the quantity exists once (a start, a peak),
    and its value decides without an interval. `samples`: as they were measured; `track`: with other
    answers between them, which tell more of how the level moved (`Measurement.track`), and count as
    rounds; `left_out`: of each round that the client was late for, between what its value was:
    where that is not about the median, it counts with the nearest value that it may have. Raises
    ValueError: no samples, or a sample that is no number."""
    estimate = statistics.estimate(samples)
    threshold, higher_is_better = _threshold(gate)
    described = _describe(estimate)

    def decided(above: bool, how: str) -> Decision:
        fact = _fact(gate, estimate, described + how)
        if above != higher_is_better:
            return Decision(Verdict.FAIL, None, estimate, fact)
        return Decision(Verdict.PASS, _grade(estimate, gate), estimate, fact)

    if maximum_rounds == 1:
        at_threshold = estimate.value == threshold
        return decided(estimate.value > threshold or (at_threshold and higher_is_better), "")
    if higher_is_better:
        described += f", {over_time(samples):.4g} {gate.unit} over the time"
    planned = looks(maximum_rounds)
    count = max(len(samples), len(track))
    if len(samples) < planned[0]:
        return None
    above: bool | None = None
    if len(left_out) > _LEFT_OUT * (count + len(left_out)):
        obstacle = f"{len(left_out)} more were left out: the client was late for them"
    else:
        clamped = [min(max(estimate.value, low), high) for low, high in left_out]
        rounds = [*clamped, *(track if len(track) > len(samples) else samples)]
        error = ERROR / len(planned)
        above, obstacle = _side(rounds, samples, threshold, error, is_rate=higher_is_better)
    if above is not None:
        return decided(above, f"; decided at {count} rounds")
    if count < maximum_rounds:
        return None
    why = f": the bound of {maximum_rounds} rounds is reached and allows no decision: {obstacle}"
    fact = _fact(gate, estimate, described + why)
    return Decision(Verdict.INCONCLUSIVE, None, estimate, fact)


def over_time(rates: Sequence[float]) -> float:
    """Tokens over the time of rounds of as many tokens each: the harmonic mean of their rates."""
    values = np.asarray(rates, dtype=np.float64)
    return float(len(values) / (1.0 / values).sum()) if (values > 0.0).all() else 0.0


def effective_samples(values: Floats) -> float:
    """How many independent rounds these rounds stand for, by the correlation of neighbours."""
    count = len(values)
    around = values - values.mean()
    spread = float((around**2).sum())
    if spread <= count * (_RESOLUTION * float(values.mean())) ** 2:
        return float(count)
    correlation = 1.0 - float((np.diff(values) ** 2).sum()) / (2.0 * spread)
    correlation += (1.0 + 3.0 * max(correlation, 0.0)) / count  # few rounds show less than there is
    if correlation * math.sqrt(count) > _SIGNIFICANT:
        correlation += _HIGHER / math.sqrt(count)
    correlation = min(max(correlation, 0.0), _MOST_CORRELATED)
    return max(count * (1.0 - correlation) / (1.0 + correlation), _FEWEST_INDEPENDENT)


def required_margin(rounds: int, *, passing: bool) -> float:
    """How far from its threshold, as a fraction, a level has to be after so many rounds."""
    steps = _UNSEEN_TO_PASS if passing else _UNSEEN_TO_FAIL
    return next((fraction for bound, fraction in steps if rounds < bound), _UNSEEN_AT_LAST)


def _side(
    series: Sequence[float],
    samples: Sequence[float],
    threshold: float,
    error: float,
    *,
    is_rate: bool,
) -> tuple[bool | None, str]:
    """Whether the level is above the threshold; None while that is open, and why it is. `series`:
    all rounds, those of other lengths and those that were left out among them; `samples`: the
    rounds of the metric itself; `error`: the share of errors that this look may make."""
    rounds, measured = (np.asarray(values, dtype=np.float64) for values in (series, samples))
    count = len(rounds)
    ordered = np.sort(measured)
    rank, _ = statistics.median_ranks(len(measured))
    low, high = ordered[rank], ordered[len(measured) - 1 - rank]
    if not (low > threshold or high < threshold):
        return None, "the interval of the median has the threshold in it"
    above = bool(low > threshold)
    sign = 1.0 if above else -1.0
    passing_rate = is_rate and above
    middle = float(np.median(rounds))
    level = over_time(series) if passing_rate else middle
    if passing_rate and level <= threshold:
        return None, "its tokens over the time are on the other side than its median"
    margin = min(sign * (middle / threshold - 1.0), sign * (level / threshold - 1.0))
    if margin <= (required := required_margin(count, passing=above == is_rate)):
        return None, (
            f"{margin:.1%} from the threshold, and after {count} rounds that takes "
            f"{required:.1%}: rounds may have a memory that so few do not show"
        )
    if (last := _opposing_end(rounds, middle, threshold, sign)) is not None:
        which = f"the last {last} rounds are" if last > 1 else "the last round is"
        return None, f"{which} on the other side of the threshold"
    finite = rounds[np.isfinite(rounds)]
    effective = effective_samples(np.minimum(rounds, finite.max() if len(finite) else threshold))
    risk = _t_risk(rounds, threshold, sign, effective, is_rate=is_rate)
    if len(measured) < count:
        share = len(measured) * effective / count
        risk = max(risk, _t_risk(measured, threshold, sign, share, is_rate=is_rate))
    if risk < error / 2:
        return above, ""
    supporting = int((sign * (rounds - threshold) > 0.0).sum() * effective / count)
    opposing = math.ceil((sign * (rounds - threshold) < 0.0).sum() * effective / count)
    # Chance of so many on one side if the median were at the threshold.
    sign_risk = float(special.bdtr(opposing, supporting + opposing, 0.5))
    if not passing_rate and sign_risk < error / 2:
        return above, ""
    memory = (
        f", which stand for {effective:.0f} independent ones," if effective < 0.7 * count else ""
    )
    return None, f"the spread of {count} rounds{memory} is too wide"


def _opposing_end(values: Floats, middle: float, threshold: float, sign: float) -> int | None:
    """How many of the last rounds are on the other side, by more than chance; None if none are."""
    finite = values[np.isfinite(values)]
    spread = 1.4826 * float(np.median(np.abs(finite - middle))) if len(finite) else 0.0
    spread = max(spread, _RESOLUTION * abs(middle)) if math.isfinite(spread) else 0.0
    for length in _ENDS:
        if 2 * length > len(values):
            return None
        beyond = sign * (threshold - float(values[-length:].mean()))
        if beyond > _BY_CHANCE * spread / math.sqrt(length):
            return length
    return None


def _t_risk(
    values: Floats, threshold: float, sign: float, effective: float, *, is_rate: bool
) -> float:
    """Chance of samples so far on one side if their mean were at the threshold. Of a rate, it is
    the mean of the times that tokens took. The worst round counts twice: few rounds show too
    little of a long tail."""
    if not np.isfinite(values).all() or (is_rate and not (values > 0.0).all()):
        return 1.0
    if is_rate:
        values, threshold, sign = 1.0 / values, 1.0 / threshold, -sign
    worst = values.min() if sign > 0.0 else values.max()
    values = np.append(values, worst)
    mean = float(values.mean())
    spread = max(float(values.std(ddof=1)), _RESOLUTION * abs(mean))
    statistic = sign * (mean - threshold) / spread * math.sqrt(effective)
    return float(special.stdtr(max(effective - 1.0, _FEWEST_DEGREES), -statistic))


def _grade(estimate: Estimate, gate: Gate) -> Grade | None:
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
    samples: Sequence[float], gate: Gate, *, fraction: float, maximum_requests: int | None = None
) -> Decision | None:
    """Decide on a quantile (0.99 for a p99) of pooled requests, given a gate with ``at_most``.
    Without ``maximum_requests`` the verdict is that of the requests there are, and the estimate's
    ``confidence`` says how much they show. With it, None means that more requests are needed.
    Raises ValueError: no samples, or the gate is no bound on a time."""
    if gate.at_most is None:
        raise ValueError(f"{gate.metric}: a tail needs at_most")
    values = np.sort(np.asarray(samples, dtype=np.float64))
    count, over = len(values), int((values > gate.at_most).sum())
    # Chance of so few over the bound if the quantile were outside it, and of so many if within.
    risk_of_pass = float(special.bdtr(over, count, 1.0 - fraction))
    risk_of_fail = float(special.bdtrc(over - 1, count, 1.0 - fraction)) if over else 1.0
    interval = statistics.estimate_quantile(samples, fraction)
    # Not that of the interval: how surely the quantile is within the bound.
    estimate = replace(interval, confidence=1.0 - risk_of_pass)
    needed = requests_needed(fraction)
    described = f"{over} of {count} requests over the bound"

    def decided(verdict: Verdict, how: str) -> Decision:
        grade: Grade | None = "minimum" if verdict is Verdict.PASS else None
        return Decision(verdict, grade, estimate, _fact(gate, estimate, described + how))

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
        f"{needed} with none over (--percentiles gathers them)",
    )


def decide_measurement(
    measurement: Measurement, gate: Gate, more: More | None, bound: int
) -> tuple[Decision, Measurement]:
    """Decide on a measurement, with more rounds where they are needed and can be had. `more`: None:
    what was measured has to do; `bound`: the most rounds. Returns: The decision, and the
    measurement with all rounds that were measured for it."""
    while True:
        decision, next_rounds = _look(measurement, gate, more is not None, bound)
        if decision is not None:
            return decision, measurement
        rounds = measurement.rounds
        if more is None:
            observed = f"{rounds} rounds decide nothing; a gate needs at least {FIRST_LOOK}"
            fact = Fact("", observed, gate.metric, evidence="--rounds")
            estimate = statistics.estimate(measurement.samples)
            return Decision(Verdict.INCONCLUSIVE, None, estimate, fact), measurement
        measurement = more(next_rounds)
        if not measurement.valid or measurement.rounds <= rounds:
            more = None  # no more valid rounds will come
            bound = measurement.rounds


def _look(
    measurement: Measurement, gate: Gate, growing: bool, bound: int
) -> tuple[Decision | None, int]:
    """The decision on the rounds so far, and the number of rounds for the next decision."""
    samples = measurement.samples
    if measurement.is_mean:
        estimate = statistics.estimate_mean(samples)
        decision = decide([estimate.value], gate, maximum_rounds=1)
        return decision and replace(decision, estimate=estimate), bound
    if measurement.is_tail:
        assert measurement.quantile is not None
        decision = decide_tail(
            samples,
            gate,
            fraction=measurement.quantile,
            maximum_requests=bound if growing else None,
        )
        needed = requests_needed(measurement.quantile)
        return decision, min(bound, needed if len(samples) < needed else bound)
    if measurement.unit not in EXISTS_ONCE:
        bound = max(bound, FIRST_LOOK)
    decision = decide(
        samples, gate, maximum_rounds=bound, track=measurement.track, left_out=measurement.left_out
    )
    return decision, next_look(measurement.rounds, bound)


def over_starts(
    decision: Decision, gate: Gate, measurement: Measurement, levels: Sequence[float] | None
) -> Decision:
    """Judge a decode or prefill rate with the spread of a build's starts.

    The rounds of one start show the rate of that start. Other starts of the same build have other
    rates, so a decision on the build must hold for a start that is that far away: by Student's t of
    the logarithms of the earlier starts' rates, at the gate's own share of errors.

    Args:
        decision: The decision on the rounds of this start.
        gate: The gate.
        measurement: What was measured.
        levels: The rates of earlier starts of this build on this machine. None: no storage.

    Returns:
        The decision itself, with a note of how many starts it rests on; INCONCLUSIVE where the
        start is nearer to the threshold than starts differ.
    """
    if measurement.unit != "tok/s" or measurement.is_tail or gate.unit != measurement.unit:
        return decision
    if decision.verdict not in (Verdict.PASS, Verdict.FAIL):
        return decision
    count = len(levels or ())
    if count < FEWEST_STARTS:
        return replace(decision, fact=_noted(decision.fact, "one start"))
    logs = np.log(np.asarray(levels, dtype=np.float64))
    spread = max(float(logs.std(ddof=1)), _RESOLUTION)
    reach = float(-special.stdtrit(count - 1, ERROR)) * spread
    threshold, _ = _threshold(gate)
    described = f"{count} earlier starts differ by {spread:.1%} (standard deviation)"
    if abs(math.log(decision.estimate.value / threshold)) > reach:
        fact = _noted(decision.fact, described)
        return replace(decision, fact=fact, start_spread=spread)
    undecided = (
        f"{described}: a start this near to the threshold shows no more of the build, expected "
        f"more than {reach:.1%} from it. --ab compares builds over several starts"
    )
    return replace(
        decision,
        verdict=Verdict.INCONCLUSIVE,
        grade=None,
        fact=_noted(decision.fact, undecided),
        start_spread=spread,
    )


def estimate_of(measurement: Measurement) -> Estimate | None:
    """The value of a measurement and its interval; None without a sample that is a number."""
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
    """The verdict on a measurement and its reason; None where nothing is required. `decision`: of
    its gate, None without one or with invalid samples; `gated`: something is demanded; `against`:
    what speaks against its samples; `refuted`: the verdicts on what is timed that do not stand on
    this machine now; `box`: why. NOT_RUN: nothing to decide on a busy machine."""
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
        return Verdict.INCONCLUSIVE, Fact("", f"the box is DEGRADED: {box}", name)
    if measurement.clock == "chunks" and measurement.unit == "tok/s":
        observed = (
            "tokens were counted by chunks, since the server sends neither token ids nor usage; "
            "no gate decides on that alone"
        )
        return Verdict.INCONCLUSIVE, Fact("", observed, name, evidence=decision.reason)
    return decision.verdict, decision.fact


def _threshold(gate: Gate) -> tuple[float, bool]:
    if gate.minimum is not None:
        return gate.minimum, True
    assert gate.at_most is not None  # the profile's own rule
    return gate.at_most, False


def _fact(gate: Gate, estimate: Estimate, evidence: str) -> Fact:
    threshold, higher = _threshold(gate)
    return Fact(
        "at least" if higher else "at most",
        about=gate.metric,
        value=estimate.value,
        limit=threshold,
        unit=gate.unit,
        evidence=evidence,
    )


def _noted(fact: Fact, text: str) -> Fact:
    return replace(fact, evidence="; ".join(filter(None, (fact.evidence, text))))


def _describe(estimate: Estimate) -> str:
    if estimate.ci_low is None or estimate.confidence is None:
        return "once"
    return (
        f"{estimate.ci_low:.4g} to {estimate.ci_high:.4g} with {estimate.confidence:.1%}, "
        f"{estimate.rounds} rounds"
    )
