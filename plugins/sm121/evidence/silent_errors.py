"""Errors that kill nobody: what a server's log and the kernel say of them while it serves on. What
counts as one, and which are accepted, is data: ``fixtures/signatures/failures.toml``."""

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sm121.evidence.failure import QUIET_LEVELS, any_of, classify_lines, load_failures
from sm121.evidence.log_lines import LINE_LIMIT, LogLine, cut, is_traceback_opening, join_wrapped

_TRACEBACK = "engine_traceback"
#: Between two stacks of one traceback.
_CHAINED = ("During handling of the above", "The above exception was")


@dataclass(frozen=True)
class SilentError:
    """An error of a server that went on to serve."""

    #: Whether it is a failure; else nobody knows it.
    certain: bool
    #: The kind of a known failure, ``engine_traceback`` or ``unknown``.
    kind: str
    #: What shows it.
    line: str
    remedy: str


def of_the_kernel(messages: Iterable[str]) -> list[SilentError]:
    """What messages of the kernel report, each error once; of one without a row its words."""
    errors = []
    for message in messages:
        cause = classify_lines([message])
        unclear = cause.kind == "unknown"
        certain = cause.kind not in ("unknown", "oom")  # memory may be what another lacked
        line = message.partition("] ")[2] or message if unclear else cause.summary
        remedy = f"{cause.remedy} (ask: {cause.owner})"
        errors.append(SilentError(certain, cause.kind, line, remedy))
    return list(dict.fromkeys(errors))


class ErrorReader:
    """Reads a log as it grows, and gives what it reports and its engine's rows do not accept.
    `engine`: whose rows accept an error; `start`: bytes of the log that were there before."""

    def __init__(self, engine: str, start: int = 0) -> None:
        failures = load_failures()
        self._markers = failures.markers
        self._never_green = [entry for entry in failures.failure if entry.never_green]
        self._accepted = [row for row in failures.accepted if row.engine in (engine, "any")]
        self._position = start
        #: By process, the level of a traceback that goes on, and whether the engine has it.
        self._stacks: dict[str, tuple[str | None, bool]] = {}
        #: By process whose last message accepts a traceback under it: None; after that stack its
        #: level, file and time, which lines that go on with the exception's message have too.
        self._excused: dict[str, tuple[str | None, ...] | None] = {}

    def read(self, log: Path) -> list[SilentError]:
        """What the log reports beyond what was read before. Raises OSError: it cannot be read."""
        errors: list[SilentError] = []
        for line in join_wrapped(self._new(log)):
            if any_of(self._markers.ready).search(line.text):
                # What a start met and only warned of, as of a module without its library, is over.
                errors = [each for each in errors if each.certain or each.kind != _TRACEBACK]
            errors += itertools.chain(*map(self._errors_in, line.parts))
        return errors

    def _new(self, log: Path) -> Iterator[str]:
        with log.open("rb") as file:
            if self._position > file.seek(0, os.SEEK_END):
                self._position = 0  # it was cut, and is written anew
            file.seek(self._position)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return  # it is still being written
                self._position += len(raw)
                yield from raw[:LINE_LIMIT].decode("utf-8", errors="replace").split("\r")

    def _errors_in(self, line: LogLine) -> Iterator[SilentError]:
        process = f"{line.process} {line.worker}"  # Ray's ranks have one name
        stack = self._stacks.get(process)
        opens = is_traceback_opening(line)
        if opens and stack is None:
            of_engine = any_of(self._markers.engine_process).match(line.process) is not None
            stack = self._stacks[process] = line.level, of_engine
        frame = stack is not None or line.bare or line.text.lstrip().startswith('File "')
        if (line.is_indented and frame) or opens or not line.text.strip("^~ "):
            # A frame quotes source code, which may hold any message.
            if stack is not None and any_of(self._markers.engine_frame).search(line.text):
                self._stacks[process] = stack[0], True
            return
        ends = stack is not None and stack[0] == line.level
        if ends and line.text.startswith(_CHAINED):
            return
        if ends:
            del self._stacks[process]
        accepted = [row for row in self._accepted if row.regex.search(line.text)]
        record = (line.level, line.file, line.stamp)
        excused = process in self._excused and (ends or self._excused[process] == record)
        if excused:
            self._excused[process] = record
        elif stack is None:
            self._excused.pop(process, None)
        if any(row.traceback for row in accepted):
            self._excused[process] = None
        excerpt, is_error = cut(line.text), line.level in ("ERROR", "CRITICAL")
        is_error |= line.level is None and bool(any_of(self._markers.error).search(line.text))
        for entry in self._never_green:
            if entry.search(line) is not None:
                yield SilentError(True, entry.kind, excerpt, entry.remedy or "")
                return
        if ends and stack is not None and stack[1]:
            why = "read the stack in the log: an exception of the engine is no refusal of a request"
            yield SilentError(line.level not in QUIET_LEVELS, _TRACEBACK, excerpt, why)
        elif (ends or is_error) and not (accepted or excused):
            why = "read the log; if a healthy server says it, it needs a row of [[accepted]]"
            yield SilentError(False, "unknown", excerpt, why)
