"""Shards, workers and resumed runs are put together by one set of rules: docs/verdicts.md."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from sm121.core.errors import UsageError
from sm121.core.verdict import Verdict, worst
from sm121.evidence.kernel_path import KernelPath
from sm121.measure.box import Reading
from sm121.report import merging
from sm121.run import merge, verdict_file
from sm121.run.ledger import Ledger, stands
from sm121.run.merge import RunDifference
from sm121.run.verdict_file import (
    BoxReport,
    CrashReport,
    EngineReport,
    MemoryReport,
    MetricReport,
    ShardReport,
    ShardTest,
    StartReport,
    TestReport,
    VerdictFile,
)

PLANNED = ("one", "two")
UNSEEN = BoxReport()
FIT = BoxReport(state="QUALIFIED", reason="200 GB/s")
UNTOLD = BoxReport(state="UNKNOWN", reason="the server is attached at another machine")
NO_DEVICE = BoxReport(
    state="UNKNOWN",
    reason="the box was not measured",  # the words decide nothing
    before=Reading(device=None, memory_available_gib=1.0, other_load=0.0, seconds=1.0),
)
BAD = BoxReport(state="DEGRADED", reason="others work here")
LATER = BoxReport(state="A STATE OF A LATER VERSION", reason="")


def said(test_id: str, verdict: str, message: str = "", **more) -> TestReport:
    return TestReport(id=test_id, level="kernel", verdict=verdict, message=message, **more)


def part(index: int = 1, *tests: TestReport, of: int = 2, **more) -> VerdictFile:
    """A shard, or what a worker has written."""
    planned = [ShardTest(id=name, level="kernel") for name in PLANNED]
    fields = {"engine": EngineReport(name="vllm", version="0.32.0", managed=True, model="m"),
              "shard": ShardReport(index=index, of=of, tests=planned),
              "finished": True, **more}  # fmt: skip
    return VerdictFile(arch="cpu", profile="p", started="now", tests=list(tests), **fields)


def of_shards(*parts: VerdictFile) -> VerdictFile:
    return merge.merge_shards({f"shards/{n}": file for n, file in enumerate(parts, 1)})


def of_workers(*parts: VerdictFile) -> VerdictFile:
    """The controller has a copy of the first worker's file as it was when the run began."""
    whole = part()
    merge.merge(whole, Ledger(whole), {f"workers/gw{n}": file for n, file in enumerate(parts)})
    return whole


@pytest.mark.parametrize("together", [of_shards, of_workers])
@pytest.mark.parametrize(
    ("boxes", "state"),
    [
        ((UNSEEN, UNSEEN), "UNKNOWN"),
        ((UNSEEN, FIT), "QUALIFIED"),
        ((FIT, UNTOLD), "UNKNOWN"),
        ((FIT, NO_DEVICE), "UNKNOWN"),
        ((LATER, FIT), "A STATE OF A LATER VERSION"),
        ((UNTOLD, BAD), "DEGRADED"),
        ((BAD, FIT), "DEGRADED"),
        ((UNSEEN, BAD), "DEGRADED"),
    ],
)
def test_a_whole_never_looks_better_than_the_worst_machine_it_was_measured_on(
    together, boxes, state, tmp_path
):
    for order in (boxes, boxes[::-1]):
        parts = []
        for index, box in enumerate(order, 1):  # as they come from a file
            verdict_file.write(part(index, box=box), tmp_path / "verdict.json")
            parts.append(verdict_file.read(tmp_path / "verdict.json"))
        assert together(*parts).box.state == state


def test_a_box_that_nobody_asked_for_is_told_from_one_that_could_not_be_told():
    assert not UNSEEN.looked_at
    assert all(box.looked_at for box in (FIT, UNTOLD, NO_DEVICE, BAD))


def test_one_of_two_decisions_stands():
    skipped = said("t", "NOT_RUN", skipped=True)
    passed, failed, invalid = (said("t", verdict) for verdict in ("PASS", "FAIL", "INVALID"))
    for first, second, standing in (
        (passed, skipped, passed), (skipped, passed, passed),
        (said("t", "NOT_RUN"), passed, passed),
        (passed, failed, failed), (failed, invalid, failed), (invalid, passed, invalid),
        (said("t", "FAIL", "first"), failed, said("t", "FAIL", "first")),
    ):  # fmt: skip
        assert stands(first, second) == standing


def test_shards_decide_what_the_whole_planned_and_what_came_beside():
    left = said("end of the run::server", "FAIL", "left")
    whole = of_shards(
        part(1, said("one", "PASS"), said("two", "NOT_RUN", skipped=True)),
        part(2, said("two", "FAIL", "broken"), left),
    )
    assert [(t.id, t.verdict.value, t.message) for t in whole.tests] == [
        ("one", "PASS", ""), ("two", "FAIL", "broken"), (left.id, "FAIL", "left"),
    ]  # fmt: skip
    assert whole.verdict is Verdict.FAIL and whole.finished and whole.shard is None
    assert whole.reason == "two: broken (and 1 more)"


def test_a_shard_that_is_missing_or_unfinished_is_not_green():
    whole = of_shards(part(1, said("one", "PASS")))
    assert whole.tests[1].message == "its shard is missing (2/2)"
    assert whole.verdict is Verdict.NOT_RUN and not whole.finished
    killed = part(2, said("two", "NOT_RUN", "not reached"), finished=False, reason="killed")
    whole = of_shards(part(1, said("one", "PASS")), killed)
    assert (whole.verdict, whole.reason) == (Verdict.NOT_RUN, "killed")


def test_what_only_a_worker_knows_goes_to_the_whole_and_its_tests_do_not():
    worker = part(
        2,
        said("one", "NOT_RUN", "not reached"),
        said("end of the run::server", "FAIL"),
        metrics={"tg32@d0": MetricReport(value=1.0, unit="tok/s")},
        remarks=["known", "new"],
        starts=[StartReport(configuration="c", key="k", startup_s=1.0, log="server.log")],
        crashes=[CrashReport(kind="oom", summary="s", owner="engine", bundle="crashes/1")],
        environment={"resources": {"samples": 3}},
    )
    whole = part(1, said("one", "FAIL"), remarks=["known"], environment={"resources": None})
    merge.merge(whole, Ledger(whole), {"workers/gw0": worker, "workers/gw1": part()})
    assert [(t.id, t.verdict.value) for t in whole.tests] == [
        ("one", "FAIL"), ("end of the run::server", "FAIL"),
    ]  # fmt: skip
    assert list(whole.metrics) == ["tg32@d0"] and whole.remarks == ["known", "new"]
    assert whole.starts[0].log == "workers/gw0/server.log"
    assert whole.crashes[0].bundle == "workers/gw0/crashes/1"
    assert whole.environment["resources"] == {"samples": 3}
    assert worker.starts[0].log == "server.log", "a part is evidence: it is left as it was"


@pytest.mark.parametrize("together", [of_shards, of_workers])
def test_the_engine_that_proves_its_path_and_the_gravest_memory_are_the_whole_s(together):
    def engine(base_url: str | None, **evidence: str) -> EngineReport:
        return EngineReport(name="vllm", version="0.32.0", managed=True, model="m",
                            base_url=base_url, path=KernelPath(evidence=evidence))  # fmt: skip

    def memory(name: str, verdict: str, samples: int) -> MemoryReport:
        return MemoryReport(file=name, device_memory="", samples=samples, verdict=verdict)

    whole = together(
        part(1, engine=engine("http://served"), memory=memory("a", "PASS", 90)),
        part(2, engine=engine("http://proven", moe="a line"), memory=memory("b", "FAIL", 5)),
        part(3, engine=engine(None), of=3, memory=memory("c", "FAIL", 9)),
    )
    assert whole.engine.base_url == "http://proven"
    assert whole.memory is not None and whole.memory.file.endswith("/c")


def test_in_what_two_runs_differ():
    one = part()
    assert merge.differences(one, part()) == []
    other = part(engine=EngineReport(name="vllm", version="0.33.0", managed=True, model="m"))
    other.arch = "sm121"
    assert merge.differences(one, other) == [
        RunDifference("architecture", "cpu", "sm121"),
        RunDifference("engine's version", "0.32.0", "0.33.0"),
    ]


def test_the_documents_state_the_rankings():
    text = (Path(__file__).parent.parent / "docs" / "verdicts.md").read_text("utf-8")
    verdicts = ["FAIL", "INVALID", "INCONCLUSIVE", "NOT_RUN", "PASS"]
    assert f"\n{', '.join(verdicts)}\n" in text
    for worse, better in pairwise(verdicts):
        assert worst([Verdict(better), Verdict(worse)]) is Verdict(worse)
    states = ["DEGRADED", "UNKNOWN", "QUALIFIED"]
    assert f"\n{', '.join(states)}\n" in text
    boxes = [BoxReport(state=state, reason="seen") for state in reversed(states)]
    assert [merge.worst_box(boxes[:n]).state for n in (1, 2, 3)] == states[::-1]


def test_only_shards_of_one_run_are_merged(tmp_path):
    def wrote(name: str, file: VerdictFile) -> Path:
        (tmp_path / name).mkdir()
        verdict_file.write(file, tmp_path / name / "verdict.json")
        return tmp_path / name

    one, two = wrote("one", part(1)), wrote("two", part(2))
    assert [shard.part.index for shard in merging.read([two, one])] == [1, 2]
    other = part(2)
    other.profile = "q"
    fewer = part(2)
    assert fewer.shard is not None
    fewer.shard.tests.pop()
    for name, file, message in (
        ("other", other, "another profile than"),
        ("fewer", fewer, "another list of tests than"),
        ("three", part(2, of=3), "another number of shards than"),
        ("again", part(1), "shard 1 is there twice"),
        ("whole", part(shard=None), "expected the report of a run with --shard"),
    ):
        with pytest.raises(UsageError, match=message):
            merging.read([one, wrote(name, file)])
