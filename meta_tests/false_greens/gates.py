"""Rates that a gate must not pass: throttling, noise with a memory, rounds left out."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import past_runs
from two_steps import in_two_steps

from false_greens import Kit, Outcome, of_data
from sm121.core import profile
from sm121.core.verdict import Verdict
from sm121.measure import gate
from sm121.regression import measured, trend
from sm121.regression.change import Change
from sm121.run import stored_run
from tools import gate_errors

_LEVEL = "tests/test_performance.py"
_SCENARIO = "meta_tests/scenarios/measurements.py"
_RUNS = 100

Step = Callable[[Kit], Outcome]


# 3: what is decided of a series of rounds, and of a server.


@in_two_steps
def _series(_kit: Kit, rates: Sequence[float], left_out: int = 0) -> Outcome:
    """The decision on rounds that agree with their level to 0.05 %; no more are allowed. Beside
    them so many were left out, and may have been as usual."""
    values = [rate * (1.0 + 0.0005 * (-1) ** at) for at, rate in enumerate(rates)]
    late = [(51.0, 55.0)] * left_out
    decision = gate.decide(values, gate_errors.RATE, maximum_rounds=len(values), left_out=late)
    return Outcome(decision.verdict.value, decision.reason)


@in_two_steps
def _served(kit: Kit, *server: str) -> Outcome:
    """The decode rates of a server and what comes after them."""
    status, run = kit.run_pytest(
        *(_LEVEL, "--arch", "sm121", "--configuration", "mxfp4", "--depths", "0"),
        *("-k", "decode_rate or concurrent_rate"),
        *("--base-url", kit.timed_server(*server).base_url), timeout_s=600.0,
    )  # fmt: skip
    messages = [test["message"] for test in run.verdict["tests"] if test["verdict"] != "PASS"]
    return Outcome(run.verdict["metrics"]["tg32@d0"]["verdict"], " ".join(messages), status)


# 4: how often a gate errs.


def _passed_too_often(verdicts: Mapping[Verdict, int]) -> Outcome:
    """PASS where a gate passes it in more than two of a hundred runs, by three errors."""
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


# 5: what is a baseline.

_LIMITS = profile.load("sm121-gpt-oss-120b").regression
_GOOD = {"tg32@d0": [90.0, 90.3, 89.7, 90.2, 89.8], "pp2048@d0": [9200.0, 9220, 9180, 9210, 9190]}


def _runs(kit: Kit, factors: Sequence[float], change: Callable[[Any], None] | None) -> Outcome:
    """Runs after each other, each stored and compared with the latest; the outcome of the last."""
    storage = Path(tempfile.mkdtemp(dir=kit.tmp_path))
    server = kit.fault_server()
    status, message = 0, ""
    for number, factor in enumerate(factors):
        samples = {name: [v * factor for v in values] for name, values in _GOOD.items()}
        status, run = kit.run_pytest(
            *("--arch", "sm121", *server.options),
            *("--served-model-name", "canary", f"--benchmark-storage={storage}"),
            *("--benchmark-autosave", _SCENARIO, "tests/test_regression.py"),
            *([f"--benchmark-compare=000{number}"] if number else []),
            environment={"SM121_META_SAMPLES": json.dumps(samples)},
        )
        message = " ".join(t["message"] for t in run.verdict["tests"] if t["verdict"] != "PASS")
        if status and number < len(factors) - 1 and change is None:
            break
        if change is not None:
            for file in storage.glob("*/*.json"):
                stored = json.loads(file.read_text("utf-8"))
                change(stored)
                file.write_text(json.dumps(stored), "utf-8")
    return Outcome("PASS" if status == 0 else "FAIL", message, status)


@in_two_steps
def _changed(kit: Kit, change: Callable[[Any], None]) -> Outcome:
    """A run like the one before it, which is named and was changed after it was stored."""
    return _runs(kit, [1.0, 1.0], change)


@in_two_steps
def _ratchet(kit: Kit, step: float, runs: int) -> Outcome:
    return _runs(kit, [step**number for number in range(runs)], None)


def _as_it_was(_stored: Any) -> None: ...


def _zero(stored: Any) -> None:
    for benchmark in stored["benchmarks"]:
        benchmark["extra_info"]["samples"][0] = 0.0


def _red(stored: Any) -> None:
    for benchmark in stored["benchmarks"]:
        benchmark["extra_info"]["run"] = "FAIL"


@in_two_steps
def _baseline(_kit: Kit, **changes: Any) -> Outcome:
    """Whether a stored run is a baseline for one of its own context."""
    context: dict[str, Any] = dict.fromkeys(("profile", "model", "path", "definition"))
    entry = {
        "sm121": 1, "metric": "tg32@d0", "unit": "tok/s", "higher_is_better": True,
        "quantile": None, "samples": [60.0, 60.1], "value": 60.0, "verdict": "PASS", "run": "PASS",
    }  # fmt: skip
    run = stored_run.of_benchmarks("0001", "", [{**entry, **changes}])
    why = ["nothing in it"] if run is None else run.unlike(context)
    return Outcome("no baseline" if why else "PASS", "; ".join(why))


def _rate(name: str, unit: str, values: Sequence[float]) -> stored_run.StoredMetric:
    return stored_run.StoredMetric(name, unit, unit == "tok/s", None, (*values,), values[0])


def _judged(change: Change) -> Outcome:
    return Outcome("PASS" if change.holds else change.verdict.value, change.text)


@in_two_steps
def _against_one_run(
    _kit: Kit, name: str, unit: str, before: list[float], now: list[float]
) -> Outcome:
    """A metric of few samples against the only stored run."""
    run = past_runs.stored_run("0001", _rate(name, unit, before))
    return _judged(*trend.compare({name: _rate(name, unit, now)}, [run], _LIMITS))


_MACHINE = {"gpu": "NVIDIA GB10", "driver": "580.95", "gpu_clocks": "default"}
_PATH = {"attention": None, "moe": "MARLIN", "cuda_graphs": False, "native_fp4": None}
_NOW: dict[str, Any] = {
    "machine": _MACHINE, "gpu_units": ["a1"], "path": _PATH, "path_requests": [], "plan": {"d": 0},
}  # fmt: skip


def _unlike(now: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A context that differs in this; in a table of it, in the keys that are named."""
    return now | {
        key: now[key] | value if isinstance(value, dict) else value
        for key, value in changes.items()
    }


@in_two_steps
def _after(kit: Kit, *contexts: dict[str, Any], share: float = 0.6) -> Outcome:
    """A run at so much of the rate of runs ones, of contexts that differ from its own in this."""
    rates = [100.0 + 0.1 * at for at in range(8)]
    before, now = (_rate("tg32@d0", "tok/s", [v * by for v in rates]) for by in (1, share))
    runs = [past_runs.stored_run("0001_x.json", before, **_unlike(_NOW, each)) for each in contexts]
    if matches := [run for run in runs if not run.unlike(_NOW)]:
        return _judged(*trend.compare({now.name: now}, matches, _LIMITS))
    error = measured.none_matches(runs, _NOW, kit.tmp_path)
    green = error.verdict is Verdict.NOT_RUN  # alone it is no failure
    return Outcome("PASS" if green else error.verdict.value, str(error))


# 6: rounds that are left out.


@in_two_steps
def _left_out(_kit: Kit, lateness: int, slow_share: float, distance: float) -> Outcome:
    """`lateness`: its place in `gate_errors.LATENESS`."""
    level = gate_errors.THRESHOLD * (1.0 + distance)
    late = gate_errors.LATENESS[lateness]
    verdicts = gate_errors.left_out(late, level, slow_share, _RUNS, count_them=True)
    return _passed_too_often(verdicts)


_BELOW = -gate_errors.DISTANCE
CASES = list(of_data(__name__))
