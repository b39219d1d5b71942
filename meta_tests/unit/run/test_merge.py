"""Shards and workers of a run are merged by one set of rules: docs/verdicts.md."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from meta_tests.folders import ROOT
from sm121.core.errors import UsageError
from sm121.core.server import UNRECOGNISED
from sm121.core.verdict import Verdict, worst
from sm121.engines.pool import StartReport
from sm121.evidence import environment_record
from sm121.evidence.kernel_path import KernelPath
from sm121.machine.box import Reading
from sm121.report import merging
from sm121.run import merge, verdict_file
from sm121.run.fingerprint import Fingerprint, FingerprintDifference
from sm121.run.ledger import Ledger, stands
from sm121.run.machine_report import BoxReport, CrashReport, MemoryReport
from sm121.run.shard_report import ShardReport, ShardTest
from sm121.run.verdict_file import (
    AgainstReport,
    EngineReport,
    MetricReport,
    TestReport,
    VerdictFile,
)
from sm121.session import fingerprinting

PLANNED = ("one", "two")
BOXES = {
    name: BoxReport(**row)
    for name, row in {
        "unseen": {},
        "fit": {"state": "QUALIFIED", "reason": "200 GB/s"},
        "untold": {"state": "UNKNOWN", "reason": "the server is attached at another machine"},
        "bad": {"state": "DEGRADED", "reason": "other processes are working"},
        "later": {"state": "A STATE OF A LATER VERSION", "reason": ""},
        "no device": {"state": "UNKNOWN", "reason": "the machine was not measured"},
    }.items()
}
BOXES["no device"].before = Reading(
    device=None, memory_available_gib=1.0, other_load=0.0, seconds=1.0
)


def said(test_id: str, verdict: str, message: str = "", **more) -> TestReport:
    return TestReport(id=test_id, level="kernel", verdict=verdict, message=message, **more)


def part(index: int = 1, *tests: TestReport, of: int = 2, **more) -> VerdictFile:
    """Return a shard, or the file of a worker."""
    planned = [ShardTest(id=name, level="kernel") for name in PLANNED]
    fields = {"engine": EngineReport(name="vllm", version="0.32.0", managed=True, model="m"),
              "shard": ShardReport(index=index, of=of, tests=planned),
              "started": "now", "finished": True, **more}  # fmt: skip
    return VerdictFile(arch="cpu", profile="p", tests=list(tests), **fields)


def of_shards(*parts: VerdictFile) -> VerdictFile:
    return merge.merge_shards({f"shards/{n}": file for n, file in enumerate(parts, 1)})


@pytest.mark.parametrize(
    ("boxes", "state"),
    [
        pytest.param(("unseen", "unseen"), "UNKNOWN", id="unseen unseen, UNKNOWN"),
        pytest.param(("unseen", "fit"), "QUALIFIED", id="unseen fit, QUALIFIED"),
        pytest.param(("fit", "untold"), "UNKNOWN", id="fit untold, UNKNOWN"),
        pytest.param(("fit", "no device"), "UNKNOWN", id="fit no device, UNKNOWN"),
        pytest.param(
            ("later", "fit"),
            "A STATE OF A LATER VERSION",
            id="later fit, A STATE OF A LATER VERSION",
        ),
        pytest.param(("untold", "bad"), "DEGRADED", id="untold bad, DEGRADED"),
        pytest.param(("bad", "fit"), "DEGRADED", id="bad fit, DEGRADED"),
        pytest.param(("unseen", "bad"), "DEGRADED", id="unseen bad, DEGRADED"),
    ],
)
def test_the_merged_box_has_the_worst_state_of_its_parts(boxes, state, tmp_path):
    for order in (boxes, boxes[::-1]):
        parts = []
        for index, name in enumerate(order, 1):  # each part is read from a file
            verdict_file.write(part(index, box=BOXES[name]), tmp_path / "verdict.json")
            parts.append(verdict_file.read(tmp_path / "verdict.json"))
        assert of_shards(*parts).box.state == state


def test_an_unread_box_differs_from_an_unknown_box():
    looked_at = {name for name, box in BOXES.items() if box.looked_at}
    assert looked_at - {"later"} == {"fit", "untold", "no device", "bad"}


def test_one_of_two_decisions_stands():
    skipped = said("t", "NOT_RUN", skipped=True)
    left_open = said("t", "NOT_RUN")
    passed, failed, invalid = (said("t", verdict) for verdict in ("PASS", "FAIL", "INVALID"))
    first_failed = said("t", "FAIL", "first")
    waived = said("t", "FAIL", "known", waived=True)
    new = said("t", "FAIL", "new")
    for first, second, standing in (
        (passed, skipped, passed), (skipped, passed, passed), (left_open, passed, passed),
        (passed, failed, failed), (failed, invalid, failed), (invalid, passed, invalid),
        (first_failed, failed, first_failed), (waived, new, new), (new, waived, new),
    ):  # fmt: skip
        assert stands(first, second) == standing
    assert said("t", "INVALID", waived=True).counted is Verdict.INVALID


def test_shards_decide_what_the_whole_planned_and_one_that_is_missing_is_not_green():
    beside = said("end of the run::server", "FAIL", "left")
    whole = of_shards(
        part(1, said("one", "PASS"), said("two", "NOT_RUN", skipped=True)),
        part(2, said("two", "FAIL", "broken"), beside),
    )
    assert whole.tests == [said("one", "PASS"), said("two", "FAIL", "broken"), beside]
    assert whole.verdict is Verdict.FAIL and whole.finished and whole.shard is None
    assert whole.reason == "two: broken (and 1 more)"
    whole = of_shards(part(1, said("one", "PASS")))
    assert whole.tests[1].message == "its shard is missing (2/2)"
    assert whole.verdict is Verdict.NOT_RUN and not whole.finished
    killed = part(2, said("two", "NOT_RUN", "not reached"), finished=False, reason="killed")
    whole = of_shards(part(1, said("one", "PASS")), killed)
    assert (whole.verdict, whole.reason) == (Verdict.NOT_RUN, "killed")


def test_speed_and_accuracy_of_two_shards_are_compared_together():
    """The merged run compares the rate of one shard and the rounding cost of the other one
    together."""

    def measured(index: int, name: str, unit: str, before: float, now: float) -> VerdictFile:
        def metric(value: float) -> MetricReport:
            return MetricReport(value=value, unit=unit, rounds=1, verdict="PASS")

        against = AgainstReport(
            run="the run of today", engine="vllm", no_worse=True, measured={name: metric(before)}
        )
        made = part(index, said(("one", "two")[index - 1], "PASS"), against=against)
        made.metrics[name] = metric(now)
        return made

    parts = (
        measured(1, "tg32@d0", "tok/s", 30.0, 60.0),
        measured(2, "price_kl", "nats", 0.01, 0.02),
    )
    whole = of_shards(*parts)
    told = "2 times as fast (tg32@d0 30 → 60 tok/s), at a price: price_kl 0.01 → 0.02 nats"
    assert whole.against is not None and whole.against.trade == told
    assert told in whole.reason


def test_shards_are_held_against_one_trusted_run_of_shards():
    """Merged shards are compared with a trusted run that also had shards.

    A shard leaves levels to the other shards. A level that no shard has selected was not selected.
    """
    trusted = AgainstReport(run="the run of today", engine="vllm", no_worse=True)
    first = trusted.model_copy(update={"known": ["one"], "not_asked": ["stress", "matrix"]})
    second = trusted.model_copy(update={"known": ["two"], "not_asked": ["matrix", "kernel"]})
    second.rates_not_judged = "the machine was DEGRADED"
    one = part(1, said("one", "PASS"), against=first)
    whole = of_shards(one, part(2, said("two", "PASS"), against=second))
    assert whole.against is not None and whole.against.no_worse
    assert whole.against.known == ["one", "two"] and whole.against.not_asked == ["matrix"]
    assert "(rates not judged: the machine was DEGRADED)" in whole.reason
    assert "not worse than the run of today" in whole.reason, whole.reason
    worse = second.model_copy(update={"no_worse": False, "new": ["two"]})
    whole = of_shards(one, part(2, said("two", "FAIL"), against=worse))
    assert whole.against is not None and not whole.against.no_worse
    assert whole.verdict is Verdict.FAIL and whole.against.new == ["two"]
    assert of_shards(part(1, said("one", "PASS")), part(2, said("two", "PASS"))).against is None


def test_facts_of_a_worker_are_merged_without_its_unreached_tests():
    worker = part(
        2, said("one", "NOT_RUN", "not reached"), said("end of the run::server", "FAIL"),
        metrics={"tg32@d0": MetricReport(value=1.0, unit="tok/s")}, remarks=["known", "new"],
        starts=[StartReport(configuration="c", key="k", startup_s=1.0, log="server.log")],
        crashes=[CrashReport(kind="oom", summary="s", owner="engine", bundle="crashes/1")],
        environment={"resources": {"samples": 3}},
    )  # fmt: skip
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


def test_the_engine_that_proves_its_path_and_the_gravest_memory_are_the_whole_s():
    def engine(base_url: str | None, **evidence: str) -> EngineReport:
        return EngineReport(name="vllm", version="0.32.0", managed=True, model="m",
                            base_url=base_url, path=KernelPath(evidence=evidence))  # fmt: skip

    def memory(name: str, verdict: str, samples: int) -> MemoryReport:
        return MemoryReport(file=name, device_memory="", samples=samples, verdict=verdict)

    whole = of_shards(
        part(1, engine=engine("http://served"), memory=memory("a", "PASS", 90)),
        part(2, engine=engine("http://proven", moe="a line"), memory=memory("b", "FAIL", 5)),
        part(3, engine=engine(None), of=3, memory=memory("c", "FAIL", 9)),
    )
    assert whole.engine.base_url == "http://proven"
    assert whole.memory is not None and whole.memory.file.endswith("/c")


def test_in_what_two_runs_differ():
    """Two parts of a run do not differ if one of them does not know the version of the server.

    A part that sent no request to the server does not know it."""
    one = part()
    other = part()
    assert merge.differences(one, other) == []
    other.engine.version = None
    assert merge.differences(one, other) == merge.differences(other, one) == []
    name, other.engine.name = other.engine.name, UNRECOGNISED
    assert merge.differences(one, other) == merge.differences(other, one) == []
    other.engine.name = name
    other.engine.version = "0.33.0"
    other.arch = "sm121"
    assert merge.differences(one, other) == [
        FingerprintDifference("architecture", "cpu", "sm121"),
        FingerprintDifference("engine's version", "0.32.0", "0.33.0"),
    ]


ASKED = Fingerprint(profile="1", provider="torch", model="m1", arguments=["--a"],
                    options={"--rounds": "5"}, machine={"gpu": "GB10"})  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        pytest.param({"profile": "2"}, "profile's digest", id="profile 2, profile's digest"),
        pytest.param({"waivers": "w"}, "waivers", id="waivers w, waivers"),
        pytest.param({"axes": "a"}, "axes of the matrix", id="axes a, axes of the matrix"),
        pytest.param(
            {"provider": "flashinfer"}, "kernel provider", id="provider flashinfer, kernel provider"
        ),
        pytest.param(
            {"options": {"--rounds": "9"}},
            "option --rounds",
            id="options --rounds 9, option --rounds",
        ),
        pytest.param({"options": {}}, "option --rounds", id="options, option --rounds"),
        pytest.param(
            {"sources": {"vllm": "0.33.0 abc"}},
            "version of vllm",
            id="sources vllm 0.33.0 abc, version of vllm",
        ),
        pytest.param(
            {"configuration": "marlin"}, "configuration", id="configuration marlin, configuration"
        ),
        pytest.param(
            {"arguments": ["--a", "--b"]},
            "engine's arguments",
            id="arguments --a --b, engine's arguments",
        ),
        pytest.param(
            {"environment": {"VLLM_X": "1"}},
            "variable VLLM_X",
            id="environment VLLM_X 1, variable VLLM_X",
        ),
        pytest.param({"model": "m2"}, "model's digest", id="model m2, model's digest"),
        pytest.param(
            {"machine": {"gpu": "H200"}}, "machine's gpu", id="machine gpu H200, machine's gpu"
        ),
    ],
)
def test_every_field_of_the_fingerprint_distinguishes_two_runs(changed, named, tmp_path):
    one = part(1, fingerprint=ASKED)
    two = part(2, fingerprint=ASKED)
    assert merge.differences(one, two) == []
    two.fingerprint = ASKED.model_copy(update=changed)
    (difference,) = merge.differences(one, two)
    assert difference.name == named
    with pytest.raises(UsageError, match=f"another {named} "):
        merging.read_shards([wrote(tmp_path, "one", one), wrote(tmp_path, "two", two)])


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        pytest.param({"sha": "abc"}, {"sha": "def"}, "vllm", id="another-commit"),
        pytest.param({"sha": "abc"}, {"sha": "abc", "changes": "12"}, "vllm", id="not-committed"),
        pytest.param({"torch": "2.13.0"}, {"torch": "2.11.0"}, "torch", id="another-torch"),
        pytest.param({"triton": "3.7.0"}, {"triton": "3.6.0"}, "triton", id="another-triton"),
        pytest.param({"cuda": "13.0"}, {"cuda": "13.1"}, "cuda", id="another-cuda"),
        pytest.param({}, {"cuda": "13.1"}, "cuda", id="cuda-of-one-alone"),
    ],
)
def test_shards_of_another_source_or_of_other_computing_packages_are_refused(
    before, now, named, tmp_path
):
    """Shards whose sources or computing packages differ are not merged.

    Before, only a resumed run was compared by its sources and packages."""
    folders = []
    for index, found in enumerate((before, now), 1):
        asked = ASKED.model_copy(update={"sources": computing(**found)})
        folders.append(wrote(tmp_path, f"shard-{index}", part(index, fingerprint=asked)))
    with pytest.raises(UsageError, match=f"another version of {named} "):
        merging.read_shards(folders)


def computing(
    sha: str = "abc", changes: str | None = None, cuda: str | None = None, **packages: str
) -> dict[str, str]:
    """Return the part of the fingerprint about an environment's sources and packages."""
    vllm = environment_record.SourceRecord(version="0.33.0", sha=sha, changes=changes)
    record = environment_record.EnvironmentRecord.model_construct(
        git_shas={"vllm": vllm},
        cuda_version=cuda,
        engine_packages=environment_record.PackagesRecord(packages={"black": "26.1", **packages}),
    )
    return fingerprinting.sources(record)


def test_a_run_without_a_fingerprint_differs_from_one_with_it():
    without = FingerprintDifference("fingerprint", "known", "none")
    assert merge.differences(part(fingerprint=ASKED), part()) == [without]
    other = part(2, environment={"engine_arguments": ["--b"]})
    other.engine.model = "m2"
    other.engine.configuration = "marlin"
    differences = merge.differences(part(environment={"engine_arguments": []}), other)
    assert [each.name for each in differences] == ["configuration", "model", "engine's arguments"]


def test_shards_of_two_days_are_no_run(tmp_path):
    """Shards are not merged into one run if any two of them were started too far apart."""
    one = part(1, started="2026-11-20T10:00:00+00:00")
    two = part(2)
    for started, differs in (("20T10", []), ("20T20", []), ("22T10", ["day"])):
        two.started = f"2026-11-{started}:00:00+00:00"
        assert [each.name for each in merge.apart(one, two)] == differs
    folders = [
        wrote(tmp_path, f"s{number}", part(number, of=3, started=f"2026-11-{day}:00:00+00:00"))
        for number, day in enumerate(("20T10", "19T12", "21T08"), 1)
    ]
    with pytest.raises(UsageError, match="another day"):
        merging.read_shards(folders)


@pytest.mark.parametrize("verdict", ["FAIL", "INVALID", "INCONCLUSIVE"])
def test_the_whole_is_never_better_than_the_worst_part(verdict):
    bad = part(2, said("two", "PASS"), verdict=verdict, reason="the reason")
    good = part(1, said("one", "PASS"), verdict="PASS")
    for order in ((good, bad), (bad, good)):
        whole = of_shards(*order)
        whole.judge()
        assert whole.verdict is Verdict(verdict) and whole.why().endswith(": the reason")
        assert whole.exit_status == Verdict(verdict).exit_status
    assert of_shards(good, part(2, said("two", "PASS"), verdict="PASS")).verdict is Verdict.PASS


def test_shards_make_no_certificate():
    """A shard without an applicable test does not change the verdict."""
    parts = (part(n, said(name, "PASS"), verdict="PASS", certified=True)
             for n, name in enumerate(PLANNED, 1))  # fmt: skip
    assert of_shards(*parts).certified is None
    idle = part(2, said("two", "NOT_RUN", skipped=True), verdict="NOT_RUN")
    assert of_shards(part(1, said("one", "PASS"), verdict="PASS"), idle).verdict is Verdict.PASS


@pytest.mark.parametrize("order", [("PASS", "INVALID"), ("INVALID", "PASS")])
def test_the_worse_of_two_metrics_stands(order):
    rates = ({"tg32@d0": MetricReport(value=1.0, unit="tok/s", verdict=each)} for each in order)
    whole = of_shards(*(part(n, metrics=rate) for n, rate in enumerate(rates, 1)))
    assert whole.metrics["tg32@d0"].verdict is Verdict.INVALID


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        pytest.param(
            {"verdict": "PASS", "exit_status": 0},
            "its verdict is PASS, but its tests result in FAIL",
            id="verdict PASS exit_status 0, its verdict is PASS, its",
        ),
        pytest.param({"exit_status": 0}, "exit status 0", id="exit_status 0, exit status 0"),
        pytest.param(
            {"tests": []},
            "its counts of level kernel do not match its tests",
            id="tests, its counts of level kernel do not match its tests",
        ),
    ],
)
def test_a_shard_that_was_edited_is_refused(tmp_path, changed, why):
    shard = part(1, said("one", "FAIL"))
    shard.judge()
    folder = wrote(tmp_path, "one", shard)
    assert merging.read_shards([folder])
    raw = json.loads((folder / "verdict.json").read_text())
    (folder / "verdict.json").write_text(json.dumps({**raw, **changed}))
    with pytest.raises(UsageError, match=f"changed after it was written: .*{why}"):
        merging.read_shards([folder])


def test_the_documents_state_the_rankings():
    text = (ROOT / "docs" / "verdicts.md").read_text("utf-8")
    verdicts = ["FAIL", "INVALID", "INCONCLUSIVE", "NOT_RUN", "PASS"]
    assert f"\n{', '.join(verdicts)}\n" in text
    for worse, better in pairwise(verdicts):
        assert worst([Verdict(better), Verdict(worse)]) is Verdict(worse)
    states = ["DEGRADED", "UNKNOWN", "QUALIFIED"]
    assert f"\n{', '.join(states)}\n" in text
    boxes = [BoxReport(state=state, reason="seen") for state in reversed(states)]
    assert [merge.worst_box(boxes[:n]).state for n in (1, 2, 3)] == states[::-1]


def wrote(folder: Path, name: str, file: VerdictFile) -> Path:
    (folder / name).mkdir()
    verdict_file.write(file, folder / name / "verdict.json")
    return folder / name


def test_only_shards_of_one_run_are_merged(tmp_path):
    one = wrote(tmp_path, "one", part(1))
    two = wrote(tmp_path, "two", part(2))
    assert [shard.part.index for shard in merging.read_shards([two, one])] == [1, 2]
    other = part(2)
    other.profile = "q"
    fewer = part(2)
    fewer.shard.tests.pop()
    compared = part(2)
    compared.shard.compared = True
    for name, file, message in (
        ("other", other, r"another profile \(q\) than .* \(p\)"),
        ("fewer", fewer, "another list of tests than"),
        ("compared", compared, r"another comparison than .*expected --benchmark-compare in each"),
        ("three", part(2, of=3), "another number of shards than"),
        ("again", part(1), "shard 1 occurs twice"),
        ("whole", part(shard=None), "expected the report of a run with --shard"),
    ):
        with pytest.raises(UsageError, match=message):
            merging.read_shards([one, wrote(tmp_path, name, file)])
