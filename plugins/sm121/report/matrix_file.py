"""matrix.json: the cells of the matrix. The one place that knows what its fields are called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "matrix.json"
_CELLS = ("cells", "results", "rows")
_VALUES = ("values", "axes", "assignment", "cell")
_STATUS = ("verdict", "status", "state", "outcome")
_NOTE = ("reason", "message", "note", "why")
_ID = ("id", "name", "key", "cell_id")


@dataclass(frozen=True)
class Cell:
    """One combination of axis values, and what became of it."""

    name: str
    values: Mapping[str, str]
    verdict: str
    note: str
    #: The rest of what is known: path, rates, seconds.
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Matrix:
    """The cells, and the values of each axis in the order in which they are met."""

    axes: Mapping[str, tuple[str, ...]]
    cells: tuple[Cell, ...]
    #: What was covered, in the words of the file.
    coverage: tuple[tuple[str, str], ...] = ()


def read(directory: Path) -> Matrix | None:
    """matrix.json of a report directory; None where there is none, or no cell in it."""
    try:
        raw = json.loads((directory / NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return of(raw)


def of(raw: Any) -> Matrix | None:
    """From the file's content; None when no cell can be read."""
    listed: Any = raw
    head: Mapping[str, Any] = {}
    if isinstance(raw, dict):
        head = raw
        listed = next((raw[name] for name in _CELLS if isinstance(raw.get(name), list)), [])
    cells = [cell for cell in map(_cell, listed if isinstance(listed, list) else []) if cell]
    if not cells:
        return None
    axes: dict[str, tuple[str, ...]] = {}
    for cell in cells:
        for axis, value in cell.values.items():
            if value not in axes.get(axis, ()):
                axes[axis] = (*axes.get(axis, ()), value)
    coverage = tuple(
        (str(key).replace("_", " "), _text(value))
        for key, value in head.items()
        if key not in _CELLS and isinstance(value, (str, int, float, bool))
    )
    return Matrix(axes, tuple(cells), coverage)


def _cell(row: Any) -> Cell | None:
    if not isinstance(row, dict):
        return None
    values = next((row[name] for name in _VALUES if isinstance(row.get(name), dict)), None)
    verdict = next((str(row[name]) for name in _STATUS if row.get(name)), None)
    if values is None or verdict is None:
        return None
    known = {*_VALUES, *_STATUS, *_NOTE, *_ID}
    return Cell(
        name=next((str(row[name]) for name in _ID if row.get(name)), ""),
        values={str(axis): _text(value) for axis, value in values.items()},
        verdict=verdict,
        note=next((_text(row[name]) for name in _NOTE if row.get(name)), ""),
        facts={
            str(key).replace("_", " "): _text(value)
            for key, value in row.items()
            if key not in known and isinstance(value, (str, int, float, bool))
        },
    )


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
