"""Server logs as a stream of clean lines. People, containers and process managers wrap what a
server prints: ANSI colours, ``(EngineCore pid=7)``, ``docker compose``, journald, Ray, Kubernetes,
CI, ``grep -n``. This module undoes that, in bounded memory."""

import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from sm121.core import data_file

LINE_LIMIT = 65_536
"""Characters kept of one physical line. vLLM's configuration line is about 8,000 long."""

JOIN_LIMIT = 8_192
"""Characters kept of a line that was put together from wrapped pieces."""

_BLOCK_BYTES = 1 << 18
_PLAIN_LIMIT = 20_000  # different lines remembered as saying nothing
_DIGITS = b"0123456789"
_NO_DIGITS = {ord(digit): None for digit in "0123456789"}

# The last form is an escape whose ESC character was lost when the log was pasted; it needs an "m",
# so that "[1, 2]" and "[0/5]" stay.
_ANSI = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[\]_][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|(?:\^\[|\\x1b|\\u001b|\\033)\[[0-9;]*m|\[\d{1,2}(?:;\d{1,3})*m"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

#: A pattern, perhaps in pieces.
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
_FOREIGN_LIMIT = 100  # characters that a log collector puts in front
_REPEATED = re.compile(r" \[repeated \d+x across cluster\].*")  # Ray, behind a message
_PREFIX_LIMIT = 200
_OF_CPP = "what():"


_LEVELS = {name: name for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
_LEVELS |= {"WARN": "WARNING", "ERR": "ERROR", "FATAL": "CRITICAL", "PANIC": "CRITICAL"}


@dataclass(frozen=True, slots=True)
class LogLine:
    """One message of a server."""

    text: str
    """The message, without prefixes; its own indentation is kept."""
    level: str | None
    """DEBUG, INFO, WARNING, ERROR, CRITICAL; None where the line does not say."""
    file: str | None
    """Of the source file that printed it, without folders; None where the line does not say."""
    container: str
    """Name in front of a ``docker compose`` line; empty without one."""
    bare: bool
    """It had no prefix at all: output of a compiler, a wrapped or pasted line."""
    stamp: str | None = field(default=None, compare=False)
    """Of its own clock, as ``02-24 19:04:56``; None where it does not say, or another node does."""
    process: str = field(default="", compare=False)
    """Name of the process that printed it, as ``EngineCore_DP0``; empty where it does not say."""
    worker: str = field(default="", compare=False)
    """Of the worker that printed it, its id and the address of its node, as ``7`` and
    ``7 10.0.0.2``: a worker has another name before it knows its rank. Empty: no worker did."""
    number: int = field(default=0, compare=False)
    """Of the physical line that it begins with, where `read_new_lines` gives it."""
    lines: tuple[str, ...] = field(default=(), compare=False)
    """Those of a record of JSON that has several, as a message and its exception; else empty."""

    @property
    def is_indented(self) -> bool:
        """True when the message starts with blanks: a stack frame, or a piece of a wrapped line."""
        return self.text[:1] in (" ", "\t")

    @property
    def is_frame(self) -> bool:
        """True when the message may be part of a stack, whose lines Python indents by two blanks or
        more. What C++ prints of an exception that ended the process (``what():``) is none."""
        indented = self.text.startswith(("  ", "\t"))
        return indented and not self.text.lstrip().startswith(_OF_CPP)

    @property
    def without_indent(self) -> "LogLine":
        """The message from its first word on, or behind C++'s ``what():``."""
        text = self.text.strip().removeprefix(_OF_CPP).lstrip()
        return self if text == self.text else replace(self, text=text)

    @property
    def parts(self) -> list["LogLine"]:
        """A message for each of ``lines``, or itself."""
        return [replace(self, text=line.rstrip(), lines=()) for line in self.lines] or [self]


def clean(raw: str) -> LogLine:
    """One physical line without colours and wrappers."""
    text = _CONTROL.sub("", _ANSI.sub("", raw)) if not raw.isprintable() or "[" in raw else raw
    container, level, file, stamp, process = "", None, None, None, ""
    bare, node, worker = True, None, ""
    if text.startswith('{"'):
        text, level = _json_message(text)
    for _ in range(10):  # a Ray worker under an engine core under journald is four deep
        before = text
        if match := _FORMS.process.match(text):
            node = match["node"] or node
            process = match["name"] or process
            if pid := match["rank_pid"] or ("Worker" in process and match["pid"]):
                worker = f"{pid} {node or ''}".strip()
            text, bare = text[match.end() :], False
        elif match := _FORMS.header.match(text) or _FORMS.logging.match(text):
            level = _LEVELS[match["level"]]
            file, stamp = match["file"], match["stamp"] if node is None else None
            text, bare = text[match.end() :], False
            break
        elif match := _FORMS.stamp.match(text):
            text, bare = text[match.end() :], False
        elif container.count("/") < 1 and (match := _FORMS.container.match(text)):
            container = f"{container}/{match['container']}".lstrip("/")
            text = text[match.end() :]
        else:
            for wrapper in _FORMS.wrappers:
                if match := wrapper.match(text):
                    text = text[match.end() :]
                    break
        if text == before:
            foreign = _foreign(text) if bare else 0
            if foreign == 0:
                break
            text = text[foreign:]
    if file is None and (match := _FORMS.bare_file.match(text)):
        file, text, bare = match["file"], text[match.end() :], False
    if match := _FORMS.quotes_a_user.match(text):
        text = match[0]
    lines = text.rstrip().split("\n")
    text = " ".join(lines)
    return LogLine(
        text=(_REPEATED.sub("", text) if "[repeated " in text else text).rstrip(),
        level=level,
        file=file.rsplit("/", 1)[-1] if file else None,
        container=container,
        bare=bare,
        stamp=stamp,
        process=process,
        worker=worker,
        lines=tuple(lines) if len(lines) > 1 else (),
    )


def _foreign(text: str) -> int:
    """How many characters in front of what the server itself puts first are somebody else's, in a
    form that is not known. A text that quotes such a line is none."""
    match = _FORMS.own_prefix.search(text, 0, _FOREIGN_LIMIT + 60)
    if match is None or match.start() > _FOREIGN_LIMIT:
        return 0
    return 0 if re.search("[\"'`]", text[: match.start()]) else match.start()


def _json_message(text: str) -> tuple[str, str | None]:
    """What a line of JSON says, its exception behind it, and the level that a logger of the server
    gave it: of docker, journald, fluentd, Loki, a structured logger."""
    try:
        record = json.loads(text)
        entries = [*_entries(record)]
    except (json.JSONDecodeError, RecursionError):
        return text, None  # cut short: the line is still searched as it stands
    keys = _FORMS.messages
    parts = [next((record[key] for key in keys if isinstance(record.get(key), str)), text)]
    parts += [v for key, v in entries if key in _FORMS.exceptions and isinstance(v, str)]
    names = (str(value).upper() for each in _FORMS.levels for key, value in entries if key == each)
    level = next((_LEVELS[name] for name in names if name in _LEVELS), None)
    least = _FORMS.least_error
    if any(key in least and isinstance(v, int) and v >= least[key] for key, v in entries):
        level = "ERROR"
    return _CONTROL.sub("", _ANSI.sub("", "\n".join(parts))), level


def _entries(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        yield key, value
        yield from _entries(value) if isinstance(value, dict) else ()


def join_wrapped(lines: Iterable[str]) -> Iterator[LogLine]:
    """Clean lines, with those that a poster wrapped put together: a line that starts with blanks
    and has no prefix belongs to the one before it. So do stack frames to their ``Traceback``."""
    pending: LogLine | None = None
    for raw in lines:
        line = clean(raw)
        if not line.text:
            continue
        if pending is not None:
            if continues(line, pending):
                pending = join(pending, line)
                continue
            yield pending
        pending = line
    if pending is not None:
        yield pending


def continues(line: LogLine, held: LogLine) -> bool:
    """Whether a line is a piece of the one before it."""
    return line.bare and line.is_indented and line.container == held.container


def join(held: LogLine, line: LogLine) -> LogLine:
    """A line with a piece of it that a poster had wrapped, or a frame of its stack."""
    if len(held.text) >= JOIN_LIMIT:
        return held
    return replace(held, text=f"{held.text} {line.text.strip()}"[:JOIN_LIMIT])


def moment(raw: str, now: datetime.datetime) -> datetime.datetime | None:
    """The time that a line was printed at, on its server's clock; None where it does not say. A
    year that is missing is the one in which that day was last, seen from `now`."""
    match = _FORMS.moment.search(raw[:_PREFIX_LIMIT])
    if match is None:
        return None
    day, time = match["day"], match["time"]
    try:
        stamp = datetime.datetime.fromisoformat(f"{match['year'] or now.year}-{day} {time}")
        if match["year"] is None and stamp > now + datetime.timedelta(days=2):
            stamp = stamp.replace(year=now.year - 1)
    except ValueError:
        return None  # no date: 02-30, or digits of something else
    return stamp


def is_traceback_opening(line: LogLine) -> bool:
    """True for the line that opens a Python stack."""
    return line.text.lstrip().startswith("Traceback (most recent call last)")


def read_raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a log but empty ones, each cut at `LINE_LIMIT` bytes, in bounded memory. A
    carriage return ends a line too. Raises OSError: no such file."""
    rest = b""
    skipping = False
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            first, *others = block.replace(b"\r", b"\n").split(b"\n")
            if not skipping:
                rest += first[: LINE_LIMIT - len(rest)]
                skipping = len(rest) >= LINE_LIMIT
            if not others:
                continue
            if rest:
                yield rest
            for piece in others[:-1]:
                if piece:
                    yield piece if len(piece) <= LINE_LIMIT else piece[:LINE_LIMIT]
            rest = others[-1][:LINE_LIMIT]
            skipping = len(rest) >= LINE_LIMIT
    if rest:
        yield rest


def has_rays_workers(path: Path) -> bool:
    """Whether a log is one to which Ray brings the lines of workers on other nodes, by its first
    megabytes. Raises OSError."""
    with path.open("rb") as file:
        return re.search(rb"\(RayWorker\w* pid=\d+, ip=", file.read(1 << 23)) is not None


def without_digits(text: str) -> str:
    """A text as lines are compared by `read_new_lines`."""
    return text.translate(_NO_DIGITS)


def read_new_lines(
    path: Path, is_plain: Callable[[LogLine], bool], again: Callable[[bytes, LogLine], None]
) -> Iterator[LogLine]:
    """The lines of a log as `join_wrapped` gives them, ten times as fast where they repeat: one
    that differs in digits alone from a plain line is not given again, unless a later piece
    continues it. ``is_plain``: it says nothing, whatever digits stand in it. ``again`` is told of a
    line that is not given, and of the plain one that it is like."""
    plain: dict[bytes, LogLine] = {}
    current: LogLine | None = None
    pending: bytes | None = None  # a plain line in the place of `held`
    key = b""

    def give(line: LogLine, by: bytes) -> Iterator[LogLine]:
        yield line
        if by and not line.container and len(plain) < _PLAIN_LIMIT and is_plain(line):
            plain[by] = line

    for number, raw in enumerate(read_raw_lines(path)):
        new_key = raw.translate(None, _DIGITS)
        like = plain.get(new_key)
        if like is not None:
            if current is not None:
                yield from give(current, key)
                current = None
            pending = raw
            again(raw, like)
            continue
        line = replace(clean(raw.decode("utf-8", errors="replace")), number=number)
        if not line.text:
            continue
        if pending is not None:
            if line.bare and line.is_indented:
                plain_one = clean(pending.decode("utf-8", errors="replace"))
                current, key = replace(plain_one, number=number - 1), b""
            pending = None
        if current is not None:
            if continues(line, current):
                current, key = join(current, line), b""
                continue
            yield from give(current, key)
        current, key = line, new_key
    if current is not None:
        yield from give(current, key)


def cut(text: str, limit: int = 400, *, around: int = 0) -> str:
    """At most `limit` characters of a line, with those at index `around` among them: whole words,
    and an ellipsis where something is left out."""
    text = text.strip()
    if len(text) <= limit:
        return text
    start = 0 if around < limit // 2 else min(around - limit // 4, len(text) - limit)
    first = start + (start > 0)  # an ellipsis takes the place of a character
    last = start + limit
    last -= last < len(text)
    slack = limit // 8  # what is one word for so long is parted all the same
    if start:
        first = next((n for n in range(first, first + slack) if not _in_word(text, n)), first)
    if last < len(text):
        last = next((n for n in range(last, last - slack, -1) if not _in_word(text, n)), last)
    before, after = "…" if first else "", "…" if last < len(text) else ""
    return f"{before}{text[first:last].strip()}{after}"


def _in_word(text: str, place: int) -> bool:
    return all(c.isalnum() or c in "_.-" for c in text[place - 1 : place + 1])
