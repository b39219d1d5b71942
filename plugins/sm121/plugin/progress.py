"""Where a run is: one line that is rewritten on a terminal; elsewhere a line with its time."""

from __future__ import annotations

import io
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TextIO

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from sm121.core.printable import printable
from sm121.core.verdict import Verdict
from sm121.run.verdict_file import TestReport
from sm121.session.forecast import Forecast

#: Where nothing was written for so long, a line says where the run is.
_LINE_EVERY_S = 60.0
#: On a terminal these lines are the rewritten one's; the last of a start is kept.
_PASSING = ("server", "measuring")
_MOST_CHARACTERS = 300


def clock_time(seconds: float) -> str:
    """Minutes and seconds, as 3:07."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """Where the run is.

    Args:
        file: a file of its own on the terminal or the pipe; pytest captures the usual one.
        costs: what each level will ask.
        every_s: where there is no terminal, seconds between two lines.
        clock: seconds.
    """

    def __init__(
        self,
        file: TextIO,
        costs: Mapping[str, Forecast],
        *,
        every_s: float = _LINE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._costs, self._clock, self._every_s = costs, clock, every_s
        self._began = self._level_began = self._written = clock()
        self._level, self._test, self._waits = "", "", ""
        self._done: Counter[str] = Counter()
        self._verdicts: Counter[Verdict] = Counter()
        self._of_level: Counter[Verdict] = Counter()
        self._reasons: set[str] = set()
        self._file, self._lock, self._ended = file, threading.RLock(), threading.Event()
        self._live: Live | None = None
        console = Console(file=file)
        if console.is_terminal and not console.is_dumb_terminal:
            console.width = os.get_terminal_size(file.fileno()).columns or 80
            self._live = Live(
                get_renderable=self._shown,
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
        """Whether there is a line that is rewritten."""
        return self._live is not None

    def begin(self, level: str, test: str) -> None:
        """A check begins, or its turn is waited for."""
        if level != self._level:
            self._end_level()
            self._level, self._level_began = level, self._clock()
            cost = self._costs.get(level)
            if cost is not None:
                about = f", about {clock_time(cost.seconds)}" if cost.seconds else ""
                self.say(level, f"{cost.checks} check{'s'[: cost.checks != 1]}{about}")
        self._test, self._waits = test.rpartition("::")[2], ""

    def end(self, test: TestReport, *, asked: bool) -> None:
        """A check has ended. A failure is shown at once; those for the same reason are counted.

        Args:
            test: what came of it.
            asked: it was not known from the start that it cannot run.
        """
        self._waits = ""
        self._done[test.level] += asked
        verdict = test.counted
        self._verdicts[verdict] += 1
        self._of_level[verdict] += 1
        if verdict in (Verdict.PASS, Verdict.NOT_RUN) or test.message in self._reasons:
            return
        self._reasons.add(test.message)
        self.say(verdict.value, f"{test.id}: {test.message}"[:_MOST_CHARACTERS])

    def say(self, what: str, line: str) -> None:
        """Show a line. On a terminal, what only passes is shown in the rewritten line."""
        with self._lock:
            if self._live is not None and what.startswith(_PASSING):
                self._waits = f"{what}: {line}"
                if not line.startswith("ready"):
                    return
                self._waits = ""
            self._write(f"[{time.strftime('%H:%M:%S')}] {what}: {line}")

    def stop(self) -> None:
        """Clear the line. Nothing is shown from now on."""
        if self._ended.is_set():
            return
        self._end_level()
        self._ended.set()
        with self._lock:
            if self._live is not None:
                self._live.stop()
            self._file.close()

    def line(self) -> str:
        """Level, test, what is waited for, time."""
        elapsed = self._clock() - self._began
        parts = [clock_time(elapsed)]
        if (left := self._left()) is not None:
            parts[0] += f" of about {clock_time(elapsed + left)}"
        if (cost := self._costs.get(self._level)) is not None:
            done = min(self._done[self._level] + 1, cost.checks)
            parts.append(f"{self._level} {done}/{cost.checks}")
        elif self._level:
            parts.append(self._level)
        parts += [self._test, self._waits, self._counts(self._verdicts, failures_only=True)]
        return printable(" | ".join(part for part in parts if part))

    def _left(self) -> float | None:
        """Seconds that are expected to be left: of the level at hand what its time leaves, at
        least its share of checks."""
        if not any(cost.seconds for cost in self._costs.values()):
            return None
        return sum(
            cost.seconds * (1 - min(self._done[level] / max(cost.checks, 1), 1))
            for level, cost in self._costs.items()
        )

    def _counts(self, verdicts: Counter[Verdict], *, failures_only: bool = False) -> str:
        left_out = (Verdict.PASS, Verdict.NOT_RUN) if failures_only else ()
        return ", ".join(
            f"{count} {verdict.value}"
            for verdict in Verdict
            if (count := verdicts[verdict]) and verdict not in left_out
        )

    def _end_level(self) -> None:
        if self._level and self._of_level:
            took = clock_time(self._clock() - self._level_began)
            self.say(self._level, f"{self._counts(self._of_level)}, {took}")
        self._of_level.clear()

    def _shown(self) -> Text:
        return Text(self.line(), no_wrap=True, overflow="ellipsis", style="dim")

    def _write(self, line: str) -> None:
        if self._ended.is_set():
            return
        self._written = self._clock()
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        self._file.write(f"{line}\n")
        self._file.flush()

    def _keep_saying(self) -> None:
        while not self._ended.wait(min(self._every_s, 1.0)):
            with self._lock:
                if self._clock() - self._written >= self._every_s:
                    self._write(f"[{time.strftime('%H:%M:%S')}] {self.line()}")


def of_run(config: pytest.Config, costs: Mapping[str, Forecast]) -> Progress | None:
    """The progress of this process's own tests; None where pytest's own output is wanted (-v, -s),
    or tests run in workers."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    distributed = getattr(config.option, "dist", "no") != "no" or hasattr(config, "workerinput")
    if reporter is None or distributed or reporter.verbosity > 0:
        return None
    if config.getoption("capture") == "no" or config.option.usepdb:
        return None
    try:
        own = os.dup(reporter._tw._file.fileno())
    except (AttributeError, io.UnsupportedOperation):
        return None  # pytest writes into memory: somebody drives it from Python
    reporter.showfspath = False
    return Progress(os.fdopen(own, "w", encoding="utf-8", errors="replace"), costs)
