"""A certificate and a merged run that say more than was judged."""

import functools
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from certificate_tricks import HONEST, ROOT, TRICKS, Tried, tried
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

from . import Case, Kit, Outcome, of_data

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

_QUICK = ("--depths 0", "-o python_functions=test_health")


@functools.cache
def _all(kind: str) -> dict[str, Tried]:
    """What came of the quick ones and an honest one, or of all; tried once."""
    every = TRICKS if kind == "all" else []
    chosen = every or [*(trick for trick in TRICKS if trick.name in _QUICK), HONEST[0]]
    return dict(zip((trick.name for trick in chosen), tried(chosen), strict=True))


@in_two_steps
def _tricked(_kit: Kit, name: str, kind: str = "quick") -> Outcome:
    outcome = _all(kind)[name]
    lines = [x for x in outcome.output.splitlines() if x.startswith("ERROR: ") or ": error: " in x]
    line = " ".join(lines) or outcome.output[-300:]
    return Outcome(f"exit status {outcome.status}", line, outcome.status)


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


_ITEM = "13 A certificate by a choice of options"
CASES = [
    *of_data(__name__),
    *(
        Case(_ITEM, name, _tricked(name, kind), _tricked(HONEST[0].name), expected, kind == "all")
        for name, expected in ((trick.name, trick.expected) for trick in TRICKS)
        for kind in ("quick" if name in _QUICK else "all",)
    ),
]
