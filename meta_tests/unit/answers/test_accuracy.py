"""The share of right answers and its confidence interval, which decide on published scores."""

import pytest

from sm121.answers import accuracy
from sm121.core.unmet import Fact, Unmet
from sm121.core.verdict import Inconclusive


def test_the_interval_is_wilsons():
    """The interval is Wilson's: in Newcombe 1998, table I, 81 of 263 give 0.2553 to 0.3662."""
    interval = accuracy.interval_of(81, 263)
    assert interval.low == pytest.approx(0.2553, abs=5e-5)
    assert interval.high == pytest.approx(0.3662, abs=5e-5)
    whole = accuracy.interval_of(20, 20)
    assert whole.high == 1.0 and whole.low == pytest.approx(0.8389, abs=5e-4)
    assert accuracy.interval_of(0, 20).low == 0.0


def test_a_gate_decides_on_the_interval():
    fact = Fact("so many")
    accuracy.interval_of(100, 100).hold(0.9, fact)
    for right, error in ((85, Inconclusive), (40, Unmet)):
        with pytest.raises(error):
            accuracy.interval_of(right, 100).hold(0.9, fact)
