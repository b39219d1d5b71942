"""Holds back pytest's output before the first test.

So a refused request is one line, and so is a run of which no test is selected. After eight seconds
of waiting nothing more is held back.
"""

import io
import threading
from typing import TextIO

import pytest

from sm121.plugin import workers

#: A user who waits for so long sees what there is.
_LONGEST_S = 8.0
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
        self.is_dropped = False
        self._timer = threading.Timer(_LONGEST_S, self.release)
        self._timer.daemon = True
        self._timer.start()

    def release(self) -> None:
        """Write the text that was held back, and hold nothing more."""
        self._timer.cancel()
        with self._lock:
            if self._writer._file is not self._memory:
                return
            self._writer._file = self._file
            if not self.is_dropped:
                self._writer.write(self._memory.getvalue(), flush=True)

    def drop(self) -> None:
        """Forget the text that is held back, and the text that comes."""
        self.is_dropped = True


def hold(config: pytest.Config) -> None:
    """Hold back the output of the terminal reporter, if there is one.

    Args:
        config: pytest's.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and hasattr(getattr(reporter, "_tw", None), "_file"):
        config.stash[_HELD] = HeldOutput(reporter)
        config.add_cleanup(config.stash[_HELD].release)


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
