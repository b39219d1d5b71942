"""The distributions that gates and intervals use agree with scipy's."""

import bisect

import numpy as np
import pytest
from scipy import special

from sm121.measure import statistics
from sm121.measure.distributions import binomial_cdf, student_cdf

COUNTS = [*range(1, 120), 299, 473, 1000, 1001, 20_001]


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.9, 0.99])
def test_the_binomial_distribution(fraction):
    for count in COUNTS:
        for successes in {0, 1, count // 3, count // 2, count - 1, count}:
            expected = special.bdtr(successes, count, fraction)
            assert binomial_cdf(successes, count, fraction) == pytest.approx(
                expected, rel=1e-8, abs=1e-300
            )
    assert binomial_cdf(-1, 10, fraction) == 0.0


@pytest.mark.parametrize("degrees", [1, 2, 3, 3.7, 18, 102.5, 5000])
def test_students_t(degrees):
    for value in (-60.0, -8.1, -2.0, -0.3, 0.0, 1e-9, 0.7, 3.0, 40.0):
        expected = special.stdtr(degrees, value)
        assert student_cdf(degrees, value) == pytest.approx(expected, rel=1e-9)
    assert student_cdf(degrees, -np.inf) == 0.0 and student_cdf(degrees, np.inf) == 1.0


def test_the_ranks_are_those_of_scipy():
    for count in COUNTS:
        coverage = 1.0 - 2.0 * special.bdtr(np.arange((count + 1) // 2), count, 0.5)
        enough = np.flatnonzero(coverage >= statistics.CONFIDENCE)
        rank = enough[-1] if len(enough) else 0
        assert statistics.median_ranks(count)[0] == rank
        samples = np.arange(1.0, count + 1.0)
        low = bisect.bisect_left(special.bdtr(range(count + 1), count, 0.99), 0.025) - 1
        expected = samples[low] if low >= 0 else None
        assert statistics.estimate_quantile(samples, 0.99).ci_low == expected
    assert statistics.median_ranks(5) == (0, 0.9375)
