"""The servers of a pytest run: start them or attach to them, check their health, and stop them."""

import contextlib
import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from pytest_llm_server import ServerFailed, crashes
from pytest_llm_server.options import Asked
from pytest_llm_server.server import LlmServer
from pytest_llm_server.timer import Timer
from sm121.core.configuration import ServerConfiguration
from sm121.core.options import Option
from sm121.core.redaction import redact_known, secrets_of
from sm121.engines import attached, dead_runs, given_key
from sm121.engines.attached_life import AttachedLife
from sm121.engines.endings import StopReport
from sm121.engines.life import Dead, Life, ManagedLife
from sm121.engines.managed import ManagedServer
from sm121.engines.pool import PoolHooks, ServerPool
from sm121.engines.server_errors import StartError
from sm121.engines.starting import StartLimits
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_messages import KernelBefore

_log = logging.getLogger(__name__)
#: A start counts as hung if the server neither logs nor uses the CPU for this many seconds.
_STALLED_AFTER_S = 90.0
#: Time between SIGTERM and SIGKILL, in seconds.
_STOP_WITHIN_S = 20.0
#: After a failed test, a server counts as hung if it generates no token within this many seconds.
_ANSWERS_WITHIN_S = 10.0


class Servers:
    """The running servers of the run, and their states.

    Args:
        asked: The server that the user requested.
        timer: The timeout of the running test.
        test: Returns the id of the running test; None between two tests.
    """

    def __init__(self, asked: Asked, timer: Timer, test: Callable[[], str | None]) -> None:
        self.asked = asked
        self._timer = timer
        self._test = test
        self._secrets: set[str] = set()
        self._run_id = uuid.uuid4().hex[:12]
        self._lives: list[Life] = []
        self._attached: LlmServer | None = None
        self._before = KernelBefore()
        #: When each successful start began and ended.
        self._starts: list[tuple[float, float]] = []

    def attach(self, url: str, option: Option) -> LlmServer:
        """Attach to the running server at an address. Only the first call probes it.

        Args:
            url: The address.
            option: Returns the value of a command-line option, or None.

        Raises:
            UsageError: No server answers at the address, or it serves another model.
        """
        if self._attached is not None:
            return self._attached
        key = given_key.api_key(option)
        if key is not None:
            self._secrets.add(key)
        server = attached.attach(
            url,
            api_key=key,
            served_name=self.asked.model,
            default_name="",
            log=None,
            naming="--llm-model",
        )
        # If there are several server processes, each answer may come from another one, so no
        # process is watched.
        if attached.several_processes(url, key) is None:
            self._lives.append(AttachedLife(server))
        self._attached = LlmServer(server.endpoint, None)
        return self._attached

    def started(
        self, configuration: ServerConfiguration, ready_within_s: float, folder: Path
    ) -> "StartedServer":
        """Return a context manager that starts a server when its block begins.

        Args:
            configuration: The configuration of the server.
            ready_within_s: The maximum duration of the start in seconds.
            folder: The folder for the server's log and crash bundle.
        """
        pool = ServerPool(
            limits=StartLimits(ready_within_s, _STALLED_AFTER_S, _STOP_WITHIN_S),
            directory=folder,
            run_id=self._run_id,
            secrets=self._secrets,
            hooks=PoolHooks(
                notify=lambda _name, phase: _log.info("%s: %s", configuration.model, phase.text),
                on_start=_log_start,
            ),
        )
        return StartedServer(self, pool, configuration)

    def start(self, pool: ServerPool, configuration: ServerConfiguration) -> LlmServer:
        """Start a server. It is checked after each test, until `stop` is called.

        Args:
            pool: The pool in which the server runs alone.
            configuration: The configuration of the server.

        Raises:
            ServerFailed: The server did not start.
        """
        __tracebackhide__ = True
        self._secrets.update(secrets_of(dict(configuration.environment)))
        with self._timer.stopped():
            dead_runs.end_dead_runs()
            try:
                server = pool.get(configuration)
            except StartError as error:
                cause = crashes.of_start(error)
                assert pool.latest is not None
                raise self._failed(pool.latest, "the server did not start", cause) from None
        assert pool.life is not None
        self._lives.append(pool.life)
        self._starts += pool.start_spans
        return LlmServer(server.endpoint, server.log)

    def redact(self, text: str) -> str:
        """Remove the API keys of the servers from a text.

        Args:
            text: The text.
        """
        return redact_known(text, self._secrets)

    def look(self, *, test_failed: bool = False) -> ServerFailed | None:
        """Return the error of a server that died since the last check, or that hangs; else None.

        Args:
            test_failed: Whether the test failed. If so, each started server must also generate a
                token.
        """
        for life in self._lives:
            failed = self._look_at(life, test_failed=test_failed)
            if failed is not None:
                return failed
        return None

    def _look_at(self, life: Life, *, test_failed: bool) -> ServerFailed | None:
        """Check one server. The test's timeout is suspended, because a check may take longer."""
        with self._timer.stopped():
            return self._fault_of(life, test_failed=test_failed)

    def _fault_of(self, life: Life, *, test_failed: bool) -> ServerFailed | None:
        if life.accounted:
            return self._still_dead(life)
        state = life.state()
        if isinstance(state, Dead):
            life.account()
            if not isinstance(life, ManagedLife):
                return ServerFailed(f"{state.what}: {state.detail}")
            what = state.what
            if self._test() is None:
                what += ", between two tests"
            return self._failed(life.managed, what, crashes.of_death(life.managed))
        if test_failed and isinstance(life, ManagedLife) and not life.answers(_ANSWERS_WITHIN_S):
            life.account()
            cause = crashes.of_hang(
                f"it runs and generates no token within {_ANSWERS_WITHIN_S:g} s"
            )
            return self._failed(life.managed, "the server does not answer", cause)
        return None

    def _still_dead(self, life: Life) -> ServerFailed | None:
        """Return an error for each further test as long as the attached server does not answer."""
        if isinstance(life, ManagedLife):
            return None  # the fixtures of a started server are finished after the test
        if not life.answers():
            return ServerFailed("the attached server ended in an earlier test and does not answer")
        life.state()  # from now on, watch the process that answers instead
        life.account()
        return None

    def _failed(self, managed: ManagedServer, what: str, cause: Cause) -> ServerFailed:
        return crashes.report(
            managed,
            what,
            cause,
            test=self._test(),
            before=self._before,
            starts=self._starts,
            secrets=self._secrets,
        )

    def stop(self, pool: ServerPool, error: BaseException | None) -> None:
        """Stop a server.

        Args:
            pool: The server's pool.
            error: The error that ends the server's block; None if it ends without an error.

        Raises:
            ServerFailed: The server died and no test has reported this, or it did not stop cleanly.
        """
        __tracebackhide__ = True
        life = pool.life
        assert life is not None
        was_reported = life.accounted
        failed = self._look_at(life, test_failed=error is not None)
        self._lives.remove(life)
        with self._timer.stopped():
            report = pool.stop()
        if failed is not None:
            raise failed from error
        if error is None and not was_reported and report is not None and not report.clean:
            raise ServerFailed(_left(report))


class StartedServer(contextlib.AbstractContextManager[LlmServer]):
    """The context manager of a started server.

    Args:
        servers: The servers of the run.
        pool: The server's pool.
        configuration: The server's configuration.
    """

    def __init__(
        self, servers: Servers, pool: ServerPool, configuration: ServerConfiguration
    ) -> None:
        self._servers = servers
        self._pool = pool
        self._configuration = configuration

    def __enter__(self) -> LlmServer:
        """Start the server.

        Raises:
            ServerFailed: The server did not start.
        """
        __tracebackhide__ = True
        return self._servers.start(self._pool, self._configuration)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the server.

        Raises:
            ServerFailed: The server died and no test has reported this, or it did not stop cleanly.
        """
        __tracebackhide__ = True
        self._servers.stop(self._pool, error)


def _log_start(managed: ManagedServer) -> None:
    _log.info("%s starts; log: %s", managed.configuration.model, managed.launch.log)


def _left(report: StopReport) -> str:
    """Return the error message for a server that did not stop cleanly."""
    left = [f"process {survivor}" for survivor in report.survivors]
    if not report.port_free:
        left.append("its port is not free")
    if report.memory.missing_bytes:
        left.append(str(report.memory))
    if report.crash is not None:
        left.append(f"it died of {report.crash} during the stop")
    return f"the server did not stop cleanly: {'; '.join(left)}. Log: {report.log}"
