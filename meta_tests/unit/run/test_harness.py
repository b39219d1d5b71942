"""The harness of a run whose server is attached."""

from pathlib import Path

from meta_tests.fakes.run_events import new_file
from sm121.core.profile import load
from sm121.run.engine_report import EngineReport
from sm121.run.event_log import EventLog
from sm121.run.harness import Harness
from sm121.run.record import Target


class UnsavedHarness(Harness):
    """A harness that writes no file."""

    @property
    def secrets(self) -> set[str]:
        return set()


class LateLife:
    """A server whose processes become visible after the first look."""

    def __init__(self) -> None:
        self.looks = 0

    @property
    def no_memory(self) -> str | None:
        self.looks += 1
        return "memory of the attached server: no process is seen" if self.looks == 1 else None


def test_the_memory_of_an_attached_server_is_looked_at_once(tmp_path: Path):
    life = LateLife()
    engine = EngineReport(name="vllm", model="m", managed=False)
    harness = UnsavedHarness(
        directory=tmp_path,
        log=EventLog(new_file(engine=engine)),
        say=lambda *_: None,
        target=Target("cpu", load("cpu-tiny-gpt-oss"), None),
        attached_life=life,
    )
    assert harness.no_memory() == "memory of the attached server: no process is seen"
    assert harness.file.unproven == ["memory of the attached server: no process is seen"]
    assert life.looks == 1
