"""A conformance run: opened once tests of a level are collected, closed whatever happens."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

import pytest

from sm121.core import architecture
from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.core.printable import printable
from sm121.core.profile import Profile
from sm121.core.redaction import redact, secrets_of
from sm121.core.server import Server
from sm121.core.verdict import NotRun, Verdict
from sm121.engines import devices, preflight, registry, requested, stale
from sm121.engines.managed import StartLimits, StopReport
from sm121.engines.pool import ServerPool
from sm121.engines.preflight import PreflightFinding
from sm121.engines.process_tree import RUN_ID
from sm121.engines.protocol import Program
from sm121.engines.start_progress import StartProgress
from sm121.evidence import cgroup, environment, metrics
from sm121.evidence.kernel_path import KernelPath, read_log
from sm121.evidence.resources import ResourceSampler
from sm121.plugin import certification, target, workers
from sm121.plugin.abilities import inability
from sm121.plugin.options import SETTINGS, Settings
from sm121.plugin.selection import (
    APPLIES_TO,
    ID,
    LEVEL,
    SELECTED,
    architectures_asked_for,
    selects,
)
from sm121.plugin.slow import is_left_out
from sm121.plugin.terminal import announce
from sm121.report import summary
from sm121.run import directory as report_directory
from sm121.run import verdict_file
from sm121.run.harness import Observer
from sm121.run.ledger import Ledger
from sm121.run.verdict_file import (
    EngineReport,
    ShardReport,
    StartReport,
    TestReport,
    VerdictFile,
)

if TYPE_CHECKING:
    from sm121.engines.managed import ServerError
    from sm121.evidence.failure import Cause


@dataclass
class Run:
    """State of one conformance run."""

    config: pytest.Config
    settings: Settings
    target: target.Target
    directory: Path
    #: Held open as long as the run lives: no second run writes into the same directory.
    lock: IO[str]
    file: VerdictFile
    run_id: str
    started: float = field(default_factory=time.monotonic)
    configurations: dict[str, ServerConfiguration] = field(default_factory=dict)
    attached: Server | None = None
    pool: ServerPool | None = None
    #: By the log of the start.
    stops: dict[str, StopReport] = field(default_factory=dict)
    deselected: list[str] = field(default_factory=list)
    #: Tests for other architectures, or beyond the model: no certificate needs them.
    inapplicable: frozenset[str] = frozenset()
    sampler: ResourceSampler | None = None
    interrupted: bool = False
    #: Why nothing more is run, as (class, text): the machine would not survive it.
    aborted: tuple[str, str] | None = None
    #: Watches the server under test while it is under load; a crash bundle has what it saw.
    observer: Observer | None = None
    #: Why nothing that follows could be trusted; None while all is well.
    distrusted: str | None = None
    #: Why the report directory cannot be written, and who is told of it.
    unwritten: str | None = None
    on_unwritten: Callable[[Run, OSError], None] | None = None
    #: The control group's account of memory when the run began.
    cgroup_before: Mapping[str, int] | str = field(default_factory=cgroup.memory_events)
    _under_test: Server | None = None

    @functools.cached_property
    def ledger(self) -> Ledger:
        """What was decided of each test."""
        return Ledger(self.file)

    @property
    def profile(self) -> Profile:
        """The profile in force."""
        if self.target.profile is None:
            raise NotRun(self.target.obstacle or "no profile")
        return self.target.profile

    @property
    def arch(self) -> str:
        """The architecture of the target."""
        return self.target.arch

    @property
    def secrets(self) -> set[str]:
        """What no report may show."""
        keys = {self.settings.api_key} if self.settings.api_key else set()
        return keys | self._secrets_given | (self.pool.secrets if self.pool else set())

    @functools.cached_property
    def _secrets_given(self) -> set[str]:
        """By the names of their variables: in the suite's environment, and by --engine-env."""
        return secrets_of(os.environ) | secrets_of(dict(self.settings.engine_environment))

    def redact(self, text: str) -> str:
        """Text without secrets."""
        return redact(text, self.secrets)

    @functools.cached_property
    def findings(self) -> list[PreflightFinding]:
        """What the machine and the choices promise for a start; looked at once, before it."""
        found: list[PreflightFinding] = []
        for name in (self.profile.under_test, self.profile.baseline):
            configuration = self.managed_configuration(name)
            environment = self.engine_environment(configuration)
            for finding in preflight.inspect(
                self.target.arch,
                configuration.arguments,
                environment,
                needs=self.profile.engine.needs,
                directory=self.directory,
            ):
                if finding not in found:
                    found.append(finding)
        for finding in found:
            notable = finding.severity != "note"
            label = f"{finding.severity}: " if notable else ""
            self.remark(f"{label}{finding.message}", at_once=notable)
        return found

    def server(self, configuration: str | None = None) -> Server:
        """The attached server, or the managed one of a configuration (default: under test).

        Raises:
            NotRun: another configuration than the attached server's was asked for.
            StartError: it does not start.
        """
        name = configuration or self.profile.under_test
        if self.attached is not None:
            if name != self.profile.under_test:
                raise NotRun(
                    f"configuration {name} cannot be started beside an attached server; "
                    "run without --base-url"
                )
            self._describe(self.attached)
            return self.attached
        if self.pool is None:
            raise NotRun(self.target.obstacle or "no server")
        unfit = [finding for finding in self.findings if finding.severity == "error"]
        if unfit:
            raise NotRun(f"no server is started on a machine that is not fit: {unfit[0].message}")
        self._refuse_when_aborted()
        server = self.pool.get(self.configurations[name])
        if name == self.profile.under_test:
            self._describe(server)
        return server

    def start(self, configuration: ServerConfiguration) -> Server:
        """The managed server of any configuration, the profile's or one made of an axis.

        Raises:
            NotRun: nothing is started in this run.
            StartError: it does not start.
        """
        if self.pool is None:
            raise NotRun(self.target.obstacle or "no server can be started here")
        self._refuse_when_aborted()
        return self.pool.get(configuration)

    def stop(self) -> StopReport | None:
        """Stop the server that runs; None when none does, or it is attached."""
        return self.pool.stop() if self.pool is not None else None

    def obstacle(self) -> str | None:
        """Why no server is started any more; None while all is well."""
        if self.aborted is not None:
            return self.aborted[1]
        if self.distrusted is not None:
            return self.distrusted
        unfit = [finding for finding in self.findings if finding.severity == "error"]
        if unfit:
            return f"no server is started on a machine that is not fit: {unfit[0].message}"
        return None

    def crashed(self, error: ServerError, test: str | None) -> Cause:
        """After an abnormal end: a bundle, one line, and a look at what is left of the server."""
        from sm121.plugin import crashes

        managed = self.pool.latest if self.pool is not None else None
        evidence = crashes.gather(self, test or "", error, managed)
        evidence.test = test
        crashes.tell(self, evidence)
        crashes.replace_server(self, evidence)
        return evidence.cause

    def say(self, what: str, line: str) -> None:
        """Show progress of long work at once."""
        announce(self.config, what, line)

    def _refuse_when_aborted(self) -> None:
        if self.aborted is not None:
            raise NotRun(f"the run was ended: {self.aborted[1]}")

    def managed_configuration(self, name: str) -> ServerConfiguration:
        """A configuration that the suite starts itself.

        Raises:
            NotRun: the server is attached.
        """
        if name not in self.configurations:
            raise NotRun("the server is attached: what it was started with is not known")
        return self.configurations[name]

    def engine_environment(self, configuration: ServerConfiguration) -> Mapping[str, str]:
        """The environment in which the engine of a configuration runs."""
        return registry.engine(configuration.engine).environment(configuration, api_key="")

    def remark(self, line: str, *, at_once: bool = True) -> None:
        """Something that a person should know and that decides nothing.

        Args:
            at_once: it is also said in the terminal, now. What is not is only counted at the end.
        """
        line = printable(self.redact(line))
        self.file.remarks.append(line)
        if at_once or self.config.option.verbose > 0:
            announce(self.config, "note", line)

    def kernel_path(self, server: Server) -> KernelPath:
        """What log and metrics prove at this moment, and what was asked for."""
        reader = server.engine if server.managed else "vllm"
        path = read_log(server.log, reader) if server.log is not None else KernelPath()
        if (text := self._metrics_of(server)) is not None:
            path = metrics.with_metrics(path, text)
        if server.configuration is None:
            return path
        return requested.judged(server.configuration, path)

    def _metrics_of(self, server: Server) -> str | None:
        """The metrics as they were when the server was first looked at; kept in the report."""
        name = server.log.stem if server.managed and server.log is not None else "attached"
        kept = self.directory / f"metrics-{name}.txt"
        if not kept.exists():
            text = metrics.fetch(server.endpoint)
            if text is None:
                return None
            try:
                write_text(self.redact(text), kept)
            except OSError as error:
                self._cannot_write(error)
                return text
        return kept.read_text("utf-8", errors="replace")

    def save(self) -> None:
        """Write verdict.json and summary.md as they stand."""
        self.file.duration_s = round(time.monotonic() - self.started, 3)
        if self.pool is not None:
            self.file.starts = [
                StartReport(
                    configuration=start.configuration,
                    key=start.key,
                    startup_s=start.startup_s,
                    log=start.log,
                    clean_stop=_clean(self.stops.get(start.log)),
                )
                for start in self.pool.starts
            ]
        if self.sampler is not None:
            self.file.environment["resources"] = self.sampler.resources.model_dump(mode="json")
        self.file.judge()
        if self.file.finished:
            certification.conclude(self)
        ended = next((c for c in self.file.crashes if c.kind == "memory_floor"), None)
        if ended is not None and self.file.verdict is Verdict.PASS:
            # What did run held; the machine did not stand the rest of it.
            self.file.settle(Verdict.INCONCLUSIVE)
            self.file.reason = f"the run was ended: {ended.summary}"
        try:
            verdict_file.write(self.file, self.directory / "verdict.json")
            write_text(summary.markdown(self.file), self.directory / "summary.md")
        except OSError as error:
            self._cannot_write(error)

    def write_groups(self, items: list[pytest.Item]) -> None:
        """Tell the controller what of this worker belongs together."""
        try:
            workers.write_groups(self.directory, items)
        except OSError as error:
            self._cannot_write(error)

    def _cannot_write(self, error: OSError) -> None:
        """A report that cannot be written is no verdict: said once, and never green."""
        if self.unwritten is None:
            self.unwritten = f"the report cannot be written: {error.strerror or error}"
            announce(self.config, "report", f"{self.directory}: {self.unwritten}")
            if self.on_unwritten is not None:
                self.on_unwritten(self, error)
        if self.unwritten not in self.file.unproven:
            self.file.unproven.append(self.unwritten)
        if self.file.verdict is Verdict.PASS:
            self.file.settle(Verdict.INCONCLUSIVE)
            self.file.reason = self.unwritten

    def close(self) -> None:
        """Stop what runs and write the last word. The run has finished when every selected test
        had its turn and nobody interrupted it, whatever pytest says of its end."""
        if self.sampler is not None:
            self.sampler.stop()
        if self.pool is not None and self.pool.current is not None:
            self.pool.stop()
        if self._under_test is not None:  # the whole log now, with what came while it served
            self.file.engine.path = self.kernel_path(self._under_test)
        self.file.finished = self.ledger.complete and not self.interrupted
        self.save()

    def note_stop(self, configuration: str, report: StopReport) -> None:
        """A server was stopped."""
        self.stops[report.log] = report
        if not report.clean:
            self.ledger.decide(_unclean(report.log.removesuffix(".log") or configuration, report))
        if report.remark:
            self.remark(f"after server {configuration}: {report.remark}")
            self.ledger.decide(_doubted(configuration, report))

    def abort(self, text: str) -> None:
        """The machine is about to wedge: end the server at once, and run nothing more."""
        first = self.aborted is None
        self.aborted = self.aborted or ("memory_floor", text)
        if self.pool is not None and self.pool.latest is not None:
            self.pool.latest.kill()
        if first:
            self.remark(text)

    def log_of(self, configuration: str) -> Path | None:
        """Log of the latest start of a configuration in this run, None if it was not started."""
        starts = self.pool.starts if self.pool is not None else []
        logs = [start.log for start in starts if start.configuration == configuration]
        return self.directory / logs[-1] if logs else None

    def _describe(self, server: Server) -> None:
        if server is self._under_test:
            return
        self._under_test = server
        self.file.engine.path = self.kernel_path(server)
        self.file.engine.base_url = server.endpoint.base_url
        self.file.engine.startup_s = server.startup_s
        # What the running engine says of itself counts for more than what was installed.
        said = server.version or self.file.engine.path.version
        if said is not None:
            self.file.engine.version = said


#: Which part of a run this is, with --shard.
SHARD = pytest.StashKey[ShardReport]()
RUN = pytest.StashKey[Run]()
_OLD_HANDLERS = pytest.StashKey[dict[signal.Signals, Any]]()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if LEVEL in item.stash and not is_left_out(item):
            item.config.stash.setdefault(certification.DESELECTED, []).append(item.stash[ID])


@pytest.hookimpl(tryfirst=True)  # before xdist tells its controller that all is collected
def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    if not config.stash.get(SELECTED, False):
        return  # pytest calls this also after a collection that was refused
    items = [item for item in session.items if LEVEL in item.stash]
    expression = config.getoption("markexpr", "") or ""
    asked = architectures_asked_for(expression)
    deselected = config.stash.get(certification.DESELECTED, [])
    if not items and not deselected:
        return
    try:
        settings = config.stash[SETTINGS]
        if settings.certify and workers.of(config) is None:
            certification.refuse_a_selection(config)
        chosen = target.resolve(settings, asked)
        if (
            chosen.obstacle is None
            and items
            and not any(selects(expression, item, chosen.arch) for item in items)
        ):
            # The tests are also for the target, but it was not the target that they were chosen by.
            obstacle = f"-m {expression!r} selects no test for {chosen.arch}, which is the target"
            chosen = dataclasses.replace(chosen, obstacle=obstacle)
        for item in items:
            _mark(item, chosen)
        if not config.option.collectonly:
            config.stash[RUN] = run = _open(config, chosen, items)
            run.deselected = deselected
            run.file.shard = config.stash.get(SHARD, None)
            if workers.of(config) is not None:
                run.write_groups(session.items)
            run.save()
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error


def _mark(item: pytest.Item, chosen: target.Target) -> None:
    """Say at the test why it does not run, or how long it may take."""
    names = item.stash[APPLIES_TO]
    if chosen.obstacle is not None:
        item.add_marker(pytest.mark.skip(reason=f"NOT_RUN: {chosen.obstacle}"))
    elif chosen.arch not in names:
        reason = f"applies to {', '.join(sorted(names))}; the target is {chosen.arch}"
        item.add_marker(pytest.mark.skip(reason=reason))
    elif cannot := inability(item, chosen.profile):
        item.add_marker(pytest.mark.skip(reason=f"NOT_RUN: {cannot}"))
    elif chosen.profile is not None and item.get_closest_marker("timeout") is None:
        limit = chosen.profile.test_timeout_s.get(item.stash[LEVEL])  # type: ignore[call-overload]
        if limit is not None:
            item.add_marker(pytest.mark.timeout(limit))


def _open(config: pytest.Config, chosen: target.Target, items: list[pytest.Item]) -> Run:
    settings = config.stash[SETTINGS]
    engine = EngineReport(name=settings.engine, managed=True, model=settings.model or "")
    profile_name = chosen.profile.name if chosen.profile else "none"
    if chosen.profile is not None:
        engine.model = settings.model or chosen.profile.model.id
        engine.configuration = chosen.profile.under_test
    attached = None
    if chosen.obstacle is None and chosen.profile is not None:
        # Everything that can be wrong with what was asked for is found before the first start.
        attached = target.attached_server(settings, chosen.profile)
        if attached is None:
            engine.version = target.engine_version(settings, chosen.profile)
        else:
            engine.name, engine.managed = attached.engine, False
            engine.model = attached.endpoint.served_name
    run_id = uuid.uuid4().hex[:12]
    worker = workers.of(config)
    taken = report_directory.take(settings.report_dir, worker.run if worker else None)
    directory = taken.path
    if worker is not None:
        run_id = f"{run_id}-{worker.id}"
        directory = taken.path / report_directory.WORKERS / worker.id
        directory.mkdir(parents=True)
        settings = dataclasses.replace(settings, report_dir=directory)  # traces are its own too
    elif taken.earlier is not None:
        announce(config, "report", f"the earlier one is kept in {taken.earlier}")
    run = Run(
        config=config,
        settings=settings,
        target=chosen,
        directory=directory,
        lock=taken.lock,
        run_id=run_id,
        attached=attached,
        inapplicable=frozenset(
            item.stash[ID]
            for item in items
            if chosen.arch not in item.stash[APPLIES_TO] or inability(item, chosen.profile)
        ),
        file=VerdictFile(
            arch=chosen.arch,
            profile=profile_name,
            started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            engine=engine,
            tests=[
                TestReport(
                    id=item.stash[ID],
                    level=item.stash[LEVEL],
                    verdict=Verdict.NOT_RUN,
                    message="not reached",
                )
                for item in items
            ],
        ),
    )
    if chosen.obstacle is None and chosen.profile is not None:
        _prepare_engine(run, chosen.profile)
    os.environ[RUN_ID] = run_id
    end_on_signals(run)
    return run


def _prepare_engine(run: Run, chosen: Profile) -> None:
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = dict(os.environ)
    if run.attached is None:
        worker = workers.of(run.config)
        for of, left in stale.remove():
            shown = "; ".join(str(process) for process in left)
            run.remark(
                f"a server of run {of}, which is dead, was still there and was ended: {shown}"
            )
        run.configurations = target.configurations(
            run.settings,
            chosen,
            root=run.config.rootpath,
            notify=lambda line: announce(run.config, "canary", line),
        )
        run.pool = ServerPool(
            limits=StartLimits(
                ready_s=chosen.engine.ready_within_s.value,
                stalled_s=chosen.engine.stalled_after_s,
                stop_s=chosen.engine.stop_within_s,
            ),
            directory=run.directory,
            run_id=run.run_id,
            notify=StartProgress(
                lambda name, line: announce(run.config, f"server {name}", line),
                everything=run.config.option.verbose > 0,
            ),
            on_stop=run.note_stop,
            hidden=lambda: run.secrets,
            device=None
            if worker is None
            else devices.lock(worker.id, worker.run, architecture.gpu_count()),
        )
        run.sampler = ResourceSampler(
            run.pool.processes,
            floor_bytes=chosen.stress.memory_floor_gib.value * 2**30,
            on_floor=run.abort,
            on_trouble=run.remark,
        )
        run.sampler.start()
        under_test = run.configurations[chosen.under_test]
        run.file.engine.model = under_test.model
        arguments = under_test.arguments
        variables.update(under_test.environment)
    else:
        run.file.unproven.extend(_unproven(run.attached))
    record = environment.record(
        # A program has no packages of its own; the record is then of the suite's environment.
        sys.executable
        if isinstance(registry.engine(run.settings.engine), Program)
        else run.settings.engine_python,
        arguments=arguments,
        environment=variables,
        workload={
            "prompt_tokens": chosen.performance.prompt_tokens,
            "generated_tokens": list(chosen.performance.generated_tokens),
            "depths": list(run.settings.depths or chosen.performance.depths),
        },
    )
    run.file.environment = record.model_dump(mode="json")


def _unproven(server: Server) -> list[str]:
    if server.log is not None:
        return []
    return ["kernel path: the attached server's log is not known; give --server-log"]


def _clean(report: StopReport | None) -> bool | None:
    return None if report is None else report.clean


def _unclean(name: str, report: StopReport) -> TestReport:
    left = "; ".join(str(survivor) for survivor in report.survivors) or "no process"
    return TestReport(
        id=f"end of the run::{name}",
        level="smoke",
        verdict=Verdict.FAIL,
        message=(
            "required: nothing left after the server was stopped; seen: "
            f"{left}; port free: {report.port_free}; "
            f"memory missing: {report.memory_missing_bytes / 2**30:.1f} GiB"
        ),
    )


def _doubted(name: str, report: StopReport) -> TestReport:
    return TestReport(
        id=f"end of the run::device memory after {name}",
        level="smoke",
        verdict=Verdict.INCONCLUSIVE,
        message=(
            "required: what a stopped server held of the device is free again; "
            f"seen: {report.remark}. End what else uses the GPU and run again, or run where all "
            "processes are seen (docker run --pid=host)"
        ),
    )


def end_on_signals(run: Run) -> None:
    """SIGTERM ends the run as Ctrl-C does: fixtures are torn down, the server is stopped.

    The first signal counts. A second one must not break off the stopping that the first began.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if run.interrupted:
            return
        run.interrupted = True
        raise KeyboardInterrupt(signal.Signals(number).name)

    run.config.stash[_OLD_HANDLERS] = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }


@pytest.hookimpl(trylast=True)  # after pytest has torn down the fixtures
def pytest_sessionfinish(session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
    run = session.config.stash.get(RUN, None)
    if run is None:
        return
    run.interrupted = run.interrupted or exitstatus == pytest.ExitCode.INTERRUPTED
    run.close()
    if workers.of(session.config) is not None:
        session.config.workeroutput["sm121"]["closed"] = True  # type: ignore[attr-defined]
    if run.interrupted or exitstatus == pytest.ExitCode.INTERNAL_ERROR:
        return
    own = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if run.file.exit_status != 0 or exitstatus in own:
        session.exitstatus = run.file.exit_status
    # Else something failed that is no test of a level: pytest's own status stands.


def pytest_unconfigure(config: pytest.Config) -> None:
    run = config.stash.get(RUN, None)
    if run is not None and run.pool is not None and run.pool.stop() is not None:
        run.save()
    if run is not None:
        run.lock.close()
    for number, handler in config.stash.get(_OLD_HANDLERS, {}).items():
        signal.signal(number, handler)
