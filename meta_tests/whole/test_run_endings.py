"""After any end of a run, nothing remains: no process, zombie, port or memory.

The tests use the real vLLM with its process tree; `scripted_sessions.py` starts a scripted engine.
"""

import os
import re
import tempfile
import time
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from meta_tests.faults import stress_faults
from sm121.engines import ports
from sm121.engines.memory import Memory

SCENARIOS = "meta_tests/whole/scenarios/endings.py"
GIB = 1 << 30
pytestmark = pytest.mark.slow("a start of vLLM each; test_fault_catalogue.py kills one")


@pytest.fixture
def short_folder():
    """A folder for temporary files with a short path, because pytest's own paths are too long for
    vLLM's sockets."""
    with tempfile.TemporaryDirectory(prefix="meta-") as folder:
        yield Path(folder)


@pytest.fixture
def start(start_pytest, canary_bf16, short_folder):
    """Start a scenario. Return the run and the memory that was available before."""

    def begin(scenario: str):
        memory = Memory.now()
        segments = stress_faults.segments()
        run = start_pytest(
            "--arch", "cpu", f"{SCENARIOS}::{scenario}", environment={"TMPDIR": str(short_folder)}
        )
        run.segments_before = segments
        run.temporary = short_folder
        run.wait_for("ready after", 240.0)
        return run, memory

    return begin


def check_nothing_left(run, memory_before: Memory) -> None:
    # The tree has at least pytest, the supervisor, the API server, the resource tracker, the engine
    # core and a worker
    assert len(run.processes) >= 6, f"the tree was seen while it lived: {run.processes}"
    processes = run.left()
    assert not processes, f"expected no process, got {processes}"
    port = int(re.findall(r"ready after .* on port (\d+)", run.output)[0])
    assert ports.is_free(port), f"expected a free port {port}"
    segments = stress_faults.segments() - run.segments_before
    assert not segments, f"expected no shared memory, got {segments}"
    assert not list(run.temporary.glob("sm121-*")), "expected no temporary files of the server"
    lost = memory_before.returned(Memory.now()).missing_bytes
    assert not lost, f"expected all memory free again, missing {lost / GIB:.1f} GiB"


@pytest.mark.parametrize(
    ("scenario", "status", "verdict"),
    [
        ("test_passes", 0, "PASS"),
        ("test_fails", 1, "FAIL"),
    ],
)
def test_a_run_that_ends_by_itself(start, scenario, status, verdict):
    run, memory = start(scenario)
    assert run.wait() == status, run.output
    assert run.verdict["verdict"] == verdict
    check_nothing_left(run, memory)


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        pytest.param((SIGINT,), 2, id="signal.SIGINT, 2"),
        pytest.param((SIGTERM,), 2, id="signal.SIGTERM, 2"),
        # a second Ctrl-C does not interrupt the stop
        pytest.param(
            (SIGINT, SIGINT, SIGINT), 2, id="signal.SIGINT signal.SIGINT signal.SIGINT, 2"
        ),
        pytest.param((SIGKILL,), -9, id="signal.SIGKILL, -9"),
    ],
)
def test_a_run_that_is_ended(start, signals, status):
    run, memory = start("test_waits")
    for number in signals:
        os.kill(run.process.pid, number)
        time.sleep(0.05)
    assert run.wait() == status, run.output
    assert run.verdict["verdict"] == "NOT_RUN" and not run.verdict["finished"], run.verdict
    check_nothing_left(run, memory)


@pytest.mark.parametrize(
    ("scenario", "seen"),
    [
        ("test_api_server_dies", "status -9"),
        ("test_engine_core_dies", "Cause: killed: VLLM::EngineCore"),
    ],
)
def test_a_server_that_dies(start, scenario, seen):
    run, memory = start(scenario)
    assert run.wait() == 1, run.output
    (test,) = run.verdict["tests"]
    assert test["verdict"] == "FAIL" and seen in test["message"], test
    check_nothing_left(run, memory)
