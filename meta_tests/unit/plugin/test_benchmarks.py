"""A measurement is a benchmark of pytest-benchmark, and a metric of verdict.json with a verdict."""

import json
from pathlib import Path

import pytest

SCENARIO = "meta_tests/whole/scenarios/measurements.py"
FAST = [53.0, 53.2, 52.9, 53.1, 53.05] * 4
METRIC = {"starts": 1, "verdict": "PASS", "grade": "minimum", "value": 53.05, "rounds": 20}
METRIC |= {"ci_low": 53.0, "ci_high": 53.1, "confidence": 0.95}


@pytest.fixture
def measured(run_pytest, fault_server, tmp_path):
    """Measure these samples in a run.

    Return the exit status, verdict.json, the run and the storage."""
    server = fault_server()
    storage = tmp_path / "storage"

    def start(samples: dict, *arguments: str, scenario: str = SCENARIO):
        return run_pytest(
            "--arch", "sm121", *server.options, "--served-model-name", "canary",
            f"--benchmark-storage={storage}", *arguments, scenario,
            environment={"SM121_META_SAMPLES": json.dumps(samples)},
        )  # fmt: skip

    def run(samples: dict, *arguments: str):
        status, run = start(samples, *arguments)
        return status, run.verdict, run

    run.storage = storage
    run.start = start
    return run


def stored(storage: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(storage.glob("*/*.json"))]


def test_a_rate_is_a_benchmark_whose_ops_are_tokens_per_second(measured):
    status, verdict, run = measured({"tg32@d0": FAST}, "--benchmark-autosave")
    assert status == 0, run.output
    assert verdict["metrics"]["tg32@d0"].items() >= METRIC.items()
    (file,) = stored(measured.storage)
    (benchmark,) = file["benchmarks"]
    assert benchmark["group"] == "tg32", "its depths stand in one table"
    assert benchmark["stats"]["median"] == 1 / 53.05
    assert benchmark["stats"]["ops"] == pytest.approx(53.05, rel=1e-3)
    info = benchmark["extra_info"]
    assert info["samples"] == FAST and info["verdict"] == "PASS" and info["clock"] == "token_ids"
    assert info["box"]["state"] == "UNKNOWN" and set(info["path"]) >= {"attention", "moe"}
    assert {"cpu_model", "gpu", "driver", "gpu_clocks"} <= set(file["machine_info"]["sm121"])
    assert "hz_actual" not in file["machine_info"]["cpu"]
    assert set(file["commit_info"]["git_shas"]) == {"vllm", "flashinfer", "suite"}


#: For each metric, the samples, the verdict, and a part of the reason.
VERDICTS = {
    "tg32@d0": (
        (
            47.9,
            48.1,
            48.0,
            48.05,
            47.95,
            47.9,
            48.1,
            48.0,
            48.05,
            47.95,
            47.9,
            48.1,
            48.0,
            48.05,
            47.95,
            47.9,
            48.1,
            48.0,
            48.05,
            47.95,
        ),
        "FAIL",
        "tg32@d0: expected at least 52 tok/s, got 48",
    ),
    "tg32@d4096": (
        (46.0, 48.0, 47.0, 46.5, 47.6),
        "INCONCLUSIVE",
        "the maximum of 5 rounds is reached",
    ),
    "tg32@d8192": ((53.0, 53.2), "INCONCLUSIVE", "2 rounds are too few for a verdict"),
    "tg32@d16384": (
        {
            "samples": [
                53.0,
                53.2,
                52.9,
                53.1,
                53.05,
                53.0,
                53.2,
                52.9,
                53.1,
                53.05,
                53.0,
                53.2,
                52.9,
                53.1,
                53.05,
                53.0,
                53.2,
                52.9,
                53.1,
                53.05,
            ],
            "invalid": [{"reason": "prefix_cache", "evidence": "2048 hits"}],
        },
        "INVALID",
        "prefix_cache: 2048 hits",
    ),
    "tg32@d32768": (
        {
            "samples": [
                53.0,
                53.2,
                52.9,
                53.1,
                53.05,
                53.0,
                53.2,
                52.9,
                53.1,
                53.05,
                53.0,
                53.2,
                52.9,
                53.1,
                53.05,
                53.0,
                53.2,
                52.9,
                53.1,
                53.05,
            ],
            "clock": "chunks",
        },
        "INCONCLUSIVE",
        "chunks were counted instead of tokens",
    ),
    "tg128@d0": ({"samples": []}, "INVALID", "nothing was measured"),
    "ttft_p99": (
        {
            "samples": [
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                440.0,
                float("inf"),
            ],
            "quantile": 0.99,
        },
        "INCONCLUSIVE",
        "1 of 20 requests over the bound",
    ),
}


def test_each_verdict_on_a_measurement(measured):
    samples = {name: samples for name, (samples, _, _) in VERDICTS.items()}
    status, file, run = measured(samples, "--benchmark-autosave")
    assert status == 1, run.output
    for test, (name, (_, verdict, why)) in zip(file["tests"], VERDICTS.items(), strict=True):
        metric = file["metrics"][name]
        assert metric["verdict"] == verdict and test["verdict"] == verdict, test
        assert why in test["message"] and metric["grade"] is None, test
    assert file["metrics"]["ttft_p99"]["value"] is None, "JSON has no infinity"
    names = set()
    for f in stored(measured.storage):
        for b in f["benchmarks"]:
            names.add(b["extra_info"]["metric"])
    valid = {name for name, (_, verdict, _) in VERDICTS.items() if verdict != "INVALID"}
    assert names == valid, "what is not valid is nobody's baseline"


@pytest.mark.slow("a run more")
def test_an_unsteady_machine_decides_what_has_a_gate_alone(measured):
    """On an unsteady machine, only metrics with a gate decide.

    Before, a rate without any comparison made the run fail."""
    drift, lie = (
        {
            "drift": {
                "reason": "drift",
                "evidence": "2107 tok/s in the first 2 rounds, 3660 after them",
            },
            "lie": {"reason": "token_accounting", "evidence": "64 tokens by ids, usage reports 32"},
        }[name]
        for name in ("drift", "lie")
    )
    verdicts = {
        "tg32@d0": ([drift], "INVALID"),  # the profile has only a gate for this metric
        "tg16@d0": ([drift], "NOT_RUN"),
        "tg64@d0": ([lie], "INVALID"),
        "tg128@d0": ([drift, lie], "INVALID"),
    }
    # Other work has disturbed the first rounds.
    samples = {"samples": [30.0, 31.0, 53.0, 53.1]}
    rates = {name: {**samples, "invalid": against} for name, (against, _) in verdicts.items()}
    status, file, run = measured(rates, "--benchmark-autosave")
    assert status == 1, run.output
    for name, (_, verdict) in verdicts.items():
        assert file["metrics"][name]["verdict"] == verdict, name
    status, file, run = measured({"tg16@d0": rates["tg16@d0"]}, "--benchmark-autosave")
    assert status == 0 and file["metrics"]["tg16@d0"]["verdict"] == "NOT_RUN", run.output
    benchmarks = [item["benchmarks"] for item in stored(measured.storage)]
    assert not any(benchmarks), "what is not comparable is no baseline"


def test_more_rounds_times_tails_and_what_exists_once(measured):
    later = [53.0, 53.1, 52.9, 53.2, 53.05, 52.95, 53.0, 53.1, 53.0, 52.9, 53.0, 53.1] * 2
    samples = {
        "tg32@d0": {"samples": [52.0, 53.4, 51.9, 53.0, 52.9], "later": later},
        "ttft_p99": {"samples": [440.0 + i for i in range(20)], "quantile": 0.99},
        "startup_s": [120.0],
        "itl_p99": {"samples": [19.0, 20.0], "quantile": 0.99},
    }
    status, file, run = measured(samples, "--benchmark-autosave")
    assert status == 0, run.output
    rate, tail, start, free = (file["metrics"][name] for name in samples)
    assert rate["verdict"] == "PASS" and 5 < rate["rounds"] < 29, "until it is decided, no more"
    assert tail["verdict"] == "PASS" and tail["value"] == 459.0
    assert tail["confidence"] == pytest.approx(1 - 0.99**20), "what 20 requests can show"
    assert start["verdict"] == "PASS" and start["at_most"] == 300 and start["ci_low"] is None
    assert free["verdict"] == "PASS" and free["grade"] is None, "no gate, so nothing demanded"
    (saved,) = stored(measured.storage)
    times = {b["extra_info"]["metric"]: b["stats"]["max"] for b in saved["benchmarks"]}
    assert times["ttft_p99"] == 0.459 and times["startup_s"] == 120.0


def test_compare_fail_sees_ten_percent_and_not_two(measured):
    before = {"tg32@d0": [60.0, 60.2, 59.8, 60.1, 59.9] * 4}
    status, _, run = measured(before, "--benchmark-autosave")
    assert status == 0, run.output
    compare = ("--benchmark-compare", "--benchmark-compare-fail=median:5%")
    slightly = {"tg32@d0": [v * 0.98 for v in before["tg32@d0"]]}
    status, verdict, run = measured(slightly, *compare)
    assert status == 0 and verdict["verdict"] == "PASS", run.output
    assert "(NOW)" in run.output and "0001" in run.output, "the table shows both"
    slower = {"tg32@d0": [v * 0.9 for v in before["tg32@d0"]]}
    status, verdict, run = measured(slower, *compare)
    assert status == 1, run.output
    assert "Traceback" not in run.output
    assert verdict["verdict"] == "FAIL", "verdict.json says what the exit status says"
    assert verdict["metrics"]["tg32@d0"]["verdict"] == "PASS", "the gate itself held"
    both = ("--benchmark-compare-fail", "median:5%", "min:5%", "-q")
    status, verdict, run = measured(slower, "--benchmark-compare", *both)
    assert status == 1, run.output
    messages = [test["message"] for test in verdict["tests"] if "compare-fail" in test["id"]]
    fields = {line.rpartition("(the ")[2] for line in messages}
    assert len(messages) == 2 and fields == {"median)", "min)"}, messages


def test_compare_fail_with_nothing_measured_is_refused(measured):
    compare = ("--benchmark-compare", "--benchmark-compare-fail=median:5%")
    status, _, run = measured({"tg32@d0": FAST}, "--benchmark-autosave")
    assert status == 0, run.output
    scenario = "meta_tests/whole/scenarios/verdicts.py::test_pass"
    status, run = measured.start({}, *compare, scenario=scenario)
    assert status == 4 and "expected a test that measures" in run.output, run.output
