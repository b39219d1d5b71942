"""A certificate and a merged run that say more than was judged."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from servers import git
from two_steps import in_two_steps
from whole_run import gated, judge, waive, waiver_file, whole

from sm121.checkpoint.identity import identity
from sm121.core import errors, profile, waivers
from sm121.evidence import environment
from sm121.report import comparison, merging
from sm121.run import merge, verdict_file
from sm121.run.fingerprint import Fingerprint, profile_label
from sm121.run.verdict_file import (
    EngineReport,
    ShardReport,
    ShardTest,
    TestReport,
    VerdictFile,
)
from sm121.session import certification, fingerprinting

from . import Case, Kit, Outcome

ROOT = Path(__file__).resolve().parents[2]
_CPU = "cpu-tiny-gpt-oss"
_NUMBERS = itertools.count()
#: What a field says that was taken out.
TAKEN_OUT = None

ASKED = Fingerprint(
    profile="p1", profile_shipped=True, provider="torch", configuration="cutlass", model="m1",
    arguments=["--moe-backend", "marlin"], sources={"vllm": "0.33.0 abc"}, machine={"gpu": "GB10"},
)  # fmt: skip


def run(**changed: Any) -> VerdictFile:
    """A run with a kernel test, judged."""
    fingerprint = ASKED.model_copy(update=changed.pop("asked", {}))
    fields: dict[str, Any] = {
        "arch": "sm121", "profile": "gb10", "started": "2026-11-20T10:00:00+00:00",
        "engine": EngineReport(name="vllm", version="0.33.0", managed=True, model="m"),
        "tests": [TestReport(id="one", level="kernel", verdict="PASS")],
        "finished": True, "fingerprint": fingerprint, "reason": "held", **changed,
    }  # fmt: skip
    file = VerdictFile(**fields)
    file.judge()
    return file


def _nothing(_changed: object) -> None: ...


def _written(folder: Path, file: VerdictFile, edit: dict[str, Any] | None) -> Path:
    """A folder with the run, in whose verdict.json these fields were edited."""
    folder.mkdir(parents=True)
    verdict_file.write(file, folder / "verdict.json")
    if edit is not None:
        raw = json.loads((folder / "verdict.json").read_text())
        (folder / "verdict.json").write_text(json.dumps({**raw, **edit}))
    return folder


# 12: sm121 compare, and the names.


@in_two_steps
def _compared(kit: Kit, **changed: Any) -> Outcome:
    folders = [kit.tmp_path / f"compared-{next(_NUMBERS)}.json" for _ in range(2)]
    for path, file in zip(folders, (run(), run(**changed)), strict=True):
        verdict_file.write(file, path)
    try:
        comparison.refuse_mixed([comparison.read(path) for path in folders])
    except errors.UsageError as error:
        return Outcome("refused", str(error))
    return Outcome("PASS", "side by side")


@in_two_steps
def _named(kit: Kit, changed: bool) -> Outcome:
    text = profile.shipped()[_CPU].read_text("utf-8")
    if changed:
        text = text.replace("repeats = 3", "repeats = 1")
    file = kit.tmp_path / "mine.toml"
    file.write_text(text)
    mine = fingerprinting.is_shipped(profile.load(str(file)))
    label = profile_label(_CPU, Fingerprint(profile="12ab", profile_shipped=mine))
    return Outcome("PASS" if mine else "another profile", label)


@in_two_steps
def _weights(kit: Kit, changed: bool) -> Outcome:
    folder = kit.tmp_path / f"checkpoint-{changed}"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"\0" * (3 << 20))
    before = identity(str(folder))
    weights.write_bytes(b"\0" * ((3 << 20) - 1) + (b"\1" if changed else b"\0"))
    same = identity(str(folder)) == before
    return Outcome("PASS" if same else "another model", f"digest {'same' if same else 'differs'}")


# 13: options, tests, gates, waivers.


@in_two_steps
def _certified(
    _kit: Kit, change: Callable[..., object] = _nothing, *tests: str, **options: str
) -> Outcome:
    gates = gated("tg32@d0")
    file = whole(gates)
    change(file, *tests, **options)
    judge(file)
    certification.certify(file, gates, certification.inventory(), deselected=[], inapplicable=set())
    return Outcome(file.verdict.value, file.reason, certified=bool(file.certified))


def _waive_most(file: VerdictFile) -> None:
    waive(file, *(test.id for number, test in enumerate(file.tests) if number % 10))


def _waive_a_slow_gate(file: VerdictFile) -> None:
    file.metrics["tg32@d0"].value = 20.0
    file.metrics["tg32@d0"].verdict = verdict_file.Verdict.FAIL
    waive(file, "test_decode_rate", severity="courtesy")
    for test in file.tests:
        test.metrics = ["tg32@d0"] if test.waived else []


def _without_numbers(file: VerdictFile) -> None:
    file.metrics.clear()


def _without_a_test(file: VerdictFile) -> None:
    file.tests = [test for test in file.tests if "test_known_answers" not in test.id]


def _failed_and_waived(file: VerdictFile) -> None:
    """The gate failed on nothing but lost requests, and a waiver says that this is known."""
    file.metrics["tg32@d0"].value = None
    file.metrics["tg32@d0"].verdict = file.tests[-1].verdict = verdict_file.Verdict.FAIL
    file.tests[-1].waived = True


_TEST = "tests/test_smoke.py"


def _copy(kit: Kit) -> Path:
    """The suite's tests in a folder of their own."""
    folder = kit.tmp_path / f"copy-{next(_NUMBERS)}"
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "conftest.py", folder)
    return folder


@in_two_steps
def _checkout(kit: Kit, change: Callable[..., None] = _nothing, *options: str) -> Outcome:
    """A checkout, and what was done in it."""
    folder = _copy(kit)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "the tests")
    with mock.patch.dict(os.environ):
        change(folder, *options)
        changed = environment.changed_files(folder, ["tests", "conftest.py"])
    if changed is None:
        return Outcome("FAIL", "git does not answer")
    return Outcome("FAIL" if changed else "PASS", f"changed: {', '.join(changed)}")


def _change(folder: Path, *flags: str) -> None:
    """Change a test, of which git was told this."""
    for flag in flags:
        git(folder, "update-index", flag, _TEST)
    file = folder / _TEST
    file.write_text(file.read_text().replace("    assert ", "    assert True or "))


def _change_elsewhere(folder: Path) -> None:
    _change(folder)
    os.environ["GIT_DIR"] = str(folder / "nowhere")


def _add(folder: Path, ignored: str = "") -> None:
    if ignored:
        (folder / ".git" / "info" / "exclude").write_text(f"{ignored}\n")
    (folder / "tests" / "test_aaa.py").write_text("import sm121\n")


@in_two_steps
def _tarball(kit: Kit, change: Callable[[Path], None] = _nothing) -> Outcome:
    """The tests where no commit says what they are."""
    folder = _copy(kit)
    change(folder)
    foreign = certification.foreign_tests(folder)
    return Outcome("FAIL" if foreign else "PASS", f"changed: {', '.join(foreign)}")


@in_two_steps
def _excused(kit: Kit, chosen: str) -> Outcome:
    status, ran = kit.run_pytest("--arch", "cpu", "-k", chosen, "meta_tests/scenarios/excused.py")
    return Outcome(ran.verdict["verdict"], ran.verdict["reason"], status)


@in_two_steps
def _waived(kit: Kit, test: str, days: int) -> Outcome:
    try:
        waivers.load(waiver_file(kit.tmp_path, test, days=days))
    except errors.UsageError as error:
        return Outcome("refused", str(error))
    return Outcome("PASS", "accepted")


@in_two_steps
def _no_level(kit: Kit, scenario: str) -> Outcome:
    status, ran = kit.run_pytest("--arch", "cpu", "-k", "no_level or test_pass", scenario)
    verdict = ran.verdict if (ran.report / "verdict.json").is_file() else {}
    reason = verdict.get("reason", ran.output[-300:])
    return Outcome(verdict.get("verdict", "none"), reason, min(status, 5))


def _computing(cuda: str | None = None, **packages: str) -> dict[str, str]:
    engine = environment.SourceRecord(version="0.33.0", sha="abc")
    return fingerprinting.sources(environment.EnvironmentRecord.model_construct(
        git_shas={"vllm": engine}, cuda_version=cuda,
        engine_packages=environment.PackagesRecord(packages=packages | {"black": "26.1"}),
    ))  # fmt: skip


# 15: shards.

_PLANNED = ("one", "two")


def _shard(index: int, **changed: Any) -> VerdictFile:
    tests = [TestReport(id=_PLANNED[index - 1], level="kernel", verdict="PASS")]
    whole = [ShardTest(id=name, level="kernel") for name in _PLANNED]
    fields = {"tests": tests, "shard": ShardReport(index=index, of=2, tests=whole), **changed}
    return run(**fields)


@in_two_steps
def _merged(kit: Kit, *others: VerdictFile, edit: dict[str, Any] | None = None) -> Outcome:
    """Of several shards, the last of which was edited."""
    files = (_shard(1), *others)
    folders = [
        _written(kit.tmp_path / f"shard-{next(_NUMBERS)}", file, edit if n == len(files) else None)
        for n, file in enumerate(files, 1)
    ]
    try:
        shards = merging.read(folders)
    except errors.UsageError as error:
        return Outcome("refused", str(error))
    whole = merge.merge_shards({f"shards/{s.part.index}": s.file for s in shards})
    return Outcome(whole.verdict.value, whole.reason, whole.exit_status, bool(whole.certified))


def _undecided() -> VerdictFile:
    """A shard whose tests held and whose report could not be written to the end."""
    file = _shard(2)
    file.settle(verdict_file.Verdict.INCONCLUSIVE)
    file.reason = "the report cannot be written: no space left on device"
    return file


CASES = [
    Case(
        item="12 What was certified is not written down",
        name="compare: a profile of one's own under the name of another",
        fault=_compared(asked={"profile": "p2"}),
        clean=_compared(asked={"sources": {"vllm": "0.34.0 def"}}),
        expected="differ in profile's digest: p1 and p2",
    ),
    Case(
        item="12 What was certified is not written down",
        name="compare: another machine",
        fault=_compared(asked={"machine": {"gpu": "H200"}}),
        clean=_compared(asked={"sources": {"vllm": "0.34.0 def"}}),
        expected="machine's gpu",
    ),
    Case(
        item="12 What was certified is not written down",
        name="compare: one round instead of five",
        fault=_compared(asked={"options": {"--rounds": "1"}}),
        clean=_compared(asked={"sources": {"vllm": "0.34.0 def"}}),
        expected="--rounds",
    ),
    Case(
        item="12 What was certified is not written down",
        name="compare: another checkpoint",
        fault=_compared(asked={"model": "m2"}),
        clean=_compared(asked={"sources": {"vllm": "0.34.0 def"}}),
        expected="differ in model",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a test of the suite is not there",
        fault=_certified(_without_a_test),
        clean=_certified(),
        expected="test_known_answers",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a gate without a number that is waived",
        fault=_certified(_failed_and_waived),
        clean=_certified(),
        expected="has no number",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a test that was changed",
        fault=_checkout(_change),
        clean=_checkout(),
        expected=_TEST,
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="changed, and git told to take it for unchanged",
        fault=_checkout(_change, "--assume-unchanged"),
        clean=_checkout(),
        expected=_TEST,
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="changed, and git told not to look",
        fault=_checkout(_change, "--skip-worktree"),
        clean=_checkout(),
        expected=_TEST,
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="changed, and git sent elsewhere by a variable",
        fault=_checkout(_change_elsewhere),
        clean=_checkout(),
        expected=_TEST,
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a test module that no commit has",
        fault=_checkout(_add),
        clean=_checkout(),
        expected="tests/test_aaa.py",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="one that git was told to ignore",
        fault=_checkout(_add, "test_aaa.py"),
        clean=_checkout(),
        expected="tests/test_aaa.py",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a test that was changed, without a commit",
        fault=_tarball(_change),
        clean=_tarball(),
        expected=_TEST,
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a test module more, without a commit",
        fault=_tarball(_add),
        clean=_tarball(),
        expected="tests/test_aaa.py",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a failure under an xfail mark",
        fault=_excused("that_holds or that_fails"),
        clean=_excused("that_holds or after_all"),
        expected="no xfail mark",
        slow=True,
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="an error under an xfail mark",
        fault=_excused("that_holds or nothing_known"),
        clean=_excused("that_holds or after_all"),
        expected="no xfail mark",
        slow=True,
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a waiver for a whole level",
        fault=_waived("tests/test_stress.py::*", 1),
        clean=_waived("tests/test_stress.py::test_soak", 90),
        expected="without wildcards",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a waiver for ten years",
        fault=_waived("tests/test_stress.py::test_soak", 3650),
        clean=_waived("tests/test_stress.py::test_soak", 90),
        expected="within 90 days",
    ),
    Case(
        item="12 What was certified is not written down",
        name="compare: a run whose fingerprint was taken out",
        fault=_compared(fingerprint=TAKEN_OUT),
        clean=_compared(asked={"sources": {"vllm": "0.34.0 def"}}),
        expected="does not say what it asked",
    ),
    Case(
        item="12 What was certified is not written down",
        name="a profile of one's own under a shipped name",
        fault=_named(True),
        clean=_named(False),
        expected="not the shipped one",
    ),
    Case(
        item="12 What was certified is not written down",
        name="other weights in the same folder",
        fault=_weights(True),
        clean=_weights(False),
        expected="differs",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a gate without a number",
        fault=_certified(_without_numbers),
        clean=_certified(),
        expected="has no number",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a waiver for each test",
        fault=_certified(waive, ""),
        clean=_certified(waive, "test_token_counts_are_exact", severity="contract"),
        expected="no certificate waives a gate or a blocker",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a waiver for 135 of 150 tests",
        fault=_certified(_waive_most),
        clean=_certified(waive, "test_token_counts_are_exact", severity="contract"),
        expected="no certificate waives a gate or a blocker",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a waived gate, at 20 tok/s",
        fault=_certified(_waive_a_slow_gate),
        clean=_certified(waive, "test_token_counts_are_exact", severity="contract"),
        expected="no certificate waives a gate or a blocker",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="a waived blocker of correctness",
        fault=_certified(waive, "test_known_answers"),
        clean=_certified(waive, "test_token_counts_are_exact", severity="contract"),
        expected="no certificate waives a gate or a blocker",
    ),
    Case(
        item="13 A certificate by a choice of options",
        name="no level is there, and an architecture was asked for",
        fault=_no_level("meta_tests/scenarios/foreign.py"),
        clean=_no_level("meta_tests/scenarios/verdicts.py::test_pass"),
        expected="no test of a level was collected",
        slow=True,
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="a shard that the memory floor ended",
        fault=_merged(
            _shard(
                2,
                crashes=[
                    {
                        "kind": "memory_floor",
                        "summary": "0.2 GiB of memory left",
                        "owner": "the machine",
                    }
                ],
            )
        ),
        clean=_merged(_shard(2)),
        expected="ended: 0.2 GiB",
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="another model",
        fault=_merged(_shard(2, asked={"model": "m2"})),
        clean=_merged(_shard(2)),
        expected="model's digest",
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="another configuration",
        fault=_merged(_shard(2, asked={"configuration": "x"})),
        clean=_merged(_shard(2)),
        expected="another configuration",
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="other arguments",
        fault=_merged(_shard(2, asked={"arguments": []})),
        clean=_merged(_shard(2)),
        expected="arguments",
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="other waivers",
        fault=_merged(_shard(2, asked={"waivers": "w"})),
        clean=_merged(_shard(2)),
        expected="waivers",
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="other options",
        fault=_merged(_shard(2, asked={"options": {"--rounds": "1"}})),
        clean=_merged(_shard(2)),
        expected="--rounds",
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="another torch",
        fault=_merged(_shard(2, asked={"sources": _computing(torch="2.11.0")})),
        clean=_merged(_shard(2)),
        expected="of torch",
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="another day",
        fault=_merged(_shard(2, started="2026-11-13T10:00:00+00:00")),
        clean=_merged(_shard(2)),
        expected="another day",
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="a test that no shard had",
        fault=_merged(_shard(2, tests=[])),
        clean=_merged(_shard(2)),
        expected="no shard had 1 of the run's",
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="a shard that had the tests of another",
        fault=_merged(_shard(2, tests=[{"id": "one", "level": "kernel", "verdict": "PASS"}])),
        clean=_merged(_shard(2)),
        expected="tests (two)",
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="a shard that ended INCONCLUSIVE",
        fault=_merged(_undecided()),
        clean=_merged(_shard(2)),
        expected="no space left",
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="one shard twice",
        fault=_merged(_shard(1)),
        clean=_merged(_shard(2)),
        expected="is there twice",
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="a shard that is missing",
        fault=_merged(),
        clean=_merged(_shard(2)),
        expected="missing",
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="a verdict that was edited",
        fault=_merged(
            _shard(2, tests=[{"id": "two", "level": "kernel", "verdict": "FAIL"}]),
            edit={"verdict": "PASS", "exit_status": 0},
        ),
        clean=_merged(_shard(2)),
        expected="was changed after",
    ),
    Case(
        item="15 Merged shards say more than the worst of them",
        name="a fingerprint that was taken out",
        fault=_merged(_shard(2), edit={"fingerprint": TAKEN_OUT}),
        clean=_merged(_shard(2)),
        expected="another fingerprint",
    ),
]
