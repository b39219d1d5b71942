"""The progress of a run: one line that is rewritten on a terminal.

Without a terminal, and if pytest prints its own lines (-v, -s, -n), a new line with the time is
printed at least every ten seconds.
"""

import contextlib
import io
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TextIO

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from sm121.core.node_id import name_of
from sm121.core.printable import printable
from sm121.core.time_range import TimeRange, clock
from sm121.core.verdict import Verdict
from sm121.engines.pool import StartReport
from sm121.run.record import ProgressLine
from sm121.run.verdict_file import TestReport
from sm121.session.forecast import Forecast
from sm121.session.remaining import Remaining

#: The time is checked each second, so that even on a busy machine a line comes within ten seconds.
_LINE_EVERY_S = 8.0
#: A test that has run for longer than this is shown with its duration.
_LONG_S = 10.0
_MOST_CHARACTERS = 300
#: Shown if a run takes longer than its forecast at the beginning.
_SLOWER = "slower than forecast"


@dataclass(frozen=True)
class _BegunLine:
    """An unfinished line of pytest: its width, and the test that it is about."""

    width: int = 0
    test: str = ""


class _Lines:
    """Writes lines to a file to which pytest may also write.

    Args:
        file: The file.
        width: Returns the width of pytest's unfinished line. None: pytest does not write here.
    """

    def __init__(self, file: TextIO, width: Callable[[], int] | None) -> None:
        self.file = file
        self.width = width
        #: The line of pytest that was interrupted to write a line of the suite.
        self._broken = _BegunLine()

    def write(self, line: str, test: str) -> None:
        """Write a line. `test`: the test that pytest's unfinished line is about."""
        width = 0
        if self.width is not None:
            width = self.width()
        begun = _BegunLine(width, test)
        if begun.width > 0 and begun != self._broken:
            self.file.write("\n")
        self.file.write(f"{line}\n")
        self.file.flush()
        self._broken = begun


@dataclass
class _Level:
    """The level that is running.

    Attributes:
        name: The name of the level; empty if several levels are running.
        began: The start of the level, by the clock of the progress.
        verdicts: The number of ended checks with each verdict.
    """

    name: str
    began: float
    verdicts: Counter[Verdict] = field(default_factory=Counter)


@dataclass
class _Results:
    """The results of the ended checks.

    Attributes:
        verdicts: The number of ended checks with each verdict.
        by_level: The number of ended checks of each level.
        reasons: The messages of the failures so far.
    """

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    by_level: Counter[str] = field(default_factory=Counter)
    reasons: set[str] = field(default_factory=set)


class Progress:
    """Shows the progress of a run.

    Args:
        file: A file that pytest does not capture.
        expected: The checks of the run.
        starts: The starts of the run's servers so far. The list grows during the run.
        width: Returns the width of pytest's unfinished line. None: pytest does not write here.
        every_s: Without a terminal: the seconds between two lines.
        clock: Returns a time in seconds.
    """

    def __init__(
        self,
        file: TextIO,
        expected: Forecast,
        starts: Sequence[StartReport] = (),
        *,
        width: Callable[[], int] | None = None,
        every_s: float = _LINE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._levels = expected.levels
        self._remaining = Remaining(expected, starts)
        self._clock = clock
        self._every_s = every_s
        now = clock()
        self._began = now
        self._written = now
        self._level = _Level("", now)
        self._waits = ""
        self._running: dict[str, float] = {}
        self._results = _Results()
        self._lines = _Lines(file, width)
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._live: Live | None = None
        console = Console(file=file)
        if console.is_terminal and not console.is_dumb_terminal and width is None:
            console.width = os.get_terminal_size(file.fileno()).columns or 80
            self._live = Live(
                get_renderable=self._rewritten,
                console=console,
                refresh_per_second=2,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        else:
            threading.Thread(target=self._keep_saying, name="progress", daemon=True).start()

    @property
    def rewrites(self) -> bool:
        """Whether one line is rewritten instead of adding lines."""
        return self._live is not None

    @property
    def is_alone(self) -> bool:
        """Whether pytest prints nothing for a test."""
        return self._lines.width is None

    def begin(self, level: str, test: str) -> None:
        """Record that a check begins or waits for its turn.

        Args:
            level: The level of the check; empty if several levels are running.
            test: The id of the check.
        """
        with self._lock:
            if level != self._level.name:
                self._begin_level(level)
            if level:
                self._running.clear()
            self._running[test] = self._clock()
            self._waits = ""
            self._remaining.begin(test, self._clock())

    def end(self, test: TestReport, *, name: str | None = None) -> None:
        """Record that a check has ended.

        The first failure for each reason is shown at once, if pytest does not show it.

        Args:
            test: The result of the check.
            name: The name that was given to `begin`, if that is not the id of the check.
        """
        with self._lock:
            self._waits = ""
            self._running.pop(name or test.id, None)
            self._remaining.end(name or test.id)
            self._results.by_level[test.level] += 1
            verdict = test.counted
            self._results.verdicts[verdict] += 1
            self._level.verdicts[verdict] += 1
        if verdict in (Verdict.PASS, Verdict.NOT_RUN) or test.message in self._results.reasons:
            return
        self._results.reasons.add(test.message)
        if self.is_alone:
            self.say(verdict.value, f"{test.id}: {test.message}"[:_MOST_CHARACTERS])

    def say(self, what: str, line: str, kind: ProgressLine = ProgressLine.NOTE) -> None:
        """Show a line.

        Args:
            what: The subject of the line.
            line: The line.
            kind: How long the line is shown. On a terminal, a passing line is a part of the
                rewritten line.
        """
        with self._lock:
            if kind is ProgressLine.READY:
                self._waits = ""
            elif kind is ProgressLine.PASSING:
                self._waits = f"{what}: {line}"
                if self._live is not None:
                    return
            self._write(f"[{time.strftime('%H:%M:%S')}] {what}: {line}")

    def stop(self) -> None:
        """Clear the line, and show nothing more."""
        if self._ended.is_set():
            return
        self._end_level()
        self._ended.set()
        with self._lock:
            if self._live is not None:
                self._live.stop()
            self._lines.file.close()

    def line(self) -> str:
        """Return the line: time, time left, level, test, current wait, and failures.

        This method takes no lock, because rich's thread calls it while it holds a lock for which
        `say` waits.
        """
        parts = [
            clock(self._clock() - self._began) + self._left(", ", " left"),
            self._level_line(),
            self._tests(),
            self._waits,
            self._counts(self._results.verdicts, left_out=(Verdict.PASS, Verdict.NOT_RUN)),
        ]
        return printable(" | ".join(part for part in parts if part))

    def _rewritten(self) -> Text:
        return Text(self.line(), no_wrap=True, overflow="ellipsis", style="dim")

    def _level_line(self) -> str:
        """Return the level with the number of its ended checks and of all its checks."""
        levels = list(self._levels)
        name = self._level.name
        if name:
            levels = [name]
        if not set(levels) <= set(self._levels):
            return name
        count = 0
        ended = 0
        for level in levels:
            checks = len(self._levels[level])
            count += checks
            ended += min(self._results.by_level[level], checks)
        return f"{name} {ended}/{count} ended".strip()

    def _tests(self) -> str:
        """Return the test that has run longest, and the number of other running tests."""
        running = self._running.copy()
        if not running:
            return ""
        first, began = min(running.items(), key=lambda item: item[1])
        text = name_of(first)
        ran = self._clock() - began
        if ran >= _LONG_S:
            text += f" for {clock(ran)}"
        others = len(running) - 1
        if others:
            text += f" and {others} more"
        return text

    def _left(self, before: str, after: str) -> str:
        """Return the remaining time of the run, with a text before it and a text after it.

        The result is empty if the remaining time is unknown or over.
        """
        left = self._remaining.shown(self._clock())
        if left is None or (left.time.high < 1.0 and not left.is_least):
            return ""
        if left.is_least and left.time.low < 1.0:  # "at least 0 s" says nothing
            return before + _SLOWER
        time = _between(left.time)
        if left.is_least:
            time = f"at least {clock(left.time.low)}"
        if left.is_slower:
            time = f"{_SLOWER}, {time}"
        return f"{before}{time}{after}"

    def _counts(self, verdicts: Counter[Verdict], left_out: Collection[Verdict] = ()) -> str:
        parts = []
        for verdict in Verdict:
            if verdicts[verdict] and verdict not in left_out:
                parts.append(f"{verdicts[verdict]} {verdict.value}")
        return ", ".join(parts)

    def _begin_level(self, level: str) -> None:
        self._running.clear()
        self._end_level()
        self._level = _Level(level, self._clock())
        if level not in self._levels:
            return
        checks = self._levels[level]
        unable = sum(not each.check.can_run for each in checks)
        about = f" ({unable} cannot run)" if unable else ""
        remaining = self._left("; ", " left of the run")
        number = "1 check" if len(checks) == 1 else f"{len(checks)} checks"
        self.say(level, f"{number}{about}{remaining}")

    def _end_level(self) -> None:
        level = self._level
        if level.name and level.verdicts:
            took = clock(self._clock() - level.began)
            remaining = self._left("; ", " left of the run")
            self.say(level.name, f"{self._counts(level.verdicts)}, {took}{remaining}")
        level.verdicts.clear()

    def _write(self, line: str) -> None:
        if self._ended.is_set():
            return
        self._written = self._clock()
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        test = ""
        if self._level.name:
            test = next(iter(self._running), "")
        self._lines.write(line, test)

    def _keep_saying(self) -> None:
        while not self._ended.wait(min(self._every_s, 1.0)):
            with self._lock:
                if self._clock() - self._written >= self._every_s:
                    self._write(f"[{time.strftime('%H:%M:%S')}] {self.line()}")


def _between(time: TimeRange) -> str:
    """Return a remaining time in words, such as "about 2:00" or "1:30 to 4:00"."""
    low = clock(time.low)
    high = clock(time.high)
    is_one = time.high <= time.low * 1.15 or low == high
    if is_one:
        return f"about {clock((time.low + time.high) / 2)}"
    return f"{low} to {high}"


def of_run(
    config: pytest.Config, expected: Forecast, starts: Sequence[StartReport] = ()
) -> Progress | None:
    """Return the progress of the tests of this process, or of its workers.

    Args:
        config: The configuration of pytest.
        expected: The checks of the run.
        starts: The starts of the run's servers so far. The list grows during the run.

    Returns:
        The progress. None with -qq or --pdb, and in a worker.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    file = _file_beside(config)
    if reporter is None or file is None:
        return None
    distributed = getattr(config.option, "dist", "no") != "no"
    if reporter.verbosity > 0 or distributed or config.getoption("capture") == "no":

        def width() -> int:
            return int(reporter._tw.width_of_current_line)

        return Progress(file, expected, starts, width=width, every_s=_LINE_EVERY_S)
    reporter.showfspath = False
    return Progress(file, expected, starts, every_s=_LINE_EVERY_S)


@contextlib.contextmanager
def going_on(config: pytest.Config, what: str) -> Iterator[None]:
    """Show every ten seconds that work other than a test is in progress, during the block.

    On a terminal nothing is shown, because the user sees pytest's last line there.

    Args:
        config: The configuration of pytest.
        what: The work in words.
    """
    file = _file_beside(config)
    if file is None:
        yield
        return
    with file:
        if file.isatty():
            yield
            return
        ended = threading.Event()
        began = time.monotonic()

        def keep_saying() -> None:
            while not ended.wait(_LINE_EVERY_S):
                took = clock(time.monotonic() - began)
                file.write(f"[{time.strftime('%H:%M:%S')}] {what} for {took}\n")
                file.flush()

        thread = threading.Thread(target=keep_saying, name="going-on", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _file_beside(config: pytest.Config) -> TextIO | None:
    """Return the terminal reporter's output as a file that pytest does not capture.

    None if no progress is shown: with -qq, --pdb or --collect-only, in a worker, or if the output
    goes into memory.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput") or config.option.usepdb:
        return None
    if reporter.verbosity < -1 or config.option.collectonly:
        return None
    try:
        descriptor = os.dup(reporter._tw._file.fileno())
    except (AttributeError, io.UnsupportedOperation):
        return None  # pytest writes into memory: a Python program runs it
    return os.fdopen(descriptor, "w", encoding="utf-8", errors="replace")
