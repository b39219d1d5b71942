"""The target of a run, and its record: verdict file, report directory, remarks and progress."""

import enum
from collections.abc import Callable
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
from sm121.run.event_log import EventLog
from sm121.run.events import Event
from sm121.run.ledger import Ledger
from sm121.run.verdict_file import VerdictFile


@dataclass(frozen=True)
class Target:
    """The architecture, the profile and the engine that a run judges."""

    arch: str
    #: The profile in force. The release of a managed engine is known; that of an attached one is
    #: known when it is probed.
    profile: Profile | None
    #: Why the target cannot be judged here; None if it can.
    obstacle: str | None
    engine: Installed = field(default_factory=Installed)

    def require_profile(self) -> Profile:
        """Return the profile in force.

        Raises:
            NotRun: The target cannot be judged here.
        """
        if self.profile is None:
            raise NotRun(self.obstacle or "no profile")
        return self.profile


class ProgressLine(enum.Enum):
    """How long a line of progress is shown."""

    #: It is kept on the screen.
    NOTE = "note"
    #: It names the current wait, until the next line comes.
    PASSING = "passing"
    #: It ends a wait, and is kept.
    READY = "ready"


class Say(Protocol):
    """Shows a line of progress."""

    def __call__(self, what: str, line: str, kind: ProgressLine = ProgressLine.NOTE) -> None:
        """Show a line.

        Args:
            what: Its subject.
            line: The line.
            kind: How long it is shown.
        """


@dataclass(kw_only=True)
class RunRecord:
    """The files and the lines that a run writes."""

    directory: Path
    log: EventLog
    #: Shows a line of progress.
    say: Say
    #: The values that no report may show. Those of each server are added when it is started.
    secrets: set[str] = field(default_factory=set)
    #: Whether all remarks are shown at once, too.
    verbose: bool = False
    #: The level, and the place in the run in words, for decisions beside the tests.
    phase: tuple[str, str] = (LEVELS[0], "in the run")
    #: Called when the report cannot be written (see `session.crashes`).
    on_unwritten: Callable[[OSError, str], None] | None = None
    #: Why the report could not be written; None if it could.
    unwritten: str | None = None

    @property
    def file(self) -> VerdictFile:
        """The verdict file of the events so far. `emit` changes it, and nothing else."""
        return self.log.fold.file

    @property
    def ledger(self) -> Ledger:
        """The decision on each test. `emit` changes it, and nothing else."""
        return self.log.fold.ledger

    def emit(self, event: Event) -> None:
        """Let an event happen: append it to ``run.jsonl``, and fold it into the verdict file.

        Args:
            event: The event.
        """
        try:
            self.log.append(event)
        except OSError as error:
            self.cannot_write(error)

    def redact(self, text: str) -> str:
        """Return a text without secrets.

        Args:
            text: Any text.
        """
        return redact(text, self.secrets)

    def remark(self, line: str, *, at_once: bool = True) -> None:
        """Keep a remark, once. A remark has no effect on any verdict.

        Args:
            line: The remark.
            at_once: Whether it is shown at once too, or only counted at the end.
        """
        line = printable(self.redact(line))
        if line in self.file.remarks:
            return
        self.emit(events.Remarked(line))
        if at_once or self.verbose:
            self.say("note", line)

    def unproven(self, line: str) -> None:
        """Keep a property that could not be checked, once.

        Args:
            line: The property and the reason.
        """
        if line not in self.file.unproven:
            self.emit(events.Unproven(line))

    def cannot_write(self, error: OSError) -> None:
        """Report once that the report cannot be written. The run is then never PASS.

        Args:
            error: The error of the write.
        """
        if self.unwritten is None:
            self.unwritten = f"the report cannot be written: {error.strerror or error}"
            self.say("report", f"{self.directory}: {self.unwritten}")
            if self.on_unwritten is not None:
                self.on_unwritten(error, self.unwritten)
        self.unproven(self.unwritten)
