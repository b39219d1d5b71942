"""Parse one line of a server's log into its message and the prefixes around it.

Engines, containers, process managers and people add prefixes and decorations to the lines of a
server. Examples are ANSI colours, ``(EngineCore pid=7)``, and the prefixes of ``docker compose``,
journald, Ray, Kubernetes, CI systems and ``grep -n``. `clean` removes them. The patterns are in
``fixtures/log-lines.toml``.
"""

import datetime
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BeforeValidator

from sm121.core import data_file

# The last alternative is an escape sequence whose ESC character was lost when the log was pasted.
# It must end with "m", so that "[1, 2]" and "[0/5]" are kept.
_ANSI = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[\]_][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|(?:\^\[|\\x1b|\\u001b|\\033)\[[0-9;]*m|\[\d{1,2}(?:;\d{1,3})*m"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

#: A regular expression, which may be given as a list of pieces.
_Form = Annotated[data_file.Regex, BeforeValidator("".join)]


class _Forms(data_file.DataTable):
    """The content of ``fixtures/log-lines.toml``."""

    container: _Form
    wrappers: tuple[_Form, ...]
    process: _Form
    stamp: _Form
    header: _Form
    logging: _Form
    own_prefix: _Form
    bare_file: _Form
    quotes_a_user: _Form
    moment: _Form
    messages: tuple[str, ...]
    exceptions: frozenset[str]
    levels: tuple[str, ...]
    least_error: dict[str, int]


_FORMS = data_file.load("log-lines.toml", _Forms)
#: The maximum length of an unknown prefix that a log collector adds, in characters.
_FOREIGN_LIMIT = 100
#: The maximum length of one of the server's own prefixes, in characters.
_OWN_PREFIX_LIMIT = 60
#: The number of characters at the beginning of a line that are searched for its time.
_PREFIX_LIMIT = 200
#: The maximum number of prefixes of a line. A Ray worker in an engine core under journald has four.
_MOST_PREFIXES = 10
#: Ray's suffix of a message that several workers printed.
_REPEATED = re.compile(r" \[repeated \d+x across cluster\].*")
#: The prefix with which C++ prints the message of an exception that ended the process.
_OF_CPP = "what():"
_LEVELS = {
    "DEBUG": "DEBUG",
    "INFO": "INFO",
    "WARNING": "WARNING",
    "WARN": "WARNING",
    "ERROR": "ERROR",
    "ERR": "ERROR",
    "CRITICAL": "CRITICAL",
    "FATAL": "CRITICAL",
    "PANIC": "CRITICAL",
}


@dataclass(frozen=True, slots=True)
class LoggingWorker:
    """The worker that printed a line.

    The worker's name is not used, because it changes once the rank is known.

    Attributes:
        pid: The worker's process id, from the line; never empty.
        node: The address of the worker's node; empty if the line does not contain it.
    """

    pid: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One message of a server.

    Attributes:
        text: The message, without prefixes, but with its own indentation.
        level: DEBUG, INFO, WARNING, ERROR or CRITICAL; None if the line has no level.
        file: The name of the source file that printed the message, without folders; None if the
            line does not contain one.
        container: The container's name at the beginning of a ``docker compose`` line; else empty.
        bare: Whether the line had no prefix at all, for example in a compiler's output, or in a
            wrapped or pasted line.
        stamp: The time on the server's clock, for example ``02-24 19:04:56``. None if the line has
            no time, or a time of another node's clock.
        process: The name of the process that printed the message, for example ``EngineCore_DP0``;
            empty if the line does not contain one.
        worker: The worker that printed the message; None if no worker printed it.
        number: The number of the first physical line of the message, set by `read_new_lines`.
        lines: If the message is a JSON record with several lines (for example a message and its
            exception), these lines; else empty.
    """

    text: str
    level: str | None
    file: str | None
    container: str
    bare: bool
    stamp: str | None = field(default=None, compare=False)
    process: str = field(default="", compare=False)
    worker: LoggingWorker | None = field(default=None, compare=False)
    number: int = field(default=0, compare=False)
    lines: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_indented(self) -> bool:
        """Whether the message starts with blanks, as stack frames and parts of wrapped lines do."""
        return self.text.startswith((" ", "\t"))

    @property
    def is_frame(self) -> bool:
        """Whether the message may be part of a stack trace.

        Python indents the lines of a stack trace by at least two blanks. A line with C++'s
        ``what():`` is not part of a stack trace.
        """
        is_indented = self.text.startswith(("  ", "\t"))
        return is_indented and not self.text.lstrip().startswith(_OF_CPP)

    @property
    def without_indent(self) -> "LogLine":
        """The message without its indentation, and without C++'s ``what():``."""
        text = self.text.strip().removeprefix(_OF_CPP).lstrip()
        if text == self.text:
            return self
        return replace(self, text=text)

    @property
    def parts(self) -> list["LogLine"]:
        """A message for each of the `lines`; if `lines` is empty, only the message itself."""
        if not self.lines:
            return [self]
        return [replace(self, text=line.rstrip(), lines=()) for line in self.lines]


def clean(raw: str) -> LogLine:
    """Remove colours and prefixes from a physical line.

    Args:
        raw: The line in the log.
    """
    rest = _Rest(_without_escapes(raw))
    if rest.text.startswith('{"'):
        rest.take_json()
    rest.take_prefixes()
    rest.take_file()
    text = rest.text
    quotation = _FORMS.quotes_a_user.match(text)
    if quotation is not None:
        text = quotation[0]
    lines = text.rstrip().split("\n")
    text = " ".join(lines)
    if "[repeated " in text:
        text = _REPEATED.sub("", text)
    return LogLine(
        text=text.rstrip(),
        level=rest.level,
        file=rest.file.rsplit("/", 1)[-1] if rest.file else None,
        container=rest.container,
        bare=rest.bare,
        stamp=rest.stamp,
        process=rest.process,
        worker=rest.worker,
        lines=tuple(lines) if len(lines) > 1 else (),
    )


def _without_escapes(raw: str) -> str:
    if raw.isprintable() and "[" not in raw:
        return raw  # true for most lines; applying the patterns would take far longer
    return _CONTROL.sub("", _ANSI.sub("", raw))


@dataclass(slots=True)
class _Rest:
    """The rest of a line, and the values from the prefixes that were removed so far."""

    text: str
    level: str | None = None
    file: str | None = None
    container: str = ""
    bare: bool = True
    stamp: str | None = None
    process: str = ""
    worker: LoggingWorker | None = None
    node: str | None = None

    def take_json(self) -> None:
        """Replace a JSON record by its message, followed by its exception.

        docker, journald, fluentd, Loki and structured loggers write such records.
        """
        try:
            record = json.loads(self.text)
            entries = list(_entries(record))
        except (json.JSONDecodeError, RecursionError):
            return  # the record is truncated; the line is searched unchanged
        message = _message_of(record)
        parts = [self.text if message is None else message]
        for key, value in entries:
            if key in _FORMS.exceptions and isinstance(value, str):
                parts.append(value)
        self.text = _without_escapes("\n".join(parts))
        self.level = _level_of(entries)

    def take_prefixes(self) -> None:
        """Remove prefixes, up to the header of the server's logger."""
        for _ in range(_MOST_PREFIXES):
            if self._take_process():
                continue
            if self._take_header():
                return
            is_taken = (
                self._take_stamp()
                or self._take_container()
                or self._take_wrapper()
                or self._take_foreign()
            )
            if not is_taken:
                return

    def _take_process(self) -> bool:
        match = _FORMS.process.match(self.text)
        if match is None:
            return False
        self.node = match["node"] or self.node
        self.process = match["name"] or self.process
        pid = match["rank_pid"]
        if not pid and "Worker" in self.process:
            pid = match["pid"]
        if pid:
            self.worker = LoggingWorker(pid, self.node or "")
        self.text = self.text[match.end() :]
        self.bare = False
        return True

    def _take_header(self) -> bool:
        match = _FORMS.header.match(self.text) or _FORMS.logging.match(self.text)
        if match is None:
            return False
        self.level = _LEVELS[match["level"]]
        self.file = match["file"]
        self.stamp = match["stamp"] if self.node is None else None
        self.text = self.text[match.end() :]
        self.bare = False
        return True

    def _take_stamp(self) -> bool:
        match = _FORMS.stamp.match(self.text)
        if match is None:
            return False
        self.text = self.text[match.end() :]
        self.bare = False
        return True

    def _take_container(self) -> bool:
        if "/" in self.container:
            return False
        match = _FORMS.container.match(self.text)
        if match is None:
            return False
        self.container = f"{self.container}/{match['container']}".lstrip("/")
        self.text = self.text[match.end() :]
        return True

    def _take_wrapper(self) -> bool:
        for wrapper in _FORMS.wrappers:
            match = wrapper.match(self.text)
            if match is not None:
                self.text = self.text[match.end() :]
                return match.end() > 0
        return False

    def _take_foreign(self) -> bool:
        """Remove an unknown prefix before the server's own first prefix.

        Text with a quotation mark does not count as a prefix, because it may quote a line of the
        server.
        """
        if not self.bare:
            return False
        match = _FORMS.own_prefix.search(self.text, 0, _FOREIGN_LIMIT + _OWN_PREFIX_LIMIT)
        if match is None or not 0 < match.start() <= _FOREIGN_LIMIT:
            return False
        if re.search("[\"'`]", self.text[: match.start()]):
            return False
        self.text = self.text[match.start() :]
        return True

    def take_file(self) -> None:
        """Remove a prefix with a source file but without a level."""
        if self.file is not None:
            return
        match = _FORMS.bare_file.match(self.text)
        if match is not None:
            self.file = match["file"]
            self.text = self.text[match.end() :]
            self.bare = False


def _entries(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a JSON record, and of the objects in it."""
    for key, value in table.items():
        yield key, value
        if isinstance(value, dict):
            yield from _entries(value)


def _message_of(record: dict[str, Any]) -> str | None:
    for key in _FORMS.messages:
        if isinstance(record.get(key), str):
            return str(record[key])
    return None


def _level_of(entries: Sequence[tuple[str, Any]]) -> str | None:
    """Return the level that the server's logger gave a JSON record, or None."""
    for key, value in entries:
        least_error = _FORMS.least_error.get(key)
        if least_error is not None and isinstance(value, int) and value >= least_error:
            return "ERROR"
    for level_key in _FORMS.levels:
        for key, value in entries:
            name = str(value).upper()
            if key == level_key and name in _LEVELS:
                return _LEVELS[name]
    return None


def moment(raw: str, now: datetime.datetime) -> datetime.datetime | None:
    """Return the time at which a line was printed, on the server's clock.

    Args:
        raw: The line in the log.
        now: The current time. If the line has no year, the last such date before `now` is assumed.

    Returns:
        The time, without a time zone; None if the line has no time.
    """
    match = _FORMS.moment.search(raw[:_PREFIX_LIMIT])
    if match is None:
        return None
    year = match["year"] or now.year
    try:
        stamp = datetime.datetime.fromisoformat(f"{year}-{match['day']} {match['time']}")
        if match["year"] is None and stamp > now + datetime.timedelta(days=2):
            stamp = stamp.replace(year=now.year - 1)
    except ValueError:
        return None  # the digits are not a date, for example 02-30
    return stamp


def is_traceback_opening(line: LogLine) -> bool:
    """Return whether a line is the first line of a Python traceback.

    Args:
        line: The line.
    """
    return line.text.lstrip().startswith("Traceback (most recent call last)")


def cut(text: str, limit: int = 400, *, around: int = 0) -> str:
    """Truncate a line at word boundaries, with an ellipsis at each truncated end.

    Args:
        text: The line.
        limit: The maximum length of the result, in characters.
        around: The index of a character that must be kept.
    """
    text = text.strip()
    if len(text) <= limit:
        return text
    first = 0
    last = limit
    if around >= limit // 2:
        first = min(around - limit // 4, len(text) - limit)
        last = first + limit
    slack = limit // 8  # words that are longer than this are divided
    before = ""
    if first > 0:
        before = "…"
        first += 1  # the ellipsis takes the place of a character
        first = _first_gap(text, range(first, first + slack))
    after = ""
    if last < len(text):
        after = "…"
        last -= 1
        last = _first_gap(text, range(last, last - slack, -1))
    return f"{before}{text[first:last].strip()}{after}"


def _first_gap(text: str, places: range) -> int:
    """Return the first index at which the text can be cut without splitting a word.

    If every index is within a word, return the first one.
    """
    for place in places:
        if not _is_in_word(text, place):
            return place
    return places.start


def _is_in_word(text: str, place: int) -> bool:
    return all(c.isalnum() or c in "_.-" for c in text[place - 1 : place + 1])
