"""A forest plot: one row a metric, how much better or worse B is than A, and its interval.

Better is to the right in every row, whether more or less of the metric is better, so that one band
shows what is allowed. A row is part of a table that has its data: the numbers need no plot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sm121.core.verdict import Verdict
from sm121.report import metric_names

#: Ticks of an axis at most, so that they do not run into each other on a narrow screen.
_MOST_TICKS = 5
#: An axis shows at most a change by this factor of its size: what is further out is an arrow.
_REACH = 1.0
#: Room beside what is furthest out, as a share of the axis.
_MARGIN = 0.06
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Change:
    """B against A in one metric, as its author judged it."""

    metric: str
    unit: str
    higher_is_better: bool
    a: float | None
    b: float | None
    #: B / A. None where a value is no positive number; the interval also where none can be had.
    ratio: float | None
    low: float | None = None
    high: float | None = None
    #: How much worse B may be, as a fraction; None where nothing says.
    allowed: float | None = None
    #: Of the change; None where it was not judged.
    verdict: Verdict | None = None
    #: The intervals of the two values themselves, and anything else that a reader must know.
    a_interval: str = ""
    b_interval: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        """The metric for people."""
        return metric_names.words(self.metric)

    @property
    def percent(self) -> str:
        """The change as the metric itself went: ``-9.7 %``."""
        return "not known" if self.ratio is None else f"{_percent(self.ratio - 1)} %"

    @property
    def bounds(self) -> str:
        """The interval of the change in percent; empty where there is none."""
        if self.low is None or self.high is None:
            return ""
        return f"[{_percent(self.low - 1)}, {_percent(self.high - 1)}]"

    @property
    def text(self) -> str:
        """The change with its interval."""
        return f"{self.percent} {self.bounds}".strip()

    @property
    def tone(self) -> str:
        """The verdict in the words of the style sheet."""
        return (self.verdict or Verdict.NOT_RUN).value

    @property
    def decided(self) -> bool:
        """Whether the change counts one way or the other: else it is drawn hollow."""
        return self.verdict in (Verdict.PASS, Verdict.FAIL)

    @property
    def better(self) -> float | None:
        """How much better B is, as a fraction of A; below 0 where it is worse."""
        return self._better(self.ratio)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of ``better``, the worse end first."""
        low, high = self._better(self.low), self._better(self.high)
        return None if low is None or high is None else (min(low, high), max(low, high))

    def _better(self, ratio: float | None) -> float | None:
        if ratio is None or not math.isfinite(ratio):
            return None
        return ratio - 1.0 if self.higher_is_better else 1.0 - ratio


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
        ends += [x for x in (change.better, *(change.interval or ())) if x is not None]
        ends += [-change.allowed] if change.allowed is not None else []
    left, right = max(-_REACH, min(ends)), min(_REACH, max(ends))
    spread = (right - left) or 0.02
    left, right = left - _MARGIN * spread, right + _MARGIN * spread

    def at(value: float) -> float:
        return round(100.0 * (min(max(value, left), right) - left) / (right - left), 2)

    rows = []
    for change in changes:
        point, interval = change.better, change.interval
        outside = point is not None and not left <= point <= right
        mark = Mark(
            point=None if point is None else at(point),
            interval=None if interval is None else (at(interval[0]), at(interval[1])),
            band=None if change.allowed is None else (at(-change.allowed), at(0.0)),
            beyond=None if not outside else "left" if (point or 0.0) < left else "right",
        )
        rows.append((change, mark))
    ticks = tuple((at(tick), f"{_percent(tick, 0)} %") for tick in _ticks(left, right))
    return Forest(tuple(rows), at(0.0), ticks)


def _ticks(left: float, right: float) -> Iterable[float]:
    """Round numbers between the ends, no change among them."""
    step = next((s for s in _STEPS if (right - left) / s < _MOST_TICKS), _STEPS[-1])
    return [n * step for n in range(math.ceil(left / step), math.floor(right / step) + 1)]


def _percent(fraction: float, digits: int = 1) -> str:
    """A signed percentage; what rounds to nothing has no sign."""
    text = f"{100.0 * fraction:+.{digits}f}"
    return text[1:] if float(text) == 0.0 else text
