"""Does something grow with the requests? A robust slope with its interval, against a limit."""

from collections.abc import Sequence

import numpy as np

from sm121.core.data_file import Record
from sm121.core.verdict import Verdict
from sm121.measure.statistics import CONFIDENCE, Floats

#: Fewer samples than this decide nothing.
LEAST_SAMPLES = 10
#: The first part of a load fills caches and pools: it is no steady state.
_WARM_UP = 0.25
#: A cache that is full stays as it is for so long at the end.
_LAST = 0.2
#: Each pair of points has a slope: of the samples of a day there would be billions.
_MOST_POINTS = 1500
#: A source that has a value at fewer of the samples than this has fallen silent.
_LEAST_KNOWN = 0.5
#: A leak is seen in each third.
LEAST_EVEN_SAMPLES = 3 * LEAST_SAMPLES


class Growth(Record):
    """The growth of one quantity over the steady part of a load (Theil-Sen's slope)."""

    quantity: str
    samples: int
    #: Requests that ended during the steady part.
    requests: float
    level: float | None = None
    per_request: float | None = None
    per_request_low: float | None = None
    per_request_high: float | None = None
    #: Over the steady part, with its interval.
    total: float | None = None
    total_low: float | None = None
    total_high: float | None = None
    confidence: float = CONFIDENCE
    limit_per_request: float | None = None
    limit_total: float | None = None
    verdict: Verdict = Verdict.INCONCLUSIVE
    reason: str = ""


def is_silent(values: Sequence[float | None]) -> bool:
    """Whether most of the samples have no value."""
    return sum(value is not None for value in values) < _LEAST_KNOWN * len(values)


def judge(
    quantity: str,
    requests: Sequence[float],
    values: Sequence[float | None],
    *,
    limit_total: float,
    limit_per_request: float,
    limit_even: float = float("inf"),
    least_total: float = 0.0,
) -> Growth:
    """FAIL when the whole interval lies beyond a limit and the growth goes on, PASS when it lies
    within both. What has grown and then stays is INCONCLUSIVE: a cache that fills, or a leak that
    has paused; more load decides.
    `limit_even`: for each request, of a leak's growth: each third of the steady part grows beyond
    it, and half as fast as the whole (caches fill in steps). `least_total`: growth that is none,
    over however few requests (pools of threads and connections fill). `requests`: ended at each
    sample; `values`: at each, None where it could not be had. Of mostly None nothing is decided."""
    first = int(len(values) * _WARM_UP)
    steady = values[first:]
    points = [(x, y) for x, y in zip(requests[first:], steady, strict=True) if y is not None]
    x = np.asarray([point[0] for point in points], dtype=float)
    y = np.asarray([point[1] for point in points], dtype=float)
    growth = Growth(
        quantity=quantity,
        samples=len(y),
        requests=float(x[-1] - x[0]) if len(x) else 0.0,
        limit_total=limit_total,
        limit_per_request=limit_per_request,
    )
    growth.reason = _undecided(growth, steady)
    if growth.reason:
        return growth
    limit_per_request = max(limit_per_request, least_total / growth.requests)
    growth.limit_per_request = limit_per_request
    if len(y) > _MOST_POINTS:
        chosen = np.linspace(0, len(y) - 1, _MOST_POINTS).round().astype(int)
        x, y = x[chosen], y[chosen]
    slope, low, high = _slope(x, y)
    growth.level = float(np.median(y))
    growth.per_request, growth.per_request_low, growth.per_request_high = slope, low, high
    total, total_low, total_high = (each * growth.requests for each in (slope, low, high))
    growth.total, growth.total_low, growth.total_high = total, total_low, total_high
    leaks = _leaks(x, y, max(limit_even, slope / 2)) if low > limit_even else False
    growth.reason = _reason(growth)
    if leaks:
        growth.verdict = Verdict.FAIL
    elif total_low > limit_total or low > limit_per_request:
        if _stays(x, y, min(limit_per_request, limit_total / growth.requests)):
            growth.reason += "; it grew, and then stayed: more load decides"
        else:
            growth.verdict = Verdict.FAIL
    elif leaks is not None and total_high <= limit_total and high <= limit_per_request:
        growth.verdict = Verdict.PASS
    return growth


def _undecided(growth: Growth, steady: Sequence[float | None]) -> str:
    """Return why the samples decide nothing; empty if they decide something."""
    if is_silent(steady):
        return (
            f"{growth.quantity}: {growth.samples} of {len(steady)} samples have a value, the "
            "others none: its source fell silent"
        )
    if growth.samples < LEAST_SAMPLES or growth.requests <= 0:
        return (
            f"{growth.samples} samples over {growth.requests:g} requests decide nothing; at least "
            f"{LEAST_SAMPLES} are needed"
        )
    return ""


def _slope(x: Floats, y: Floats) -> tuple[float, float, float]:
    from scipy import stats  # a second, which those who only read reports need not spend

    if np.ptp(y) == 0 or np.ptp(x) == 0:
        return 0.0, 0.0, 0.0  # of what never changes some releases of scipy make NaN
    slope, _, low, high = map(float, stats.theilslopes(y, x, alpha=CONFIDENCE))
    return slope, low, high


def _stays(x: Floats, y: Floats, most: float) -> bool:
    """Whether the last points show that it no longer grows by `most` for each request. Points that
    are too few, or too noisy, show nothing."""
    last = max(LEAST_SAMPLES, int(len(y) * _LAST))
    return bool(np.ptp(x[-last:]) > 0) and _slope(x[-last:], y[-last:])[2] <= most


def _leaks(x: Floats, y: Floats, least: float) -> bool | None:
    """Whether each third grows by more than that for each request; None: of too few samples."""
    if len(y) < LEAST_EVEN_SAMPLES:
        return None
    thirds = zip(np.array_split(x, 3), np.array_split(y, 3), strict=True)
    return all(_slope(*third)[1] > least for third in thirds)


def _reason(growth: Growth) -> str:
    def amount(value: float | None) -> str:
        assert value is not None
        return f"{value / 2**20:+.3g} MiB" if "bytes" in growth.quantity else f"{value:+.3g}"

    return (
        f"{growth.quantity}: {amount(growth.total)} "
        f"[{amount(growth.total_low)}, {amount(growth.total_high)}] over "
        f"{growth.requests:g} requests, {amount(growth.per_request)} "
        f"[{amount(growth.per_request_low)}, {amount(growth.per_request_high)}] for each; allowed "
        f"{amount(growth.limit_total)} in all and {amount(growth.limit_per_request)} for each"
    )
