"""Gates: decide with a sequential test whether a metric's samples meet a threshold.

The samples may be tested after every round. Each planned interim test, or look (`looks`), gets an
equal share of the error probability `ERROR`, so that all looks together err at most that often. A
decision requires each of these:

* The interval of the median clears the threshold.
* For a PASS of a rate, all tokens over the whole time (the harmonic mean of the rounds' rates) also
  clears the threshold, by Student's t with the effective sample size, which corrects for correlated
  rounds. For a time or a FAIL, the sign test is enough: a failed request is an infinite time.
* The margin exceeds `required_margin`: a few rounds may show only one of a server's two states.
* No group of last rounds (the last one, the last two, ...) is on the other side of the threshold.

The constants that rest on simulation are in docs/tables/gate-errors.md (``tools/gate_errors.py``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.measure import statistics
from sm121.measure.distributions import binomial_cdf, student_cdf
from sm121.measure.measurement import EXISTS_ONCE, Measurement
from sm121.measure.statistics import Estimate, Floats

Grade = Literal["minimum", "target", "stretch"]
#: Continues a measurement up to a total number of rounds (or requests), and returns all of it.
More = Callable[[int], Measurement]

#: Probability of a wrong PASS of a rate just below its threshold, and of a wrong FAIL just above.
ERROR = 0.01
#: Number of rounds at the first look.
FIRST_LOOK = 5
#: Rounds at the second look: if one in five is slow, 20 have no slow one in 1.2 % of the runs.
STEADY_LOOK = 20
#: Numbers of rounds at the planned looks.
_LOOKS = (FIRST_LOOK, STEADY_LOOK, 27, 38, 53, 74, 104)
#: Factor between the numbers of rounds at further looks.
_GROWTH = 1.4
#: Rows of (rounds, fraction): with fewer rounds, a rate passes only if it exceeds the threshold by
#: more than the fraction. The first row is computed for a server whose rate is halved in one answer
#: of five, the others for a server with two states 4 % apart.
_UNSEEN_TO_PASS = ((STEADY_LOOK, 0.20), (38, 0.015), (53, 0.010), (74, 0.006))
#: The same rows for a FAIL. They are less strict, because a late FAIL matters less.
_UNSEEN_TO_FAIL = ((STEADY_LOOK, 0.06), (38, 0.025), (53, 0.012), (74, 0.006))
#: The fraction for more rounds than in the last row.
_UNSEEN_AT_LAST = 0.003
#: Minimum effective sample size of correlated rounds.
_FEWEST_INDEPENDENT = 2.0
#: Minimum degrees of freedom of Student's t.
_FEWEST_DEGREES = 3.0
#: Maximum assumed correlation of consecutive rounds.
_MOST_CORRELATED = 0.95
#: A correlation is significant from this many standard errors on (one-sided, 5 %).
_SIGNIFICANT = 1.645
#: A significant correlation is raised by this many standard errors, to be conservative.
_HIGHER = 0.7
#: For each of these N, the mean of the last N rounds must be on the same side as that of all.
_ENDS = (1, 2, 3, 5, 8, 13)
#: A mean on the other side by at most this many standard errors may be there by chance.
_BY_CHANCE = 2.5
#: The minimum relative spread. A spread of 0 only shows the resolution of the clock.
RESOLUTION = 1e-4
#: The maximum fraction of rounds that are excluded because the client was late.
_LEFT_OUT = 1 / 3
#: The maximum probability of a wrong PASS of a percentile (``ttft_p99``) at the last look.
_LAST_TAIL_RISK = 0.01


class Gate(Protocol):
    """The thresholds of one metric, in its unit, from a profile or from a caller."""

    @property
    def metric(self) -> str:
        """The name of the metric."""

    @property
    def unit(self) -> str:
        """The unit of the thresholds, for messages."""

    @property
    def minimum(self) -> float | None:
        """The threshold below which a rate fails; None for a time."""

    @property
    def target(self) -> float | None:
        """The threshold of the grade ``target``, above the minimum; None without this grade."""

    @property
    def stretch(self) -> float | None:
        """The threshold of the grade ``stretch``, above the target; None without this grade."""

    @property
    def at_most(self) -> float | None:
        """The threshold above which a time fails; None for a rate."""


@dataclass(frozen=True)
class Decision:
    """The verdict of a gate and its reason."""

    verdict: Verdict
    #: The highest grade whose threshold the interval clears; None without a PASS.
    grade: Grade | None
    estimate: Estimate
    #: The requirement and the measured value, also for a PASS.
    fact: Fact
    #: Standard deviation of the logarithms of earlier starts' rates; None if too few are known.
    start_spread: float | None = None

    @property
    def reason(self) -> str:
        """The fact as text."""
        return str(self.fact)


def looks(maximum_rounds: int) -> tuple[int, ...]:
    """Return the numbers of rounds at which a gate is tested.

    Args:
        maximum_rounds: The maximum number of rounds, which is the last look.
    """
    planned = [*_LOOKS]
    while planned[-1] < maximum_rounds:
        planned.append(round(planned[-1] * _GROWTH))
    earlier = [rounds for rounds in planned if rounds < maximum_rounds]
    if earlier and maximum_rounds < earlier[-1] * 1.15:
        earlier.pop()  # this look would only reduce the error probability of the other looks
    return (*earlier, maximum_rounds)


def next_look(rounds: int, maximum_rounds: int) -> int:
    """Return the number of rounds after which the result is tested next.

    Args:
        rounds: The number of rounds so far.
        maximum_rounds: The maximum number of rounds.
    """
    return next((look for look in looks(maximum_rounds) if look > rounds), maximum_rounds)


def decide(
    samples: Sequence[float],
    gate: Gate,
    *,
    maximum_rounds: int,
    track: Sequence[float] = (),
    left_out: Sequence[tuple[float, float]] = (),
) -> Decision | None:
    """Decide on samples, or return None if more rounds are needed (`next_look`).

    Args:
        samples: The samples. A failed request is an infinite time, or a rate of 0.
        gate: The gate.
        maximum_rounds: The maximum number of rounds. 1 stands for a quantity that exists once (a
            start, a peak): its value decides without an interval.
        track: The samples together with the cell's other answers, which show changes of the level
            between samples (`Measurement.track`). All of them count as rounds.
        left_out: The lowest and highest possible value of each excluded round, for which the client
            was late. The round counts with the possible value that is nearest to the median.

    Raises:
        ValueError: There is no sample, or one is not a number.
    """
    estimate = statistics.estimate(samples)
    threshold, higher_is_better = threshold_of(gate)
    described = _describe(estimate)

    def decided(above: bool, how: str) -> Decision:
        fact = _fact(gate, estimate, described + how)
        if above != higher_is_better:
            return Decision(Verdict.FAIL, None, estimate, fact)
        return Decision(Verdict.PASS, _grade(estimate, gate), estimate, fact)

    if maximum_rounds == 1:
        if estimate.value == threshold:
            return decided(higher_is_better, "")
        return decided(estimate.value > threshold, "")
    if higher_is_better:
        described += f", {over_time(samples):.4g} {gate.unit} over the whole time"
    planned = looks(maximum_rounds)
    count = max(len(samples), len(track))
    if len(samples) < planned[0]:
        return None
    above: bool | None = None
    if len(left_out) > _LEFT_OUT * (count + len(left_out)):
        obstacle = f"{len(left_out)} more rounds were excluded, because the client was late"
    else:
        clamped = [min(max(estimate.value, low), high) for low, high in left_out]
        rounds = [*clamped, *(track if len(track) > len(samples) else samples)]
        error = ERROR / len(planned)
        above, obstacle = _side(rounds, samples, threshold, error, is_rate=higher_is_better)
    if above is not None:
        return decided(above, f"; decided at {count} rounds")
    if count < maximum_rounds:
        return None
    why = f": the maximum of {maximum_rounds} rounds is reached without a decision: {obstacle}"
    fact = _fact(gate, estimate, described + why)
    return Decision(Verdict.INCONCLUSIVE, None, estimate, fact)


def over_time(rates: Sequence[float]) -> float:
    """Return the harmonic mean: all tokens / the whole time, for rounds of equal token counts.

    Args:
        rates: The rates of the rounds. If one of them is 0, the result is 0.
    """
    values = np.asarray(rates, dtype=np.float64)
    return float(len(values) / (1.0 / values).sum()) if (values > 0.0).all() else 0.0


def effective_samples(values: Floats) -> float:
    """Return the effective sample size of rounds, from the correlation of consecutive rounds.

    Args:
        values: The rounds in their order.
    """
    count = len(values)
    around = values - values.mean()
    spread = float((around**2).sum())
    if spread <= count * (RESOLUTION * float(values.mean())) ** 2:
        return float(count)
    correlation = 1.0 - float((np.diff(values) ** 2).sum()) / (2.0 * spread)
    correlation += (1.0 + 3.0 * max(correlation, 0.0)) / count  # correct the estimator's bias
    if correlation * math.sqrt(count) > _SIGNIFICANT:
        correlation += _HIGHER / math.sqrt(count)
    correlation = min(max(correlation, 0.0), _MOST_CORRELATED)
    return max(count * (1.0 - correlation) / (1.0 + correlation), _FEWEST_INDEPENDENT)


def required_margin(rounds: int, *, passing: bool) -> float:
    """Return how far a value must be from its threshold for a decision, as a fraction.

    Args:
        rounds: The number of rounds.
        passing: Whether the decision is a PASS.
    """
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
    """Return whether the metric's level is above the threshold; None and the reason if undecided.

    `series`: all rounds, including excluded ones and answers of other lengths; `samples`: the
    metric's own rounds; `error`: the error probability that this look may spend.
    """
    rounds = np.asarray(series, dtype=np.float64)
    measured = np.asarray(samples, dtype=np.float64)
    count = len(rounds)
    ordered = np.sort(measured)
    rank, _ = statistics.median_ranks(len(measured))
    low = ordered[rank]
    high = ordered[len(measured) - 1 - rank]
    if not (low > threshold or high < threshold):
        return None, "the interval of the median contains the threshold"
    above = bool(low > threshold)
    sign = 1.0 if above else -1.0
    passing_rate = is_rate and above
    middle = float(np.median(rounds))
    level = over_time(series) if passing_rate else middle
    if passing_rate and level <= threshold:
        return None, "rate over the whole time and median are on different sides of the threshold"
    margin = min(sign * (middle / threshold - 1.0), sign * (level / threshold - 1.0))
    required = required_margin(count, passing=above == is_rate)
    if margin <= required:
        return None, (
            f"{margin:.1%} from the threshold; to decide after {count} rounds, more than "
            f"{required:.1%} is needed, because few rounds do not show whether they are correlated"
        )
    last = _opposing_end(rounds, middle, threshold, sign)
    if last is not None:
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
    # The probability of at most this many opposing rounds if the median were at the threshold.
    sign_risk = binomial_cdf(opposing, supporting + opposing, 0.5)
    if not passing_rate and sign_risk < error / 2:
        return above, ""
    memory = ""
    if effective < 0.7 * count:
        memory = f", whose effective sample size is {effective:.0f},"
    return None, f"the spread of {count} rounds{memory} is too wide"


def _opposing_end(values: Floats, middle: float, threshold: float, sign: float) -> int | None:
    """Return how many last values (of `_ENDS`) have a mean beyond the threshold, or None."""
    finite = values[np.isfinite(values)]
    spread = 1.4826 * float(np.median(np.abs(finite - middle))) if len(finite) else 0.0
    spread = max(spread, RESOLUTION * abs(middle)) if math.isfinite(spread) else 0.0
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
    """Return the p-value of a t test of the samples' mean against the threshold."""
    if not np.isfinite(values).all() or (is_rate and not (values > 0.0).all()):
        return 1.0
    if is_rate:  # test the mean time per token
        values = 1.0 / values
        threshold = 1.0 / threshold
        sign = -sign
    # The worst round counts twice, since a few rounds show too little of a long tail.
    worst = values.min() if sign > 0.0 else values.max()
    values = np.append(values, worst)
    mean = float(values.mean())
    spread = max(float(values.std(ddof=1)), RESOLUTION * abs(mean))
    statistic = sign * (mean - threshold) / spread * math.sqrt(effective)
    return student_cdf(max(effective - 1.0, _FEWEST_DEGREES), -statistic)


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
    """Return how many requests below a bound prove that a quantile is below it (95 % confidence).

    Args:
        fraction: The quantile, 0 to 1. The 99th percentile needs 299 requests.
    """
    return math.ceil(math.log(1.0 - statistics.CONFIDENCE) / math.log(fraction))


def decide_tail(
    samples: Sequence[float], gate: Gate, *, fraction: float, maximum_requests: int | None = None
) -> Decision | None:
    """Decide on a quantile of pooled requests, or return None if more requests are needed.

    Args:
        samples: The times of all requests.
        gate: A gate with ``at_most``.
        fraction: The quantile (0.99 for a p99).
        maximum_requests: The maximum number of requests. None: decide with the given requests; the
            estimate's ``confidence`` is the confidence that the quantile is within the bound.

    Raises:
        ValueError: There is no sample, or the gate has no ``at_most``.
    """
    if gate.at_most is None:
        raise ValueError(f"{gate.metric}: expected a gate with at_most for a percentile")
    values = np.sort(np.asarray(samples, dtype=np.float64))
    count = len(values)
    over = int((values > gate.at_most).sum())
    # The probability of at most `over` requests beyond the bound if the quantile were beyond it,
    # and of at least `over` if the quantile were within it.
    risk_of_pass = binomial_cdf(over, count, 1.0 - fraction)
    risk_of_fail = 1.0 - binomial_cdf(over - 1, count, 1.0 - fraction)
    interval = statistics.estimate_quantile(samples, fraction)
    # The confidence that the quantile is within the bound replaces the interval's confidence.
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
            return decided(Verdict.PASS, "; shown with 99 % confidence")
        return decided(Verdict.INCONCLUSIVE, ": too uncertain for a verdict")
    return decided(
        Verdict.PASS if interval.value <= gate.at_most else Verdict.INCONCLUSIVE,
        f"; {count} requests show it with {estimate.confidence:.0%} confidence; 95 % confidence "
        f"needs {needed} requests with none over the bound (--percentiles sends them)",
    )


def decide_measurement(
    measurement: Measurement, gate: Gate, more: More | None, bound: int
) -> tuple[Decision, Measurement]:
    """Decide on a measurement, after more rounds if they are needed and possible.

    Args:
        measurement: The measurement.
        gate: Its gate.
        more: Measures more rounds; None: the measurement is final.
        bound: The maximum number of rounds.

    Returns:
        The decision, and the measurement with all its rounds.
    """
    while True:
        decision, next_rounds = _look(measurement, gate, more is not None, bound)
        if decision is not None:
            return decision, measurement
        rounds = measurement.rounds
        if more is None:
            observed = f"{rounds} rounds are too few for a verdict, which needs {FIRST_LOOK}"
            fact = Fact("", observed, gate.metric, evidence="--rounds measures more")
            estimate = statistics.estimate(measurement.samples)
            return Decision(Verdict.INCONCLUSIVE, None, estimate, fact), measurement
        measurement = more(next_rounds)
        if not measurement.valid or measurement.rounds <= rounds:
            more = None  # no more valid rounds can be measured
            bound = measurement.rounds


def _look(
    measurement: Measurement, gate: Gate, growing: bool, bound: int
) -> tuple[Decision | None, int]:
    """Return the decision on the rounds so far, and the rounds at the next interim test."""
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
        if len(samples) < needed:
            return decision, min(bound, needed)
        return decision, bound
    if measurement.unit not in EXISTS_ONCE:
        bound = max(bound, FIRST_LOOK)
    decision = decide(
        samples, gate, maximum_rounds=bound, track=measurement.track, left_out=measurement.left_out
    )
    return decision, next_look(measurement.rounds, bound)


def threshold_of(gate: Gate) -> tuple[float, bool]:
    """Return the threshold of a gate, and whether values above it pass.

    Args:
        gate: The gate. It has ``minimum`` or ``at_most``.
    """
    if gate.minimum is not None:
        return gate.minimum, True
    assert gate.at_most is not None  # the profile requires one of the two
    return gate.at_most, False


def _fact(gate: Gate, estimate: Estimate, evidence: str) -> Fact:
    threshold, higher = threshold_of(gate)
    return Fact(
        "at least" if higher else "at most",
        about=gate.metric,
        value=estimate.value,
        limit=threshold,
        unit=gate.unit,
        evidence=evidence,
    )


def _describe(estimate: Estimate) -> str:
    if estimate.ci_low is None or estimate.confidence is None:
        return "measured once"
    return (
        f"{estimate.ci_low:.4g} to {estimate.ci_high:.4g} with {estimate.confidence:.1%}, "
        f"{estimate.rounds} rounds"
    )
