"""A time that is known, or lies between two bounds, and how it reads.

>>> str(TimeRange(1500, 2400))
'25 to 40 min'
>>> str(TimeRange.of(14_400))
'about 4 h'
"""

from dataclasses import dataclass

#: Bounds that differ by less than this factor are one number.
_SAME = 1.15
#: Shorter times are not told apart.
_FEW_S = 10.0
_MINUTE_S = 60.0
_HOUR_S = 3600.0
#: Below two minutes a time is said in seconds, from 100 minutes on in hours.
_SECONDS_BELOW_S = 120.0
_HOURS_FROM_S = 6000.0


@dataclass(frozen=True)
class TimeRange:
    """The least and the most seconds that something takes."""

    low: float
    high: float

    @classmethod
    def of(cls, seconds: float) -> "TimeRange":
        """The range of a time that was measured."""
        return cls(seconds, seconds)

    def __add__(self, other: "TimeRange") -> "TimeRange":
        return TimeRange(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> "TimeRange":
        return TimeRange(self.low * factor, self.high * factor)

    def __str__(self) -> str:
        """As "about 30 min", "25 to 40 min", "about 4 h"."""
        if self.high < _FEW_S:
            return "a few seconds"
        unit_s, name = _unit(self.high)
        low, high = _rounded(self.low / unit_s, name), _rounded(self.high / unit_s, name)
        if low == high or self.high <= self.low * _SAME:
            middle = _rounded((self.low + self.high) / 2 / unit_s, name)
            return f"about {middle:g} {name}"
        return f"{low:g} to {high:g} {name}"


NO_TIME = TimeRange(0.0, 0.0)


def _unit(seconds: float) -> tuple[float, str]:
    if seconds < _SECONDS_BELOW_S:
        return 1.0, "s"
    if seconds < _HOURS_FROM_S:
        return _MINUTE_S, "min"
    return _HOUR_S, "h"


def _rounded(value: float, unit: str) -> float:
    """A value to as many digits as a time that was not measured exactly has."""
    if unit == "h":
        step = 0.5 if value < 6 else 1.0
    elif unit == "s":
        step = 5.0
    elif value < 15:
        step = 1.0
    else:
        step = 5.0
    return max(step, round(value / step) * step)


def clock(seconds: float) -> str:
    """Minutes and seconds, as 3:07, or hours, as 1:03:07."""
    minutes, rest = divmod(int(seconds), 60)
    hours, of_hour = divmod(minutes, 60)
    return f"{hours}:{of_hour:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """A time that was measured: 45 s, 12 min, 3.4 h."""
    if seconds < _SECONDS_BELOW_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    return f"{seconds / _HOUR_S:.1f} h"
