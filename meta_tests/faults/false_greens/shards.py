"""Item 15: a merged run with a better verdict than that of its worst shard."""

import itertools
import json
from pathlib import Path
from typing import Any

from meta_tests.fakes.fingerprinted_runs import TAKEN_OUT, run
from meta_tests.two_steps import in_two_steps
from sm121.core import errors
from sm121.evidence import environment_record
from sm121.report import merging
from sm121.run import merge, verdict_file
from sm121.run.shard_report import ShardReport, ShardTest
from sm121.run.verdict_file import TestReport, VerdictFile
from sm121.session import fingerprinting

from . import Case, Kit, Outcome

_NUMBERS = itertools.count()


def _written(folder: Path, file: VerdictFile, edit: dict[str, Any] | None) -> Path:
    """Return a folder with a run in whose verdict.json the given fields were changed."""
    folder.mkdir(parents=True)
    verdict_file.write(file, folder / "verdict.json")
    if edit is not None:
        raw = json.loads((folder / "verdict.json").read_text())
        (folder / "verdict.json").write_text(json.dumps({**raw, **edit}))
    return folder


def _computing(cuda: str | None = None, **packages: str) -> dict[str, str]:
    engine = environment_record.SourceRecord(version="0.33.0", sha="abc")
    return fingerprinting.sources(environment_record.EnvironmentRecord.model_construct(
        git_shas={"vllm": engine}, cuda_version=cuda,
        engine_packages=environment_record.PackagesRecord(packages=packages | {"black": "26.1"}),
    ))  # fmt: skip


_PLANNED = ("one", "two")


def _shard(index: int, **changed: Any) -> VerdictFile:
    tests = [TestReport(id=_PLANNED[index - 1], level="kernel", verdict="PASS")]
    whole = [ShardTest(id=name, level="kernel") for name in _PLANNED]
    fields = {"tests": tests, "shard": ShardReport(index=index, of=2, tests=whole), **changed}
    return run(**fields)


@in_two_steps
def _merged(kit: Kit, *others: VerdictFile, edit: dict[str, Any] | None = None) -> Outcome:
    """Merge several shards, of which the last one was changed."""
    files = (_shard(1), *others)
    folders = []
    for n, file in enumerate(files, 1):
        change = edit if n == len(files) else None
        folders.append(_written(kit.tmp_path / f"shard-{next(_NUMBERS)}", file, change))
    try:
        shards = merging.read_shards(folders)
    except errors.UsageError as error:
        return Outcome("refused", str(error))
    whole = merge.merge_shards({f"shards/{s.part.index}": s.file for s in shards})
    return Outcome(whole.verdict.value, whole.reason, whole.exit_status, bool(whole.certified))


def _undecided() -> VerdictFile:
    """Return a shard that passed, but whose report could not be written completely."""
    file = _shard(2)
    file.settle(verdict_file.Verdict.INCONCLUSIVE)
    file.reason = "the report cannot be written: no space left on device"
    return file


CASES = [
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
        expected="occurs twice",
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
