"""A report directory as it was written, by this version of the suite or by another one."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from sm121.core import lenient
from sm121.matrix.feature_matrix import MatrixFile
from sm121.measure.growth import Growth
from sm121.measure.timeline import Sample
from sm121.regression import ab_file
from sm121.regression.ab_file import AbFile
from sm121.report import crash_list
from sm121.report.ab_section import AbSection
from sm121.report.crash_list import Crash
from sm121.run import details, stored_run
from sm121.run.details import Details
from sm121.run.verdict_file import VerdictFile
from sm121.stress.memory import MEMORY_JSON, MemoryFile

_Model = TypeVar("_Model", bound=BaseModel)


#: Points that a chart shows; more only make the file larger.
_MOST_POINTS = 1500
_LEVELS: dict[str, Callable[[Sample], float | None]] = {
    # Shared pages by their share first: the better sum over a tree of processes.
    "server's processes": lambda sample: sample.pss_bytes or sample.rss_bytes,
    "GPU memory in use": lambda sample: sample.device_bytes,
    "host memory available": lambda sample: sample.available_bytes,
}


@dataclass(frozen=True)
class MemoryTimeline:
    """What a page shows: levels in GiB over the seconds; a level that was not read is None."""

    seconds: tuple[float, ...]
    levels: dict[str, tuple[float | None, ...]]
    #: Share of the KV cache in use, 0 to 1; empty when no sample has it.
    cache: tuple[float | None, ...] = ()
    growth: tuple[Growth, ...] = ()


@dataclass(frozen=True)
class StoredReport:
    """Everything that a report is made from. What was not run is None or empty."""

    run: VerdictFile
    directory: Path
    details: Details = field(default_factory=Details)
    memory: MemoryTimeline | None = None
    matrix: MatrixFile | None = None
    ab: AbSection | None = None
    crashes: tuple[Crash, ...] = ()


def read(directory: Path) -> StoredReport:
    """Read a report directory, or a verdict.json's. Raises UsageError: there is no sound one."""
    directory = stored_run.folder_of(directory)
    run = stored_run.file_of(directory)
    memory_name = run.memory.file if run.memory is not None else MEMORY_JSON
    memory = _beside(MemoryFile, directory, memory_name, run)
    ab = _beside(AbFile, directory, ab_file.NAME, run)
    matrix = _beside(MatrixFile, directory, "matrix/matrix.json", run)
    return StoredReport(
        run=run,
        directory=directory,
        details=details.read(directory),
        memory=timeline(memory) if memory else None,
        matrix=matrix if matrix and matrix.cells else None,
        ab=AbSection(ab) if ab else None,
        crashes=crash_list.read(run.crashes, directory),
    )


def timeline(file: MemoryFile) -> MemoryTimeline | None:
    """At most 1,500 of the samples, evenly; None when there is none."""
    samples = file.samples[:: max(1, len(file.samples) // _MOST_POINTS)]
    if not samples:
        return None
    levels = {}
    for name, level in _LEVELS.items():
        sizes = [level(sample) for sample in samples]
        if any(size is not None for size in sizes):
            levels[name] = tuple(None if size is None else size / 2**30 for size in sizes)
    cache = tuple(sample.cache_usage for sample in samples)
    return MemoryTimeline(
        seconds=tuple(sample.at_s - samples[0].at_s for sample in samples),
        levels=levels,
        cache=cache if any(share is not None for share in cache) else (),
        growth=tuple(file.growth),
    )


def _beside(model: type[_Model], directory: Path, name: str, run: VerdictFile) -> _Model | None:
    """A file beside verdict.json; None where it is not. One that cannot be read is remarked."""
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
