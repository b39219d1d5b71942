"""How much faster a run is than another one, and how much accuracy that costs."""

from collections.abc import Mapping

from sm121.core import templates
from sm121.core.level_settings import PRICES
from sm121.core.numbers import number
from sm121.run.verdict_file import MetricReport


def trade(before: Mapping[str, float | None], now: Mapping[str, float | None]) -> str:
    """Return how much faster a run is, and how much accuracy that costs, as text.

    Args:
        before: The metrics before.
        now: The metrics now.

    Returns:
        ``1.6 times as fast (...), at a price: ...``; empty unless both runs have a rate and a
        price.
    """
    return templates.rendered("trade.j2", before=before, now=now, prices=PRICES, number=number)


def values(metrics: Mapping[str, MetricReport]) -> dict[str, float | None]:
    """Return the value of each metric by its name.

    Args:
        metrics: The metrics of a run.
    """
    return {name: metric.value for name, metric in metrics.items()}
