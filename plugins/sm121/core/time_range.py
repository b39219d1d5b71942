"""Format durations, and ranges of durations, as readable texts.

>>> str(TimeRange(1500, 2400))
'25 to 40 min'
>>> str(TimeRange.of(14_400))
'about 4 h'
"""

from dataclasses import dataclass

#: If the bounds of a range differ by less than this factor, only one number is shown.
_SAME = 1.15
#: All shorter times are shown as "a few seconds".
_FEW_S = 10.0
_MINUTE_S = 60.0
_HOUR_S = 3600.0
#: Shorter times are shown in seconds.
_SECONDS_BELOW_S = 120.0
#: Longer ranges are shown in hours.
_HOURS_FROM_S = 6000.0


@dataclass(frozen=True)
class TimeRange:
    """A range of durations."""

    #: The shortest duration, in seconds.
    low: float
    #: The longest duration, in seconds.
    high: float

    @classmethod
    def of(cls, seconds: float) -> "TimeRange":
        """Return the range of one known duration.

        Args:
            seconds: The duration, in seconds.
        """
        return cls(seconds, seconds)

    def __add__(self, other: "TimeRange") -> "TimeRange":
        return TimeRange(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> "TimeRange":
        return TimeRange(self.low * factor, self.high * factor)

    def __str__(self) -> str:
        """Return the range as text, for example "about 30 min", "25 to 40 min" or "about 4 h"."""
        if self.high < _FEW_S:
            return "a few seconds"
        unit_s, name = _unit(self.high)
        low = _rounded(self.low / unit_s, name)
        high = _rounded(self.high / unit_s, name)
        if low == high or self.high <= self.low * _SAME:
            middle = _rounded((self.low + self.high) / 2 / unit_s, name)
            return f"about {middle:g} {name}"
        return f"{low:g} to {high:g} {name}"


NO_TIME = TimeRange(0.0, 0.0)


def _unit(seconds: float) -> tuple[float, str]:
    """Return the seconds and the name of the unit in which a duration is shown."""
    if seconds < _SECONDS_BELOW_S:
        return 1.0, "s"
    if seconds < _HOURS_FROM_S:
        return _MINUTE_S, "min"
    return _HOUR_S, "h"


def _rounded(value: float, unit: str) -> float:
    """Round a value, in its unit, to the precision of an estimate."""
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
    """Format seconds as minutes and seconds (``3:07``), with hours if needed (``1:03:07``).

    Args:
        seconds: The duration. Fractions of a second are cut off.
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, of_hour = divmod(minutes, 60)
    if hours:
        return f"{hours}:{of_hour:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """Format a measured duration in s, min or h, for example ``45 s``, ``12 min`` or ``3.4 h``.

    Args:
        seconds: The duration. Minutes begin at 120 s, hours at 2 h.
    """
    if seconds < _SECONDS_BELOW_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    return f"{seconds / _HOUR_S:.1f} h"
