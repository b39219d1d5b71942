"""Differences between starts of one build neither make a build fail nor hide a slow build."""

import itertools
from collections import Counter

import numpy as np
import pytest

from meta_tests.unit.regression.trend_runs import (
    LIMITS,
    changed,
    metric,
    rounds,
    run,
)
from sm121.core.verdict import Verdict
from sm121.regression import metric_levels
from sm121.regression import trend as regression
from sm121.run.stored_run import StoredMetric


def _start(generator: np.random.Generator, rate: float) -> StoredMetric:
    """Return a start on a machine on which one start in four is 7 % slow."""
    level = rate * (0.93 if generator.random() < 0.25 else 1.0) * generator.normal(1.0, 0.005)
    return metric("tg32@d0", level * generator.normal(1.0, 0.003, 7))


@pytest.mark.parametrize(
    "stored", [1, *(pytest.param(n, marks=pytest.mark.slow("seconds each")) for n in (3, 8, 20))]
)
def test_a_slow_start_blames_no_build_and_hides_none(stored):
    """A slow start neither makes a build fail nor hides a slow build.

    One run cannot distinguish a slow start from a slow build. A build that is 15 % slower fails.
    """
    worst = [Verdict.PASS, Verdict.NOT_RUN, Verdict.INCONCLUSIVE, Verdict.FAIL]
    verdicts = {0.85: Counter(), 0.9: Counter(), 1.0: Counter()}
    for seed, (share, counted) in itertools.product(range(100), verdicts.items()):
        generator = np.random.default_rng(seed)
        history = [run(n, _start(generator, 60.0)) for n in range(stored)]
        now = {"tg32@d0": _start(generator, 60.0 * share)}
        judged = [
            *regression.compare(now, history, LIMITS),
            *metric_levels.find_falls(now, history, LIMITS),
        ]
        counted[max((change.verdict for change in judged), key=worst.index)] += 1
    assert verdicts[1.0][Verdict.FAIL] <= 2, verdicts
    assert verdicts[0.9][Verdict.PASS] <= (20 if stored < 3 else 4), verdicts
    assert verdicts[0.85][Verdict.PASS] == 0 and verdicts[0.85][Verdict.FAIL] > 60, verdicts


def _at_two_speeds(generator: np.random.Generator) -> StoredMetric:
    """Return a start on a machine that has one of two speeds in each round, 30 % apart."""
    level = 60.0 * generator.normal(1.0, 0.03)
    speeds = generator.choice([1.0, 0.7], 11)
    return metric("tg32@d0", level * speeds * generator.normal(1.0, 0.03, 11))


def test_a_machine_that_changes_its_speed_during_a_run_blames_no_build():
    verdicts = Counter()
    for seed in range(100):
        generator = np.random.default_rng(seed)
        earlier = _at_two_speeds(generator)
        verdicts[changed(_at_two_speeds(generator), earlier).verdict] += 1
    assert verdicts[Verdict.FAIL] <= 1 and verdicts[Verdict.INCONCLUSIVE] > 20, verdicts


def _of_set(kernels: str, seed: int) -> StoredMetric:
    """Return a start with the fast or the slow set of autotuned kernels, whose rates differ by 8
    %."""
    generator = np.random.default_rng(seed)
    level = {"F": 60.0, "S": 55.2}[kernels] * generator.normal(1.0, 0.004)
    return metric("tg32@d0", level * generator.normal(1.0, 0.003, 7))


@pytest.mark.parametrize(
    ("stored", "now"),
    [
        ("FSFSF", "S"),
        ("FFFFF", "S"),
        ("FFF", "S"),
        ("F", "S"),
        ("SSSSS", "F"),
        ("SSS", "F"),
        ("S", "F"),
        ("FSFS", "F"),
    ],
)
def test_starts_that_differ_by_8_percent_are_no_regression_and_no_improvement(stored, now):
    """If starts of one build differ by 8 %, the message says so with any verdict."""
    for seed in range(0, 400, 10):
        history = [_of_set(kernels, seed + n) for n, kernels in enumerate(stored)]
        change = changed(_of_set(now, seed + 9), *history)
        better = " better" in change.text
        worse = " worse" in change.text
        if change.ratio is not None and abs(change.ratio - 1.0) <= 0.05:
            continue
        assert better is (now == "F") and worse is (now == "S"), change.text
        assert "starts of one build differ by up to 8%" in change.text, change.text
        assert "--ab compares pairs of starts" in change.text, change.text
        if now == "F":
            assert change.verdict is Verdict.PASS and "does not show an improvement" in change.text
        if "S" in stored:
            assert change.verdict is not Verdict.FAIL, change.text
        if {*stored} == {"F", "S"}:
            assert f"the {len(stored)} stored ones are between" in change.text, change.text


def test_a_start_that_is_as_the_last_ones_or_far_better_has_no_remark_on_starts():
    fast = [_of_set("F", seed) for seed in range(5)]
    assert "starts of one build" not in changed(_of_set("F", 9), *fast).text
    text = changed(metric("tg32@d0", rounds(90, 9)), *fast).text
    assert "better" in text and "starts of one build" not in text


@pytest.mark.parametrize(
    ("name", "unit", "of_start"),
    [
        ("tg32@d0", "tok/s", True),
        ("ttft_p50", "ms", True),
        ("memory_peak_gib", "GiB", False),
    ],
)
def test_metrics_independent_of_the_start_keep_their_limit(name, unit, of_start):
    assert (LIMITS.of_starts(name, unit) > 0.0) == of_start
    assert LIMITS.model_copy(update={"metrics": {name: 0.05}}).of_starts(name, unit) == 0.0
