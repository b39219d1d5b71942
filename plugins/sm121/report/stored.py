"""A report directory as it was written, by this version of the suite or by another one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sm121.errors import UsageError
from sm121.report import crash_list, details, matrix_file, memory_file
from sm121.report.crash_list import Crash
from sm121.report.details import Details
from sm121.report.matrix_file import Matrix
from sm121.report.memory_file import MemoryTimeline
from sm121.report.verdict_file import SCHEMA_VERSION, VerdictFile

_ROUNDS = 8  # of dropping unknown keys: each can bring others to light


@dataclass(frozen=True)
class StoredReport:
    """Everything that a report is made from. What was not run is None or empty."""

    run: VerdictFile
    directory: Path
    details: Details = field(default_factory=Details)
    memory: MemoryTimeline | None = None
    matrix: Matrix | None = None
    crashes: tuple[Crash, ...] = ()
    #: The version of verdict.json's schema that it was written in.
    schema_version: int = SCHEMA_VERSION


def read(directory: Path) -> StoredReport:
    """Read a report directory, or the one of a verdict.json.

    Raises:
        UsageError: there is no verdict.json, or it is none.
    """
    if directory.name == "verdict.json" and directory.is_file():
        directory = directory.parent
    file = directory / "verdict.json"
    try:
        raw = json.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(
            f"{directory}: expected a report directory, one with a verdict.json ({error})"
        ) from error
    return of(raw, directory)


def of(raw: Any, directory: Path) -> StoredReport:
    """From a verdict.json's content and the files beside it.

    Raises:
        UsageError: it is no verdict.json.
    """
    if not isinstance(raw, dict) or "schema_version" not in raw:
        raise UsageError(f"{directory / 'verdict.json'}: expected a verdict.json of this suite")
    return StoredReport(
        run=_verdict(raw, directory / "verdict.json"),
        directory=directory,
        details=details.read(directory),
        memory=memory_file.read(directory),
        matrix=matrix_file.read(directory),
        crashes=crash_list.read(raw, directory),
        schema_version=int(raw["schema_version"]),
    )


def _verdict(raw: dict[str, Any], origin: Path) -> VerdictFile:
    """The model, without the keys that it does not know: those of another version."""
    known = json.loads(json.dumps(raw))
    for _ in range(_ROUNDS):
        try:
            return VerdictFile.model_validate(known)
        except ValidationError as error:
            unknown = [item["loc"] for item in error.errors() if item["type"] == "extra_forbidden"]
            if not unknown:
                raise UsageError(
                    f"{origin}: expected a verdict.json of schema version {SCHEMA_VERSION} or "
                    f"older ({error.errors()[0]['msg']} at "
                    f"{'.'.join(map(str, error.errors()[0]['loc']))})"
                ) from error
            for location in unknown:
                _drop(known, location)
    raise UsageError(f"{origin}: expected a verdict.json of this suite")


def _drop(data: Any, location: tuple[int | str, ...]) -> None:
    for part in location[:-1]:
        data = data[part]
    del data[location[-1]]
