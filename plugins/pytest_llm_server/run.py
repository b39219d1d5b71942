"""The hooks of a pytest run: find the tests that use a server, and check the server's health."""

from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llm_server import ServerFailed, options, redacting
from pytest_llm_server.timer import Timer

if TYPE_CHECKING:
    from pytest_llm_server.servers import Servers

_FACTORY = "llm_server_factory"
_SERVER = "llm_server"
_FIXTURES = frozenset({_FACTORY, _SERVER})
_RUN = pytest.StashKey["Run"]()


@dataclass(frozen=True)
class _SetUp:
    """A fixture that has been set up."""

    definition: pytest.FixtureDef[Any]
    request: Any


class Run:
    """The hooks of a run, in pytest's order, and the functions that the fixtures use.

    Args:
        config: The configuration of the run.
        timer: The timeout of the running test.
    """

    def __init__(self, config: pytest.Config, timer: Timer) -> None:
        self._config = config
        self._timer = timer
        self._servers: Servers | None = None
        #: The running test; None between two tests.
        self._item: pytest.Item | None = None
        #: The id of the running test, during its setup and call, once its servers were found alive.
        #: At other times None.
        self._test: str | None = None
        self._set_up: dict[str, _SetUp] = {}
        #: Whether a server died during the running test.
        self._has_died = False

    def servers(self) -> "Servers":
        """Return the run's servers.

        This is not a property, because pytest reads all properties of a plugin.
        """
        if self._servers is None:
            from pytest_llm_server.servers import Servers  # imports the suite, needed only here

            asked = options.read_options(self._config)
            self._servers = Servers(asked, self._timer, lambda: self._test)
        return self._servers

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Before any test, reject invalid options and an attached server that does not answer.

        An xdist worker cannot abort a run, so its tests fail instead.
        """
        is_worker = hasattr(self._config, "workerinput")
        if is_worker or self._config.option.collectonly:
            return
        if not any(_uses_one(item) for item in session.items):
            return
        url = self.servers().asked.base_url
        if url is None:
            return
        from sm121.core.errors import UsageError

        try:
            self.servers().attach(url, self.option)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from error

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record which test runs."""
        self._item = item
        try:
            return (yield)
        finally:
            self._item = None

    @pytest.hookimpl(tryfirst=True)  # pytest's own hook ends the call
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> None:
        """Record the fixtures that may have to be finished before the end of the session."""
        if fixturedef.argname in _FIXTURES:
            self._set_up[fixturedef.argname] = _SetUp(fixturedef, request)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test whose server has died before. Check the servers again after the setup."""
        __tracebackhide__ = True
        if not _uses_one(item):
            return (yield)
        self._require_alive()
        return (yield from self._looked_at_its_end(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test if a server died during it."""
        __tracebackhide__ = True
        if not _uses_one(item):
            return (yield)
        return (yield from self._looked_at_its_end(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        """Finish the fixtures of a dead server.

        The next test that needs the server starts a new one.
        """
        try:
            return (yield)
        finally:
            if self._has_died:
                self._has_died = False
                self._end(_FACTORY)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own hook, which judges xfail
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Fail an xfail test whose server died. Remove the servers' API keys from the report."""
        report = yield
        has_died = call.excinfo is not None and isinstance(call.excinfo.value, ServerFailed)
        if has_died and hasattr(report, "wasxfail") and not _names_errors(item):
            del report.wasxfail
            report.outcome = "failed"
        if self._servers is not None:
            redacting.clean(report, self._servers.redact)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, Any]:
        """Report in one line that a conftest.py in a subfolder has an option of this plugin."""
        report = yield
        call: pytest.CallInfo[Any] | None = getattr(report, "call", None)
        if call is not None and call.excinfo is not None:
            error = call.excinfo.value
            line = options.conflict(error) if isinstance(error, ValueError) else None
            if line is not None:
                report.longrepr = line
        return report

    def option(self, name: str) -> Any:
        """Return the value of an option; None if no plugin has this option.

        Args:
            name: The name with its leading dashes.
        """
        return self._config.getoption(name, None)

    def make_room(self) -> None:
        """Stop the server of `llm_server`, unless the running test uses it."""
        if self._item is None or _SERVER not in _fixtures_of(self._item):
            self._end(_SERVER)

    def _end(self, fixture: str) -> None:
        """Finish a fixture and the fixtures that use it, as pytest does if a parameter changes."""
        set_up = self._set_up.pop(fixture, None)
        if set_up is not None:
            set_up.definition.finish(set_up.request)

    def _looked_at_its_end(self, item: pytest.Item) -> Generator[None, object, object]:
        """Check the servers after a phase of a test, whether it passed or failed."""
        __tracebackhide__ = True
        self._test = item.nodeid
        try:
            result = yield
        except (Exception, pytest.fail.Exception) as error:
            self._require_alive(error)
            raise
        else:
            self._require_alive()
            return result
        finally:
            self._test = None

    def _require_alive(self, error: BaseException | None = None) -> None:
        """Raise ServerFailed if a server died. ``error`` is the error of the test itself."""
        __tracebackhide__ = True
        if self._servers is None:
            return
        failed = self._servers.look(test_failed=error is not None)
        if failed is not None:
            self._has_died = True
            raise failed from error


def begin(config: pytest.Config) -> None:
    """Register the hooks of a run.

    Args:
        config: The configuration of the run.
    """
    timer = Timer()
    run = Run(config, timer)
    config.stash[_RUN] = run
    config.pluginmanager.register(timer, "pytest_llm_server.timer")
    config.pluginmanager.register(run, "pytest_llm_server.run")


def run_of(config: pytest.Config) -> Run:
    """Return the run.

    Args:
        config: The configuration of the run.
    """
    return config.stash[_RUN]


def _uses_one(item: pytest.Item) -> bool:
    return not _FIXTURES.isdisjoint(_fixtures_of(item))


def _fixtures_of(item: pytest.Item) -> Collection[str]:
    names: Collection[str] = getattr(item, "fixturenames", ())  # absent in doctests of text files
    return names


def _names_errors(item: pytest.Item) -> bool:
    """Whether an xfail mark of a test has ``raises=``. If so, pytest compares the error's type."""
    return any("raises" in mark.kwargs for mark in item.iter_markers("xfail"))
