"""Point estimates and their intervals, from raw samples.

The estimate of a metric is its median. The bounds of the interval are order statistics, so that its
coverage is exact for every distribution, even with infinite samples (failed requests).
"""

import bisect
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from sm121.measure.distributions import binomial_cdf

Floats = NDArray[np.float64]
#: The confidence of an interval, if there are enough samples.
CONFIDENCE = 0.95
#: Number of resamples of a bootstrap.
_RESAMPLES = 4000


@dataclass(frozen=True)
class Estimate:
    """A value and its interval.

    Attributes:
        value: The point estimate.
        ci_low: The lower bound; None if there is none.
        ci_high: The upper bound; None if there is none.
        confidence: The coverage of the interval. It is 95 %, or less if there are too few samples.
            (For example, even the whole range of five samples covers the median with less than 95
            %.)
        rounds: The number of samples.
    """

    value: float
    ci_low: float | None
    ci_high: float | None
    confidence: float | None
    rounds: int


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the median and its interval.

    Args:
        samples: The samples. With only one sample, there is no interval.

    Raises:
        ValueError: There is no sample, or one is not a number.
    """
    values = _sorted(samples)
    count = len(values)
    middle = median(values.tolist())
    if count == 1:
        return Estimate(middle, None, None, None, 1)
    rank, coverage = median_ranks(count)
    return Estimate(
        value=middle,
        ci_low=float(values[rank]),
        ci_high=float(values[count - 1 - rank]),
        confidence=min(CONFIDENCE, coverage),
        rounds=count,
    )


def estimate_mean(samples: Sequence[float]) -> Estimate:
    """Return the mean and its interval by the percentile bootstrap.

    Args:
        samples: The samples. With only one sample, or an infinite one, there is no interval.

    Raises:
        ValueError: There is no sample, or one is not a number.
    """
    values = _sorted(samples)
    count = len(values)
    mean = float(values.mean())
    if count == 1 or not np.isfinite(mean):
        return Estimate(mean, None, None, None, count)
    means = np.random.default_rng(0).choice(values, (_RESAMPLES, count)).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(mean, float(low), float(high), CONFIDENCE, count)


@functools.cache
def median_ranks(count: int) -> tuple[int, float]:
    """Return the order statistics whose interval covers the median.

    Args:
        count: The number of samples.

    Returns:
        The largest rank r (from 0) for which [r-th smallest, r-th largest] covers the median with
        at least `CONFIDENCE`, and the coverage. If even the whole range covers the median with
        less, the result is rank 0 and its coverage.
    """
    ranks = range((count + 1) // 2)
    enough = bisect.bisect_left(ranks, 1.0 - CONFIDENCE, key=lambda rank: _outside(rank, count))
    best = max(enough - 1, 0)
    return best, 1.0 - _outside(best, count)


def quantile(samples: Sequence[float], fraction: float) -> float:
    """Return the smallest sample that at least ``fraction`` of the samples do not exceed.

    The function does not interpolate, so that a percentile is a measured value. Infinite samples
    count as the largest values.

    Args:
        samples: The samples.
        fraction: The quantile, 0 to 1.

    Raises:
        ValueError: There is no sample, or one is not a number.
    """
    values = _sorted(samples)
    index = int(np.ceil(fraction * len(values) - 1e-9)) - 1
    return float(values[max(index, 0)])


def estimate_quantile(samples: Sequence[float], fraction: float) -> Estimate:
    """Return a quantile and its interval of order statistics.

    Args:
        samples: The samples.
        fraction: The quantile, 0 to 1.

    Returns:
        The estimate. If a bound would need more samples, this bound and ``confidence`` are None.

    Raises:
        ValueError: There is no sample, or one is not a number.
    """
    values = _sorted(samples)
    count = len(values)
    tail = (1.0 - CONFIDENCE) / 2.0
    low = _binomial_quantile(tail, count, fraction) - 1
    high = _binomial_quantile(1.0 - tail, count, fraction)
    whole = low >= 0 and high < count
    return Estimate(
        value=quantile(samples, fraction),
        ci_low=float(values[low]) if low >= 0 else None,
        ci_high=float(values[high]) if high < count else None,
        confidence=CONFIDENCE if whole else None,
        rounds=count,
    )


def ratio_interval(
    numerator: Sequence[float], denominator: Sequence[float]
) -> tuple[float, float, float]:
    """Return the ratio of two medians and its 95 % interval by the percentile bootstrap.

    The BCa bootstrap is not used. It is degenerate for medians, because their jackknife has only
    two distinct values.

    Args:
        numerator: The samples whose median is the numerator.
        denominator: The samples whose median is the denominator.

    Returns:
        The ratio, its lower bound and its upper bound.

    Raises:
        ValueError: The numerator or the denominator has fewer than two samples.
    """
    above = _sorted(numerator)
    below = _sorted(denominator)
    if min(len(above), len(below)) < 2:
        raise ValueError("an interval of a ratio needs two samples on each side")
    generator = np.random.default_rng(0)
    medians_above = np.median(generator.choice(above, (_RESAMPLES, len(above))), axis=1)
    medians_below = np.median(generator.choice(below, (_RESAMPLES, len(below))), axis=1)
    low, high = np.quantile(medians_above / medians_below, [0.025, 0.975])
    ratio = median(above.tolist()) / median(below.tolist())
    return ratio, float(low), float(high)


def finite(value: float | None) -> float | None:
    """Return a value, or None if it is infinite or NaN, which JSON cannot represent.

    Args:
        value: The value; None stays None.
    """
    return value if value is not None and np.isfinite(value) else None


def _sorted(samples: Sequence[float]) -> Floats:
    values: Floats = np.sort(np.asarray(samples, dtype=np.float64))
    if values.ndim != 1 or len(values) == 0:
        raise ValueError("expected at least one sample")
    if np.isnan(values).any():
        raise ValueError("a sample is not a number")
    return values


def _binomial_quantile(probability: float, count: int, fraction: float) -> int:
    """Return the smallest number of successes whose cumulative probability reaches a value."""

    def exceeded(successes: int) -> float:
        return binomial_cdf(successes, count, fraction)

    return bisect.bisect_left(range(count + 1), probability, key=exceeded)


def _outside(rank: int, count: int) -> float:
    """Return the probability that [rank-th smallest, rank-th largest] misses the median."""
    return 2.0 * binomial_cdf(rank, count, 0.5)


def median_or_none(values: Iterable[float]) -> float | None:
    """Return the median of values; None if there are none.

    Args:
        values: The values. If one of them is NaN, the median is NaN.
    """
    numbers = list(values)
    return float(np.median(numbers)) if numbers else None


def relative_loss(now: float, before: float, higher_is_better: bool) -> float:
    """Return how much worse a value is than the previous value.

    Args:
        now: The value now.
        before: The value before.
        higher_is_better: Whether a rate is compared, rather than a time.

    Returns:
        The loss as a fraction of ``before``, negative if the value is better. With a ``before`` of
        0: 0, or infinity if lower is better and ``now`` is not 0.
    """
    if before == 0.0:
        if now == 0.0 or higher_is_better:
            return 0.0
        return float("inf")
    if higher_is_better:
        return 1.0 - now / before
    return now / before - 1.0
