"""The cells of the measuring plan, each measured on first use."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from sm121.answers import exam
from sm121.answers.oracle_tolerance import bound_for
from sm121.client import completions
from sm121.core.engine_arguments import at_once
from sm121.core.server import Server
from sm121.core.unmet import Fact, Unmet, facts_of, with_subject
from sm121.core.verdict import NotRun, Undecided, Verdict
from sm121.engines import requested
from sm121.evidence.compile_watch import CompileWatch
from sm121.measure import gate
from sm121.measure.cells import Cells, MeasuredCell
from sm121.measure.measured_server import MeasuredServer, Show
from sm121.measure.measurement import Invalidity, Measurement
from sm121.measure.metrics import Metric
from sm121.measure.plan import Plan
from sm121.performance.recorder import Recorder
from sm121.performance.timed_texts import TimedTexts
from sm121.run.events import EnvironmentNoted
from sm121.run.record import ProgressLine
from sm121.run.run import Run

#: Number of rounds when a cell is first measured. The other rounds follow later.
_FIRST_VISIT = 2
#: Number of extra rounds of a cell in the last test of the level.
_LAST_LOOK = 3
#: Maximum number of characters that an INVALID number's reason quotes on its kernel path.
_MOST_EVIDENCE = 500


@dataclass
class Bench:
    """The cells of one server, each measured once.

    `Bench.open` makes one.
    """

    server: MeasuredServer
    plan: Plan
    #: Whether percentiles are measured with as many requests as their gates need.
    tails: bool = False
    #: Returns why the current log contradicts the required kernel path.
    off_path: Callable[[], list[Invalidity]] = list
    #: The metric and the cell of each recorded rate. The keys are the names of the rates.
    recorded: dict[str, tuple[Metric, MeasuredCell]] = field(default_factory=dict)
    #: Compares the texts of timed answers with untimed ones; None if they are not compared.
    texts: TimedTexts | None = None
    #: Returns the profile's known answers that the server no longer gives, each with the actual
    #: answer.
    forgotten: Callable[[], dict[str, str]] = dict
    _latest: MeasuredCell | None = None
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._cells = Cells(self.server)

    @classmethod
    @contextmanager
    def open(
        cls, run: Run, plan: Plan, *, tails: bool = False, show: Show | None = None
    ) -> "Iterator[Bench]":
        """Open the server under test for measuring, and start it if it does not run.

        Args:
            run: The run.
            plan: Lengths, depths and bounds.
            tails: Whether percentiles are measured with as many requests as their gates need.
            show: Called with lines of progress; None: they are the run's.

        Yields:
            The bench.

        Raises:
            NotRun: There is no server to measure.
            StartError: The server did not start.
            Sm121Error: The server accepts neither token ids nor text.
        """
        server = run.server()
        path = _check_path(run, server)
        with MeasuredServer.open(
            server.endpoint,
            plan,
            run.record.directory / "records",
            show=show or (lambda line: run.record.say("measuring", line, ProgressLine.PASSING)),
            invalid=path.invalid,
            unproven=path.unproven,
            natural=drafts(run, server),
            may_draft=run.paths.of(server).speculative != "none",
            compiled=CompileWatch(server.log, server.reader, run.servers.follow_log).new,
        ) as measured:
            if measured.prompts.natural:  # Natural prompts have another plan than random tokens.
                workload = dict(run.record.file.environment.get("workload") or {})
                workload["texts"] = list(measured.prompts.texts)
                run.record.emit(EnvironmentNoted("workload", workload))
            measured.slots = slots(run, server)
            measured.slots_sure = server.managed or requested_slots(run, server) is not None
            measured.context = server.context_tokens()
            facts = exam.load(run.profile.correctness.exam).completions
            unknown_before = exam.unknown(server.endpoint, facts)

            def off_path() -> list[Invalidity]:
                # If the path is invalid, every number is already invalid.
                return [] if path.invalid else _check_path(run, server).invalid

            def forgotten() -> dict[str, str]:
                unknown = exam.unknown(server.endpoint, facts)
                for name in unknown_before:
                    unknown.pop(name, None)
                return unknown

            yield cls(
                server=measured,
                plan=plan,
                tails=tails,
                off_path=off_path,
                texts=texts_of(server, run, plan),
                forgotten=forgotten,
            )

    def cell(
        self, depth: int = 0, concurrency: int = 1, *, first_visit: bool = False
    ) -> MeasuredCell:
        """Return a cell with at least the plan's rounds.

        Args:
            depth: The number of tokens in front of the plan's prompt.
            concurrency: The number of streams at the same time.
            first_visit: Whether to measure only a few rounds now; the others follow later.
        """
        measuring = self.plan.measuring
        rounds = measuring.rounds if concurrency == 1 else measuring.concurrency_rounds
        if first_visit:
            rounds = min(rounds, _FIRST_VISIT)
        self._latest = self._cells.cell(depth, concurrency)
        return self._latest.gather(rounds)

    def read(self, metric: Metric, cell: MeasuredCell) -> Measurement:
        """Return a metric of a cell, checked against the current kernel path.

        Args:
            metric: The metric.
            cell: The cell.
        """
        metric.settle(cell)
        if self.texts is not None:
            self.texts.check_cell(cell)
        measurement = metric.of(cell)
        measurement.invalid = [*measurement.invalid, *self.off_path()]
        return measurement

    def last_look(self, recorder: Recorder, *, unless_latest: bool = False) -> None:
        """Measure the passed metrics and the first depth again, and decide on all rounds together.

        If the server became slower in the meantime, none of its rates passes. Metrics that did not
        pass are not measured again, nor is anything at a second call.

        Args:
            recorder: Contains the decisions on the metrics, and makes the new ones.
            unless_latest: Whether the cell that was measured last gets no further long rounds.

        Raises:
            Unmet: A metric fails now.
            Undecided: A metric is undecided or invalid now, and none fails.
            NotRun: No rate was measured before.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if not self.recorded:
            raise NotRun("no rate was measured before, so there is nothing to measure again")
        profile = recorder.run.profile
        first = self._cells.cell(self.plan.depths[0])
        passed = {
            recorded.measurement.name
            for recorded in recorder.recorded
            if recorded.verdict is Verdict.PASS
        }
        gated = {name for name in self.recorded if profile.gate(name) is not None}
        by_cell: dict[int, list[str]] = {}
        for name, (_, cell) in self.recorded.items():
            if name in passed:
                by_cell.setdefault(id(cell), []).append(name)
        failures: list[Unmet | Undecided] = []
        lost = self.forgotten()
        if lost:
            failures.append(Unmet(Fact("the known answers, as before the measurement", f"{lost}")))
        for names in by_cell.values():
            _, cell = self.recorded[names[0]]
            if cell is not first and gated.isdisjoint(names):
                continue
            rounds = len(cell.timed.long)
            if not (unless_latest and cell is self._latest):
                rounds += _LAST_LOOK
            for name in names:
                metric, _ = self.recorded[name]
                if name in gated:
                    metric.gather_at_the_end(cell, rounds)
                else:
                    cell.gather(rounds)
            for name in names:
                self._decide_again(recorder, name, failures)
        if failures:
            worst = min(failures, key=lambda failure: isinstance(failure, Undecided))
            facts = []
            for failure in failures:
                facts += facts_of(failure)
            raise type(worst)(*facts)

    def _decide_again(
        self, recorder: Recorder, name: str, failures: list[Unmet | Undecided]
    ) -> None:
        """Decide on a metric with all its rounds, and append its failure."""
        metric, cell = self.recorded[name]

        def more(samples: int) -> Measurement:
            metric.gather(cell, samples)
            return self.read(metric, cell)

        try:
            measurement = self.read(metric, cell)
            bound = gate.next_look(measurement.rounds + 1, 2 * measurement.rounds)
            recorder.record(measurement, more, maximum_rounds=bound)
        except (Unmet, Undecided) as failure:
            about = f"{name} passed before, but not in the repeated measurement at the end"
            failures.append(type(failure)(*with_subject(about, facts_of(failure))))


def texts_of(server: Server, run: Run, plan: Plan) -> TimedTexts:
    """Return an object that compares the texts of timed answers with those of untimed answers.

    Args:
        server: The server.
        run: The run.
        plan: Lengths, depths and bounds.
    """
    profile = run.profile
    measuring = plan.measuring
    try:
        bound = bound_for(profile.correctness.agreement, server, profile, "agreement")
    except NotRun:
        bound = None
    asker = completions.Asker(server, timeout_s=measuring.request_within_s)
    return TimedTexts(asker, bound, measuring.vocabulary)


def drafts(run: Run, server: Server) -> bool:
    """Return whether a server uses speculative decoding, as its kernel path or its arguments show.

    Args:
        run: The run.
        server: The server.
    """
    if run.paths.of(server).speculative not in (None, "none"):
        return True
    if server.configuration is None:
        return False
    return any("--speculative" in argument for argument in server.configuration.arguments)


def requested_slots(run: Run, server: Server) -> int | None:
    """Return the number of concurrent requests with which a server was started.

    Args:
        run: The run.
        server: The server.

    Returns:
        The number in its arguments, or in the log of an attached server; None if neither has it.
    """
    if server.configuration is not None:
        return at_once(server.configuration.arguments)
    logged = requested.in_log(run.paths.of(server), "max_num_seqs")
    if logged is None or not logged.isdecimal():
        return None
    return int(logged)


def slots(run: Run, server: Server) -> int | None:
    """Return the number of requests that a server processes at the same time.

    Args:
        run: The run.
        server: The server.

    Returns:
        `requested_slots`; for an attached server without them, the number of the profile.
    """
    requested_number = requested_slots(run, server)
    if requested_number is not None or server.configuration is not None:
        return requested_number
    return at_once(run.profile.arguments_of(None))


class _PathCheck(NamedTuple):
    """Why all numbers of a server are invalid, and which parts of its path were not checked."""

    invalid: list[Invalidity]
    unproven: list[str]


def _check_path(run: Run, server: Server) -> _PathCheck:
    """Check whether a server is on its required kernel path."""
    if server.log is None:
        return _PathCheck([], [f"kernel path: {server.why_no_log}"])
    contradictions = run.paths.contradictions(server)
    if not contradictions:
        return _PathCheck([], [])
    evidence = "; ".join(str(contradiction) for contradiction in contradictions)
    return _PathCheck([Invalidity(reason="kernel_path", evidence=evidence[:_MOST_EVIDENCE])], [])
