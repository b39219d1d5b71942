"""The servers of a run: one at a time, started when first requested, or the attached one."""

from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from sm121.checkpoint import identity
from sm121.core.configuration import ServerConfiguration
from sm121.core.server import Server
from sm121.core.verdict import NotRun
from sm121.engines.attached_life import AttachedLife
from sm121.engines.endings import StopReport
from sm121.engines.kept_log import KeptLog
from sm121.engines.life import Alive, Dead, Life, ManagedLife, ServerDied
from sm121.engines.pool import ServerPool
from sm121.engines.server_errors import ServerError
from sm121.evidence.failure import Cause
from sm121.run import beside
from sm121.run.configurations import Configurations
from sm121.run.events import Decided, ServerStopped
from sm121.run.load import Load
from sm121.run.machine_report import MEMORY_FLOOR
from sm121.run.record import RunRecord, Target

#: A check of an attached server, which sends requests, is repeated this many times more rarely.
_ATTACHED_CHECKS_LAST = 5


@dataclass(kw_only=True)
class Servers:
    """Starts and stops the servers, and asks in one place whether the engine lives."""

    target: Target
    record: RunRecord
    configurations: Configurations
    attached: Server | None = None
    attached_life: AttachedLife | None = None
    #: The sign that another process took the attached server's place; None while none did.
    replaced: str | None = None
    #: The copy of the attached server's log; None without a log.
    kept_log: KeptLog | None = None
    #: The servers that the suite starts; None when one is attached, or none can be started.
    pool: ServerPool | None = None
    #: What each stop found, by the name of the log.
    stops: dict[str, StopReport] = field(default_factory=dict)
    #: Why no further test runs, as (class, text); None while tests run.
    aborted: tuple[str, str] | None = None
    #: Why later results could not be trusted; None while they can be.
    distrusted: str | None = None
    #: Set while a server is under load, for a crash bundle.
    load: Load | None = None
    #: Writes a bundle of an abnormal end in a test, prints one line, and checks what the server
    #: left (see `session.crashes`). It returns the cause.
    crashed: Callable[[ServerError | Dead, str | None], Cause] = lambda end, _test: end.cause

    def obstacle(self) -> str | None:
        """Return why no further server is started; None if one can be."""
        if self.aborted is not None:
            return f"the run was ended: {self.aborted[1]}"
        if self.distrusted is not None:
            return self.distrusted
        if self.attached is not None:
            return None
        for finding in self.configurations.findings:
            if finding.severity == "error":
                remedy = f"; {finding.remedy}" if finding.remedy else ""
                return f"no server is started: {finding.message}{remedy}"
        return None

    def get(self, configuration: str | None = None) -> Server:
        """Return the server of a configuration; None for the one under test.

        Raises:
            NotRun: It is not the attached server's, or cannot be started here.
            StartError: It does not start.
        """
        name = configuration or self.target.require_profile().under_test
        if self.attached is not None:
            if name != self.target.require_profile().under_test:
                raise NotRun(
                    f"configuration {name} cannot be started next to an attached server; "
                    "run without --base-url"
                )
            return self.attached
        if self.pool is not None and (why := self.obstacle()) is not None:
            raise NotRun(why)
        chosen = self.configurations.managed(name)
        if self.pool is not None and (failed := self.pool.failure(chosen)) is not None:
            raise NotRun(f"server {name} did not start: {failed.cause.kind}, see {failed.log}")
        return self.start(chosen)

    def start(self, configuration: ServerConfiguration) -> Server:
        """Return the managed server of any configuration: one of the profile's, or a cell's.

        Raises:
            NotRun: No server is started in this run, or its drafter is not on this machine.
            StartError: It does not start.
        """
        if self.pool is None:
            raise NotRun(self.target.obstacle or "no server can be started here")
        if self.aborted is not None:
            raise NotRun(f"the run was ended: {self.aborted[1]}")
        identity.require_drafter(configuration)
        self.look()
        return self.pool.get(configuration)

    def start_anew(self, configuration: ServerConfiguration) -> None:
        """Stop a configuration's server, and let the next `start` be a new one."""
        if self.pool is None:
            return
        self.pool.forget(configuration)
        current = self.pool.current
        if current is not None and current.configuration.key == configuration.key:
            self.stop()

    def stop(self) -> StopReport | None:
        """Stop the suite's running server, or report its earlier end; None if none runs."""
        return self.look() or (self.pool.stop() if self.pool is not None else None)

    def last(self, configuration: str) -> Server | None:
        """Return the server of a configuration's latest start, stopped or not; None without one."""
        return self.pool.servers.get(configuration) if self.pool is not None else None

    @property
    def life(self) -> Life | None:
        """The life of the engine that serves now; None if none does."""
        return self.pool.life if self.pool is not None else self.attached_life

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the running server; empty if they are not visible from here."""
        if self.pool is not None:
            return self.pool.processes()
        return self.attached_life.processes.find() if self.attached_life is not None else []

    def no_memory(self) -> str:
        """Return why the server's memory is not judged. For an attached server it is unproven."""
        why = self.attached_life.no_memory if self.attached_life is not None else None
        if why is None:
            return "no process of the server could be looked at"
        self.record.unproven(why)
        return why

    def check_alive(self, *, after_failure: bool = False) -> None:
        """Require, within a test, that the suite's own server lives.

        Args:
            after_failure: A request has failed. A server that dies of it gets the time to.

        Raises:
            ServerDied: It has died. The caller that catches it reports it (`crashed`).
        """
        life = self.life
        if not isinstance(life, ManagedLife):
            return
        state = life.after_failure() if after_failure else life.state()
        if isinstance(state, Dead):
            raise ServerDied(state.what, state.cause, life.managed.launch.log)

    def look(self, *, lately_s: float = 0.0) -> StopReport | None:
        """Check, outside of a test, that the server lives; report its death, and stop its rest.

        Args:
            lately_s: The age in seconds of a check that is not repeated.

        Returns:
            The report of the stop; None if the server lives, or is attached.
        """
        self.follow_log()
        life = self.life
        if life is None or self.aborted is not None:  # the suite killed it
            return None
        is_managed = isinstance(life, ManagedLife)
        if not is_managed:
            lately_s *= _ATTACHED_CHECKS_LAST
        state = life.state(asked_within_s=lately_s)
        if isinstance(state, Alive) or life.accounted:
            return None
        name = "the attached server"
        if is_managed and state.evidence:
            name = state.evidence.stem
        life.accounted = True
        decision = beside.unasked(name, state, self.crashed(state, None), self.record.phase)
        self.record.emit(Decided(decision))
        if state.replaced:
            self.replaced = state.detail
            for event in beside.void(self.record.file, state.detail):
                self.record.emit(event)
        return self.stops.get(f"{name}.log")

    def abort(self, reason: str) -> None:
        """Kill the server at once and run no further test, since the machine is about to fail."""
        is_first = self.aborted is None
        if is_first:
            self.aborted = (MEMORY_FLOOR, reason)
        if self.pool is not None:
            self.pool.kill()
        if is_first:
            self.record.remark(reason)

    def note_stop(self, configuration: str, report: StopReport) -> None:
        """Decide on the remains of a stopped server, like on a test.

        Memory that is not proven to be free again is INCONCLUSIVE, unless a healthy stop may leave
        so much (`beside.memory_is_usual`).
        """
        earlier = list(self.stops.values())
        self.stops[report.log] = report
        self.record.emit(ServerStopped(report.log, clean=report.clean))
        if not report.clean:
            self.record.emit(Decided(beside.unclean(report.start or configuration, report)))
        if not report.memory.unproven_bytes:
            return
        line = f"after server {configuration}: {report.memory}"
        if beside.memory_is_usual(report, earlier):
            self.record.remark(
                f"{line}. Who holds a GPU's memory is seen with docker run --pid=host"
            )
            return
        self.record.remark(line)
        self.record.emit(Decided(beside.unproven_memory(configuration, report)))

    def follow_log(self) -> None:
        """Copy the new lines of the attached server's log; report once that lines were lost."""
        if self.kept_log is not None:
            lost_before = self.kept_log.lost
            self.kept_log.follow()
            if lost_before is None and self.kept_log.lost is not None:
                self.record.unproven(f"kernel path: {self.kept_log.lost}")
