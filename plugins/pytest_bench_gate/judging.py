"""Judge samples against a limit and a stored metric, by the same rules as the suite's gates."""

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

#: Maximum number of rounds that a message proposes.
_MOST_ROUNDS = 100_000
#: If a benchmark has more rounds than this, they are divided into this number of blocks. It is the
#: sample size of the last planned interim test of a gate.
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

        Neighbouring short rounds are not independent. Many rounds are therefore grouped in blocks
        with one value each: the median duration, or for a rate the block's work divided by its
        duration.

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
        """The limit in words: ``at least 52``."""
        if self.minimum is not None:
            return f"at least {number(self.minimum)}"
        return f"at most {number(self.at_most)}"


@dataclass(frozen=True)
class Comparison:
    """The comparison of a metric with the same metric of a stored run."""

    #: The name of the stored run.
    run: str
    verdict: Verdict
    #: The regression as a fraction; negative for an improvement. None if unit or direction differ.
    worse: float | None
    #: The requirement and the evidence.
    fact: Fact

    @property
    def text(self) -> str:
        """The change in words: ``10.0 % worse than 0003_x``."""
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
    #: Whether all samples are equal, as for a constant count or a counter that is stuck.
    is_constant: bool = False
    limit: Limit | None = None
    #: The decision by the limit; None without a limit.
    decision: Decision | None = None
    #: None if the metric was not compared with a stored run.
    comparison: Comparison | None = None
    #: Whether the run was compared with stored runs that lack this metric.
    is_new: bool = False

    @property
    def verdict(self) -> Verdict | None:
        """The worse of both verdicts; None if the metric was only measured."""
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
        """The verdict in one word."""
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
    """Judge samples by a limit: PASS, FAIL, or INCONCLUSIVE with the number of rounds needed.

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
    """Return INCONCLUSIVE for a metric without a limit that has too few rounds to be stored.

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

    Each end of the stored interval, reduced by the tolerance, is a limit. The metric passes if it
    meets the limit from the better end, and fails if it misses the limit from the worse end.

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
        evidence = f"; against {undecided.fact.requirement}: {undecided.fact.evidence}"
        if undecided.verdict is not Verdict.INCONCLUSIVE:
            evidence = "; the stored interval is too wide: store a run of more rounds"
    value = metric.estimate.value
    worse = value / stored.value - 1.0
    if metric.higher_is_better:
        worse = -worse
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
    """Return the limit that one end of a stored interval sets."""
    if metric.higher_is_better:
        return Limit(metric.metric, metric.unit, minimum=end * (1.0 - allowed))
    return Limit(metric.metric, metric.unit, at_most=end * (1.0 + allowed))


def _interval(estimate: Estimate) -> str:
    return number_table.interval(estimate.ci_low, estimate.ci_high, estimate.confidence)


def _more_rounds(samples: Samples, limit: Limit) -> str:
    """Return the minimum number of rounds, in words: that of the first interim test to decide."""
    if samples.in_blocks:
        return "measure for longer: --benchmark-max-time"
    threshold, higher_is_better = gate.threshold_of(limit)
    value = statistics.estimate(samples.values).value
    margin = abs(value / threshold - 1.0)
    passing = (value > threshold) == higher_is_better
    for rounds in gate.looks(_MOST_ROUNDS):
        if rounds > len(samples.values) and gate.required_margin(rounds, passing=passing) < margin:
            return f"measure at least {rounds} rounds"
    return f"{margin:.2%} from the limit is too near for any number of rounds"
