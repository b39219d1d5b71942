"""A forest plot: per metric, how much better or worse B is than A, with its interval.

In every row, a point further right is better, also for metrics of which less is better, so that one
band can show the allowed loss. Each row belongs to a table that also shows the numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sm121.regression.change import Change, signed

#: Maximum number of ticks of an axis, so that their labels do not overlap on a narrow screen.
_MOST_TICKS = 5
#: Maximum change that an axis shows, as a fraction; an arrow marks larger changes.
_REACH = 1.0
#: Margin at the ends of the axis, as a fraction of its length.
_MARGIN = 0.06
#: The margins of an axis on which all changes are 0 are computed from this length.
_LEAST_SPREAD = 0.02
#: Distances between two ticks.
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Mark:
    """The marks of a row, in percent of the plot's width; a mark that is None is not drawn."""

    point: float | None
    interval: tuple[float, float] | None
    #: The range from the maximum allowed loss to no change.
    band: tuple[float, float] | None
    #: ``left`` or ``right`` if the point is beyond that end of the axis.
    beyond: str | None = None


@dataclass(frozen=True)
class Forest:
    """A drawn plot: its rows, the position of no change, and the ticks with their labels."""

    rows: tuple[tuple[Change, Mark], ...]
    zero: float
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class _Axis:
    """The horizontal axis: the changes at its ends as fractions, where positive is better."""

    low: float
    high: float

    def position(self, value: float) -> float:
        """Return the position of a change in percent; changes beyond an end are at that end."""
        inside = min(max(value, self.low), self.high)
        return round(100.0 * (inside - self.low) / (self.high - self.low), 2)

    def ticks(self) -> list[tuple[float, str]]:
        """Return ticks at round numbers between the ends; 0 is one of them."""
        step = _STEPS[-1]
        for candidate in _STEPS:
            if (self.high - self.low) / candidate < _MOST_TICKS:
                step = candidate
                break
        ticks = []
        for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1):
            ticks.append((self.position(n * step), f"{signed(n * step, 0)} %"))
        return ticks


def draw(changes: Sequence[Change]) -> Forest | None:
    """Draw the plot of some changes.

    Args:
        changes: The changes from A to B, in the order of the rows.

    Returns:
        The plot, or None for no changes.
    """
    if not changes:
        return None
    axis = _axis(changes)
    rows = tuple((change, _mark(change, axis)) for change in changes)
    return Forest(rows, axis.position(0.0), tuple(axis.ticks()))


def _axis(changes: Sequence[Change]) -> _Axis:
    ends = [0.0]
    for change in changes:
        point = _better(change)
        if point is not None:
            ends.append(point)
        if change.interval is not None:
            ends.extend(change.interval)
        if change.allowed is not None:
            ends.append(-change.allowed)
    low = max(-_REACH, min(ends))
    high = min(_REACH, max(ends))
    margin = _MARGIN * ((high - low) or _LEAST_SPREAD)
    return _Axis(low - margin, high + margin)


def _mark(change: Change, axis: _Axis) -> Mark:
    point = _better(change)
    position = None
    beyond = None
    if point is not None:
        position = axis.position(point)
        if point < axis.low:
            beyond = "left"
        elif point > axis.high:
            beyond = "right"
    interval = None
    if change.interval is not None:
        low, high = change.interval
        interval = (axis.position(low), axis.position(high))
    band = None
    if change.allowed is not None:
        band = (axis.position(-change.allowed), axis.position(0.0))
    return Mark(position, interval, band, beyond)


def _better(change: Change) -> float | None:
    return None if change.worse is None else -change.worse
