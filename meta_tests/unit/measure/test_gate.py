"""Gates and intervals have their documented error rates, in a simulation with a fixed seed."""

import itertools
import math

import numpy as np
import pytest

from sm121.core.profile_fields import Gate
from sm121.core.verdict import Verdict
from sm121.measure import gate, statistics
from tools import gate_errors

RATE = Gate(metric="tg32@d0", unit="tok/s", minimum=52, target=58, stretch=61, source="the plan")
RUNS = 1000


def normal(generator, level, noise, count):
    return level * (1 + noise * generator.standard_normal(count))


def skewed(generator, level, noise, count):
    """Return rounds with their median at the level, and a long tail of slow rounds."""
    return level / np.exp(noise * (generator.exponential(1.0, count) - math.log(2)))


def stalls(generator, level, noise, count):
    """Return rounds of which one in twenty is 30 % slower."""
    values = normal(generator, level, noise, count)
    return np.where(generator.random(count) < 0.05, values * 0.7, values)


def decide_as_a_run_does(samples, bound: int) -> tuple[Verdict, int]:
    """Add a few rounds each time, until the gate decides."""
    at = gate.FIRST_LOOK
    while (decision := gate.decide(list(samples[:at]), RATE, maximum_rounds=bound)) is None:
        at = gate.next_look(at, bound)
    return decision.verdict, at


def simulate(draw, distance, noise, *, bound=60, runs=RUNS, seed=1, level=52.0):
    generator = np.random.default_rng(seed)
    draws = (draw(generator, level * (1 + distance), noise, bound) for _ in range(runs))
    verdicts, rounds = zip(*(decide_as_a_run_does(drawn, bound) for drawn in draws), strict=True)
    return {verdict: verdicts.count(verdict) for verdict in Verdict}, float(np.mean(rounds))


@pytest.mark.parametrize("draw", [normal, skewed, stalls])
@pytest.mark.parametrize(("distance", "wrong"), [(0.01, Verdict.FAIL), (-0.01, Verdict.PASS)])
def test_one_percent_away_with_two_percent_noise_errs_in_one_of_a_hundred(draw, distance, wrong):
    count, _ = simulate(draw, distance, 0.02)
    assert count[wrong] <= RUNS // 100, count


@pytest.mark.parametrize("bound", [10, 30, 80])
def test_repeated_looks_do_not_add_up_even_at_the_threshold_itself(bound):
    """Repeated interim tests do not add up their errors, even if the rate is exactly at the
    threshold.

    This holds for any noise. At the threshold, both decisions are wrong, and both are rare."""
    for noise in (0.001, 0.02):
        count, _ = simulate(normal, 0.0, noise, bound=bound, runs=600)
        decided = count[Verdict.PASS] + count[Verdict.FAIL]
        assert decided <= 600 * 2 * gate.ERROR + 3 * math.sqrt(600 * 2 * gate.ERROR), count


def test_a_gate_without_shared_error_errs_more_often():
    """A gate that stops at the first plain 95 % interval errs far more often, so the simulation can
    detect such a gate."""

    def decides(samples) -> bool:
        intervals = (statistics.estimate(samples[:at]) for at in range(6, 61))
        return any(each.ci_low > 52.0 or each.ci_high < 52.0 for each in intervals)

    generator = np.random.default_rng(1)
    wrong = sum(decides(normal(generator, 52.0, 0.02, 60)) for _ in range(400))
    assert wrong > 400 * 5 * gate.ERROR


def test_it_decides_and_soon_where_it_can():
    clear, rounds = simulate(normal, 0.25, 0.01, runs=200)
    assert clear[Verdict.PASS] == 200 and rounds == gate.FIRST_LOOK
    usual, rounds = simulate(normal, 53 / 52 - 1, 0.005, runs=200)
    assert usual[Verdict.PASS] == 200 and rounds < 1.1 * gate.STEADY_LOOK
    near, rounds = simulate(normal, 0.012, 0.01, runs=200, bound=80)
    assert near[Verdict.PASS] >= 199 and rounds < 50
    noisy, rounds = simulate(normal, -0.01, 0.02, runs=200, bound=80)
    assert noisy[Verdict.FAIL] > 100, "of the rest, each is INCONCLUSIVE and none is PASS"
    assert noisy[Verdict.PASS] == 0
    for level, verdict in ((51.4, Verdict.FAIL), (52.6, Verdict.PASS)):
        count, _ = simulate(normal, level / 52 - 1, 0.01, runs=50, bound=80, seed=7)
        assert count[verdict] == 50, count


def test_calls_after_every_round_do_not_add_errors():
    generator = np.random.default_rng(5)
    looks = range(gate.FIRST_LOOK, 81)
    decided = 0
    for _ in range(60):
        samples = normal(generator, 52.0, 0.01, 80).tolist()
        decisions = (gate.decide(samples[:at], RATE, maximum_rounds=80) for at in looks)
        first = next(decision for decision in decisions if decision is not None)
        decided += first.verdict is not Verdict.INCONCLUSIVE
    assert decided <= 3


@pytest.mark.parametrize("name", [name for name, _, bound in gate_errors.NOISES if bound])
def test_correlated_noise_is_decided_wrongly_in_at_most_2_percent(name):
    """With correlated noise, at most 2 % of the decisions are wrong.

    This is a sample of docs/tables/gate-errors.md, with three standard errors because of the few
    runs."""
    runs = 150
    noises = {name: noise for name, noise, _ in gate_errors.NOISES}
    for distance, wrong in ((-gate_errors.DISTANCE, Verdict.PASS), (0.01, Verdict.FAIL)):
        counts = gate_errors.at_distance(noises[name], distance, runs)
        expected = runs * gate_errors.ALLOWED
        assert counts[wrong] <= expected + 3 * math.sqrt(expected), counts


def test_the_gate_decides_on_servers_without_correlated_rounds():
    """For servers without correlated rounds, the gate decides.

    A gate that never decides would satisfy the other simulations."""
    steady = gate_errors.independent(0.005)
    wandering = gate_errors.autoregressive(0.95, 0.003)
    assert gate_errors.at_distance(steady, 0.02, 100)[Verdict.PASS] == 100
    assert gate_errors.at_distance(wandering, 0.02, 100)[Verdict.PASS] >= 90
    assert gate_errors.at_distance(steady, -0.03, 100)[Verdict.FAIL] == 100


def test_rounds_that_were_left_out_count_with_what_they_may_have_been():
    rounds = [53.0 + 0.02 * (-1) ** n for n in range(20)]
    assert gate.decide(rounds, RATE, maximum_rounds=80).verdict is Verdict.PASS
    harmless = [(52.5, 53.6)] * 4
    assert gate.decide(rounds, RATE, maximum_rounds=80, left_out=harmless).verdict is Verdict.PASS
    slow = [(46.0, 47.0)] * 6
    assert gate.decide(rounds, RATE, maximum_rounds=80, left_out=slow) is None
    many = gate.decide(rounds, RATE, maximum_rounds=20, left_out=harmless * 3)
    assert many.verdict is Verdict.INCONCLUSIVE and "the client was late" in many.reason


def test_leaving_rounds_out_favours_neither_side():
    """Excluding rounds favours neither decision.

    If late rounds were only dropped, a slow server would pass; with their bounds, it does not."""
    late = next(item for item in gate_errors.LATENESS if "slow" in item.name)
    slow = 52 * (1 - gate_errors.DISTANCE)
    forgotten = gate_errors.left_out(late, slow, 0.3, 60, count_them=False)
    assert forgotten[Verdict.PASS] >= 6, "the simulation can tell"
    sides = ((52 * 0.99, Verdict.PASS), (52 * 1.01, Verdict.FAIL))
    for late, share, (level, wrong) in itertools.product(gate_errors.LATENESS, (0.0, 0.3), sides):
        counts = gate_errors.left_out(late, level, share, 40, count_them=True)
        assert counts[wrong] <= 2, (late.name, share, level, counts)


def test_looks():
    assert gate.looks(60) == (5, 20, 27, 38, 60)
    assert gate.looks(5) == (5,) and gate.looks(10)[-1] == 10 and gate.looks(300)[-1] == 300
    assert [gate.next_look(n, 60) for n in (0, 5, 6, 38, 59)] == [5, 20, 20, 60, 60]
    many = [65.0, 65.1, 64.9, 65.05, 64.95, 65.0, 65.1, 64.9]
    assert gate.decide(many[:4], RATE, maximum_rounds=60) is None
    one_by_one = [gate.decide(many[:n], RATE, maximum_rounds=60) for n in range(5, 9)]
    assert {decision.verdict for decision in one_by_one} == {Verdict.PASS}


@pytest.mark.parametrize(
    ("level", "grade"),
    [
        (53, "minimum"),
        (57.9, "minimum"),
        (58.5, "target"),
        (61.5, "stretch"),
    ],
)
def test_the_grade_is_what_the_whole_interval_reaches(level, grade):
    samples = [level + d for d in (-0.2, 0.1, 0.0, -0.1, 0.2) * 4]
    decision = gate.decide(samples, RATE, maximum_rounds=60)
    assert decision.verdict is Verdict.PASS and decision.grade == grade
    assert "tg32@d0: expected at least 52 tok/s, got " in decision.reason


@pytest.mark.parametrize(
    ("metric", "samples", "rounds", "verdict"),
    [
        pytest.param(
            "e2e_p50",
            (900.0, 905.0, 895.0, 902.0, float("inf")),
            60,
            None,
            id="e2e_p50, 900.0 905.0 895.0 902.0 inf, 60",
        ),
        pytest.param(
            "e2e_p50",
            (
                1100.0,
                1100.0,
                1100.0,
                1100.0,
                1100.0,
                1100.0,
                float("inf"),
                float("inf"),
                float("inf"),
                float("inf"),
                float("inf"),
                float("inf"),
                float("inf"),
                float("inf"),
            ),
            60,
            "FAIL",
            id="e2e_p50, 1100.0 1100.0 1100.0 1100.0 1100.0 1100.0 inf",
        ),
        pytest.param("startup_s", (299.0,), 1, "PASS", id="startup_s, 299.0, 1, PASS"),
        pytest.param("startup_s", (301.0,), 1, "FAIL", id="startup_s, 301.0, 1, FAIL"),
    ],
)
def test_a_time_is_decided_by_its_rounds(metric, samples, rounds, verdict):
    """For a time, a failed round counts as the worst one, and a single value is sufficient for a
    decision."""
    at_most = 300 if metric == "startup_s" else 1000
    chosen = Gate(metric=metric, unit="ms", at_most=at_most, source="the plan")
    decision = gate.decide(samples, chosen, maximum_rounds=rounds)
    assert (decision and decision.verdict.value) == verdict, decision and decision.reason
    assert len(samples) > 1 or decision.estimate.ci_low is None


def tail(samples, bound=None):
    gate_of_tail = Gate(metric="ttft_p99", unit="ms", at_most=1000, source="the plan")
    return gate.decide_tail(samples, gate_of_tail, fraction=0.99, maximum_requests=bound)


@pytest.mark.parametrize(
    ("within", "beyond", "value", "bound", "verdict"),
    [
        (20, None, None, None, "PASS"),
        (20, None, None, 600, None),
        (19, 1, 1200.0, None, "INCONCLUSIVE"),
        (40, 5, 1200.0, None, "FAIL"),
        (40, 5, float("inf"), None, "FAIL"),
        (597, 3, 1200.0, 600, "INCONCLUSIVE"),
    ],
)
def test_a_tail_is_decided_by_its_requests(within, beyond, value, bound, verdict):
    """The gate of a percentile decides on all requests.

    With --percentiles, the suite sends further requests up to the gate's limit."""
    decision = tail([500.0] * within + [value] * (beyond or 0), bound)
    assert (decision and decision.verdict.value) == verdict, decision and decision.reason


def test_a_percentile_has_the_confidence_of_its_requests():
    assert [gate.requests_needed(fraction) for fraction in (0.99, 0.95)] == [299, 59]
    few = tail([500.0] * 20)
    assert few.estimate.confidence == pytest.approx(1 - 0.99**20)
    assert "95 % confidence needs 299" in few.reason
    assert tail([500.0] * 299, bound=600).estimate.confidence > 0.95


def test_a_tail_errs_as_rarely_as_it_says():
    generator = np.random.default_rng(3)
    for share, wrong, limit in ((0.0105, Verdict.PASS, 0.05 + 0.01), (0.0095, Verdict.FAIL, 0.01)):
        count = 0
        for _ in range(500):
            samples = np.where(generator.random(900) < share, 1200.0, 500.0)
            decision = tail(samples[:299], bound=900) or tail(samples, bound=900)
            count += decision.verdict is wrong
        assert count <= 500 * limit + 3 * math.sqrt(500 * limit), (share, count)


@pytest.mark.parametrize("count", [2, 5, 6, 7, 12, 13, 40])
def test_the_interval_covers_as_often_as_it_says(count):
    draws = np.random.default_rng(count).exponential(1.0, (4000, count))
    intervals = [statistics.estimate(samples) for samples in draws]
    hits = sum(interval.ci_low <= math.log(2) <= interval.ci_high for interval in intervals)
    stated = intervals[0].confidence
    assert hits / 4000 >= stated - 3 * math.sqrt(stated * (1 - stated) / 4000)
    assert stated >= 0.95 - 1e-9 or count < 6, "fewer than six rounds cannot show 95 %"


def test_estimates_of_the_odd_cases():
    assert statistics.estimate([5.0]).ci_low is None
    assert statistics.estimate([1.0, math.inf, math.inf, math.inf]).value == math.inf
    assert statistics.quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert statistics.quantile(list(range(1, 101)), 0.99) == 99
    with pytest.raises(ValueError, match="at least one sample"):
        statistics.estimate([])
    with pytest.raises(ValueError, match="not a number"):
        statistics.estimate([1.0, math.nan])
    ratio, low, high = statistics.ratio_interval([9.0, 9.1, 8.9, 9.0], [10.0, 10.1, 9.9, 10.0])
    assert low <= ratio <= high and ratio == pytest.approx(0.9) and high < 0.95
