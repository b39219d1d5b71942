"""A run of pytest: which tests use a server, and when the server is looked at."""

from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llm_server import ServerFailed, options
from pytest_llm_server.timer import Timer

if TYPE_CHECKING:
    from pytest_llm_server.servers import Servers

_FACTORY = "llm_server_factory"
_SERVER = "llm_server"
_FIXTURES = frozenset({_FACTORY, _SERVER})
_RUN = pytest.StashKey["Run"]()


@dataclass(frozen=True)
class _SetUp:
    """A fixture that is set up."""

    definition: pytest.FixtureDef[Any]
    request: Any


class Run:
    """The hooks of a run, in pytest's order, and what its fixtures use.

    Args:
        config: The configuration of the run.
        timer: The time limit of the test that runs.
    """

    def __init__(self, config: pytest.Config, timer: Timer) -> None:
        self._config = config
        self._timer = timer
        self._servers: Servers | None = None
        #: The test that runs; None between two tests.
        self._item: pytest.Item | None = None
        #: Its id from its setup to the end of its call, once its servers were alive; else None.
        self._test: str | None = None
        self._set_up: dict[str, _SetUp] = {}
        #: A server died in the test that runs.
        self._has_died = False

    def servers(self) -> "Servers":
        """Return the servers of the run. pytest reads every property of a plugin, so it is none."""
        if self._servers is None:
            from pytest_llm_server.servers import Servers  # other runs do not import the suite

            asked = options.read(self._config)
            self._servers = Servers(asked, self._timer, lambda: self._test)
        return self._servers

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse wrong options and a running server that does not answer, before the first test.

        A worker of xdist cannot refuse a run: its tests fail.
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
        """Note which test runs."""
        self._item = item
        try:
            return (yield)
        finally:
            self._item = None

    @pytest.hookimpl(tryfirst=True)  # pytest's own ends the call
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> None:
        """Note the fixtures that may have to end before the session does."""
        if fixturedef.argname in _FIXTURES:
            self._set_up[fixturedef.argname] = _SetUp(fixturedef, request)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test whose server died before it; look again if a fixture fails."""
        __tracebackhide__ = True
        if not _uses_one(item):
            return (yield)
        self._require_alive()
        return (yield from self._looked_at_its_end(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test during which a server died."""
        __tracebackhide__ = True
        if not _uses_one(item):
            return (yield)
        return (yield from self._looked_at_its_end(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        """End the fixtures of a server that died. The next test that wants them starts another."""
        try:
            return (yield)
        finally:
            if self._has_died:
                self._has_died = False
                self._end(_FACTORY)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, which judges xfail
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Fail a test with xfail whose server died, and take keys of servers out of the report."""
        report = yield
        has_died = call.excinfo is not None and isinstance(call.excinfo.value, ServerFailed)
        if has_died and hasattr(report, "wasxfail") and not _names_errors(item):
            del report.wasxfail
            report.outcome = "failed"
        if self._servers is not None:
            _redact(report, self._servers)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, Any]:
        """Tell in one line that a conftest.py below has an option of the plugin."""
        report = yield
        call: pytest.CallInfo[Any] | None = getattr(report, "call", None)
        if call is not None and call.excinfo is not None:
            error = call.excinfo.value
            line = options.of_a_conftest(error) if isinstance(error, ValueError) else None
            if line is not None:
                report.longrepr = line
        return report

    def option(self, name: str) -> Any:
        """Return the value of an option; None if no plugin has it.

        Args:
            name: The name, with its dashes.
        """
        return self._config.getoption(name, None)

    def make_room(self) -> None:
        """Stop the server of `llm_server`, unless the test that runs uses it."""
        if self._item is None or _SERVER not in _fixtures_of(self._item):
            self._end(_SERVER)

    def _end(self, fixture: str) -> None:
        """End a fixture and all that use it, as pytest does if a parameter of it changes."""
        set_up = self._set_up.pop(fixture, None)
        if set_up is not None:
            set_up.definition.finish(set_up.request)

    def _looked_at_its_end(self, item: pytest.Item) -> Generator[None, object, object]:
        """Look at the servers when a part of a test has ended, however it ended."""
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
        """Raise ServerFailed if a server died. ``error``: the test's own."""
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


def of(config: pytest.Config) -> Run:
    """Return the run.

    Args:
        config: The configuration of the run.
    """
    return config.stash[_RUN]


def _uses_one(item: pytest.Item) -> bool:
    return not _FIXTURES.isdisjoint(_fixtures_of(item))


def _fixtures_of(item: pytest.Item) -> Collection[str]:
    names: Collection[str] = getattr(item, "fixturenames", ())  # a test of a text file has none
    return names


def _names_errors(item: pytest.Item) -> bool:
    """Whether a mark xfail of a test has ``raises=``: then pytest compares the errors."""
    return any("raises" in mark.kwargs for mark in item.iter_markers("xfail"))


def _redact(report: pytest.TestReport, servers: "Servers") -> None:
    report.sections = [(name, servers.redact(text)) for name, text in report.sections]
    if isinstance(report.longrepr, tuple):  # of a skip
        return
    content = report.longreprtext
    clean = servers.redact(content)
    if clean != content:
        report.longrepr = clean
