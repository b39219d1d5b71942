"""The durations of a run's checks: reads those of earlier runs, and stores those of this run."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from sm121.core.errors import UsageError
from sm121.core.verdict import Verdict
from sm121.engines.pool import StartReport
from sm121.machine import this_machine
from sm121.measure.plan import Plan
from sm121.performance.recorder import host_of
from sm121.plugin.stash import FINDING, ID, LEVEL, SESSION, SETTINGS, STARTS
from sm121.run import stored_benchmarks, timings
from sm121.run.record import Target
from sm121.run.timings import CheckDurations
from sm121.session import certification
from sm121.session.session import Session

#: The durations in this run so far.
_TAKEN = pytest.StashKey[CheckDurations]()


class KnownDurations(NamedTuple):
    """The durations of the last run on this machine.

    Attributes:
        taken: The durations; empty if none are known.
        problem: Why the file of durations cannot be read; None if it can, or if there is none.
    """

    taken: CheckDurations
    problem: str | None = None


def known(config: pytest.Config, chosen: Target, plan: str) -> KnownDurations:
    """Read the durations of the last run on this machine.

    Args:
        config: The configuration of pytest.
        chosen: The target.
        plan: The name of the plan.
    """
    folder = _folder(config)
    target = _target(config, chosen, plan)
    if folder is None or target is None:
        return KnownDurations(CheckDurations())
    try:
        return KnownDurations(timings.read_durations(folder, target))
    except (OSError, ValueError) as error:
        lines = str(error).splitlines()
        first = lines[0] if lines else ""
        problem = (
            f"{folder / timings.NAME}: expected durations of earlier runs, got a file that cannot "
            f"be read ({first}). It is ignored, and this run replaces it"
        )
        return KnownDurations(CheckDurations(), problem)


def starts_of(session: Session) -> Sequence[StartReport]:
    """Return the starts of the run's servers so far; none if the server is attached.

    Args:
        session: The run.

    Returns:
        A list that grows during the run.
    """
    pool = session.run.servers.pool
    return pool.starts if pool is not None else ()


def note(item: pytest.Item) -> None:
    """Record the duration of a check, and of the starts in it, after its verdict is known.

    A failed check is not recorded, because it may have waited for a server that did not start. A
    failed gate is recorded, because its measurement takes as long as one that passes.

    Args:
        item: The test. It has ended.
    """
    session = item.config.stash.get(SESSION, None)
    finding = item.stash.get(FINDING, None)
    if session is None or finding is None or not finding.executed:
        return
    taken = item.config.stash.setdefault(_TAKEN, CheckDurations())
    seconds = finding.seconds - _shared_starts_s(session, item.stash.get(STARTS, 0), taken)
    is_rate = item.stash[LEVEL] == "performance"
    if finding.verdict is not Verdict.PASS and not is_rate:
        return
    by_id = taken.rates if is_rate else taken.checks
    by_id[item.stash[ID]] = max(round(seconds, 3), 0.0)


def store_durations(config: pytest.Config, session: Session) -> None:
    """Store the durations of this run for forecasts of later runs.

    Nothing is stored with ``--engine-debug``, in a worker, and for rates whose sizes were given on
    the command line.

    Args:
        config: The configuration of pytest.
        session: The run.
    """
    run = session.run
    taken = config.stash.get(_TAKEN, None)
    settings = session.settings
    target = _target(config, run.target, settings.plan)
    folder = _folder(config)
    if taken is None or target is None or folder is None:
        return
    if settings.engine.debug or settings.worker is not None:
        return
    taken.checks.pop(certification.SOAK, None)  # an option sets its duration
    if run.target.profile is not None:
        usual = Plan.of(run.profile, plan=settings.plan)
        if settings.measuring_plan(run.profile) != usual:
            taken.rates.clear()
    try:
        timings.store_durations(folder, target, taken)
    except OSError as error:
        run.record.remark(
            f"durations of this run are not kept: {folder}: {error.strerror or error}",
            at_once=False,
        )


def _shared_starts_s(session: Session, before: int, taken: CheckDurations) -> float:
    """Return the seconds of a check that were the first start of a configuration.

    Other checks use the same server. A start that compiled kernels is not recorded.
    """
    run = session.run
    starts = starts_of(session)
    earlier = {start.configuration for start in starts[:before]}
    seconds = 0.0
    for start in starts[before:]:
        if start.configuration in earlier or start.startup_s is None:
            continue
        earlier.add(start.configuration)
        if start.configuration not in run.configurations.by_name:
            continue  # the start belongs to a matrix cell only
        seconds += start.startup_s
        if not start.compiled:
            taken.starts[start.configuration] = round(start.startup_s, 3)
    return seconds


def _folder(config: pytest.Config) -> Path | None:
    try:
        return stored_benchmarks.storage_folder(
            config.getoption("benchmark_storage"), config.invocation_params.dir
        )
    except UsageError:
        return None  # the storage is a database, in which no durations are stored


def _target(config: pytest.Config, chosen: Target, plan: str) -> timings.TimedTarget | None:
    settings = config.stash[SETTINGS]
    profile = chosen.profile
    if profile is None:
        return None
    return timings.TimedTarget(
        machine=this_machine.identity(host_of(settings.base_url)),
        profile=profile.name,
        configuration=profile.under_test,
        plan=plan,
    )
