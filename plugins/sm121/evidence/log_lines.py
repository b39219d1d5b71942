"""Read server logs as streams of clean lines (`sm121.evidence.log_message`), in bounded memory."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sm121.evidence.log_message import LogLine, clean

#: The number of bytes at which a physical line is truncated. vLLM's configuration line has about
#: 8,000 bytes.
LINE_LIMIT = 65_536
#: The number of characters at which a line that was joined from pieces is truncated.
JOIN_LIMIT = 8_192

_BLOCK_BYTES = 1 << 18
#: The maximum number of different plain lines that `read_new_lines` remembers.
_PLAIN_LIMIT = 20_000
#: The number of bytes at the beginning of a log that are searched for Ray's workers.
_RAY_SEARCHED_BYTES = 1 << 23
_RAY_WORKER = re.compile(rb"\(RayWorker\w* pid=\d+, ip=")
_DIGITS = b"0123456789"
_NO_DIGITS = {ord(digit): None for digit in "0123456789"}


def join_wrapped(lines: Iterable[str]) -> Iterator[LogLine]:
    """Clean lines, and join lines that were wrapped when the log was posted.

    A line that starts with blanks and has no prefix is taken as a continuation of the line before
    it. The frames of a stack trace are therefore joined to their ``Traceback`` line.

    Args:
        lines: The physical lines.

    Yields:
        The lines that are not empty.
    """
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
    """Return whether a line continues the line before it.

    Args:
        line: The line.
        held: The line before `line`.
    """
    return line.bare and line.is_indented and line.container == held.container


def join(held: LogLine, line: LogLine) -> LogLine:
    """Join a line and its continuation.

    Args:
        held: The line.
        line: The continuation: the rest of a wrapped line, or a frame of a stack.

    Returns:
        The joined line, truncated to `JOIN_LIMIT` characters.
    """
    if len(held.text) >= JOIN_LIMIT:
        return held
    return replace(held, text=f"{held.text} {line.text.strip()}"[:JOIN_LIMIT])


def read_raw_lines(path: Path) -> Iterator[bytes]:
    """Read the lines of a log in bounded memory. A carriage return also ends a line.

    Args:
        path: The log.

    Yields:
        The lines that are not empty, each truncated to `LINE_LIMIT` bytes.

    Raises:
        OSError: The file cannot be read.
    """
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
                    yield piece[:LINE_LIMIT]
            rest = others[-1][:LINE_LIMIT]
            skipping = len(rest) >= LINE_LIMIT
    if rest:
        yield rest


def has_rays_workers(path: Path) -> bool:
    """Return whether a log contains lines that Ray copied from workers on other nodes.

    Args:
        path: The log. Its first megabytes are searched.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return _RAY_WORKER.search(file.read(_RAY_SEARCHED_BYTES)) is not None


def without_digits(text: str) -> str:
    """Remove the digits from a text. `read_new_lines` compares lines without digits.

    Args:
        text: The text.
    """
    return text.translate(_NO_DIGITS)


@dataclass(slots=True)
class _Held:
    """A line that the next line may continue."""

    line: LogLine
    #: The line's bytes without digits; empty once the line was joined with a continuation.
    key: bytes


def read_new_lines(
    path: Path, is_plain: Callable[[LogLine], bool], again: Callable[[bytes, LogLine], None]
) -> Iterator[LogLine]:
    """Read the lines of a log as `join_wrapped` does, but ten times as fast if lines repeat.

    Args:
        path: The log.
        is_plain: Returns whether the caller can ignore a line, even with other digits.
        again: Called with each line that is left out, and with the plain line from which it differs
            only in its digits.

    Yields:
        The lines. A line that differs from a plain line only in its digits is left out, unless the
        next line continues it.

    Raises:
        OSError: The file cannot be read.
    """
    plain: dict[bytes, LogLine] = {}
    held: _Held | None = None
    left_out: bytes | None = None  # the previous line, if it was left out

    def give(given: _Held) -> Iterator[LogLine]:
        line = given.line
        yield line
        if given.key and not line.container and len(plain) < _PLAIN_LIMIT and is_plain(line):
            plain[given.key] = line

    for number, raw in enumerate(read_raw_lines(path)):
        key = raw.translate(None, _DIGITS)
        like = plain.get(key)
        if like is not None:
            if held is not None:
                yield from give(held)
                held = None
            left_out = raw
            again(raw, like)
            continue
        line = replace(clean(raw.decode("utf-8", errors="replace")), number=number)
        if not line.text:
            continue
        if left_out is not None:
            if line.bare and line.is_indented:
                before = clean(left_out.decode("utf-8", errors="replace"))
                held = _Held(replace(before, number=number - 1), key=b"")
            left_out = None
        if held is not None:
            if continues(line, held.line):
                held = _Held(join(held.line, line), key=b"")
                continue
            yield from give(held)
        held = _Held(line, key)
    if held is not None:
        yield from give(held)
