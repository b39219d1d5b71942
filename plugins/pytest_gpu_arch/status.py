"""The exit status of a run with a requested architecture: 5 if no test ran on it."""

from collections.abc import Generator

import pytest

from pytest_gpu_arch import names, target
from pytest_gpu_arch.target import Target

#: Stash key that another plugin sets before the session finishes, if it decides the exit status of
#: the run itself.
DECIDED_ELSEWHERE = pytest.StashKey[bool]()
#: The options with which pytest only shows information, and runs no test.
_SHOWING = ("collectonly", "showfixtures", "show_fixtures_per_test", "cacheshow")
#: The exit statuses of a complete run. Other statuses, for example that of an interrupt, already
#: show that not all tests ran.
_WHOLE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


def only_shows(config: pytest.Config) -> bool:
    """Check whether pytest only shows information, as with ``--collect-only``.

    Args:
        config: The configuration of the run.
    """
    return any(getattr(config.option, name, None) for name in _SHOWING)


def watch(config: pytest.Config) -> None:
    """Register the check that a test ran on the requested architecture.

    Workers of pytest-xdist do not register the check, because the controller receives the reports
    of all workers.

    Args:
        config: The configuration of the run.
    """
    is_worker = hasattr(config, "workerinput")
    if is_worker or only_shows(config):
        return
    config.pluginmanager.register(NotRun(config), "pytest_gpu_arch.not_run")


class NotRun:
    """Ends a run with status 5 if an architecture was requested and no test ran on it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._has_run = False
        self._line: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record that a test ran. An expected failure (xfail) counts as a test that ran."""
        if report.when == "call" and (not report.skipped or hasattr(report, "wasxfail")):
            self._has_run = True

    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int | pytest.ExitCode
    ) -> None:
        """Set the exit status. A run with failed tests keeps status 1."""
        if exitstatus not in _WHOLE or self._config.stash.get(DECIDED_ELSEWHERE, False):
            return
        if target.is_asked_for(self._config):
            self._line = _not_run(target.of(self._config), has_run=self._has_run)
        elif not self._has_run:
            self._line = _none_ran(target.asked_by_keyword(self._config))
        if self._line is not None and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # shown below pytest's own summary
    def pytest_terminal_summary(
        self, terminalreporter: "pytest.TerminalReporter"
    ) -> Generator[None, object, object]:
        """Show why nothing ran, in one line."""
        result = yield
        if self._line is not None:
            terminalreporter.write_line(self._line)
        return result


def _not_run(chosen: Target, *, has_run: bool) -> str | None:
    """Return the message if no test ran on the requested architecture, else None."""
    if chosen.obstacle is not None:
        machine = names.listed(chosen.missing)
        return f"NOT_RUN: {chosen.obstacle}. Run the tests on a machine with {machine}"
    return None if has_run else _none_ran(chosen.asked)


def _none_ran(asked: tuple[str, ...]) -> str | None:
    """Return the message on architectures for which no test ran; None if none was requested."""
    if not asked:
        return None
    return f"NOT_RUN: {names.listed(asked)} was requested, but no test ran. -rs shows the reasons"
