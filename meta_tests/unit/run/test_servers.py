"""The servers of a run, of which one is attached."""

from pathlib import Path
from unittest import mock

import pytest

from meta_tests.fakes.run_events import new_file
from sm121.core.profile import load
from sm121.core.verdict import Verdict
from sm121.engines.life import Dead
from sm121.evidence.failure import Cause
from sm121.run import unknown_memory
from sm121.run.engine_report import EngineReport
from sm121.run.event_log import EventLog
from sm121.run.record import RunRecord, Target
from sm121.run.run import Run


class LateLife:
    """A server whose processes become visible only after the first reading."""

    def __init__(self) -> None:
        self.looks = 0

    @property
    def no_memory(self) -> str | None:
        self.looks += 1
        return "memory of the attached server: no process is seen" if self.looks == 1 else None


class DeadLife:
    """An attached server that has ended."""

    accounted = False

    def __init__(self, *, replaced: bool) -> None:
        self.looks = 0
        cause = Cause(kind="engine_dead", summary="it no longer answers", owner="its owner")
        self.dead = Dead("it ended", cause, 0.0, None, detail="it ended", replaced=replaced)

    def state(self, *, asked_within_s: float = 0.0) -> Dead:
        del asked_within_s
        self.looks += 1
        return self.dead

    def account(self) -> None:
        self.accounted = True


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run with the canary's profile and an attached server."""
    engine = EngineReport(name="vllm", model="m", managed=False)
    log = EventLog(new_file(engine=engine))
    record = RunRecord(directory=tmp_path, log=log, say=lambda *_: None)
    return Run.of(Target("cpu", load("cpu-tiny-gpt-oss"), None), record)


@pytest.mark.parametrize("replaced", [False, True], ids=["gone", "another process answers"])
def test_no_test_waits_for_an_attached_server_that_is_gone(run, replaced):
    life = DeadLife(replaced=replaced)
    run.servers.begin(mock.Mock(), life=life)
    run.servers.look()
    run.servers.look()
    if replaced:
        assert run.record.halted is None and life.looks == 2
    else:
        assert run.record.halted == (
            "the attached server no longer answers, and the suite cannot restart it"
        )
        assert life.looks == 1
    assert [test.verdict for test in run.record.file.tests] == [Verdict.FAIL]


def test_an_interrupted_run_does_not_wait_for_a_hanging_attached_server(run):
    life = DeadLife(replaced=False)
    run.servers.begin(mock.Mock(), life=life)
    run.servers.interrupted = True
    run.servers.look()
    assert life.looks == 0


def test_the_memory_of_an_attached_server_is_looked_at_once(run):
    life = LateLife()
    run.servers.begin(mock.Mock(), life=life)
    assert unknown_memory.reason(run) == "memory of the attached server: no process is seen"
    assert run.record.file.unproven == ["memory of the attached server: no process is seen"]
    assert life.looks == 1
