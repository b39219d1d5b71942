"""A refused request gives one line with the next step, whenever it is refused.

A run without a measurement gives one line, too, and keeps the report of an earlier measuring run.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meta_tests.folders import ROOT
from meta_tests.releases import needs
from meta_tests.whole.terminal_samples import on_a_terminal
from sm121 import cli
from sm121.core.verdict import Verdict
from sm121.run import directory, verdict_file
from sm121.run.engine_report import EngineReport
from sm121.run.verdict_file import VerdictFile

DEAD = "http://127.0.0.1:9"
#: Requests that are refused by an option's first check, by the collected tests, or by the opened
#: run.
REFUSED = [
    pytest.param(("--plan", "qick"), "did you mean quick?", id="plan"),
    pytest.param(("--plan",), "--plan: expected one argument. --plan quick|", id="no-plan"),
    pytest.param(("--format", "md"), "did you mean markdown?", id="format"),
    pytest.param(("-m", "SM121"), "did you mean sm121?", id="marker"),
    pytest.param(("--no-such-option",), "List the options with --help", id="option"),
    pytest.param(("-n", "many"), "-n: invalid parse_numprocesses value: 'many'. -n ", id="n"),
    pytest.param(("tests/no_such_file.py",), "file or directory not found", id="path"),
    pytest.param(
        ("tests/test_smoke.py::nosuch",), "List the names with --collect-only -q", id="test"
    ),
    pytest.param(("--benchmark-compare=0099",), "Store one with", id="benchmark-compare"),
    pytest.param(
        ("--benchmark-compare", "tests/test_smoke.py"), "write paths first", id="compare-path"
    ),
    pytest.param(("--benchmark-compare=README.md",), "write paths first", id="compare-page"),
    pytest.param(
        ("--benchmark-autosave", "--report-dir=README.md"), "expected a folder", id="not-stored"
    ),
    pytest.param(("--benchmark-compare-fail=5%",), "eg: min:5%", id="compare-fail"),
    pytest.param(
        ("--base-url", DEAD), "Start the server, or name the address at which it listens",
        id="dead-url",
    ),
    pytest.param(("-p", "no:xdist", "-n", "2"), "sm121-conformance[parallel]", id="no-xdist"),
    pytest.param(("--depths=99999999",), "expected at most", id="depths"),
    pytest.param(("--matrix=99",), "expected at most", id="matrix"),
    pytest.param(("--report-dir=README.md",), "expected a folder", id="report-file"),
    pytest.param(("--ab", "a"), "--ab: expected 2 arguments. --ab A B: ", id="one-side"),
    pytest.param(("--scores", sys.executable), "pip install", id="scores"),
    pytest.param(("--golden=nosuch.json",), "--record-golden FILE", id="golden"),
    pytest.param(
        ("--container", "nosuch", "--base-url", DEAD), "--server-log FILE", id="container"
    ),
]  # fmt: skip


#: The progress lines above the refusal, on a machine that is busy for eight seconds.
GOES_ON = re.compile(r"\[\d\d:\d\d:\d\d\] .+")
#: A plugin that acts like a busy machine: each step takes longer than the time without a progress
#: line.
BUSY = """
import time
from sm121.plugin import held_output, progress

held_output._SILENT_S = 0.2
progress._LINE_EVERY_S = 0.3


def pytest_collection_modifyitems():
    time.sleep(1.0)
"""


def the_line(run) -> str:
    """Return the only output line of a refused run, ignoring progress lines about a busy
    machine."""
    lines = [line for line in run.output.splitlines() if line.strip()]
    (line,) = [line for line in lines if not GOES_ON.fullmatch(line)]
    return line


@pytest.mark.parametrize(("arguments", "next_step"), REFUSED)
def test_a_refused_request_is_one_line(run_pytest, canary_bf16, arguments, next_step):
    status, run = run_pytest(*arguments)
    assert status == 4 and the_line(run).startswith("ERROR: "), run.output
    assert next_step in the_line(run)


@pytest.mark.slow("two workers")
@pytest.mark.parametrize(("arguments", "next_step"), REFUSED)
def test_a_refused_request_is_the_same_line_with_workers(
    run_pytest, canary_bf16, arguments, next_step
):
    status, run = run_pytest("-n", "2", *arguments)
    assert status == 4 and the_line(run).startswith("ERROR: "), run.output


@pytest.fixture
def busy(tmp_path, monkeypatch) -> tuple[str, ...]:
    """Return the options of a run on a busy machine."""
    (tmp_path / "busy.py").write_text(BUSY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return ("-p", "busy")


def test_a_busy_machine_shows_that_it_goes_on_and_no_header(run_pytest, busy):
    status, run = run_pytest(*busy, "--benchmark-compare=0099")
    assert status == 4 and the_line(run).startswith("ERROR: --benchmark-compare"), run.output
    assert re.search(r"\] collecting the tests for 0:0", run.output), run.output


def test_a_busy_machine_shows_the_header_of_what_runs(run_pytest, busy, fault_server):
    status, run = run_pytest(
        *busy, "--arch", "cpu", *fault_server().options, "tests/test_smoke.py::test_health"
    )
    assert status == 0, run.output
    texts = ("collecting the tests for", "session starts", "collected 1 item", "target: ")
    places = [run.output.index(text) for text in texts]
    assert places == sorted(places) and run.output.count("session starts") == 1


def test_a_busy_machine_shows_on_a_terminal_that_it_goes_on(busy):
    shown = on_a_terminal([*busy, "--base-url", DEAD])
    waited, _, refused = shown.replace("\r\n", "\n").rpartition("\r")
    assert "collecting the tests ..." in waited and "session starts" not in shown, shown
    assert "ERROR: --base-url " in refused and refused.strip().count("\n") <= 1, shown


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("PLAN=",), id="empty"),
        pytest.param(("PLAN=qick",), id="misspelt"),
        pytest.param(("PLAN=", "PYTEST_ARGS=-x"), id="empty-with-arguments"),
    ],
)
def test_make_refuses_a_plan_before_it_makes_the_environment(words):
    # `make test` passes its job server to each make that it starts, which then prints more lines.
    variables = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    for name in ("MFLAGS", "PYTEST_ARGS"):
        variables.pop(name, None)
    done = subprocess.run(
        ["make", "-n", "conformance", *words],
        cwd=ROOT, env=variables, capture_output=True, text=True,
    )  # fmt: skip
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout
    assert f"{words[0]}: expected quick, merge or full" in line


def test_a_run_has_its_header(run_pytest, fault_server):
    """A run prints pytest's header, then the collected tests, and then the levels."""
    status, run = run_pytest(
        "--arch", "cpu", *fault_server().options, "tests/test_smoke.py::test_health"
    )
    assert status == 0, run.output
    places = [run.output.index(text) for text in ("session starts", "collected 1 item", "target: ")]
    assert places == sorted(places) and run.output.count("session starts") == 1


def test_an_internal_error_during_the_collection_is_shown(
    run_pytest, canary_bf16, tmp_path, monkeypatch
):
    plugin = "def pytest_collection_modifyitems(): raise RuntimeError('broken')"
    (tmp_path / "breaks.py").write_text(plugin)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    status, run = run_pytest("-p", "breaks", "tests/test_smoke.py")
    assert status == 3 and "session starts" in run.output and "broken" in run.output


def test_no_check_of_that_name_is_one_line(run_pytest):
    status, run = run_pytest("-k", "nosuch")
    assert status == 5 and run.verdict["verdict"] == "NOT_RUN", run.output
    assert the_line(run).startswith(
        "NOT_RUN: -k 'nosuch': expected the name of a check, got none of "
    )
    assert the_line(run).endswith("List the names: pytest --collect-only -q")


def test_no_check_that_is_left_is_one_line(run_pytest):
    status, run = run_pytest("tests/test_smoke.py", "--deselect", "tests/test_smoke.py")
    assert status == 5 and run.verdict["verdict"] == "NOT_RUN", run.output
    assert the_line(run).startswith(
        "NOT_RUN: --deselect tests/test_smoke.py: expected the name of a check, got none of "
    )


@pytest.mark.parametrize(
    ("command", "next_step"),
    [
        pytest.param(("health", DEAD), "Start the server, or name the address", id="health"),
        pytest.param(("path", "nosuch.log"), "got no file of that name. Save one: ", id="no-log"),
        pytest.param(
            ("path", "/dev/null"), "got something that is not a file. Save one: ", id="device"
        ),
    ],
)
def test_a_command_that_finds_nothing_names_the_next_step(capsys, command, next_step):
    assert cli.main([*command]) in (1, 4)
    printed = "".join(capsys.readouterr())
    assert printed.count("\n") == 1 and next_step in printed, printed


def test_a_healthy_address_that_does_not_answer_names_the_log(capsys):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert cli.main(["health", url, "--within", "0.3"]) == 1
    assert "got none. Read the server's log" in capsys.readouterr().out


def test_a_folder_behind_a_space_is_refused_with_what_to_write(tmp_path):
    """If a folder follows an option after a space, the run is refused with the form to write
    instead.

    pytest takes such a folder for a path of tests, and does not read the suite's pytest.ini."""
    command = [sys.executable, "-m", "pytest", "--arch", "gb10", "--report-dir"]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 4
    assert f"--report-dir {tmp_path}: expected --report-dir={tmp_path}" in done.stderr
    assert "unrecognized" not in done.stderr


# The report of the run before


@pytest.fixture
def clone(tmp_path, warm_pytest):
    """Return a folder with the suite's settings and tests, and with its own report directory."""
    for name in ("pytest.ini", "conftest.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    report = tmp_path / "conformance-report"
    report.mkdir()
    engine = EngineReport(name="vllm", model="m", managed=True)
    earlier = VerdictFile(
        arch="cpu", profile="p", started="", engine=engine, verdict=Verdict.PASS, finished=True
    )
    verdict_file.write(earlier, report / verdict_file.NAME)

    def run(*words: str, **more: str) -> tuple[int, Path]:
        variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | more
        begun = warm_pytest().start(
            ["-p", "no:cacheprovider", *words], tmp_path / "output.txt", variables, folder=tmp_path
        )
        return begun.wait(120.0), report

    return run


def verdict(report: Path) -> str:
    return json.loads((report / "verdict.json").read_text())["verdict"]


@pytest.mark.parametrize(
    "words",
    [pytest.param(("-m", "sm90"), id="no-gpu"), pytest.param(("-k", "nosuch"), id="no-name")],
)
def test_a_run_that_measured_nothing_leaves_the_report_of_one_that_did(clone, words):
    status, report = clone(*words)
    assert (status, verdict(report)) == (5, "PASS")
    assert verdict(report / "not-run") == "NOT_RUN"
    clone(*words)
    assert verdict(report) == "PASS", "again"
    assert not (report / "earlier").exists()


@needs("pytest", "8.4", "it prints the progress of a run without tests")
def test_a_run_without_tests_that_should_be_stored_gives_one_line(clone):
    status, report = clone("-m", "sm90", "--benchmark-autosave")
    lines = (report.parent / "output.txt").read_text().strip().splitlines()
    assert status == 5 and len(lines) == 1 and lines[0].startswith("NOT_RUN: "), lines


def test_a_named_report_directory_is_that_of_its_run(clone):
    """The named report directory contains the verdict of its own run, never an earlier verdict.

    CI reads verdict.json in this directory."""
    status, report = clone("-m", "sm90", "--report-dir=conformance-report")
    assert (status, verdict(report)) == (5, "NOT_RUN")


@pytest.mark.parametrize("given_by", ["PYTEST_ADDOPTS", "pytest.ini"])
def test_a_report_directory_may_be_named_elsewhere_than_on_the_command_line(
    clone, given_by, tmp_path
):
    option = "--report-dir=conformance-report"
    variables = {}
    if given_by == "PYTEST_ADDOPTS":
        variables = {given_by: option}
    else:
        settings = tmp_path / given_by
        settings.write_text(settings.read_text().replace("addopts = ", f"addopts = {option} "))
    status, report = clone("-k", "nosuch", **variables)
    assert (status, verdict(report)) == (5, "NOT_RUN")
    assert [verdict(folder) for folder in (report / "earlier").iterdir()] == ["PASS"]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        pytest.param("", 5, id="no-test"),
        pytest.param("def test_x(:", 2, id="no-collection"),
        pytest.param("def test_x(): pass", 0, id="tests-of-the-project"),
    ],
)
def test_no_earlier_verdict_is_where_a_run_without_tests_names_its_report(
    clone, tmp_path, text, status
):
    (tmp_path / "test_own.py").write_text(text)
    ended, report = clone("test_own.py", PYTEST_ADDOPTS="--report-dir=conformance-report")
    assert ended == status, (tmp_path / "output.txt").read_text()
    assert (report / "verdict.json").exists() == (status == 0)
    if status:
        assert [verdict(folder) for folder in (report / "earlier").iterdir()] == ["PASS"]


@pytest.mark.parametrize(
    ("words", "mark", "status"),
    [
        pytest.param(("-m", "gpu"), "gpu", 5, id="for-a-gpu"),
        pytest.param((), "skip", 0, id="by-the-project"),
    ],
)
def test_no_earlier_verdict_is_where_a_run_of_skipped_tests_names_its_report(
    clone, tmp_path, words, mark, status
):
    (tmp_path / "test_own.py").write_text(
        f"import pytest\n\n@pytest.mark.{mark}\ndef test_x(): pass\n"
    )
    option = "--report-dir=conformance-report"
    ended, report = clone("test_own.py", *words, PYTEST_ADDOPTS=option)
    assert ended == status, (tmp_path / "output.txt").read_text()
    assert not (report / "verdict.json").exists()
    assert [verdict(folder) for folder in (report / "earlier").iterdir()] == ["PASS"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--exam", "pytest.ini"), id="by the opened run"),
        pytest.param(("--matrix", "99"), id="by the collected tests"),
        pytest.param(("-m", "SM121"), id="by the collected levels"),
    ],
)
@pytest.mark.parametrize("place", [(), ("--report-dir=conformance-report",)], ids=["", "named"])
def test_a_refused_request_leaves_the_report_where_it_is(clone, canary_bf16, words, place):
    status, report = clone(*words, *place)
    assert (status, verdict(report)) == (4, "PASS")
    assert not (report / "earlier").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(("--scores", sys.executable), "--scores ", id="wrong"),
        pytest.param((), "another run is using it", id="right"),
    ],
)
def test_a_wrong_request_is_refused_before_a_report_directory_in_use(
    run_pytest, canary_bf16, tmp_path, words, expected
):
    taken = directory.lock_directory(tmp_path / "taken")
    status, run = run_pytest(*words, f"--report-dir={tmp_path / 'taken'}")
    taken.lock.close()
    assert status == 4 and expected in the_line(run), run.output
