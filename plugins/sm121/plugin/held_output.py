"""Holds back pytest's output before the first test.

If the request is refused or no test is selected, pytest prints one line and nothing else. If
collecting the tests takes long, as on a busy machine, the suite shows that it is still in progress.
"""

import contextlib
import io
import os
import threading
from typing import TextIO

import pytest

from sm121.plugin import workers

#: After this time, a waiting user sees what the run is doing.
_SILENT_S = 8.0
#: Shown on a terminal, where it is later overwritten. Without a terminal, `progress.going_on`
#: writes lines.
_WAITING = "collecting the tests ..."
_HELD = pytest.StashKey["HeldOutput"]()
#: The value of ``--benchmark-quiet``.
_QUIET = pytest.StashKey[bool]()


class _Memory(io.StringIO):
    """A buffer for text that is held back; other attributes are those of the terminal's file."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return self._file.isatty()


class HeldOutput:
    """Holds back the output of pytest's terminal reporter from its creation on.

    Args:
        reporter: pytest's terminal reporter.
    """

    def __init__(self, reporter: "pytest.TerminalReporter") -> None:
        self._writer = reporter._tw
        self._file = self._writer._file
        self._memory = _Memory(self._file)
        self._writer._file = self._memory
        self._lock = threading.Lock()
        self._notes: list[str] = []
        self._is_long = False
        self.is_dropped = False
        # Use a separate file, because pytest captures the usual one while it imports a test file.
        self._beside = _duplicate(self._file)
        self._timer = threading.Timer(_SILENT_S, self._show_that_it_goes_on)
        self._timer.daemon = True
        self._timer.start()

    def note(self, line: str) -> bool:
        """Add a line on the work in progress. After a long wait it is shown at once.

        Args:
            line: The line.

        Returns:
            False if no output is held back. Then the caller must show the line.
        """
        with self._lock:
            if self._writer._file is not self._memory:
                return False
            self._notes.append(line)
            if self._is_long:
                self._show_notes()
            return True

    def release(self) -> None:
        """Write the text that was held back, and stop holding back."""
        self._timer.cancel()
        with self._lock:
            if self._writer._file is not self._memory:
                return
            self._writer._file = self._file
            if self._beside is not None:
                self._write("")
                self._beside.close()
            if not self.is_dropped:
                notes = "".join(f"{line}\n" for line in self._notes)
                self._writer.write(self._memory.getvalue() + notes, flush=True)

    def drop(self) -> None:
        """Discard the text that is held back, and all later text."""
        self.is_dropped = True

    def _show_that_it_goes_on(self) -> None:
        with self._lock:
            if self._writer._file is self._memory:
                self._is_long = True
                self._show_notes()

    def _show_notes(self) -> None:
        """Write the notes, and below them, on a terminal, that work is in progress."""
        if self._beside is None:
            return
        self._write("".join(f"{line}\n" for line in self._notes))
        self._notes.clear()
        if self._beside.isatty():
            self._write(_WAITING)

    def _write(self, text: str) -> None:
        """Write at once, over the line that says that work is in progress."""
        assert self._beside is not None
        if self._is_long and self._beside.isatty():
            self._beside.write("\r" + " " * len(_WAITING) + "\r")
        self._beside.write(text)
        self._beside.flush()


def _duplicate(file: TextIO) -> TextIO | None:
    """Return a duplicate of the output file that pytest does not capture; None if in memory."""
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):
        return os.fdopen(os.dup(file.fileno()), "w", encoding="utf-8", errors="replace")
    return None


def silence_benchmarks(config: pytest.Config) -> None:
    """Keep pytest-benchmark from printing the compared file above the line of a refusal.

    Args:
        config: The configuration of pytest, before pytest-benchmark has read its options.
    """
    if hasattr(config.option, "benchmark_quiet"):
        config.stash[_QUIET] = config.option.benchmark_quiet
        config.option.benchmark_quiet = True


def _restore_benchmarks(config: pytest.Config) -> None:
    """Undo `silence_benchmarks`. pytest-benchmark has loaded the compared files."""
    benchmarks = getattr(config, "_benchmarksession", None)
    if benchmarks is None or _QUIET not in config.stash:
        return
    config.option.benchmark_quiet = config.stash[_QUIET]
    if not config.stash[_QUIET] and not benchmarks.verbose:
        benchmarks.quiet = False
        benchmarks.logger.level = benchmarks.logger.NORMAL


def hold(config: pytest.Config) -> None:
    """Hold back the output of the terminal reporter, if there is one.

    Args:
        config: The configuration of pytest.
    """
    _restore_benchmarks(config)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and hasattr(getattr(reporter, "_tw", None), "_file"):
        config.stash[_HELD] = HeldOutput(reporter)
        config.add_cleanup(config.stash[_HELD].release)


def note(config: pytest.Config, line: str) -> bool:
    """Add a line on the work in progress, if output is held back.

    Args:
        config: The configuration of pytest.
        line: The line.

    Returns:
        False if no output is held back. Then the caller must show the line.
    """
    held = config.stash.get(_HELD, None)
    return held is not None and held.note(line)


def release(config: pytest.Config) -> None:
    """Show the output that was held back.

    Args:
        config: The configuration of pytest.
    """
    held = config.stash.get(_HELD, None)
    if held is not None:
        held.release()


def drop(config: pytest.Config) -> None:
    """Discard the output that was held back, because the run prints only one line in its place.

    Args:
        config: The configuration of pytest.
    """
    held = config.stash.get(_HELD, None)
    if held is not None:
        held.drop()


def tests_begin(config: pytest.Config) -> None:
    """Show the output that was held back. With ``-n``, wait: a worker may still refuse the request.

    Args:
        config: The configuration of pytest.
    """
    if not workers.is_parallel(config):
        release(config)


def run_ended(config: pytest.Config, exit_status: int) -> None:
    """Show the output of a run without a test; discard the output of a refused run.

    Args:
        config: The configuration of pytest.
        exit_status: The exit status of pytest.
    """
    if exit_status == pytest.ExitCode.USAGE_ERROR:
        drop(config)
    else:
        release(config)
