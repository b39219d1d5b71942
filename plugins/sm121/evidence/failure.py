"""Find why a server died or did not start, from its log and its exit status.

Most lines of such a log are consequences. The earliest most specific line counts (``rank`` in
``failures.toml``).
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
from sm121.evidence.failure_tables import FailureSignature, any_of, load_failures
from sm121.evidence.log_message import LogLine

#: The rank of an exception of no known kind.
_GENERIC_RANK = 70
#: From this rank on, a line only states that something died.
_DEAD_RANK = 80
QUIET_LEVELS = frozenset({"DEBUG", "INFO", "WARNING"})
_EXCEPTION = re.compile(r"(?:[\w.<>]+\.)?[A-Z]\w*(?:Error|Exception)\b.*:")
_ACCESS_LOG = re.compile(r'"(?:GET|POST|HEAD|OPTIONS) /')
_SERVER_ERROR = re.compile(r"\b5\d\d\b")
#: Numbers of signals on Linux: 1 to 64.
_SIGNAL_NUMBERS = range(1, 65)


class Basis(Enum):
    """The evidence of a cause."""

    STATED = auto()
    """Something names the cause: a line of the log, the kernel, an exit status."""
    SIGKILL_ALONE = auto()
    """Nothing but SIGKILL, so that the OOM killer is a guess."""
    FATAL_EXCEPTION = auto()
    """An exception that ended a process of the engine. The ends of its other processes follow."""
    AFTERMATH = auto()
    """Lines that state that something died, and none above them that states why."""


class Cause(Record):
    """Why a server is dead."""

    kind: str
    """One of `Kind`."""
    summary: str
    """One line: what happened, in the log's own words where it has them."""
    owner: str
    """Who to ask, or what to look at."""
    remedy: str | None = None
    lines: list[str] = Field(default_factory=list)
    """The log lines that this rests on, cleaned, at most 400 characters each."""
    basis: Basis = Field(default=Basis.STATED, exclude=True)
    """Not part of any file."""


def ended(name: str, lines: list[str], *, basis: Basis = Basis.STATED, **words: object) -> Cause:
    """Return the cause of an ending of the data file.

    Args:
        name: The id of the ending.
        lines: The lines that it rests on.
        basis: The evidence.
        words: The words for the braces of its summary.

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


@dataclass(frozen=True, slots=True)
class _Match:
    entry: FailureSignature
    match: re.Match[str]


class _Patterns:
    """The patterns of ``failures.toml`` that each line is searched for."""

    def __init__(self) -> None:
        failures = load_failures()
        self.is_ready = any_of(failures.markers.ready).search
        self.is_stop = any_of(failures.markers.stopped).search
        self.is_fatal = any_of(failures.markers.fatal).search
        self.is_quiet = any_of(failures.markers.quiet).search
        #: Each hint with its signature: all of them, and those of quiet lines too.
        self._hints: list[tuple[str, FailureSignature]] = []
        self._quiet_hints: list[tuple[str, FailureSignature]] = []
        for entry in failures.failure:
            hints = [(hint, entry) for hint in entry.hint]
            self._hints += hints
            if entry.levels == "any":
                self._quiet_hints += hints
        self.bare_hints = {log_lines.without_digits(hint) for hint, _ in self._hints}

    def most_specific(self, line: LogLine, *, ready: bool) -> _Match | None:
        """Return the match of the lowest rank. `ready`: the server has served."""
        is_quiet = line.level in QUIET_LEVELS or self.is_quiet(line.text) is not None
        best: _Match | None = None
        for hint, entry in self._quiet_hints if is_quiet else self._hints:
            if hint not in line.text or (best is not None and entry.rank >= best.entry.rank):
                continue
            if entry.at_start_only and ready:
                continue
            match = entry.search(line)
            if match is not None:
                best = _Match(entry, match)
        return best


@dataclass(slots=True)
class _Hits:
    """The failures that a log has shown so far."""

    #: The first hit of each rank.
    first: dict[int, _Hit] = field(default_factory=dict)
    weak: _Hit | None = None

    def best(self, *, ready: bool, died: bool) -> _Hit | None:
        """Return the hit that explains the end.

        `ready`: the server has served. `died`: it is known to be dead.
        """
        ranks = sorted(self.first)
        if not ranks:
            return self.weak
        best = self.first[ranks[0]]
        if self.weak is not None and self.weak.entry.rank < best.entry.rank:
            return self.weak
        has_died = died or self.states_death()
        if best.entry.rank == _GENERIC_RANK and ready and not has_died:
            return None  # an exception that one request met; the server goes on
        return best

    def states_death(self) -> bool:
        """Return whether a line states that something died."""
        return any(rank >= _DEAD_RANK for rank in self.first)

    def kind_of(self, hit: _Hit) -> str:
        """Return the kind of failure of one of the hits."""
        if hit.entry.rank == _GENERIC_RANK and self.states_death():
            return "engine_dead"
        return hit.entry.kind

    def lines(self, hit: _Hit) -> list[str]:
        """Return the line of a hit, and the lines which state that something died."""
        lines = [hit.line]
        for rank, other in sorted(self.first.items()):
            if rank >= _DEAD_RANK and other.line not in lines:
                lines.append(other.line)
        return lines


class FailureReader:
    """Reads a log line by line and keeps the failures that it shows, in bounded memory.

    Attributes:
        ready: Whether the log shows that the server served.
        stopped: Whether the log shows that the server received the request to stop.
    """

    def __init__(self) -> None:
        self._patterns = _Patterns()
        self._hits = _Hits()
        #: The hit whose details may follow.
        self._latest: _Hit | None = None
        self._last: str | bytes | None = None
        self.ready = False
        self.stopped = False
        self._fatal = False
        #: An exception was named: an indented line behind it is part of its message, and no frame.
        self._in_message = False
        #: The engine went on after the exception that is kept: only a request met it.
        self._went_on = False

    def feed(self, line: LogLine) -> None:
        """Read the next line of the log.

        Args:
            line: The line, joined with its pieces.
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
        """Forget the errors so far: they did not stop the server from starting."""
        self._hits = _Hits()
        self.ready = True
        self.stopped = False
        self._fatal = False

    def _add_detail(self, text: str) -> bool:
        """Add a line to the summary of the hit before it, if it is a detail of it."""
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
            # The exception that is kept was only a request's.
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
        """Read a whole file, ten times as fast as by `feed` of each line.

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
        """Read a line that differs from a plain line in digits alone."""
        self._last = raw
        if self.shows_life(like):
            self.goes_on()

    def is_plain(self, line: LogLine) -> bool:
        """Return whether a line says nothing about a failure, whatever digits it has.

        Args:
            line: The line. The hints of the signatures are not searched.
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
        """Return whether a plain line shows that the engine goes on.

        Args:
            line: The line.
        """
        return line.level == "INFO" and not _ACCESS_LOG.search(line.text)

    def goes_on(self) -> None:
        """Note that a line has shown that the engine goes on."""
        self._hits.weak = None
        self._went_on = True

    def _match(self, line: LogLine) -> _Hit | None:
        if log_message.is_traceback_opening(line):
            self._in_message = False
            return None
        if line.is_frame and not self._in_message:
            return None  # a frame quotes source code, which may hold any message
        line = line.without_indent
        self._in_message = self._in_message or _EXCEPTION.match(line.text) is not None
        best = self._patterns.most_specific(line, ready=self.ready)
        if best is None:
            return None
        excerpt = log_message.cut(line.text, around=best.match.start())
        if best.entry.summary is None:
            return _Hit(best.entry, excerpt, excerpt)
        groups = {name: value or "" for name, value in best.match.groupdict().items()}
        summary = best.entry.summary.format_map(groups | {"line": excerpt})
        return _Hit(best.entry, excerpt, log_message.cut(summary))

    def kind(self) -> str | None:
        """Return the kind of the failure that the log shows, or None."""
        hit = self._hits.best(ready=self.ready, died=False)
        return None if hit is None else self._hits.kind_of(hit)

    def evidence(self) -> str | None:
        """Return the line that `kind` rests on, or None."""
        hit = self._hits.best(ready=self.ready, died=False)
        return None if hit is None else hit.line

    def remedy(self) -> str | None:
        """Return the kind, the remedy and the owner of a failure of a known kind, or None."""
        hit = self._hits.best(ready=self.ready, died=False)
        if hit is None or hit.entry.rank >= _GENERIC_RANK or hit.entry.remedy is None:
            return None
        return f"{hit.entry.kind}: {hit.entry.remedy} (ask: {hit.entry.owner})"

    def cause(self, exit_code: int | None) -> Cause:
        """Return the cause, from the log and from the end of the process.

        Args:
            exit_code: The exit status, as of `classify`.
        """
        hit = self._hits.best(ready=self.ready, died=False)
        if hit is None or hit.entry.rank >= _DEAD_RANK:
            from_status = self._cause_from_status(exit_code, hit)
            if from_status is not None:
                return from_status
        # An exception that one request met counts last: it need not have ended the server.
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
    """The end of a process: the signal that ended it, and the end in words."""

    signal: int | None
    text: str


def _exit_of(exit_code: int | None) -> _Exit:
    """Return the end of a process. A shell has the status 128 + N for signal N, Python -N."""
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
    """Find why a server is dead, from the lines of its log.

    Args:
        lines: The physical lines.
        exit_code: As of `classify`.
    """
    reader = FailureReader()
    for line in log_lines.join_wrapped(lines):
        reader.feed(line)
    return reader.cause(exit_code)


def classify(log: Path, exit_code: int | None = None) -> Cause:
    """Find why a server is dead, from its log.

    Args:
        log: The log.
        exit_code: The exit status as of `subprocess` (negative: the signal) or of a shell (128 +
            signal). None: not known.

    Returns:
        The cause. A SIGKILL without a cause in the log is a *probable* kill by the host's OOM
        killer.

    Raises:
        OSError: The log cannot be read.
    """
    reader = FailureReader()
    reader.read(log)
    return reader.cause(exit_code)


def explain(answer: str) -> str | None:
    """Return the remedy for an error of a server (status 5xx).

    Args:
        answer: The status and the words of the answer.

    Returns:
        The kind, the remedy and its owner; None if the error is not known.
    """
    if not _SERVER_ERROR.search(answer):
        return None
    reader = FailureReader()
    reader.feed(log_message.clean(answer))
    return reader.remedy()
