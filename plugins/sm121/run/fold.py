"""Computes verdict.json, details.json and the cells of matrix.json from the events of a run."""

from collections.abc import Iterable

from sm121.core.verdict import INTERRUPTED, Verdict
from sm121.run import events
from sm121.run.cell_record import CellRecord
from sm121.run.details import Details
from sm121.run.events import Event, Opened, Stamped
from sm121.run.ledger import Ledger
from sm121.run.machine_report import MEMORY_FLOOR
from sm121.run.verdict_file import TestReport, VerdictFile


def begun(opened: Opened) -> VerdictFile:
    """Return the verdict file of a run at its beginning.

    Args:
        opened: The first event.
    """
    return VerdictFile(
        arch=opened.arch,
        profile=opened.profile,
        question=opened.question,
        started=opened.started,
        engine=opened.engine,
        certificate_levels=opened.certificate_levels,
    )


def fold(stream: Iterable[Stamped]) -> VerdictFile:
    """Return the verdict file of a run, computed from its events.

    Args:
        stream: The events, `Opened` first.

    Returns:
        The file. Without the event `Closed` the run has not finished, and the verdict follows from
        the tests so far.

    Raises:
        ValueError: The first event is not `Opened`.
    """
    result = replay(stream)
    result.settle()
    return result.file


def replay(stream: Iterable[Stamped]) -> "Fold":
    """Return the state of a run after its events.

    Args:
        stream: The events, `Opened` first.

    Raises:
        ValueError: The first event is not `Opened`.
    """
    result: Fold | None = None
    at_s = 0.0
    for stamped in stream:
        at_s = stamped.at_s
        if result is not None:
            result.apply(stamped.event)
        elif isinstance(stamped.event, Opened):
            result = Fold(begun(stamped.event))
        else:
            raise ValueError(f"expected the event opened first, got {stamped.event.kind}")
    if result is None:
        raise ValueError("expected events, got none")
    if result.closed is None:
        result.file.duration_s = at_s
    return result


class Fold:
    """Keeps the verdict file of a run up to date with its events.

    Args:
        file: The verdict file after the first events.

    Attributes:
        file: The verdict file. `settle` updates the verdicts of its levels and of the run.
        ledger: The verdict on each test.
        details: The content of details.json.
        cells: The cells of the matrix with an outcome. After a resumption, those without a result
            are removed, because they are examined again.
        references: Starts of the baseline that are no cells of this run, for comparison only.
        closed: The event of the run's end; None while the run is in progress.
        halted: Why no further test runs; None if tests run.
    """

    def __init__(self, file: VerdictFile) -> None:
        self.file = file
        self.ledger = Ledger(file)
        self.details = Details()
        self.cells: list[CellRecord] = []
        self.references: list[CellRecord] = []
        self.closed: events.Closed | None = None
        self.halted: str | None = None
        self._clean_stops: dict[str, bool] = {}

    def settle(self) -> None:
        """Set the verdicts of the levels and of the run, unless the event `Closed` has set them."""
        self.file.judge()
        self.file.reason = self.file.why()
        if self.closed is not None:
            self.file.settle(self.closed.verdict)
            self.file.reason = self.closed.reason
            if self.closed.interrupted:
                self.file.exit_status = INTERRUPTED

    def apply(self, event: Event) -> None:
        """Apply an event.

        Args:
            event: The event; not `Opened`.
        """
        file = self.file
        match event:
            case events.Collected():
                self._collect(event)
            case events.EnvironmentRead():
                file.environment = event.environment
                file.fingerprint = event.fingerprint
            case events.EnvironmentNoted():
                file.environment[event.name] = event.value
            case events.EngineShown():
                file.engine = event.engine
            case events.StartEnded() | events.ServerStopped():
                self._note_server(event)
            case events.Died():
                file.crashes.append(event.crash)
                if event.crash.kind == MEMORY_FLOOR:
                    self.halted = f"the run was ended: {event.crash.summary}"
            case events.Distrusted():
                self.halted = event.why
            case events.Measured():
                file.metrics[event.name] = event.metric
            case events.CellExamined():
                chosen = self.references if event.is_reference else self.cells
                chosen.append(event.cell)
            case events.BoxRead():
                file.box = event.box
            case events.MemoryRead():
                file.memory = event.memory
            case events.Changed():
                file.changes = event.changes
            case events.Compared():
                file.against = event.against
            case events.Remarked():
                file.remarks.append(event.line)
            case events.Unproven():
                file.unproven.append(event.line)
            case (
                events.Described() | events.FailureShown() | events.Sampled() | events.HistoryRead()
            ):
                self._show(event)
            case events.Opened() | events.ServerAttached() | events.ServerStarting():
                pass
            case _:
                self._decide(event)

    def _show(
        self,
        event: events.Described | events.FailureShown | events.Sampled | events.HistoryRead,
    ) -> None:
        """Apply an event that changes details.json."""
        details = self.details
        match event:
            case events.Described():
                details.command = event.command
                details.requirements |= event.requirements
            case events.FailureShown():
                others = [each for each in details.failures if each.id != event.failure.id]
                details.failures = [*others, event.failure]
            case events.Sampled():
                details.samples.pop(event.name, None)
                details.samples[event.name] = event.samples
            case events.HistoryRead():
                details.history = event.history
                details.findings = event.findings

    def _collect(self, event: events.Collected) -> None:
        for test in event.tests:
            self.file.tests.append(
                TestReport(
                    id=test.id, level=test.level, verdict=Verdict.NOT_RUN, message="not reached"
                )
            )
        self.ledger = Ledger(self.file)
        self.file.shard = event.shard

    def _note_server(self, event: events.StartEnded | events.ServerStopped) -> None:
        """Apply the end of a server's start, or its stop.

        If a start failed, the event of the stop comes before the event of the start.
        """
        if isinstance(event, events.StartEnded):
            self.file.starts.append(event.start)
        else:
            self._clean_stops[event.log] = event.clean
        for start in self.file.starts:
            start.clean_stop = self._clean_stops.get(start.log)

    def _decide(
        self,
        event: events.Decided
        | events.Overruled
        | events.UndecidedDropped
        | events.Resumed
        | events.Closed,
    ) -> None:
        """Apply a verdict on a test, or a decision on the whole run."""
        if isinstance(event, events.Closed):
            self.closed = event
            self.file.finished = event.finished
            self.file.certified = event.certified
            self.file.no_oracle = event.no_oracle
            self.file.duration_s = event.duration_s
            return
        self.closed = None
        self.file.finished = False
        match event:
            case events.Decided():
                self.ledger.decide(event.test)
            case events.Overruled():
                self.ledger.overrule(event.test, event.verdict, event.message)
            case events.UndecidedDropped():
                self.ledger.drop_undecided()
            case events.Resumed():
                self.ledger.reopen(event.again)
                self.cells[:] = [cell for cell in self.cells if cell.ended]
