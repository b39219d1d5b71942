"""A project that uses only the gates of `pytest_bench_gate`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from meta_tests.folders import META, ROOT

PROJECT = META / "whole" / "downstream_bench_gate"
COMPARE = "--benchmark-compare"
SAVE = "--benchmark-autosave"
TESTS = "test_our_rates.py"
RATE = f"{TESTS}::test_decoding_is_fast_enough"
#: Without hypothesis, a run takes half as long, because pytest imports hypothesis at the end.
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
#: This rate is 10 % below the stored level, and above the minimum.
SLOWER = "54"


@dataclass
class Ended:
    """A run that has ended."""

    status: int
    output: str

    @property
    def refusal(self) -> str:
        """The line with which pytest refuses the run; it appears before any test."""
        assert self.status == 4 and "Traceback" not in self.output, self.output
        assert "INTERNALERROR" not in self.output and " passed" not in self.output, self.output
        (line,) = [line for line in self.output.splitlines() if line.startswith("ERROR: ")]
        return line.removeprefix("ERROR: ")

    def row(self, metric: str) -> str:
        """The row of a metric in the closing table."""
        (row,) = re.findall(rf"^{re.escape(metric)}  .*$", self.output, re.M)
        return row


@dataclass
class Theirs:
    """A copy of the user's project, outside of the suite's checkout."""

    folder: Path
    _begin: Callable[..., object]

    def run(self, *arguments: str, level: str = "60") -> Ended:
        # If the variable CI is set, pytest repeats each message completely in its summary.
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GITHUB_", "CI"))
        }
        output = self.folder / "output.txt"
        begun = self._begin(
            [*WITHOUT, "--benchmark-timer=our_server.clock", *arguments],
            output, inherited | {"OUR_LEVEL": level}, folder=self.folder,
        )  # fmt: skip
        return Ended(begun.wait(120.0), output.read_text("utf-8"))

    def stored(self, number: str) -> Path:
        (file,) = self.folder.glob(f".benchmarks/*/{number}_*.json")
        return file

    def edit(self, number: str, change: Callable[[dict], None]) -> None:
        content = json.loads(self.stored(number).read_text())
        change(content)
        self.stored(number).write_text(json.dumps(content))

    def replace(self, old: str, new: str) -> None:
        file = self.folder / TESTS
        code = file.read_text("utf-8")
        assert old in code
        file.write_text(code.replace(old, new), "utf-8")


def in_a_new_interpreter(project: Theirs, *arguments: str, **more: str):
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=project.folder, env=variables | more, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture
def project(tmp_path, warm_pytest) -> Theirs:
    folder = shutil.copytree(
        PROJECT, tmp_path / "theirs", ignore=shutil.ignore_patterns("__*", ".*")
    )
    return Theirs(Path(folder), warm_pytest().start)


@pytest.fixture(scope="module")
def history(tmp_path_factory) -> Path:
    """The storage with one passed run; empty before the first test that needs it."""
    return tmp_path_factory.mktemp("history")


@pytest.fixture
def stored(project, history) -> Theirs:
    """The project with one stored run, 0001."""
    if not any(history.iterdir()):
        ended = project.run(SAVE)
        assert ended.status == 0, ended.output
        shutil.copytree(project.folder / ".benchmarks", history, dirs_exist_ok=True)
    shutil.copytree(history, project.folder / ".benchmarks", dirs_exist_ok=True)
    return project


def test_the_entry_point_is_installed():
    named = [each for each in entry_points(group="pytest11") if each.value == "pytest_bench_gate"]
    assert [point.name for point in named] == ["pytest_bench_gate"]


# A limit


def test_a_met_limit_passes_with_its_table(project):
    ended = project.run("-W", "error")
    assert ended.status == 0, ended.output
    lines = ended.output.splitlines()
    table = lines[lines.index("metric   value     interval (95%)  required     verdict") :]
    assert table[1] == "tg32@d0  60 tok/s  59.85 to 60.15  at least 52  PASS"
    assert table[2].startswith("ttft ") and table[2].endswith("at most 20   PASS")
    assert len(table) == 4, "behind them is pytest's own last line"
    assert not (project.folder / "conformance-report").exists()


def test_a_missed_limit_fails_with_value_interval_and_limit(project):
    ended = project.run(level="50")
    assert ended.status == 1, ended.output
    assert "Unmet: tg32@d0: expected at least 52 tok/s, got 50 tok/s (49.85 to" in ended.output
    assert ended.row("tg32@d0").endswith("FAIL") and ended.row("ttft").endswith("PASS")


def test_too_few_rounds_are_undecided_and_say_how_many_it_takes(project):
    project.replace("decode_rates(rounds=40)", "decode_rates(rounds=5)")
    ended = project.run()
    assert ended.status == 1, ended.output
    assert "Inconclusive: tg32@d0: expected at least 52 tok/s, got 59.95 tok/s" in ended.output
    assert "measure at least 20 rounds" in ended.output
    assert ended.row("tg32@d0").endswith("INCONCLUSIVE")


def test_equal_samples_are_reported(project):
    """The gates report a metric whose samples are all equal.

    Examples are a count that is equal in each round, and a counter that does not change.
    """
    (project.folder / TESTS).write_text(
        "def test_x(gate):\n"
        "    gate('tokens', [64] * 40, minimum=60)\n"
        "    gate('gib', [3, 3.0, 4] * 10, maximum=60)\n"
    )
    ended = project.run()
    assert ended.status == 0, ended.output
    assert ended.row("tokens").endswith("PASS (all samples are equal)")
    assert ended.row("gib").endswith("PASS")


#: A plugin that accepts the arguments of pytest-rerunfailures.
RERUNS = """from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports):
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""


def test_a_rerun_repeats_the_first_decision(project):
    (project.folder / "conftest.py").write_text(RERUNS)
    project.replace("def test_decoding", "later = []\n\n\ndef test_decoding")
    project.replace(
        "    gate(", "    rates = [100.0] * 40 if later else rates\n    later.append(1)\n    gate("
    )
    ended = project.run("-k", "decoding", level="50")
    assert ended.status == 1, ended.output
    assert "Unmet: tg32@d0: expected at least 52 tok/s, got 50 tok/s (49.85 to" in ended.output
    assert "a rerun does not count" in ended.output
    assert ended.row("tg32@d0").endswith("FAIL")


def test_a_rerun_for_another_reason_keeps_the_first_decision(project):
    (project.folder / "conftest.py").write_text(RERUNS)
    (project.folder / TESTS).write_text(
        "runs = []\n"
        "def test_x(gate):\n"
        "    runs.append(1)\n"
        "    gate('rate', [[60.0, 61.0] * 20, [40.0] * 40][len(runs) - 1], minimum=52)\n"
        "    assert len(runs) == 2\n"
    )
    ended = project.run()
    assert ended.status == 0 and ended.row("rate").endswith("PASS"), ended.output


def test_a_gate_that_is_not_called_fails(project):
    (project.folder / TESTS).write_text(
        "import pytest\n"
        "def test_not_called(gate):\n    pass\n"
        "def test_skips(gate):\n    pytest.skip('no model')\n"
        "def test_fails(gate):\n    assert False, 'their own'\n"
    )
    ended = project.run("-rA")
    assert ended.status == 1 and "1 skipped" in ended.output, ended.output
    assert (
        "expected a call of gate, got none. Call gate, or remove the fixture\n"
    ) in ended.output, ended.output
    assert "FAILED test_our_rates.py::test_fails - AssertionError: their own" in ended.output
    assert "are hidden" not in ended.output and "not used at all" not in ended.output


# A stored run


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((COMPARE,), id="the-latest"),
        pytest.param(
            (f"{COMPARE}=0001", "--benchmark-only"),
            id="by-number",
            marks=pytest.mark.slow("the latest is that number"),
        ),
    ],
)
def test_the_same_again_passes_and_ten_percent_slower_fails(stored, options):
    same = stored.run(*options)
    assert same.status == 0, same.output
    assert same.row("tg32@d0").endswith("PASS (0.0 % better than 0001)")
    slower = stored.run(*options, level=SLOWER)
    assert slower.status == 1, slower.output
    assert "tg32@d0: expected a loss against 0001 of at most 5 %, got 10 %" in slower.output
    assert slower.row("tg32@d0").endswith("FAIL (10.0 % worse than 0001)")
    assert slower.row("ttft").endswith("FAIL (11.1 % worse than 0001)")


def test_a_run_that_failed_is_no_baseline_of_the_next(stored):
    assert stored.run(COMPARE, SAVE, level=SLOWER).status == 1
    again = stored.run(COMPARE, level=SLOWER)
    assert again.status == 1 and "worse than 0001" in again.output, again.output
    refusal = stored.run(f"{COMPARE}=0002").refusal
    assert "0002_" in refusal and "it did not pass" in refusal


def test_a_failure_that_its_test_catches_is_no_baseline(stored):
    stored.replace("def test_decoding", "import pytest\n\n\n@pytest.mark.xfail\ndef test_decoding")
    ended = stored.run(SAVE, level="50")
    assert ended.status == 0 and ended.row("tg32@d0").endswith("FAIL"), ended.output
    assert "it did not pass" in stored.run(f"{COMPARE}=0002").refusal


def test_a_limit_of_pytest_benchmark_is_no_traceback(stored):
    """If a run exceeds a limit of pytest-benchmark, pytest shows no traceback.

    Each gate passes, but the limit applies to the rounds of the benchmark.
    """
    stored.replace('unit="ms"', 'unit="ms", worse_by=0.5')
    stored.replace('unit="tok/s"', 'unit="tok/s", worse_by=0.5')
    ended = stored.run(COMPARE, "--benchmark-compare-fail=median:5%", level=SLOWER)
    assert ended.status == 1 and "Traceback" not in ended.output, ended.output
    assert "Performance has regressed:" in ended.output
    assert ended.row("ttft").endswith("PASS (11.1 % worse than 0001)")


def test_a_run_of_some_tests_hides_no_other_metric(stored):
    """A metric is still compared if the latest stored run contains only another metric."""
    assert stored.run(SAVE, "-k", "first_token").status == 0
    slower = stored.run(COMPARE, level=SLOWER)
    assert "tg32@d0: expected a loss against 0001" in slower.output, slower.output
    stored.replace('gate("tg32@d0"', 'gate("tg32"')
    gone = stored.run(COMPARE)
    assert gone.status == 1 and "FAIL: tg32@d0 was measured in 0001" in gone.output, gone.output


def test_a_metric_that_is_gone_fails_and_a_selection_leaves_it_out(stored):
    for selected in (("-k", "decoding"), (RATE,), ("--deselect", f"{TESTS}::test_the_first")):
        ended = stored.run(*selected, COMPARE)
        assert ended.status == 0 and "ttft" not in ended.output, ended.output
    (stored.folder / "test_other.py").write_text("def test_other(): pass\n")
    for ignored in (("--ignore", TESTS), ("--ignore-glob", "*_our_*")):
        ended = stored.run(*ignored, COMPARE)
        assert ended.status == 0 and "FAIL" not in ended.output, ended.output
    (stored.folder / "test_other.py").write_text("def test_other(): assert False\n")
    cache = ("-p", "cacheprovider")
    assert stored.run(*cache, "test_other.py").status == 1
    ended = stored.run(*cache, "--lf", COMPARE)
    assert "1 failed" in ended.output and "was measured in" not in ended.output, ended.output
    (stored.folder / "test_other.py").write_text("def test_other(): pass\n")
    assert stored.run(*cache, "test_other.py").status == 0
    (stored.folder / "test_other.py").unlink()
    stored.replace("def test_the_first", "def the_first")
    all_run = stored.run(*cache, "--lf", COMPARE)
    assert all_run.status == 1, all_run.output
    for whole in ((), (TESTS,)):  # the first run is stored, but is no baseline of the second
        gone = stored.run(*whole, COMPARE, SAVE)
        assert gone.status == 1, gone.output
        line = f"FAIL: ttft was measured in 0001 by {TESTS}::test_the_first_token_comes_soon, and"
        assert line in gone.output
    (stored.folder / TESTS).write_text("def test_nothing(): pass\n")
    assert stored.run(COMPARE).status == 1, "no gate is left at all"


def test_a_new_metric_is_not_compared_and_says_so(stored):
    (stored.folder / "test_new.py").write_text(
        "def test_new(gate):\n    gate('new', [1.0] * 20, better='lower')\n"
    )
    ended = stored.run(COMPARE)
    assert ended.status == 0, ended.output
    assert "  measured (not in a stored run yet)" in ended.row("new")


def test_an_empty_storage_is_one_line(project):
    for options in ((COMPARE, SAVE), (COMPARE, "--benchmark-compare-fail=median:5%")):
        refusal = project.run(*options).refusal
        assert refusal.startswith("--benchmark-compare: expected a stored run with gates in ")
        assert refusal.endswith("of a build that you trust: pytest --benchmark-autosave")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param((f"{COMPARE}=0099",), "the latest is 0001", id="no-such-run"),
        pytest.param((COMPARE, TESTS), "takes the next word", id="a-path-taken-for-a-number"),
        pytest.param((COMPARE, "no/such/file.py"), "takes the next", id="a-path-that-is-not-there"),
        pytest.param((f"{COMPARE}=",), "expected the number of a stored run", id="no-number"),
        pytest.param((COMPARE, "--benchmark-disable"), "times nothing", id="nothing-timed"),
        pytest.param((COMPARE, "--benchmark-skip"), "measures nothing", id="nothing-measured"),
        pytest.param(("--benchmark-compare-fail=median:5%",), "Add it", id="only-a-limit"),
    ],
)
def test_a_comparison_with_nothing_is_refused_in_one_line(stored, options, expected):
    assert expected in stored.run(*options, level=SLOWER).refusal


@pytest.mark.parametrize("storage", ["foo://", "http://host"])
def test_a_storage_of_no_known_kind_is_one_line(project, storage):
    refusal = project.run(f"--benchmark-storage={storage}").refusal
    expected = "expected a folder, file://FOLDER or elasticsearch+http://HOST"
    assert refusal.startswith(f"--benchmark-storage {storage}: {expected}")


def test_a_run_of_another_machine_is_one_line(stored):
    def of_another_machine(content: dict) -> None:
        content["machine_info"]["cpu"]["brand_raw"] = "another one"

    stored.edit("0001", of_another_machine)
    refusal = stored.run(COMPARE).refusal
    assert "it was made on another machine (cpu brand_raw 'another one', now " in refusal


def test_a_file_of_another_version_is_one_line(stored):
    def changed(content: dict) -> None:
        content["benchmarks"][0]["extra_info"]["bench_gate"]["version"] = 2

    stored.edit("0001", changed)
    assert "expected what pytest_bench_gate stores, got ValueError" in stored.run(COMPARE).refusal


# Together with other plugins


@pytest.mark.slow("workers")
def test_workers_judge_no_gate(project):
    for options in ((), (COMPARE,)):
        done = in_a_new_interpreter(project, "-n", "1", *options)
        assert done.returncode == 5, done.stdout + done.stderr
        why = "NOT_RUN: 2 tests with gates: no time is measured while other workers run. Leave out"
        assert why in done.stdout and "not used at all" not in done.stdout, done.stdout


def test_workers_are_not_compared_with_stored_gates(stored):
    (stored.folder / TESTS).write_text("def test_nothing(): pass\n")
    refusal = stored.run("-n", "2", COMPARE).refusal
    assert refusal == f"{COMPARE}: no time is measured while other workers run. Leave out -n"


@pytest.mark.parametrize(
    ("option", "why"),
    [
        pytest.param("--benchmark-disable", "times nothing", id="disabled"),
        pytest.param("--benchmark-skip", "measures nothing", id="skipped"),
    ],
)
def test_without_benchmarks_no_gate_is_judged(project, option, why):
    ended = project.run(option)
    assert ended.status == 5, ended.output
    assert f"NOT_RUN: 2 tests with gates: {option} {why}" in ended.output


def test_a_gate_requested_by_name_needs_a_stored_run_too(project):
    (project.folder / TESTS).write_text(
        "def test_x(request):\n"
        "    request.getfixturevalue('gate')('x', [1.0] * 20, better='lower')\n"
    )
    ended = project.run(COMPARE)
    assert ended.status == 1 and "expected a stored run with gates in" in ended.output, ended.output


LEVELS = """import pytest
pytestmark = [pytest.mark.smoke, pytest.mark.applies_to("cpu")]
def test_level():
    'Hold.'
"""


SUITE = """import pytest
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session, exitstatus):
    yield
    if exitstatus == 0:
        session.exitstatus = 0
"""


def test_a_missing_metric_fails_although_a_plugin_sets_the_status(stored):
    (stored.folder / "conftest.py").write_text(SUITE)
    stored.replace("def test_the_first", "def the_first")
    ended = stored.run(COMPARE)
    assert ended.status == 1 and "FAIL: ttft was measured in 0001" in ended.output, ended.output


@pytest.mark.slow("the suite in three runs; the test above has its way of setting the status")
def test_a_metric_that_is_gone_fails_beside_levels_that_hold(stored):
    (stored.folder / "pytest.ini").write_text("[pytest]\nsm121 = true\n")
    (stored.folder / "test_levels.py").write_text(LEVELS)
    assert stored.run(SAVE).status == 0
    stored.replace("def test_the_first", "def the_first")
    ended = stored.run(COMPARE)
    assert ended.status == 1 and "FAIL: ttft was measured in 0002" in ended.output, ended.output


def test_the_suite_in_the_same_run_judges_nothing_twice(stored):
    (stored.folder / "pytest.ini").write_text("[pytest]\nsm121 = true\n")
    ended = stored.run(COMPARE)
    assert ended.status == 4 and "it was made on another machine (sm121" in ended.output, (
        ended.output
    )
    assert stored.run(SAVE).status == 0
    ended = stored.run(COMPARE, level=SLOWER)
    assert ended.status == 1 and ended.row("tg32@d0").endswith("worse than 0002)"), ended.output
    assert ended.output.count("of at most 5 %, got 10 %") == 1, ended.output


def test_a_fixture_of_theirs_of_that_name_is_theirs(project):
    (project.folder / "conftest.py").write_text(
        "import pytest\n@pytest.fixture\ndef gate():\n    return lambda *a, **k: None\n"
    )
    ended = project.run(COMPARE)
    assert ended.status == 0 and "= gates =" not in ended.output, ended.output


def test_it_alone_works_without_the_entry_points(project):
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = in_a_new_interpreter(project, "-p", "pytest_bench_gate", RATE, **alone)
    assert done.returncode == 0 and "tg32@d0  60 tok/s" in done.stdout, done.stdout + done.stderr


def test_the_page_begins_with_the_project():
    text = (ROOT / "docs" / "pytest-bench-gate.md").read_text("utf-8")
    mark = r"<!-- run: meta_tests/whole/test_downstream_bench_gate.*?```python\n(.*?)```"
    (block,) = re.findall(mark, text, re.S)
    code = (PROJECT / TESTS).read_text("utf-8")
    for part in block.strip().split("\n\n\n"):
        assert part in code, part
