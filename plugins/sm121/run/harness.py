"""The part of a run that its levels use. The run is pytest's, or a script's `Session`."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sm121.checkpoint import identity
from sm121.compilation import jit
from sm121.core.configuration import ServerConfiguration
from sm121.core.files import write_text
from sm121.core.profile import Profile
from sm121.core.server import Node, Server
from sm121.core.verdict import NotRun
from sm121.engines import registry, requested
from sm121.engines.attached_life import AttachedLife
from sm121.engines.endings import StopReport
from sm121.engines.kept_log import KeptLog
from sm121.engines.life import Alive, Dead, Life, ManagedLife, ServerDied
from sm121.engines.pool import ServerPool
from sm121.engines.preflight import PreflightFinding
from sm121.engines.server_errors import ServerError
from sm121.evidence import environment, kernel_proof, mapped, metrics, requirement
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_path import KernelPath, read_log
from sm121.evidence.requirement import Contradiction
from sm121.evidence.silent_errors import ErrorReader, SilentError
from sm121.evidence.transport import Transport
from sm121.machine import roofline
from sm121.run import beside, served, spanning, start_checks
from sm121.run.events import Decided, EngineShown, EnvironmentNoted, ServerStopped
from sm121.run.load import Load
from sm121.run.machine_report import MEMORY_FLOOR
from sm121.run.record import RunRecord, Target

#: A check of an attached server, which sends requests, is repeated this many times more rarely.
_ATTACHED_CHECKS_LAST = 5


@dataclass(kw_only=True)
class Harness(RunRecord):
    """The record of a run, and its servers."""

    target: Target
    #: The profile's server configurations by name; empty if the server is attached.
    configurations: Mapping[str, ServerConfiguration] = field(default_factory=dict)
    attached: Server | None = None
    attached_life: AttachedLife | None = None
    #: The sign that another process took the attached server's place; None while none did.
    replaced: str | None = None
    kept_log: KeptLog | None = None
    #: The servers that the suite starts; None when one is attached, or none can be started.
    pool: ServerPool | None = None
    node_facts: dict[Node, dict[str, Any]] = field(default_factory=dict)
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
    #: By configuration: the server whose path was judged, and the known contradictions.
    _judged_paths: dict[str, tuple[Server, set[Contradiction]]] = field(default_factory=dict)
    #: By log: when it was last written before it was judged.
    _judged_at: dict[Path, int | None] = field(default_factory=dict)
    _errors: dict[Path, ErrorReader] = field(default_factory=dict)
    _under_test: Server | None = None
    #: By log: the transport by the counters of this machine's RDMA ports during a prompt.
    _counted: dict[Path | None, Transport | None] = field(default_factory=dict)

    @property
    def profile(self) -> Profile:
        """The profile in force; NotRun if the target cannot be judged here."""
        if self.target.profile is None:
            raise NotRun(self.target.obstacle or "no profile")
        return self.target.profile

    @property
    def arch(self) -> str:
        """The architecture of the target."""
        return self.target.arch

    @functools.cached_property
    def findings(self) -> list[PreflightFinding]:
        """The obstacles to a start here, found once, before the first start."""
        names = (self.profile.under_test, self.profile.baseline)
        findings = start_checks.find_obstacles(
            self.arch,
            self.profile.engine,
            [self.managed_configuration(name) for name in names],
            self.engine_environment,
            directory=self.directory,
            version=self.file.engine.identity,
            node_facts=self.node_facts,
        )
        for finding in findings:
            if finding.severity == "note":
                self.remark(finding.message, at_once=False)
            else:
                self.remark(f"{finding.severity}: {finding.message}")
        return findings

    def obstacle(self) -> str | None:
        """Return why no further server is started; None if one can be."""
        if self.aborted is not None:
            return f"the run was ended: {self.aborted[1]}"
        if self.distrusted is not None:
            return self.distrusted
        if self.attached is not None:
            return None
        for finding in self.findings:
            if finding.severity == "error":
                remedy = f"; {finding.remedy}" if finding.remedy else ""
                return f"no server is started: {finding.message}{remedy}"
        return None

    def server(self, configuration: str | None = None) -> Server:
        """Return the server of a configuration; None for the one under test.

        Raises:
            NotRun: It is not the attached server's, or cannot be started here.
            StartError: It does not start.
        """
        name = configuration or self.profile.under_test
        if self.attached is not None:
            if name != self.profile.under_test:
                raise NotRun(
                    f"configuration {name} cannot be started next to an attached server; "
                    "run without --base-url"
                )
            self._describe(self.attached)
            return self.attached
        if self.pool is not None and (why := self.obstacle()) is not None:
            raise NotRun(why)
        chosen = self.managed_configuration(name)
        if self.pool is not None and (failed := self.pool.failure(chosen)) is not None:
            raise NotRun(f"server {name} did not start: {failed.cause.kind}, see {failed.log}")
        server = self.start(chosen)
        if name == self.profile.under_test:
            self._describe(server)
        return server

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
        self.look_at_the_server()
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
        return self.look_at_the_server() or (self.pool.stop() if self.pool is not None else None)

    def managed_configuration(self, name: str) -> ServerConfiguration:
        """Return a configuration that the suite starts itself; NotRun if the server is attached."""
        if self.target.obstacle is not None:
            raise NotRun(self.target.obstacle)
        if name not in self.configurations:
            raise NotRun("the server is attached: what it was started with is not known")
        return self.configurations[name]

    def engine_environment(self, configuration: ServerConfiguration) -> Mapping[str, str]:
        """Return the environment in which the engine of a configuration runs."""
        return registry.engine(configuration.engine).environment(configuration, api_key="")

    def bound_compilers(self, configuration: ServerConfiguration) -> Mapping[str, str]:
        """Return the variables that keep a start's compilers from taking the machine's memory."""
        added = jit.bounding_variables(
            self.profile.engine.needs,
            configuration.arguments,
            self.engine_environment(configuration),
        )
        if added:
            variables = ", ".join(f"{name}={value}" for name, value in added.items())
            self.remark(f"server {configuration.name} is started with {variables}", at_once=False)
        return added

    def last_server(self, configuration: str) -> Server | None:
        """Return the server of a configuration's latest start, stopped or not; None without one."""
        return self.pool.servers.get(configuration) if self.pool is not None else None

    def kernel_path(self, server: Server) -> KernelPath:
        """Return the kernel path by log and metrics so far, with the requests for it."""
        reader = server.reader
        if reader is None:
            return KernelPath()
        self.follow_log()
        path = KernelPath()
        if server.log is not None:
            path = read_log(server.log, reader, one_run=server.managed)
        if (text := self._metrics_of(server)) is not None:
            path = metrics.with_metrics(path, text, reader)
        if server.configuration is None:
            return requested.of_log(path, reader)
        kernels = self.file.engine.kernels
        if kernels is not None and server.configuration.name == self.profile.under_test:
            path = kernel_proof.with_kernels(path, kernels, self.layers)
        return requested.judged(server.configuration, path)

    @property
    def layers(self) -> int | None:
        """The layers of the served model; None if no config.json of it is here."""
        return (roofline.read_config(self.file.engine.model) or {}).get("num_hidden_layers")

    def path_to_judge(self) -> KernelPath:
        """Return the path that the numerics judge: as shown in this run, otherwise as expected."""
        name = self.profile.under_test
        expected = served.expected(self.profile.path_of(name), self.configurations.get(name))
        return served.with_expected(self.file.engine.path, expected)

    def contradictions(self, server: Server) -> list[Contradiction]:
        """Return the contradictions of a server's path to the profile.

        The log must be known. `judge_paths_again` repeats this after each level, when the server is
        closed, and at the end.
        """
        configuration = server.configuration
        name = configuration.name if configuration is not None else self.profile.under_test
        wrong = self._contradictions(server, name)
        self._note_nodes(server)
        self._note_nccl()
        silent = requirement.not_shown(self.profile.path_of(name), self.kernel_path(server))
        if self.profile.model.digest is not None and configuration is None:
            silent.append("the model's digest (the attached server's files are not known)")
        if silent:
            line = f"kernel path of {name}: no line shows {', '.join(silent)}"
            self.remark(line, at_once=False)
        self._judged_paths.setdefault(name, (server, set()))[1].update(wrong)
        return wrong

    def unlogged(self, server: Server) -> str | None:
        """Return why an attached server's log cannot show its attention; None if it can or does."""
        is_silent = server.configuration is None and self.profile.engine.speaking_worker
        if not is_silent or self.kernel_path(server).attention is not None:
            return None
        return "this engine logs nothing of its attention, unless the suite starts it"

    def spanned(self, server: Server) -> spanning.Spanned | None:
        """Judge the ranks of a server that spans machines; None if it is on one."""
        nodes = self.profile.nodes
        if nodes is None:
            return None
        configuration = server.configuration
        name = configuration.name if configuration is not None else self.profile.under_test
        required = self.profile.path_of(name)
        return spanning.judge(server, nodes, required, self._counted, self.file.engine.model)

    def _note_nodes(self, server: Server) -> None:
        judged = self.spanned(server)
        if judged is None:
            return
        if self._under_test in (None, server):
            rows = spanning.rows(judged, self.node_facts)
            self.emit(EngineShown.of(self.file.engine, nodes=rows))
        for line in judged.remarks:
            self.remark(line, at_once=False)
        for line in judged.silent:
            self.unproven(line)

    def _note_nccl(self) -> None:
        """Record which NCCL each node of the server mapped, and remark on a difference."""
        if self.pool is not None:
            by_node = self.pool.nccl_by_node()
        else:
            by_node = {"node 0 (this machine)": mapped.nccl(self.processes())}
        nccl = {node: [row.model_dump() for row in rows] for node, rows in by_node.items() if rows}
        self.emit(EnvironmentNoted("nccl", nccl))
        for line in mapped.different(by_node):
            self.remark(line)

    def judge_paths_again(self) -> None:
        """Judge each path that was judged before by the log of now."""
        self.follow_log()
        for name, (judged, known) in self._judged_paths.items():
            server = (self.last_server(name) if judged.managed else None) or judged
            assert server.log is not None
            written = server.log.stat().st_mtime_ns if server.log.is_file() else None
            if written in (None, self._judged_at.get(server.log)):
                continue  # nothing was written since
            self._judged_at[server.log] = written
            wrong = [found for found in self._contradictions(server, name) if found not in known]
            if not wrong:
                continue
            known.update(wrong)
            self.emit(Decided(beside.left_the_path(name, wrong, server.log, self.phase[1])))

    def judge_errors(self) -> None:
        """Decide on errors that the running server's log has reported since the last call.

        An error that killed no process is never PASS. Errors before the run, during a stop, and
        of a server that ended (they are in its bundle) do not count.
        """
        self.follow_log()
        server = self.attached
        running = self.pool.current if self.pool is not None else None
        if running is not None and running.running:
            server = self.last_server(running.configuration.name)
        life = self.life
        if server is None or life is None or life.accounted:
            return
        for log, name in server.logs.items():
            if log not in self._errors:
                self._errors[log] = beside.error_reader(server, log)
            errors = self._errors[log].read(log)
            if errors and not isinstance(life.state(), Dead):
                self.decide_silent(errors, name)

    def decide_silent(self, errors: Iterable[SilentError], source: str) -> None:
        """Decide on errors that killed no process (`beside.silent`)."""
        for decision in beside.silent(errors, source, self.phase, self.redact):
            self.emit(Decided(decision))

    def follow_log(self) -> None:
        """Copy the new lines of the attached server's log; report once that lines were lost."""
        if self.kept_log is not None:
            lost_before = self.kept_log.lost
            self.kept_log.follow()
            if lost_before is None and self.kept_log.lost is not None:
                self.unproven(f"kernel path: {self.kept_log.lost}")

    def _contradictions(self, server: Server, name: str) -> list[Contradiction]:
        assert server.log is not None
        path = self.kernel_path(server)
        configuration = server.configuration
        patterns = requested.patterns(configuration) if configuration is not None else ()
        required = self.profile.path_of(name, patterns)
        if self.unlogged(server):
            required = required.model_copy(update={"attention": None})
        wrong = requirement.contradictions(required, path, server.log, name)
        if (judged := self.spanned(server)) is not None:
            wrong += judged.wrong
        if configuration is None:  # another machine's or container's files may not be those here
            return wrong
        stated = self.profile.model
        variables = configuration.variables
        other = identity.contradiction(stated.id, stated.digest, configuration.model, variables)
        if other:
            wrong.append(Contradiction("model", other, other))
        return wrong

    def metrics_file(self, log: Path | None) -> Path:
        """Return the file of the metrics of a managed server by its log, or of the attached one."""
        return self.directory / f"metrics-{log.stem if log is not None else 'attached'}.txt"

    def _metrics_of(self, server: Server) -> str | None:
        """Return the metrics of the first look at the server."""
        attached = self.attached.endpoint.base_url if self.attached is not None else None
        if attached is not None and server.endpoint.base_url != attached:  # a side of --ab
            return server.endpoint.page("/metrics")
        file = self.metrics_file(server.log if server.managed else None)
        if not file.exists():
            running = self.pool.current if self.pool is not None else None
            if server.managed and (running is None or running.launch.log != server.log):
                return None
            text = server.endpoint.page("/metrics")
            if text is None:
                return None
            try:
                write_text(self.redact(text), file)
            except OSError as error:
                self.cannot_write(error)
                return text
        return file.read_text("utf-8", errors="replace")

    def _describe(self, server: Server) -> None:
        if server is self._under_test:
            return
        self._under_test = server
        path = self.kernel_path(server)
        if server.configuration is not None:  # a first start saves a set that was not there before
            variables = self.engine_environment(server.configuration)
            self.emit(EnvironmentNoted("autotune", environment.autotune_sets(variables)))
        shown = EngineShown.of(
            self.file.engine,
            path=path,
            base_url=server.endpoint.base_url,
            startup_s=server.startup_s,
            # The version that the running engine reports replaces the installed one.
            version=server.version or path.log.version or self.file.engine.version,
        )
        self.emit(shown)

    def note_stop(self, configuration: str, report: StopReport) -> None:
        """Decide on the remains of a stopped server, like on a test.

        Memory that is not proven to be free again is INCONCLUSIVE, unless a healthy stop may leave
        so much (`beside.memory_is_usual`).
        """
        earlier = list(self.stops.values())
        self.stops[report.log] = report
        self.emit(ServerStopped(report.log, clean=report.clean))
        if not report.clean:
            self.emit(Decided(beside.unclean(report.start or configuration, report)))
        if not report.memory.unproven_bytes:
            return
        line = f"after server {configuration}: {report.memory}"
        if beside.memory_is_usual(report, earlier):
            self.remark(f"{line}. Who holds a GPU's memory is seen with docker run --pid=host")
            return
        self.remark(line)
        self.emit(Decided(beside.unproven_memory(configuration, report)))

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
        self.unproven(why)
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

    def look_at_the_server(self, *, lately_s: float = 0.0) -> StopReport | None:
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
        decision = beside.unasked(name, state, self.crashed(state, None), self.phase)
        self.emit(Decided(decision))
        if state.replaced:
            self.replaced = state.detail
            for event in beside.void(self.file, state.detail):
                self.emit(event)
        return self.stops.get(f"{name}.log")

    def abort(self, reason: str) -> None:
        """Kill the server at once and run no further test, since the machine is about to fail."""
        is_first = self.aborted is None
        if is_first:
            self.aborted = (MEMORY_FLOOR, reason)
        if self.pool is not None:
            self.pool.kill()
        if is_first:
            self.remark(reason)
