"""What the report shows of matrix.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sm121.matrix.feature_matrix import MatrixFile
from sm121.matrix.outcome import CellRecord

NAME = "matrix/matrix.json"


@dataclass(frozen=True)
class MatrixCell:
    """One combination of axis values, and what became of it."""

    name: str
    values: Mapping[str, str]
    verdict: str
    note: str
    #: The rest of what is known: class of the failure, seconds, rate.
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Matrix:
    """The cells, and the values of each axis in the order of its file."""

    axes: Mapping[str, tuple[str, ...]]
    cells: tuple[MatrixCell, ...]
    #: What was covered: a heading and its figure.
    coverage: tuple[tuple[str, str], ...] = ()
    #: The smallest sets of values that fail together, a sentence each.
    failing: tuple[str, ...] = ()


def view(file: MatrixFile) -> Matrix | None:
    """None when no cell has come to an outcome."""
    if not file.cells:
        return None
    return Matrix(
        axes={axis: tuple(values) for axis, values in file.values.items()},
        cells=tuple(map(_cell, file.cells)),
        coverage=_coverage(file),
        failing=tuple(one.text for one in file.failing_sets),
    )


def _coverage(file: MatrixFile) -> tuple[tuple[str, str], ...]:
    found = [
        ("axes", file.axes),
        ("engine", " ".join(filter(None, (file.engine, file.version)))),
        ("strength", str(file.strength)),
        ("all combinations", str(file.product)),
    ]
    found += [
        (f"combinations of {one.strength}",
         f"{one.ran} ran of {one.allowed}, {one.covered} planned")
        for one in file.coverage
    ]  # fmt: skip
    counted = {
        "cells not run yet": file.not_run,
        "known not to go together": file.incompatible,
        "values that this engine does not have": file.absent,
        "cells left out": file.left_out,
    }
    found += [(what, str(len(listed))) for what, listed in counted.items() if listed]
    if file.predicted is not None:
        found.append(("predicted", file.predicted))
    return tuple(found)


def _cell(record: CellRecord) -> MatrixCell:
    facts = {"took": f"{record.took_s:.0f} s"}
    if record.kind is not None:
        facts = {"class": record.kind, **facts}
    if record.rate is not None and record.rate.value is not None:
        against = f" ({record.rate.ratio:.0%} of the baseline)" if record.rate.ratio else ""
        facts[record.rate.metric] = f"{record.rate.value:.4g}{against}"
    if record.isolating:
        facts["run"] = "to find the smallest set"
    return MatrixCell(record.id, record.values, record.outcome.value, record.reason, facts)
