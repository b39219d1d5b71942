"""Merge the parts of a run (shards or workers) into one report.

`sm121.run.merge` merges the verdict files. This module merges the report directories and the
matrices. The shards' folders are copied to ``shards/I`` of the merged report, unless they are
already inside it.
"""

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
from sm121.run import stored_run, verdict_file
from sm121.run.details import Details
from sm121.run.merge import apart, contradiction, merge_shards
from sm121.run.shard_report import ShardReport
from sm121.run.verdict_file import TestReport, VerdictFile

_COPIES = "shards"
#: Files that are no evidence of this run, or that are written again for the whole run.
_NOT_COPIED = shutil.ignore_patterns("earlier", ".*", "report.html")
_MATRIX = "matrix"


@dataclass(frozen=True)
class ShardFolder:
    """The report directory of a shard, its verdict file, and its position among the shards."""

    directory: Path
    file: VerdictFile
    part: ShardReport


def read_shards(directories: Sequence[Path]) -> list[ShardFolder]:
    """Read the shards of one run.

    Args:
        directories: The report directories of the shards.

    Returns:
        The shards, sorted by their number.

    Raises:
        UsageError: A directory is no shard, the shards belong to different runs, or two have the
            same number.
    """
    shards = [_read_shard(directory) for directory in directories]
    for first, shard in itertools.combinations(shards, 2):
        _refuse_other_run(first, shard)
    shards.sort(key=lambda shard: shard.part.index)
    for before, shard in itertools.pairwise(shards):
        if before.part.index == shard.part.index:
            raise UsageError(f"shard {shard.part.index} occurs twice")
    return shards


def _read_shard(directory: Path) -> ShardFolder:
    file = stored_run.file_of(directory)
    if file.shard is None:
        raise UsageError(f"{directory}: expected the report of a run with --shard")
    why = contradiction(file)
    if why is not None:
        raise UsageError(f"{directory}: verdict.json was changed after it was written: {why}")
    return ShardFolder(directory, file, file.shard)


def _refuse_other_run(first: ShardFolder, shard: ShardFolder) -> None:
    """Raise UsageError if two shards belong to different runs."""
    differences = []
    if shard.part.of != first.part.of:
        differences.append(f"number of shards than {first.directory}")
    if shard.part.tests != first.part.tests:
        differences.append(f"list of tests than {first.directory}")
    if shard.part.compared != first.part.compared:
        differences.append(
            f"comparison than {first.directory}: expected --benchmark-compare in each shard or in "
            "none"
        )
    for difference in apart(shard.file, first.file):
        differences.append(
            f"{difference.name} ({difference.one}) than {first.directory} ({difference.other})"
        )
    if not differences:
        return
    more = ""
    if len(differences) > 1:
        more = f" (and {len(differences) - 1} more differences)"
    raise UsageError(f"{shard.directory}: another {differences[0]}{more}")


def write(shards: Sequence[ShardFolder], output: Path) -> VerdictFile:
    """Write the report of a whole run.

    Args:
        shards: The shards.
        output: The report directory of the whole run.

    Returns:
        The verdict file of the whole run.

    Raises:
        UsageError: The output is inside a shard's folder, or the shards' matrices cannot be read
            or belong to different runs.
    """
    whole = output.resolve()
    parts = {}
    for shard in shards:
        directory = shard.directory.resolve()
        if whole.is_relative_to(directory):
            raise UsageError(f"--output {output}: expected a folder other than that of a shard")
        if not directory.is_relative_to(whole):
            copy = whole / _COPIES / str(shard.part.index)
            if copy.exists():  # from an earlier merge: nothing else creates this folder
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
        deaths: Results of tests that no part could store, since its process died.

    Returns:
        The verdict file of the whole run, and its details.

    Raises:
        UsageError: The parts' matrices cannot be read or belong to different runs.
    """
    merged = merge_shards(parts, deaths)
    write_matrix(output, parts)
    verdict_file.write(merged, output / verdict_file.NAME)
    return merged, _details(output, parts)


def _details(output: Path, folders: Iterable[str]) -> Details:
    whole = Details()
    commands: list[str] = []
    again: list[str] = []
    for folder in folders:
        part = stored_run.details_of(output / folder)
        if part.command:
            commands.append(part.command)
        if part.again:
            again.append(part.again)
        whole.requirements |= part.requirements
        for failure in part.failures:
            if failure.logs is not None:
                failure.logs = [f"{folder}/{log}" for log in failure.logs]
            whole.failures.append(failure)
        whole.samples |= part.samples
        whole.history |= part.history
        whole.findings += part.findings
    whole.findings = list(dict.fromkeys(whole.findings))
    whole.command = "; ".join(dict.fromkeys(commands)) or None
    whole.again = "; ".join(dict.fromkeys(again)) or None
    return whole


def write_matrix(directory: Path, folders: Iterable[str]) -> MatrixFile | None:
    """Write ``matrix/`` of a report directory from those of its parts.

    Args:
        directory: The report directory of the whole run.
        folders: The folders of the parts in that directory.

    Returns:
        The matrix of the whole run; None if no part has one.

    Raises:
        UsageError: A matrix cannot be read, or the parts have different axes, engines or profiles.
    """
    parts = []
    for folder in folders:
        part = _read_matrix(directory, folder)
        if part is not None:
            parts.append(part)
    if not parts:
        return None
    space, whole = feature_matrix.merged(parts)
    feature_matrix.write(space, whole, directory / _MATRIX)
    return whole


def _read_matrix(directory: Path, folder: str) -> MatrixFile | None:
    """Read a part's matrix, with paths relative to the whole run's directory; None without one."""
    try:
        raw = json.loads((directory / folder / _MATRIX / "matrix.json").read_text("utf-8"))
        part = lenient.validate(MatrixFile, raw)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        line = f"the matrix in {folder} cannot be read: {type(error).__name__}"
        raise UsageError(line) from error
    for cell in part.cells:
        if cell.log:
            cell.log = f"{folder}/{cell.log}"
        if cell.bundle:
            cell.bundle = f"{folder}/{cell.bundle}"
    return part
