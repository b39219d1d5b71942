"""``fixtures/durations.toml``: how long things take, with a source for each."""

from typing import Annotated

from pydantic import Field, model_validator

from sm121.core import data_file
from sm121.core.data_file import DataTable, Entries
from sm121.core.measuring_settings import Count, Positive
from sm121.core.profile import Profile
from sm121.core.profile_fields import FULL, Level
from sm121.core.time_range import TimeRange

Seconds = Annotated[float, Field(ge=0)]


class Bounds(DataTable):
    """The least and the most seconds of something, and where they come from."""

    seconds: tuple[Seconds, Seconds]
    source: str = Field(min_length=3)

    @model_validator(mode="after")
    def _in_order(self) -> "Bounds":
        if self.seconds[0] > self.seconds[1]:
            raise ValueError(f"seconds: expected low <= high, got {self.seconds}")
        return self

    @property
    def range(self) -> TimeRange:
        """The bounds as a range."""
        return TimeRange(*self.seconds)


class LevelBounds(DataTable):
    """A level of a plan: so many checks took so long together, without starts that they share."""

    checks: Count
    seconds: tuple[Seconds, Seconds]

    @property
    def each(self) -> TimeRange:
        """The share of one check."""
        return TimeRange(*self.seconds) * (1 / self.checks)


class PlanBounds(DataTable):
    """A plan of a profile, level by level."""

    source: str = Field(min_length=3)
    levels: dict[Level, LevelBounds]


class StartBounds(Bounds):
    """A start with warm caches; ``usual``: what the first start of a run is compared with."""

    usual: Positive


class ProfileBounds(DataTable):
    """What ships about the time that a profile takes."""

    start: StartBounds
    plans: dict[str, PlanBounds]

    @model_validator(mode="after")
    def _has_all(self) -> "ProfileBounds":
        if FULL not in self.plans:
            raise ValueError(f"plans: expected {FULL}, by which plans without a row go")
        return self


class Quoted(DataTable):
    """Minutes that documents quote: a row's own, or those of a plan."""

    id: str
    #: One of these is in the paragraph that quotes it.
    near: tuple[Annotated[str, Field(min_length=3)], ...] = Field(min_length=1)
    source: str = ""
    minutes: tuple[Seconds, Seconds] | None = None
    profile: str = ""
    plan: str = ""
    #: Of the plan only these; empty: all of them.
    levels: tuple[Level, ...] = ()
    starts: int = 1
    #: Seconds that an option adds.
    more: Seconds = 0

    @model_validator(mode="after")
    def _is_known(self) -> "Quoted":
        if (self.minutes is None) != bool(self.profile and self.plan):
            raise ValueError("expected minutes with a source, or a profile and its plan")
        if self.minutes is not None and not self.source:
            raise ValueError("source: expected where the minutes come from")
        return self


class Timeout(DataTable):
    """The limit of a job of CI in minutes; ``of``: id of the longest thing that it does."""

    file: str
    job: str
    minutes: Count
    of: str


class Durations(DataTable):
    """The whole file."""

    profiles: dict[str, ProfileBounds]
    quoted: Entries[Quoted]
    timeout: tuple[Timeout, ...]

    def time(self, row: Quoted) -> TimeRange:
        """Return the time that a row quotes.

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
    """Return what ships."""
    return data_file.load("durations.toml", Durations)


def of(profile: Profile) -> ProfileBounds | None:
    """Return what ships about a profile, or about the one that it extends.

    Args:
        profile: The profile.

    Returns:
        The bounds; None if nothing ships.
    """
    rows = load().profiles
    return rows.get(profile.name, rows.get(profile.extends or ""))
