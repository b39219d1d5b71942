"""A metric is compared with a stored one.

Both confidence intervals count, in the direction of the metric."""

import numpy as np
import pytest

from pytest_bench_gate import judging
from pytest_bench_gate.history import StoredMetric
from pytest_bench_gate.judging import Comparison, Judged, Limit, Samples
from sm121.core.verdict import Verdict
from sm121.measure import statistics

HIGHER = pytest.mark.parametrize("higher", [True, False], ids=["rate", "time"])


def steady(level: float, rounds: int = 40) -> list[float]:
    return [level * (1.0 + 0.0005 * (number * 7 % 10 - 4.5)) for number in range(rounds)]


def compared(values: list[float], low: float, high: float, higher: bool) -> Comparison:
    estimate = statistics.estimate(values)
    metric = Judged("metric", "unit", higher, estimate, "test_x.py::test_x")
    stored = StoredMetric(
        run="0001", metric="metric", unit="unit", higher_is_better=higher, value=(low + high) / 2,
        ci_low=low, ci_high=high, test=metric.test,
    )  # fmt: skip
    return judging.compare(Samples(values), metric, stored, 0.05)


@HIGHER
@pytest.mark.parametrize(
    ("loss", "low", "high", "expected"),
    [
        pytest.param(0.0, 99.9, 100.1, Verdict.PASS, id="the-same"),
        pytest.param(-0.3, 99.9, 100.1, Verdict.PASS, id="better"),
        pytest.param(0.1, 99.9, 100.1, Verdict.FAIL, id="worse"),
        pytest.param(0.05, 99.9, 100.1, Verdict.INCONCLUSIVE, id="just-what-is-allowed"),
        pytest.param(0.0, 80.0, 120.0, Verdict.INCONCLUSIVE, id="a-wide-stored-interval"),
        pytest.param(0.1, 80.0, 120.0, Verdict.INCONCLUSIVE, id="worse-than-a-wide-interval"),
        pytest.param(0.4, 80.0, 120.0, Verdict.FAIL, id="worse-than-all-of-it"),
    ],
)
def test_both_intervals_decide(higher, loss, low, high, expected):
    level = 100.0 * (1.0 - loss if higher else 1.0 + loss)
    comparison = compared(steady(level), low, high, higher)
    assert comparison.verdict is expected, comparison.fact
    assert comparison.worse == pytest.approx(loss, abs=0.001)
    is_wide = "the stored interval is too wide" in str(comparison.fact)
    assert is_wide == (expected is Verdict.INCONCLUSIVE and high == 120.0)


def test_another_unit_or_direction_is_undecided():
    for unit, higher in (("ms", True), ("unit", False)):
        metric = Judged(
            "metric", unit, higher, statistics.estimate([1.0] * 40), "test_x.py::test_x"
        )
        stored = StoredMetric("0001", "metric", "unit", True, 1.0, 1.0, 1.0, metric.test)
        comparison = judging.compare(Samples([1.0] * 40), metric, stored, 0.05)
        assert comparison.verdict is Verdict.INCONCLUSIVE and comparison.worse is None
        told = f"the unit and direction of 0001 (unit, higher is better), got {unit}, "
        assert told in str(comparison.fact)


@HIGHER
@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_noise_makes_no_equal_pair_fail_and_no_slower_one_pass(higher, noise):
    generator = np.random.default_rng(0)
    for _ in range(20):
        draws = np.exp(generator.normal(0.0, noise, (2, 40)))
        estimate = statistics.estimate(list(100.0 * draws[0]))
        same = compared(list(100.0 * draws[1]), estimate.ci_low, estimate.ci_high, higher)
        assert same.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE)
        slower = (90.0 if higher else 110.0) * draws[1]
        slower = compared(list(slower), estimate.ci_low, estimate.ci_high, higher)
        assert slower.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("rounds", "minimum", "more"),
    [
        pytest.param(3, 50.0, "measure at least 5 rounds", id="fewer-than-the-first-look"),
        pytest.param(5, 90.0, "measure at least 20 rounds", id="near"),
        pytest.param(40, 99.5, "measure at least 74 rounds", id="nearer"),
        pytest.param(104, 99.8, "too close for any number of rounds", id="at-the-limit"),
    ],
)
def test_an_undecided_gate_gives_the_sufficient_number_of_rounds(rounds, minimum, more):
    decision = judging.decide(Samples(steady(100.0, rounds)), Limit("m", "u", minimum=minimum))
    assert decision.verdict is Verdict.INCONCLUSIVE and more in decision.reason, decision.reason
