"""The regression level fails for each of its reasons, and for nothing else."""

from operator import add, mul

import numpy as np
import pytest

from meta_tests.unit.regression.trend_runs import changed, metric, rounds, run, verdicts
from sm121.core import profile
from sm121.core.verdict import Verdict
from sm121.regression import trend as regression


@pytest.mark.parametrize("stored", [1, 2, 3, 5, 8])
def test_the_same_build_again_is_no_regression_and_ten_percent_is(stored):
    again = []
    slower = []
    for seed in range(0, 400, 10):
        earlier = [metric("tg32@d0", rounds(60, seed + i)) for i in range(stored)]
        again.append(verdicts(metric("tg32@d0", rounds(60, seed + 9)), *earlier))
        slower.append(verdicts(metric("tg32@d0", rounds(54, seed + 9)), *earlier))
    assert set(again) == {Verdict.PASS}
    # From three runs on, the scatter of the runs counts, but three runs give a poor estimate of it.
    assert slower.count(Verdict.FAIL) >= (40 if stored != 3 else 36), slower
    assert Verdict.PASS not in slower


def test_runs_differ_by_does_not_replace_the_limits_of_named_metrics():
    limits = profile.load("cpu-tiny-gpt-oss").regression
    allowed = [limits.allowed(name) for name in ("tg32@d0", "memory_peak_gib", "startup_s")]
    assert allowed == [0.25, 0.05, 0.75]
    others = [name for name in profile.shipped() if not name.startswith("cpu-")]
    assert {profile.load(name).regression.runs_differ_by for name in others} == {0.0}


def test_a_noisy_machine_is_inconclusive_and_never_red_by_luck():
    decided = []
    for seed in range(0, 600, 10):
        earlier = [metric("tg32@d0", rounds(60, seed + i, boot=0.06)) for i in range(5)]
        decided.append(verdicts(metric("tg32@d0", rounds(60, seed + 9, boot=0.06)), *earlier))
    assert decided.count(Verdict.FAIL) <= 4, "5 % by chance, less the samples that disagree"
    assert decided.count(Verdict.INCONCLUSIVE) > 0


#: The rounds of pp512@d512 in two successive runs of one build, on a CPU with two speeds.
FAST_THEN_SLOW = [9770, 9681, 9726, 9299, 7175]
FAST = [9770, 9681, 9726, 9750, 9690]
SLOW = [7191, 6801, 7118, 7000, 6907]


@pytest.mark.parametrize(
    ("earlier", "now", "verdict"),
    [
        pytest.param(FAST_THEN_SLOW, SLOW, "INCONCLUSIVE", id="from 2 to 30 % worse"),
        pytest.param(FAST, SLOW, "FAIL", id="from 26 to 30 % worse"),
        pytest.param(SLOW, FAST_THEN_SLOW, "PASS", id="better"),
    ],
)
@pytest.mark.parametrize("name", ["pp512@d512", "ttft_p50"])
def test_a_loss_is_a_failure_only_if_its_whole_interval_is_above_the_limit(
    name, earlier, now, verdict
):
    limits = profile.load("cpu-tiny-gpt-oss").regression
    if name == "ttft_p50":
        earlier = 1e6 / np.array(earlier)
        now = 1e6 / np.array(now)
    metrics = {name: metric(name, now)}
    (change,) = regression.compare(metrics, [run(1, metric(name, earlier))], limits)
    assert change.verdict is Verdict(verdict), change.text
    if verdict == "INCONCLUSIVE":
        assert change.is_measured_loss, "it must not become a trusted run"
        assert "reaches into the allowed loss" in change.text


P50 = metric("ttft_p50", rounds(450, 1), quantile=0.5)

ROUNDS = [metric("tg32_c2@d0", [v, v + 1, v - 1]) for v in (60.0, 60.4, 59.7, 60.2)]

STARTS = [metric("startup_s", [v]) for v in (100.0, 103.0, 99.0, 101.0)]


# `first` is the number of earlier runs that are used. If it is None, all of them are used.
@pytest.mark.parametrize(
    ("earlier", "first", "now", "verdict"),
    [
        # a time is worse if it is longer
        pytest.param((P50,), None, rounds(520, 2), "FAIL", id="P50, rounds 520 2, FAIL"),
        pytest.param((P50,), None, rounds(400, 2), "PASS", id="P50, rounds 400 2, PASS"),
        # Three runs against three cannot be significant, so the scatter of the runs decides.
        pytest.param(ROUNDS, None, (50.0, 51.0, 49.0), "FAIL", id="ROUNDS, 50.0 51.0 49.0, FAIL"),
        pytest.param(
            ROUNDS,
            1,
            (50.0, 51.0, 49.0),
            "INCONCLUSIVE",
            id="ROUNDS, 1, 50.0 51.0 49.0, INCONCLUSIVE",
        ),
        pytest.param(
            ROUNDS, 1, (55.0, 56.0, 54.0), "NOT_RUN", id="ROUNDS, 1, 55.0 56.0 54.0, NOT_RUN"
        ),
        pytest.param(
            (metric("tg32@d0", [60, 58, 62, 50, 61]),),
            None,
            (55, 61, 54, 56, 53),
            "INCONCLUSIVE",
            id="metric tg32@d0 60 58 62 50 61, 55 61 54 56 53",
        ),
        # The scatter also decides about single values. A start may be 20 % slower.
        pytest.param(STARTS, None, (200.0,), "FAIL", id="STARTS, 200.0, FAIL"),
        pytest.param(STARTS, None, (115.0,), "PASS", id="STARTS, 115.0, PASS"),
        pytest.param(STARTS, 1, (150.0,), "INCONCLUSIVE", id="STARTS, 1, 150.0, INCONCLUSIVE"),
        pytest.param(STARTS, 1, (130.0,), "NOT_RUN", id="STARTS, 1, 130.0, NOT_RUN"),
        pytest.param(
            (metric("itl_p50", mul([20.0], 1200)),),
            None,
            mul([23.0], 1200),
            "FAIL",
            id="a median of 1200 gaps between tokens, FAIL",
        ),
        # a rate of zero
        pytest.param(
            (metric("tg32@d0", [60, 61]),),
            None,
            (0.0, 0.0),
            "FAIL",
            id="metric tg32@d0 60 61, 0.0 0.0, FAIL",
        ),
    ],
)
def test_a_metric_is_judged_by_its_samples_or_by_the_scatter_of_the_runs(
    earlier, first, now, verdict
):
    earlier = earlier[:first]
    change = changed(metric(earlier[0].name, now, quantile=earlier[0].quantile), *earlier)
    assert change.verdict is Verdict(verdict)
    assert ("not judged" in change.text) is (verdict == "NOT_RUN")


@pytest.mark.parametrize("stored", [1, 2])
@pytest.mark.parametrize(
    ("name", "before", "now", "verdict"),
    [
        pytest.param(
            "itl_p99",
            tuple(mul([20.0], 200)),
            tuple(add(mul([20.0], 190), mul([900.0], 10))),
            "FAIL",
            id="itl_p99, operator.mul 20.0 200, operator.add",
        ),
        pytest.param(
            "ttft_p99",
            (250.0, 280.0, 300.0),
            (300.0, 940.0, 990.0),
            "FAIL",
            id="ttft_p99, 250.0 280.0 300.0, 300.0 940.0 990.0, FAIL",
        ),
        pytest.param(
            "memory_peak_gib", (60.0,), (121.0,), "FAIL", id="memory_peak_gib, 60.0, 121.0, FAIL"
        ),
        pytest.param(
            "tg32_c8@d0",
            (300.0, 310.0, 305.0),
            (140.0, 150.0, 145.0),
            "FAIL",
            id="tg32_c8@d0, 300.0 310.0 305.0, 140.0 150.0 145.0, FAIL",
        ),
        pytest.param(
            "ttft_p99",
            (250.0, 280.0, 300.0),
            (250.0, 280.0, 990.0),
            "INCONCLUSIVE",
            id="ttft_p99, 250.0 280.0 300.0, 250.0 280.0 990.0",
        ),
        pytest.param(
            "itl_p99",
            tuple(mul([20.0], 200)),
            tuple(add(mul([20.0], 190), mul([38.0], 10))),
            "NOT_RUN",
            id="itl_p99, operator.mul 20.0 200, operator.add (2)",
        ),
        pytest.param(
            "memory_peak_gib",
            (60.0,),
            (65.9,),
            "NOT_RUN",
            id="memory_peak_gib, 60.0, 65.9, NOT_RUN",
        ),
        pytest.param(
            "tg32_c8@d0",
            (300.0, 310.0, 305.0),
            (277.0, 281.0, 279.0),
            "NOT_RUN",
            id="tg32_c8@d0, 300.0 310.0 305.0, 277.0 281.0 279.0",
        ),
        pytest.param(
            "ttft_p99",
            (250.0, 280.0, 300.0),
            (100.0, 120.0, 140.0),
            "PASS",
            id="ttft_p99, 250.0 280.0 300.0, 100.0 120.0 140.0, PASS",
        ),
    ],
)
def test_twice_as_bad_is_beyond_doubt_with_one_stored_run(name, before, now, verdict, stored):
    """With one stored run, a metric that is twice as bad fails, but one slow request proves
    nothing.

    One slow request of several is only a reason to run again."""
    fields = {"quantile": 0.99} if name.endswith("p99") else {}

    def of(samples):
        return metric(name, samples, **fields, value=float(np.quantile(samples, 0.99)))

    earlier = [of(before)] * stored
    assert verdicts(of(now), *earlier) is Verdict(verdict)
    runs = [run(number, one, metric("tg32@d0", [60] * 9)) for number, one in enumerate(earlier)]
    assert regression.not_judged(runs) == ([name], 3 - stored)
    assert regression.not_judged([*runs, *runs, *runs]) == ([], 0)


def test_a_metric_that_vanished_or_was_renamed_is_named():
    baseline = run(1, metric("tg32@d0", [60]), metric("pp2048@d0", [4500]))
    now = {m.name: m for m in (metric("pp2048@d0", [4500]), metric("tg32_at_d0", [60]))}
    (line,) = regression.missing(now, baseline)
    assert line.metric == "tg32@d0"
    assert "tg32@d0 was measured in 0001_x.json" in str(line)
    assert regression.missing({**now, "tg32@d0": metric("tg32@d0", [60])}, baseline) == []
