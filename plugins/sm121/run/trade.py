"""How much faster a run is than another one, and how much accuracy that costs."""

from collections.abc import Mapping

from sm121.core import templates
from sm121.core.level_settings import PRICES
from sm121.core.numbers import number
from sm121.measure import rate_name
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
    rates = []
    for name, value in now.items():
        if value is not None and before.get(name) and _is_decode_rate(name):
            rates.append(name)
    return templates.rendered(
        "trade.j2", before=before, now=now, rates=rates, prices=PRICES, number=number
    )


def _is_decode_rate(name: str) -> bool:
    """Check whether a metric is the decode rate of one stream, at any depth."""
    rate = rate_name.rate(name)
    return rate is not None and rate.decoding and rate.streams == 1


def values(metrics: Mapping[str, MetricReport]) -> dict[str, float | None]:
    """Return the value of each metric by its name.

    Args:
        metrics: The metrics of a run.
    """
    return {name: metric.value for name, metric in metrics.items()}
