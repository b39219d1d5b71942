"""matrix.json: the cells of the matrix. The one place that knows what its fields are called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("matrix/matrix.json", "matrix.json")
#: What of the head says how much was covered.
_HEAD = ("axes", "engine", "version", "strength", "covered_pairs", "product", "predicted")
#: Lists and tables of the head, and what they are called on a page.
_COUNTED = {
    "not_run": "cells not run yet",
    "incompatible": "known not to go together",
    "absent": "values that this engine does not have",
    "left_out": "cells left out",
}
_CELLS = ("cells", "results", "rows")
_VALUES = ("values", "axes", "assignment", "cell")
_STATUS = ("verdict", "status", "state", "outcome")
_NOTE = ("reason", "message", "note")
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
    #: The smallest sets of values that fail together, a sentence each.
    failing: tuple[str, ...] = ()


def read(directory: Path) -> Matrix | None:
    """matrix.json of a report directory; None where there is none, or no cell in it."""
    for name in NAMES:
        try:
            raw = json.loads((directory / name).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        return of(raw)
    return None


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
    sets = head.get("failing_sets")
    failing = tuple(
        str(item.get("text") or item.get("reason") or item)
        for item in (sets if isinstance(sets, list) else ())
        if isinstance(item, dict)
    )
    return Matrix(axes, tuple(cells), _coverage(head), failing)


def _coverage(head: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    found = [
        (key.replace("_", " "), _text(head[key])) for key in _HEAD if head.get(key) is not None
    ]
    found += [(what, str(len(head[key]))) for key, what in _COUNTED.items() if head.get(key)]
    listed = head.get("coverage")
    for item in listed if isinstance(listed, list) else ():
        if isinstance(item, dict) and {"strength", "allowed", "covered", "ran"} <= set(item):
            what = f"combinations of {item['strength']}"
            found.append(
                (what, f"{item['ran']} ran of {item['allowed']}, {item['covered']} planned")
            )
    return tuple(found)


def _cell(row: Any) -> Cell | None:
    if not isinstance(row, dict):
        return None
    values = next((row[name] for name in _VALUES if isinstance(row.get(name), dict)), None)
    verdict = next((str(row[name]) for name in _STATUS if row.get(name)), None)
    if values is None or verdict is None:
        return None
    facts = {"class": row.get("kind"), "took": _seconds(row.get("took_s"))}
    rate = row.get("rate")
    if isinstance(rate, dict) and rate.get("value") is not None:
        of_baseline = rate.get("ratio")
        facts[str(rate.get("metric", "rate"))] = _text(rate["value"]) + (
            f" ({of_baseline:.0%} of the baseline)" if isinstance(of_baseline, float) else ""
        )
    return Cell(
        name=next((str(row[name]) for name in _ID if row.get(name)), ""),
        values={str(axis): _text(value) for axis, value in values.items()},
        verdict=verdict,
        note=next((_text(row[name]) for name in _NOTE if row.get(name)), ""),
        facts={name: str(value) for name, value in facts.items() if value is not None},
    )


def _seconds(value: Any) -> str | None:
    return f"{value:.0f} s" if isinstance(value, (int, float)) else None


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
