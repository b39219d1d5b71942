"""The metrics in pytest-benchmark's storage."""

import math

import pytest

from pytest_bench_gate import storing


@pytest.mark.parametrize(
    ("sample", "unit", "higher_is_better", "seconds"),
    [
        pytest.param(50.0, "tok/s", True, 0.02, id="a rate is stored as its inverse"),
        pytest.param(0.0, "tok/s", True, math.inf, id="a rate of 0"),
        pytest.param(20.0, "ms", False, 0.02, id="milliseconds"),
        pytest.param(7.0, "GiB", False, 7.0, id="another unit is stored as it is"),
    ],
)
def test_a_sample_is_stored_as_a_duration(sample, unit, higher_is_better, seconds):
    assert storing.duration(sample, unit, higher_is_better) == pytest.approx(seconds)
