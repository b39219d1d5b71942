"""Items 3, 4 and 6: rates that a gate must not pass, because of throttling, correlated noise, or
dropped rounds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meta_tests.faults.false_greens import Case, Kit, Outcome
from meta_tests.two_steps import in_two_steps
from sm121.core.verdict import Verdict
from sm121.measure import gate
from tools import gate_errors

_LEVEL = "tests/test_performance.py"
_RUNS = 100
Step = Callable[[Kit], Outcome]


@in_two_steps
def _series(_kit: Kit, rates: Sequence[float], left_out: int = 0) -> Outcome:
    """Return the decision on rounds that are within 0.05 % of their level, without further rounds.

    The given number of rounds was dropped; these rounds may have been normal."""
    values = [rate * (1.0 + 0.0005 * (-1) ** at) for at, rate in enumerate(rates)]
    late = [(51.0, 55.0)] * left_out
    decision = gate.decide(values, gate_errors.RATE, maximum_rounds=len(values), left_out=late)
    return Outcome(decision.verdict.value, decision.reason)


@in_two_steps
def _served(kit: Kit, *server: str) -> Outcome:
    """Measure the decode rates of a server, and afterwards read the counters in its metrics."""
    status, run = kit.run_pytest(
        *(_LEVEL, "--arch", "sm121", "--configuration", "mxfp4", "--depths", "0"),
        *("-k", "decode_rate or concurrent_rate"),
        *("--base-url", kit.timed_server(*server).base_url), timeout_s=600.0,
    )  # fmt: skip
    messages = [test["message"] for test in run.verdict["tests"] if test["verdict"] != "PASS"]
    return Outcome(run.verdict["metrics"]["tg32@d0"]["verdict"], " ".join(messages), status)


def _passed_too_often(verdicts: Mapping[Verdict, int]) -> Outcome:
    """Return PASS if a gate passes significantly more often than in two of a hundred runs (by three
    standard errors)."""
    often = verdicts[Verdict.PASS] > _RUNS * gate_errors.ALLOWED + 4
    counts = ", ".join(f"{verdicts[v]} {v.value}" for v in Verdict if verdicts[v])
    return Outcome("PASS" if often else "not passed", f"of {_RUNS} runs: {counts}")


@in_two_steps
def _errs(_kit: Kit, draw: Callable[[Any], Any]) -> Outcome:
    return _passed_too_often(gate_errors.simulate(draw, _RUNS, 14))


def _below(noise: str, *shape: float, **more: bool) -> Step:
    level = gate_errors.THRESHOLD * (1.0 - gate_errors.DISTANCE)
    drawn = getattr(gate_errors, noise)(*shape, **more)
    return _errs(lambda generator: level * (1.0 + drawn(generator, gate_errors.BOUND)))


def _slow(number: int) -> Step:
    slow = gate_errors.SLOW[number]
    return _errs(lambda generator: slow.draw(generator, gate_errors.BOUND))


def _independent() -> Step:
    noise = gate_errors.independent(0.005)
    return _errs(lambda generator: 53.0 * (1.0 + noise(generator, gate_errors.BOUND)))


@in_two_steps
def _left_out(_kit: Kit, lateness: int, slow_share: float, distance: float) -> Outcome:
    """Return the decision on rounds of which some are dropped.

    `lateness` is the index in `gate_errors.LATENESS`."""
    level = gate_errors.THRESHOLD * (1.0 + distance)
    late = gate_errors.LATENESS[lateness]
    verdicts = gate_errors.left_out(late, level, slow_share, _RUNS, count_them=True)
    return _passed_too_often(verdicts)


_BELOW = -gate_errors.DISTANCE


CASES = [
    Case(
        item="3 Throttling",
        name="faster at first, then below the gate for good",
        fault=_series([54.0] * 12 + [51.6] * 12),
        clean=_series([53.0] * 24),
        expected="the threshold",
    ),
    Case(
        item="3 Throttling",
        name="below the gate in the last look only",
        fault=_series([54.0] * 21 + [51.6] * 3),
        clean=_series([53.0] * 24),
        expected="last round is on the",
    ),
    Case(
        item="3 Throttling",
        name="below the gate in the very last round",
        fault=_series([54.0] * 23 + [51.6]),
        clean=_series([53.0] * 24),
        expected="last round is on the other",
    ),
    Case(
        item="3 Throttling",
        name="a slow drift that ends below",
        fault=_series([round(54.6 - 0.12 * at, 2) for at in range(24)]),
        clean=_series([53.0] * 24),
        expected="effective sample size",
    ),
    Case(
        item="3 Throttling",
        name="a boost at both ends",
        fault=_series([54.0] * 8 + [51.2] * 10 + [54.0] * 6),
        clean=_series([53.0] * 24),
        expected="threshold",
    ),
    Case(
        item="3 Throttling",
        name="one round in five at half speed",
        fault=_series(([54.0] * 4 + [27.0]) * 4),
        clean=_series([53.0] * 24),
        expected="over the whole time",
    ),
    Case(
        item="3 Throttling",
        name="too few rounds to know whether they have a memory",
        fault=_series([53.0, 53.0, 53.0, 53.0, 53.0]),
        clean=_series([53.0] * 24),
        expected="whether they are correlated",
    ),
    Case(
        item="3 Throttling",
        name="a server of 54 tok/s for 18 s, then of 51.6",
        fault=_served("--rate", "54", "--drift-after-s", "18", "--drift-factor", "0.9556"),
        clean=_served("--rate", "54"),
        expected="tg32@d0",
        slow=True,
    ),
    Case(
        item="4 Noise with a memory",
        name="AR(1), φ 0.95, 1 %",
        fault=_below("autoregressive", 0.95, 0.01),
        clean=_independent(),
        expected="of 100 runs",
    ),
    Case(
        item="4 Noise with a memory",
        name="AR(1), φ 0.9, 2 %",
        fault=_below("autoregressive", 0.9, 0.02),
        clean=_independent(),
        expected="of 100 runs",
    ),
    Case(
        item="4 Noise with a memory",
        name="two states 4 % apart, ten rounds each",
        fault=_below("two_states", 10, 0.001),
        clean=_independent(),
        expected="of 100 runs",
    ),
    Case(
        item="4 Noise with a memory",
        name="two states 4 % apart, ten rounds each on average",
        fault=_below("two_states", 10, 0.003, fixed=False),
        clean=_independent(),
        expected="of 100 runs",
    ),
    Case(
        item="4 Noise with a memory",
        name="one answer in five at half speed",
        fault=_slow(0),
        clean=_independent(),
        expected="of 100 runs",
    ),
    Case(
        item="4 Noise with a memory",
        name="one answer in five at half speed, 60 tok/s",
        fault=_slow(1),
        clean=_independent(),
        expected="of 100 runs",
    ),
    Case(
        item="4 Noise with a memory",
        name="one answer in four at two thirds",
        fault=_slow(2),
        clean=_independent(),
        expected="of 100 runs",
    ),
    Case(
        item="4 Noise with a memory",
        name="one answer in ten takes three times as long, and a short one never does",
        fault=_served("--rate", "54", "--slow-every", "10"),
        clean=_served("--rate", "54"),
        expected="over the whole time",
        slow=True,
    ),
    Case(
        item="6 Rounds that are left out",
        name="slow answers only",
        fault=_left_out(2, 0.3, _BELOW),
        clean=_left_out(2, 0.0, 0.025),
        expected="of 100 runs",
    ),
    Case(
        item="6 Rounds that are left out",
        name="the longer an answer, the more often",
        fault=_left_out(1, 0.3, _BELOW),
        clean=_left_out(1, 0.0, 0.025),
        expected="of 100 runs",
    ),
    Case(
        item="6 Rounds that are left out",
        name="any answer, and 30 % of them slow",
        fault=_left_out(0, 0.3, _BELOW),
        clean=_left_out(0, 0.0, 0.025),
        expected="of 100 runs",
    ),
    Case(
        item="6 Rounds that are left out",
        name="more than a third of all",
        fault=_series([53.0] * 24, 14),
        clean=_series([53.0] * 24, 8),
        expected="was late",
    ),
]
