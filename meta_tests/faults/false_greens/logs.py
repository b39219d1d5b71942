"""Item 9: the log of another server proves the kernel path of an attached server."""

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from meta_tests.fakes.scripted_engine import lines_of_a_start
from meta_tests.fakes.scripted_sessions import ACCEPTED, FALLBACK, attached_engine, script, tell
from meta_tests.faults.false_greens import Case, Kit, Outcome
from meta_tests.two_steps import in_two_steps
from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.run.verdict_file import VerdictFile
from sm121.session import target
from sm121.session.given_attached import GivenServer
from sm121.session.session import Session
from sm121.session.settings import Settings

_NUMBERS = itertools.count()


def file_of(kit: Kit, url: str, log: Path) -> VerdictFile:
    """Return the verdict file of a script's session that attaches to a URL with a log."""
    file: list[VerdictFile] = []

    def doing(session: Session) -> None:
        session.run.server()
        file.append(session.run.record.file)

    script(kit, f"{log.stem}-report", doing, attached=GivenServer(url, log=log))
    return file[0]


def two_logs(kit: Kit) -> tuple[Path, Path]:
    """Return two files: the server's own log, and the log that the user names."""
    number = next(_NUMBERS)
    return kit.tmp_path / f"own-{number}.log", kit.tmp_path / f"given-{number}.log"


@in_two_steps
def given_log(kit: Kit, write: Callable[[Path, Path], None], *server: str) -> Outcome:
    """Decide whether the kernel path of an attached server is proven by a log that `write` makes
    from the server's own log.

    The result is FAIL if the path is not proven."""
    log, copy = two_logs(kit)
    with attached_engine(log, *server) as (url, _), writing(write, log, copy):
        try:
            file = file_of(kit, url, copy)
        except UsageError as error:
            return Outcome("refused", str(error))
    unproven = "; ".join(file.unproven)
    proven = file.engine.path.attention == "CPU_ATTN" and not unproven
    return Outcome("PASS" if proven else "INVALID", unproven)


@contextlib.contextmanager
def writing(write: Callable[[Path, Path], None], log: Path, copy: Path) -> Iterator[None]:
    """Call `write` repeatedly, like a process that continues to write to a log."""
    write(log, copy)
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.05):
            write(log, copy)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def its_own(log: Path, copy: Path) -> None:
    if not copy.exists():
        copy.symlink_to(log)


def a_copy(log: Path, copy: Path) -> None:
    if not copy.exists():
        copy.write_text(log.read_text("utf-8"), "utf-8")


@in_two_steps
def with_a_start(log: Path, copy: Path, *, in_days: float = 0.0, **start: Any) -> None:
    """Write the start of another server's log, followed by this server's lines about its
    requests."""
    access = [line for line in log.read_text("utf-8").splitlines() if "HTTP/1.1" in line]
    if in_days:
        start["at"] = time.time() + in_days * 86400
    put(copy, lines_of_a_start(**start) + "\n".join([*access, ""]))


@in_two_steps
def a_copy_that_goes_on(log: Path, copy: Path, line: str) -> None:
    """Append a line to a copy of the log repeatedly, as another process would."""
    a_copy(log, copy)
    with copy.open("a") as stream:
        stream.write(line + "\n")


def beginning_cut_off(log: Path, copy: Path) -> None:
    lines = log.read_text("utf-8").splitlines(keepends=True)
    put(copy, "".join(lines[9:]))


def put(file: Path, text: str) -> None:
    """Write the whole file at once, so that no reader gets a part of it."""
    new = file.with_suffix(".new")
    new.write_text(text, "utf-8")
    new.replace(file)


@in_two_steps
def its_log_has_another_start(kit: Kit, *, share: bool) -> Outcome:
    """Let two servers with different kernel paths write into one file."""
    log = kit.tmp_path / f"shared-{share}.log"
    other = log.with_name(f"other-{share}.log")
    with attached_engine(log) as (url, _):
        if share:
            other.hardlink_to(log)
        with attached_engine(other, "--attention", "TRITON_ATTN"):
            unproven = "; ".join(file_of(kit, url, log).unproven)
    return Outcome("INVALID" if unproven else "PASS", unproven)


@in_two_steps
def log_is_moved(kit: Kit, move: Callable[[Path], object], line: str) -> Outcome:
    """Truncate, rename or remove an attached server's log after its path was judged."""
    log, _ = two_logs(kit)

    def doing(session: Session) -> None:
        session.run.paths.contradictions(session.run.server())
        move(log)
        tell(session, f"do=print&text={quote(line)}")

    with attached_engine(log) as (url, _):
        return script(kit, f"{log.stem}-report", doing, attached=GivenServer(url, log=log))


@in_two_steps
def log_of_an_ab_side(kit: Kit, write: Callable[[Path, Path], None]) -> Outcome:
    log, copy = two_logs(kit)
    with attached_engine(log) as (url, _):
        write(log, copy)
        chosen = profile.load("cpu-tiny-gpt-oss")
        server = target.attach_to(url, copy, Settings(), chosen)
    reason = server.why_no_log if server.log is None else ""
    return Outcome("INVALID" if reason else "PASS", reason)


# The ways in which a log changes.
cut = functools.partial(os.truncate, length=0)
removed = Path.unlink


def renamed(log: Path) -> None:
    log.rename(log.with_suffix(".1"))


RATES = (
    "(EngineCore pid=2) INFO 11-20 10:00:00 [loggers.py:335] Avg prompt "
    "throughput: 12.0 tokens/s, x"
)
ACCESS = 'INFO:     10.0.0.7:1234 - "POST /v1/completions HTTP/1.1" 200 OK'


CASES = [
    Case(
        item="9 Any log proves an attached server",
        name="the server logs no request",
        fault=given_log(its_own, "--no-access-log"),
        clean=given_log(its_own),
        expected="no line about the requests",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="two servers write into one log",
        fault=its_log_has_another_start(share=True),
        clean=its_log_has_another_start(share=False),
        expected="several servers write to it",
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a copy of the right log, to which a server with a steady load appends",
        fault=given_log(a_copy_that_goes_on(RATES)),
        clean=given_log(its_own),
        expected="no line about the requests",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a log whose beginning was rotated away",
        fault=given_log(beginning_cut_off),
        clean=given_log(its_own),
        expected="it has no start of vllm",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a log of another version, which grows with our requests",
        fault=given_log(with_a_start(version="0.24.0")),
        clean=given_log(its_own),
        expected="expected a log of vllm 0.32.0, got one of 0.24.0",
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a log of another model, which grows with our requests",
        fault=given_log(with_a_start(model="other", path="/models/other")),
        clean=given_log(its_own),
        expected="got one of other",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a log whose start is a year old",
        fault=given_log(with_a_start(in_days=-363)),
        clean=given_log(its_own),
        expected="the log's last start is of",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a log whose start is of tomorrow",
        fault=given_log(with_a_start(in_days=1)),
        clean=given_log(its_own),
        expected="the log's last start is of",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a copy of the right log, which does not grow",
        fault=given_log(a_copy),
        clean=given_log(its_own),
        expected="it did not grow, so it may be only a copy",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a copy of the right log, to which another process appends",
        fault=given_log(a_copy_that_goes_on(ACCESS)),
        clean=given_log(its_own),
        expected="no line about the requests",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a copy of the right log, given to a side of --ab",
        fault=log_of_an_ab_side(a_copy),
        clean=log_of_an_ab_side(its_own),
        expected="no line about the requests",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a fallback after the log was cut",
        fault=log_is_moved(cut, FALLBACK),
        clean=log_is_moved(cut, ACCEPTED),
        expected="the server to use the kernel path of the profile until it is stopped",
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a fallback after the log was renamed",
        fault=log_is_moved(renamed, FALLBACK),
        clean=log_is_moved(renamed, ACCEPTED),
        expected="the server to use the kernel path of the profile until it is stopped",
        slow=True,
    ),
    Case(
        item="9 Any log proves an attached server",
        name="a fallback after the log was removed",
        fault=log_is_moved(removed, FALLBACK),
        clean=log_is_moved(removed, ACCEPTED),
        expected="the server to use the kernel path of the profile until it is stopped",
        slow=True,
    ),
]
