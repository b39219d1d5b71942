"""A forest plot: one row a metric, how much better or worse B is than A, and its interval. Better
is to the right in every row, whether more or less of the metric is better, so that one band shows
what is allowed. A row is part of a table that has its data: the numbers need no plot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sm121.regression.change import Change, signed

#: Ticks of an axis at most, so that they do not run into each other on a narrow screen.
_MOST_TICKS = 5
#: An axis shows at most a change by this factor of its size: what is further out is an arrow.
_REACH = 1.0
#: Room beside what is furthest out, as a share of the axis.
_MARGIN = 0.06
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Mark:
    """What is drawn in a row, in percent of the plot's width; None is not drawn."""

    point: float | None
    interval: tuple[float, float] | None
    #: From what is just allowed to no change.
    band: tuple[float, float] | None
    #: The point is beyond the end of the axis: ``left`` or ``right``.
    beyond: str | None = None


@dataclass(frozen=True)
class Forest:
    """A drawn plot: its rows, where no change is, and the ticks with their labels."""

    rows: tuple[tuple[Change, Mark], ...]
    zero: float
    ticks: tuple[tuple[float, str], ...]


def draw(changes: Sequence[Change]) -> Forest | None:
    """The plot of some changes, in their order; None where there is none."""
    if not changes:
        return None
    ends = [0.0]
    for change in changes:
        ends += [x for x in (_better(change), *(change.interval or ())) if x is not None]
        ends += [-change.allowed] if change.allowed is not None else []
    low, high = max(-_REACH, min(ends)), min(_REACH, max(ends))
    spread = (high - low) or 0.02
    low, high = low - _MARGIN * spread, high + _MARGIN * spread

    def at(value: float) -> float:
        return round(100.0 * (min(max(value, low), high) - low) / (high - low), 2)

    rows = []
    for change in changes:
        point, interval = _better(change), change.interval
        outside = point is not None and not low <= point <= high
        mark = Mark(
            point=None if point is None else at(point),
            interval=None if interval is None else (at(interval[0]), at(interval[1])),
            band=None if change.allowed is None else (at(-change.allowed), at(0.0)),
            beyond=None if not outside else "left" if (point or 0.0) < low else "right",
        )
        rows.append((change, mark))
    # Round numbers between the ends, no change among them.
    step = next((s for s in _STEPS if (high - low) / s < _MOST_TICKS), _STEPS[-1])
    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    ticks = tuple((at(n * step), f"{signed(n * step, 0)} %") for n in numbers)
    return Forest(tuple(rows), at(0.0), ticks)


def _better(change: Change) -> float | None:
    return None if change.worse is None else -change.worse
