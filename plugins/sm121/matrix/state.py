"""What is known so far, written as it happens, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm121.matrix.outcome import CellRecord

_FILE = "state.jsonl"


class State:
    """The ended cells of a run, one JSON line each, after a line that says what run it is."""

    def __init__(self, directory: Path, fingerprint: Mapping[str, object]) -> None:
        self._file = directory / _FILE
        self._fingerprint = dict(fingerprint)

    def begin(self) -> None:
        """Open a new file; what is there is of a run that was given up."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if not self._file.exists():
            self._append({"run": self._fingerprint})

    def add(self, record: CellRecord) -> None:
        """Keep a cell; it is on the disk when this returns."""
        self.begin()
        self._append(json.loads(record.model_dump_json()))

    def _append(self, content: object) -> None:
        with self._file.open("a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(json.dumps(content) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def read(directory: Path, fingerprint: Mapping[str, object]) -> tuple[list[CellRecord], str | None]:
    """The cells that an earlier run has ended, or why none of them counts.

    A line that is cut off in the middle is the one that was written when the run was killed.
    """
    file = directory / _FILE
    if not file.is_file():
        return [], "there is no earlier state"
    lines = file.read_text("utf-8", "replace").splitlines()
    try:
        said = json.loads(lines[0])["run"] if lines else {}
    except (ValueError, KeyError, TypeError):
        return [], f"{file}: its first line is not that of a state"
    different = sorted(k for k in {*said, *fingerprint} if said.get(k) != fingerprint.get(k))
    if different:
        return [], f"the earlier run was another one: {', '.join(different)} differ"
    records: list[CellRecord] = []
    for line in lines[1:]:
        try:
            records.append(CellRecord.model_validate_json(line))
        except ValueError:
            break
    return [record.model_copy(update={"resumed": True}) for record in records], None


def digest(parts: Sequence[object]) -> str:
    """A short hash of what a run is made of."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
