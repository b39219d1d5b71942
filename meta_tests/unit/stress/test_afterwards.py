"""The memory check after the loads, if samples are missing or show no process."""

from types import SimpleNamespace

import pytest

from sm121.core.verdict import Inconclusive, NotRun
from sm121.stress import afterwards


@pytest.fixture
def check(monkeypatch):
    """Return a function that checks the memory after a load, and the number of repeated loads."""
    monkeypatch.setattr(afterwards.memory, "write_memory", lambda *_: None)
    life = SimpleNamespace(no_memory="the server's processes are not on this machine")
    run = SimpleNamespace(
        record=SimpleNamespace(unproven=lambda _: None),
        servers=SimpleNamespace(attached_life=life),
    )
    repeated = []

    def checked(samples_of_a_load: list[object]) -> None:
        samples: list[object] = []
        timeline = SimpleNamespace(
            samples=samples,
            since=lambda index: [one for one in samples[index:] if one.processes],
        )

        def load() -> None:
            repeated.append(True)
            samples.extend(samples_of_a_load)

        after = afterwards.Afterwards(
            run, None, timeline, None, read_throughput=lambda: None, repeat_load=load
        )
        after.begin_steady_part()
        after.check_memory()

    return checked, repeated


def test_a_load_without_a_sample_is_repeated_and_then_undecided(check):
    checked, repeated = check
    with pytest.raises(Inconclusive, match="no sample of the server's memory"):
        checked([])
    assert len(repeated) == afterwards._MEMORY_ROUNDS - 1


def test_samples_without_a_process_are_not_run(check):
    checked, repeated = check
    with pytest.raises(NotRun, match="not on this machine"):
        checked([SimpleNamespace(processes=0)])
    assert len(repeated) == 1
