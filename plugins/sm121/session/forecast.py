"""Forecasts how long a run takes, from earlier runs on this machine or from shipped durations.

A check that was timed on this machine (`sm121.run.timings`) is expected to take as long again. For
other checks, ``fixtures/durations.toml`` contains a range for each profile, plan and level, which
was measured elsewhere or estimated; each check gets an equal share. The first start of a run shows
how fast this machine is: if it takes twice as long as usual, both ends of a range are doubled.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sm121.core.profile import Profile
from sm121.core.profile_fields import FULL
from sm121.core.time_range import NO_TIME, TimeRange
from sm121.run.timings import CheckDurations
from sm121.session import durations
from sm121.session.durations import LevelBounds

#: The check that stops the server of the baseline.
STOP = "tests/test_smoke.py::test_stop_leaves_nothing_behind"


@dataclass(frozen=True)
class Check:
    """A check of a run.

    Args:
        id: Its node id.
        level: Its level.
        configurations: Names of the configurations whose server it needs; the first check that
            needs one starts it.
        can_run: Whether it can run on this target.
        stops: Whether it stops its server, so that the next check starts a server.
        lasts: The duration that an option sets (``--soak``); None without such an option.
    """

    id: str
    level: str
    configurations: frozenset[str] = frozenset()
    can_run: bool = True
    stops: bool = False
    lasts: TimeRange | None = None


@dataclass(frozen=True)
class ExpectedDuration:
    """The forecast for one check.

    Attributes:
        check: The check.
        time: Its duration without ``starts``; None if it is not known.
        timed: Whether it was timed on this machine.
        starts: The durations of the starts that this check needs first, by configuration.
    """

    check: Check
    time: TimeRange | None
    timed: bool
    starts: Mapping[str, TimeRange | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Forecast:
    """The checks of a run and how long they take, in the order in which they run.

    Attributes:
        expected: The forecast for each check.
        usual_start_s: The usual duration of a start in seconds, by configuration; empty if unknown.
    """

    expected: Sequence[ExpectedDuration] = ()
    usual_start_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def levels(self) -> dict[str, list[ExpectedDuration]]:
        """The checks by level, in their order."""
        by_level: dict[str, list[ExpectedDuration]] = {}
        for each in self.expected:
            by_level.setdefault(each.check.level, []).append(each)
        return by_level

    @property
    def timed(self) -> int:
        """The number of checks that were timed on this machine."""
        return sum(each.timed for each in self.expected)

    @property
    def unable(self) -> int:
        """The number of checks that cannot run."""
        return sum(not each.check.can_run for each in self.expected)

    @property
    def time(self) -> TimeRange | None:
        """The duration of all checks; None if the duration of one check is not known."""
        return total(self.expected)


def total(expected: Iterable[ExpectedDuration]) -> TimeRange | None:
    """Add up the durations of checks and of the starts that they need.

    Args:
        expected: The checks.

    Returns:
        The sum; None if the duration of one check is not known.
    """
    whole = NO_TIME
    for each in expected:
        for part in (each.time, *each.starts.values()):
            if part is None:
                return None
            whole += part
    return whole


def forecast_run(
    profile: Profile, plan: str, checks: Iterable[Check], known: CheckDurations
) -> Forecast:
    """Forecast a run.

    Args:
        profile: The profile of the run.
        plan: The name of the plan. For a user's plan, the shipped durations of ``full`` are used.
        checks: The checks of the run, in its order.
        known: The durations that were measured on this machine.

    Returns:
        The forecast. A check that cannot run takes no time.
    """
    bounds = durations.shipped_durations(profile)
    levels: Mapping[str, LevelBounds] = {}
    if bounds is not None:
        levels = bounds.plans.get(plan, bounds.plans[FULL]).levels  # type: ignore[assignment]
    usual: dict[str, float] = {}
    started: set[str] = set()
    expected: list[ExpectedDuration] = []
    for check in checks:
        if not check.can_run:
            expected.append(ExpectedDuration(check, NO_TIME, timed=False))
            continue
        starts: dict[str, TimeRange | None] = {}
        for name in sorted(check.configurations - started):
            seconds = known.starts.get(name)
            if seconds is not None:
                usual[name] = seconds
                starts[name] = TimeRange.of(seconds)
            elif bounds is not None:
                usual[name] = bounds.start.usual
                starts[name] = bounds.start.range
            else:
                starts[name] = None
        started |= check.configurations
        if check.stops:
            # Later checks only read the log of the stopped server, or use the one under test.
            started.discard(profile.under_test)
        expected.append(_expected(check, known.of(check.id), levels.get(check.level), starts))
    return Forecast(expected, usual)


def _expected(
    check: Check,
    timed_s: float | None,
    bounds: LevelBounds | None,
    starts: Mapping[str, TimeRange | None],
) -> ExpectedDuration:
    if check.lasts is not None:
        return ExpectedDuration(check, check.lasts, timed=False, starts=starts)
    if timed_s is not None:
        return ExpectedDuration(check, TimeRange.of(timed_s), timed=True, starts=starts)
    time = bounds.each if bounds is not None else None
    return ExpectedDuration(check, time, timed=False, starts=starts)
