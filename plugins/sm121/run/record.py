"""The target of a run, and the record of a run: its verdict file, directory, remarks, progress."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sm121.core.printable import printable
from sm121.core.profile import Profile
from sm121.core.profile_fields import LEVELS
from sm121.core.redaction import redact
from sm121.core.verdict import NotRun
from sm121.engines.registry import Installed
from sm121.run import events
from sm121.run.cell_record import CellRecord
from sm121.run.event_log import EventLog
from sm121.run.events import Event
from sm121.run.ledger import Ledger
from sm121.run.verdict_file import VerdictFile


@dataclass(frozen=True)
class Target:
    """What a run judges: an architecture, a profile and an engine."""

    arch: str
    #: The profile of the run. The release of a managed engine is known from the beginning, the
    #: release of an attached engine after the first request.
    profile: Profile | None
    #: The reason why this machine cannot judge the target; None if it can.
    obstacle: str | None
    engine: Installed = field(default_factory=Installed)

    def require_profile(self) -> Profile:
        """Return the profile of the run.

        Raises:
            NotRun: This machine cannot judge the target.
        """
        if self.profile is None:
            raise NotRun(self.obstacle or "no profile")
        return self.profile


class ProgressLine(enum.Enum):
    """How long a progress line is shown."""

    #: The line stays on the screen.
    NOTE = "note"
    #: The line names what the run waits for. The next line replaces it.
    PASSING = "passing"
    #: The line reports the end of a wait, and stays on the screen.
    READY = "ready"


class Say(Protocol):
    """Shows a progress line."""

    def __call__(self, what: str, line: str, kind: ProgressLine = ProgressLine.NOTE) -> None:
        """Show a line.

        Args:
            what: The subject of the line.
            line: The line.
            kind: How long the line is shown.
        """


@dataclass(kw_only=True)
class RunRecord:
    """Writes the files and the progress lines of a run."""

    directory: Path
    log: EventLog
    #: Shows a progress line.
    say: Say
    #: The values that no report may contain. Each started server adds its own.
    secrets: set[str] = field(default_factory=set)
    #: Whether each remark is also shown at once.
    verbose: bool = False
    #: The level and the phase of the run, as texts, for decisions that no test makes.
    phase: tuple[str, str] = (LEVELS[0], "in the run")
    #: The id of the test that runs; None between two tests, and without pytest.
    test: str | None = None
    #: The first error of a write operation on the report; None if it was written.
    write_error: OSError | None = None

    @property
    def file(self) -> VerdictFile:
        """The verdict file after the events so far. Only `emit` changes it."""
        return self.log.fold.file

    @property
    def ledger(self) -> Ledger:
        """The verdict on each test. Only `emit` changes it."""
        return self.log.fold.ledger

    @property
    def cells(self) -> Sequence[CellRecord]:
        """The cells of the matrix that have an outcome. Only `emit` changes them."""
        return self.log.fold.cells

    @property
    def references(self) -> Sequence[CellRecord]:
        """Cells with the baseline that only serve as a reference for the cells of this run."""
        return self.log.fold.references

    @property
    def halted(self) -> str | None:
        """The reason why the run executes no further test; None if it continues."""
        return self.log.fold.halted

    @property
    def unwritten(self) -> str | None:
        """Why the report could not be written; None if it could."""
        if self.write_error is None:
            return None
        return f"the report cannot be written: {self.write_error.strerror or self.write_error}"

    def enter(self, level: str, place: str, test: str | None = None) -> None:
        """Store which level and place the run has reached, for decisions that belong to no test.

        Args:
            level: The level.
            place: The place in words.
            test: The id of the test that begins; None between two tests.
        """
        self.phase = (level, place)
        self.test = test

    def emit(self, event: Event) -> None:
        """Append an event to ``run.jsonl``, and apply it to the verdict file.

        Args:
            event: The event.
        """
        try:
            self.log.append(event)
        except OSError as error:
            self.cannot_write(error)

    def resume(self, stream: events.EventStream) -> None:
        """Continue the events of the run that was killed in this report directory.

        Args:
            stream: Its events.

        Raises:
            OSError: The file cannot be written.
        """
        self.log = EventLog.resume(self.directory / events.NAME, stream)

    def start_anew(self) -> None:
        """Replace the ``run.jsonl`` of a killed run by a new one with the events so far.

        Raises:
            OSError: The file cannot be written.
        """
        self.log.begin(self.directory / events.NAME)

    def redact(self, text: str) -> str:
        """Return a text without secrets.

        Args:
            text: Any text.
        """
        return redact(text, self.secrets)

    def remark(self, line: str, *, at_once: bool = True) -> None:
        """Record a remark, unless it is already recorded. A remark changes no verdict.

        Args:
            line: The remark.
            at_once: Whether the remark is also shown now; if not, it is only counted at the end.
        """
        line = printable(self.redact(line))
        if line in self.file.remarks:
            return
        self.emit(events.Remarked(line))
        if at_once or self.verbose:
            self.say("note", line)

    def unproven(self, line: str) -> None:
        """Record a property that could not be checked, unless it is already recorded.

        Args:
            line: The property and the reason.
        """
        if line not in self.file.unproven:
            self.emit(events.Unproven(line))

    def cannot_write(self, error: OSError) -> None:
        """Report, once, that the report cannot be written. The run can then no longer be PASS.

        Args:
            error: The error of the write operation.
        """
        is_first = self.write_error is None
        self.write_error = self.write_error or error
        why = str(self.unwritten)
        if is_first:
            self.say("report", f"{self.directory}: {why}")
        self.unproven(why)
