"""The lines that a run shows while it is in progress: few lines, if all is well."""

import dataclasses
import io
import json
import os
import re
import sys
import time
from types import SimpleNamespace
from unittest.mock import ANY

import pytest

from meta_tests.fakes import report_runs
from meta_tests.fakes.run_events import stand_in
from meta_tests.folders import FAKES
from meta_tests.whole.terminal_samples import on_a_terminal
from sm121.core import waiting
from sm121.core.time_range import TimeRange
from sm121.core.verdict import Verdict
from sm121.engines.starting import StartPhase, StartProgress
from sm121.plugin import terminal
from sm121.plugin.progress import Progress
from sm121.plugin.stash import REPORT
from sm121.report import stored
from sm121.report.crash_list import Crash
from sm121.run.machine_report import BoxReport, CrashReport
from sm121.run.verdict_file import TestReport
from sm121.session.forecast import Check, ExpectedDuration, Forecast
from sm121.session.settings import Settings


def shown(*lines: tuple[float, str], begins: bool = False) -> list[str]:
    """Return the part of the lines that is shown at these seconds."""
    now = [0.0]
    written = []
    progress = StartProgress(
        lambda name, phase: written.append(phase.text), begins=begins, clock=lambda: now[0]
    )
    for now[0], line in lines:
        progress("default", StartPhase(line, ready=line.startswith("ready")))
    return written


def test_a_quick_start_is_one_line_and_a_long_one_says_where_it_is():
    phases = ((0, "starting the API server"), (4, "loading weights"), (9, "warming up"))
    ready = (9.5, "ready after 9.5 s on port 1")
    assert shown(*phases, ready) == ["ready after 9.5 s on port 1"]
    twice = [*phases, ready, *phases, ready]
    assert shown(*twice, begins=True) == ["starting the API server", ready[1]] * 2
    weights = [(17 + step, f"loading weights ({step} %)") for step in range(100)]
    steps = ((0, "starting"), (16, "loading weights"), *weights, (117, "ready after 117 s"))
    lines = shown(*steps)
    assert lines[0] == "starting took 16 s, now loading weights, 16 s since the start"
    assert lines[1] == "loading weights (14 %), 31 s since the start"
    assert 6 <= len(lines) <= 8 and lines[-1] == "ready after 117 s"
    assert shown(*steps, begins=True) == ["starting", *lines]


@pytest.mark.slow("two runs")
def test_tables_of_benchmarks_and_remarks_are_for_the_report(run_pytest, fault_server):
    attached = ("--arch", "sm121", *fault_server().options, "--served-model-name", "canary")
    arguments = (*attached, "meta_tests/whole/scenarios/measurements.py")
    samples = {"SM121_META_SAMPLES": json.dumps({"tg32@d0": [53.5, 53.6, 53.4, 53.5] * 5})}
    _, quiet = run_pytest(*arguments, environment=samples)
    assert "benchmark 'tg32'" not in quiet.output and "Outliers" not in quiet.output
    assert quiet.verdict["metrics"]["tg32@d0"]["value"] == 53.5
    _, verbose = run_pytest(*arguments, "-v", environment=samples)
    assert "Outliers" in verbose.output


# The remaining time of a run


def expected(level: str, *names: str, seconds: float) -> list[ExpectedDuration]:
    """Return the checks of a level with equal recorded durations."""
    durations = []
    for name in names:
        durations.append(
            ExpectedDuration(
                Check(f"tests/test_{level}.py::{name}", level, can_run=name != "test_unable"),
                TimeRange.of(0.0 if name == "test_unable" else seconds),
                timed=True,
            )
        )
    return durations


def going(now: list[float], every_s: float = 60.0, **given) -> tuple[Progress, io.StringIO]:
    """A run of two levels with an expected duration of two minutes, and its output."""
    written = io.StringIO()
    smoke = expected("smoke", "test_one", "test_two", "test_unable", seconds=10)
    kernel = expected("kernel", "test_1", "test_2", "test_3", "test_4", seconds=25)
    forecast = Forecast([*smoke, *kernel])
    return Progress(written, forecast, every_s=every_s, clock=lambda: now[0], **given), written


def result(name: str, verdict: Verdict, message: str = "", level="smoke", **more) -> TestReport:
    identity = f"tests/test_{level}.py::{name}"
    return TestReport(id=identity, level=level, verdict=verdict, message=message, **more)


def without_clock(written: io.StringIO) -> list[str]:
    return re.sub(r"^\[..:..:..\] ", "", written.getvalue(), flags=re.M).splitlines()


def test_the_line_says_level_test_what_is_waited_for_and_the_time():
    now = [0.0]
    progress, written = going(now)
    progress.begin("smoke", "tests/test_smoke.py::test_one")
    assert progress.line() == "0:00, about 2:00 left | smoke 0/3 ended | test_one"
    now[0] = 8.0
    assert progress.line() == "0:08, about 1:52 left | smoke 0/3 ended | test_one"
    now[0] = 30.0  # the check takes longer than expected, and the remaining time stays the same
    slower = "0:30, slower than forecast, at least 1:50 left"
    assert progress.line() == f"{slower} | smoke 0/3 ended | test_one for 0:30"
    progress.end(result("test_one", Verdict.PASS, seconds=30))
    progress.begin("smoke", "tests/test_smoke.py::test_two")
    slower = "0:30, slower than forecast, about 1:50 left"
    assert progress.line() == f"{slower} | smoke 1/3 ended | test_two"
    now[0] = 50.0
    failed = result("test_two", Verdict.FAIL, "expected 1, got 2", seconds=20)
    progress.end(failed)
    progress.end(result("test_unable", Verdict.NOT_RUN))
    progress.begin("kernel", "tests/test_kernel.py::test_1")
    line = "0:50, slower than forecast, about 1:40 left | kernel 0/4 ended | test_1 | 1 FAIL"
    assert progress.line() == line
    assert without_clock(written) == [
        "smoke: 3 checks (1 cannot run); about 2:00 left of the run",
        "FAIL: tests/test_smoke.py::test_two: expected 1, got 2",
        "smoke: 1 PASS, 1 FAIL, 1 NOT_RUN, 0:50; slower than forecast, about 1:40 left of the run",
        "kernel: 4 checks; slower than forecast, about 1:40 left of the run",
    ]
    progress.end(result("test_1", Verdict.PASS, level="kernel"))
    progress.stop()


def test_the_last_check_that_takes_long_has_no_time_that_is_left():
    now = [0.0]
    expected_ = expected("smoke", "test_one", seconds=10.0)
    progress = Progress(io.StringIO(), Forecast(expected_), clock=lambda: now[0], every_s=60.0)
    progress.begin("smoke", "tests/test_smoke.py::test_one")
    now[0] = 40.0
    assert progress.line() == "0:40, slower than forecast | smoke 0/1 ended | test_one for 0:40"
    progress.stop()


def test_at_the_end_nothing_is_left():
    progress, _ = going([0.0])
    lines: list[str] = []
    progress._write = lines.append
    for level, names in (
        ("smoke", ("test_one", "test_two", "test_unable")),
        ("kernel", ("test_1", "test_2", "test_3", "test_4")),
    ):
        for name in names:
            progress.begin(level, f"tests/test_{level}.py::{name}")
            progress.end(result(name, Verdict.PASS, level=level))
    progress.stop()
    assert lines[-1].endswith("kernel: 4 PASS, 0:00")


def test_a_line_that_pytest_has_begun_is_ended_once():
    now = [0.0]
    width = [27]
    progress, written = going(now, width=lambda: width[0])
    progress.begin("kernel", "tests/test_kernel.py::test_one")
    progress.say("note", "a")
    width[0] = 3
    progress.say("note", "b")
    progress.begin("kernel", "tests/test_kernel.py::test_two")
    progress.say("note", "c")
    width[0] = 0
    progress.say("note", "d")
    lines = without_clock(written)
    assert lines == ["", ANY, "", "note: a", "", "note: b", "", "note: c", "note: d"]


def test_failures_for_one_reason_are_one_line():
    progress, written = going([0.0])
    for name in ("test_one", "test_two"):
        progress.begin("smoke", f"tests/test_smoke.py::{name}")
        progress.end(result(name, Verdict.FAIL, "the server ended"))
    assert written.getvalue().count("the server ended") == 1
    assert progress.line().endswith("2 FAIL")


def test_a_long_test_is_not_silent_where_there_is_no_terminal():
    progress, written = going([0.0], every_s=0.05)
    progress._clock = time.monotonic
    progress.begin("kernel", "tests/test_kernel.py::test_long")
    assert waiting.until(lambda: "kernel 0/4 ended | test_long" in written.getvalue(), 10.0)
    progress.stop()


LONG = "kernel 0/2 ended | test_that_takes_long[a]"


@pytest.mark.parametrize(
    ("asked", "lines", "expected"),
    [
        pytest.param(
            (),
            True,
            "kernel 0/2 ended | test_that_takes_long[a]",
            id="lines, kernel 0/2 ended | test_that_takes_long(a)",
        ),
        pytest.param(
            ("-v",),
            True,
            "kernel 0/2 ended | test_that_takes_long[a]",
            id="-v, lines, kernel 0/2 ended | test_that_takes_long(a)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("-s",),
            True,
            "kernel 0/2 ended | test_that_takes_long[a]",
            id="-s, lines, kernel 0/2 ended | test_that_takes_long(a)",
            marks=pytest.mark.slow,
        ),
        pytest.param(("-qq",), False, None, id="-qq, not lines", marks=pytest.mark.slow),
    ],
)
def test_a_long_test_is_never_silent(fault_server, run_pytest, tmp_path, asked, lines, expected):
    """While a long test runs, lines appear, even if pytest prints its own lines."""
    often = "from sm121.plugin import progress\nprogress._LINE_EVERY_S = 0.4\n"
    (tmp_path / "said_often.py").write_text(often)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    server = fault_server()
    status, run = run_pytest(
        *("-p", "said_often", "--arch", "cpu", "--base-url", server.base_url),
        *("--api-key", server.key, "--served-model-name", "canary"),
        *("meta_tests/whole/scenarios/slowly.py", *asked),
        environment={"PYTHONPATH": paths},
    )
    assert status == 0, run.output
    assert bool(re.search(r"^\[..:..:..\] kernel: 2 checks", run.output, re.M)) is lines
    rows = re.findall(r"^\[..:..:..\] \d:\d\d.*? \| (.*)", run.output, re.M)
    if expected is None:
        assert not rows
        return
    assert expected in rows and len(rows) <= 8, run.output
    assert ("test_that_takes_long[b] PASSED" in run.output) is ("-v" in asked)


def test_a_terminal_has_one_line_that_is_rewritten_and_ci_has_lines(
    fault_server, run_pytest, tmp_path
):
    attached = ("--arch", "cpu", *fault_server().options, "--served-model-name", "canary")
    arguments = (*attached, "meta_tests/whole/scenarios/teardowns.py")
    screen = on_a_terminal(
        [
            *arguments,
            "--report-dir",
            str(tmp_path / "report"),
            f"--benchmark-storage={tmp_path / 'benchmarks'}",
        ]
    )
    left = r"\d:\d\d, (about )?\d:\d\d( to \d:\d\d)? left"
    assert re.search(left + r".*\r\x1b\[2K", screen)
    assert screen.count("\x1b[?25h") == screen.count("\x1b[?25l"), "the cursor is there again"
    assert not re.search(r"teardowns\.py [.FEs]", screen), "no letters beside the line"
    _, plain = run_pytest(*arguments)
    assert re.search(r"^\[..:..:..\] correctness: 4 checks", plain.output, re.M)
    failed = r"^\[..:..:..\] FAIL: \S+::test_skipped_then_failed: .*the teardown of a fixture fails"
    assert re.search(failed, plain.output, re.M)
    assert "\x1b" not in plain.output and "teardowns.py " not in plain.output
    _, verbose = run_pytest(*arguments, "-v")
    assert "test_passes PASSED" in verbose.output, "with -v pytest's own lines are there"


@pytest.mark.slow("two runs; test_headline_action.py has a failed start")
def test_a_failed_start_fits_a_screen(run_pytest):
    """A failed start fits on one screen.

    It is one failure with one cause, without a traceback. Other tests of the same server do not
    run."""
    environment = {"SM121_META_PYTHON": sys.executable, "SM121_META_SERVER": "fault_server.py"}
    environment["SM121_META_ARGUMENTS"] = "--no-such-argument"
    python = FAKES / "fake_python.py"
    arguments = ("--arch", "cpu", "--engine-python", str(python), "tests/test_smoke.py")
    status, run = run_pytest(*arguments, environment=environment)
    assert status == 1 and "Traceback" not in run.output, run.output
    verdicts = [test["verdict"] for test in run.verdict["tests"]]
    assert verdicts.count("FAIL") == 2, "the baseline's start, and that of the server under test"
    assert "FAIL: the server did not start in smoke: " in run.output, run.output
    assert re.search("^(remedy|read): ", run.output, re.M), run.output
    assert len(run.output.splitlines()) < 50, run.output
    _status, run = run_pytest(*arguments, "--tb=long", environment=environment)
    assert "def wait_until_ready" in run.output, "who asks for it gets pytest's own"


@pytest.mark.slow("four runs; what a level says is asked in this process above")
def test_the_clients_own_frames_are_left_out(run_pytest, fault_server):
    """The stack frames of the client are left out, because the frames of the openai package do not
    explain an error status."""
    arguments = (
        *("--arch", "cpu", *fault_server().options),
        "meta_tests/whole/scenarios/refused.py",
    )
    _status, short = run_pytest(*arguments, "--tb=short")
    assert "refused.py:" in short.output and "openai/" not in short.output, short.output
    _status, verbose = run_pytest(*arguments, "-v")
    assert "openai/" not in verbose.output and "httpx/" not in verbose.output
    _status, long = run_pytest(*arguments, "--tb=long")
    assert "openai/" in long.output, "who asks for it gets pytest's own"


def closing_lines(report: stored.StoredReport) -> list[str]:
    """Return the closing lines of a run that pytest-benchmark stores."""
    lines: list[str] = []
    config = SimpleNamespace(
        stash={REPORT: report}, getoption={"--format": "text", "benchmark_autosave": True}.get
    )
    reporter = SimpleNamespace(
        section=lines.append, write=lambda text: lines.extend(text.splitlines()), config=config,
        write_line=lambda text, **_: lines.append(text), _tw=SimpleNamespace(fullwidth=100),
    )  # fmt: skip
    of_run = stand_in(file=report.run, ledger=(), directory=report.directory)
    terminal.closing(reporter, SimpleNamespace(run=of_run, settings=Settings()))
    return lines


@pytest.mark.parametrize("state", ["DEGRADED", "QUALIFIED"])
def test_a_stored_run_of_a_degraded_machine_is_no_baseline(tmp_path, state):
    report = stored.read(report_runs.write("pass", tmp_path / "report"))
    report.run.box = BoxReport(state=state, reason="other processes use the GPU: [7]")
    expected = (
        "stored run: no later run is compared with it, because the machine was DEGRADED: other "
        "processes use the GPU: [7]"
    )
    assert (expected in closing_lines(report)) is (state == "DEGRADED")


def test_the_end_of_a_run_fits_a_screen_with_hostile_names(tmp_path):
    """The end of a run fits on one screen even with hostile names: ids, models and summaries of any
    length, and escape sequences in a model's name."""
    directory = report_runs.write("fail", tmp_path / "report")
    report = stored.read(directory)
    run = report.run
    run.engine.model = "\x1b[2J\u202e" + "m" * 400
    run.unproven = ["not known " * 40] * 4
    first = run.tests[0]
    bad = {"verdict": Verdict.FAIL, "message": "bad " * 99}
    for n in range(9):
        bad["id"] = f"{first.id}[{'p' * 500}{n}]"
        run.tests.append(first.model_copy(update=bad))
    crashes = tuple(
        Crash(kind=f"oom{n}", summary="no memory " * 40, owner="me " * 99, bundle="crashes/1",
              test=run.tests[-1 - n].id, lines=("a line " * 99,))
        for n in range(3)
    )  # fmt: skip
    run.crashes = [CrashReport.model_validate(c.model_dump(), extra="ignore") for c in crashes]
    run.judge()
    lines = closing_lines(dataclasses.replace(report, crashes=crashes))
    for line in lines:
        assert line.isprintable()
    assert sum(-(-max(len(line), 1) // 100) for line in lines) <= 40, "\n".join(lines)
    assert lines[-1].startswith("FAIL: ") and str(directory / "crashes/1") in "".join(lines)
