"""Whole runs of the regression level with a stored history."""

import json

import pytest

SCENARIO = "meta_tests/whole/scenarios/measurements.py"
GOOD = {
    "tg32@d0": [90.0, 90.3, 89.7, 90.2, 89.8],
    "pp2048@d0": [9200.0, 9220.0, 9180.0, 9210, 9190],
}


def times(factor: float, samples: dict) -> dict:
    """Return the samples of each metric, multiplied by a factor."""
    changed = {}
    for name, values in samples.items():
        changed[name] = [value * factor for value in values]
    return changed


@pytest.fixture
def level(run_pytest, fault_server, tmp_path):
    server = fault_server()

    def go(samples: dict | None, *arguments: str):
        status, run = run_pytest(
            "--arch", "sm121", *server.options,
            "--served-model-name", "canary", f"--benchmark-storage={tmp_path / 'storage'}",
            *arguments, *([SCENARIO] if samples is not None else []), "tests/test_regression.py",
            environment={"SM121_META_SAMPLES": json.dumps(samples or {})},
        )  # fmt: skip
        tests = {t["id"].split("::")[-1]: t for t in run.verdict["tests"]}
        return status, tests, run

    return go


def test_the_level_on_a_stored_history(level, tmp_path):
    status, tests, run = level(GOOD, "--benchmark-autosave")
    assert status == 0, run.output

    status, tests, run = level(times(0.99, GOOD))
    assert status == 0 and tests["test_no_metric_is_worse"]["verdict"] == "PASS", run.output
    assert tests["test_no_metric_is_missing"]["verdict"] == "PASS"

    status, tests, run = level({"tg32@d0": [v * 0.9 for v in GOOD["tg32@d0"]]})
    assert status == 1, run.output
    worse = tests["test_no_metric_is_worse"]
    assert worse["verdict"] == "FAIL", worse
    assert "10.0% worse" in worse["message"] and "5% allowed" in worse["message"]
    missing = tests["test_no_metric_is_missing"]
    assert missing["verdict"] == "FAIL" and "pp2048@d0 was measured in 0001" in missing["message"]

    (file,) = (tmp_path / "storage").glob("*/0001*.json")
    for changed, arguments, verdict, why in (
        ({"driver": "1.0"}, (), "INCONCLUSIVE", "driver '1.0', now None (0001"),
        ({"gpu": "NVIDIA H200"}, ("--benchmark-compare=0001",),
         "INVALID", "cannot be a baseline: another machine (gpu 'NVIDIA H200'"),
    ):  # fmt: skip
        stored = json.loads(file.read_text())
        for benchmark in stored["benchmarks"]:
            benchmark["extra_info"]["machine"].update(changed)
        file.write_text(json.dumps(stored))
        status, tests, run = level(times(0.6, GOOD), *arguments)
        refused = tests["test_no_metric_is_worse"]
        assert status == 1 and refused["verdict"] == verdict, run.output
        assert why in refused["message"]


@pytest.mark.parametrize(
    ("compare", "named"),
    [
        pytest.param("--benchmark-compare", "the comparable stored runs", id="any run"),
        pytest.param("--benchmark-compare=0001", "run 0001", id="a named run"),
    ],
)
def test_runs_without_a_common_metric_are_not_compared(
    run_pytest, level, fault_server, tmp_path, compare, named
):
    """If the selection measured only metrics that the stored run lacks, the run does not pass."""
    status, _, run = level({"tg32@d0": GOOD["tg32@d0"]}, "--benchmark-autosave")
    assert status == 0, run.output
    if named == "run 0001":  # a later run has the metric; the named one lacks it
        status, _, run = level(GOOD, "--benchmark-autosave")
        assert status == 0, run.output
    status, run = run_pytest(
        "--arch", "sm121", *fault_server().options,
        "--served-model-name", "canary", f"--benchmark-storage={tmp_path / 'storage'}",
        SCENARIO, compare,
        environment={"SM121_META_SAMPLES": json.dumps({"pp2048@d0": GOOD["pp2048@d0"]})},
    )  # fmt: skip
    assert status == 1 and run.verdict["verdict"] == "INCONCLUSIVE", run.output
    assert f"expected a metric in {named}, got none of pp2048@d0" in run.verdict["reason"]


@pytest.mark.slow("five runs")
def test_the_run_that_is_named_does_not_hide_the_others(level):
    """If each run is 4.5 % slower than the one before it, the third run is INCONCLUSIVE.

    The third run does not FAIL, because two starts of one build differ by up to 8 %. The fourth
    run cannot use the third run as its baseline.
    """
    samples = GOOD
    statuses = []
    for number in range(4):
        compared = [f"--benchmark-compare=000{number}"] if number else []
        status, tests, run = level(samples, "--benchmark-autosave", *compared)
        statuses.append(status)
        samples = times(0.955, samples)
    assert statuses == [0, 0, 1, 1], run.output
    refused = tests["test_no_metric_is_worse"]
    assert refused["verdict"] == "INVALID", refused
    assert "cannot be a baseline: the run was INCONCLUSIVE" in refused["message"]
    status, tests, run = level(samples, "--benchmark-compare=0002")
    assert status == 1 and tests["test_no_metric_is_worse"]["verdict"] == "FAIL", run.output


def test_without_measurements_the_level_is_not_run(level):
    status, tests, run = level(None)
    assert status == 5, run.output
    assert "select the performance level" in tests["test_no_metric_is_worse"]["message"]
