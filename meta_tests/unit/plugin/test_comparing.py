"""``--benchmark-compare`` and other options of pytest-benchmark in runs of the levels.

A build that is 10 % slower never passes, incomparable requests are refused before anything starts,
and screen, exit status and verdict.json agree."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from meta_tests.releases import needs
from sm121.core.errors import UsageError
from sm121.plugin import comparing, reporting, spine, stash

OPENS_EARLY = needs(
    "pytest-benchmark", "5.2", "it opens the file of --benchmark-json before the tests"
)

SCENARIO = "meta_tests/whole/scenarios/measurements.py"
LEVEL = "tests/test_regression.py"
GOOD = {"tg32@d0": [90.0, 90.3, 89.7, 90.2, 89.8]}
SLOWER = {"tg32@d0": [81.0, 81.3, 80.7, 81.2, 80.8]}
SLIGHTLY_SLOWER = {"tg32@d0": [value * 0.97 for value in GOOD["tg32@d0"]]}
COMPARE = "--benchmark-compare"
FAIL = "--benchmark-compare-fail=median:5%"
NARROW = "--benchmark-compare-fail=median:2%"
VIOLATED = "FAIL: tg32@d0: expected at most 2 % slower than 0001, got 3.093 % (the median)"


@pytest.fixture
def judged(run_pytest, fault_server, tmp_path):
    """Run a measurement of these samples, with the storage beside it.

    Return its exit status and the run."""
    server = fault_server()
    storage = tmp_path / "storage"

    def run(samples: dict, *arguments: str):
        return run_pytest(
            "--arch", "sm121", *server.options, "--served-model-name", "canary",
            f"--benchmark-storage={storage}", *arguments,
            environment={"SM121_META_SAMPLES": json.dumps(samples)},
        )  # fmt: skip

    run.storage = storage
    return run


@pytest.fixture(scope="module")
def history(tmp_path_factory) -> Path:
    """The storage of the run with which all tests of this module compare; empty before that run."""
    return tmp_path_factory.mktemp("history")


@pytest.fixture
def stored(judged, history):
    """A storage that contains one stored run."""
    if not any(history.iterdir()):
        status, run = judged(GOOD, SCENARIO, "--benchmark-autosave")
        assert status == 0, run.output
        shutil.copytree(judged.storage, history, dirs_exist_ok=True)
    shutil.copytree(history, judged.storage, dirs_exist_ok=True)
    return judged


def refused(status: int, run) -> str:
    """Return the line with which a run was refused; nothing was started, and nothing was judged."""
    assert status == 4, run.output
    assert not (run.report / "verdict.json").exists(), run.output
    for word in ("Traceback", "INTERNALERROR", "Comparing against benchmarks"):
        assert word not in run.output
    (line,) = [line for line in run.output.splitlines() if line.startswith("ERROR: ")]
    return line


def edit(storage: Path, change) -> None:
    (file,) = storage.glob("*/0001*.json")
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


# Refused requests


def test_levels_without_pytest_benchmark_are_refused():
    """Without pytest-benchmark, runs of the levels are refused. pytest itself does not need its
    hooks, so other projects can leave the plugin out."""
    config = SimpleNamespace(option=SimpleNamespace())
    with pytest.raises(UsageError, match=r"expected this plugin.*Leave out -p no:benchmark"):
        comparing.refuse(config, [SimpleNamespace(stash={stash.LEVEL: "smoke"})])
    hooks = [name for name in vars(spine) if name.startswith("pytest_benchmark_")]
    assert len(hooks) == 4
    for name in hooks:
        assert getattr(spine, name).pytest_impl["optionalhook"], name


def test_a_junit_file_that_cannot_be_written_is_refused(tmp_path):
    """A junit file that cannot be written is refused.

    Its folder is created before, as pytest does at the end."""
    named = tmp_path / "new" / "junit.xml"
    reporting.refuse_place_of_junit(SimpleNamespace(getoption=lambda *_: f"{named}"))
    assert list(named.parent.iterdir()) == []
    with pytest.raises(UsageError, match="--junitxml /proc/x/y: expected a file that can be"):
        reporting.refuse_place_of_junit(SimpleNamespace(getoption=lambda *_: "/proc/x/y"))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((COMPARE,), id="the-latest"),
        pytest.param(
            (COMPARE, FAIL), id="the-latest-with-a-limit", marks=pytest.mark.slow("the same line")
        ),
        pytest.param((COMPARE, "--benchmark-autosave"), id="the-latest-and-stored"),
    ],
)
def test_the_first_run_of_a_ci_names_the_command_to_store(judged, options):
    line = refused(*judged(GOOD, SCENARIO, LEVEL, *options))
    assert "--benchmark-compare: expected a stored run in " in line
    assert line.endswith("Store one of a build that you trust first: pytest --benchmark-autosave")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        pytest.param(
            (COMPARE, "tests/test_regression.py", SCENARIO),
            "expected the number of a stored run or its file, got neither",
            id="a-path-taken-for-a-number",
        ),
        pytest.param(
            (COMPARE, LEVEL, SCENARIO, "-n", "2"),
            "--benchmark-compare 'tests/test_regression.py': expected the number of a stored run",
            id="a-path-taken-for-a-number-beside-another-mistake",
        ),
        pytest.param(
            (COMPARE, "tests", LEVEL),
            "--benchmark-compare 'tests': expected the number of a stored run",
            id="a-folder-taken-for-a-number",
        ),
        pytest.param(
            (COMPARE, "meta_tests/whole/scenarios/measurements.py::test_metric", SCENARIO),
            "expected the number of a stored run or its file, got neither",
            id="a-test-taken-for-a-number",
        ),
        pytest.param((SCENARIO, f"{COMPARE}=0099"), "the latest are 0001_", id="no-such-run"),
        pytest.param(
            (SCENARIO, f"{COMPARE}=1"),
            "Write --benchmark-compare=0001",
            id="a-number-without-its-zeros",
        ),
        pytest.param(
            (SCENARIO, f"{COMPARE}="), "expected the number of a stored run", id="an-empty-number"
        ),
        pytest.param((SCENARIO, FAIL), f"expected {COMPARE} with it", id="only-a-limit"),
        pytest.param(
            (SCENARIO, COMPARE, "--benchmark-disable"),
            "Leave out --benchmark-disable",
            id="nothing-timed",
        ),
        pytest.param(
            (SCENARIO, "--benchmark-autosave", "--benchmark-disable"),
            "Leave out --benchmark-disable",
            id="nothing-timed-to-store",
        ),
        pytest.param(
            (SCENARIO, COMPARE, "--benchmark-skip"),
            "Leave out --benchmark-skip",
            id="nothing-measured",
        ),
        pytest.param(
            ("meta_tests/whole/scenarios/verdicts.py::test_pass", COMPARE),
            "expected a test that measures, none is selected",
            id="no-test-that-measures",
        ),
        pytest.param(
            ("meta_tests/whole/scenarios/verdicts.py::test_pass", COMPARE, "--shard=1/1"),
            "expected a test that measures, none is selected",
            id="no-shard-has-a-test-that-measures",
        ),
        pytest.param(
            (SCENARIO, "--benchmark-json=/no/such/folder/x.json"),
            "expected a file in a folder that exists",
            id="no-folder-for-the-json",
            marks=OPENS_EARLY,
        ),
        pytest.param(
            (SCENARIO, COMPARE, "--benchmark-group-by=param:x"),
            "--benchmark-group-by param:x: expected one of",
            id="a-parameter-that-no-test-has",
        ),
        pytest.param(
            (SCENARIO, "--benchmark-storage=README.md"),
            "expected a folder, got a file",
            id="storage-is-a-file",
        ),
        pytest.param(
            (SCENARIO, "--benchmark-storage="),
            "--benchmark-storage '': expected a folder, got an empty value",
            id="storage-is-empty",
        ),
        pytest.param(
            (SCENARIO, "--benchmark-storage=s3://bucket"),
            "s3://bucket: expected a folder",
            id="storage-is-no-file-system",
        ),
    ],
)
def test_a_stored_run_that_cannot_be_compared_is_refused_in_one_line(stored, options, why):
    assert why in refused(*stored(SLOWER, *options))


def test_a_limit_that_is_no_expression_is_refused(stored):
    status, run = stored(SLOWER, SCENARIO, COMPARE, "--benchmark-compare-fail=five")
    assert status == 4 and "Could not parse value: 'five'" in run.output, run.output


# Judged comparisons


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((SCENARIO, COMPARE), id="without-the-level"),
        pytest.param(
            (SCENARIO, LEVEL, COMPARE),
            id="with-the-level",
            marks=pytest.mark.slow("the option asks for the level"),
        ),
        pytest.param(
            (SCENARIO, LEVEL, COMPARE, "--benchmark-only"),
            id="benchmarks-only",
            marks=pytest.mark.slow("a selection of the same benchmarks"),
        ),
        pytest.param(
            (SCENARIO, LEVEL, f"{COMPARE}=0001"),
            id="by-number",
            marks=pytest.mark.slow("the latest is that number"),
        ),
        pytest.param(
            (SCENARIO, COMPARE, FAIL),
            id="with-a-limit",
            marks=pytest.mark.slow("a run that regressed is no baseline has a limit too"),
        ),
        pytest.param(
            (SCENARIO, COMPARE, "--benchmark-compare-fail=median:50%"),
            id="with-a-wide-limit",
            marks=pytest.mark.slow("a limit that is kept decides nothing"),
        ),
    ],
)
def test_ten_percent_slower_is_red_and_the_same_again_is_green(stored, options):
    status, run = stored(GOOD, *options)
    assert status == 0 and run.verdict["verdict"] == "PASS", run.output
    status, run = stored(SLOWER, *options)
    assert status == 1 and run.verdict["verdict"] == "FAIL", run.output
    assert "Traceback" not in run.output
    lines = run.output.strip().splitlines()
    assert any(line.startswith("FAIL") and "tg32@d0" in line for line in lines[-6:]), run.output
    assert "(NOW)" in run.output, "pytest-benchmark's table is shown"
    assert any("10.0% worse" in test["message"] for test in run.verdict["tests"])


MISSING, WORSE = f"{LEVEL}::test_no_metric_is_missing", f"{LEVEL}::test_no_metric_is_worse"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((SCENARIO, COMPARE, "--shard=1/1"), id="a-shard-without-the-level"),
        pytest.param(
            (SCENARIO, LEVEL, COMPARE, "--shard=1/1", "-m", "not regression"),
            id="a-shard-of-deselected-checks",
        ),
        pytest.param((SCENARIO, MISSING, COMPARE), id="another-check-of-the-level-by-its-id"),
        pytest.param(
            (SCENARIO, LEVEL, COMPARE, "-k", "metric and not worse or regression and missing"),
            id="another-check-of-the-level-by-its-name",
        ),
        pytest.param((SCENARIO, LEVEL, COMPARE, "--deselect", WORSE), id="the-check-deselected"),
    ],
)
def test_ten_percent_slower_is_red_whatever_the_selection_leaves_of_the_level(stored, options):
    """A build that is 10 % slower is red, whatever part of the level is selected.

    The suite itself makes each check of the comparison that no selected test makes."""
    status, run = stored(SLOWER, *options)
    assert status == 1 and run.verdict["verdict"] == "FAIL", run.output
    assert any("10.0% worse" in test["message"] for test in run.verdict["tests"])
    status, run = stored(GOOD, *options)
    assert status == 0 and run.verdict["verdict"] == "PASS", run.output


def test_a_shard_without_a_test_that_measures_leaves_the_comparison_to_the_others(stored, tmp_path):
    """A shard without a test that measures leaves the comparison to the other shards.

    The shard with the tests that measure is red. Both have a benchmark that is not stored. If no
    shard measures a level, the limit for this benchmark is red."""
    own = tmp_path / "test_own.py"
    own.write_text(
        "import pytest\npytestmark = [pytest.mark.kernel, pytest.mark.applies_to('gpu')]\n"
        "def test_own(): pass\n"
    )
    new = tmp_path / "test_new.py"
    new.write_text("def test_new(benchmark): benchmark(int)\n")
    whole = (SCENARIO, str(own), str(new), COMPARE, FAIL)
    status, run = stored(SLOWER, *whole, "--shard=1/2")
    assert status == 1 and run.verdict["shard"]["compared"], run.output
    status, run = stored(SLOWER, *whole, "--shard=2/2")
    assert status == 0, run.output
    assert [test["level"] for test in run.verdict["tests"]] == ["kernel"]
    level = "meta_tests/whole/scenarios/verdicts.py::test_pass"
    status, run = stored(GOOD, level, str(new), COMPARE, FAIL, "--shard=1/1")
    assert status == 1 and "none of the 1 benchmarks" in run.verdict["reason"], run.output


def test_a_run_is_not_resumed_with_another_comparison(stored, tmp_path):
    report = tmp_path / "killed"
    place = f"--report-dir={report}"
    status, run = stored(GOOD, SCENARIO, f"{COMPARE}=0001", FAIL, place)
    assert status == 0, run.output
    (report / "verdict.json").unlink()
    stream = report / "run.jsonl"
    lines = stream.read_text("utf-8").splitlines(keepends=True)
    assert '"closed"' in lines[-1]
    stream.write_text("".join(lines[:-1]), "utf-8")
    status, run = stored(GOOD, SCENARIO, COMPARE, place, "--resume")
    assert status == 4, run.output
    given = "--benchmark-compare-fail=median:5% --benchmark-compare=0001"
    assert f"differ: {given}, now --benchmark-compare)" in run.output
    status, run = stored(GOOD, SCENARIO, f"{COMPARE}=0001", FAIL, place, "--resume")
    assert status == 0, run.output


def test_nothing_comparable_in_the_history_is_no_success(stored):
    """If the history contains nothing comparable, the run does not pass.

    The stored run is from another GPU, and a comparison was requested."""

    def of_another_machine(content: dict) -> None:
        for benchmark in content["benchmarks"]:
            benchmark["extra_info"]["machine"]["gpu"] = "NVIDIA H200"

    edit(stored.storage, of_another_machine)
    status, run = stored(SLOWER, SCENARIO, LEVEL, COMPARE)
    assert status == 1 and run.verdict["verdict"] == "INCONCLUSIVE", run.output
    assert "0001: another machine (gpu 'NVIDIA H200'" in run.verdict["reason"]


@pytest.mark.parametrize("named", ["", "=0001"], ids=["the-latest", "by-number"])
def test_a_stored_run_of_another_plan_is_refused_with_the_option(stored, named):
    """If no stored run has the plan of this run, nothing can be compared, so it is refused.

    A number must name a run of the plan. Without a number, one run of the plan is enough."""

    def of_plan_quick(content: dict) -> None:
        for benchmark in content["benchmarks"]:
            benchmark["extra_info"]["plan"]["plan"] = "quick"

    (file,) = stored.storage.glob("*/0001*.json")
    of_plan_full = file.read_text()
    edit(stored.storage, of_plan_quick)
    arguments = (SCENARIO, LEVEL, f"{COMPARE}{named}")
    line = refused(*stored(SLOWER, *arguments))
    assert "expected a stored run of plan full, got plan quick (0001). Add --plan quick" in line
    assert line.endswith("or store one first: pytest --benchmark-autosave --plan full")
    file.with_name("0000_full.json").write_text(of_plan_full)
    if named:
        assert refused(*stored(SLOWER, *arguments)) == line
    else:
        status, run = stored(GOOD, *arguments)
        assert status == 0 and run.verdict["verdict"] == "PASS", run.output


def test_a_limit_without_any_benchmark_in_common_is_no_success(stored):
    def renamed(content: dict) -> None:
        for benchmark in content["benchmarks"]:
            benchmark["fullname"] += "-of-another-name"

    edit(stored.storage, renamed)
    status, run = stored(GOOD, SCENARIO, LEVEL, COMPARE, FAIL)
    assert status == 1 and run.verdict["verdict"] == "FAIL", run.output
    assert "the stored run has none of the 1 benchmarks" in run.verdict["reason"]


def test_a_storage_elsewhere_whose_machine_differs_ends_no_run(stored):
    """A storage in another folder, from another machine, ends no run. pytest-benchmark 5.3.1 raises
    ValueError for it, because it expects a relative path."""

    def renamed(content: dict) -> None:
        content["machine_info"]["node"] = "another-name"

    edit(stored.storage, renamed)
    status, run = stored(SLOWER, SCENARIO, LEVEL, COMPARE)
    assert status == 1 and run.verdict["verdict"] == "FAIL", run.output


def test_a_run_that_regressed_is_no_baseline(stored):
    """A run that has regressed is no baseline.

    If it violates a limit below the profile's threshold, it is stored as failed. The same command
    again is compared with the same baseline, and not with the failed run, which is the latest."""
    status, run = stored(SLIGHTLY_SLOWER, SCENARIO, COMPARE, NARROW, "--benchmark-autosave")
    assert status == 1, run.output
    (file,) = stored.storage.glob("*/0002*.json")
    (benchmark,) = json.loads(file.read_text())["benchmarks"]
    assert benchmark["extra_info"]["run"] == "FAIL"
    status, run = stored(SLIGHTLY_SLOWER, SCENARIO, COMPARE, NARROW)
    assert status == 1 and run.verdict["verdict"] == "FAIL", run.output
    assert VIOLATED in run.output.splitlines(), run.output
    assert re.search(r"^tg32@d0  .* FAIL: expected at most 2 % slower than", run.output, re.M)
    assert re.search(r"\(0001_\S+\)", run.output) and "(0002_" not in run.output, run.output


def test_a_limit_compares_each_metric_with_the_latest_run_that_has_it(stored):
    """The latest run lacks tg32@d0, so this metric is compared with the run before."""
    (file,) = stored.storage.glob("*/0001*.json")
    file.with_name("0002_pp.json").write_text(file.read_text().replace("tg32@d0", "pp32@d0"))
    status, run = stored(GOOD, SCENARIO, COMPARE, FAIL)
    assert status == 0 and run.verdict["verdict"] == "PASS", run.output
    both = {**SLIGHTLY_SLOWER, "pp32@d0": GOOD["tg32@d0"]}
    status, run = stored(both, SCENARIO, COMPARE, NARROW)
    assert status == 1 and run.verdict["verdict"] == "FAIL", run.output
    assert VIOLATED in run.output.splitlines(), run.output


def add_run_of_another_profile(storage: Path) -> None:
    """Store a later run of another profile, which was 10 % faster."""
    (file,) = storage.glob("*/0001*.json")
    content = json.loads(file.read_text())
    content["datetime"] = "2099-01-01T00:00:00+00:00"
    for benchmark in content["benchmarks"]:
        benchmark["extra_info"]["profile"] = "another"
        for field in ("min", "max", "mean", "median"):
            benchmark["stats"][field] *= 0.9
    file.with_name("0002_another.json").write_text(json.dumps(content))


def test_a_limit_does_not_compare_with_a_later_run_of_another_profile(stored):
    add_run_of_another_profile(stored.storage)
    status, run = stored(GOOD, SCENARIO, COMPARE, FAIL)
    assert status == 0 and run.verdict["verdict"] == "PASS", run.output
    assert "(0002_" not in run.output, run.output
    status, run = stored(SLOWER, SCENARIO, COMPARE, FAIL)
    assert status == 1 and run.verdict["verdict"] == "FAIL", run.output


def test_a_limit_without_a_run_that_is_a_baseline_is_inconclusive(stored):
    """If only runs of another profile are stored, a limit is not judged, and the run does not
    pass."""
    add_run_of_another_profile(stored.storage)
    (file,) = stored.storage.glob("*/0001*.json")
    file.unlink()
    status, run = stored(GOOD, SCENARIO, COMPARE, FAIL)
    assert status == 1 and run.verdict["verdict"] == "INCONCLUSIVE", run.output
    assert "expected a comparable stored run" in run.verdict["reason"]


@OPENS_EARLY
def test_an_error_of_pytest_benchmark_is_red_and_the_run_is_judged(stored, tmp_path, monkeypatch):
    """An error of pytest-benchmark makes the run red, and the run is still judged.

    The error is like a full disk while the run is stored: a folder is in place of the file."""
    broken = tmp_path / "out.json"
    plugin = tmp_path / "in_the_way.py"
    plugin.write_text(f"import os\ndef pytest_runtest_teardown():\n    os.mkdir({str(broken)!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    status, run = stored(GOOD, SCENARIO, f"--benchmark-json={broken}", "-p", "in_the_way")
    assert status == 1 and run.verdict["finished"], run.output
    assert "IsADirectoryError" in run.verdict["reason"] and "Traceback" not in run.output
