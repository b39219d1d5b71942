"""The servers of a run: started one at a time, when a test first needs them, or attached."""

from dataclasses import dataclass, field, replace
from typing import Protocol

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
from sm121.evidence.resources import ResourceSampler
from sm121.run import server_decisions
from sm121.run.configurations import Configurations
from sm121.run.events import Decided, Distrusted, ServerStopped
from sm121.run.load import Load
from sm121.run.machine_report import MEMORY_FLOOR
from sm121.run.record import RunRecord, Target

#: An attached server is checked this many times less often than others, because each check sends
#: requests.
_ATTACHED_CHECKS_LAST = 5
_CANNOT_RESTART = "the attached server no longer answers, and the suite cannot restart it"


class CrashReports(Protocol):
    """Reports abnormal ends of servers (see `session.crashes`)."""

    def after_crash(self, servers: "Servers", end: ServerError | Dead, test: str | None) -> Cause:
        """Report a server that died between two tests, or in a cell of the matrix.

        Args:
            servers: The servers of the run.
            end: The error of its start, or its death.
            test: The test's id; None between two tests.

        Returns:
            The cause.
        """

    def under_load(self, load: Load | None) -> None:
        """Add the samples of this load test to each crash bundle that is written from now on.

        Args:
            load: The load; None: there is no load any more.
        """


class NoCrashReports:
    """Reports nothing, for a run that starts no server."""

    def after_crash(self, _servers: "Servers", end: ServerError | Dead, _test: str | None) -> Cause:
        """Return the cause that is already known.

        Args:
            end: The error of its start, or its death.
        """
        return end.cause

    def under_load(self, _load: Load | None) -> None:
        """Do nothing, because this class writes no crash bundles.

        Args:
            _load: Not used.
        """


@dataclass(kw_only=True)
class Servers:
    """Starts and stops the servers. No other class checks whether the engine is alive."""

    target: Target
    record: RunRecord
    configurations: Configurations
    attached: Server | None = None
    attached_life: AttachedLife | None = field(default=None, init=False)
    #: The evidence that another process replaced the attached server; None without evidence.
    replaced: str | None = field(default=None, init=False)
    #: The copy of the attached server's log; None without a log.
    kept_log: KeptLog | None = field(default=None, init=False)
    #: The servers that the suite starts; None if a server is attached, or if none can start.
    pool: ServerPool | None = field(default=None, init=False)
    #: The report of each stop, by the name of the server's log.
    stops: dict[str, StopReport] = field(default_factory=dict, init=False)
    #: The reason why no further test runs, as (class, text); None while tests run.
    aborted: tuple[str, str] | None = field(default=None, init=False)
    #: Reports an abnormal end, and has the rest of the server stopped.
    crashes: CrashReports = field(default_factory=NoCrashReports)
    #: The number of the suite's servers that were stopped after a crash.
    crashed: int = field(default=0, init=False)
    #: Whether a signal ended the run. Then no more requests are sent to an attached server, because
    #: a server that hangs would delay the end.
    interrupted: bool = field(default=False, init=False)
    #: Samples the memory of the server's processes; None before there is a server to watch.
    sampler: ResourceSampler | None = field(default=None, init=False)

    def begin(
        self,
        sampler: ResourceSampler,
        pool: ServerPool | None = None,
        life: AttachedLife | None = None,
        log: KeptLog | None = None,
    ) -> None:
        """Start servers from a pool, or watch the attached server; sample their memory.

        Args:
            sampler: Samples the memory of the servers' processes.
            pool: The servers that the suite starts; None if a server is attached.
            life: Observes whether the attached server is alive; None if none is attached.
            log: The copy of the attached server's log; None without a log.
        """
        self.pool = pool
        self.attached_life = life
        self.kept_log = log
        if log is not None and self.attached is not None:
            self.attached = replace(self.attached, log=log.path)
        self.sampler = sampler
        sampler.start()

    def obstacle(self) -> str | None:
        """Return why no further server can start; None if one can."""
        if self.aborted is not None:
            return f"the run was ended: {self.aborted[1]}"
        if self.record.halted is not None:
            return self.record.halted
        if self.attached is not None:
            return None
        for finding in self.configurations.findings:
            if finding.severity == "error":
                remedy = f"; {finding.remedy}" if finding.remedy else ""
                return f"no server is started: {finding.message}{remedy}"
        return None

    def get(self, configuration: str | None = None) -> Server:
        """Return the server of a configuration of the profile.

        Args:
            configuration: The configuration's name; None for the configuration under test.

        Raises:
            NotRun: The attached server has another configuration, or this one cannot start here.
            StartError: The server did not start.
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
        """Start the server of a configuration of the profile or of a matrix cell, and return it.

        If a server of this configuration is running, that one is returned. A running server of
        another configuration is stopped.

        Args:
            configuration: The configuration.

        Raises:
            NotRun: This run starts no server, or the drafter model is not on this machine.
            StartError: The server did not start.
        """
        if self.pool is None:
            raise NotRun(self.target.obstacle or "no server can be started here")
        if self.aborted is not None:
            raise NotRun(f"the run was ended: {self.aborted[1]}")
        identity.require_drafter(configuration)
        self.look()
        return self.pool.get(configuration)

    def start_anew(self, configuration: ServerConfiguration) -> None:
        """Stop a configuration's server, so that the next `start` starts a new process.

        If an earlier start failed, the next `start` tries again.

        Args:
            configuration: The configuration. A server of another configuration keeps running.
        """
        if self.pool is None:
            return
        self.pool.forget(configuration)
        current = self.pool.current
        if current is not None and current.configuration.key == configuration.key:
            self.stop()

    def stop(self) -> StopReport | None:
        """Stop the suite's running server, or report its earlier end; return None if none runs."""
        return self.look() or (self.pool.stop() if self.pool is not None else None)

    def last(self, configuration: str) -> Server | None:
        """Return the last server that was started with a configuration, even if it is stopped.

        Args:
            configuration: The name of the configuration.

        Returns:
            The server; None if none became ready, or if the server is attached.
        """
        return self.pool.servers.get(configuration) if self.pool is not None else None

    @property
    def life(self) -> Life | None:
        """The `Life` of the running engine, which shows whether it is alive; None without one."""
        return self.pool.life if self.pool is not None else self.attached_life

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the running server; empty if this process cannot see them."""
        if self.pool is not None:
            return self.pool.processes()
        return self.attached_life.processes.find() if self.attached_life is not None else []

    def check_alive(self, *, after_failure: bool = False) -> None:
        """Require, within a test, that the suite's own server is alive.

        Args:
            after_failure: Whether a request has failed. Then the check first waits some seconds,
                because a dying server needs time to end.

        Raises:
            ServerDied: The server has died. The code that catches this error must report it to
                `crashes`.
        """
        life = self.life
        if not isinstance(life, ManagedLife):
            return
        state = life.after_failure() if after_failure else life.state()
        if isinstance(state, Dead):
            raise ServerDied(state.what, state.cause, life.managed.launch.log)

    def look(self, *, lately_s: float = 0.0) -> StopReport | None:
        """Check, outside of a test, that the server is alive; if not, report and stop it.

        Args:
            lately_s: Skip the check if the last one is not older than this many seconds.

        If the attached server is gone, no further test runs.

        Returns:
            The report of the stop; None if the server is alive, or is attached.
        """
        self.follow_log()
        life = self.life
        if life is None or self.aborted is not None:  # The suite itself killed the server.
            return None
        is_managed = isinstance(life, ManagedLife)
        if not is_managed:
            is_gone = life.accounted and self.record.halted is not None
            if is_gone or self.interrupted:
                return None  # No test runs, so no result depends on what answers now.
            lately_s *= _ATTACHED_CHECKS_LAST
        state = life.state(asked_within_s=lately_s)
        if isinstance(state, Alive) or life.accounted:
            return None
        name = "the attached server"
        if is_managed and state.evidence:
            name = state.evidence.stem
        life.account()
        cause = self.crashes.after_crash(self, state, None)
        decision = server_decisions.died_between_tests(name, state, cause, self.record.phase)
        self.record.emit(Decided(decision))
        if state.replaced:
            self.replaced = state.detail
            for event in server_decisions.invalidate_measurements(self.record.file, state.detail):
                self.record.emit(event)
        elif not is_managed:
            self.record.emit(Distrusted(_CANNOT_RESTART))
        return self.stops.get(f"{name}.log")

    def stop_crashed(self, why_distrusted: str | None) -> None:
        """Stop what remains of a crashed server, so that the next test gets a new server.

        Later results are not trusted in three cases: an attached server no longer answers, the stop
        leaves processes or memory behind, or the caller gives a reason.

        Args:
            why_distrusted: The caller's reason; None without one.
        """
        if why_distrusted is not None:
            self.record.emit(Distrusted(why_distrusted))
        life = self.life
        if self.pool is None:
            if life is not None and not life.answers():
                self.record.emit(Distrusted(_CANNOT_RESTART))
            return
        if life is not None:
            life.account()  # The report of its crash already contains its log.
        report = self.pool.stop()
        if report is not None and not report.clean:
            why = (
                f"the crash left something behind on the machine: {len(report.survivors)} "
                f"processes left, port free: {report.port_free}, "
                f"{report.memory.missing_bytes / 2**30:.1f} GiB missing"
            )
            self.record.emit(Distrusted(why))
        if self.aborted is None:
            self.crashed += 1

    def abort(self, reason: str) -> None:
        """Kill the server now and run no further test, because the machine is about to fail.

        Args:
            reason: The reason, which the report shows as a remark. A second call keeps the first
                reason.
        """
        is_first = self.aborted is None
        if is_first:
            self.aborted = (MEMORY_FLOOR, reason)
        if self.pool is not None:
            self.pool.kill()
        if is_first:
            self.record.remark(reason)

    def note_stop(self, configuration: str, report: StopReport) -> None:
        """Judge what a stopped server left behind.

        Memory that is not proven to be free again is INCONCLUSIVE, unless a healthy stop can also
        leave this much (`server_decisions.memory_is_usual`).

        Args:
            configuration: The name of the server's configuration.
            report: The report of the stop.
        """
        earlier = list(self.stops.values())
        self.stops[report.log] = report
        self.record.emit(ServerStopped(report.log, clean=report.clean))
        if not report.clean:
            self.record.emit(
                Decided(server_decisions.unclean(report.start or configuration, report))
            )
        if not report.memory.unproven_bytes:
            return
        line = f"after server {configuration}: {report.memory}"
        if server_decisions.memory_is_usual(report, earlier):
            self.record.remark(
                f"{line}. docker run --pid=host shows which processes hold a GPU's memory"
            )
            return
        self.record.remark(line)
        self.record.emit(Decided(server_decisions.unproven_memory(configuration, report)))

    def follow_log(self) -> None:
        """Copy the new lines of the attached server's log. Lost lines are reported once."""
        if self.kept_log is not None:
            lost_before = self.kept_log.lost
            self.kept_log.follow()
            if lost_before is None and self.kept_log.lost is not None:
                self.record.unproven(f"kernel path: {self.kept_log.lost}")
