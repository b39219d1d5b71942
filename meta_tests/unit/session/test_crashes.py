"""The report of a crash contains the same cause in all places."""

import re
import sys
import time
from signal import SIGKILL, SIGSEGV
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from meta_tests.fakes.fault_engine import FaultEngine
from meta_tests.folders import FAKES
from sm121.core.configuration import ServerConfiguration
from sm121.engines.life import Dead, ManagedLife
from sm121.engines.managed import ManagedServer
from sm121.engines.starting import StartLimits
from sm121.evidence.failure import Cause
from sm121.session.crashes import CrashDesk


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        pytest.param(SIGKILL, "killed", id="killed"),
        pytest.param(SIGSEGV, "engine_dead", id="segv", marks=pytest.mark.slow("another signal")),
    ],
)
def test_message_crash_and_bundle_name_the_same_cause(run_pytest, canary_bf16, number, kind):
    """The test's message, the crash and its bundle name the same cause.

    The log has no cause, but the exit code and the kernel's messages have one. Before, only the
    line of the crash used them, and the test's message named the OOM killer.
    """
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


def test_the_cause_of_a_death_is_in_the_log_when_the_process_has_ended(tmp_path):
    """The cause of a crash is read from the log again after the process has ended.

    The crash was noticed at /health, some seconds before the last lines of the log."""
    configuration = ServerConfiguration("x", "vllm", sys.executable, "none", "canary")
    managed = ManagedServer(configuration, FaultEngine(), StartLimits(30, 30, 5), tmp_path, "run")
    managed.start()
    vague = Cause(kind="engine_dead", summary="the engine is dead", owner="the engine")
    noticed = Dead("it answers 503", vague, time.monotonic(), managed.launch.log)
    pool = SimpleNamespace(latest=managed, start_spans=[])
    life = ManagedLife(managed)
    servers = Mock(pool=pool, life=life, attached=None, aborted=None, sampler=None)
    record = Mock(directory=tmp_path, secrets=set(), redact=str)
    record.file.engine.version = None
    settings = Mock(attached=None)
    settings.engine.debug = False
    with managed.launch.log.open("a") as log:
        log.write("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 61.86 GiB.\n")
    managed.launch.engine_processes()[0].kill()
    try:
        cause = CrashDesk(record, settings).after_crash(servers, noticed, None)
    finally:
        managed.stop()
    assert cause.kind == "oom", cause
