"""A session: one run from its opening to its final report."""

import functools
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from sm121.checkpoint import identity
from sm121.core import files
from sm121.core.redaction import secrets_of
from sm121.core.unmet import Fact
from sm121.core.verdict import NotRun, Severity, Verdict
from sm121.engines import protocol, registry
from sm121.engines.endings import StopReport
from sm121.engines.followed_log import FollowedLog
from sm121.performance.recorder import Recorder
from sm121.regression import measured
from sm121.report import summary
from sm121.run import directory as report_directory
from sm121.run import events, served, verdict_file
from sm121.run.directory import ReportDirectory
from sm121.run.fingerprint import Fingerprint, FingerprintDifference
from sm121.run.record import ProgressLine
from sm121.run.run import Run
from sm121.run.verdict_file import TestReport
from sm121.session import against, ending, unused_waivers
from sm121.session.crashes import CrashDesk
from sm121.session.kernel_judge import KernelJudge
from sm121.session.settings import Settings

#: Between tests, /health is requested at most once within this time, because hundreds of tests may
#: follow each other quickly.
_LATELY_S = 1.0


@dataclass
class SelectedTests:
    """Facts about the tests of a run, for the decisions at its end."""

    #: Ids of the collected tests, selected or not.
    collected: Collection[str] = ()
    #: Ids of tests that -m, -k or --deselect removed.
    deselected: Sequence[str] = ()
    #: Ids of tests that no certificate requires: for other architectures, or beyond the model's
    #: abilities.
    inapplicable: set[str] = field(default_factory=set)
    #: Returns whether the options of this run select a test that is not among its tests.
    asks_for: Callable[[verdict_file.TestReport], bool] = lambda _test: True


@dataclass(kw_only=True)
class Session:
    """One run of the suite, with or without pytest: it opens, judges and ends its `run`."""

    run: Run
    settings: Settings
    #: The report directory. It stays locked during the session, so that no other run writes to it.
    report: ReportDirectory
    run_id: str
    #: Reports abnormal ends of servers, and writes their crash bundles.
    crashes: CrashDesk
    selected: SelectedTests = field(default_factory=SelectedTests)
    #: Judges the messages of the Linux kernels.
    kernel: KernelJudge = field(init=False)
    interrupted: bool = False
    #: The attached server's log, if it is a stream.
    followed_log: FollowedLog | None = None
    #: Reads the environment again at the end; None if no server can be started.
    _read_environment: Callable[[], events.EnvironmentRead] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.kernel = KernelJudge(self.run, self.settings.engine.launcher, self.crashes.before)

    @functools.cached_property
    def recorder(self) -> Recorder:
        """The recorder of measurements; it contains all measurements so far."""
        return Recorder(self.run, self.settings.target.model)

    @property
    def severities_needed(self) -> Collection[Severity]:
        """The severities whose failures count in this run."""
        if self.run.target.profile is None:
            return tuple(Severity)
        needed = self.run.target.profile.severities
        if self.settings.judging.certify:
            return needed.certificate
        if self.settings.judging.against is None:
            return needed.verdict
        return needed.against

    @property
    def engine_interpreter(self) -> str:
        """The interpreter that imports the engine.

        Raises:
            NotRun: The engine is a program without a Python package.
        """
        engine = registry.engine(self.settings.engine.name)
        if isinstance(engine, protocol.Program):
            raise NotRun(f"{engine.program} is an executable, which no Python interpreter imports")
        return self.settings.engine.python

    def record_environment(self, read: Callable[[], events.EnvironmentRead]) -> None:
        """Record the environment and the fingerprint. `close` reads them again and compares.

        Args:
            read: Reads the environment as it is now.
        """
        self._read_environment = read
        self.run.record.emit(read())

    def interrupt(self) -> None:
        """Note that the run was interrupted, so it does not count as finished."""
        self.interrupted = True
        self.run.servers.interrupted = True

    def before_test(self, test: str, level: str) -> None:
        """Check the server before a test, so that the test is not blamed for an earlier end.

        Args:
            test: The test's id.
            level: Its level.
        """
        run = self.run
        if level != run.record.phase[0]:
            run.log_errors.judge()
            run.paths.judge_again()
            self.kernel.judge()
            self.note_resources()
        self._look(level, f"before {test}")
        run.record.enter(level, f"in {test}", test)
        self.crashes.begin_test()

    def after_test(self, test: str, level: str) -> None:
        """Check the server after a test that has ended and is decided.

        Args:
            test: The test's id.
            level: Its level.
        """
        self._look(level, f"after {test}")

    def _look(self, level: str, where: str) -> None:
        self.run.record.enter(level, where)
        self.crashes.after_unwritten(self.run.servers)
        self.run.servers.look(lately_s=_LATELY_S)

    def write_verdict(self) -> None:
        """Write verdict.json and summary.md of the events so far."""
        run = self.run
        run.record.log.fold.settle()
        try:
            verdict_file.write(run.record.file, run.record.directory / verdict_file.NAME)
            files.write_text(summary.markdown(run.record.file), run.record.directory / "summary.md")
        except OSError as error:
            run.record.cannot_write(error)

    def note_resources(self) -> None:
        """Record the memory of the server and of the machine so far."""
        sampler = self.run.servers.sampler
        if sampler is not None:
            resources = sampler.resources.model_dump(mode="json")
            self.run.record.emit(events.EnvironmentNoted("resources", resources))

    def _end(self, *, finished: bool) -> None:
        """Set the verdict of the run and write it. If writing fails, the run is not PASS."""
        run = self.run
        self.note_resources()
        for _attempt in range(2):
            gaps = ending.CertificateGaps(
                self.selected.deselected, self.selected.inapplicable, self.kernel.unread
            )
            closed = ending.closed(
                run.record,
                self.settings,
                run.target,
                gaps,
                finished=finished,
                interrupted=self.interrupted,
            )
            run.record.emit(closed)
            self.write_verdict()
            self.crashes.after_unwritten(run.servers)
            if run.record.unwritten is None:
                return

    def server_stopped(self, configuration: str, report: StopReport) -> None:
        """Judge what a stopped server left behind, the kernel messages, and its complete log.

        Args:
            configuration: The name of the server's configuration.
            report: The report of the stop.
        """
        self.run.servers.note_stop(configuration, report)
        for node, kernel in report.kernels.items():
            self.kernel.judge_messages(kernel, f" of {node}")
        self.run.paths.judge_again()

    def close(self) -> None:
        """Stop the server, and write the final report.

        The run has finished if every selected test has a verdict and the run was not interrupted.
        """
        run = self.run
        if run.servers.sampler is not None:
            run.servers.sampler.stop()
        run.log_errors.judge()  # This is for an attached server, which is not stopped.
        self.kernel.judge()
        run.servers.stop()
        self._judge_what_was_started()
        run.paths.judge_whole(unasked=self.settings.judging.certify)
        if run.target.profile is not None:
            kernels = served.list_tested_kernels(run.record.file, run.paths.to_judge())
            run.record.emit(events.EngineShown.of(run.record.file.engine, served=kernels))
        if run.servers.kept_log is not None:
            run.servers.kept_log.close(run.record.secrets)
        if self.followed_log is not None:
            if self.followed_log.lost is not None:
                run.record.unproven(f"kernel path: {self.followed_log.lost}")
            self.followed_log.close()
        if self.settings.worker is not None:
            run.record.emit(events.UndecidedDropped())
        for line in unused_waivers.remarks(self.settings.judging.waivers, run.record.file.tests):
            run.record.remark(line, at_once=False)
        finished = run.record.ledger.complete and not self.interrupted
        if finished:
            self._record_comparison()
        self._end(finished=finished)

    def _judge_what_was_started(self) -> None:
        """Make the run INVALID if the engine's packages or the checkpoint changed during the run.

        A part of the run has then tested another build than the report names.
        """
        run = self.run
        before = run.record.file.fingerprint
        pool = run.servers.pool
        if before is None or self._read_environment is None or pool is None or not pool.starts:
            return
        try:
            now = self._read_environment().fingerprint
        except OSError as error:
            others = [FingerprintDifference("model's digest", "known", f"{error}", "model")]
        else:
            others = before.differences(now) if now is not None else []
        changed = []
        for each in others:
            if _is_of_the_judged(each, before) and each.one and each.other:
                changed.append(f"{each.name} {each.one}, at the end {each.other}")
        if changed:
            fact = Fact(
                "no change of the engine, the checkpoint or a package that computes during the run",
                "; ".join(changed),
            )
            name = f"{verdict_file.BESIDE}what was started"
            decision = TestReport.of(name, "smoke", fact, verdict=Verdict.INVALID)
            run.record.emit(events.Decided(decision))

    def _record_comparison(self) -> None:
        """Record everything that is worse than in the trusted run."""
        run = self.run
        settings = self.settings
        if settings.judging.against is None or run.target.obstacle is not None:
            return
        comparison = self.compare_with_trusted()
        run.record.emit(events.Compared(comparison.report))
        run.record.emit(events.Changed(comparison.changes))
        for entry in comparison.worse:
            # A certificate does not depend on the comparison, and only reports it.
            if not settings.judging.certify:
                run.record.emit(events.Decided(entry))

    def compare_with_trusted(self) -> against.TrustedComparison:
        """Compare the run so far with the trusted run, and record nothing."""
        trusted = self.settings.judging.against
        now = measured.of_this_run(self.recorder)
        assert trusted is not None
        metrics = now.metrics if now is not None else {}
        reasons = {each.measurement.name: each.reason for each in self.recorder.recorded}
        return against.compare_with_trusted(
            self.run.record.file, trusted, self.run.profile, metrics, self.selected.asks_for,
            reasons,
        )  # fmt: skip

    def release(self) -> None:
        """Stop a server that was started after the run's end, and unlock the report directory."""
        finished = self.run.record.file.finished
        if self.run.servers.stop() is not None:
            self._end(finished=finished)
        self.report.lock.close()

    def say_where_the_earlier_report_is(self) -> None:
        """Show where the earlier report was moved to."""
        earlier = self.report.earlier
        if earlier is not None:
            self.run.record.say("report", f"the earlier one is kept in {earlier}")

    def withdraw(self) -> None:
        """End a refused run that has not begun. It leaves no report."""
        run = self.run
        run.record.say = _say_nothing  # a thread that still records finds no report directory
        if run.servers.sampler is not None:
            run.servers.sampler.stop()
        if run.servers.kept_log is not None:
            run.servers.kept_log.close(run.record.secrets)
        # Otherwise the folder belongs to the run that is to be resumed.
        if run.record.log.path is not None:
            report_directory.restore(run.record.directory, self.report.earlier)
        self.report.lock.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_raised: object) -> None:
        try:
            self.close()
        finally:
            self.release()


def _say_nothing(what: str, line: str, kind: ProgressLine = ProgressLine.NOTE) -> None:
    """Show no line."""


def _is_of_the_judged(difference: FingerprintDifference, before: Fingerprint) -> bool:
    """Return whether a difference between two records concerns the build or the checkpoint."""
    if difference.field == "sources":
        return difference.key in before.sources and difference.key != "suite"
    return difference.field == "model" and not identity.is_name(difference.one or "")


def secrets_given(settings: Settings) -> set[str]:
    """Return the secrets in the environment and the settings, which no report may contain.

    Args:
        settings: The settings of the run.
    """
    secrets = secrets_of(os.environ) | secrets_of(dict(settings.engine.environment))
    given = settings.attached
    if given is not None and given.api_key:
        secrets.add(given.api_key)
    return secrets
