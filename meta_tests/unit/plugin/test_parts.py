"""A worker that does not end its part is a failure, even if its tests passed."""

from types import SimpleNamespace

import pytest

from sm121.core.verdict import Verdict
from sm121.plugin import parts
from sm121.run.shard_report import ShardReport, ShardTest
from sm121.run.verdict_file import EngineReport, TestReport, VerdictFile

TEST = "tests/test_smoke.py::test_health"


def part(*, finished: bool) -> VerdictFile:
    """Return the result that a worker wrote. Its test passed."""
    test = ShardTest(id=TEST, level="smoke")
    engine = EngineReport(name="vllm", model="m", managed=True)
    return VerdictFile(
        arch="cpu", profile="p", started="", engine=engine, finished=finished,
        shard=ShardReport(index=1, of=2, tests=[test]),
    )  # fmt: skip


def deaths(finished: bool, killers: dict[str, str]) -> list[TestReport]:
    config = SimpleNamespace(stash={parts._KILLERS: killers})
    files = {"gw0": part(finished=finished), "gw1": part(finished=True)}
    return parts._deaths(config, files)


def test_a_worker_that_dies_beside_its_tests_has_failed():
    (end,) = deaths(False, {})
    assert end.id == "end of the run::worker gw0" and end.verdict is Verdict.FAIL
    assert "gw0: expected the worker to end its part" in end.message


def test_a_worker_that_dies_in_a_test_fails_that_test_alone():
    (killed,) = deaths(False, {TEST: "worker 'gw0' crashed while running it"})
    assert killed.id == TEST and killed.verdict is Verdict.FAIL
    assert "crashed while running" in killed.message


@pytest.mark.parametrize("killers", [{}, {"meta_tests/test_foreign.py::test_x": "crashed"}])
def test_workers_that_end_have_no_death(killers):
    assert deaths(True, killers) == []
