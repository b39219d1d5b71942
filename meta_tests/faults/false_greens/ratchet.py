"""Item 5: stored runs that must not be a baseline, and changes since them."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meta_tests.fakes import past_runs
from meta_tests.faults.false_greens import Case, Kit, Outcome
from meta_tests.two_steps import in_two_steps
from sm121.core import profile
from sm121.core.verdict import Verdict
from sm121.regression import measured, trend
from sm121.regression.change import Change
from sm121.run import stored_benchmarks, stored_run

_SCENARIO = "meta_tests/whole/scenarios/measurements.py"

_LIMITS = profile.load("sm121-gpt-oss-120b").regression
_GOOD = {"tg32@d0": [90.0, 90.3, 89.7, 90.2, 89.8], "pp2048@d0": [9200.0, 9220, 9180, 9210, 9190]}


def _runs(kit: Kit, factors: Sequence[float], change: Callable[[Any], None] | None) -> Outcome:
    """Store several runs, each compared with the one before it, and return the outcome of the last
    run."""
    storage = Path(tempfile.mkdtemp(dir=kit.tmp_path))
    server = kit.fault_server()
    status = 0
    message = ""
    for number, factor in enumerate(factors):
        samples = {}
        for name, values in _GOOD.items():
            samples[name] = [v * factor for v in values]
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
    """Compare a run with the named stored run, which was changed after it was stored."""
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
    """Return whether a stored run is a baseline for another run with the same context."""
    context: dict[str, Any] = dict.fromkeys(("profile", "model", "path", "definition"))
    entry = {
        "sm121": 1, "metric": "tg32@d0", "unit": "tok/s", "higher_is_better": True,
        "quantile": None, "samples": [60.0, 60.1], "value": 60.0, "verdict": "PASS", "run": "PASS",
    }  # fmt: skip
    run = stored_benchmarks.of_benchmarks("0001", "", [{**entry, **changes}])
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
    """Judge a metric that has few samples by the only stored run."""
    run = past_runs.stored_run("0001", _rate(name, unit, before))
    return _judged(*trend.compare({name: _rate(name, unit, now)}, [run], _LIMITS))


_MACHINE = {"gpu": "NVIDIA GB10", "driver": "580.95", "gpu_clocks": "default"}
_PATH = {"attention": None, "moe": "MARLIN", "cuda_graphs": False, "native_fp4": None}
_NOW: dict[str, Any] = {
    "machine": _MACHINE, "gpu_units": ["a1"], "path": _PATH, "path_requests": [], "plan": {"d": 0},
}  # fmt: skip


def _unlike(now: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a context that differs in the given key, or in the given keys of a table."""
    changed = {}
    for key, value in changes.items():
        if isinstance(value, dict):
            changed[key] = now[key] | value
        else:
            changed[key] = value
    return now | changed


@in_two_steps
def _after(kit: Kit, *contexts: dict[str, Any], share: float = 0.6) -> Outcome:
    """Judge a run whose rate is the given share of earlier runs' rate.

    The contexts of the runs differ in the given entries."""
    rates = [100.0 + 0.1 * at for at in range(8)]
    before = _rate("tg32@d0", "tok/s", rates)
    now = _rate("tg32@d0", "tok/s", [v * share for v in rates])
    runs = [past_runs.stored_run("0001_x.json", before, **_unlike(_NOW, each)) for each in contexts]
    if matches := [run for run in runs if not run.unlike(_NOW)]:
        return _judged(*trend.compare({now.name: now}, matches, _LIMITS))
    error = measured.none_matches(runs, _NOW, kit.tmp_path, measured=1)
    green = error.verdict is Verdict.NOT_RUN  # a NOT_RUN alone does not make the run fail
    return Outcome("PASS" if green else error.verdict.value, str(error))


CASES = [
    Case(
        item="5 The ratchet",
        name="-4.5 % a run, each compared with the latest",
        fault=_ratchet(0.955, 5),
        clean=_ratchet(0.999, 3),
        expected="% worse",
        slow=True,
    ),
    Case(
        item="5 The ratchet",
        name="-2.4 % a run, each compared with the latest",
        fault=_ratchet(0.976, 9),
        clean=_ratchet(1.001, 3),
        expected="worse",
        slow=True,
    ),
    Case(
        item="5 The ratchet",
        name="the run that is named was red",
        fault=_changed(_red),
        clean=_changed(_as_it_was),
        expected="cannot be a baseline: the run was FAIL",
        slow=True,
    ),
    Case(
        item="5 The ratchet",
        name="the run that is named holds a 0",
        fault=_changed(_zero),
        clean=_changed(_as_it_was),
        expected="contains a 0",
        slow=True,
    ),
    Case(
        item="5 The ratchet",
        name="a rate of few rounds at a third, against one stored run",
        fault=_against_one_run("tg32_c8@d0", "tok/s", [301.0, 300.0, 302.0], [101.0, 100.0, 102.0]),
        clean=_against_one_run("tg32_c8@d0", "tok/s", [301.0, 300.0, 302.0], [299.0, 296.0, 303.0]),
        expected="66.4% worse",
    ),
    Case(
        item="5 The ratchet",
        name="a start that takes three times as long, against one stored run",
        fault=_against_one_run("startup_s", "s", [100.0], [290.0]),
        clean=_against_one_run("startup_s", "s", [100.0], [130.0]),
        expected="190.0% worse",
    ),
    Case(
        item="5 The ratchet",
        name="a stored metric that failed",
        fault=_baseline(verdict="FAIL"),
        clean=_baseline(),
        expected="its tg32@d0 was FAIL",
    ),
    Case(
        item="5 The ratchet",
        name="a stored run that was INCONCLUSIVE",
        fault=_baseline(run="INCONCLUSIVE"),
        clean=_baseline(),
        expected="the run was INCONC",
    ),
    Case(
        item="5 The ratchet",
        name="a stored rate of 0",
        fault=_baseline(value=0.0),
        clean=_baseline(),
        expected="contains a 0",
    ),
    Case(
        item="5 The ratchet",
        name="a stored rate that is no number",
        fault=_baseline(value=float("nan")),
        clean=_baseline(),
        expected="a value that is not a number",
    ),
    Case(
        item="5 The ratchet",
        name="a metric of another definition",
        fault=_baseline(definition=1),
        clean=_baseline(),
        expected="definition of its metrics",
    ),
    Case(
        item="5 What changed since the stored runs",
        name="the driver",
        fault=_after({"machine": {"driver": "570.10"}}),
        clean=_after({"machine": {"driver": "570.10"}}, {}, share=0.99),
        expected="driver '570.10', now '580.95'",
    ),
    Case(
        item="5 What changed since the stored runs",
        name="what an update tells of its memory_gib",
        fault=_after({"machine": {"memory_gib": 119}}),
        clean=_after({"gpu_units": ["b2"]}),
        expected="memory_gib 119, now",
    ),
    Case(
        item="5 What changed since the stored runs",
        name="what an update tells of its cores_logical",
        fault=_after({"machine": {"cores_logical": 19}}),
        clean=_after({"gpu_units": ["b2"]}),
        expected="cores_logical 19, now",
    ),
    Case(
        item="5 What changed since the stored runs",
        name="what an update tells of its gpu",
        fault=_after({"machine": {"gpu": "GB10"}}),
        clean=_after({"gpu_units": ["b2"]}),
        expected="gpu 'GB10', now",
    ),
    Case(
        item="5 What changed since the stored runs",
        name="the CUDA graphs, which are lost",
        fault=_after({"path": {"cuda_graphs": True}}),
        clean=_after({"gpu_units": ["b2"], "path": {"cuda_graphs": True}}),
        expected="cuda_graphs True, now False",
    ),
    Case(
        item="5 What changed since the stored runs",
        name="the kernels of the experts",
        fault=_after({"path": {"moe": "CUTLASS"}}),
        clean=_after({"path_requests": ["--moe-backend x"], "path": {"moe": "CUTLASS"}}),
        expected="moe 'CUTLASS', now 'MARLIN'",
    ),
    Case(
        item="5 What changed since the stored runs",
        name="what the log no longer shows",
        fault=_after({"path": {"attention": "FLASHINFER"}}),
        clean=_after(),
        expected="attention 'FLASHINFER', now None",
    ),
    Case(
        item="5 What changed since the stored runs",
        name="the driver, and the latest run is of another plan",
        fault=_after({"machine": {"driver": "570.10"}}, {"plan": {"d": 1}}),
        clean=_after({"plan": {"d": 1}, "machine": {"driver": "570.10"}}),
        expected="store a run of a build that you trust",
    ),
]
