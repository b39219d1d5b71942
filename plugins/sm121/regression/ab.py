"""A against B: two builds or configurations, started in turns, with the start as the unit.

What differs from start to start (memory layout, autotuning, the temperature) is not averaged out by
more rounds on one server. So each start gives one value per metric, starts come in pairs whose
order alternates (A B, B A, ...), and the interval of the ratio B / A is over pairs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from sm121.core.errors import UsageError
from sm121.core.numbers import number
from sm121.core.server import root_of
from sm121.core.verdict import Verdict
from sm121.measure.statistics import Floats

CONFIDENCE = 0.95
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_PYTHON = "--engine-python"


@dataclass(frozen=True)
class Side:
    """One of the two, as it was given."""

    text: str
    url: str | None = None
    python: str | None = None
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def parse_sides(texts: Sequence[str]) -> tuple[Side, Side]:
    """Both sides of ``--ab``: two URLs, or for each the engine's arguments, ``KEY=VALUE`` and
    ``--engine-python PATH`` that come on top of the configuration under test.

    Raises:
        UsageError: they are not that.
    """
    first, second = (_side(text) for text in texts)
    if (first.url is None) != (second.url is None):
        raise UsageError("--ab: expected two URLs or two configurations, not one of each")
    return first, second


def _side(text: str) -> Side:
    if text.startswith(("http://", "https://")):
        url = root_of(text, "--ab")
        return Side(url, url=url)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--ab {text!r}: expected arguments as a shell reads them: {error}") from (
            error
        )
    python: str | None = None
    arguments: list[str] = []
    environment: list[tuple[str, str]] = []
    while words:
        word = words.pop(0)
        name, _, value = word.partition("=")
        if name == _PYTHON:
            python = value or (words.pop(0) if words else "")
            if not Path(python).is_file():
                raise UsageError(f"--ab {text!r}: {_PYTHON}: there is no file {python!r}")
        elif _VARIABLE.match(word) and not arguments:
            environment.append((name, value))
        else:
            arguments.append(word)
    return Side(text, None, python, tuple(arguments), tuple(environment))


@dataclass(frozen=True)
class MetricOfStart:
    """A metric of one start."""

    value: float
    unit: str
    higher_is_better: bool


@dataclass
class Visit:
    """One start of a side, or one visit to its server: what was measured, or how it failed."""

    side: str
    metrics: dict[str, MetricOfStart] = field(default_factory=dict)
    path: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class Comparison:
    """B against A in one metric. ``verdict`` is about a regression: PASS, none."""

    metric: str
    unit: str
    higher_is_better: bool
    a: float
    b: float
    ratio: float
    ci_low: float
    ci_high: float
    pairs: int
    allowed: float
    verdict: Verdict

    def __str__(self) -> str:
        return (
            f"{self.metric}: A {number(self.a)}, B {number(self.b)} {self.unit}; "
            f"B/A {self.ratio:.3f} [{self.ci_low:.3f}, {self.ci_high:.3f}] "
            f"over {self.pairs} pairs of starts; {self.allowed:.0%} worse allowed"
        )


def order(pairs: int) -> list[str]:
    """Whose turn it is: A B, B A, A B, ... so that a drift of the machine favours nobody."""
    return [side for pair in range(pairs) for side in (("A", "B") if pair % 2 == 0 else ("B", "A"))]


def compare(
    visits: Sequence[Visit], allowed: Mapping[str, float], *, default: float, looks: int = 1
) -> list[Comparison]:
    """Every metric that all visits have, B against A.

    Args:
        allowed: how much worse B may be, by metric; ``default`` for the others.
        looks: how often this is asked as visits are added: each look gets its share of the error.
    """
    sides = {name: [v for v in visits if v.side == name] for name in ("A", "B")}
    pairs = min(len(found) for found in sides.values())
    if pairs == 0:
        return []
    shared = [
        name
        for name in sides["A"][0].metrics
        if all(name in visit.metrics for visit in [*sides["A"][:pairs], *sides["B"][:pairs]])
    ]
    return [
        _compared(
            name,
            [visit.metrics[name] for visit in sides["A"][:pairs]],
            [visit.metrics[name] for visit in sides["B"][:pairs]],
            allowed.get(name, default),
            looks,
        )
        for name in shared
    ]


def _compared(
    name: str, a: Sequence[MetricOfStart], b: Sequence[MetricOfStart], allowed: float, looks: int
) -> Comparison:
    first = np.array([start.value for start in a])
    second = np.array([start.value for start in b])
    ratio, low, high = ratio_of_pairs(first, second, looks=looks)
    higher = a[0].higher_is_better
    if higher:
        holds, fails = low >= 1.0 - allowed, high < 1.0 - allowed
    else:
        holds, fails = high <= 1.0 + allowed, low > 1.0 + allowed
    return Comparison(
        name, a[0].unit, higher, float(np.median(first)), float(np.median(second)),
        ratio, low, high, len(first), allowed, verdict_of(holds, fails),
    )  # fmt: skip


def verdict_of(holds: bool, fails: bool) -> Verdict:
    """PASS or FAIL; INCONCLUSIVE where the interval shows neither."""
    if holds:
        return Verdict.PASS
    return Verdict.FAIL if fails else Verdict.INCONCLUSIVE


def ratio_of_pairs(first: Any, second: Any, *, looks: int = 1) -> tuple[float, float, float]:
    """Mean ratio of pairs and its interval, by Student's t on logarithms; without two pairs the
    interval is everything."""
    if (np.asarray(first) <= 0).any() or (np.asarray(second) <= 0).any():
        return float("nan"), 0.0, float("inf")
    logs = np.log(np.asarray(second)) - np.log(np.asarray(first))
    middle, low, high = np.exp(_mean(logs, looks))
    return float(middle), float(low), float(high)


def difference_of_pairs(visits: Sequence[Visit], metric: str) -> tuple[float, float, float] | None:
    """Mean of B - A over pairs and its interval; None where a side lacks the metric."""
    first, second = (
        [v.metrics[metric].value for v in visits if v.side == side and metric in v.metrics]
        for side in ("A", "B")
    )
    pairs = min(len(first), len(second))
    if pairs == 0:
        return None
    return _mean(np.array(second[:pairs]) - np.array(first[:pairs]), looks=1)


def _mean(values: Floats, looks: int) -> tuple[float, float, float]:
    """The mean and its interval, by Student's t; without two values it is everything."""
    middle, count = float(values.mean()), len(values)
    if count < 2:
        return middle, float("-inf"), float("inf")
    critical = float(-special.stdtrit(count - 1, (1.0 - CONFIDENCE) / 2.0 / looks))
    reach = critical * float(values.std(ddof=1)) / float(np.sqrt(count))
    return middle, middle - reach, middle + reach
