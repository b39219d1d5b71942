"""The times of the checks of a run: read before it, noted while it goes on, kept at its end."""

from pathlib import Path
from typing import NamedTuple

import pytest

from sm121.core.errors import UsageError
from sm121.core.verdict import Verdict
from sm121.machine import this_machine
from sm121.measure.plan import Plan
from sm121.performance.recorder import host_of
from sm121.plugin.stash import FINDING, ID, LEVEL, SESSION, SETTINGS, STARTS
from sm121.run import stored_benchmarks, timings
from sm121.run.record import Target
from sm121.run.timings import Taken
from sm121.session import certification
from sm121.session.session import Session

#: The times of this run so far.
_TAKEN = pytest.StashKey[Taken]()


class Known(NamedTuple):
    """The times of the last run on this machine.

    Attributes:
        taken: The times; empty if none are known.
        problem: Why a file of times cannot be read; None if it can, or if there is none.
    """

    taken: Taken
    problem: str | None = None


def known(config: pytest.Config, chosen: Target, plan: str) -> Known:
    """Read the times of the last run on this machine.

    Args:
        config: pytest's.
        chosen: The target.
        plan: The name of the plan.
    """
    folder = _folder(config)
    target = _target(config, chosen, plan)
    if folder is None or target is None:
        return Known(Taken())
    try:
        return Known(timings.read(folder, target))
    except (OSError, ValueError) as error:
        lines = str(error).splitlines()
        first = lines[0] if lines else ""
        problem = (
            f"{folder / timings.NAME}: expected durations of earlier runs, got what cannot be read "
            f"({first}). They are taken as not there; this run writes the file anew"
        )
        return Known(Taken(), problem)


def note(item: pytest.Item) -> None:
    """Note the time of a check and of the starts in it, once it has its verdict.

    A check that failed may have waited for a server that never came: its time is not noted, but for
    a metric, which takes as long whatever its gate is.

    Args:
        item: The test, which has ended.
    """
    session = item.config.stash.get(SESSION, None)
    finding = item.stash.get(FINDING, None)
    if session is None or finding is None or not finding.executed:
        return
    taken = item.config.stash.setdefault(_TAKEN, Taken())
    seconds = finding.seconds - _shared_starts_s(session, item.stash.get(STARTS, 0), taken)
    is_rate = item.stash[LEVEL] == "performance"
    if finding.verdict is not Verdict.PASS and not is_rate:
        return
    by_id = taken.rates if is_rate else taken.checks
    by_id[item.stash[ID]] = max(round(seconds, 3), 0.0)


def keep(config: pytest.Config, session: Session) -> None:
    """Keep the times of this run for a forecast of the next.

    It keeps none of a run with ``--engine-debug``, of one of several workers, and of rates with
    sizes of their own.

    Args:
        config: pytest's.
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
    taken.checks.pop(certification.SOAK, None)  # its option says how long it lasts
    if run.target.profile is not None:
        usual = Plan.of(run.profile, plan=settings.plan)
        if settings.measuring_plan(run.profile) != usual:
            taken.rates.clear()
    try:
        timings.keep(folder, target, taken)
    except OSError as error:
        run.record.remark(
            f"durations of this run are not kept: {folder}: {error.strerror or error}",
            at_once=False,
        )


def _shared_starts_s(session: Session, before: int, taken: Taken) -> float:
    """The seconds of starts in a check that other checks share: the first of each configuration.

    A start that compiles is no usual one, and is not noted.
    """
    run = session.run
    if run.servers.pool is None:
        return 0.0
    earlier = {start.configuration for start in run.servers.pool.starts[:before]}
    seconds = 0.0
    for start in run.servers.pool.starts[before:]:
        if start.configuration in earlier or start.startup_s is None:
            continue
        earlier.add(start.configuration)
        if start.configuration not in run.configurations.by_name:
            continue  # a cell's own
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
        return None  # a database: nothing is kept there


def _target(config: pytest.Config, chosen: Target, plan: str) -> timings.Target | None:
    settings = config.stash[SETTINGS]
    profile = chosen.profile
    if profile is None:
        return None
    return timings.Target(
        machine=this_machine.identity(host_of(settings.base_url)),
        profile=profile.name,
        configuration=profile.under_test,
        plan=plan,
    )
