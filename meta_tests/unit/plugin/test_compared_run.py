"""Benchmarks outside the levels in a run of the levels with ``--benchmark-compare``."""

import json
import re
from pathlib import Path

import pytest

SCENARIO = "meta_tests/whole/scenarios/measurements.py"
GOOD = {"tg32@d0": [90.0, 90.3, 89.7, 90.2, 89.8]}
COMPARE = "--benchmark-compare"
LIMIT = "--benchmark-compare-fail=median:90%"
NOT_COMPARED = r"not compared, because in no run that passed: \S*::test_own\n"
#: A test of a level that measures nothing.
PASSES = "meta_tests/whole/scenarios/verdicts.py::test_pass"


@pytest.fixture
def run_own(run_pytest, fault_server, tmp_path):
    """Run tests of levels beside a benchmark that takes some seconds, with the storage beside
    it."""
    server = fault_server()
    own = tmp_path / "test_own_speed.py"

    def run(seconds: float, *arguments: str, name: str = "test_own"):
        own.write_text(
            f"import time\ndef {name}(benchmark):\n"
            f"    benchmark.pedantic(time.sleep, ({seconds},), rounds=3)\n"
        )
        return run_pytest(
            "--arch", "sm121", *server.options, "--served-model-name", "canary",
            f"--benchmark-storage={tmp_path / 'storage'}", *arguments, str(own),
            environment={"SM121_META_SAMPLES": json.dumps(GOOD)},
        )  # fmt: skip

    return run


def stored(tmp_path: Path) -> int:
    return len([*tmp_path.glob("storage/*/*.json")])


def test_a_slower_benchmark_is_red_in_a_shard_that_measures_no_level(run_own):
    """A slower benchmark outside of the levels is red in a shard that measures no level.
    pytest-benchmark finds it, and the suite adopts this result."""
    status, ran = run_own(0.02, PASSES, "--benchmark-autosave")
    assert status == 0, ran.output
    status, ran = run_own(0.02, PASSES, f"{COMPARE}=0001", LIMIT, "--shard=1/1")
    assert status == 0 and ran.verdict["verdict"] == "PASS", ran.output
    status, ran = run_own(0.2, PASSES, f"{COMPARE}=0001", LIMIT, "--shard=1/1")
    assert status == 1 and ran.verdict["verdict"] == "FAIL", ran.output
    assert "test_own" in ran.verdict["reason"]


def test_a_shard_that_measures_no_level_does_not_compare_with_a_failed_run(run_own, tmp_path):
    """A slower benchmark outside of the levels fails again in the same command, although the latest
    file is that of the failed run. No run measures a level, so no file has an entry of a level."""
    shard = (PASSES, COMPARE, LIMIT, "--shard=1/1")
    status, ran = run_own(0.02, PASSES, "--benchmark-autosave")
    assert status == 0, ran.output
    for number in (2, 3):
        status, ran = run_own(0.2, *shard, "--benchmark-autosave")
        assert status == 1 and "test_own" in ran.verdict["reason"], ran.output
        assert stored(tmp_path) == number
    status, ran = run_own(0.02, *shard)
    assert status == 0 and ran.verdict["verdict"] == "PASS", ran.output


def test_a_slower_benchmark_is_not_compared_with_a_failed_run(run_own, tmp_path):
    """A slower benchmark outside of the levels is stored with the failed run. The same command
    again is compared with the run before, so it fails again."""
    status, ran = run_own(0.02, SCENARIO, "--benchmark-autosave")
    assert status == 0, ran.output
    for number in (2, 3):
        status, ran = run_own(0.2, SCENARIO, "--benchmark-autosave", COMPARE, LIMIT)
        assert status == 1 and "test_own" in ran.verdict["reason"], ran.output
        assert stored(tmp_path) == number
    assert re.search(r"compared with 0001: \S*::test_own\n", ran.output), ran.output
    assert "Comparing against benchmarks from: " not in ran.output
    status, ran = run_own(0.02, SCENARIO, f"{COMPARE}=0003")
    assert re.search(r"^Comparing against benchmarks from: .*/0003_", ran.output, re.M), ran.output
    status, ran = run_own(0.02, SCENARIO, COMPARE, LIMIT)
    assert status == 0 and ran.verdict["verdict"] == "PASS", ran.output


@pytest.mark.parametrize("is_old", [False, True], ids=["today", "file-of-an-earlier-version"])
def test_a_benchmark_that_only_a_failed_run_has_is_named(run_own, tmp_path, is_old):
    fails = "meta_tests/whole/scenarios/verdicts.py::test_fail"
    status, ran = run_own(0.02, SCENARIO, "--benchmark-autosave", name="test_before")
    assert status == 0, ran.output
    status, ran = run_own(0.02, SCENARIO, fails, "--benchmark-autosave")
    assert status == 1, ran.output
    if is_old:
        (file,) = tmp_path.glob("storage/*/0002*.json")
        content = json.loads(file.read_text())
        assert content.pop("sm121") == {"run": "FAIL"}
        file.write_text(json.dumps(content))
    _, ran = run_own(0.2, SCENARIO, COMPARE, LIMIT)
    assert re.search(NOT_COMPARED, ran.output), ran.output
    assert "compared with 0001, a baseline" in ran.output


def test_a_benchmark_that_no_run_has_is_named(run_own):
    status, ran = run_own(0.02, SCENARIO, "--benchmark-autosave", name="test_before")
    assert status == 0, ran.output
    status, ran = run_own(0.2, SCENARIO, COMPARE, LIMIT)
    assert status == 0 and ran.verdict["verdict"] == "PASS", ran.output
    assert re.search(NOT_COMPARED, ran.output), ran.output


@pytest.mark.parametrize("named", ["", "=0001"], ids=["the-latest", "by-number"])
def test_a_stored_run_of_another_plan_is_refused_before_a_start(run_own, tmp_path, named):
    """The measurements of the level would have no baseline after all requests. A run that measures
    no level compares its own benchmarks with a run of any plan."""
    status, ran = run_own(0.02, SCENARIO, "--benchmark-autosave")
    assert status == 0, ran.output
    (file,) = tmp_path.glob("storage/*/0001*.json")
    content = json.loads(file.read_text())
    for entry in content["benchmarks"]:
        if "sm121" in entry["extra_info"]:
            entry["extra_info"]["plan"]["plan"] = "quick"
    file.write_text(json.dumps(content))
    status, ran = run_own(0.02, SCENARIO, f"{COMPARE}{named}", LIMIT)
    assert status == 4, ran.output
    (line,) = [line for line in ran.output.splitlines() if line.startswith("ERROR: ")]
    assert "expected a stored run of plan full, got plan quick (0001). Add --plan quick" in line
    _, ran = run_own(0.02, PASSES, f"{COMPARE}{named}", LIMIT, "--shard=1/1")
    assert ran.verdict["verdict"] == "PASS", ran.output
