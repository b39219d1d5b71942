"""Join the parts of a run, shards or workers, to one report. The verdict file is
`sm121.run.merge`'s; here are the folder around it and the matrix. The shards' folders are copied to
``shards/I`` of the merged report, unless they lie in it."""

import itertools
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.core import lenient
from sm121.core.errors import UsageError
from sm121.matrix import feature_matrix
from sm121.matrix.feature_matrix import MatrixFile
from sm121.report import page
from sm121.run import details, stored_run, verdict_file
from sm121.run.details import Details
from sm121.run.merge import apart, contradiction, merge_shards
from sm121.run.verdict_file import ShardReport, TestReport, VerdictFile

_COPIES = "shards"
#: Not evidence of this run, or made anew for the whole.
_NOT_COPIED = shutil.ignore_patterns("earlier", ".*", "report.html")
_MATRIX = "matrix"


@dataclass(frozen=True)
class ShardFolder:
    """A part of a run, where its report lies, and what of the run it is."""

    directory: Path
    file: VerdictFile
    part: ShardReport


def read(directories: Sequence[Path]) -> list[ShardFolder]:
    """The shards in these report directories, by their number. Raises UsageError: one is no shard,
    they are not of one run, or one is there twice."""
    shards: list[ShardFolder] = []
    for directory in directories:
        file = stored_run.file_of(directory)
        if file.shard is None:
            raise UsageError(f"{directory}: expected the report of a run with --shard")
        if (why := contradiction(file)) is not None:
            raise UsageError(f"{directory}: verdict.json was changed after it was written: {why}")
        shards.append(ShardFolder(directory, file, file.shard))
    for first, shard in itertools.combinations(shards, 2):
        others = [
            f"{difference.name} ({difference.one}) than {first.directory} ({difference.other})"
            for difference in apart(shard.file, first.file)
        ]
        if shard.part.tests != first.part.tests:
            others.insert(0, f"list of tests than {first.directory}")
        if shard.part.of != first.part.of:
            others.insert(0, f"number of shards than {first.directory}")
        if others:
            more = f" (and {len(others) - 1} more differences)" if len(others) > 1 else ""
            raise UsageError(f"{shard.directory}: another {others[0]}{more}")
    indices = [shard.part.index for shard in shards]
    if doubled := {index for index in indices if indices.count(index) > 1}:
        raise UsageError(f"shard {min(doubled)} is there twice")
    return sorted(shards, key=lambda shard: shard.part.index)


def write(shards: Sequence[ShardFolder], output: Path) -> VerdictFile:
    """Everything that a run writes, of the whole one, under ``output``. Raises UsageError: that is
    a shard's own folder, or the shards' matrices cannot be read, or are not of one run."""
    parts, whole = {}, output.resolve()
    for shard in shards:
        directory = shard.directory.resolve()
        if whole.is_relative_to(directory):
            raise UsageError(f"--output {output}: expected another folder than that of a shard")
        if not directory.is_relative_to(whole):
            copy = whole / _COPIES / str(shard.part.index)
            if copy.exists():  # of an earlier merge: nothing else makes this folder
                shutil.rmtree(copy)
            directory = shutil.copytree(directory, copy, symlinks=True, ignore=_NOT_COPIED)
        parts[directory.relative_to(whole).as_posix()] = shard.file
    output.mkdir(parents=True, exist_ok=True)
    merged, known = join(output, parts)
    page.write_all(output, known)
    return merged


def join(
    output: Path, parts: Mapping[str, VerdictFile], deaths: Sequence[TestReport] = ()
) -> tuple[VerdictFile, Details]:
    """Write verdict.json and ``matrix/`` of a whole run.

    Args:
        output: The report directory of the whole run.
        parts: The verdict file of each part, by its folder in that directory.
        deaths: Decisions that no part could write down.

    Returns:
        The whole run, and what its report shows beside the verdicts.

    Raises:
        UsageError: The parts' matrices cannot be read, or are not of one run.
    """
    merged = merge_shards(parts, deaths)
    write_matrix(output, parts)
    verdict_file.write(merged, output / verdict_file.NAME)
    return merged, _details(output, parts)


def _details(output: Path, folders: Iterable[str]) -> Details:
    whole = Details()
    commands, again = [], []
    for folder in folders:
        part = details.read(output / folder)
        commands += [part.command] if part.command else []
        again += [part.again] if part.again else []
        whole.requirements |= part.requirements
        for failure in part.failures:
            if failure.logs is not None:
                failure.logs = [f"{folder}/{log}" for log in failure.logs]
            whole.failures.append(failure)
        whole.samples |= part.samples
        whole.history |= part.history
        whole.findings += [line for line in part.findings if line not in whole.findings]
    whole.command = "; ".join(dict.fromkeys(commands)) or None
    whole.again = "; ".join(dict.fromkeys(again)) or None
    return whole


def write_matrix(directory: Path, folders: Iterable[str]) -> MatrixFile | None:
    """Write ``matrix/`` of a report directory from those of the parts' folders; None where no part
    has one. Raises UsageError: one cannot be read, or the parts are of different axes, engines or
    profiles."""
    parts = []
    for folder in folders:
        try:
            raw = json.loads((directory / folder / _MATRIX / "matrix.json").read_text("utf-8"))
            part = lenient.validate(MatrixFile, raw)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            line = f"the matrix in {folder} cannot be read: {type(error).__name__}"
            raise UsageError(line) from error
        for cell in part.cells:
            cell.log = f"{folder}/{cell.log}" if cell.log else None
            cell.bundle = f"{folder}/{cell.bundle}" if cell.bundle else None
        parts.append(part)
    if not parts:
        return None
    space, whole = feature_matrix.merged(parts)
    feature_matrix.write(space, whole, directory / _MATRIX)
    return whole
