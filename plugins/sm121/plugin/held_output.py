"""Holds back pytest's output before the first test.

So a refused request is one line, and so is a run of which no test is selected. Collecting the tests
takes longer on a busy machine, and nothing is shown for it but that it goes on.
"""

import contextlib
import io
import os
import threading
from typing import TextIO

import pytest

from sm121.plugin import workers

#: A user who waits for so long sees what the run is doing.
_SILENT_S = 8.0
#: Shown on a terminal, and overwritten. Elsewhere `progress.going_on` writes lines.
_WAITING = "collecting the tests ..."
_HELD = pytest.StashKey["HeldOutput"]()


class _Memory(io.StringIO):
    """Text that is held back. In all other ways it is the terminal's file."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return self._file.isatty()


class HeldOutput:
    """The terminal reporter's output, held back from now on.

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
        # Of its own: while a test file is imported, pytest captures what goes to the usual one.
        self._beside = _duplicate(self._file)
        self._timer = threading.Timer(_SILENT_S, self._show_that_it_goes_on)
        self._timer.daemon = True
        self._timer.start()

    def note(self, line: str) -> bool:
        """Take a line on the work at hand. It is shown at once after a long wait.

        Args:
            line: The line.

        Returns:
            False if nothing is held back: the caller shows the line.
        """
        with self._lock:
            if self._writer._file is not self._memory:
                return False
            self._notes.append(line)
            if self._is_long:
                self._show_notes()
            return True

    def release(self) -> None:
        """Write the text that was held back, and hold nothing more."""
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
        """Forget the text that is held back, and the text that comes."""
        self.is_dropped = True

    def _show_that_it_goes_on(self) -> None:
        with self._lock:
            if self._writer._file is self._memory:
                self._is_long = True
                self._show_notes()

    def _show_notes(self) -> None:
        """Write the notes, and on a terminal below them that the work goes on."""
        if self._beside is None:
            return
        self._write("".join(f"{line}\n" for line in self._notes))
        self._notes.clear()
        if self._beside.isatty():
            self._write(_WAITING)

    def _write(self, text: str) -> None:
        """Write at once, in place of the line that is to be overwritten."""
        assert self._beside is not None
        if self._is_long and self._beside.isatty():
            self._beside.write("\r" + " " * len(_WAITING) + "\r")
        self._beside.write(text)
        self._beside.flush()


def _duplicate(file: TextIO) -> TextIO | None:
    """Return the same output as a file that pytest does not capture; None if it is in memory."""
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):
        return os.fdopen(os.dup(file.fileno()), "w", encoding="utf-8", errors="replace")
    return None


def hold(config: pytest.Config) -> None:
    """Hold back the output of the terminal reporter, if there is one.

    Args:
        config: pytest's.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and hasattr(getattr(reporter, "_tw", None), "_file"):
        config.stash[_HELD] = HeldOutput(reporter)
        config.add_cleanup(config.stash[_HELD].release)


def note(config: pytest.Config, line: str) -> bool:
    """Take a line on the work at hand, if output is held back.

    Args:
        config: pytest's.
        line: The line.

    Returns:
        False if nothing is held back: the caller shows the line.
    """
    held = config.stash.get(_HELD, None)
    return held is not None and held.note(line)


def release(config: pytest.Config) -> None:
    """Show the output that is held back.

    Args:
        config: pytest's.
    """
    held = config.stash.get(_HELD, None)
    if held is not None:
        held.release()


def drop(config: pytest.Config) -> None:
    """Do not show the output that is held back: one line replaces it.

    Args:
        config: pytest's.
    """
    held = config.stash.get(_HELD, None)
    if held is not None:
        held.drop()


def tests_begin(config: pytest.Config) -> None:
    """Show the output that is held back, without ``-n``: a worker may still refuse the request.

    Args:
        config: pytest's.
    """
    if not workers.is_parallel(config):
        release(config)


def run_ended(config: pytest.Config, exit_status: int) -> None:
    """Show the output that is held back of a run without a test; none of a refused one.

    Args:
        config: pytest's.
        exit_status: How pytest ends.
    """
    if exit_status == pytest.ExitCode.USAGE_ERROR:
        drop(config)
    else:
        release(config)
