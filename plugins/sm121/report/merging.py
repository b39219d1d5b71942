"""One verdict of the shards of a run (``sm121 merge``), and everything that a run writes beside it.

The shards' own folders are evidence: they are copied to ``shards/I`` of the merged report, unless
they lie in it already, so that it can be kept and sent as one folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.core import lenient
from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.core.verdict import Verdict, worst
from sm121.report import details, junit, page, stored, summary
from sm121.report.details import Details
from sm121.run import verdict_file
from sm121.run.merge import prefixed
from sm121.run.reason import reason
from sm121.run.verdict_file import MemoryReport, TestReport, VerdictFile

_BOXES = ("DEGRADED", "UNKNOWN", "QUALIFIED")
_COPIES = "shards"
#: Not evidence of this run, or made anew for the whole.
_NOT_COPIED = shutil.ignore_patterns("earlier", ".*", "report.html")


@dataclass(frozen=True)
class Part:
    """A shard, where its report lies, and that folder as seen from the merged report."""

    directory: Path
    file: VerdictFile
    prefix: str = ""


def read(directories: Sequence[Path]) -> list[Part]:
    """The shards in these report directories, by their number.

    Raises:
        UsageError: one is no shard, they are not of one run, or one is there twice.
    """
    parts = []
    for directory in directories:
        try:
            file = verdict_file.read(directory / "verdict.json")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{directory}: expected a report directory with verdict.json ({error})"
            ) from error
        if file.shard is None:
            raise UsageError(f"{directory}: expected the report of a run with --shard")
        parts.append(Part(directory, file))
    if not parts:
        raise UsageError("expected the report directories of shards")
    first = parts[0]
    for part in parts[1:]:
        for what, theirs, ours in (
            ("number of shards", part.file.shard.of, first.file.shard.of),  # type: ignore[union-attr]
            ("tests", part.file.shard.tests, first.file.shard.tests),  # type: ignore[union-attr]
            ("profile", part.file.profile, first.file.profile),
            ("architecture", part.file.arch, first.file.arch),
            ("engine", part.file.engine.name, first.file.engine.name),
            ("engine's version", part.file.engine.version, first.file.engine.version),
        ):
            if theirs != ours:
                raise UsageError(f"{part.directory}: another {what} than {first.directory}")
    indices = [part.file.shard.index for part in parts]  # type: ignore[union-attr]
    if doubled := {index for index in indices if indices.count(index) > 1}:
        raise UsageError(f"shard {min(doubled)} is there twice")
    return sorted(parts, key=lambda part: part.file.shard.index)  # type: ignore[union-attr]


def merge(parts: Sequence[Part]) -> VerdictFile:
    """The whole run. What a missing shard should have run is NOT_RUN, and so is then the run."""
    whole = parts[0].file.shard
    assert whole is not None
    present = {part.file.shard.index for part in parts if part.file.shard is not None}
    missing = [index for index in range(1, whole.of + 1) if index not in present]
    merged = parts[0].file.model_copy(deep=True)
    merged.schema_version = verdict_file.SCHEMA_VERSION
    merged.shard = None
    merged.tests = [_test(entry.id, entry.level, parts, missing, whole.of) for entry in whole.tests]
    known = {entry.id for entry in whole.tests}
    merged.tests += [  # what the end of a run adds: a server that was not stopped cleanly
        test for part in parts for test in part.file.tests if test.id not in known
    ]
    for part in parts[1:]:
        merged.metrics |= part.file.metrics
        merged.starts += part.file.starts
        merged.crashes += part.file.crashes
        merged.unproven += [line for line in part.file.unproven if line not in merged.unproven]
        merged.remarks += [line for line in part.file.remarks if line not in merged.remarks]
        merged.duration_s = max(merged.duration_s, part.file.duration_s)
        if not merged.engine.path.evidence and part.file.engine.path.evidence:
            merged.engine = part.file.engine
    merged.memory = _memory(parts)
    merged.environment = _environment(parts)
    merged.box = min((p.file.box for p in parts), key=lambda box: _BOXES.index(box.state))
    merged.levels = {}
    merged.finished = not missing and all(part.file.finished for part in parts)
    merged.judge()
    if missing:
        merged.settle(worst([merged.verdict, Verdict.NOT_RUN]))
        names = ", ".join(f"{index}/{whole.of}" for index in missing)
        merged.reason = f"shards that are missing: {names}"
    elif not merged.finished:
        merged.reason = next(p.file.reason for p in parts if not p.file.finished)
    else:
        merged.reason = reason(merged)
    return merged


def _test(
    test_id: str, level: str, parts: Sequence[Part], missing: Sequence[int], of: int
) -> TestReport:
    """A test of the whole run: of its shard, or the worst of all that had it."""
    found = [test for part in parts for test in part.file.tests if test.id == test_id]
    if not found:
        names = ", ".join(f"{index}/{of}" for index in missing)
        message = f"its shard is missing ({names})" if missing else "no shard had it"
        return TestReport(id=test_id, level=level, verdict=Verdict.NOT_RUN, message=message)
    ran = [test for test in found if not test.skipped and test.verdict is not Verdict.NOT_RUN]
    decisive = worst(test.verdict for test in ran or found)
    return next(test for test in ran or found if test.verdict is decisive)


def _memory(parts: Sequence[Part]) -> MemoryReport | None:
    """Of the shard that had the stress level; of several the gravest, then the longest."""
    known = [part.file.memory for part in parts if part.file.memory is not None]
    if not known:
        return None
    gravest = worst(memory.verdict for memory in known)
    return max(known, key=lambda memory: (memory.verdict is gravest, memory.samples))


def _environment(parts: Sequence[Part]) -> dict[str, object]:
    """The first shard's record, and of each other one what was different there."""
    first = parts[0].file.environment
    others = {
        str(part.file.shard.index): different
        for part in parts[1:]
        if part.file.shard is not None and (different := _different(first, part.file.environment))
    }
    return {**first, **({"other_shards": others} if others else {})}


def _different(one: Mapping[str, object], other: Mapping[str, object]) -> dict[str, object]:
    return {key: other.get(key) for key in {**one, **other} if one.get(key) != other.get(key)}


def _details(parts: Sequence[Part]) -> Details:
    whole = Details()
    commands = []
    for part in parts:
        known = details.read(part.directory)
        commands += [known.command] if known.command else []
        whole.requirements |= known.requirements
        for failure in known.failures:
            if failure.logs is not None:
                failure.logs = [f"{part.prefix}/{log}" for log in failure.logs]
            whole.failures.append(failure)
        whole.samples |= known.samples
        whole.history |= known.history
        whole.findings += [line for line in known.findings if line not in whole.findings]
    whole.command = "; ".join(commands) or None
    return whole


def _brought_together(parts: Sequence[Part], output: Path) -> list[Part]:
    """The parts with their files named as seen from ``output``, where copies of them are put.

    Raises:
        UsageError: the merged report would be written into a shard's own.
    """
    moved = []
    whole = output.resolve()
    for part in parts:
        assert part.file.shard is not None
        directory = part.directory.resolve()
        if whole.is_relative_to(directory):
            raise UsageError(f"--output {output}: expected another folder than that of a shard")
        if not directory.is_relative_to(whole):
            copy = whole / _COPIES / str(part.file.shard.index)
            if copy.exists():  # of an earlier merge: nothing else makes this folder
                shutil.rmtree(copy)
            shutil.copytree(directory, copy, symlinks=True, ignore=_NOT_COPIED)
            directory = copy
        prefix = directory.relative_to(whole).as_posix()
        moved.append(Part(part.directory, prefixed(part.file, prefix), prefix))
    return moved


def write(parts: Sequence[Part], output: Path) -> VerdictFile:
    """Everything that a run writes, of the whole one, under ``output``.

    Raises:
        UsageError: the merged report would be written into a shard's own.
    """
    parts = _brought_together(parts, output)
    merged = merge(parts)
    output.mkdir(parents=True, exist_ok=True)
    verdict_file.write(merged, output / "verdict.json")
    write_text(summary.markdown(merged), output / "summary.md")
    details.write(_details(parts), output)
    files = [part.directory / "matrix" / "matrix.json" for part in parts]
    matrices = [json.loads(file.read_text("utf-8")) for file in files if file.is_file()]
    if matrices:
        from sm121.matrix import report

        known = [lenient.validate(report.MatrixFile, matrix) for matrix in matrices]
        matrices = [matrix.model_dump(mode="json") for matrix in known]
        space, matrix = report.merged(matrices)
        folder = output / "matrix"
        folder.mkdir(exist_ok=True)
        text = json.dumps(report.as_json(space, matrix), indent=2, ensure_ascii=False)
        write_text(text + "\n", folder / "matrix.json")
        write_text(report.markdown(space, matrix), folder / "FEATURE_MATRIX.md")
    found = stored.read(output)
    write_text(junit.xml(found), output / junit.NAME)
    page.write(found)
    return merged
