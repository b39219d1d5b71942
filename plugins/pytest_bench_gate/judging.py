"""Judge samples by a limit and by a stored metric, with the rules of the suite's gates."""

import itertools
from dataclasses import dataclass, replace
from statistics import fmean, median

from pytest_bench_gate import history
from pytest_bench_gate.history import StoredMetric
from sm121.core.numbers import number
from sm121.core.unmet import Fact, noted
from sm121.core.verdict import Verdict, worst
from sm121.measure import gate, number_table, statistics
from sm121.measure.gate import Decision
from sm121.measure.number_table import NumberRow
from sm121.measure.statistics import Estimate

#: The maximum number of rounds that a message recommends.
_MOST_ROUNDS = 100_000
#: If a benchmark has more rounds than this, they are divided into this number of blocks. The number
#: is the sample size of a gate's last planned interim test.
_BLOCKS = 104


@dataclass(frozen=True)
class Samples:
    """The values of a metric, in the order of measurement."""

    values: list[float]
    #: Whether each value summarises a block of rounds.
    in_blocks: bool = False

    @classmethod
    def of_benchmark(cls, rounds: list[float], per_round: float | None = None) -> "Samples":
        """Return the values of a benchmark, which can have thousands of very short rounds.

        Consecutive short rounds are not independent. Many rounds are therefore grouped in blocks,
        and each block has one value: the median duration, or, for a rate, the block's work divided
        by its duration.

        Args:
            rounds: The durations of the rounds, in seconds; all above 0 for a rate.
            per_round: The amount of work in a round, for a rate. None if the value is a duration.
        """
        count = len(rounds)
        if count <= _BLOCKS:
            blocks = [[time] for time in rounds]
        else:
            starts = [block * count // _BLOCKS for block in range(_BLOCKS + 1)]
            blocks = [rounds[start:end] for start, end in itertools.pairwise(starts)]
        if per_round is None:
            values = [median(block) for block in blocks]
        else:
            values = [per_round / fmean(block) for block in blocks]
        return cls(values, in_blocks=count > _BLOCKS)


@dataclass(frozen=True)
class Limit:
    """The limit of a metric: exactly one of ``minimum`` and ``at_most``."""

    metric: str
    unit: str
    minimum: float | None = None
    at_most: float | None = None
    target: None = None
    stretch: None = None

    @property
    def text(self) -> str:
        """The limit as text, for example ``at least 52``."""
        if self.minimum is not None:
            return f"at least {number(self.minimum)}"
        return f"at most {number(self.at_most)}"


@dataclass(frozen=True)
class Comparison:
    """The comparison of a metric with the same metric of a stored run."""

    #: The name of the stored run.
    run: str
    verdict: Verdict
    #: The regression as a fraction; negative for an improvement. None if the units or directions
    #: differ.
    worse: float | None
    #: The requirement and the evidence.
    fact: Fact

    @property
    def text(self) -> str:
        """The change as text, for example ``10.0 % worse than 0003_x``."""
        if self.worse is None:
            return f"another quantity than in {self.run}"
        direction = "worse" if self.worse > 0 else "better"
        return f"{100 * abs(self.worse):.1f} % {direction} than {self.run}"


@dataclass(frozen=True)
class Judged:
    """A metric of this run and its verdict."""

    metric: str
    unit: str
    higher_is_better: bool
    estimate: Estimate
    #: The id of the test.
    test: str
    #: Whether all samples are equal, for example because a count is constant or a counter is stuck.
    is_constant: bool = False
    limit: Limit | None = None
    #: The decision by the limit; None if there is no limit.
    decision: Decision | None = None
    #: The comparison with a stored run; None if the metric was not compared.
    comparison: Comparison | None = None
    #: Whether the run was compared with stored runs, but none of them has this metric.
    is_new: bool = False

    @property
    def verdict(self) -> Verdict | None:
        """The worse verdict of limit and comparison; None if the metric was only measured."""
        verdicts = []
        if self.decision is not None:
            verdicts.append(self.decision.verdict)
        if self.comparison is not None:
            verdicts.append(self.comparison.verdict)
        return worst(verdicts) if verdicts else None

    @property
    def facts(self) -> list[Fact]:
        """The requirements that did not pass."""
        facts = []
        if self.decision is not None and self.decision.verdict is not Verdict.PASS:
            facts.append(self.decision.fact)
        if self.comparison is not None and self.comparison.verdict is not Verdict.PASS:
            facts.append(self.comparison.fact)
        return facts

    @property
    def word(self) -> str:
        """The verdict as one word."""
        return "measured" if self.verdict is None else self.verdict.value

    @property
    def row(self) -> NumberRow:
        """The metric's row in the table of the summary."""
        verdict = self.word
        if self.comparison is not None:
            verdict += f" ({self.comparison.text})"
        elif self.is_new:
            verdict += " (not in a stored run yet)"
        if self.is_constant:
            verdict += " (all samples are equal)"
        interval = ""
        if self.estimate.confidence is not None:
            interval = number_table.interval(
                self.estimate.ci_low, self.estimate.ci_high, self.estimate.confidence
            )
        return NumberRow(
            metric=self.metric,
            value=f"{number(self.estimate.value)} {self.unit}".rstrip(),
            interval=interval,
            required="" if self.limit is None else self.limit.text,
            share="",
            verdict=verdict,
        )


def decide(samples: Samples, limit: Limit) -> Decision:
    """Judge samples by a limit. INCONCLUSIVE comes with the number of rounds that are needed.

    Args:
        samples: The samples, at least one.
        limit: The limit.
    """
    count = len(samples.values)
    decision: Decision | None = None
    if count >= gate.FIRST_LOOK:
        decision = gate.decide(samples.values, limit, maximum_rounds=count)
    if decision is None:
        few = f"{count} rounds are too few for a verdict; {_more_rounds(samples, limit)}"
        fact = Fact("at least" if limit.at_most is None else "at most", few, limit.metric)
        fact = replace(fact, limit=gate.threshold_of(limit)[0], unit=limit.unit)
        return Decision(Verdict.INCONCLUSIVE, None, statistics.estimate(samples.values), fact)
    if decision.verdict is Verdict.INCONCLUSIVE:
        (fact,) = noted([decision.fact], _more_rounds(samples, limit))
        return replace(decision, fact=fact)
    return decision


def too_few(metric: str, samples: Samples) -> Decision | None:
    """For a metric without a limit: return INCONCLUSIVE if it has too few rounds to be stored.

    Args:
        metric: The metric's name.
        samples: The samples, at least one.
    """
    count = len(samples.values)
    if count >= gate.FIRST_LOOK:
        return None
    fact = Fact("rounds of at least", about=metric, value=count, limit=gate.FIRST_LOOK)
    return Decision(Verdict.INCONCLUSIVE, None, statistics.estimate(samples.values), fact)


def compare(samples: Samples, metric: Judged, stored: StoredMetric, allowed: float) -> Comparison:
    """Compare samples with a stored metric.

    The limits are the two ends of the stored interval, each made less strict by the tolerance. The
    metric passes if it meets the limit that was made from the better end. It fails if it misses the
    limit that was made from the worse end.

    Args:
        samples: The samples of this run.
        metric: The metric of this run.
        stored: The same metric in the stored run.
        allowed: The tolerance for a regression, as a fraction.
    """
    if (stored.unit, stored.higher_is_better) != (metric.unit, metric.higher_is_better):
        here = history.kind(metric.unit, metric.higher_is_better)
        fact = Fact(f"the unit and direction of {stored.run} ({stored.kind})", here, metric.metric)
        return Comparison(stored.run, Verdict.INCONCLUSIVE, None, fact)
    ends = sorted((stored.ci_low, stored.ci_high), reverse=metric.higher_is_better)
    strict, lenient = (_limit_from(end, metric, allowed) for end in ends)
    passing = decide(samples, strict)
    failing = decide(samples, lenient)
    verdict = Verdict.INCONCLUSIVE
    evidence = ""
    if passing.verdict is Verdict.PASS:
        verdict = Verdict.PASS
    elif failing.verdict is Verdict.FAIL:
        verdict = Verdict.FAIL
    else:
        undecided = passing if passing.verdict is Verdict.INCONCLUSIVE else failing
        evidence = (
            f"; undecided whether it is {undecided.fact.requirement}: {undecided.fact.evidence}"
        )
        if undecided.verdict is not Verdict.INCONCLUSIVE:
            evidence = "; the stored interval is too wide: store a run of more rounds"
    value = metric.estimate.value
    worse = statistics.relative_loss(value, stored.value, metric.higher_is_better)
    here = f"{number(value)} {metric.unit}, {_interval(metric.estimate)}"
    there = f"{number(stored.value)}, {number(stored.ci_low)} to {number(stored.ci_high)}"
    fact = Fact(
        f"a loss against {stored.run} of at most",
        about=metric.metric,
        value=round(100.0 * worse, 2),
        limit=100.0 * allowed,
        unit="%",
        evidence=f"{here}; stored: {there}{evidence}",
    )
    return Comparison(stored.run, verdict, worse, fact)


def _limit_from(end: float, metric: Judged, allowed: float) -> Limit:
    """Return the limit that is made from one end of a stored interval."""
    if metric.higher_is_better:
        return Limit(metric.metric, metric.unit, minimum=end * (1.0 - allowed))
    return Limit(metric.metric, metric.unit, at_most=end * (1.0 + allowed))


def _interval(estimate: Estimate) -> str:
    return number_table.interval(estimate.ci_low, estimate.ci_high, estimate.confidence)


def _more_rounds(samples: Samples, limit: Limit) -> str:
    """Return the number of rounds at the first interim test that could decide, as text."""
    if samples.in_blocks:
        return "measure for longer: --benchmark-max-time"
    threshold, higher_is_better = gate.threshold_of(limit)
    value = statistics.estimate(samples.values).value
    margin = abs(value / threshold - 1.0)
    passing = (value > threshold) == higher_is_better
    for rounds in gate.looks(_MOST_ROUNDS):
        if rounds > len(samples.values) and gate.required_margin(rounds, passing=passing) < margin:
            return f"measure at least {rounds} rounds"
    return f"the value is {margin:.2%} from the limit, too close for any number of rounds"
