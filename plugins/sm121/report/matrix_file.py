"""matrix.json, as `sm121.matrix.report` writes it, in the form that the page shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sm121.matrix.outcome import CellRecord
from sm121.matrix.report import MatrixFile

NAME = "matrix.json"


@dataclass(frozen=True)
class Cell:
    """One combination of axis values, and what became of it."""

    name: str
    values: Mapping[str, str]
    outcome: str
    note: str
    #: The rest of what is known: rate, seconds.
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Matrix:
    """The cells, and the values of each axis in the order of the axes' file."""

    axes: Mapping[str, tuple[str, ...]]
    cells: tuple[Cell, ...]
    #: What was covered, in words.
    coverage: tuple[tuple[str, str], ...] = ()
    #: The smallest sets of values that fail.
    failing: tuple[str, ...] = ()


def read(directory: Path) -> Matrix | None:
    """matrix.json of a report directory; None where there is none that can be read."""
    try:
        raw = json.loads((directory / NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return of(raw)


def of(raw: Any) -> Matrix | None:
    """From the file's content; None when it is no matrix.json, or has no cell."""
    if not isinstance(raw, dict):
        return None
    try:
        file = MatrixFile.model_validate({k: v for k, v in raw.items() if k != "pairs"})
    except ValidationError:
        return None
    if not file.cells:
        return None
    coverage = [("engine", " ".join(filter(None, (file.engine, file.version))))]
    coverage += [
        (
            f"combinations of {found.strength}",
            f"{found.ran} of {found.allowed} ran, {found.covered} planned",
        )
        for found in file.coverage
    ]
    coverage += [("of the full product", f"{len(file.cells)} of {file.product} cells")]
    if file.predicted:
        coverage.append(("predicted", file.predicted))
    coverage += [(name.replace("_", " "), f"{value:.4g}") for name, value in file.spent.items()]
    return Matrix(
        {axis: tuple(values) for axis, values in file.values.items()},
        tuple(map(_cell, file.cells)),
        tuple(coverage),
        tuple(found.text for found in file.failing_sets),
    )


def _cell(record: CellRecord) -> Cell:
    facts = {}
    if record.rate is not None and record.rate.value is not None:
        facts[record.rate.metric] = f"{record.rate.value:.4g} {record.rate.unit}"
        if record.rate.ratio is not None:
            facts["of the baseline"] = f"{record.rate.ratio:.2f}"
    facts["took"] = f"{record.took_s:.0f} s"
    return Cell(record.id, record.values, record.outcome.value, record.reason, facts)
