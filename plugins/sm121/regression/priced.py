"""A price of rounding beside an earlier one. Speed that is bought with quality is a regression,
unless the profile allows that."""

import math
from collections.abc import Mapping, Sequence

from sm121.core import templates
from sm121.core.level_settings import PRICES, Regression
from sm121.core.numbers import number
from sm121.core.verdict import Verdict
from sm121.regression.change import Change
from sm121.run.stored_run import StoredMetric

Values = Mapping[str, float | None]


def is_price(metric: str) -> bool:
    """Whether a metric is one of `PRICES`, at any depth."""
    return metric.partition("@")[0] in PRICES


def compare(now: StoredMetric, earlier: Sequence[StoredMetric], limits: Regression) -> Change:
    """This run's price against the best of the stored runs, so that nothing gets worse step by
    step."""
    before = (max if now.higher_is_better else min)(metric.value for metric in earlier)
    return change_of(now.name, before, now.value, limits.of_price(now.name), len(earlier))


def change_of(metric: str, before: float, now: float, limit: float, runs: int = 1) -> Change:
    """A price that was and is so high. `limit`: how much worse it may be, in its unit; where it is
    infinite, a price beyond what the profile has for it fails by its own test. What is no number is
    worse than any."""
    unit, higher = PRICES[metric.partition("@")[0]]
    worse = before - now if higher else now - before
    how = f"{number(abs(worse))} {'worse' if worse > 0 else 'better'}; {number(limit)} allowed"
    return Change(
        metric, unit, higher, before, now, difference=worse, pairs=runs, allowed=limit,
        verdict=Verdict.PASS if math.isfinite(now) and worse <= limit else Verdict.FAIL,
        text=f"{metric}: {number(now)} {unit} against {number(before)}, {how}",
    )  # fmt: skip


def trade(before: Values, now: Values) -> str:
    """How much faster it is, and what that costs: ``1.6 times as fast (...), at a price: ...``;
    empty unless both have a rate and a price."""
    return templates.rendered("trade.j2", before=before, now=now, prices=PRICES, number=number)
