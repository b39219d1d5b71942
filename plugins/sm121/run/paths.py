"""Reads the kernel paths of a run's servers, reports them, and compares them with the profile."""

from dataclasses import dataclass, field
from pathlib import Path

from sm121.checkpoint import identity
from sm121.core.files import write_text
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.engines import requested
from sm121.evidence import environment, kernel_proof, mapped, metrics, requirement
from sm121.evidence.kernel_path import KernelPath, read_log
from sm121.evidence.requirement import Contradiction
from sm121.evidence.transport import Transport
from sm121.machine import roofline
from sm121.run import served, server_decisions, spanning
from sm121.run.configurations import Configurations
from sm121.run.events import Decided, EngineShown, EnvironmentNoted
from sm121.run.record import RunRecord, Target
from sm121.run.servers import Servers


@dataclass(kw_only=True)
class KernelPaths:
    """The kernel path of each server, as its log and its metrics show it."""

    target: Target
    record: RunRecord
    configurations: Configurations
    servers: Servers
    #: For each configuration: the server whose path was judged, and its contradictions so far.
    _judged: dict[str, tuple[Server, set[Contradiction]]] = field(init=False, default_factory=dict)
    #: For each log: the time of its last change before it was judged.
    _judged_at: dict[Path, int | None] = field(init=False, default_factory=dict)
    #: For each log: the transport, found from the counters of this machine's RDMA ports.
    _counted: dict[Path | None, Transport | None] = field(init=False, default_factory=dict)
    _under_test: Server | None = field(init=False, default=None)

    @property
    def _profile(self) -> Profile:
        return self.target.require_profile()

    def of(self, server: Server) -> KernelPath:
        """Return the kernel path that log and metrics show so far, and the requested values.

        Args:
            server: The server. It may be stopped.

        Returns:
            The path; empty if the suite has no signatures for the engine's log. For the
            configuration under test, it includes the values that profiled kernels prove.

        Raises:
            OSError: The log cannot be read.
        """
        reader = server.reader
        if reader is None:
            return KernelPath()
        self.servers.follow_log()
        path = KernelPath()
        if server.log is not None:
            path = read_log(server.log, reader, one_run=server.managed)
        if (text := self._metrics_of(server)) is not None:
            path = metrics.with_metrics(path, text, reader)
        if server.configuration is None:
            return requested.of_log(path, reader)
        kernels = self.record.file.engine.kernels
        if kernels is not None and server.configuration.name == self._profile.under_test:
            path = kernel_proof.with_kernels(path, kernels, self.layers)
        return requested.judged(server.configuration, path)

    def describe(self, server: Server) -> None:
        """Report the engine under test: its kernel path, version and start-up time.

        The report is the event `EngineShown`. Repeated calls with the same server report nothing.

        Args:
            server: The server under test, which is ready.

        Raises:
            OSError: The log cannot be read.
        """
        if server is self._under_test:
            return
        self._under_test = server
        path = self.of(server)
        # The first start may have added a set of tuned kernels.
        if server.configuration is not None:
            variables = self.configurations.environment(server.configuration)
            self.record.emit(EnvironmentNoted("autotune", environment.autotune_sets(variables)))
        shown = EngineShown.of(
            self.record.file.engine,
            path=path,
            base_url=server.endpoint.base_url,
            startup_s=server.startup_s,
            # The version that the running engine reports replaces the installed one.
            version=server.version or path.log.version or self.record.file.engine.version,
        )
        self.record.emit(shown)

    @property
    def layers(self) -> int | None:
        """The number of layers of the served model; None if its config.json is not here."""
        return (roofline.read_config(self.record.file.engine.model) or {}).get("num_hidden_layers")

    def to_judge(self) -> KernelPath:
        """Return the kernel path whose kernels the numerics tests check.

        A field that no log or metric shows has the expected value.
        """
        name = self._profile.under_test
        expected = served.expected(
            self._profile.path_of(name), self.configurations.by_name.get(name)
        )
        return served.with_expected(self.record.file.engine.path, expected)

    def contradictions(self, server: Server) -> list[Contradiction]:
        """Return the contradictions between a server's kernel path and the profile.

        `judge_again` repeats this after each level, when the server is stopped, and at the end of
        the run. The report also gets a remark with the required fields that no log line shows.

        Args:
            server: The server, which must have a log. An attached server is compared with the
                configuration under test.

        Raises:
            OSError: The log cannot be read.
        """
        configuration = server.configuration
        name = configuration.name if configuration is not None else self._profile.under_test
        wrong = self._contradictions(server, name)
        self._note_nodes(server)
        self._note_nccl()
        silent = requirement.not_shown(self._profile.path_of(name), self.of(server))
        if self._profile.model.digest is not None and configuration is None:
            silent.append("the model's digest (the attached server's files are unknown)")
        if silent:
            line = f"kernel path of {name}: no log line shows {', '.join(silent)}"
            self.record.remark(line, at_once=False)
        self._judged.setdefault(name, (server, set()))[1].update(wrong)
        return wrong

    def unlogged(self, server: Server) -> str | None:
        """Return why an attached server's log cannot show its attention backend, or None.

        Args:
            server: The server. For a server that the suite has started, the result is None.

        Raises:
            OSError: The log cannot be read.
        """
        is_silent = server.configuration is None and self._profile.engine.speaking_worker
        if not is_silent or self.of(server).attention is not None:
            return None
        return "this engine does not log its attention backend, unless the suite starts it"

    def spanned(self, server: Server) -> spanning.Spanned | None:
        """Judge the ranks of a server on several machines.

        Args:
            server: The server. If its log does not show the transport of every rank, the first call
                sends it one prompt and reads the counters of this machine's RDMA ports.

        Returns:
            The ranks and the faults found in them; None if the profile describes no other nodes.

        Raises:
            OSError: A log cannot be read.
        """
        nodes = self._profile.nodes
        if nodes is None:
            return None
        configuration = server.configuration
        name = configuration.name if configuration is not None else self._profile.under_test
        required = self._profile.path_of(name)
        return spanning.judge_ranks_by_counters(
            server, nodes, required, self._counted, self.record.file.engine.model
        )

    def judge_again(self) -> None:
        """Judge each path that was judged before again, with the current content of the log."""
        self.servers.follow_log()
        for name, (judged, known) in self._judged.items():
            server = (self.servers.last(name) if judged.managed else None) or judged
            assert server.log is not None
            written = server.log.stat().st_mtime_ns if server.log.is_file() else None
            if written in (None, self._judged_at.get(server.log)):
                continue  # the log has not changed
            self._judged_at[server.log] = written
            wrong = [found for found in self._contradictions(server, name) if found not in known]
            if not wrong:
                continue
            known.update(wrong)
            self.record.emit(
                Decided(
                    server_decisions.path_changed(name, wrong, server.log, self.record.phase[1])
                )
            )

    def judge_whole(self, *, unasked: bool) -> None:
        """Judge the paths at the end of the run, when the logs are complete.

        Args:
            unasked: Whether to judge the path of the server under test even if no test has.
        """
        server = self._under_test
        if unasked and server is not None and server.log is not None:
            name = server.configuration.name if server.configuration else self._profile.under_test
            self._judged.setdefault(name, (server, set()))
        self.judge_again()
        if server is not None:
            self.record.emit(EngineShown.of(self.record.file.engine, path=self.of(server)))

    def _contradictions(self, server: Server, name: str) -> list[Contradiction]:
        assert server.log is not None
        path = self.of(server)
        configuration = server.configuration
        patterns = requested.patterns(configuration) if configuration is not None else ()
        required = self._profile.path_of(name, patterns)
        if self.unlogged(server):
            required = required.model_copy(update={"attention": None})
        wrong = requirement.contradictions(required, path, server.log, name)
        if (judged := self.spanned(server)) is not None:
            wrong += judged.wrong
        # An attached server may use other files than those on this machine.
        if configuration is None:
            return wrong
        stated = self._profile.model
        variables = configuration.variables
        other = identity.contradiction(
            stated.id, stated.digest, configuration.model, variables, configuration.revision
        )
        if other:
            wrong.append(Contradiction("model", other, other))
        return wrong

    def _note_nodes(self, server: Server) -> None:
        judged = self.spanned(server)
        if judged is None:
            return
        if self._under_test in (None, server):
            rows = spanning.rows(judged, self.configurations.node_facts)
            self.record.emit(EngineShown.of(self.record.file.engine, nodes=rows))
        for line in judged.remarks:
            self.record.remark(line, at_once=False)
        for line in judged.silent:
            self.record.unproven(line)

    def _note_nccl(self) -> None:
        """Record which NCCL library each node of the server has loaded, and report differences."""
        if self.servers.pool is not None:
            by_node = self.servers.pool.nccl_by_node()
        else:
            by_node = {"node 0 (this machine)": mapped.nccl(self.servers.processes())}
        nccl = {node: [row.model_dump() for row in rows] for node, rows in by_node.items() if rows}
        self.record.emit(EnvironmentNoted("nccl", nccl))
        for line in mapped.different(by_node):
            self.record.remark(line)

    def _metrics_of(self, server: Server) -> str | None:
        """Return the text of the server's metrics, as first read."""
        attached = (
            self.servers.attached.endpoint.base_url if self.servers.attached is not None else None
        )
        # This is one of the two servers of --ab.
        if attached is not None and server.endpoint.base_url != attached:
            return server.endpoint.page("/metrics")
        file = metrics_file(self.record.directory, server.log if server.managed else None)
        if not file.exists():
            running = self.servers.pool.current if self.servers.pool is not None else None
            if server.managed and (running is None or running.launch.log != server.log):
                return None
            text = server.endpoint.page("/metrics")
            if text is None:
                return None
            try:
                write_text(self.record.redact(text), file)
            except OSError as error:
                self.record.cannot_write(error)
                return text
        return file.read_text("utf-8", errors="replace")


def metrics_file(directory: Path, log: Path | None) -> Path:
    """Return the file of the metrics of a server.

    Args:
        directory: The report directory.
        log: The log of a managed server; None for the attached one.
    """
    return directory / f"metrics-{log.stem if log is not None else 'attached'}.txt"
