"""Run one server at a time: start it on the first request, stop it when another is requested."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from pydantic import Field

from sm121.core.configuration import ServerConfiguration
from sm121.core.data_file import Record
from sm121.core.server import Server
from sm121.engines import registry, starting
from sm121.engines.endings import StopReport
from sm121.engines.life import ManagedLife
from sm121.engines.managed import ManagedServer
from sm121.engines.other_nodes import NoOtherNodes, OtherNodes
from sm121.engines.ray_cluster import RayNodes
from sm121.engines.server_errors import StartError
from sm121.engines.spanning import RankNodes
from sm121.engines.starting import StartHooks, StartLimits
from sm121.evidence.mapped import MappedLibrary


class StartReport(Record):
    """One start of a managed server."""

    configuration: str
    key: str
    startup_s: float | None
    compiled: list[str] = Field(default_factory=list)
    """One line for each cache into which the server compiled; empty if all caches were warm."""
    log: str
    clean_stop: bool | None = None


@dataclass(frozen=True, kw_only=True)
class PoolHooks:
    """The callbacks of a pool."""

    #: Called with a configuration's name and the current phase of its server's start.
    notify: Callable[[str, starting.StartPhase], None] = lambda _name, _phase: None
    #: Called before a server is started.
    on_start: Callable[[ManagedServer], None] = lambda _managed: None
    #: Called with the report of each start, successful or not.
    on_start_end: Callable[[StartReport], None] = lambda _start: None
    #: Returns a context for other work that runs while a server starts.
    beside: Callable[[], AbstractContextManager[None]] = nullcontext
    #: Called before a ready server is stopped.
    before_stop: Callable[[], None] = lambda: None
    #: Called with a configuration's name and the report of every stop.
    on_stop: Callable[[str, StopReport], None] = lambda _name, _report: None
    #: Called if a start gets more time because it compiles, with the additional seconds.
    on_cold: Callable[[float], None] = lambda _seconds: None
    #: Returns environment variables to add to a start.
    added: Callable[[ServerConfiguration], Mapping[str, str]] = lambda _configuration: {}


@dataclass(kw_only=True, eq=False)
class ServerPool:
    """The servers of all configurations, of which at most one runs.

    A GB10 has memory for one copy of gpt-oss-120b, so only one server runs at a time. The pool does
    not check whether the server still lives. The owner of the pool reads `life` for this.
    """

    #: The time limits of each server's start and stop.
    limits: StartLimits
    #: The folder of the logs.
    directory: Path
    #: The id of the run, which marks every process.
    run_id: str
    hooks: PoolHooks = field(default_factory=PoolHooks)
    #: The secrets to remove from logs. The pool adds the API keys of its servers.
    secrets: set[str] = field(default_factory=set)

    _starting: ManagedServer | None = field(init=False, default=None)
    _failures: dict[str, StartError] = field(init=False, default_factory=dict)
    starts: list[StartReport] = field(init=False, default_factory=list)
    #: For each successful start, when it began and ended (``time.monotonic``).
    start_spans: list[tuple[float, float]] = field(init=False, default_factory=list)
    #: For each configuration, its last server that was ready. The server may have been stopped.
    servers: dict[str, Server] = field(init=False, default_factory=dict)
    #: The server that was started last. It may run, be stopped, or never have been ready.
    latest: ManagedServer | None = field(init=False, default=None)
    #: The life of the server that is ready now; None if none is.
    life: ManagedLife | None = field(init=False, default=None)

    def get(self, configuration: ServerConfiguration) -> Server:
        """Return the running server of a configuration; start it if it does not run.

        Args:
            configuration: The configuration.

        Raises:
            StartError: The server does not start. Further requests raise the same error at once,
                until `forget` is called.
        """
        if self.current is not None:
            if self.current.configuration.key == configuration.key:
                return self.servers[self.current.configuration.name]
            self.stop()
        if configuration.key in self._failures:
            raise self._failures[configuration.key].with_traceback(None)
        managed = self._make(configuration)
        self.secrets.update(managed.secrets)
        self.hooks.on_start(managed)
        self.latest = managed
        self._starting = managed
        began = time.monotonic()
        try:
            with self.hooks.beside():
                server = managed.start()
        except BaseException as error:  # This includes the exception of pytest-timeout, and Ctrl-C.
            if managed.stopped is not None:
                self.hooks.on_stop(configuration.name, managed.stopped)
            if isinstance(error, StartError):
                self._failures[configuration.key] = error
                self._note_start(managed)
            raise
        finally:
            self._starting = None
        self.start_spans.append((began, time.monotonic()))
        if managed.stopped is not None and not managed.stopped.clean:  # an earlier attempt
            self.hooks.on_stop(configuration.name, managed.stopped)
        self.life = ManagedLife(managed)
        self._note_start(managed, server)
        return server

    def _make(self, configuration: ServerConfiguration) -> ManagedServer:
        added = self.hooks.added(configuration)
        hooks = StartHooks(
            notify=lambda progress: self.hooks.notify(configuration.name, progress),
            other_secrets=lambda: self.secrets,
            on_cold=self.hooks.on_cold,
        )
        return ManagedServer(
            configuration,
            registry.engine(configuration.engine),
            self.limits,
            self.directory,
            self.run_id,
            hooks,
            added,
            self._other_nodes(configuration, added),
        )

    def _other_nodes(
        self, configuration: ServerConfiguration, added: Mapping[str, str]
    ) -> OtherNodes:
        if configuration.span is None:
            return NoOtherNodes()
        if configuration.span.launcher == "ray":
            return RayNodes(configuration)
        return RankNodes(configuration, self.limits.stop_s, self.run_id, added)

    def failure(self, configuration: ServerConfiguration) -> StartError | None:
        """Return the error of a configuration's last start if it failed, else None.

        Args:
            configuration: The configuration.
        """
        return self._failures.get(configuration.key)

    def _note_start(self, managed: ManagedServer, server: Server | None = None) -> None:
        configuration = managed.configuration
        start = StartReport(
            configuration=configuration.name,
            key=configuration.key,
            startup_s=None,
            log=managed.launch.log.name,
        )
        if server is not None:
            start.startup_s = server.startup_s
            start.compiled = [*server.compiled]
            self.servers[configuration.name] = server
        self.starts.append(start)
        self.hooks.on_start_end(start)

    def forget(self, configuration: ServerConfiguration) -> None:
        """Forget that a start failed, so that the next request starts the server again.

        Args:
            configuration: The configuration.
        """
        self._failures.pop(configuration.key, None)

    @property
    def current(self) -> ManagedServer | None:
        """The server that runs now."""
        return self.life.managed if self.life is not None else None

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the server that runs now, or is being started."""
        current = self._starting or self.current
        return current.launch.processes() if current is not None else []

    def available_elsewhere(self) -> dict[str, int]:
        """Return the free memory of each other node in bytes, from the node's last report."""
        current = self._starting or self.current
        if current is None:
            return {}
        available = {}
        for _log, state in current.described().values():
            if "available_bytes" in state:
                available[state["node"]] = state["available_bytes"]
        return available

    def nccl_by_node(self) -> Mapping[str, list[MappedLibrary]]:
        """Return, for each node, the NCCL libraries that the current server's ranks have mapped."""
        return self.current.nccl_by_node() if self.current is not None else {}

    def kill(self) -> None:
        """Send SIGKILL to the engine's processes with `ManagedServer.kill`.

        This does not count as a death of the server.
        """
        if self.life is not None:
            self.life.account()
        if self.latest is not None:
            self.latest.kill()

    def stop(self) -> StopReport | None:
        """Stop the current server. Return None if no server runs."""
        managed = self.current
        if managed is None:
            return None
        self.hooks.before_stop()
        report = managed.stop()  # if this is interrupted, a second call stops the server
        self.life = None
        self.hooks.on_stop(managed.configuration.name, report)
        return report
