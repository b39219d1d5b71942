"""Point estimates and their intervals, from raw samples. The estimate of a metric is its median.
The interval is a pair of order statistics: its coverage is exact whatever the distribution,
infinite samples (requests that failed) included."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]
#: Of every interval, where the samples allow it.
CONFIDENCE = 0.95
_RESAMPLES = 4000


@dataclass(frozen=True)
class Estimate:
    """A value and its interval. ``confidence`` is what the samples allow: with fewer than six, the
    range of the samples covers the median less often than 95 times in 100."""

    value: float
    ci_low: float | None
    ci_high: float | None
    confidence: float | None
    rounds: int


def estimate(samples: Sequence[float]) -> Estimate:
    """The median and its interval. One sample has no interval: bounds and confidence are None.
    Raises ValueError: no samples, or a sample that is no number."""
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
    """The mean and its interval, by the percentile bootstrap over the samples; with an infinite
    sample, or one alone, there is no interval. Raises ValueError: no samples, or one is no
    number."""
    values = _sorted(samples)
    count, mean = len(values), float(values.mean())
    if count == 1 or not np.isfinite(mean):
        return Estimate(mean, None, None, None, count)
    means = np.random.default_rng(0).choice(values, (_RESAMPLES, count)).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(mean, float(low), float(high), CONFIDENCE, count)


@functools.cache
def median_ranks(count: int) -> tuple[int, float]:
    """The rank r for which [r-th smallest, r-th largest] of ``count`` samples covers the median
    with at least `CONFIDENCE` (counted from 0), and its coverage. When even the whole range does
    not, rank 0 with what it covers."""
    ranks = np.arange((count + 1) // 2)
    coverage = 1.0 - 2.0 * special.bdtr(ranks, count, 0.5)
    enough = np.flatnonzero(coverage >= CONFIDENCE)
    best = int(enough[-1]) if len(enough) else 0
    return best, float(coverage[best])


def quantile(samples: Sequence[float], fraction: float) -> float:
    """The smallest sample that at least ``fraction`` of the samples do not exceed. No
    interpolation, so that a percentile is something that happened; infinity counts as largest."""
    values = _sorted(samples)
    index = int(np.ceil(fraction * len(values) - 1e-9)) - 1
    return float(values[max(index, 0)])


def estimate_quantile(samples: Sequence[float], fraction: float) -> Estimate:
    """A quantile and its interval of order statistics; a bound that the samples do not reach is
    None. ``confidence`` is that of the interval, None unless both its ends are there."""
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
    """Ratio of two medians and its 95 % interval, by the percentile bootstrap (BCa is degenerate
    for medians: their jackknife takes two values). Raises ValueError: one sample on a side."""
    above, below = _sorted(numerator), _sorted(denominator)
    if min(len(above), len(below)) < 2:
        raise ValueError("an interval of a ratio needs two samples on each side")
    generator = np.random.default_rng(0)
    ratios = np.median(generator.choice(above, (_RESAMPLES, len(above))), axis=1) / np.median(
        generator.choice(below, (_RESAMPLES, len(below))), axis=1
    )
    low, high = np.quantile(ratios, [0.025, 0.975])
    return median(above.tolist()) / median(below.tolist()), float(low), float(high)


def finite(value: float | None) -> float | None:
    """The value, None where it is infinite or no number: JSON has neither."""
    return value if value is not None and np.isfinite(value) else None


def _sorted(samples: Sequence[float]) -> Floats:
    values: Floats = np.sort(np.asarray(samples, dtype=np.float64))
    if values.ndim != 1 or len(values) == 0:
        raise ValueError("expected at least one sample")
    if np.isnan(values).any():
        raise ValueError("a sample is not a number")
    return values


def _binomial_quantile(probability: float, count: int, fraction: float) -> int:
    """The smallest number of successes that at most so many are with that probability."""
    return int(np.searchsorted(special.bdtr(np.arange(count + 1), count, fraction), probability))


def median_or_none(values: Iterable[float]) -> float | None:
    """The median; None without values."""
    numbers = list(values)
    return float(np.median(numbers)) if numbers else None
