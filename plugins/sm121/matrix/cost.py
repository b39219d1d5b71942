"""What a matrix costs: predicted from the durations of earlier boots, reported from its own; and
what it would be, before anything runs: its size, its coverage."""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.core import files, level_settings, templates
from sm121.core.level_settings import MatrixPlan
from sm121.core.profile import Profile
from sm121.matrix import axes, covering, outcome
from sm121.matrix.axes import Space, identity
from sm121.matrix.plan import CellPlan, settings_of


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


#: Server configurations whose times are stored: the latest.
_CONFIGURATIONS = 500


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
        self._earlier = dict([*self._earlier.items()][-_CONFIGURATIONS:])
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
    total, boots, timed, before = 0.0, 0, 0, running
    for cell, key in zip(cells, keys, strict=True):
        earlier = durations.of(key) if durations is not None else {}
        if key != before:
            boots += 1
            timed += "boot_s" in earlier
            extra = sum(space.value(axis, cell[axis]).boot_s for axis in space.axes)
            total += earlier.get("boot_s", plan.boot_s.value + extra)
        total += earlier.get("cell_s", plan.cell_s.value)
        before = key
    basis = f"none of these boots timed yet; a boot {plan.boot_s.value:g} s: {plan.boot_s.source}"
    if timed:
        basis = f"{timed} of {boots} boots were timed before on this machine"
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


_MOST_STRENGTH = 3


def sizes(profile: Profile, space: Space) -> str:
    """A Markdown table: strength, cells, lower bound, coverage, predicted machine hours."""
    settings = settings_of(profile)
    arrays = [
        covering.build(space, strength)
        for strength in range(1, min(_MOST_STRENGTH, len(space.axes)) + 1)
    ]
    environment = templates.environment(package="sm121.matrix")
    return environment.get_template("sizes.md.j2").render(
        space=space,
        settings=settings,
        product=space.product_allowed(),
        arrays=arrays,
        bare=[covering.bare(space, number) for number, _ in enumerate(arrays, 1)],
        bounds=[covering.lower_bound(space, number) for number, _ in enumerate(arrays, 1)],
        coverage=[_coverage(space, array) for array in arrays],
        hours=[_hours(space, array, settings) for array in arrays],
        dropped=sorted({axis for axis, _ in space.absent} - set(space.axes)),
    )


def cells(plan: CellPlan) -> str:
    """The cells of one array, a line each."""
    space, array = plan.space, plan.array
    lines = [f"{identity(space, p.cell)}\t({', '.join(p.why)})" for p in array.cells]
    lines += [f"not in: {name}: {rule.reason}" for name, rule in array.incompatible.items()]
    lines += [f"{name}: {why}" for name, why in array.absent.items()]
    hours = seconds(plan) / 3600
    lines += [f"{len(array.cells)} cells, {_coverage(space, array)}; {hours:.1f} machine hours"]
    return "\n".join(lines) + "\n"


def seconds(plan: CellPlan) -> float:
    """How long the cells of a plan take where none was timed."""
    return _hours(plan.space, plan.array, plan.settings) * 3600


def of_run(plan: CellPlan) -> list[str]:
    """What a run will try, a line each."""
    space, array = plan.space, plan.array
    return [
        f"{space.engine} {space.version or '(version unknown)'}: {len(space.axes)} axes "
        f"({', '.join(space.axes)}), {space.product} combinations",
        f"strength {array.strength}: {len(array.cells)} cells; {_coverage(space, array)}",
    ]


def _coverage(space: Space, array: covering.Array) -> covering.Coverage:
    number = array.strength if isinstance(array.strength, int) else 2
    return covering.coverage(space, [p.cell for p in array.cells], min(number, len(space.axes)))


def _hours(space: Space, array: covering.Array, settings: MatrixPlan) -> float:
    cells = [planned.cell for planned in array.cells]
    keys = [str(space.given(cell)) for cell in cells]
    return predict(space, cells, keys, settings).seconds / 3600
