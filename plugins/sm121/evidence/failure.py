"""Find why a server died or did not start, from its log and its exit status.

Most error lines in such a log are consequences of an earlier error. The cause is taken from the
most specific line (``rank`` in ``failures.toml``), and from the first of several such lines.
"""

import re
import signal as signals
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from pydantic import Field

from sm121.core import data_file
from sm121.core.data_file import Record
from sm121.evidence import log_lines, log_message
from sm121.evidence.failure_patterns import Patterns
from sm121.evidence.failure_tables import FailureSignature, load_failures
from sm121.evidence.frames import Frames, Place
from sm121.evidence.log_message import LogLine

#: The rank of exceptions that no signature matches.
_GENERIC_RANK = 70
#: Lines with at least this rank only state that a process died.
_DEAD_RANK = 80
#: The beginnings of lines in the log of a compiler.
_LABELS = ("", "error: ", "fatal: ", "note: ")
_ACCESS_LOG = re.compile(r'"(?:GET|POST|HEAD|OPTIONS) /')
_SERVER_ERROR = re.compile(r"\b5\d\d\b")
#: The numbers of signals on Linux.
_SIGNAL_NUMBERS = range(1, 65)


class Basis(Enum):
    """The kind of evidence for a cause."""

    STATED = auto()
    """The log, the kernel or an exit status states the cause."""
    SIGKILL_ALONE = auto()
    """The only evidence is SIGKILL; the OOM killer is a guess."""
    FATAL_EXCEPTION = auto()
    """An exception ended a process of the engine, and its other processes ended as a result."""
    AFTERMATH = auto()
    """The log only states that a process died. No earlier line states the cause."""


class Cause(Record):
    """The cause of a server's death."""

    kind: str
    """One of `Kind`."""
    summary: str
    """What happened, in one line; quoted from the log if possible."""
    owner: str
    """Who can fix it, or what to check."""
    remedy: str | None = None
    lines: list[str] = Field(default_factory=list)
    """The log lines on which the cause is based, cleaned, at most 400 characters each."""
    basis: Basis = Field(default=Basis.STATED, exclude=True)
    """The kind of evidence. This field is not written to files."""


def ended(name: str, lines: list[str], *, basis: Basis = Basis.STATED, **words: object) -> Cause:
    """Return the cause for one of the endings in ``failures.toml``.

    Args:
        name: The id of the ending.
        lines: The lines on which the cause is based.
        basis: The kind of evidence.
        words: The values for the placeholders in the texts `summary` and `owner`.

    Raises:
        DataFileError: There is no such ending.
    """
    ending = data_file.named(load_failures().ending, name, "ending")
    return Cause(
        kind=ending.kind,
        summary=ending.summary.format_map(words),
        owner=ending.owner.format_map(words),
        remedy=ending.remedy,
        lines=lines,
        basis=basis,
    )


@dataclass(slots=True)
class _Hit:
    """A line that shows a failure."""

    entry: FailureSignature
    line: str
    summary: str
    #: The summary without the quoted line; empty if the summary is that line.
    steady: str = ""


@dataclass(slots=True)
class _Hits:
    """The failures in the log so far."""

    #: The first matching line of each rank; the keys are ranks.
    first: dict[int, _Hit] = field(default_factory=dict)
    weak: _Hit | None = None

    def best(self, *, ready: bool, died: bool) -> _Hit | None:
        """Return the hit that explains the server's end.

        `ready` means that the server was ready before. `died` means that the server is known to be
        dead.
        """
        ranks = sorted(self.first)
        if not ranks:
            return self.weak
        best = self.first[ranks[0]]
        if self.weak is not None and self.weak.entry.rank < best.entry.rank:
            return self.weak
        has_died = died or self.states_death()
        if best.entry.rank == _GENERIC_RANK and ready and not has_died:
            return None  # an exception of a single request; the server continues
        return best

    def states_death(self) -> bool:
        """Return whether a line states that a process died."""
        return any(rank >= _DEAD_RANK for rank in self.first)

    def kind_of(self, hit: _Hit) -> str:
        """Return the kind of failure of one of the hits."""
        if hit.entry.rank == _GENERIC_RANK and self.states_death():
            return "engine_dead"
        return hit.entry.kind

    def lines(self, hit: _Hit) -> list[str]:
        """Return the log line of a failure, and the lines which state that a process died."""
        lines = [hit.line]
        for rank, other in sorted(self.first.items()):
            if rank >= _DEAD_RANK and other.line not in lines:
                lines.append(other.line)
        return lines


class FailureReader:
    """Reads a log line by line and collects its failures, in bounded memory.

    Attributes:
        ready: Whether the log shows that the server became ready.
        stopped: Whether the log shows that a stop of the server was requested.
    """

    def __init__(self) -> None:
        self._patterns = Patterns()
        self._hits = _Hits()
        #: The last matching line, if lines with details may follow it.
        self._latest: _Hit | None = None
        self._last: str | bytes | None = None
        self.ready = False
        self.stopped = False
        self._fatal = False
        self._frames = Frames()
        #: Whether the engine continued after the stored exception. If it did, the exception
        #: affected only one request.
        self._went_on = False

    def feed(self, line: LogLine) -> None:
        """Read the next line of the log.

        Args:
            line: The line, joined with its continuation lines.
        """
        text = line.text
        self._last = text
        if self._patterns.is_ready(text):
            self._note_ready()
            return
        if self._patterns.is_stop(text):
            self.stopped = True
            return
        if self._add_detail(text):
            return
        if not self.stopped and self._patterns.is_fatal(text):
            self._note_fatal()
        hit = self._match(line)
        if hit is not None:
            self._keep(hit)
        elif self.shows_life(line):
            self.goes_on()

    def _note_ready(self) -> None:
        """Discard all errors found so far, because they did not prevent the server's start."""
        self._hits = _Hits()
        self.ready = True
        self.stopped = False
        self._fatal = False

    def _add_detail(self, text: str) -> bool:
        """Add a line to the summary of the last hit, if the line contains a detail of that hit."""
        if self._latest is None:
            return False
        detail = self._latest.entry.detail
        if detail is None or detail.match(text) is None:
            self._latest = None
            return False
        self._latest.summary = log_message.cut(f"{self._latest.summary} {text.strip()}")
        return True

    def _note_fatal(self) -> None:
        if self.ready and self._went_on and not self._fatal:
            # The engine continued after the stored exception, so the exception affected only one
            # request.
            self._hits.first.pop(_GENERIC_RANK, None)
        self._fatal = True

    def _keep(self, hit: _Hit) -> None:
        if hit.entry.weak:
            self._hits.weak = hit
            return
        rank = hit.entry.rank
        is_aftermath = self.stopped and rank >= _GENERIC_RANK
        if rank not in self._hits.first and not is_aftermath:
            self._hits.first[rank] = hit
            self._latest = hit
            self._went_on = False

    def read(self, log: Path) -> None:
        """Read a whole file, ten times as fast as by calling `feed` for each line.

        Args:
            log: The log.

        Raises:
            OSError: The file cannot be read.
        """
        for line in log_lines.read_new_lines(log, self._means_nothing, self._take_plain):
            self.feed(line)

    def _means_nothing(self, line: LogLine) -> bool:
        text = log_lines.without_digits(line.text)
        return self.is_plain(line) and not any(hint in text for hint in self._patterns.bare_hints)

    def _take_plain(self, raw: bytes, like: LogLine) -> None:
        """Read a line that differs only in its digits from a line for which `is_plain` is true."""
        self._last = raw
        if self.shows_life(like):
            self.goes_on()

    def is_plain(self, line: LogLine) -> bool:
        """Return whether a line is irrelevant to failures, even with other digits.

        Args:
            line: The line, which is known to contain no hint of a signature.
        """
        text = line.text
        return not (
            line.is_indented
            or log_message.is_traceback_opening(line)
            or self._patterns.is_ready(text)
            or self._patterns.is_stop(text)
        )

    @staticmethod
    def shows_life(line: LogLine) -> bool:
        """Return whether a plain line shows that the engine continues to run.

        Args:
            line: The line.
        """
        return line.level == "INFO" and not _ACCESS_LOG.search(line.text)

    def goes_on(self) -> None:
        """Record that the engine continued to run after the last error."""
        self._hits.weak = None
        self._went_on = True

    def _match(self, line: LogLine) -> _Hit | None:
        place = self._frames.place_of(line)
        if place is Place.STACK:
            return None  # a stack frame quotes source code, which may contain any message
        line = line.without_indent
        best = self._patterns.most_specific(line, ready=self.ready)
        cut = self._patterns.of_cut_line(line, ready=self.ready)
        if best is None or (cut is not None and cut.entry.rank < best.entry.rank):
            best = cut
        if best is None:
            return None
        if place is Place.UNKNOWN and line.text[: best.start] not in _LABELS:
            return None  # source code does not begin with a message
        excerpt = log_message.cut(line.text, around=best.start)
        if best.entry.summary is None or best.match is None:
            return _Hit(best.entry, excerpt, excerpt)
        groups = {name: value or "" for name, value in best.match.groupdict().items()}
        summary = best.entry.summary.format_map(groups | {"line": excerpt})
        steady = best.entry.summary.format_map(groups | {"line": ""}).rstrip(": ")
        return _Hit(best.entry, excerpt, log_message.cut(summary), steady)

    def kind(self) -> str | None:
        """Return the kind of the failure that the log shows, or None."""
        hit = self._hits.best(ready=self.ready, died=False)
        return None if hit is None else self._hits.kind_of(hit)

    def evidence(self) -> str | None:
        """Return the line on which the result of `kind` is based, or None."""
        hit = self._hits.best(ready=self.ready, died=False)
        return None if hit is None else hit.line

    def steady(self) -> str:
        """Return the summary of the failure without the quoted line, which differs between runs.

        Returns:
            Empty if the failure is not known, or if its summary is the line.
        """
        hit = self._hits.best(ready=self.ready, died=False)
        return "" if hit is None else hit.steady

    def remedy(self) -> str | None:
        """Return a text with kind, remedy and owner, if the kind of the failure is known."""
        hit = self._hits.best(ready=self.ready, died=False)
        if hit is None or hit.entry.rank >= _GENERIC_RANK or hit.entry.remedy is None:
            return None
        return f"{hit.entry.kind}: {hit.entry.remedy} (ask: {hit.entry.owner})"

    def cause(self, exit_code: int | None) -> Cause:
        """Return the cause of the server's end, from the log and the exit status of the process.

        Args:
            exit_code: The exit status, as in `classify`.
        """
        hit = self._hits.best(ready=self.ready, died=False)
        if hit is None or hit.entry.rank >= _DEAD_RANK:
            from_status = self._cause_from_status(exit_code, hit)
            if from_status is not None:
                return from_status
        # An exception of a single request is only the last choice, because it may not have ended
        # the server.
        hit = hit or self._hits.best(ready=self.ready, died=True)
        if hit is None:
            return ended("unknown", self._last_line(), how=_exit_of(exit_code).text)
        lines = self._hits.lines(hit)
        if hit.entry.rank >= _DEAD_RANK:
            cause = ended("aftermath", lines, basis=Basis.AFTERMATH, line=hit.summary)
            changed = {"kind": hit.entry.kind, "summary": log_message.cut(cause.summary)}
            return cause.model_copy(update=changed)
        is_fatal = hit.entry.rank == _GENERIC_RANK and (self._fatal or not self.ready)
        return Cause(
            kind=self._hits.kind_of(hit),
            summary=hit.summary,
            owner=hit.entry.owner,
            remedy=hit.entry.remedy,
            lines=lines,
            basis=Basis.FATAL_EXCEPTION if is_fatal else Basis.STATED,
        )

    def _last_line(self) -> list[str]:
        if not self._last:
            return []
        if isinstance(self._last, bytes):
            self._last = log_message.clean(self._last.decode("utf-8", errors="replace")).text
        return [log_message.cut(self._last)] if self._last else []

    def _cause_from_status(self, exit_code: int | None, hit: _Hit | None) -> Cause | None:
        status = _exit_of(exit_code)
        lines = [hit.line] if hit is not None else self._last_line()
        if status.signal == signals.SIGKILL:
            return ended("sigkill_alone", lines, basis=Basis.SIGKILL_ALONE)
        if status.signal == signals.SIGILL:
            return ended("sigill", lines)
        if status.signal not in (None, signals.SIGTERM, signals.SIGINT):
            return ended("other_signal", lines, how=status.text)
        if hit is not None:
            return None
        if self.stopped or status.signal is not None:
            return ended("told_to_stop", lines, how=status.text)
        if exit_code == 0:
            return ended("status_0", lines)
        return None


@dataclass(frozen=True, slots=True)
class _Exit:
    """The end of a process: the signal that ended it, if any, and a description."""

    signal: int | None
    text: str


def _exit_of(exit_code: int | None) -> _Exit:
    """Interpret an exit status. For signal N, a shell reports 128 + N, and Python reports -N."""
    if exit_code is None:
        return _Exit(None, "exit status not known")
    number = -exit_code if exit_code < 0 else exit_code - 128
    if exit_code >= 0 and number not in _SIGNAL_NUMBERS:
        return _Exit(None, f"exited with status {exit_code}")
    try:
        name = signals.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return _Exit(number, f"killed by {name}")


def classify_lines(lines: Iterable[str], exit_code: int | None = None) -> Cause:
    """Find why a server died, from the lines of its log.

    Args:
        lines: The physical lines.
        exit_code: As in `classify`.
    """
    return read_lines(lines).cause(exit_code)


def read_lines(lines: Iterable[str]) -> FailureReader:
    """Return a reader that has read the lines of a log.

    Args:
        lines: The physical lines.
    """
    reader = FailureReader()
    for line in log_lines.join_wrapped(lines):
        reader.feed(line)
    return reader


def classify(log: Path, exit_code: int | None = None) -> Cause:
    """Find why a server died, from its log.

    Args:
        log: The log.
        exit_code: The exit status as reported by `subprocess` (negative: the signal) or by a shell
            (128 + signal). None if it is unknown.

    Returns:
        The cause. A SIGKILL without a cause in the log is reported as a *probable* kill by the
        host's OOM killer.

    Raises:
        OSError: The log cannot be read.
    """
    reader = FailureReader()
    reader.read(log)
    return reader.cause(exit_code)


def explain(answer: str) -> str | None:
    """Return the remedy for an error response of a server (status 5xx).

    Args:
        answer: The status and the text of the response.

    Returns:
        A text with the kind, the remedy and the owner; None if the error is unknown.
    """
    if not _SERVER_ERROR.search(answer):
        return None
    reader = FailureReader()
    reader.feed(log_message.clean(answer))
    return reader.remedy()
