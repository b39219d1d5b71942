"""The object that a test gets from the fixture `gate`."""

import math
import sys
from collections.abc import Iterable, Mapping, Set
from numbers import Real
from typing import Any, Literal, NoReturn, TypeGuard

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_bench_gate import judging, storing
from pytest_bench_gate.history import KEY
from pytest_bench_gate.judging import Judged, Limit, Samples
from pytest_bench_gate.run import GateRun
from sm121.core.printable import printable
from sm121.core.unmet import Unmet, facts_text, noted
from sm121.core.verdict import Inconclusive, Verdict
from sm121.measure import statistics
from sm121.measure.gate import Decision

#: Default tolerance for a regression against a stored run, as a fraction.
WORSE_BY = 0.05
#: The note on a metric of a rerun test. A rerun does not measure again, because a measurement that
#: is repeated until it passes would make the gate useless.
_RERUN = "the first run of this test: a rerun does not count"


class Gate:
    """Judges a metric, stores it, and compares it with a stored run if the user requested this.

    Args:
        run: The gates of the run.
        test: The id of the test.
        benchmark: The test's ``benchmark`` fixture (pytest-benchmark).
    """

    def __init__(self, run: GateRun, test: str, benchmark: BenchmarkFixture) -> None:
        self._run = run
        self._test = test
        self._benchmark = benchmark
        #: Whether the test passed its own samples to this object. If so, it need not call
        #: ``benchmark``.
        self.has_samples = False
        #: The names of the metrics for which the test has called this object.
        self.called: list[str] = []

    def __call__(
        self,
        metric: str,
        samples: Iterable[float] | None = None,
        *,
        minimum: float | None = None,
        maximum: float | None = None,
        better: Literal["higher", "lower"] | None = None,
        unit: str | None = None,
        per_round: float | None = None,
        worse_by: float = WORSE_BY,
    ) -> None:
        """Judge a metric by the interval of its median.

        Args:
            metric: The metric's name, unique in the run.
            samples: The values of the metric, one per round, in the order of measurement. None for
                the rounds of ``benchmark``, which the test must have called.
            minimum: The minimum median. Implies that higher is better.
            maximum: The maximum median. Implies that lower is better.
            better: "higher" or "lower", for a metric that is only compared, without a limit.
            unit: The unit to show; ``s``, ``ms``, ``us`` or ``ns`` for times of ``benchmark``.
            per_round: For a rate, the work in a round of ``benchmark``, for example 32 tokens.
            worse_by: The accepted regression against a stored run, as a fraction.

        Raises:
            Unmet: The metric fails.
            Inconclusive: There are too few rounds for a decision.
        """
        __tracebackhide__ = True  # a failure then shows the line of the test
        self._refuse_name(metric)
        self.called.append(metric)
        if metric in self._run.judged:
            self.has_samples = samples is not None
            _raise_failures(self._run.judged[metric], _RERUN)
            return
        higher = self._direction(metric, minimum, maximum, better)
        if not _is_number(worse_by) or not 0.0 < worse_by < 1.0:
            _refuse(metric, "worse_by between 0 and 1 (0.05 is 5 %)", repr(worse_by))
        shown_unit = _text_of(metric, unit)
        if samples is None and per_round is None:
            shown_unit = unit or "s"
            rounds = self._times(metric, shown_unit, higher)
        elif samples is None:
            rounds = self._rates(metric, per_round, higher)
        else:
            if per_round is not None:
                _refuse(metric, "samples or per_round", "both")
            rounds = self._numbers(metric, samples, higher)
            self.has_samples = True
        limit = _limit(metric, shown_unit, minimum, maximum)
        judged = self._judge(metric, shown_unit, higher, rounds, limit, worse_by)
        self._run.judged[metric] = judged
        entry = storing.described(judged, self._run.asked)
        self._run.entries.append(entry)
        if samples is None:
            self._benchmark.extra_info[KEY] = entry
        else:
            storing.store(self._run.config, entry, rounds.values)
        _raise_failures(judged)

    def _judge(
        self,
        metric: str,
        unit: str,
        higher: bool,
        rounds: Samples,
        limit: Limit | None,
        worse_by: float,
    ) -> Judged:
        if limit is not None:
            decision: Decision | None = judging.decide(rounds, limit)
        else:
            decision = judging.too_few(metric, rounds)
        judged = Judged(
            metric=metric,
            unit=unit,
            higher_is_better=higher,
            estimate=statistics.estimate(rounds.values),
            test=self._test,
            is_constant=len({*rounds.values}) == 1,
            limit=limit,
            decision=decision,
        )
        return self._run.compared(judged, rounds, worse_by)

    def _refuse_name(self, metric: str) -> None:
        if not isinstance(metric, str) or not metric.strip() or printable(metric) != metric:
            _refuse(metric, "a name of printable characters", repr(metric))
        earlier = self._run.judged.get(metric)
        if earlier is None:
            return
        is_rerun = earlier.test == self._test and metric not in self.called
        if not is_rerun:
            _refuse(metric, "a name of its own for each metric of a run",
                    f"the name that {earlier.test} uses")  # fmt: skip

    def _direction(
        self,
        metric: str,
        minimum: float | None,
        maximum: float | None,
        better: str | None,
    ) -> bool:
        """Return whether higher is better."""
        if minimum is not None and maximum is not None:
            _refuse(metric, "a minimum (higher is better) or a maximum (lower is better)",
                    f"both, {minimum!r} and {maximum!r}")  # fmt: skip
        limit = maximum if minimum is None else minimum
        if limit is None:
            if better not in ("higher", "lower"):
                _refuse(metric, "minimum, maximum, or better='higher' or 'lower'", repr(better))
            return better == "higher"
        if not _is_number(limit) or not 0.0 < limit <= sys.float_info.max:
            _refuse(metric, "a positive number as its limit", repr(limit))
        higher = minimum is not None
        if better is not None and (better == "higher") != higher:
            _refuse(metric, "a minimum if higher is better, a maximum if lower is", repr(better))
        return higher

    def _numbers(self, metric: str, samples: Iterable[Any], higher: bool) -> Samples:
        if isinstance(samples, str | bytes):
            _refuse(metric, "numbers as samples", repr(samples))
        if isinstance(samples, Set | Mapping):
            _refuse(metric, "samples in the order of measuring", f"a {type(samples).__name__}")
        wrong: Exception | None = None
        values: list[float] = []
        try:
            values = [float(sample) for sample in samples]
        except (TypeError, ValueError, OverflowError) as error:
            wrong = error
        if wrong is not None:  # outside the except block, so that pytest shows one error
            _refuse(metric, "numbers as samples", str(wrong))
        if not values:
            _refuse(metric, "at least one sample", "none")
        for value in values:
            if not value >= 0.0:
                _refuse(metric, "samples of 0 or more", repr(value))
        if higher and math.inf in values:
            _refuse(metric, "finite samples, as higher is better", "inf")
        if not higher and not any(values):
            _refuse(metric, "a sample above 0, as lower is better", "only 0")
        return Samples(values)

    def _times(self, metric: str, unit: str, higher: bool) -> Samples:
        """Return the durations of the benchmark's rounds in a unit."""
        if higher:
            _refuse(metric, "a maximum for a time, or per_round for a rate", "neither")
        if unit not in storing.SECONDS:
            _refuse(metric, f"{', '.join(storing.SECONDS)} as the unit of a time", repr(unit))
        seconds = self._seconds(metric)
        if not any(seconds):
            _refuse(metric, "rounds that take time", "0 s")
        return Samples.of_benchmark([each / storing.SECONDS[unit] for each in seconds])

    def _rates(self, metric: str, per_round: float | None, higher: bool) -> Samples:
        """Return the rates of the benchmark's rounds."""
        if not _is_number(per_round) or not 0.0 < per_round < float("inf"):
            _refuse(metric, "a positive number as per_round", repr(per_round))
        if not higher:
            _refuse(metric, "a minimum for a rate", "that lower is better")
        seconds = self._seconds(metric)
        if min(seconds) <= 0.0:
            _refuse(metric, "rounds that take time", "0 s")
        return Samples.of_benchmark(seconds, per_round)

    def _seconds(self, metric: str) -> list[float]:
        stats = self._benchmark.stats
        if stats is None or self._benchmark.has_error or not stats.stats.data:
            _refuse(metric, "samples, or a call of benchmark before it", "none")
        if KEY in self._benchmark.extra_info:
            _refuse(metric, "one gate on the rounds of a benchmark", "a second one")
        return list(stats.stats.data)


def _raise_failures(judged: Judged, note: str = "") -> None:
    """Fail the test if a metric did not pass. ``note`` is appended to the evidence."""
    __tracebackhide__ = True
    facts = judged.facts
    if facts and note:
        facts = noted(facts, note)
    if judged.verdict is Verdict.FAIL:
        raise Unmet(*facts)
    if judged.verdict is Verdict.INCONCLUSIVE:
        raise Inconclusive(facts_text(facts))


def _text_of(metric: str, unit: object) -> str:
    """Return the unit to show; an empty string for None."""
    if unit is None:
        return ""
    if not isinstance(unit, str) or printable(unit) != unit:
        _refuse(metric, "a unit of printable characters", repr(unit))
    return unit


def _limit(metric: str, unit: str, minimum: float | None, maximum: float | None) -> Limit | None:
    """Return the limit; None if the metric is only compared."""
    if minimum is not None:
        return Limit(metric, unit, minimum=float(minimum))
    if maximum is not None:
        return Limit(metric, unit, at_most=float(maximum))
    return None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)  # includes numpy's


def _refuse(metric: object, expected: str, got: str) -> NoReturn:
    """Fail the test with a one-line message about a wrong call."""
    __tracebackhide__ = True
    pytest.fail(f"gate({metric!r}): expected {expected}, got {got}", pytrace=False)
