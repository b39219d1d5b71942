"""Search the lines of a log for the known failures (``fixtures/signatures/failures.toml``)."""

import re
from dataclasses import dataclass
from functools import cache

from sm121.evidence import log_lines
from sm121.evidence.failure_tables import FailureSignature, any_of, load_failures
from sm121.evidence.log_message import LogLine

QUIET_LEVELS = frozenset({"DEBUG", "INFO", "WARNING"})
#: The characters that terminals and viewers put at the end of a truncated line.
_CUT_MARKS = " …>."


@dataclass(frozen=True, slots=True)
class Match:
    """A failure that a line shows."""

    entry: FailureSignature
    #: The index of the failure's first character in the line.
    start: int
    #: The match; None if the line was truncated, so that only a part of the message is left.
    match: re.Match[str] | None = None


class Patterns:
    """The patterns of ``failures.toml``.

    Attributes:
        is_ready: Searches for a line that shows that the server is ready.
        is_stop: Searches for a line that shows that a stop of the server was requested.
        is_fatal: Searches for a line that a process prints when an exception ends it.
        is_quiet: Searches for a message that contains a level below error, for example "warning".
        bare_hints: The hints of all failures, with their digits removed.
    """

    def __init__(self) -> None:
        failures = load_failures()
        self.is_ready = any_of(failures.markers.ready).search
        self.is_stop = any_of(failures.markers.stopped).search
        self.is_fatal = any_of(failures.markers.fatal).search
        self.is_quiet = any_of(failures.markers.quiet).search
        #: Each hint (a word that a matching line contains) with its signature: first the hints of
        #: all failures, then the hints of those failures that also apply to quiet lines.
        self._hints: list[tuple[str, FailureSignature]] = []
        self._quiet_hints: list[tuple[str, FailureSignature]] = []
        for entry in failures.failure:
            hints = [(hint, entry) for hint in entry.hint]
            self._hints += hints
            if entry.levels == "any":
                self._quiet_hints += hints
        self.bare_hints = {log_lines.without_digits(hint) for hint, _ in self._hints}
        #: The failures, found by the beginnings of their messages, for lines that are truncated.
        self._beginnings = _beginnings()
        self._longest = max(map(len, self._beginnings))
        self._shortest = min(map(len, self._beginnings))

    def most_specific(self, line: LogLine, *, ready: bool) -> Match | None:
        """Return the match with the lowest rank.

        Args:
            line: The line.
            ready: Whether the server was ready before.
        """
        is_quiet = line.level in QUIET_LEVELS or self.is_quiet(line.text) is not None
        best: Match | None = None
        for hint, entry in self._quiet_hints if is_quiet else self._hints:
            if hint not in line.text or (best is not None and entry.rank >= best.entry.rank):
                continue
            if entry.at_start_only and ready:
                continue
            match = entry.search(line)
            if match is not None:
                best = Match(entry, match.start(), match)
        return best

    def of_cut_line(self, line: LogLine, *, ready: bool) -> Match | None:
        """Return the failure whose message begins at the end of a truncated line.

        Terminals and viewers truncate lines at their right margin.

        Args:
            line: The line.
            ready: Whether the server was ready before.
        """
        if line.level in QUIET_LEVELS or self.is_quiet(line.text) is not None:
            return None
        text = line.text.rstrip(_CUT_MARKS)
        for length in range(min(len(text), self._longest), self._shortest - 1, -1):
            entry = self._beginnings.get(text[-length:])
            if entry is None:
                continue
            if (entry.at_start_only and ready) or entry.excludes(line):
                return None
            return Match(entry, len(text) - length)
        return None


@cache
def _beginnings() -> dict[str, FailureSignature]:
    """Return all failures; the keys are the beginnings of their messages."""
    found: dict[str, FailureSignature] = {}
    for entry in load_failures().failure:
        for beginning in entry.beginnings:
            found[beginning] = entry
    return found
