"""What a matrix costs: predicted from the durations of earlier boots, reported from its own."""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sm121.core import files, level_settings
from sm121.matrix import axes, outcome

_KEPT = 500


@dataclass(frozen=True)
class Prediction:
    """How long it will take, and what that rests on."""

    cells: int
    boots: int
    seconds: float
    basis: str

    def __str__(self) -> str:
        return (
            f"{self.cells} cells on {self.boots} boots, about {duration(self.seconds)} "
            f"({self.basis})"
        )


class Durations:
    """Earlier boots and cells on this machine, by server configuration."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            content = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError):
            content = {}
        self._earlier: dict[str, dict[str, float]] = content if isinstance(content, dict) else {}

    def of(self, key: str) -> Mapping[str, float]:
        """``boot_s``, the last boot of that configuration, and ``cell_s``, its last cell without
        the boot; what was not timed is left out."""
        return self._earlier.get(key, {})

    def typical(self) -> tuple[float, float] | None:
        """The medians of all that is known."""
        boots = [d["boot_s"] for d in self._earlier.values() if "boot_s" in d]
        cells = [d["cell_s"] for d in self._earlier.values() if "cell_s" in d]
        return (median(boots), median(cells)) if boots and cells else None

    def learn(self, records: Iterable[outcome.CellRecord]) -> None:
        """Keep the durations of these cells."""
        for record in records:
            if record.resumed or not record.steps:
                continue
            durations = self._earlier.pop(record.configuration, {})
            if record.boot_s is not None:
                durations["boot_s"] = record.boot_s
            if not record.outcome.broken:
                durations["cell_s"] = round(record.took_s - (record.boot_s or 0.0), 2)
            if durations:
                self._earlier[record.configuration] = durations
        self._earlier = dict(list(self._earlier.items())[-_KEPT:])
        with contextlib.suppress(OSError):  # a folder that cannot be written costs a prediction
            self._file.parent.mkdir(parents=True, exist_ok=True)
            files.write_text(json.dumps(self._earlier, indent=1) + "\n", self._file)


def predict(
    space: axes.Space,
    cells: Sequence[axes.Cell],
    keys: Sequence[str],
    plan: level_settings.MatrixPlan,
    durations: Durations | None = None,
    running: str | None = None,
) -> Prediction:
    """How long the cells will take, in their order. `keys`: of each cell's server configuration;
    `running`: key of the server that runs already."""
    typical = durations.typical() if durations is not None else None
    boot_default, cell_default = typical or (plan.boot_s.value, plan.cell_s.value)
    total, boots, timed, before = 0.0, 0, 0, running
    for cell, key in zip(cells, keys, strict=True):
        earlier = durations.of(key) if durations is not None else {}
        if key != before:
            boots += 1
            timed += "boot_s" in earlier
            extra = sum(space.value(axis, cell[axis]).boot_s for axis in space.axes)
            total += earlier.get("boot_s", boot_default + extra)
        total += earlier.get("cell_s", cell_default)
        before = key
    if timed:
        basis = f"{timed} of {boots} boots were timed before on this machine"
    elif typical:
        basis = "from other configurations that were started on this machine"
    else:
        basis = f"nothing timed yet; a boot {boot_default:g} s: {plan.boot_s.source}"
    return Prediction(len(cells), boots, total, basis)


def duration(seconds: float) -> str:
    """For people: 45 s, 12 min, 3.4 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def spent(
    records: Sequence[outcome.CellRecord], references: Sequence[outcome.CellRecord] = ()
) -> Mapping[str, float]:
    """What the cells of this run took: boots, seconds of boots, seconds in all. `references`: the
    baseline where it was started to compare with and is no cell of the run."""
    new = [record for record in records if not record.resumed]
    both = [*new, *references]
    return {
        "cells": len(new),
        "boots": sum(record.boot_s is not None for record in both),
        "boot_s": round(sum(record.boot_s or 0.0 for record in both), 1),
        "seconds": round(sum(record.took_s for record in both), 1),
    }
