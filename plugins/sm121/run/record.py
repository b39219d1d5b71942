"""What a run judges, and its record: its verdict file, the decision on each test by its id (one way
to decide, and one way to decide again), remarks, progress, and the report directory."""

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sm121.core.printable import printable
from sm121.core.profile import Profile
from sm121.core.profile_fields import LEVELS
from sm121.core.redaction import redact
from sm121.core.verdict import Verdict, worst
from sm121.engines.registry import Installed
from sm121.run.verdict_file import TestReport, VerdictFile


def stands(first: TestReport, second: TestReport) -> TestReport:
    """Which of two decisions on one test stands: of a test that ran before one of one that did not;
    else the worse one, a waived failure being better than another; of equal ones the first."""
    if first.executed != second.executed:
        return first if first.executed else second
    return first if worst((first.counted, second.counted)) is first.counted else second


class Ledger:
    """The decisions of a run: the ``tests`` of its verdict file, in the same order."""

    def __init__(self, file: VerdictFile) -> None:
        self._file = file
        self._places = {test.id: position for position, test in enumerate(file.tests)}
        self._decided: set[str] = set()

    def __contains__(self, test_id: object) -> bool:
        return test_id in self._places

    def __getitem__(self, test_id: str) -> TestReport:
        return self._file.tests[self._places[test_id]]

    def __iter__(self) -> Iterator[TestReport]:
        return iter(self._file.tests)

    @property
    def complete(self) -> bool:
        """Whether every selected test was decided."""
        return self._decided >= self._places.keys()

    def decide(self, decision: TestReport) -> None:
        """Note the decision on a test, or on something beside the tests. The first decision on a
        test replaces "not reached". Of two decisions `stands` chooses one."""
        position = self._places.get(decision.id)
        if position is None:
            self._places[decision.id] = len(self._file.tests)
            self._file.tests.append(decision)
        elif decision.id in self._decided:
            self._file.tests[position] = stands(self._file.tests[position], decision)
        else:
            self._file.tests[position] = decision
        self._decided.add(decision.id)

    def drop_undecided(self) -> None:
        """Leave out the tests that were not decided: another worker has them."""
        self._file.tests = [test for test in self._file.tests if test.id in self._decided]
        self._places = {test.id: position for position, test in enumerate(self._file.tests)}

    def overrule(self, test_id: str, verdict: Verdict, message: str) -> None:
        """Decide again. The new decision replaces any earlier one; the message says why. Raises
        KeyError: the ledger has no such test."""
        test = self[test_id]
        test.verdict, test.message = verdict, message


@dataclass(frozen=True)
class Target:
    """What a run judges. ``obstacle`` says why it cannot run here; None when it can."""

    arch: str
    #: As it judges: a managed engine's release is known, an attached one's when it is probed.
    profile: Profile | None
    obstacle: str | None
    engine: Installed = field(default_factory=Installed)


class ProgressLine(enum.Enum):
    """How long a line of progress is of interest."""

    #: It is kept on the screen.
    NOTE = "note"
    #: It says what is waited for, until the next one comes.
    PASSING = "passing"
    #: It ends what was waited for, and is kept.
    READY = "ready"


class Say(Protocol):
    """Shows a line of progress."""

    def __call__(self, what: str, line: str, kind: ProgressLine = ProgressLine.NOTE) -> None:
        """Show a line. `what` names its subject."""


@dataclass(kw_only=True)
class RunRecord(ABC):
    """What a run writes and shows."""

    directory: Path
    file: VerdictFile
    #: Shows a line of progress.
    say: Say
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
