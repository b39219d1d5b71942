"""In which order cells are run: those of one start-up beside each other, and near ones near."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from sm121.matrix.axes import Space
from sm121.matrix.covering import Planned


def ordered(
    space: Space, cells: Sequence[Planned], key: Callable[[Planned], Hashable]
) -> list[Planned]:
    """The baseline first, for it is what all others are compared with; cells of one start-up
    together; then the start-up next that shares most values with the last, so that what the engine
    keeps (compiled kernels, the page cache) is used while it is there. Ties: the plan's order."""
    groups: dict[Hashable, list[Planned]] = {}
    for planned in cells:
        groups.setdefault(key(planned), []).append(planned)
    waiting = list(groups.values())
    result: list[Planned] = []
    while waiting:
        last = result[-1].cell if result else space.baseline
        nearest = min(
            range(len(waiting)),
            key=lambda n: (
                not result and "baseline" not in waiting[n][0].why,
                min(sum(p.cell[a] != last[a] for a in space.axes) for p in waiting[n]),
                n,
            ),
        )
        result += waiting.pop(nearest)
    return result
