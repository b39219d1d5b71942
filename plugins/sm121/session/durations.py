"""Reads ``fixtures/durations.toml``: durations of plans and starts, each with its source."""

from typing import Annotated

from pydantic import Field, model_validator

from sm121.core import data_file
from sm121.core.data_file import DataTable, Entries
from sm121.core.measuring_settings import Count, Positive
from sm121.core.profile import Profile
from sm121.core.profile_fields import FULL, Level
from sm121.core.time_range import TimeRange

Seconds = Annotated[float, Field(ge=0)]


class DurationBounds(DataTable):
    """A lower and an upper bound of a duration in seconds, with their source."""

    seconds: tuple[Seconds, Seconds]
    source: str = Field(min_length=3)

    @model_validator(mode="after")
    def _in_order(self) -> "DurationBounds":
        if self.seconds[0] > self.seconds[1]:
            raise ValueError(f"seconds: expected low <= high, got {self.seconds}")
        return self

    @property
    def range(self) -> TimeRange:
        """The bounds as a range."""
        return TimeRange(*self.seconds)


class LevelBounds(DataTable):
    """The duration of a level in a plan, for a number of checks, without the starts of servers."""

    checks: Count
    seconds: tuple[Seconds, Seconds]

    @property
    def each(self) -> TimeRange:
        """The duration per check."""
        return TimeRange(*self.seconds) * (1 / self.checks)


class PlanBounds(DataTable):
    """The durations of a profile's plan, by level."""

    source: str = Field(min_length=3)
    levels: dict[Level, LevelBounds]


class StartBounds(DurationBounds):
    """The duration of a start with warm caches. A measured start is compared with ``usual``."""

    usual: Positive


class ProfileBounds(DataTable):
    """The durations that the suite ships for a profile."""

    start: StartBounds
    plans: dict[str, PlanBounds]

    @model_validator(mode="after")
    def _has_all(self) -> "ProfileBounds":
        if FULL not in self.plans:
            raise ValueError(
                f"plans: expected a row {FULL}, which applies to plans without a row of their own"
            )
        return self


class Quoted(DataTable):
    """A duration that documents quote: the minutes in this row, or the duration of a plan."""

    id: str
    #: A paragraph that quotes the duration contains one of these texts.
    near: tuple[Annotated[str, Field(min_length=3)], ...] = Field(min_length=1)
    source: str = ""
    minutes: tuple[Seconds, Seconds] | None = None
    profile: str = ""
    plan: str = ""
    #: The levels of the plan that count; empty: all levels.
    levels: tuple[Level, ...] = ()
    starts: int = 1
    #: The seconds that an option adds.
    more: Seconds = 0

    @model_validator(mode="after")
    def _is_known(self) -> "Quoted":
        if (self.minutes is None) != bool(self.profile and self.plan):
            raise ValueError("expected minutes with a source, or a profile and its plan")
        if self.minutes is not None and not self.source:
            raise ValueError(
                "source: expected a text that says where the minutes were measured, got none"
            )
        return self


class Timeout(DataTable):
    """The timeout of a CI job in minutes. ``of``: the id of the longest duration in the job."""

    file: str
    job: str
    minutes: Count
    of: str


class Durations(DataTable):
    """The content of durations.toml."""

    profiles: dict[str, ProfileBounds]
    quoted: Entries[Quoted]
    timeout: tuple[Timeout, ...]

    def time(self, row: Quoted) -> TimeRange:
        """Return the duration that a row of the file quotes: its own, or that of a plan.

        Args:
            row: A row of `quoted`.
        """
        if row.minutes is not None:
            return TimeRange(*row.minutes) * 60
        bounds = self.profiles[row.profile]
        levels = bounds.plans[row.plan].levels
        time = bounds.start.range * row.starts + TimeRange.of(row.more)
        for name in row.levels or levels:
            time += TimeRange(*levels[name].seconds)
        return time


def load() -> Durations:
    """Load durations.toml."""
    return data_file.load("durations.toml", Durations)


def shipped_durations(profile: Profile) -> ProfileBounds | None:
    """Return the durations that the suite ships for a profile, or for the profile that it extends.

    Args:
        profile: The profile.

    Returns:
        The bounds; None if the suite ships none.
    """
    rows = load().profiles
    return rows.get(profile.name, rows.get(profile.extends or ""))
