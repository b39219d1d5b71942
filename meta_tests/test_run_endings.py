"""However a run ends, nothing of it stays: no process, no zombie, no port, no memory.

With the real vLLM and its real process tree: supervisor, API server, engine core, worker.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from sm121.engines import ports

SCENARIOS = "meta_tests/scenarios/endings.py"
GIB = 1 << 30


@pytest.fixture
def start(start_pytest, canary_bf16, tmp_path):
    """Start a scenario; returns the run and what memory was available before."""

    def begin(scenario: str):
        available = psutil.virtual_memory().available
        segments = {path.name for path in Path("/dev/shm").glob("psm_*")}
        run = start_pytest(
            "--arch", "cpu", f"{SCENARIOS}::{scenario}", environment={"TMPDIR": str(tmp_path)}
        )
        run.segments_before, run.temporary = segments, tmp_path
        run.wait_for("ready after", 240.0)
        return run, available

    return begin


def check_nothing_left(run, available_before: int) -> None:
    # pytest, supervisor, API server, resource tracker, engine core, worker
    assert len(run.seen) >= 6, f"the tree was seen while it lived: {run.seen}"
    left = run.left()
    assert not left, f"required: no process, seen: {left}"
    port = int(re.findall(r"ready after .* on port (\d+)", run.output)[0])
    assert ports.is_free(port), f"required: port {port} is free"
    segments = {path.name for path in Path("/dev/shm").glob("psm_*")}
    assert not segments - run.segments_before, f"required: no segment, seen: {segments}"
    assert not list(run.temporary.glob("sm121-*")), "required: no temporary files of the server"
    lost = available_before - psutil.virtual_memory().available
    assert lost < 1.5 * GIB, f"required: the memory is back, missing {lost / GIB:.1f} GiB"


def test_a_run_that_passes(start):
    run, available = start("test_passes")
    assert run.wait() == 0, run.output
    assert run.verdict["verdict"] == "PASS"
    check_nothing_left(run, available)


def test_a_run_that_fails(start):
    run, available = start("test_fails")
    assert run.wait() == 1, run.output
    assert run.verdict["verdict"] == "FAIL"
    check_nothing_left(run, available)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted(start, number):
    run, available = start("test_waits")
    os.kill(run.process.pid, number)
    assert run.wait() == 2, run.output
    verdict = run.verdict
    assert verdict["verdict"] == "NOT_RUN" and not verdict["finished"], verdict
    check_nothing_left(run, available)


def test_a_second_ctrl_c_breaks_nothing_off(start):
    run, available = start("test_waits")
    for _ in range(3):
        os.kill(run.process.pid, signal.SIGINT)
        time.sleep(0.05)
    assert run.wait() == 2, run.output
    verdict = run.verdict
    assert verdict["verdict"] == "NOT_RUN" and not verdict["finished"], verdict
    check_nothing_left(run, available)


def test_a_run_that_is_killed(start):
    run, available = start("test_waits")
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    verdict = run.verdict
    assert verdict["verdict"] == "NOT_RUN" and not verdict["finished"], verdict
    check_nothing_left(run, available)


@pytest.mark.parametrize(
    ("scenario", "seen"),
    [("test_api_server_dies", "status -9"), ("test_engine_core_dies", "engine_dead")],
)
def test_a_server_that_dies(start, scenario, seen):
    run, available = start(scenario)
    assert run.wait() == 1, run.output
    (test,) = run.verdict["tests"]
    assert test["verdict"] == "FAIL" and seen in test["message"], test
    check_nothing_left(run, available)
