"""The cells that have ended, written as they end, so that a killed run goes on where it was."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from sm121.matrix.outcome import CellOutcome, CellRecord
from sm121.run.directory import WORKERS

#: Of the report directory: everything that the matrix level writes.
FOLDER = "matrix"
_FILE = "state.jsonl"


def add(record: CellRecord, directory: Path, fingerprint: Mapping[str, object]) -> None:
    """Keep a cell, one JSON line on the disk, after a line that says what run it is of."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / _FILE
    run = [] if file.exists() else [{"run": dict(fingerprint)}]
    with file.open("a", encoding="utf-8", errors="backslashreplace") as stream:
        for content in (*run, json.loads(record.model_dump_json())):
            stream.write(json.dumps(content) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def read(directory: Path, fingerprint: Mapping[str, object]) -> tuple[list[CellRecord], str | None]:
    """The cells that an earlier run has ended, or why none of them counts. A line that is cut off
    in the middle is the one that was written when the run was killed."""
    file = directory / _FILE
    if not file.is_file():
        return [], "there is no earlier state"
    lines = file.read_text("utf-8", "replace").splitlines()
    try:
        run = json.loads(lines[0])["run"] if lines else {}
    except (ValueError, KeyError, TypeError):
        return [], f"{file}: its first line is not that of a state"
    different = sorted(k for k in {*run, *fingerprint} if run.get(k) != fingerprint.get(k))
    if different:
        return [], f"the earlier run was another one: {', '.join(different)} differ"
    records: list[CellRecord] = []
    for line in lines[1:]:
        try:
            records.append(CellRecord.model_validate_json(line))
        except ValueError:
            break
    return [record.model_copy(update={"resumed": True}) for record in records], None


def take_over(
    report: Path, fingerprint: Mapping[str, object], directory: Path
) -> tuple[list[CellRecord], str]:
    """The cells of the newest earlier run that was the same one, all workers', and the folder that
    they are of; without any cell the reason why not. Their bundles are copied. `report`: the report
    directory, which keeps earlier runs; `directory`: where this run's matrix is written."""
    reasons: list[str] = []
    for earlier in sorted((report / "earlier").glob("*"), reverse=True):
        records: list[CellRecord] = []
        for part in (earlier / FOLDER, *sorted((earlier / WORKERS).glob(f"*/{FOLDER}"))):
            if not part.is_dir():
                continue
            cells, why = read(part, fingerprint)
            if why is not None:
                reasons.append(why)
                continue
            for record in cells:
                repeated = any(other.values == record.values for other in records)
                if not (record.outcome is CellOutcome.NOT_RUN or record.isolating or repeated):
                    records.append(record)
            if (part / "bundles").is_dir():
                shutil.copytree(part / "bundles", directory / "bundles", dirs_exist_ok=True)
        if records:
            return records, str(earlier / FOLDER)
    why = f"no cell is taken over: {reasons[0]}" if reasons else ""
    return [], why or "there is no earlier matrix in the report directory"
