"""A stored report directory, written by this or another version of the suite."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from sm121.core import lenient
from sm121.matrix.feature_matrix import MatrixFile
from sm121.regression import ab
from sm121.regression.ab import AbFile
from sm121.report import crash_list
from sm121.report.ab_section import AbSection
from sm121.report.crash_list import Crash
from sm121.run import stored_run
from sm121.run.details import Details
from sm121.run.verdict_file import VerdictFile
from sm121.stress.memory import MEMORY_JSON, MemoryFile

_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True)
class StoredReport:
    """All inputs of a report. Parts that were not run are None or empty."""

    run: VerdictFile
    directory: Path
    details: Details = field(default_factory=Details)
    memory: MemoryFile | None = None
    matrix: MatrixFile | None = None
    ab: AbSection | None = None
    crashes: tuple[Crash, ...] = ()


def read(directory: Path) -> StoredReport:
    """Read a report directory.

    Args:
        directory: The report directory, or the verdict.json in it.

    Raises:
        UsageError: There is no valid verdict.json.
    """
    directory = stored_run.folder_of(directory)
    run = stored_run.file_of(directory)
    memory_name = run.memory.file if run.memory is not None else MEMORY_JSON
    memory = _beside(MemoryFile, directory, memory_name, run)
    compared = _beside(AbFile, directory, ab.FILE, run)
    matrix = _beside(MatrixFile, directory, "matrix/matrix.json", run)
    if matrix is not None and not matrix.cells:
        matrix = None
    return StoredReport(
        run=run,
        directory=directory,
        details=stored_run.details_of(directory),
        memory=memory,
        matrix=matrix,
        ab=AbSection(compared) if compared else None,
        crashes=crash_list.read_crashes(run.crashes, directory),
    )


def _beside(model: type[_Model], directory: Path, name: str, run: VerdictFile) -> _Model | None:
    path = directory / name
    if not path.resolve().is_relative_to(directory.resolve()):
        run.remarks.append(f"{name} is not read: it is not in the report directory")
        return None
    try:
        return lenient.validate(model, json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        run.remarks.append(f"{name} cannot be read: {error}")
        return None
