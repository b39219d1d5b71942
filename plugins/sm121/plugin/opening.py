"""Opens the run for the collected tests of the levels."""

import contextlib
import dataclasses
import functools
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import pytest

from pytest_gpu_arch import status
from pytest_gpu_arch.expression import architectures_asked_for
from sm121.core.architecture import CPU
from sm121.core.errors import UsageError
from sm121.machine import machine_lock
from sm121.plugin import (
    answers,
    certificate,
    comparing_tests,
    expressions,
    kernels,
    performance,
    planning,
    reporting,
    selection,
    terminal,
    wanted,
    workers,
)
from sm121.plugin.stash import ID, LEVEL, SESSION, SETTINGS, SHARD, SIGNALS
from sm121.run import directory
from sm121.run.events import Collected
from sm121.run.record import Target
from sm121.run.shard_report import ShardTest
from sm121.session import opening, signals
from sm121.session.session import SelectedTests, Session
from sm121.session.settings import Settings
from sm121.session.target import resolve

#: The lock on this machine, held while this run measures.
_MACHINE = pytest.StashKey[IO[str]]()
#: Set if another run is using the report directory. Then this run only validates its request, in a
#: temporary folder.
_IN_USE = pytest.StashKey[directory.InUse]()
#: The exit statuses of pytest if the tests have ended.
_ENDED = (
    pytest.ExitCode.OK,
    pytest.ExitCode.NO_TESTS_COLLECTED,
    pytest.ExitCode.TESTS_FAILED,
)
#: The exit statuses of pytest if no test ran, apart from a refused request.
_NOTHING_RAN = (
    pytest.ExitCode.NO_TESTS_COLLECTED,
    pytest.ExitCode.INTERRUPTED,
    pytest.ExitCode.INTERNAL_ERROR,
)
#: The keys of the terminal reporter's counts that are not outcomes of tests.
_NO_OUTCOMES = {"", "deselected", "warnings"}
_NO_LEVEL = (
    "no test of a level was collected: run `sm121 run`, or run pytest in the folder that "
    "contains the suite's tests/"
)


def open_run(config: pytest.Config, items: list[pytest.Item]) -> Session | None:
    """Open the run for the collected tests of the levels.

    Args:
        config: The configuration of pytest. Its stash keeps the run and its crash desk.
        items: The selected tests.

    Returns:
        The run; None if no test of a level was collected, or if pytest only lists the tests.

    Raises:
        UsageError: An option is wrong, or this run would judge something that the options exclude.
    """
    if not config.stash.get(selection.SELECTED, False):
        return None  # pytest also calls this after a refused collection
    tests = [item for item in items if LEVEL in item.stash]
    deselected = config.stash.get(selection.DESELECTED, {})
    if not tests and not deselected and SHARD not in config.stash:
        return None
    settings = config.stash[SETTINGS]
    chosen = _target(config, settings, tests)
    if not tests and chosen.obstacle is None:
        chosen = dataclasses.replace(chosen, obstacle=_nothing_selected(config))
    if settings.judging.certify:
        certificate.refuse(config, settings, chosen, tests)
    for item in tests:
        selection.mark(item, chosen)
    kernels.mark_what_cannot_run(settings, tests)
    config.stash[planning.TARGET] = chosen
    if config.option.collectonly:
        answers.refuse_unreadable(settings)
        performance.refuse_planned_sizes(settings, chosen)
        return None
    ids = {item.stash[ID] for item in tests}
    resume = config.getoption("--resume")
    prepare = functools.partial(
        opening.prepare,
        chosen=chosen,
        collected=_collected(config, settings, tests),
        selected=_selected(config, chosen, tests),
        say=functools.partial(terminal.say, config),
        verbose=config.option.verbose > 0,
        resume=resume,
        again=functools.partial(reporting.command_again, config, ids),
    )
    settings = _with_report_folder(config, settings, chosen)
    try:
        session = prepare(settings)
    except directory.InUse as error:
        if settings.worker is not None or resume:
            raise
        # A wrong request must be refused before the folder is used: see `withdrawing`.
        session = prepare(dataclasses.replace(settings, report_dir=Path(tempfile.mkdtemp())))
        config.stash[_IN_USE] = error
    config.stash[SESSION] = session
    config.stash[SIGNALS] = signals.Signals(session)
    return session


def _selected(config: pytest.Config, chosen: Target, tests: list[pytest.Item]) -> SelectedTests:
    """Return facts about the tests of a run, for the decisions at its end."""
    inapplicable = {item.stash[ID] for item in tests if selection.is_inapplicable(item, chosen)}
    return SelectedTests(
        collected=config.stash[selection.COLLECTED],
        deselected=selection.missed(config, chosen.arch),
        inapplicable=inapplicable,
        asks_for=wanted.asks_for(config, chosen),
    )


def _collected(config: pytest.Config, settings: Settings, tests: list[pytest.Item]) -> Collected:
    """The tests of a run, and the shard to which they belong."""
    shard = config.stash.get(SHARD, None)
    if settings.worker is not None:
        shard = workers.part(settings.worker, tests)
    listed = [ShardTest(id=item.stash[ID], level=item.stash[LEVEL]) for item in tests]
    return Collected(
        listed,
        shard,
        compared=selection.compares(config),
        comparison=comparing_tests.comparison_options(config),
    )


def _with_report_folder(config: pytest.Config, settings: Settings, chosen: Target) -> Settings:
    """Return the settings of a run with its report directory.

    If no test can run and the directory contains the report of a run that measured, the report of
    this run is written to its subfolder ``not-run/``. In three cases this run always uses the
    directory, and the earlier report is moved: with ``--certify``, in a run of several processes,
    and with ``--report-dir`` on the command line, in PYTEST_ADDOPTS or in the ini file.
    """
    if chosen.obstacle is None or settings.judging.certify or _names_report_anywhere(config):
        return settings
    if workers.is_parallel(config):
        return settings
    folder = directory.of_a_run_that_measures_nothing(settings.report_dir)
    return dataclasses.replace(settings, report_dir=folder)


def _names_report(config: pytest.Config) -> bool:
    """Whether ``--report-dir`` is on the command line."""
    words = [str(word).partition("=")[0] for word in config.invocation_params.args]
    return "--report-dir" in words


def _names_report_anywhere(config: pytest.Config) -> bool:
    """Whether ``--report-dir`` is on the command line, in PYTEST_ADDOPTS or in the ini file."""
    words = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *config.getini("addopts")]
    is_elsewhere = any(word.partition("=")[0] == "--report-dir" for word in words)
    return is_elsewhere or _names_report(config)


def _nothing_selected(config: pytest.Config) -> str | None:
    """Why no test of a level is selected by ``-k``, ``-m`` or ``--deselect``.

    None without these options, in a worker, which may have no test, and in a shard if the other
    shards have the tests. Such a shard reads the server and the machine like the others, so that
    a merge can compare its fingerprint.
    """
    settings = config.stash[SETTINGS]
    if SHARD in config.stash and config.stash[SHARD].tests:
        return None
    words = {"-k": config.getoption("keyword", ""), "-m": config.getoption("markexpr", "")}
    given = " ".join(f"{option} {word!r}" for option, word in words.items() if word)
    if not given:
        given = " ".join(f"--deselect {word}" for word in config.getoption("deselect") or ())
    if not given or settings.worker is not None:
        return None
    count = len(config.stash[selection.COLLECTED])
    return (
        f"{given}: expected the name of a check, got none of {count} checks. "
        "List the names: pytest --collect-only -q"
    )


def needs_the_machine(items: Iterable[pytest.Item], *, on_gpu: bool) -> bool:
    """Whether a run must be the only one that measures on this machine.

    Args:
        items: The tests of the run.
        on_gpu: Whether the run starts servers on a GPU. The memory of a GB10 is too small for two
            servers of gpt-oss-120b.
    """
    for item in items:
        if selection.WHY_NOT in item.stash:
            continue
        fixtures = getattr(item, "fixturenames", ())
        if on_gpu or machine_lock.measures(item.stash[LEVEL], fixtures):
            return True
    return False


def take_machine(config: pytest.Config, session: Session, items: Iterable[pytest.Item]) -> None:
    """Lock this machine, if the run must be the only one that measures here.

    If a run has several workers, the first one locks the machine for all of them.

    Args:
        config: The configuration of pytest. Its stash keeps the lock.
        session: The run. It has not begun.
        items: The collected tests.

    Raises:
        UsageError: Another run is measuring on this machine.
    """
    chosen = session.run.target
    settings = session.settings
    if settings.worker is not None and settings.worker.id != "gw0":
        return
    starts_on_gpu = chosen.arch != CPU and chosen.obstacle is None and settings.base_url is None
    tests = [item for item in items if LEVEL in item.stash and workers.why_not(item) is None]
    if needs_the_machine(tests, on_gpu=starts_on_gpu):
        config.stash[_MACHINE] = machine_lock.lock_machine()


def release_machine(config: pytest.Config) -> None:
    """Release the lock on this machine.

    Args:
        config: The configuration of pytest. Its stash keeps the lock.
    """
    if _MACHINE in config.stash:
        config.stash[_MACHINE].close()
        del config.stash[_MACHINE]


def end_without_levels(session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
    """Open a NOT_RUN run if the options name a target, but no test of a level was collected.

    If there are other tests, the plugin `pytest_gpu_arch` decides the status, as in a project that
    does not use the suite; unless the options ask for a certificate, or for a report in a folder.
    If no test ran at all, or all were skipped, an earlier report in the folder of ``--report-dir``
    is moved away: nobody must take the earlier verdict for the result of this run.

    Args:
        session: The session of pytest, which ends.
        exitstatus: The exit status of pytest.

    Raises:
        pytest.UsageError: An option is wrong.
    """
    config = session.config
    if exitstatus in _ENDED:
        is_certified = config.stash[SETTINGS].judging.certify
        is_of_the_suite = session.testscollected == 0 or is_certified or _names_report(config)
        if is_of_the_suite and expressions.asked_for_levels(config):
            _open_empty(config)
            return
        config.stash[status.DECIDED_ELSEWHERE] = False
    all_skipped = exitstatus == pytest.ExitCode.OK and _all_skipped(config)
    if (exitstatus in _NOTHING_RAN or all_skipped) and _names_report_anywhere(config):
        _move_earlier_report(config)


def _all_skipped(config: pytest.Config) -> bool:
    """Whether there were tests, and all were skipped."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    outcomes = set() if reporter is None else {*reporter.stats} - _NO_OUTCOMES
    return outcomes == {"skipped"}


def _open_empty(config: pytest.Config) -> None:
    settings = config.stash[SETTINGS]
    with refusing():
        chosen = _target(config, settings, [])
        chosen = dataclasses.replace(chosen, obstacle=chosen.obstacle or _NO_LEVEL)
        session = opening.prepare(
            _with_report_folder(config, settings, chosen),
            chosen,
            say=functools.partial(terminal.say, config),
        )
    config.stash[SESSION] = session


@contextlib.contextmanager
def withdrawing(config: pytest.Config, session: Session) -> Iterator[None]:
    """Withdraw the run, and leave no report, if the code in the block refuses the request.

    Args:
        config: The configuration of pytest. The run is removed from its stash.
        session: The run. It has not begun.

    Raises:
        UsageError: The request is refused, or another run is using the report directory.
    """
    try:
        yield
        if _IN_USE in config.stash:
            raise config.stash[_IN_USE]
    except UsageError:
        del config.stash[SESSION]
        session.withdraw()
        if _IN_USE in config.stash:
            shutil.rmtree(session.run.record.directory)
        release_machine(config)
        raise


@contextlib.contextmanager
def refusing(config: pytest.Config | None = None) -> Iterator[None]:
    """Turn a UsageError of the block into pytest's own usage error.

    Args:
        config: The configuration of pytest. With ``--certify``, an earlier report is moved away, so
            that nobody takes the earlier verdict for the result of the certified run.

    Raises:
        pytest.UsageError: The request is wrong.
    """
    try:
        yield
    except UsageError as error:
        if config is not None and config.getoption("--certify"):
            _move_earlier_report(config)
        raise pytest.UsageError(str(error)) from error


def _move_earlier_report(config: pytest.Config) -> None:
    """Move the report of the previous run to the folder of earlier reports."""
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    folder = config.invocation_params.dir / config.getoption("--report-dir")
    if (folder / "verdict.json").is_file():
        with contextlib.suppress(UsageError):  # another run is using the report directory
            directory.lock_directory(folder).lock.close()


def _target(config: pytest.Config, settings: Settings, tests: list[pytest.Item]) -> Target:
    """Choose the target of the run.

    The target has an obstacle if ``-m`` selects only tests of another architecture.
    """
    expression = expressions.marker_expression(config)
    chosen = resolve(settings, architectures_asked_for(expression))
    if chosen.obstacle is not None or not tests:
        return chosen
    if not expressions.selects_any(expression, tests, chosen.arch):
        obstacle = f"-m {expression!r} selects no test for {chosen.arch}, which is the target"
        return dataclasses.replace(chosen, obstacle=obstacle)
    return chosen
