"""Why a server died or did not start, read from its log and its exit status. Most of such a log are
consequences: the earliest most specific line counts (``rank`` in ``failures.toml``)."""

import re
import signal as signals
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from sm121.core import data_file
from sm121.core.data_file import DataTable, Entries, Record, Regex
from sm121.evidence import log_lines, log_message, signatures
from sm121.evidence.log_message import LogLine

Kind = Literal[
    "oom", "illegal_memory_access", "illegal_instruction", "unsupported_arch", "no_kernel",
    "kernel_launch", "device_assert", "jit_build", "xid", "ecc", "nan", "import_error",
    "checkpoint", "vocabulary", "disk", "hang", "nccl", "garbage_output", "engine_dead", "port",
    "config", "busy_gpu", "unknown",
]  # fmt: skip

_GENERIC_RANK = 70
_DEAD_RANK = 80
QUIET_LEVELS = frozenset({"DEBUG", "INFO", "WARNING"})
_EXCEPTION = re.compile(r"(?:[\w.<>]+\.)?[A-Z]\w*(?:Error|Exception)\b.*:")
_ACCESS_LOG = re.compile(r'"(?:GET|POST|HEAD|OPTIONS) /')


class Basis(Enum):
    """What a cause rests on."""

    STATED = auto()
    """Something names the cause: a line of the log, the kernel, an exit status."""
    SIGKILL_ALONE = auto()
    """Nothing but SIGKILL, so that the OOM killer is a guess."""
    FATAL_EXCEPTION = auto()
    """An exception that ended a process of the engine. How that was swept up is no cause."""
    AFTERMATH = auto()
    """Lines that say that something died, and none above them that says why."""


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


class FailureSignature(signatures.LinePattern):
    """A line that says why a server is dead."""

    kind: Kind
    rank: int = Field(ge=1, le=99)
    """Lower is more specific."""
    levels: Literal["error", "any"] = "error"
    never_green: bool = False
    """A server that prints this line has failed, at any level, even one that goes on to serve."""
    weak: bool = False
    """True when the line counts only if no line after it shows that the engine goes on."""
    at_start_only: bool = False
    """True when the same line, once the server serves, is about a single request."""
    summary: str | None = None
    """Template of the summary: groups of `regex`, and ``{line}``. The line itself without one."""
    detail: Regex | None = None
    """Lines right behind this one that match are added to the summary."""
    owner: str
    remedy: str | None = None

    @model_validator(mode="after")
    def _check_summary(self) -> "FailureSignature":
        if self.summary is not None:
            groups = dict.fromkeys(self.regex.groupindex, "") | {"line": ""}
            try:
                self.summary.format_map(groups)
            except (KeyError, ValueError, IndexError) as error:
                raise ValueError(
                    f"summary may name {', '.join(sorted(groups))}; {error!r}"
                ) from error
        return self


class _Markers(DataTable):
    ready: tuple[Regex, ...] = Field(min_length=1)
    """It serves."""
    stopped: tuple[Regex, ...] = Field(min_length=1)
    """It was asked to stop."""
    fatal: tuple[Regex, ...] = Field(min_length=1)
    """A process of it says of itself that an exception ends it. One that is killed says nothing."""
    error: tuple[Regex, ...] = ()
    """An error, where no level is read."""
    quiet: tuple[Regex, ...] = Field(min_length=1)
    """No error, where a level is read only in the message."""
    of_gpu: tuple[str, ...] = ()
    """Ids of the failures that the kernel reports of the GPU."""
    of_host: tuple[Regex, ...] = ()
    """Messages of the kernel about the host after which no result is sure."""
    engine_process: tuple[Regex, ...] = Field(min_length=1)
    """Names of processes that run the model or schedule requests: no exception there is healthy."""
    engine_frame: tuple[Regex, ...] = Field(min_length=1)
    """Frames of stacks of those processes, where the line does not name its process."""


class AcceptedError(DataTable):
    """An error that a healthy server logs, such as the refusal of a request of the suite."""

    id: str
    regex: Regex
    """On the message, or on the exception under its traceback."""
    traceback: bool = False
    """Whether the traceback right under the message is of it, whatever its exception."""
    engine: str
    """``any`` for all of them."""
    reason: str = Field(min_length=3)
    source: str = Field(min_length=3)


class Ending(DataTable):
    """A cause that no line of the log states, and what is said of it."""

    id: str
    kind: str
    summary: str
    """Template: whoever finds the cause knows the words for its braces."""
    owner: str
    remedy: str | None = None


class FailureSet(DataTable):
    """All that is known of failures; the same for every engine."""

    markers: _Markers
    failure: Entries[FailureSignature]
    ending: Entries[Ending]
    accepted: Entries[AcceptedError]


def load_failures() -> FailureSet:
    """The known failures. Raises DataFileError when the file is wrong."""
    return data_file.load("signatures/failures.toml", FailureSet)


def ended(name: str, lines: list[str], *, basis: Basis = Basis.STATED, **words: object) -> Cause:
    """The cause of an ending of the data file, ``words`` put into its summary."""
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
    entry: FailureSignature
    line: str
    summary: str


class FailureReader:
    """Reads a log line by line and keeps what it says about a failure, in bounded memory."""

    def __init__(self) -> None:
        failures = load_failures()
        self._is_ready = any_of(failures.markers.ready).search
        self._is_stop = any_of(failures.markers.stopped).search
        self._is_fatal = any_of(failures.markers.fatal).search
        self._is_quiet = any_of(failures.markers.quiet).search
        self._hints = [(hint, entry) for entry in failures.failure for hint in entry.hint]
        self._hints_quiet = [(h, entry) for h, entry in self._hints if entry.levels == "any"]
        self._bare_hints = {log_lines.without_digits(hint) for hint, _ in self._hints}
        self._first: dict[int, _Hit] = {}
        self._weak: _Hit | None = None
        self._latest: _Hit | None = None
        self._last: str | bytes | None = None
        self.ready = False
        """The log says that the server served."""
        self.stopped = False
        """The log says that the server was asked to stop."""
        self._fatal = False
        #: An exception was named: what is indented behind it is of its message, and no frame.
        self._in_message = False
        #: The engine went on after the exception that is kept: it was a request's.
        self._went_on = False

    def feed(self, line: LogLine) -> None:
        """Takes the next line of the log."""
        text = line.text
        self._last = text
        if self._is_ready(text):
            # An error before this line did not stop the server from starting.
            self._first.clear()
            self._weak = None
            self.ready, self.stopped, self._fatal = True, False, False
            return
        if self._is_stop(text):
            self.stopped = True
            return
        if self._latest is not None:
            detail = self._latest.entry.detail
            if detail is not None and detail.match(text):
                self._latest.summary = log_message.cut(f"{self._latest.summary} {text.strip()}")
                return
            self._latest = None
        if not self.stopped and self._is_fatal(text):
            if self.ready and self._went_on and not self._fatal:
                self._first.pop(_GENERIC_RANK, None)
            self._fatal = True
        hit = self._match(line)
        if hit is None:
            if self.shows_life(line):
                self.goes_on()
            return
        if hit.entry.weak:
            self._weak = hit
        elif hit.entry.rank not in self._first and not (
            self.stopped and hit.entry.rank >= _GENERIC_RANK
        ):
            self._first[hit.entry.rank] = self._latest = hit
            self._went_on = False

    def read(self, log: Path) -> None:
        """Takes a whole file, as `feed` does of `join_wrapped`, ten times as fast."""
        for line in log_lines.read_new_lines(log, self._says_nothing, self._again):
            self.feed(line)

    def _says_nothing(self, line: LogLine) -> bool:
        text = log_lines.without_digits(line.text)
        return self.is_plain(line) and not any(hint in text for hint in self._bare_hints)

    def _again(self, raw: bytes, like: LogLine) -> None:
        self._last = raw
        if self.shows_life(like):
            self.goes_on()

    def is_plain(self, line: LogLine) -> bool:
        """Whether a line says nothing about a failure, whatever digits stand in it."""
        text = line.text
        return not (
            line.is_indented
            or log_message.is_traceback_opening(line)
            or self._is_ready(text)
            or self._is_stop(text)
        )

    @staticmethod
    def shows_life(line: LogLine) -> bool:
        """Whether a plain line shows that the engine goes on."""
        return line.level == "INFO" and not _ACCESS_LOG.search(line.text)

    def goes_on(self) -> None:
        """Takes a plain line that shows life, without looking at it."""
        self._weak, self._went_on = None, True

    def _match(self, line: LogLine) -> _Hit | None:
        if log_message.is_traceback_opening(line):
            self._in_message = False
            return None
        if line.is_frame and not self._in_message:
            return None  # a frame quotes source code, which may hold any message
        line = line.without_indent
        text = line.text
        self._in_message = self._in_message or _EXCEPTION.match(text) is not None
        is_quiet = line.level in QUIET_LEVELS or self._is_quiet(text)
        best: tuple[FailureSignature, re.Match[str]] | None = None
        for hint, entry in self._hints_quiet if is_quiet else self._hints:
            if hint not in text or (best is not None and entry.rank >= best[0].rank):
                continue
            if entry.at_start_only and self.ready:
                continue
            match = entry.search(line)
            if match is not None:
                best = entry, match
        if best is None:
            return None
        entry, match = best
        excerpt = log_message.cut(line.text, around=match.start())
        if entry.summary is None:
            return _Hit(entry, excerpt, excerpt)
        groups = {name: value or "" for name, value in match.groupdict().items()}
        summary = entry.summary.format_map(groups | {"line": excerpt})
        return _Hit(entry, excerpt, log_message.cut(summary))

    def _best(self, *, died: bool) -> _Hit | None:
        ranks = sorted(self._first)
        if not ranks:
            return self._weak
        best = self._first[ranks[0]]
        if self._weak is not None and self._weak.entry.rank < best.entry.rank:
            return self._weak
        says_dead = any(rank >= _DEAD_RANK for rank in ranks)
        if best.entry.rank == _GENERIC_RANK and self.ready and not (died or says_dead):
            return None  # an exception that one request met; the server goes on
        return best

    def kind(self) -> str | None:
        """The failure that the log shows, or None, whatever ended the process."""
        hit = self._best(died=False)
        return None if hit is None else self._kind(hit)

    def _kind(self, hit: _Hit) -> str:
        if hit.entry.rank == _GENERIC_RANK and any(rank >= _DEAD_RANK for rank in self._first):
            return "engine_dead"
        return hit.entry.kind

    def evidence(self) -> str | None:
        """The line that `kind` rests on, or None."""
        hit = self._best(died=False)
        return None if hit is None else hit.line

    def cause(self, exit_code: int | None) -> Cause:
        """The cause, from the log and from how the process ended."""
        hit = self._best(died=False)
        if hit is None or hit.entry.rank >= _DEAD_RANK:
            from_status = self._cause_from_status(exit_code, hit)
            if from_status is not None:
                return from_status
        # An exception that one request met counts last: it need not have ended the server.
        hit = hit or self._best(died=True)
        if hit is None:
            return ended("unknown", self._last_line(), how=_ending(exit_code)[1])
        lines = [hit.line]
        lines += [
            other.line
            for rank, other in sorted(self._first.items())
            if rank >= _DEAD_RANK and other.line not in lines
        ]
        if hit.entry.rank >= _DEAD_RANK:
            cause = ended("aftermath", lines, basis=Basis.AFTERMATH, line=hit.summary)
            changed = {"kind": hit.entry.kind, "summary": log_message.cut(cause.summary)}
            return cause.model_copy(update=changed)
        is_fatal = hit.entry.rank == _GENERIC_RANK and (self._fatal or not self.ready)
        return Cause(
            kind=self._kind(hit),
            summary=hit.summary,
            owner=hit.entry.owner,
            remedy=hit.entry.remedy,
            lines=lines,
            basis=Basis.FATAL_EXCEPTION if is_fatal else Basis.STATED,
        )

    def _last_line(self) -> list[str]:
        if isinstance(self._last, bytes):
            self._last = log_message.clean(self._last.decode("utf-8", errors="replace")).text
        return [log_message.cut(self._last)] if self._last else []

    def _cause_from_status(self, exit_code: int | None, hit: _Hit | None) -> Cause | None:
        number, text = _ending(exit_code)
        lines = [hit.line] if hit is not None else self._last_line()
        if number == signals.SIGKILL:
            return ended("sigkill_alone", lines, basis=Basis.SIGKILL_ALONE)
        if number == signals.SIGILL:
            return ended("sigill", lines)
        if number not in (None, signals.SIGTERM, signals.SIGINT):
            return ended("other_signal", lines, how=text)
        if hit is not None:
            return None
        if self.stopped or number is not None:
            return ended("told_to_stop", lines, how=text)
        return ended("status_0", lines) if exit_code == 0 else None


@cache
def any_of(patterns: tuple[re.Pattern[str], ...]) -> re.Pattern[str]:
    """A pattern that matches where one of several does."""
    return re.compile("|".join(f"(?:{each.pattern})" for each in patterns))


def _ending(exit_code: int | None) -> tuple[int | None, str]:
    """The signal that ended a process, and the end in words. A shell says 128 + N, Python -N."""
    if exit_code is None:
        return None, "exit status not known"
    number = -exit_code if exit_code < 0 else exit_code - 128
    if exit_code >= 0 and not 0 < number < 65:
        return None, f"exited with status {exit_code}"
    is_signal = number in {member.value for member in signals.Signals}
    return number, f"killed by {signals.Signals(number).name if is_signal else f'signal {number}'}"


def classify_lines(lines: Iterable[str], exit_code: int | None = None) -> Cause:
    """As `classify`, from lines."""
    reader = FailureReader()
    for line in log_lines.join_wrapped(lines):
        reader.feed(line)
    return reader.cause(exit_code)


def classify(log: Path, exit_code: int | None = None) -> Cause:
    """Why the server that wrote `log` is dead. `exit_code` as of `subprocess` (negative: the
    signal) or of a shell (128 + signal); None: unknown. A SIGKILL without a cause in the log is a
    *probable* kill by the host's OOM killer. Raises OSError: the log cannot be read."""
    reader = FailureReader()
    reader.read(log)
    return reader.cause(exit_code)


_SERVER_ERROR = re.compile(r"\b5\d\d\b")


def explain(answer: str) -> str | None:
    """What to do about the error of a server (status 5xx), by its words; None if not known."""
    if not _SERVER_ERROR.search(answer):
        return None
    reader = FailureReader()
    reader.feed(log_message.clean(answer))
    best = reader._best(died=False)
    if best is None or best.entry.rank >= _GENERIC_RANK or best.entry.remedy is None:
        return None
    return f"{best.entry.kind}: {best.entry.remedy} (ask: {best.entry.owner})"
