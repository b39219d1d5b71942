"""One server at a time: started when first asked for, kept until another configuration is."""

import time
from collections.abc import Callable, Collection, Mapping
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
from sm121.engines.managed import ManagedServer, StartLimits
from sm121.engines.ray_cluster import RayServer
from sm121.engines.server_errors import StartError
from sm121.engines.spanning import SpanningServer
from sm121.evidence.mapped import MappedLibrary

_LAUNCHERS: Mapping[str, type[ManagedServer]] = {"nnodes": SpanningServer, "ray": RayServer}


class StartReport(Record):
    """One start of a managed server."""

    configuration: str
    key: str
    startup_s: float | None
    compiled: list[str] = Field(default_factory=list)
    """What it compiled, a line for each cache; empty: its caches were warm."""
    log: str
    clean_stop: bool | None = None


@dataclass(kw_only=True, eq=False)
class ServerPool:
    """Servers by configuration. GB10 holds gpt-oss-120b once, so only one lives at a time. Whether
    one still lives is for its owner to ask, by `life`. `limits`: of every server; `directory`: for
    logs; `run_id`: marks every process; `notify`: called with a configuration's name and what its
    server does; `before_stop`: called before a server that serves is stopped; `on_stop`: with the
    report of every stop; `hidden`: what no log may show; `on_cold`: called with the seconds that a
    start which compiles gets beyond the limit; `added`: to a start's environment."""

    limits: StartLimits
    directory: Path
    run_id: str
    notify: Callable[[str, starting.StartPhase], None]
    before_stop: Callable[[], None] = lambda: None
    on_stop: Callable[[str, StopReport], None] = lambda _name, _report: None
    hidden: Callable[[], Collection[str]] = tuple
    on_cold: Callable[[float], None] = lambda _seconds: None
    added: Callable[[ServerConfiguration], Mapping[str, str]] = lambda _configuration: {}

    _starting: ManagedServer | None = field(init=False, default=None)
    _failures: dict[str, StartError] = field(init=False, default_factory=dict)
    starts: list[StartReport] = field(init=False, default_factory=list)
    #: From when to when each server was started that then served (``time.monotonic``).
    start_spans: list[tuple[float, float]] = field(init=False, default_factory=list)
    #: Of each configuration the server that was ready last, stopped or not.
    servers: dict[str, Server] = field(init=False, default_factory=dict)
    #: The server that was started last. It may run, be stopped, or never have been ready.
    latest: ManagedServer | None = field(init=False, default=None)
    secrets: set[str] = field(init=False, default_factory=set)
    #: Of the server that runs now, ready; None where none does.
    life: ManagedLife | None = field(init=False, default=None)

    def get(self, configuration: ServerConfiguration) -> Server:
        """The running server of that configuration; starts it where none runs. Raises StartError:
        it does not start. A second request gets the same error, at once, until `forget`."""
        if self.current is not None:
            if self.current.configuration.key == configuration.key:
                return self.servers[self.current.configuration.name]
            self.stop()
        if configuration.key in self._failures:
            raise self._failures[configuration.key].with_traceback(None)
        span = configuration.span
        managed = (ManagedServer if span is None else _LAUNCHERS[span.launcher])(
            configuration,
            registry.engine(configuration.engine),
            self.limits,
            self.directory,
            self.run_id,
            lambda progress: self.notify(configuration.name, progress),
            self.hidden,
            self.on_cold,
            self.added(configuration),
        )
        self.secrets.update(managed.secrets)
        self.latest = managed
        self._starting, began = managed, time.monotonic()
        try:
            server = managed.start()
        except BaseException as error:  # pytest-timeout's, and Ctrl-C, too
            if managed.stopped is not None:
                self.on_stop(configuration.name, managed.stopped)
            if isinstance(error, StartError):
                self._failures[configuration.key] = error
                self._note_start(managed)
            raise
        finally:
            self._starting = None
        self.start_spans.append((began, time.monotonic()))
        if managed.stopped is not None and not managed.stopped.clean:  # of an attempt before it
            self.on_stop(configuration.name, managed.stopped)
        self.life = ManagedLife(managed)
        self._note_start(managed, server)
        return server

    def failure(self, configuration: ServerConfiguration) -> StartError | None:
        """Why it did not start when it was asked for; None where it did, was not, or may again."""
        return self._failures.get(configuration.key)

    def _note_start(self, managed: ManagedServer, server: Server | None = None) -> None:
        configuration = managed.configuration
        start = StartReport(
            configuration=configuration.name,
            key=configuration.key,
            startup_s=None,
            log=managed.log.name,
        )
        if server is not None:
            start.startup_s, start.compiled = server.startup_s, [*server.compiled]
            self.servers[configuration.name] = server
        self.starts.append(start)

    def forget(self, configuration: ServerConfiguration) -> None:
        """A start that failed is tried again when it is next asked for."""
        self._failures.pop(configuration.key, None)

    @property
    def current(self) -> ManagedServer | None:
        """The server that runs now."""
        return self.life.managed if self.life is not None else None

    def processes(self) -> list[psutil.Process]:
        """The processes of the server that runs now, or is being started."""
        current = self._starting or self.current
        return current.processes() if current is not None else []

    def available_elsewhere(self) -> dict[str, int]:
        """Bytes of memory on each other node of that server, by the node, as it told last."""
        current = self._starting or self.current
        others = current.described().values() if current is not None else ()
        return {t["node"]: t["available_bytes"] for _, t in others if "available_bytes" in t}

    def nccl_elsewhere(self) -> dict[str, list[MappedLibrary]]:
        """The NCCL that the ranks on each other node mapped, by the node, as it told last."""
        others = self.current.described().values() if self.current is not None else ()
        return {
            told["node"]: [MappedLibrary.model_validate(row) for row in told["nccl"]]
            for _, told in others
            if "nccl" in told
        }

    def kill(self) -> None:
        """SIGKILL to the engine's processes at once, as `ManagedServer.kill`. It is no death."""
        if self.life is not None:
            self.life.accounted = True
        if self.latest is not None:
            self.latest.kill()

    def stop(self) -> StopReport | None:
        """Stop the current server; None where none runs."""
        if (managed := self.current) is None:
            return None
        self.before_stop()
        report = managed.stop()  # if this is interrupted, a second call stops the server
        self.life = None
        self.on_stop(managed.configuration.name, report)
        return report
