"""How large a matrix is before anything runs, and what its cells took."""

from collections.abc import Mapping, Sequence

from sm121.core import templates
from sm121.matrix import covering, outcome
from sm121.matrix.axes import Space, count_allowed, identity
from sm121.matrix.plan import CellPlan

_MOST_STRENGTH = 3


def spent(
    records: Sequence[outcome.CellRecord], references: Sequence[outcome.CellRecord] = ()
) -> Mapping[str, float]:
    """What the cells of this run took: boots, seconds of boots, seconds in all. `references`: the
    baseline where it was started to compare with and is no cell of the run."""
    both = [*records, *references]
    return {
        "cells": len(records),
        "boots": sum(record.boot_s is not None for record in both),
        "boot_s": round(sum(record.boot_s or 0.0 for record in both), 1),
        "seconds": round(sum(record.took_s for record in both), 1),
    }


def sizes(space: Space) -> str:
    """A Markdown table: strength, cells, lower bound, coverage."""
    arrays = [
        covering.build(space, strength)
        for strength in range(1, min(_MOST_STRENGTH, len(space.axes)) + 1)
    ]
    environment = templates.environment(package="sm121.matrix")
    return environment.get_template("sizes.md.j2").render(
        space=space,
        product=count_allowed(space),
        arrays=arrays,
        bare=[covering.bare(space, number) for number, _ in enumerate(arrays, 1)],
        bounds=[covering.lower_bound(space, number) for number, _ in enumerate(arrays, 1)],
        coverage=[_coverage(space, array) for array in arrays],
        dropped=sorted({axis for axis, _ in space.absent} - set(space.axes)),
    )


def cells(plan: CellPlan) -> str:
    """The cells of one array, a line each."""
    space, array = plan.space, plan.array
    lines = [f"{identity(space, p.cell)}\t({', '.join(p.why)})" for p in array.cells]
    lines += [f"not in: {name}: {rule.reason}" for name, rule in array.incompatible.items()]
    lines += [f"{name}: {why}" for name, why in array.absent.items()]
    lines += [f"{len(array.cells)} cells, {_coverage(space, array)}"]
    return "\n".join(lines) + "\n"


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
