"""One server at a time: started when first asked for, kept until another configuration is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from sm121.core.configuration import ServerConfiguration
from sm121.core.server import Server
from sm121.engines.devices import DeviceLock
from sm121.engines.managed import (
    ManagedServer,
    ServerDied,
    StartError,
    StartLimits,
    StopReport,
)
from sm121.engines.registry import engine
from sm121.engines.starting import StartPhase


@dataclass(frozen=True)
class Start:
    """One start of a server, for the record."""

    configuration: str
    key: str
    startup_s: float | None
    log: str
    #: None where it was never ready.
    server: Server | None = None


class ServerPool:
    """Servers by configuration. GB10 holds gpt-oss-120b once, so only one lives at a time.

    Args:
        limits: of every server.
        directory: for logs.
        run_id: marks every process.
        notify: called with a configuration's name and what its server does, on each change.
        on_stop: called with the report of every stop.
        on_death: called when a server is found that ended, or whose engine did, though nobody
            asked it to; it is stopped afterwards.
        hidden: what no log may show.
        on_cold: called with the seconds that a start gets beyond the limit, because it compiles.
        added: what a start's environment gets beside the configuration's.
        device: held while a server runs, where other workers may want the same device.
    """

    def __init__(
        self,
        *,
        limits: StartLimits,
        directory: Path,
        run_id: str,
        notify: Callable[[str, StartPhase], None],
        on_stop: Callable[[str, StopReport], None] = lambda _name, _report: None,
        on_death: Callable[[ServerDied], None] = lambda _error: None,
        hidden: Callable[[], Collection[str]] = tuple,
        on_cold: Callable[[float], None] = lambda _seconds: None,
        added: Callable[[ServerConfiguration], Mapping[str, str]] = lambda _configuration: {},
        device: DeviceLock | None = None,
    ) -> None:
        self._on_cold = on_cold
        self._added = added
        self._device = device
        self._hidden = hidden
        self._limits = limits
        self._directory = directory
        self._run_id = run_id
        self._notify = notify
        self._on_stop = on_stop
        self._on_death = on_death
        self._looking = False
        self._last_stop: StopReport | None = None
        self._current: tuple[ManagedServer, Server] | None = None
        self._starting: ManagedServer | None = None
        self._failures: dict[str, StartError] = {}
        self.starts: list[Start] = []
        #: The server that was started last. It may run, be stopped, or never have been ready.
        self.latest: ManagedServer | None = None
        self.secrets: set[str] = set()

    def get(self, configuration: ServerConfiguration) -> Server:
        """The running server of that configuration; starts it where none runs, or a dead one.

        A server that died is reported before another takes its place.

        Raises:
            StartError: it does not start. A second request gets the same error, at once, until
                `forget`.
        """
        if self._current is not None:
            self.look()
        if self._current is not None:
            managed, server = self._current
            if managed.configuration.key == configuration.key:
                return server
            self._stop()
        if configuration.key in self._failures:
            raise self._failures[configuration.key].with_traceback(None)
        managed = ManagedServer(
            configuration,
            engine(configuration.engine),
            self._limits,
            self._directory,
            self._run_id,
            lambda progress: self._notify(configuration.name, progress),
            self._hidden,
            self._on_cold,
            self._added(configuration),
        )
        self.secrets.update(managed.secrets)
        self.latest = managed
        if self._device is not None:
            self._device.acquire()
        self._starting = managed
        try:
            server = managed.start()
        except BaseException as error:  # pytest-timeout's, and Ctrl-C, too
            if self._device is not None:
                self._device.release()
            if managed.stopped is not None:
                self._on_stop(configuration.name, managed.stopped)
            if isinstance(error, StartError):
                self._failures[configuration.key] = error
                self._note_start(managed)
            raise
        finally:
            self._starting = None
        if managed.stopped is not None and not managed.stopped.clean:  # of an attempt before it
            self._on_stop(configuration.name, managed.stopped)
        self._current = (managed, server)
        self._note_start(managed, server)
        return server

    def failure(self, configuration: ServerConfiguration) -> StartError | None:
        """Why it did not start when it was asked for; None where it did, was not, or may again."""
        return self._failures.get(configuration.key)

    def _note_start(self, managed: ManagedServer, server: Server | None = None) -> None:
        own = managed.configuration
        startup_s = server.startup_s if server is not None else None
        self.starts.append(Start(own.name, own.key, startup_s, managed.log.name, server))

    def forget(self, configuration: ServerConfiguration) -> None:
        """Start it anew when it is next asked for: a start that failed is tried again, and a server
        of it that runs is stopped."""
        self._failures.pop(configuration.key, None)
        if self._current is not None and self._current[0].configuration.key == configuration.key:
            self.stop()

    @property
    def current(self) -> ManagedServer | None:
        """The server that runs now."""
        return self._current[0] if self._current else None

    def processes(self) -> list[psutil.Process]:
        """The processes of the server that runs now, or is being started."""
        current = self._starting or self.current
        return current.processes() if current is not None else []

    def check(self) -> None:
        """Look whether the current server still serves.

        Raises:
            ServerDied: it does not.
        """
        if self._current is not None:
            self._current[0].check()

    def look(self, *, healthy_within_s: float = 0.0) -> bool:
        """Whether the current server had ended without our stop; it is then reported and stopped.

        Args:
            healthy_within_s: /health is not asked when it answered so lately.
        """
        if self._current is None or self._looking or self._current[0].accounted:
            return False
        self._looking = True  # who is told may stop it
        try:
            error = self._current[0].death(healthy_within_s=healthy_within_s)
            if error is None:
                return False
            self._on_death(error)
        finally:
            self._looking = False
        self._stop()
        return True

    def stop(self) -> StopReport | None:
        """Stop the current server, if there is one. One that had ended before is reported."""
        return self._last_stop if self.look() else self._stop()

    def _stop(self) -> StopReport | None:
        if self._current is None:
            return None
        managed, _ = self._current
        report = managed.stop()  # if this is interrupted, a second call stops the server
        self._current, self._last_stop = None, report
        if self._device is not None:
            self._device.release()
        self._on_stop(managed.configuration.name, report)
        return report
