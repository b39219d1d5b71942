"""A server that the suite starts, watches, and stops with all of its processes."""

import signal
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm121.compilation.caches import CompileCaches
from sm121.core import redaction
from sm121.core.configuration import ServerConfiguration
from sm121.core.server import Endpoint, Server
from sm121.engines import api_key, ports, process_tree, protocol
from sm121.engines.endings import FATAL, StopReport
from sm121.engines.launch import Launch
from sm121.engines.memory import Memory, Returned
from sm121.engines.other_nodes import NoOtherNodes, OtherNodes, Placement
from sm121.engines.server_errors import PortTaken, ServerError
from sm121.engines.start_watch import StartWatch
from sm121.engines.starting import StartHooks, StartLimits, StartPhase
from sm121.evidence.mapped import MappedLibrary

#: After a server has ended, its memory must be free again within this many seconds.
_MEMORY_BACK_WITHIN_S = 10.0
#: Number of ports that are tried if other processes take them.
_PORT_ATTEMPTS = 3
#: Before the supervisor is killed, it gets this many seconds more than the server.
_SUPERVISOR_STOPS_S = 20.0


@dataclass
class ManagedServer:
    """A server that the suite starts, watches and stops.

    If its port was taken, it is started again.
    """

    #: The configuration to start.
    configuration: ServerConfiguration
    #: The engine's commands and variables.
    engine: protocol.Engine
    limits: StartLimits
    #: The folder of its log and status.
    directory: Path
    #: The id of the run, which is in the environment of each process of the server.
    run_id: str
    hooks: StartHooks = field(default_factory=StartHooks)
    #: Environment variables to add to the server's environment.
    added: Mapping[str, str] = field(default_factory=dict)
    #: The server's parts on other machines.
    other_nodes: OtherNodes = field(default_factory=NoOtherNodes)

    #: The current or last attempt to start the server; before the first one, the attempt that comes
    #: next.
    launch: Launch = field(init=False)
    #: The address of the ready server; None if it does not run.
    endpoint: Endpoint | None = field(init=False, default=None)
    #: The report of stopping a start that failed.
    stopped: StopReport | None = field(init=False, default=None)
    _api_key: str = field(init=False, repr=False)
    _server_id: str = field(init=False)
    _memory_before: Memory | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._api_key = api_key.new()
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
            StartError: The server did not become ready. The subclass shows why. No process is left
                running.
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
                line = f"port {port} was taken by another process; trying another port"
                self.hooks.notify(StartPhase(line))
            except BaseException:  # includes Ctrl-C: no process may be left behind
                self.stopped = self.stop()
                raise
        raise AssertionError("unreachable")

    def start_rank(self) -> None:
        """Start a rank that serves no requests itself, and return without waiting for it."""
        self._prepare()
        self._start_process()

    def fault(self, *, settle_s: float = 0.0) -> ServerError | None:
        """Return the first fault of any node of the server, or None.

        Args:
            settle_s: How long to wait for reports of the nodes, in seconds.
        """
        return self.other_nodes.fault(self.launch, settle_s)

    def described(self) -> Mapping[str, tuple[Path | None, Any]]:
        """Return the log and the last state of each other node. The keys fit in file names."""
        return self.other_nodes.described()

    def nccl_by_node(self) -> Mapping[str, list[MappedLibrary]]:
        """Return, for each node, the NCCL libraries that its ranks have mapped."""
        return self.other_nodes.nccl_by_node(self.launch)

    def _prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        process_tree.become_subreaper()
        self._memory_before = Memory.now()

    @property
    def running(self) -> bool:
        """Whether the server became ready, and its main process still runs."""
        return self.endpoint is not None and self.launch.exit_status is None

    def kill(self) -> None:
        """Send SIGKILL to the engine's processes, before the machine runs out of memory.

        The supervisor is not killed, and cleans up. The caller must still call `stop`.
        """
        self.launch.kill()

    def stop(self) -> StopReport:
        """Stop the server on every node, with SIGTERM and then SIGKILL.

        A second call does no harm.
        """
        self.other_nodes.stopping()
        report = self._stop_launch()
        logs = [log for log, _state in self.other_nodes.described().values()]
        try:
            return self.other_nodes.stopped(report)
        finally:
            for log in logs:
                self._redact(log)

    def _stop_launch(self) -> StopReport:
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
        finally:  # runs even after a second Ctrl-C, so that no secret is left in the log
            self._redact(launch.log)
        returned = Returned()
        if self._memory_before is not None:
            returned = self._memory_before.returned_within(_MEMORY_BACK_WITHIN_S, at_work)
        return StopReport(
            exit_status=exit_status,
            survivors=tuple(survivors),
            port_free=launch.port_is_free(),
            memory=returned,
            seconds=time.monotonic() - started,
            log=launch.log.name,
            start=launch.log.stem,
            crash=_crash_at_stop(launch.exit_status) if already is None else None,
        )

    def _redact(self, log: Path | None) -> None:
        """Remove secrets from a finished log, which is part of the report."""
        if log is None or not log.is_file():
            return
        environment = dict(self.configuration.environment)
        hidden = {self._api_key, *self.hooks.other_secrets(), *redaction.secrets_of(environment)}
        try:
            redaction.redact_file(log, hidden)
        except OSError as error:
            reason = error.strerror or error
            why = f"{log.name} may contain secrets, which could not be removed: {reason}"
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
        watch = StartWatch(launch, self.engine.name, self.limits, self.hooks, self.fault)
        watch.wait_until_ready(endpoint, started)
        self.endpoint = endpoint
        launch.note_ready()
        startup_s = time.monotonic() - started
        line = f"ready after {startup_s:.1f} s on port {launch.port}"
        self.hooks.notify(StartPhase(line, ready=True))
        nodes = self.other_nodes.ready(launch)
        return Server(
            endpoint=endpoint,
            managed=True,
            engine=self.engine.name,
            version=None,
            log=launch.log,
            configuration=self.configuration,
            startup_s=startup_s,
            reader=self.engine.name,
            compiled=launch.compilation.compiled(),
            nodes=nodes,
        )

    def _start_process(self) -> None:
        placement = self.other_nodes.place(self.launch)
        environment = dict(self.engine.environment(self.configuration, api_key=self._api_key))
        environment.update(self.added)
        environment.update(placement.variables)
        environment[process_tree.RUN_ID] = self.run_id
        environment[process_tree.OWNER] = process_tree.owner()
        self.launch.start(self._command(placement), environment, grace_s=self.limits.stop_s)
        self.other_nodes.start(self.launch)

    def _command(self, placement: Placement) -> list[str]:
        port = self.launch.port
        if placement.rank is None:
            return self.engine.command(self.configuration, port=port)
        assert isinstance(self.engine, protocol.Spanning)
        return self.engine.rank_command(self.configuration, port=port, rank=placement.rank)

    def _open_launch(self, port: int = 0) -> None:
        """Prepare an attempt, with a log that does not exist yet."""
        name = f"server-{self.configuration.name}"
        log = self.directory / f"{name}.log"
        number = 1
        while log.exists():
            number += 1
            log = self.directory / f"{name}-{number}.log"
        self.launch = Launch(log, self._server_id, port)


def _crash_at_stop(status: int | None) -> str | None:
    """Return the signal that killed a server after the suite had requested its stop, or None."""
    # SIGKILL does not count as a crash here: a server that does not end in time, or whose
    # supervisor was killed, is ended with SIGKILL.
    if status is None or status not in FATAL or status == -signal.SIGKILL:
        return None
    return signal.Signals(-status).name
