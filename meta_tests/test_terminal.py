"""What is shown while a run goes on: little when all is well."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from sm121.core.verdict import Verdict
from sm121.engines.start_progress import StartProgress
from sm121.engines.starting import StartPhase
from sm121.plugin.progress import Progress
from sm121.run.verdict_file import TestReport
from sm121.session.forecast import Forecast

ROOT = Path(__file__).resolve().parents[1]


def shown(*lines: tuple[float, str], everything: bool = False) -> list[str]:
    """What is shown of lines at these seconds."""
    now, said = [0.0], []
    progress = StartProgress(
        lambda name, line: said.append(line), everything=everything, clock=lambda: now[0]
    )
    for now[0], line in lines:
        progress("default", StartPhase(line, ready=line.startswith("ready")))
    return said


def test_a_quick_start_is_one_line():
    phases = ((0, "starting the API server"), (4, "loading weights"), (9, "warming up"))
    assert shown(*phases, (9.5, "ready after 9.5 s on port 1")) == ["ready after 9.5 s on port 1"]
    assert len(shown(*phases, everything=True)) == 3


def test_a_long_start_says_where_it_is():
    weights = [(15 + step, f"loading weights ({step} %)") for step in range(100)]
    lines = shown((0, "starting"), (14, "loading weights"), *weights, (115, "ready after 115 s"))
    assert lines[0] == "starting took 14 s, now loading weights, 14 s since the start"
    assert lines[1] == "loading weights (10 %), 25 s since the start"
    assert 9 <= len(lines) <= 12 and lines[-1] == "ready after 115 s"


def test_tables_of_benchmarks_and_remarks_are_for_the_report(run_pytest, fault_server):
    server = fault_server()
    arguments = [
        *("--arch", "sm121", "--base-url", server.base_url, "--api-key", server.key),
        *("--served-model-name", "canary", "meta_tests/scenarios/measurements.py"),
    ]
    samples = {"SM121_META_SAMPLES": json.dumps({"tg32@d0": [53.5, 53.6, 53.4, 53.5] * 5})}
    _, quiet = run_pytest(*arguments, environment=samples)
    assert "benchmark 'tg32'" not in quiet.output and "Outliers" not in quiet.output
    assert quiet.verdict["metrics"]["tg32@d0"]["value"] == 53.5
    _, verbose = run_pytest(*arguments, "-v", environment=samples)
    assert "Outliers" in verbose.output


# Where a run is


def going(now: list[float], every_s: float = 60.0) -> tuple[Progress, io.StringIO]:
    """A run of two levels that is expected to take two minutes, and what it wrote."""
    written = io.StringIO()
    costs = {"smoke": Forecast(checks=2, other_s=20), "kernel": Forecast(checks=4, other_s=100)}
    return Progress(written, costs, every_s=every_s, clock=lambda: now[0]), written


def result(name: str, verdict: Verdict, message: str = "", level: str = "smoke") -> TestReport:
    return TestReport(
        id=f"tests/test_{level}.py::{name}", level=level, verdict=verdict, message=message
    )


def test_the_line_says_level_test_what_is_waited_for_and_the_time():
    now = [0.0]
    progress, written = going(now)
    progress.begin("smoke", "tests/test_smoke.py::test_one")
    assert progress.line() == "0:00 of about 2:00 | smoke 1/2 | test_one"
    now[0] = 30.0
    progress.end(result("test_one", Verdict.PASS), asked=True)
    progress.begin("smoke", "tests/test_smoke.py::test_two")
    assert progress.line() == "0:30 of about 2:20 | smoke 2/2 | test_two"
    progress.end(result("test_two", Verdict.FAIL, "required: 1, seen: 2"), asked=True)
    progress.end(result("test_three", Verdict.NOT_RUN), asked=False)
    progress.begin("kernel", "tests/test_kernel.py::test_moe[marlin-M1]")
    assert progress.line() == "0:30 of about 2:10 | kernel 1/4 | test_moe[marlin-M1] | 1 FAIL"
    shown = re.sub(r"^\[..:..:..\] ", "", written.getvalue(), flags=re.M).splitlines()
    assert shown == [
        "smoke: 2 checks, about 0:20",
        "FAIL: tests/test_smoke.py::test_two: required: 1, seen: 2",
        "smoke: 1 PASS, 1 FAIL, 1 NOT_RUN, 0:30",
        "kernel: 4 checks, about 1:40",
    ]


def test_failures_for_one_reason_are_one_line():
    progress, written = going([0.0])
    for name in ("test_one", "test_two"):
        progress.begin("smoke", f"tests/test_smoke.py::{name}")
        progress.end(result(name, Verdict.FAIL, "the server ended"), asked=True)
    assert written.getvalue().count("the server ended") == 1
    assert progress.line().endswith("2 FAIL")


def test_a_long_test_is_not_silent_where_there_is_no_terminal():
    progress, written = going([0.0], every_s=0.05)
    progress._clock = time.monotonic
    progress.begin("kernel", "tests/test_kernel.py::test_long")
    deadline = time.monotonic() + 10
    while "kernel 1/4 | test_long" not in written.getvalue() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "kernel 1/4 | test_long" in written.getvalue()
    progress.stop()


def on_a_terminal(arguments: list[str], columns: int = 100) -> str:
    """What pytest writes where its output is a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--beside-others", *arguments],
        cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
        env={**inherited, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    os.close(ours)
    process.wait()
    return written.decode("utf-8", "replace")


def test_a_terminal_has_one_line_that_is_rewritten_and_ci_has_lines(
    fault_server, run_pytest, tmp_path
):
    server = fault_server()
    arguments = [
        *("--arch", "cpu", "--base-url", server.base_url, "--api-key", server.key),
        *("--served-model-name", "canary", "meta_tests/scenarios/teardowns.py"),
    ]
    shown = on_a_terminal([*arguments, "--report-dir", str(tmp_path / "report")])
    assert re.search(r"\d:\d\d of about \d:\d\d.*\r\x1b\[2K", shown)
    assert shown.count("\x1b[?25h") == shown.count("\x1b[?25l"), "the cursor is there again"
    assert not re.search(r"teardowns\.py [.FEs]", shown), "no letters beside the line"
    _, plain = run_pytest(*arguments)
    assert re.search(r"^\[..:..:..\] correctness: 3 checks", plain.output, re.M)
    failed = r"^\[..:..:..\] FAIL: \S+::test_skipped_then_failed: .*the teardown of a fixture fails"
    assert re.search(failed, plain.output, re.M)
    assert "\x1b" not in plain.output and "teardowns.py " not in plain.output
    _, verbose = run_pytest(*arguments, "-v")
    assert "test_passes PASSED" in verbose.output, "with -v pytest's own lines are there"


def test_a_failed_start_fits_a_screen(run_pytest):
    """One failure for one cause: no traceback, and what asks for the same server is not run."""
    environment = {
        "SM121_META_PYTHON": sys.executable,
        "SM121_META_SERVER": "fault_server.py",
        "SM121_META_ARGUMENTS": "--no-such-argument",
    }
    python = Path(__file__).with_name("fake_python.py")
    asked = ("--arch", "cpu", "--engine-python", str(python), "tests/test_smoke.py")
    status, run = run_pytest(*asked, environment=environment)
    assert status == 1 and "Traceback" not in run.output, run.output
    verdicts = [test["verdict"] for test in run.verdict["tests"]]
    assert verdicts.count("FAIL") == 2, "the baseline's start, and that of the server under test"
    assert "did not start: " in run.output and "run again: " in run.output, run.output
    assert len(run.output.splitlines()) < 70, run.output
    _status, run = run_pytest(*asked, "--tb=long", environment=environment)
    assert "def _raise_exited" in run.output, "who asks for it gets pytest's own"
