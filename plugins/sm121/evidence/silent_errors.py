"""Find errors that a server's log or the Linux kernel reports while the server continues to serve.

The kinds of errors and the accepted errors are listed in ``fixtures/signatures/failures.toml``.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sm121.evidence import kernel_messages
from sm121.evidence.failure import read_lines
from sm121.evidence.failure_patterns import QUIET_LEVELS
from sm121.evidence.failure_tables import any_of, load_failures
from sm121.evidence.log_lines import LINE_LIMIT, join_wrapped
from sm121.evidence.log_message import LoggingWorker, LogLine, cut, is_traceback_opening

_TRACEBACK = "engine_traceback"
_UNKNOWN = "unknown"
#: The kinds of kernel messages that may be about another process, or only about the machine.
_OF_MACHINE = (_UNKNOWN, "host", "oom")
#: The lines between two stack traces of chained exceptions.
_CHAINED = ("During handling of the above", "The above exception was")

#: A process, identified by its name and its worker, if any.
_Process = tuple[str, LoggingWorker | None]


@dataclass(frozen=True)
class SilentError:
    """An error of a server that continued to serve."""

    #: Whether the error is certainly a failure of the server.
    certain: bool
    #: The kind of a known failure, ``engine_traceback`` or ``unknown``.
    kind: str
    #: The line that shows the error.
    line: str
    remedy: str
    #: The part of the error that is equal in other runs.
    subject: str


@dataclass
class _Stack:
    """A traceback that a process is printing."""

    level: str | None
    #: Whether it comes from a process of the engine, or has a stack frame of the engine.
    of_engine: bool


@dataclass(frozen=True)
class _Record:
    """The values that all lines of one logging record share."""

    level: str | None
    file: str | None
    stamp: str | None


def of_the_kernel(messages: Iterable[str]) -> list[SilentError]:
    """Classify messages of the Linux kernel.

    Args:
        messages: The messages.

    Returns:
        The errors, without repetitions. For an unknown error, `line` is the message itself.
    """
    errors: list[SilentError] = []
    for message in messages:
        text = kernel_messages.without_stamp(message)
        reader = read_lines([text])
        cause = reader.cause(None)
        error = SilentError(
            certain=cause.kind not in _OF_MACHINE,
            kind=cause.kind,
            line=text if cause.kind == _UNKNOWN else cause.summary,
            remedy=f"{cause.remedy} (ask: {cause.owner})",
            subject=reader.steady() or _subject(text),
        )
        if error not in errors:
            errors.append(error)
    return errors


def _of_log(certain: bool, kind: str, line: str, remedy: str) -> SilentError:
    """Return the error that a line of a server's log shows."""
    return SilentError(certain, kind, line, remedy, _subject(line))


def _subject(line: str) -> str:
    """Return the text before the first colon of a line that the engine or the kernel wrote."""
    return line.partition(":")[0]


class ErrorReader:
    """Reads a growing log, and finds errors that are not accepted.

    Args:
        engine: The engine, which determines the accepted errors.
        start: The number of bytes at the beginning of the log that are skipped.
    """

    def __init__(self, engine: str, start: int = 0) -> None:
        failures = load_failures()
        self._markers = failures.markers
        self._never_green = [entry for entry in failures.failure if entry.never_green]
        self._accepted = [row for row in failures.accepted if row.engine in (engine, "any")]
        self._position = start
        #: For each process that is printing a traceback, this traceback.
        self._stacks: dict[_Process, _Stack] = {}
        #: The processes whose last message is accepted together with the traceback that follows the
        #: message. The value is None until that traceback has ended. After that, it is the
        #: traceback's logging record, because more lines of the exception's message may follow.
        self._excused: dict[_Process, _Record | None] = {}

    def read(self, log: Path) -> list[SilentError]:
        """Find the errors in the lines that were written since the last call.

        Args:
            log: The log.

        Returns:
            The errors. Tracebacks before the server became ready are left out, unless they are
            certain failures, because they did not prevent the start.

        Raises:
            OSError: The log cannot be read.
        """
        errors: list[SilentError] = []
        for line in join_wrapped(self._new_lines(log)):
            if any_of(self._markers.ready).search(line.text):
                errors = [error for error in errors if error.certain or error.kind != _TRACEBACK]
            for part in line.parts:
                error = self._error_in(part)
                if error is not None:
                    errors.append(error)
        return errors

    def _new_lines(self, log: Path) -> Iterator[str]:
        with log.open("rb") as file:
            if self._position > file.seek(0, os.SEEK_END):
                self._position = 0  # the log was truncated and begins again
            file.seek(self._position)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return  # the server is still writing this line
                self._position += len(raw)
                yield from raw[:LINE_LIMIT].decode("utf-8", errors="replace").split("\r")

    def _error_in(self, line: LogLine) -> SilentError | None:
        process = (line.process, line.worker)  # the ranks of Ray share one name
        stack = self._stacks.get(process)
        opens = is_traceback_opening(line)
        if opens and stack is None:
            of_engine = any_of(self._markers.engine_process).match(line.process) is not None
            stack = _Stack(line.level, of_engine)
            self._stacks[process] = stack
        if opens or _is_within_stack(line, stack):
            # A stack frame quotes source code, which may contain any message.
            if stack is not None and any_of(self._markers.engine_frame).search(line.text):
                stack.of_engine = True
            return None
        ended = stack if stack is not None and stack.level == line.level else None
        if ended is not None:
            if line.text.startswith(_CHAINED):
                return None
            del self._stacks[process]
        accepted = [row for row in self._accepted if row.regex.search(line.text)]
        is_excused = self._is_excused(line, process, ends=ended is not None)
        if not is_excused and stack is None:
            self._excused.pop(process, None)
        if any(row.traceback for row in accepted):
            self._excused[process] = None
        excerpt = cut(line.text)
        for entry in self._never_green:
            if entry.search(line) is not None:
                return _of_log(True, entry.kind, excerpt, entry.remedy or "")
        if ended is not None and ended.of_engine:
            remedy = (
                "read the stack in the log: the engine itself raised the exception, so it is not "
                "the refusal of a wrong request"
            )
            return _of_log(line.level not in QUIET_LEVELS, _TRACEBACK, excerpt, remedy)
        if accepted or is_excused:
            return None
        if ended is not None or self._is_error(line):
            remedy = (
                "read the log; if a healthy server logs this line, add a row [[accepted]] to "
                "fixtures/signatures/failures.toml"
            )
            return _of_log(False, _UNKNOWN, excerpt, remedy)
        return None

    def _is_excused(self, line: LogLine, process: _Process, *, ends: bool) -> bool:
        """Return whether a line belongs to a traceback that is accepted with the message before it.

        `ends` means that the line ends a traceback.
        """
        if process not in self._excused:
            return False
        record = _Record(line.level, line.file, line.stamp)
        if not ends and self._excused[process] != record:
            return False
        self._excused[process] = record
        return True

    def _is_error(self, line: LogLine) -> bool:
        if line.level is None:
            return any_of(self._markers.error).search(line.text) is not None
        return line.level in ("ERROR", "CRITICAL")


def _is_within_stack(line: LogLine, stack: _Stack | None) -> bool:
    """Return whether a line is a stack frame, or the line of marks (``^^^``) below a frame."""
    if not line.text.strip("^~ "):
        return True
    if not line.is_indented:
        return False
    return stack is not None or line.bare or line.text.lstrip().startswith('File "')
