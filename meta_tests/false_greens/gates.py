"""Rates that a gate must not pass: throttling, noise with a memory, rounds left out."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import past_runs

from false_greens import Case, Outcome, Place
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

Step = Callable[[Place], Outcome]


# 3: what is decided of a series of rounds, and of a server.


def _series(rates: Sequence[float]) -> Step:
    """The decision on rounds that agree with their level to 0.05 %; no more are allowed."""
    values = [rate * (1.0 + 0.0005 * (-1) ** at) for at, rate in enumerate(rates)]

    def decide(_place: Place) -> Outcome:
        found = gate.decide(values, gate_errors.RATE, maximum_rounds=len(values))
        assert found is not None
        return Outcome(found.verdict.value, found.reason)

    return decide


def _served(*server: str) -> Step:
    """The decode rates of a server and what comes after them."""

    def judge(place: Place) -> Outcome:
        status, run = place.run_pytest(
            *(_LEVEL, "--arch", "sm121", "--configuration", "mxfp4", "--depths", "0"),
            *("-k", "decode_rate or concurrent_rate"),
            *("--base-url", place.timed_server(*server).base_url), timeout_s=600.0,
        )  # fmt: skip
        said = [test["message"] for test in run.verdict["tests"] if test["verdict"] != "PASS"]
        return Outcome(run.verdict["metrics"]["tg32@d0"]["verdict"], " ".join(said), status)

    return judge


_STEADY = [53.0] * 24
_THROTTLING = "3 Throttling"
_CASES_3 = (
    ("faster at first, then below the gate for good", [54.0] * 12 + [51.6] * 12, "the threshold"),
    ("below the gate in the last look only", [54.0] * 21 + [51.6] * 3, "last round is on the"),
    ("below the gate in the very last round", [54.0] * 23 + [51.6], "last round is on the other"),
    ("a slow drift that ends below", [54.6 - 0.12 * at for at in range(24)], "independent ones"),
    ("a boost at both ends", [54.0] * 8 + [51.2] * 10 + [54.0] * 6, "threshold"),
    ("one round in five at half speed", [54.0, 54.0, 54.0, 54.0, 27.0] * 4, "over the time"),
    ("too few rounds to know whether they have a memory", [53.0] * 5, "may have a memory"),
)


# 4: how often a gate errs.


def _errs(draw: Callable[[Any], Any]) -> Step:
    """PASS where a gate passes it in more than two of a hundred runs, by three errors."""

    def simulate(_place: Place) -> Outcome:
        found = gate_errors.simulate(draw, _RUNS, 14)
        often = found[Verdict.PASS] > _RUNS * gate_errors.ALLOWED + 4
        counts = ", ".join(f"{found[v]} {v.value}" for v in Verdict if found[v])
        return Outcome("PASS" if often else "not passed", f"of {_RUNS} runs: {counts}")

    return simulate


def _below(noise: gate_errors.Noise) -> Step:
    level = gate_errors.THRESHOLD * (1.0 - gate_errors.DISTANCE)
    return _errs(lambda generator: level * (1.0 + noise(generator, gate_errors.BOUND)))


def _slow(slow: gate_errors.Slow) -> Step:
    return _errs(lambda generator: slow.draw(generator, gate_errors.BOUND))


_CLEAN_4 = _errs(
    lambda generator: 53.0 * (1.0 + gate_errors.independent(0.005)(generator, gate_errors.BOUND))
)
_CASES_4 = (
    ("AR(1), φ 0.95, 1 %", _below(gate_errors.autoregressive(0.95, 0.01))),
    ("AR(1), φ 0.9, 2 %", _below(gate_errors.autoregressive(0.9, 0.02))),
    ("two states 4 % apart, ten rounds each", _below(gate_errors.two_states(10, 0.001))),
    (
        "two states 4 % apart, ten rounds each on average",
        _below(gate_errors.two_states(10, 0.003, fixed=False)),
    ),
    ("one answer in five at half speed", _slow(gate_errors.SLOW[0])),
    ("one answer in five at half speed, 60 tok/s", _slow(gate_errors.SLOW[1])),
    ("one answer in four at two thirds", _slow(gate_errors.SLOW[2])),
)


# 5: what is a baseline.

_LIMITS = profile.load("sm121-gpt-oss-120b").regression
_GOOD = {"tg32@d0": [90.0, 90.3, 89.7, 90.2, 89.8], "pp2048@d0": [9200.0, 9220, 9180, 9210, 9190]}


def _runs(place: Place, factors: Sequence[float], change: Callable[[Any], None] | None) -> Outcome:
    """Runs after each other, each stored and compared with the latest; the outcome of the last."""
    storage = Path(tempfile.mkdtemp(dir=place.tmp_path))
    server = place.fault_server()
    status, said = 0, ""
    for number, factor in enumerate(factors):
        samples = {name: [v * factor for v in values] for name, values in _GOOD.items()}
        status, run = place.run_pytest(
            *("--arch", "sm121", *server.options),
            *("--served-model-name", "canary", f"--benchmark-storage={storage}"),
            *("--benchmark-autosave", _SCENARIO, "tests/test_regression.py"),
            *([f"--benchmark-compare=000{number}"] if number else []),
            environment={"SM121_META_SAMPLES": json.dumps(samples)},
        )
        said = " ".join(t["message"] for t in run.verdict["tests"] if t["verdict"] != "PASS")
        if status and number < len(factors) - 1 and change is None:
            break
        if change is not None:
            for file in storage.glob("*/*.json"):
                stored = json.loads(file.read_text("utf-8"))
                change(stored)
                file.write_text(json.dumps(stored), "utf-8")
    return Outcome("PASS" if status == 0 else "FAIL", said, status)


def _changed(change: Callable[[Any], None]) -> Step:
    """A run like the one before it, which is named and was changed after it was stored."""
    return lambda place: _runs(place, [1.0, 1.0], change)


def _ratchet(step: float, runs: int) -> Step:
    return lambda place: _runs(place, [step**number for number in range(runs)], None)


def _zero(stored: Any) -> None:
    for benchmark in stored["benchmarks"]:
        benchmark["extra_info"]["samples"][0] = 0.0


def _red(stored: Any) -> None:
    for benchmark in stored["benchmarks"]:
        benchmark["extra_info"]["run"] = "FAIL"


def _baseline(**changes: Any) -> Step:
    """Whether a stored run is a baseline for one of its own context."""
    context: dict[str, Any] = dict.fromkeys(("profile", "model", "path", "definition"))
    entry = {
        "sm121": 1, "metric": "tg32@d0", "unit": "tok/s", "higher_is_better": True,
        "quantile": None, "samples": [60.0, 60.1], "value": 60.0, "verdict": "PASS", "run": "PASS",
    }  # fmt: skip

    def judge(_place: Place) -> Outcome:
        run = stored_run.of_benchmarks("0001", "", [{**entry, **changes}])
        why = ["nothing in it"] if run is None else run.unlike(context)
        return Outcome("no baseline" if why else "PASS", "; ".join(why))

    return judge


def _rate(name: str, unit: str, values: Sequence[float]) -> stored_run.StoredMetric:
    return stored_run.StoredMetric(name, unit, unit == "tok/s", None, (*values,), values[0])


def _judged(change: Change) -> Outcome:
    return Outcome("PASS" if change.holds else change.verdict.value, change.text)


def _against_one_run(name: str, unit: str, before: list[float], now: list[float]) -> Step:
    """A metric of few samples against the only stored run."""

    def judge(_place: Place) -> Outcome:
        run = past_runs.stored_run("0001", _rate(name, unit, before))
        return _judged(*trend.compare({name: _rate(name, unit, now)}, [run], _LIMITS))

    return judge


_MACHINE = {"gpu": "NVIDIA GB10", "driver": "580.95", "gpu_clocks": "default"}
_PATH = {"attention": None, "moe": "MARLIN", "cuda_graphs": False, "native_fp4": None}
_NOW: dict[str, Any] = {
    "machine": _MACHINE, "gpu_units": ["a1"], "path": _PATH, "path_requests": [], "plan": {"d": 0},
}  # fmt: skip
_OLD_DRIVER = {"machine": _MACHINE | {"driver": "570.10"}}


def _after(*contexts: dict[str, Any], share: float = 0.6) -> Step:
    """A run at so much of the rate of stored ones, of contexts that differ from its own in this."""

    def judge(place: Place) -> Outcome:
        rates = [100.0 + 0.1 * at for at in range(8)]
        before, now = (_rate("tg32@d0", "tok/s", [v * by for v in rates]) for by in (1, share))
        stored = [past_runs.stored_run("0001_x.json", before, **_NOW | each) for each in contexts]
        if matches := [run for run in stored if not run.unlike(_NOW)]:
            return _judged(*trend.compare({now.name: now}, matches, _LIMITS))
        error = measured.none_matches(stored, _NOW, place.tmp_path)
        green = error.verdict is Verdict.NOT_RUN  # alone it is no failure
        return Outcome("PASS" if green else error.verdict.value, str(error))

    return judge


_RATCHET = (
    ("-4.5 % a run, each compared with the latest",
     _ratchet(0.955, 5), _ratchet(0.999, 3), "% worse"),
    ("-2.4 % a run, each compared with the latest",
     _ratchet(0.976, 9), _ratchet(1.001, 3), "worse"),
    ("the run that is named was red",
     _changed(_red), _changed(lambda _stored: None), "is no baseline: the run was FAIL"),
    ("the run that is named holds a 0",
     _changed(_zero), _changed(lambda _stored: None), "holds a 0"),
)  # fmt: skip
_GRAPHS, _CUTLASS = {"path": _PATH | {"cuda_graphs": True}}, {"path": _PATH | {"moe": "CUTLASS"}}
_CASES_5 = (
    ("the driver", _after(_OLD_DRIVER), _after(_OLD_DRIVER, {}, share=0.99),
     "driver '570.10', now '580.95'"),
    *(
        (f"what an update tells of its {name}", _after({"machine": _MACHINE | {name: value}}),
         _after({"gpu_units": ["b2"]}), f"{name} {value!r}, now")
        for name, value in (("memory_gib", 119), ("cores_logical", 19), ("gpu", "GB10"))
    ),
    ("the CUDA graphs, which are lost", _after(_GRAPHS), _after({"gpu_units": ["b2"], **_GRAPHS}),
     "cuda_graphs True, now False"),
    ("the kernels of the experts",
     _after(_CUTLASS), _after({"path_requests": ["--moe-backend x"], **_CUTLASS}),
     "moe 'CUTLASS', now 'MARLIN'"),
    ("what the log no longer shows", _after({"path": _PATH | {"attention": "FLASHINFER"}}),
     _after(), "attention 'FLASHINFER', now None"),
    ("the driver, and the latest run is of another plan", _after(_OLD_DRIVER, {"plan": {}}),
     _after({"plan": {}, **_OLD_DRIVER}), "store a run of a build that you trust"),
)  # fmt: skip
_COUNT, _START = ("tg32_c8@d0", "tok/s", [301.0, 300.0, 302.0]), ("startup_s", "s", [100.0])
_AGAINST_ONE = (
    ("a rate of few rounds at a third, against one stored run",
     _against_one_run(*_COUNT, [101.0, 100.0, 102.0]),
     _against_one_run(*_COUNT, [299.0, 296.0, 303.0]), "66.4% worse"),
    ("a start that takes three times as long, against one stored run",
     _against_one_run(*_START, [290.0]), _against_one_run(*_START, [130.0]), "190.0% worse"),
)  # fmt: skip


# 6: rounds that are left out.


def _left_out(lateness: gate_errors.Lateness, slow_share: float, distance: float) -> Step:
    def simulate(_place: Place) -> Outcome:
        level = gate_errors.THRESHOLD * (1.0 + distance)
        found = gate_errors.left_out(lateness, level, slow_share, _RUNS, count_them=True)
        counts = ", ".join(f"{found[v]} {v.value}" for v in Verdict if found[v])
        passed = found[Verdict.PASS] > _RUNS * gate_errors.ALLOWED + 4
        return Outcome("PASS" if passed else "not passed", f"of {_RUNS} runs: {counts}")

    return simulate


def _many(count: int) -> Step:
    """Steady rounds, beside so many that were left out and may have been as usual."""

    def decide(_place: Place) -> Outcome:
        found = gate.decide(
            _STEADY, gate_errors.RATE, maximum_rounds=len(_STEADY), left_out=[(51.0, 55.0)] * count
        )
        assert found is not None
        return Outcome(found.verdict.value, found.reason)

    return decide


_ANY, _LONGER, _ONLY_SLOW, _ = gate_errors.LATENESS

CASES = [
    *(
        Case(_THROTTLING, name, _series(rates), _series(_STEADY), expected)
        for name, rates, expected in _CASES_3
    ),
    Case(_THROTTLING, "a server of 54 tok/s for 18 s, then of 51.6",
         _served("--rate", "54", "--drift-after-s", "18", "--drift-factor", "0.9556"),
         _served("--rate", "54"), "tg32@d0", slow=True),
    *(
        Case("4 Noise with a memory", name, fault, _CLEAN_4, f"of {_RUNS} runs")
        for name, fault in _CASES_4
    ),
    Case("4 Noise with a memory",
         "one answer in ten takes three times as long, and a short one never does",
         _served("--rate", "54", "--slow-every", "10"), _served("--rate", "54"), "over the time",
         slow=True),
    *(Case("5 The ratchet", *row, slow=True) for row in _RATCHET),
    *(Case("5 The ratchet", *row) for row in _AGAINST_ONE),
    *(
        Case("5 The ratchet", name, _baseline(**changes), _baseline(), expected)
        for name, changes, expected in (
            ("a stored metric that failed", {"verdict": "FAIL"}, "its tg32@d0 was FAIL"),
            ("a stored run that was INCONCLUSIVE", {"run": "INCONCLUSIVE"}, "the run was INCONC"),
            ("a stored rate of 0", {"value": 0.0}, "holds a 0"),
            ("a stored rate that is no number", {"value": float("nan")}, "what is no number"),
            ("a metric of another definition", {"definition": 1}, "definition of its metrics"),
        )
    ),
    *(Case("5 What changed since the stored runs", *row) for row in _CASES_5),
    *(
        Case(
            "6 Rounds that are left out", name, _left_out(lateness, share, -gate_errors.DISTANCE),
            _left_out(clean, 0.0, 0.025), f"of {_RUNS} runs",
        )
        for name, lateness, share, clean in (
            ("slow answers only", _ONLY_SLOW, 0.3, _ONLY_SLOW),
            ("the longer an answer, the more often", _LONGER, 0.3, _LONGER),
            ("any answer, and 30 % of them slow", _ANY, 0.3, _ANY),
        )
    ),
    Case("6 Rounds that are left out", "more than a third of all", _many(14), _many(8), "was late"),
]  # fmt: skip
