"""What a level uses of the run that it is part of: a pytest run, or a script's `Session`."""

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sm121.checkpoint import identity
from sm121.client.load import LoadClient
from sm121.compilation import jit
from sm121.compilation.jit import FlashInferModules
from sm121.core.configuration import ServerConfiguration
from sm121.core.files import write_text
from sm121.core.profile import Profile
from sm121.core.server import Node, Server
from sm121.core.verdict import NotRun
from sm121.engines import preflight, registry, requested
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
from sm121.measure import roofline
from sm121.measure.timeline import Timeline
from sm121.run import beside, served, spanning, verdict_file
from sm121.run.record import RunRecord, Target


@dataclass(frozen=True)
class Load:
    """What a server is under: who sends it, and the samples of the server meanwhile."""

    client: LoadClient
    timeline: Timeline


@dataclass(kw_only=True)
class Harness(RunRecord):
    """What a level uses of its run: its record, and its servers."""

    target: Target
    #: The profile's server configurations, by name; empty where the server is attached.
    configurations: Mapping[str, ServerConfiguration] = field(default_factory=dict)
    attached: Server | None = None
    attached_life: AttachedLife | None = None
    #: What shows that another process took its place in this run; None while none did.
    replaced: str | None = None
    kept_log: KeptLog | None = None
    #: The servers that the suite starts; None when one is attached, or none can be started.
    pool: ServerPool | None = None
    node_facts: dict[Node, dict[str, Any]] = field(default_factory=dict)
    stops: dict[str, StopReport] = field(default_factory=dict)
    #: Why no further test runs, as (class, text); None while all is well.
    aborted: tuple[str, str] | None = None
    #: Why later results could not be trusted; None while all is well.
    distrusted: str | None = None
    #: Set while a server is under load. A crash bundle has what it saw.
    load: Load | None = None
    #: Called after an abnormal end (see `session.crashes`).
    on_crash: Callable[[ServerError | Dead, str | None], Cause] | None = None
    #: By configuration: a server whose path was judged, and what was said of it.
    _judged_paths: dict[str, tuple[Server, set[Contradiction]]] = field(default_factory=dict)
    #: When a log was last written to before it was judged.
    _judged_at: dict[Path, int | None] = field(default_factory=dict)
    _errors: dict[Path, ErrorReader] = field(default_factory=dict)
    _under_test: Server | None = None
    #: By the log of a server, what the RDMA ports of this machine counted during a prompt of it.
    _counted: dict[Path | None, Transport | None] = field(default_factory=dict)

    @property
    def profile(self) -> Profile:
        """The profile in force. Raises NotRun: the target cannot be judged here."""
        if self.target.profile is None:
            raise NotRun(self.target.obstacle or "no profile")
        return self.target.profile

    @property
    def arch(self) -> str:
        """The architecture of the target."""
        return self.target.arch

    @functools.cached_property
    def findings(self) -> list[PreflightFinding]:
        """What may keep a server from starting here. Checked once, before the first start."""
        findings = [*preflight.of_nodes(self.profile.engine.needs, self.node_facts)]
        for name in (self.profile.under_test, self.profile.baseline):
            configuration = self.managed_configuration(name)
            environment = self.engine_environment(configuration)
            for finding in preflight.Preflight(
                self.arch,
                configuration.arguments,
                environment,
                needs=self.profile.engine.needs,
                directory=self.directory,
                modules=FlashInferModules.of(configuration.python, environment)
                if self.profile.engine.needs.jit_modules
                else None,
                version=self.file.engine.identity,
                cold_ready_within_s=self.profile.engine.cold_ready_within_s.value,
            ).findings():
                if finding not in findings:
                    findings.append(finding)
        for finding in findings:
            notable = finding.severity != "note"
            label = f"{finding.severity}: " if notable else ""
            self.remark(f"{label}{finding.message}", at_once=notable)
        return findings

    def obstacle(self) -> str | None:
        """Why no further server is started; None while all is well."""
        if self.aborted is not None:
            return f"the run was ended: {self.aborted[1]}"
        if self.distrusted is not None:
            return self.distrusted
        if self.attached is None:
            unfit = [finding for finding in self.findings if finding.severity == "error"]
            if unfit:
                why, remedy = unfit[0].message, unfit[0].remedy
                return f"no server is started: {why}" + (f"; {remedy}" if remedy else "")
        return None

    def server(self, configuration: str | None = None) -> Server:
        """The attached server, or the managed one of a configuration (default: under test). Raises
        NotRun: another configuration than the attached server's, none can be started here, or it
        did not start for an earlier test; StartError: it does not start."""
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
        """The managed server of any configuration: one of the profile's, or a cell's. Raises
        NotRun: nothing is started in this run; StartError: it does not start."""
        if self.pool is None:
            raise NotRun(self.target.obstacle or "no server can be started here")
        if self.aborted is not None:
            raise NotRun(f"the run was ended: {self.aborted[1]}")
        self.look_at_the_server()
        return self.pool.get(configuration)

    def start_anew(self, configuration: ServerConfiguration) -> None:
        """Let the next `start` of a configuration be one: a server of it that runs is stopped, and
        a start that failed is tried again."""
        if self.pool is None:
            return
        self.pool.forget(configuration)
        current = self.pool.current
        if current is not None and current.configuration.key == configuration.key:
            self.stop()

    def stop(self) -> StopReport | None:
        """Stop the running server; None when none runs, or when it is attached. One that had ended
        before is reported."""
        return self.look_at_the_server() or (self.pool.stop() if self.pool is not None else None)

    def crashed(self, end: ServerError | Dead, test: str | None) -> Cause:
        """After an abnormal end: write a bundle, print one line, and check what the server left."""
        return self.on_crash(end, test) if self.on_crash is not None else end.cause

    def managed_configuration(self, name: str) -> ServerConfiguration:
        """A configuration that the suite starts itself. Raises NotRun: the server is attached."""
        if self.target.obstacle is not None:
            raise NotRun(self.target.obstacle)
        if name not in self.configurations:
            raise NotRun("the server is attached: what it was started with is not known")
        return self.configurations[name]

    def engine_environment(self, configuration: ServerConfiguration) -> Mapping[str, str]:
        """The environment in which the engine of a configuration runs."""
        return registry.engine(configuration.engine).environment(configuration, api_key="")

    def bound_compilers(self, configuration: ServerConfiguration) -> Mapping[str, str]:
        """What is added to a start's environment, so that its compilers do not take the memory of
        the whole machine. What the user gave stays."""
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
        """The server of a configuration's latest start, stopped or not; None: it never served."""
        return self.pool.servers.get(configuration) if self.pool is not None else None

    def kernel_path(self, server: Server) -> KernelPath:
        """What log and metrics prove so far, and what was asked for."""
        if (reader := server.reader) is None:
            return KernelPath()
        self.follow_log()
        log = server.log
        path = read_log(log, reader, one_run=server.managed) if log is not None else KernelPath()
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
        """Of the model that is served; None where no config.json of it is here."""
        return (roofline.read_config(self.file.engine.model) or {}).get("num_hidden_layers")

    def path_to_judge(self) -> KernelPath:
        """Whose kernels the numerics judge: the path of the server under test as it has shown it in
        this run; what it has not shown is as expected. Raises NotRun: there is no profile."""
        name = self.profile.under_test
        expected = served.expected(self.profile.path_of(name), self.configurations.get(name))
        return served.with_expected(self.file.engine.path, expected)

    def contradictions(self, server: Server) -> list[Contradiction]:
        """What of a server's path is not as the profile requires. It is judged again
        after each level, when the server is closed, and at the end: what its log says by then
        counts (see `judge_paths_again`). The server's log must be known."""
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
        """Why the log of an attached server cannot show its attention; None: it can, or does."""
        silent = server.configuration is None and self.profile.engine.speaking_worker
        why = "this engine logs nothing of its attention, unless the suite starts it"
        return why if silent and self.kernel_path(server).attention is None else None

    def spanned(self, server: Server) -> spanning.Spanned | None:
        """What the ranks of a server show that spans machines; None: it is on one."""
        nodes, configuration = self.profile.nodes, server.configuration
        if nodes is None:
            return None
        name = configuration.name if configuration is not None else self.profile.under_test
        required = self.profile.path_of(name)
        judged = spanning.look(server, nodes, required, self._counted.get(server.log))
        if len(judged.carried) < len(judged.ranks) and server.log not in self._counted:
            config = roofline.read_config(self.file.engine.model) or {}
            self._counted[server.log] = spanning.count_a_prompt(server, nodes, config)
            judged = spanning.look(server, nodes, required, self._counted[server.log])
        return judged

    def _note_nodes(self, server: Server) -> None:
        if (judged := self.spanned(server)) is None:
            return
        rows = judged.rows()
        if self._under_test in (None, server):
            self.file.engine.nodes = rows
        for row in rows:
            for node, facts in self.node_facts.items():
                if node.name == row.node:
                    row.memory_available_gib = facts["available_bytes"] / 2**30
                    break
        for line in judged.remarks:
            self.remark(line, at_once=False)
        for line in judged.silent:
            self.unproven(line)

    def _note_nccl(self) -> None:
        """Record which NCCL each node of the server mapped, and remark on a difference."""
        here = {"node 0 (this machine)": mapped.nccl(self.processes())}
        elsewhere = self.pool.nccl_elsewhere() if self.pool is not None else {}
        by_node = {node: rows for node, rows in {**here, **elsewhere}.items() if rows}
        self.file.environment["nccl"] = {
            node: [row.model_dump() for row in rows] for node, rows in by_node.items()
        }
        for line in mapped.different(by_node):
            self.remark(line)

    def judge_paths_again(self) -> None:
        """Judge each path that was judged before by what the log says now."""
        self.follow_log()
        for name, (judged, known) in self._judged_paths.items():
            server = (self.last_server(name) if judged.managed else None) or judged
            assert server.log is not None
            written = server.log.stat().st_mtime_ns if server.log.is_file() else None
            if written in (None, self._judged_at.get(server.log)):
                continue  # nothing was written since
            self._judged_at[server.log] = written
            wrong = [each for each in self._contradictions(server, name) if each not in known]
            if not wrong:
                continue
            known.update(wrong)
            self.ledger.decide(beside.left_the_path(name, wrong, server.log, self.phase[1]))
            self.save()

    def judge_errors(self) -> None:
        """Decide what the running server's log has reported since it was last read: an error that
        killed nobody is never green. Of an attached server's log, what was there before does not
        count; nor does what a server prints while it is stopped. One that ended has its bundle."""
        self.follow_log()
        server, running = self.attached, self.pool.current if self.pool is not None else None
        if running is not None and running.running:
            server = self.last_server(running.configuration.name)
        life = self.life
        if server is None or life is None or life.accounted:
            return
        for log, name in server.logs.items():
            engine = server.configuration.engine if server.configuration else server.reader or ""
            new = ErrorReader(engine, 0 if server.managed else log.stat().st_size)
            errors = self._errors.setdefault(log, new).read(log)
            if errors and not isinstance(life.state(), Dead):
                self.decide_silent(errors, name)
                self.save()

    def decide_silent(self, errors: Iterable[SilentError], source: str) -> None:
        """Decide on errors that nothing died of (`beside.silent`)."""
        for decision in beside.silent(errors, source, self.phase, self.redact):
            self.ledger.decide(decision)

    def follow_log(self) -> None:
        """Copy what the attached server wrote since; say once that some of it was lost."""
        if self.kept_log is not None:
            lost_before = self.kept_log.lost
            self.kept_log.follow()
            if lost_before is None and self.kept_log.lost is not None:
                self.file.unproven.append(f"kernel path: {self.kept_log.lost}")

    def _contradictions(self, server: Server, name: str) -> list[Contradiction]:
        assert server.log is not None
        path, configuration = self.kernel_path(server), server.configuration
        patterns = requested.patterns(configuration) if configuration is not None else ()
        required = self.profile.path_of(name, patterns)
        if self.unlogged(server):
            required = required.model_copy(update={"attention": None})
        wrong = requirement.contradictions(required, path, server.log, name)
        if (judged := self.spanned(server)) is not None:
            wrong += judged.wrong
        if configuration is None:  # another machine's or container's files may not be those here
            return wrong
        stated, variables = self.profile.model, os.environ | dict(configuration.environment)
        other = identity.contradiction(stated.id, stated.digest, configuration.model, variables)
        return [*wrong, Contradiction("model", other, other)] if other else wrong

    def metrics_file(self, log: Path | None) -> Path:
        """Where a server's metrics are kept. `log`: of a managed server; None: attached."""
        return self.directory / f"metrics-{log.stem if log is not None else 'attached'}.txt"

    def _metrics_of(self, server: Server) -> str | None:
        """The metrics from the first look at the server."""
        attached = self.attached.endpoint.base_url if self.attached is not None else None
        if attached is not None and server.endpoint.base_url != attached:  # a side of --ab
            return server.endpoint.page("/metrics")
        file = self.metrics_file(server.log if server.managed else None)
        if not file.exists():
            running = self.pool.current if self.pool is not None else None
            if server.managed and (running is None or running.log != server.log):
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
        self.file.engine.path = self.kernel_path(server)
        self.file.engine.base_url = server.endpoint.base_url
        self.file.engine.startup_s = server.startup_s
        if server.configuration is not None:  # a first start saves a set that was not there before
            variables = self.engine_environment(server.configuration)
            self.file.environment["autotune"] = environment.autotune_sets(variables)
        # The version that the running engine reports replaces the installed one.
        version = server.version or self.file.engine.path.version
        if version is not None:
            self.file.engine.version = version

    def note_stop(self, configuration: str, report: StopReport) -> None:
        """Decide what a stopped server left, like a test.

        Memory that is not proven to be free again is said each time. It is INCONCLUSIVE, unless a
        healthy stop may seem to leave so much and the stop before it left nothing unproven.
        """
        earlier = list(self.stops.values())
        self.stops[report.log] = report
        if not report.clean:
            self.ledger.decide(
                beside.unclean(report.log.removesuffix(".log") or configuration, report)
            )
        if not report.memory.unproven_bytes:
            return
        again = bool(earlier) and earlier[-1].memory.unproven_bytes > 0
        if report.memory.usual and not again:
            self.remark(
                f"after server {configuration}: {report.memory}. Who holds a GPU's memory is seen "
                "with docker run --pid=host"
            )
            return
        self.remark(f"after server {configuration}: {report.memory}")
        self.ledger.decide(beside.unproven_memory(configuration, report))

    @property
    def life(self) -> Life | None:
        """Of the engine that serves now; None where none does."""
        return self.pool.life if self.pool is not None else self.attached_life

    def processes(self) -> list[psutil.Process]:
        """Those of the server that runs; empty where they are not seen from here."""
        if self.pool is not None:
            return self.pool.processes()
        return self.attached_life.processes.find() if self.attached_life is not None else []

    def no_memory(self) -> str:
        """Why the server's memory is not judged; of an attached one it is not proven, either."""
        life = self.attached_life
        why = life.no_memory if life is not None else None
        if why is not None:
            self.unproven(why)
        return why or "no process of the server could be looked at"

    def check_alive(self, *, after_failure: bool = False) -> None:
        """Look whether the suite's own server lives, within a test. `after_failure`: a request has
        failed; a server that dies of it gets the time to. Raises ServerDied: it does not. Whoever
        catches it reports it (`crashed`)."""
        life = self.life
        if isinstance(life, ManagedLife):
            state = life.after_failure() if after_failure else life.state()
            if isinstance(state, Dead):
                raise ServerDied(state.what, state.cause, life.managed.log)

    def look_at_the_server(self, *, lately_s: float = 0.0) -> StopReport | None:
        """Look, outside of a test, whether the server is still the one that was started, or
        attached to. A death is a crash whichever test did not notice it: it is reported, and a
        server of the suite is stopped. `lately_s`: what was asked so lately is not asked again.
        Returns: how it was stopped; None where it lives, or is attached."""
        self.follow_log()
        life = self.life
        if life is None or self.aborted is not None:  # the suite killed it
            return None
        managed = isinstance(life, ManagedLife)
        state = life.state(asked_within_s=lately_s if managed else 5 * lately_s)
        if isinstance(state, Alive) or life.accounted:
            return None
        name = state.evidence.stem if managed and state.evidence else "the attached server"
        life.accounted = True
        self.ledger.decide(beside.unasked(name, state, self.crashed(state, None), self.phase))
        if state.replaced:
            self.replaced = state.detail
            beside.void(self.file, self.ledger, state.detail)
        self.save()
        return self.stops.get(f"{name}.log")

    def abort(self, reason: str) -> None:
        """The machine is about to fail: kill the server at once, and run no further test."""
        first = self.aborted is None
        if first:
            self.aborted = (verdict_file.MEMORY_FLOOR, reason)
        if self.pool is not None:
            self.pool.kill()
        if first:
            self.remark(reason)
