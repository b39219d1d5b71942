"""The gate of 52 tok/s is judged with the known spread of a build's starts."""

import math
from pathlib import Path

import numpy as np
import pytest

from sm121.core.profile_fields import Gate
from sm121.core.verdict import Verdict
from sm121.measure import conclusion, gate
from sm121.measure.measurement import Measurement
from sm121.performance import starts
from sm121.performance.starts import EarlierStarts
from sm121.run.stored_benchmarks import of_benchmarks
from sm121.run.stored_run import StoredRun

GATE = Gate(metric="tg32@d0", unit="tok/s", minimum=52.0, source="a test")
#: The spread between the rounds of one start, and between the starts of one build, as fractions of
#: the rate (standard deviations).
WITHIN = 0.003
BETWEEN = 0.02
#: The number of rounds that are sufficient for a decision.
ROUNDS = 104


def of_one_start(rate: float, chance: np.random.Generator) -> Measurement:
    """Return the rounds of a start with this rate."""
    samples = (rate * np.exp(chance.normal(0.0, WITHIN, ROUNDS))).tolist()
    return Measurement(name="tg32@d0", unit="tok/s", samples=samples, higher_is_better=True)


def judged(build: float, stored: int, chance: np.random.Generator) -> Verdict:
    """Return the verdict on one start of a build, with this many stored starts."""
    levels = build * np.exp(chance.normal(0.0, BETWEEN, stored + 1))
    measurement = of_one_start(levels[-1], chance)
    decision, _ = gate.decide_measurement(measurement, GATE, None, ROUNDS)
    return conclusion.over_starts(decision, GATE, measurement, levels[:-1].tolist()).verdict


def share_of(verdict: Verdict, build: float, stored: int) -> float:
    """Return the share of 2,000 simulated single starts of a build that get the given verdict."""
    chance = np.random.default_rng(46)
    return [judged(build, stored, chance) for _ in range(2000)].count(verdict) / 2000


@pytest.mark.parametrize("stored", [5, pytest.param(12, marks=pytest.mark.slow("easier than 5"))])
@pytest.mark.parametrize(
    ("build", "wrong"),
    [(53.0, Verdict.FAIL), (51.0, Verdict.PASS), (51.99, Verdict.PASS), (52.01, Verdict.FAIL)],
    ids=["healthy", "slow", "just below", "just above"],
)
def test_a_start_flips_no_more_often_than_the_level_of_the_gate(build, wrong, stored):
    most = gate.ERROR + 3.0 * math.sqrt(gate.ERROR * (1.0 - gate.ERROR) / 2000)
    assert share_of(wrong, build, stored) <= most


def test_without_stored_starts_it_flips_more_often():
    """Without stored starts, the verdict changes more often, because the rounds of one start do not
    show the spread between starts."""
    assert share_of(Verdict.FAIL, 53.0, 0) > 0.1
    assert share_of(Verdict.PASS, 51.0, 0) > 0.1


@pytest.mark.parametrize(
    ("build", "right"),
    [(59.4, Verdict.PASS), (33.5, Verdict.FAIL)],
    ids=["the build with 59.4", "a release with 33.5"],
)
def test_rates_far_from_the_gate_stay_decided(build, right):
    assert share_of(right, build, 12) > 0.97


def test_the_reason_names_the_number_of_starts():
    chance = np.random.default_rng(46)
    measurement = of_one_start(53.0, chance)
    decision, _ = gate.decide_measurement(measurement, GATE, None, ROUNDS)
    alone = conclusion.over_starts(decision, GATE, measurement, [53.0, 53.1])
    assert (alone.verdict, alone.start_spread) == (Verdict.PASS, None)
    assert alone.reason.endswith("; measured in one start)")
    levels = [51.9, 54.1, 52.7, 53.9, 52.2, 53.6]
    among = conclusion.over_starts(decision, GATE, measurement, levels)
    assert among.verdict is Verdict.INCONCLUSIVE
    assert among.start_spread == pytest.approx(0.017, abs=0.002)
    assert "6 earlier starts differ by 1.7 % (standard deviation)" in among.reason.replace(
        "1.7%", "1.7 %"
    )
    assert "--ab" in among.reason
    steady = conclusion.over_starts(decision, GATE, measurement, [53.0, 53.1, 52.9, 53.0, 53.05])
    assert (steady.verdict, steady.grade) == (Verdict.PASS, "minimum")


def test_times_and_tails_are_judged_as_before():
    measurement = Measurement(name="startup_s", unit="s", samples=[300.0], higher_is_better=False)
    bound = Gate(metric="startup_s", unit="s", at_most=600.0, source="a test")
    decision, _ = gate.decide_measurement(measurement, bound, None, 1)
    assert conclusion.over_starts(decision, bound, measurement, [100.0, 500.0] * 3) is decision


CONTEXT = {"profile": "p", "machine": {"gpu": "GB10"}, "plan": {}, "path": {}, "model": "m"}


def stored(name: str, value: float, verdict: str = "PASS", **changed: object) -> StoredRun:
    """Return a stored run of one metric."""
    extra = {
        "sm121": 1, "metric": "tg32@d0", "unit": "tok/s", "higher_is_better": True, "value": value,
        "samples": [value] * 5, "verdict": verdict, "run": verdict, "quantile": None,
        "engine": {"name": "vllm", "version": "0.14.0+mxfp4"}, **CONTEXT, **changed,
    }  # fmt: skip
    run = of_benchmarks(name, "2026-11-28", [extra])
    assert run is not None
    return run


def test_starts_are_those_of_this_build_on_this_machine(monkeypatch):
    runs = [
        stored("a", 53.0),
        stored("too slow", 51.5, "FAIL"),
        stored("wrong path", 80.0, "INVALID"),
        stored("another release", 33.0, engine={"name": "vllm", "version": "0.33.0"}),
        stored("another machine", 40.0, machine={"gpu": "H100"}),
        stored("another configuration", 41.0, configuration="stock"),
    ]
    monkeypatch.setattr(starts.stored_benchmarks, "load_benchmarks", lambda _folder: runs)
    earlier = EarlierStarts("storage", Path())

    def levels(version: str | None) -> list[float]:
        return earlier.levels("tg32@d0", CONTEXT, engine="vllm", version=version)

    assert levels("0.14.0+mxfp4") == [53.0, 51.5], "a start that failed its gate is a start"
    assert levels(None) == [], "an unknown version is no other's"
