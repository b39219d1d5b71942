"""The servers of a pytest run: start them or attach to them, check their health, and stop them."""

import contextlib
import logging
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pytest_llm_server import ServerFailed, crashes, options
from pytest_llm_server.options import Asked
from pytest_llm_server.redacting import redacted
from pytest_llm_server.server import LlmServer
from pytest_llm_server.timer import Timer
from sm121.core.configuration import ServerConfiguration, environment_items
from sm121.core.options import Option
from sm121.core.redaction import secrets_of
from sm121.engines import attached, dead_runs, given_key, protocol, registry
from sm121.engines.attached_life import AttachedLife
from sm121.engines.endings import StopReport
from sm121.engines.life import Dead, Life, ManagedLife
from sm121.engines.managed import ManagedServer
from sm121.engines.server_errors import StartError
from sm121.engines.starting import StartHooks, StartLimits
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_messages import KernelBefore

_log = logging.getLogger(__name__)
#: A start counts as hung if the server neither logs nor uses the CPU for this many seconds.
_STALLED_AFTER_S = 90.0
#: Time between SIGTERM and SIGKILL, in seconds.
_STOP_WITHIN_S = 20.0
#: After a failed test, a server counts as hung if it serves no token within this many seconds.
_ANSWERS_WITHIN_S = 10.0


@dataclass(frozen=True)
class Start:
    """A server to start.

    Attributes:
        model: The model: a folder or a Hugging Face name.
        arguments: Command-line arguments of the engine.
        environment: Environment variables of the engine, in addition to those of this process.
        engine: The name of the engine.
        ready_within_s: The maximum duration of the start in seconds.
    """

    model: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    engine: str
    ready_within_s: float


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

    def started(self, start: Start, folder: Path) -> "StartedServer":
        """Return a context manager that starts a server when its block begins.

        Args:
            start: The server.
            folder: The folder for the server's log and crash bundle.
        """
        return StartedServer(self, start, folder)

    def start(self, start: Start, folder: Path) -> ManagedLife:
        """Start a server.

        Args:
            start: The server.
            folder: The folder for the server's log and crash bundle.

        Returns:
            The server's life. It is checked after each test, until `stop` is called.

        Raises:
            ServerFailed: The server did not start.
        """
        __tracebackhide__ = True
        wrong = options.wrong_start(start.engine, start.arguments)
        if wrong is not None:
            raise ServerFailed(wrong)
        configuration = ServerConfiguration(
            name="llm",
            engine=start.engine,
            python=_python(start.engine),
            model=start.model,
            served_name=start.model,
            arguments=start.arguments,
            environment=environment_items(start.environment),
        )
        managed = ManagedServer(
            configuration,
            registry.engine(start.engine),
            StartLimits(start.ready_within_s, _STALLED_AFTER_S, _STOP_WITHIN_S),
            folder,
            self._run_id,
            StartHooks(notify=lambda phase: _log.info("%s: %s", start.model, phase.text)),
        )
        self._secrets.update(managed.secrets, secrets_of(start.environment))
        _log.info("%s starts; log: %s", start.model, managed.launch.log)
        with self._timer.stopped():
            dead_runs.end_dead_runs()
            try:
                managed.start()
            except StartError as error:
                cause = crashes.of_start(error)
                raise self._failed(managed, "the server did not start", cause) from None
        life = ManagedLife(managed)
        self._lives.append(life)
        return life

    def redact(self, text: str) -> str:
        """Remove the API keys of the servers from a text.

        Args:
            text: The text.
        """
        return redacted(text, self._secrets)

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
            cause = crashes.of_hang(f"it runs and serves no token within {_ANSWERS_WITHIN_S:g} s")
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
            redact=self.redact,
        )

    def stop(self, life: ManagedLife, error: BaseException | None) -> None:
        """Stop a server.

        Args:
            life: The server's life.
            error: The error that ends the server's block; None if it ends without an error.

        Raises:
            ServerFailed: The server died and no test has reported this, or it did not stop cleanly.
        """
        __tracebackhide__ = True
        was_reported = life.accounted
        failed = self._look_at(life, test_failed=error is not None)
        self._lives.remove(life)
        with self._timer.stopped():
            report = life.managed.stop()
        if failed is not None:
            raise failed from error
        if error is None and not was_reported and not report.clean:
            raise ServerFailed(_left(report))


class StartedServer(contextlib.AbstractContextManager[LlmServer]):
    """The context manager of a started server.

    Args:
        servers: The servers of the run.
        start: The server.
        folder: The folder for the server's log and crash bundle.
    """

    def __init__(self, servers: Servers, start: Start, folder: Path) -> None:
        self._servers = servers
        self._start = start
        self._folder = folder
        self._life: ManagedLife | None = None

    def __enter__(self) -> LlmServer:
        """Start the server.

        Raises:
            ServerFailed: The server did not start.
        """
        __tracebackhide__ = True
        self._life = self._servers.start(self._start, self._folder)
        endpoint = self._life.managed.endpoint
        assert endpoint is not None
        return LlmServer(endpoint, self._life.managed.launch.log)

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
        if self._life is not None:
            self._servers.stop(self._life, error)


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


def _python(engine: str) -> str:
    """Return the Python interpreter for an engine, or the path of an engine's executable."""
    described = registry.engine(engine)
    if not isinstance(described, protocol.Program):
        return sys.executable
    path = shutil.which(described.program)
    if path is None:
        raise ServerFailed(f"engine {engine}: expected {described.program} on the PATH")
    return path
