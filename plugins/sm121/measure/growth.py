"""Judge with a robust slope whether a quantity grows with the number of requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sm121.core.data_file import Record
from sm121.core.verdict import Verdict
from sm121.measure.statistics import CONFIDENCE, Floats

#: Minimum number of samples for a decision.
LEAST_SAMPLES = 10
#: This fraction of a load, at its start, is ignored, because caches and pools fill.
_WARM_UP = 0.25
#: This fraction of the samples, at the end, shows whether the growth continues.
_LAST = 0.2
#: The maximum number of points for Theil-Sen's slope. It uses all pairs of points, and a day of
#: samples would have billions of pairs.
_MOST_POINTS = 1500
#: If a smaller fraction of the samples has a value, the values are not judged.
_LEAST_KNOWN = 0.5
#: Minimum number of samples for judging the growth in each third of a load.
LEAST_EVEN_SAMPLES = 3 * LEAST_SAMPLES


class Growth(Record):
    """The growth of one quantity over the steady part of a load (Theil-Sen's slope)."""

    quantity: str
    samples: int
    #: The number of requests that ended during the steady part.
    requests: float
    level: float | None = None
    per_request: float | None = None
    per_request_low: float | None = None
    per_request_high: float | None = None
    #: The growth over the steady part, with its interval.
    total: float | None = None
    total_low: float | None = None
    total_high: float | None = None
    confidence: float = CONFIDENCE
    limit_per_request: float | None = None
    limit_total: float | None = None
    verdict: Verdict = Verdict.INCONCLUSIVE
    reason: str = ""


def is_silent(values: Sequence[float | None]) -> bool:
    """Return whether fewer than half of the samples have a value.

    Args:
        values: The samples; None stands for a sample without a value.
    """
    return sum(value is not None for value in values) < _LEAST_KNOWN * len(values)


def judge_growth(
    quantity: str,
    requests: Sequence[float],
    values: Sequence[float | None],
    *,
    limit_total: float,
    limit_per_request: float,
    limit_even: float = float("inf"),
    least_total: float = 0.0,
) -> Growth:
    """Judge whether a quantity grows with the requests.

    The verdict is FAIL if the whole interval is above a limit and the growth continues. It is PASS
    if the interval is below both limits. It is INCONCLUSIVE if the quantity grew and then stopped
    growing. A cache that became full and a leak that paused both look like this, and only more load
    can distinguish them.

    Args:
        quantity: The name of the quantity. Names with ``bytes`` are shown in MiB.
        requests: The number of ended requests at each sample.
        values: The value at each sample; None if it could not be read. If most are None, the
            verdict is INCONCLUSIVE.
        limit_total: The maximum growth over the steady part.
        limit_per_request: The maximum growth per request.
        limit_even: If each third of the steady part grows faster per request than this limit, and
            at least half as fast as the whole, the growth is a leak. (Caches fill in steps
            instead.)
        least_total: A total growth that is always allowed, because pools of threads and connections
            fill.
    """
    first = int(len(values) * _WARM_UP)
    steady = values[first:]
    x, y = _points(requests[first:], steady)
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
    growth.limit_per_request = max(limit_per_request, least_total / growth.requests)
    if len(y) > _MOST_POINTS:
        chosen = np.linspace(0, len(y) - 1, _MOST_POINTS).round().astype(int)
        x = x[chosen]
        y = y[chosen]
    slope = _slope(x, y)
    growth.level = float(np.median(y))
    growth.per_request = slope.value
    growth.per_request_low = slope.low
    growth.per_request_high = slope.high
    growth.total = slope.value * growth.requests
    growth.total_low = slope.low * growth.requests
    growth.total_high = slope.high * growth.requests
    growth.reason = _reason(growth)
    _decide(growth, x, y, slope, limit_even)
    return growth


def _points(requests: Sequence[float], values: Sequence[float | None]) -> tuple[Floats, Floats]:
    """Return the requests and values of the samples that have a value."""
    x = []
    y = []
    for count, value in zip(requests, values, strict=True):
        if value is not None:
            x.append(count)
            y.append(value)
    return np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)


def _decide(growth: Growth, x: Floats, y: Floats, slope: "_Slope", limit_even: float) -> None:
    """Set the verdict from the slopes of the steady part and of its thirds."""
    assert growth.limit_total is not None
    assert growth.limit_per_request is not None
    leaks: bool | None = False
    if slope.low > limit_even:
        leaks = _leaks(x, y, max(limit_even, slope.value / 2))
    if leaks:
        growth.verdict = Verdict.FAIL
        return
    total_low = slope.low * growth.requests
    total_high = slope.high * growth.requests
    if total_low > growth.limit_total or slope.low > growth.limit_per_request:
        most = min(growth.limit_per_request, growth.limit_total / growth.requests)
        if _stays(x, y, most):
            growth.reason += "; it grew and then stayed constant: run more load for a verdict"
        else:
            growth.verdict = Verdict.FAIL
        return
    is_within = total_high <= growth.limit_total and slope.high <= growth.limit_per_request
    if is_within and leaks is not None:
        growth.verdict = Verdict.PASS


def _undecided(growth: Growth, steady: Sequence[float | None]) -> str:
    """Return why the samples are not sufficient for a decision; empty if they are."""
    if is_silent(steady):
        return (
            f"{growth.quantity}: {growth.samples} of {len(steady)} samples have a value, the "
            "others have none, because the source stopped reporting"
        )
    if growth.samples < LEAST_SAMPLES or growth.requests <= 0:
        return (
            f"{growth.samples} samples over {growth.requests:g} requests are too few for a "
            f"verdict; at least {LEAST_SAMPLES} are needed"
        )
    return ""


@dataclass(frozen=True)
class _Slope:
    """Theil-Sen's slope and its interval."""

    value: float
    low: float
    high: float


def _slope(x: Floats, y: Floats) -> _Slope:
    from scipy import stats  # imported here, because the import takes a second

    if np.ptp(y) == 0 or np.ptp(x) == 0:
        return _Slope(0.0, 0.0, 0.0)  # some releases of scipy return NaN for constants
    slope, _, low, high = map(float, stats.theilslopes(y, x, alpha=CONFIDENCE))
    return _Slope(slope, low, high)


def _stays(x: Floats, y: Floats, most: float) -> bool:
    """Return whether the last points show that the growth per request is at most ``most``.

    Return False if there are too few points, or if they are too noisy.
    """
    last = max(LEAST_SAMPLES, int(len(y) * _LAST))
    if np.ptp(x[-last:]) <= 0:
        return False
    return _slope(x[-last:], y[-last:]).high <= most


def _leaks(x: Floats, y: Floats, least: float) -> bool | None:
    """Return whether each third grows by more than ``least`` per request; None if too short."""
    if len(y) < LEAST_EVEN_SAMPLES:
        return None
    thirds = zip(np.array_split(x, 3), np.array_split(y, 3), strict=True)
    return all(_slope(part_x, part_y).low > least for part_x, part_y in thirds)


def _reason(growth: Growth) -> str:
    """Return the growth and its limits as text."""

    def amount(value: float | None) -> str:
        assert value is not None
        if "bytes" in growth.quantity:
            return f"{value / 2**20:+.3g} MiB"
        return f"{value:+.3g}"

    return (
        f"{growth.quantity}: {amount(growth.total)} [{amount(growth.total_low)}, "
        f"{amount(growth.total_high)}] over {growth.requests:g} requests, "
        f"{amount(growth.per_request)} [{amount(growth.per_request_low)}, "
        f"{amount(growth.per_request_high)}] per request; allowed {amount(growth.limit_total)} in "
        f"total and {amount(growth.limit_per_request)} per request"
    )
