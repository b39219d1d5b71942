"""The files and the output of a whole run, the command that repeats a test, and --collect-only."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from meta_tests.folders import ROOT
from sm121.cli import main
from sm121.run import details

SCENARIOS = "meta_tests/whole/scenarios/verdicts.py"


def test_a_run_writes_everything(run_pytest, fault_server, tmp_path):
    """A run writes all files of the report, adds its summary to that of the GitHub job, and prints
    the closing lines.

    None of them contains the server's key."""
    server = fault_server()
    step = tmp_path / "step.md"
    step.write_text("before\n")
    status, run = run_pytest(
        *("--arch", "cpu", *server.options), f"{SCENARIOS}::test_pass", f"{SCENARIOS}::test_fail",
        f"{SCENARIOS}::test_skipped", environment={"GITHUB_STEP_SUMMARY": str(step)},
    )  # fmt: skip
    assert status == 1
    for name in ("verdict.json", "summary.md", "junit.xml", "details.json", "report.html"):
        text = (run.report / name).read_text()
        assert text and server.key not in text, name
    assert step.read_text().startswith("before\n# SM121 conformance: FAIL")
    closing = run.output[run.output.index("= sm121 conformance =") :]
    assert len(closing.splitlines()) < 24, "the first failure is read without scrolling"
    for part in ("got a secret [redacted]", "run again: python -m pytest", "report.html"):
        assert part in closing
    (failure,) = details.read_details(run.report).failures
    assert failure.id == f"{SCENARIOS}::test_fail"
    assert failure.location.startswith(f"{SCENARIOS}:")
    # If a report is written again from the files, it must be equal.
    before = (run.report / "report.html").read_text()
    assert main(["report", str(run.report)]) == 0
    assert (run.report / "report.html").read_text() == before


def test_the_command_that_runs_one_test_again(run_pytest, fault_server):
    server = fault_server()
    words = ("-m", "correctness", "-k", "fail or pass", "-q")
    test = f"{SCENARIOS}::test_fail"
    _, run = run_pytest("--arch", "cpu", *server.options, *words, "--engine=openai", test)
    (failure,) = details.read_details(run.report).failures
    assert f"pytest {test}" in failure.reproduce
    assert failure.reproduce.count(SCENARIOS) == 1
    assert "--base-url" in failure.reproduce and "--report-dir" not in failure.reproduce
    assert "-k" not in failure.reproduce.split() and server.key not in failure.reproduce


@pytest.mark.slow("two runs in new interpreters")
def test_the_command_runs_from_where_the_run_was_started(tmp_path, fault_server):
    """The printed command repeats a test in the folder from which the run was started.

    The run is a shard that was started in another checkout."""
    server = fault_server(key="")
    (tmp_path / "here").mkdir()
    shutil.copy(ROOT / SCENARIOS, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p sm121.plugin\n")

    def run(*command, report):
        return subprocess.run(
            [sys.executable, *command, f"--report-dir={tmp_path / report}"],
            cwd=tmp_path / "here", capture_output=True, text=True,
        )  # fmt: skip

    first = run(
        *("-m", "pytest", "-p", "no:cacheprovider", "../verdicts.py", "-k", "fail", "-vv"),
        *("--arch", "cpu", "--base-url", server.base_url),
        *("--shard", "1/1"),
        report="first",
    )  # fmt: skip
    assert first.returncode == 1, first.stdout + first.stderr
    (failure,) = details.read_details(tmp_path / "first").failures
    command = shlex.split(failure.reproduce)
    assert command[:4] == ["python", "-m", "pytest", "../verdicts.py::test_fail"], first.stdout
    assert not {"--shard", "1/1", "-vv", "-k"} & set(command)
    again = run(*command[1:], report="again")
    assert "1 failed" in again.stdout, again.stdout + again.stderr


def test_collect_only_lists_runnable_tests_and_reasons_for_the_rest(run_pytest):
    status, run = run_pytest("--collect-only", "-q", "--arch", "cpu", SCENARIOS)
    assert status == 0 and not (run.report / "verdict.json").exists()
    assert "would run: 9 checks (correctness 9)" in run.output
    assert "because: applies to sm121; the target is cpu" in run.output


def test_collect_only_promises_no_numerics_beside_an_attached_server(run_pytest, fault_server):
    arguments = ("--arch", "sm121", *fault_server().options,
                 "--served-model-name", "canary", "tests/test_kernel.py")  # fmt: skip
    _, run = run_pytest("--collect-only", "-q", *arguments)
    promised = int(re.search(r"would run: (\d+) checks", run.output)[1])
    assert "because: kernels are tested on the machine with the engine" in run.output
    _, named = run_pytest("--collect-only", "-q", *arguments, "--kernel-provider", "torch")
    assert int(re.search(r"would run: (\d+) checks", named.output)[1]) > promised + 50
