"""The size of a matrix before it runs, and the time that its cells took."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sm121.core import templates
from sm121.matrix import covering
from sm121.matrix.plan import CellPlan
from sm121.matrix.space import Space, count_allowed, identity
from sm121.run.cell_record import CellRecord

#: The maximum strength in the table of sizes.
_MOST_STRENGTH = 3


@dataclass(frozen=True)
class _Row:
    """The size of one array, for the table of sizes."""

    strength: int
    #: The number of cells without the named ones.
    bare: int
    cells: int
    #: A lower bound of the number of cells.
    bound: int
    coverage: covering.Coverage


def spent(
    records: Sequence[CellRecord], references: Sequence[CellRecord] = ()
) -> Mapping[str, float]:
    """Return the cost of the cells of a run.

    Args:
        records: The cells.
        references: Starts of the baseline that are not cells of the run, for comparison only.

    Returns:
        The number of ``cells`` and ``boots``, the seconds of the boots (``boot_s``), and all
        ``seconds``.
    """
    both = [*records, *references]
    boots_s = [record.boot_s for record in both if record.boot_s is not None]
    return {
        "cells": len(records),
        "boots": len(boots_s),
        "boot_s": round(sum(boots_s), 1),
        "seconds": round(sum(record.took_s for record in both), 1),
    }


def sizes(space: Space) -> str:
    """Return a Markdown table with the cells, the lower bound and the coverage of each strength.

    Args:
        space: The axes. The strengths are 1 to 3, but at most the number of axes.
    """
    rows = []
    for strength in range(1, min(_MOST_STRENGTH, len(space.axes)) + 1):
        array = covering.build(space, strength)
        rows.append(
            _Row(
                strength=strength,
                bare=covering.bare(space, strength),
                cells=len(array.cells),
                bound=covering.lower_bound(space, strength),
                coverage=_coverage(space, array),
            )
        )
    environment = templates.environment(package="sm121.matrix")
    return environment.get_template("sizes.md.j2").render(
        space=space,
        product=count_allowed(space),
        rows=rows,
        dropped=sorted({axis for axis, _ in space.absent} - set(space.axes)),
    )


def cells(plan: CellPlan) -> str:
    """Return one line per cell of a plan, and a last line with the coverage.

    Args:
        plan: The plan. Its named cells that are not started have a line with the reason.
    """
    space = plan.space
    array = plan.array
    lines = []
    for planned in array.cells:
        lines.append(f"{identity(space, planned.cell)}\t({', '.join(planned.why)})")
    for name, rule in array.incompatible.items():
        lines.append(f"incompatible, not started: {name}: {rule.reason}")
    for name, why in array.absent.items():
        lines.append(f"{name}: {why}")
    lines.append(f"{len(array.cells)} cells, {_coverage(space, array)}")
    return "\n".join(lines) + "\n"


def of_run(plan: CellPlan) -> list[str]:
    """Return the size of a run's matrix: one line on the axes, one on the cells.

    Args:
        plan: The plan of the run.
    """
    space = plan.space
    array = plan.array
    axes = "1 axis" if len(space.axes) == 1 else f"{len(space.axes)} axes"
    return [
        f"{space.engine} {space.version or '(version unknown)'}: {axes} "
        f"({', '.join(space.axes)}), {space.product} combinations",
        f"strength {array.strength}: {len(array.cells)} cells; {_coverage(space, array)}",
    ]


def _coverage(space: Space, array: covering.Array) -> covering.Coverage:
    """Return how many combinations of values the array covers.

    The combinations have as many values as the array's strength; for ``full`` or ``none``, two.
    """
    strength = array.strength if isinstance(array.strength, int) else 2
    return covering.coverage(space, array.rows, min(strength, len(space.axes)))
