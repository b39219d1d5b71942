"""The record of a run: its verdict file and ledger, remarks, progress, and the report directory."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sm121.core.printable import printable
from sm121.core.profile_fields import LEVELS
from sm121.core.redaction import redact
from sm121.core.verdict import Verdict
from sm121.run.ledger import Ledger
from sm121.run.verdict_file import VerdictFile


@dataclass(kw_only=True)
class RunRecord(ABC):
    """What a run writes and shows."""

    #: The report directory.
    directory: Path
    #: The verdict file so far. Metrics, memory and remarks are written into it.
    file: VerdictFile
    #: Shows a line of progress; the first argument names its subject.
    say: Callable[[str, str], None]
    #: Whether remarks are shown at once, too.
    verbose: bool = False
    #: The level and the words of where in the run it is, for what is found beside the tests.
    phase: tuple[str, str] = (LEVELS[0], "in the run")
    #: Called when the report cannot be written (see `session.crashes`).
    on_unwritten: Callable[[OSError, str], None] | None = None
    _unwritten: str | None = None

    @property
    @abstractmethod
    def secrets(self) -> set[str]:
        """Values that no report may show."""

    @abstractmethod
    def save(self) -> None:
        """Write verdict.json and summary.md as they stand."""

    @functools.cached_property
    def ledger(self) -> Ledger:
        """The decision on each test."""
        return Ledger(self.file)

    def redact(self, text: str) -> str:
        """Text without secrets."""
        return redact(text, self.secrets)

    def remark(self, line: str, *, at_once: bool = True) -> None:
        """Keep a remark, once: worth knowing, and without effect on any verdict. It is shown
        ``at_once`` too, or only counted at the end."""
        line = printable(self.redact(line))
        if line in self.file.remarks:
            return
        self.file.remarks.append(line)
        if at_once or self.verbose:
            self.say("note", line)

    def unproven(self, line: str) -> None:
        """Keep what could not be checked, once."""
        if line not in self.file.unproven:
            self.file.unproven.append(line)

    def cannot_write(self, error: OSError) -> None:
        """The report cannot be written. Say so once; such a run is never green."""
        if self._unwritten is None:
            self._unwritten = f"the report cannot be written: {error.strerror or error}"
            self.say("report", f"{self.directory}: {self._unwritten}")
            if self.on_unwritten is not None:
                self.on_unwritten(error, self._unwritten)
        self.unproven(self._unwritten)
        if self.file.verdict is Verdict.PASS:
            self.file.settle(Verdict.INCONCLUSIVE)
            self.file.reason = self._unwritten
