"""The report of a crash contains the same cause in all places."""

import re
import sys
from signal import SIGKILL, SIGSEGV

import pytest

from meta_tests.folders import FAKES


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        pytest.param(SIGKILL, "killed", id="killed"),
        pytest.param(SIGSEGV, "engine_dead", id="segv", marks=pytest.mark.slow("another signal")),
    ],
)
def test_message_crash_and_bundle_name_the_same_cause(run_pytest, canary_bf16, number, kind):
    """The log has no cause, but the exit code and the kernel's messages have one.

    Before, only the line of the crash used them, and the test's message named the OOM killer."""
    environment = {
        "SM121_META_PYTHON": sys.executable,
        "SM121_META_SERVER": "killed_start.py",
        "SM121_META_SIGNAL": str(int(number)),
    }
    python = FAKES / "fake_python.py"
    arguments = ("--arch", "cpu", "--engine-python", str(python), "tests/test_smoke.py")
    status, run = run_pytest(*arguments, environment=environment)
    assert status == 1, run.output
    assert {crash["kind"] for crash in run.verdict["crashes"]} == {kind}
    by_verdict: dict[str, set[str]] = {"FAIL": set(), "NOT_RUN": set()}
    for test in run.verdict["tests"]:
        by_verdict.setdefault(test["verdict"], set()).add(test["message"])
    starts = by_verdict["FAIL"]
    assert len(starts) == 2 and all(f" Cause: {kind}: " in message for message in starts), starts
    refused = by_verdict["NOT_RUN"]
    assert refused and all(f"did not start: {kind}, see" in message for message in refused)
    # Long messages are shortened in summary.md, so it is not read.
    for name in ("verdict.json", "junit.xml", "report.html"):
        causes = {*re.findall(r"Cause: (\w+):", (run.report / name).read_text("utf-8"))}
        assert causes == {kind}, name
