"""What a run's rounding brings and costs: which metrics count as a decode rate."""

import pytest

from sm121.run.trade import trade

COST = {"price_kl": 0.01}


@pytest.mark.parametrize("metric", ["tg32@d0", "tg128@d4096"])
def test_a_decode_rate_of_one_stream_is_compared(metric):
    text = trade({metric: 30.0, **COST}, {metric: 60.0, **COST})
    assert text.startswith(f"2 times as fast ({metric} 30 → 60 tok/s), at a price: price_kl")


@pytest.mark.parametrize("metric", ["tg32_c4@d0", "pp2048@d0", "tgap"])
def test_other_metrics_are_no_decode_rate_of_one_stream(metric):
    """The names of a user's own metrics may begin with tg, too."""
    assert trade({metric: 30.0, **COST}, {metric: 60.0, **COST}) == ""
