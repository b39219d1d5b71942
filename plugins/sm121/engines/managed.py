"""A server that the suite starts, watches and stops, and of which nothing is left afterwards."""

import secrets
import signal
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm121.compilation.caches import CompileCaches
from sm121.core import redaction
from sm121.core.configuration import Rank, ServerConfiguration
from sm121.core.server import Endpoint, Server
from sm121.engines import api_key, ports, process_tree, protocol
from sm121.engines.endings import FATAL, StopReport
from sm121.engines.launch import Launch, StartCompilation
from sm121.engines.memory import Memory, Returned
from sm121.engines.server_errors import (
    PortTaken,
    ServerError,
    ServerExited,
    ServerStalled,
    ServerTimedOut,
    StartError,
)
from sm121.engines.starting import Activity, ReadinessProbe, StartPhase
from sm121.evidence import failure
from sm121.evidence.signatures import startup_progress

_POLL_S = 0.1
#: The time between two looks at the files that are being compiled.
_CACHES_EVERY_S = 2.0
#: Number of ports that are tried if other processes take them.
_PORT_ATTEMPTS = 3
_PORT_FREE_WITHIN_S = 5.0
#: The parent of a worker of Ray is not ours, and may be slow to collect it.
_REAPED_WITHIN_S = 5.0
#: When rank 0 has ended, other nodes get this time to report their faults.
_FAULT_SETTLES_S = 3.0
#: The supervisor's own time, beside the server's, before it is killed.
_SUPERVISOR_STOPS_S = 20.0


@dataclass(frozen=True)
class StartLimits:
    """How long a server may take, in seconds."""

    ready_s: float
    stalled_s: float
    stop_s: float
    #: For a start that compiles. Less than `ready_s`: no more than that.
    cold_s: float = 0.0


@dataclass(frozen=True)
class StartHooks:
    """What a server calls while it starts, and asks when it has ended."""

    #: Called on each change of progress, and when something is amiss.
    notify: Callable[[StartPhase], None] = lambda _progress: None
    #: Returns the texts that its log must not show, beside its key.
    other_secrets: Callable[[], Collection[str]] = tuple
    #: Called with the seconds that a start which compiles gets beyond the limit.
    on_cold: Callable[[float], None] = lambda _seconds: None


@dataclass
class ManagedServer:
    """A server: it is launched, again if its port was taken, watched while it starts, stopped."""

    #: The configuration to start.
    configuration: ServerConfiguration
    #: The engine's commands and variables.
    engine: protocol.Engine
    limits: StartLimits
    #: The folder of its log and status.
    directory: Path
    #: In the environment of each process.
    run_id: str
    hooks: StartHooks = field(default_factory=StartHooks)
    #: Added to its environment.
    added: Mapping[str, str] = field(default_factory=dict)
    #: Its part of a server that spans machines; None: it is the whole.
    rank: Rank | None = None

    progress: str = field(init=False, default="not started")
    #: The attempt that runs, or the last one; before the first, the one that will be made.
    launch: Launch = field(init=False)
    #: While it runs and has been ready.
    endpoint: Endpoint | None = field(init=False, default=None)
    #: The report of stopping a start that failed.
    stopped: StopReport | None = field(init=False, default=None)
    _api_key: str = field(init=False, repr=False)
    _server_id: str = field(init=False)
    _memory_before: Memory | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._api_key = secrets.token_urlsafe(24)
        if self.engine.name == "vllm":
            environment = self.engine.environment(self.configuration, api_key="")
            self._api_key = api_key.kept(CompileCaches.of(environment).vllm)
        self._server_id = f"{self.run_id}/{uuid.uuid4().hex[:8]}"
        self._open_launch()

    @property
    def secrets(self) -> tuple[str, ...]:
        """The texts that must not appear in any report."""
        return (self._api_key,)

    def start(self) -> Server:
        """Start the server, and return when it has served a token.

        Raises:
            StartError: It did not become ready: one of its subclasses. Nothing is left running.
        """
        self._prepare()
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            try:
                return self._start_once()
            except PortTaken:
                port = self.launch.port
                self.stopped = self.stop()
                if attempt == _PORT_ATTEMPTS:
                    raise
                line = f"port {port} was taken by somebody else; trying another"
                self.hooks.notify(StartPhase(line))
            except BaseException:  # Ctrl-C too: nothing may be left behind
                self.stopped = self.stop()
                raise
        raise AssertionError("unreachable")

    def start_rank(self) -> None:
        """Start a part that serves nobody itself, and do not wait for it."""
        self._prepare()
        self._start_process()

    def fault(self, *, settle_s: float = 0.0) -> ServerError | None:
        """Return the fault of another node of the server, or None.

        Args:
            settle_s: How long to wait for reports of the nodes, in seconds.
        """
        del settle_s  # it has no other node
        return None

    def described(self) -> Mapping[str, tuple[Path | None, Any]]:
        """Return the log and the last state of each other node, by a name for files."""
        return {}

    def _prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        process_tree.become_subreaper()
        self._memory_before = Memory.now()

    @property
    def running(self) -> bool:
        """Whether it was ready, and its main process lives."""
        return self.endpoint is not None and self.launch.exit_status is None

    def kill(self) -> None:
        """Send SIGKILL to the engine's processes at once: for a machine that is about to wedge.

        The supervisor stays, and cleans up; `stop` is still to be called.
        """
        self.launch.kill()

    def stop(self) -> StopReport:
        """Stop politely, then firmly; safe to call at any time and again."""
        started = time.monotonic()
        launch = self.launch
        launch.remember_tree()
        launch.look_at_tree()
        already = launch.exit_status
        at_work = None
        if already is None and self._memory_before is not None:
            at_work = Memory.now()
        session = launch.supervision.session
        ended = launch.supervision.end(self.limits.stop_s + _SUPERVISOR_STOPS_S)
        exit_status = already
        if exit_status is None and ended not in (None, 0, -signal.SIGTERM):
            exit_status = ended
        self.endpoint = None
        try:
            survivors = launch.end_what_is_left(session)
        finally:  # a second Ctrl-C too: no secret may be left behind
            self._redact(launch.log)
        returned = self._memory_returned(at_work)
        self.progress = "stopped"
        return StopReport(
            exit_status=exit_status,
            survivors=tuple(survivors),
            port_free=launch.port_is_free(),
            memory=returned,
            seconds=time.monotonic() - started,
            log=launch.log.name,
            start=launch.log.stem,
            crash=self._crash_at_stop() if already is None else None,
        )

    def _crash_at_stop(self) -> str | None:
        """Return the signal of which the server died when it was asked to end, or None."""
        status = self.launch.exit_status
        # SIGKILL ends a server that does not end in time, or whose supervisor was killed.
        if status is None or status not in FATAL or status == -signal.SIGKILL:
            return None
        return signal.Signals(-status).name

    def _redact(self, log: Path | None) -> None:
        """Remove secrets from a log, which is part of the report. Nobody writes to it any more."""
        if log is None or not log.is_file():
            return
        environment = dict(self.configuration.environment)
        hidden = {self._api_key, *self.hooks.other_secrets(), *redaction.secrets_of(environment)}
        try:
            redaction.redact_file(log, hidden)
        except OSError as error:
            why = f"{log.name} may show secrets: {error.strerror or error}"
            self.hooks.notify(StartPhase(why))

    def _start_once(self) -> Server:
        started = time.monotonic()
        self._open_launch(ports.free_port())
        self._start_process()
        launch = self.launch
        endpoint = Endpoint(
            f"http://{ports.LOOPBACK}:{launch.port}",
            self._api_key,
            self.configuration.served_name,
        )
        self._wait_until_ready(endpoint, started)
        self.endpoint = endpoint
        launch.note_ready()
        startup_s = time.monotonic() - started
        self.progress = "ready"
        line = f"ready after {startup_s:.1f} s on port {launch.port}"
        self.hooks.notify(StartPhase(line, ready=True))
        return Server(
            endpoint=endpoint,
            managed=True,
            engine=self.engine.name,
            version=None,
            log=launch.log,
            configuration=self.configuration,
            startup_s=startup_s,
            reader=self.engine.name,
            compiled=self._compilation.compiled(),
        )

    def _start_process(self) -> None:
        environment = dict(self.engine.environment(self.configuration, api_key=self._api_key))
        environment.update(self.added)
        environment[process_tree.RUN_ID] = self.run_id
        environment[process_tree.OWNER] = process_tree.owner()
        self.launch.start(self._command(), environment, grace_s=self.limits.stop_s)

    def _command(self) -> Sequence[str]:
        if self.rank is None:
            return self.engine.command(self.configuration, port=self.launch.port)
        assert isinstance(self.engine, protocol.Spanning)
        return self.engine.rank_command(self.configuration, port=self.launch.port, rank=self.rank)

    def _wait_until_ready(self, endpoint: Endpoint, started: float) -> None:
        deadline = started + self.limits.ready_s
        caches_at = started
        activity = Activity(self.launch.log, self.launch.engine_processes)
        probe = ReadinessProbe(endpoint)
        probe.start()
        try:
            while True:
                self._check_start()
                for line in activity.new_lines():
                    self._note_progress(startup_progress(line, self.engine.name))
                self._note_progress(probe.progress)
                if time.monotonic() >= caches_at:
                    caches_at = time.monotonic() + _CACHES_EVERY_S
                    building = self._compilation.building()
                    if building is not None:
                        self._note_progress(f"building kernels (JIT): {building}")
                if probe.ready and self.launch.listens():
                    return
                if time.monotonic() >= deadline:
                    deadline = self._later_deadline(started, deadline)
                idle_s = activity.idle_s()
                if idle_s >= self.limits.stalled_s:
                    message = f"the server neither logged nor used the processor for {idle_s:.0f} s"
                    raise self._failed(ServerStalled, message)
                time.sleep(_POLL_S)
        finally:
            probe.cancelled.set()

    @property
    def _compilation(self) -> StartCompilation:
        compilation = self.launch.compilation
        assert compilation is not None, "it was started"
        return compilation

    def _check_start(self) -> None:
        """Raise the error of a start if the server, or another node of it, has ended."""
        exit_status = self.launch.exit_status
        fault = self.fault(settle_s=0.0 if exit_status is None else _FAULT_SETTLES_S)
        if fault is not None:
            raise fault
        if exit_status is None:
            return
        log = self.launch.log
        cause = failure.classify(log, exit_status)
        kind = PortTaken if cause.kind == "port" else ServerExited
        raise kind(
            f"the server ended with status {exit_status} during start-up "
            f"(last progress: {self.progress})",
            cause,
            log,
        )

    def _later_deadline(self, started: float, deadline: float) -> float:
        """Return when a start that is over its time must be ready.

        It may take as long after the last file that it compiled as a warm start, or from now on
        while a compiler runs. The sum is limited by the time of a cold start.

        Raises:
            ServerTimedOut: It did not compile for so long, or has had all of a cold start's time.
        """
        latest = self._compilation.latest()
        if latest is not None:
            since = time.monotonic() - (time.time() - latest)
            later = min(since + self.limits.ready_s, started + self.limits.cold_s)
            if later > time.monotonic():
                self.hooks.on_cold(later - deadline)
                return later
        message = f"the server was not ready within {time.monotonic() - started:.0f} s"
        if latest is not None:
            message += f", {time.time() - latest:.0f} s after the last file that it compiled"
        raise self._failed(ServerTimedOut, message)

    def _failed(self, kind: type[StartError], what: str) -> StartError:
        log = self.launch.log
        return kind(f"{what}; last progress: {self.progress}", failure.classify(log), log)

    def _note_progress(self, progress: str | None) -> None:
        if progress is not None and progress != self.progress:
            self.progress = progress
            self.hooks.notify(StartPhase(progress))

    def _memory_returned(self, at_work: Memory | None, patience_s: float = 10.0) -> Returned:
        """Wait until all system and device memory came back, and return what did not in time."""
        before = self._memory_before
        if before is None:
            return Returned()
        deadline = time.monotonic() + patience_s
        while True:
            returned = before.returned(Memory.now(), at_work)
            if returned.is_whole or time.monotonic() >= deadline:
                return returned
            time.sleep(0.2)

    def _open_launch(self, port: int = 0) -> None:
        """Prepare an attempt, with a log that does not exist yet."""
        name = f"server-{self.configuration.name}"
        log = self.directory / f"{name}.log"
        number = 1
        while log.exists():
            number += 1
            log = self.directory / f"{name}-{number}.log"
        self.launch = Launch(log, self._server_id, port)
