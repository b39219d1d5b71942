"""The servers of a run, of which one is attached."""

from pathlib import Path
from unittest import mock

from meta_tests.fakes.run_events import new_file
from sm121.core.profile import load
from sm121.run import unknown_memory
from sm121.run.engine_report import EngineReport
from sm121.run.event_log import EventLog
from sm121.run.record import RunRecord, Target
from sm121.run.run import Run


class LateLife:
    """A server whose processes become visible after the first reading."""

    def __init__(self) -> None:
        self.looks = 0

    @property
    def no_memory(self) -> str | None:
        self.looks += 1
        return "memory of the attached server: no process is seen" if self.looks == 1 else None


def test_the_memory_of_an_attached_server_is_looked_at_once(tmp_path: Path):
    life = LateLife()
    engine = EngineReport(name="vllm", model="m", managed=False)
    log = EventLog(new_file(engine=engine))
    record = RunRecord(directory=tmp_path, log=log, say=lambda *_: None)
    run = Run.of(Target("cpu", load("cpu-tiny-gpt-oss"), None), record)
    run.servers.begin(mock.Mock(), life=life)
    assert unknown_memory.reason(run) == "memory of the attached server: no process is seen"
    assert record.file.unproven == ["memory of the attached server: no process is seen"]
    assert life.looks == 1
