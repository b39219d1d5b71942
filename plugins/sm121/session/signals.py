"""SIGTERM ends a session in the same way as Ctrl-C; SIGALRM ends a test."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from sm121.session.session import Session


def give_time(seconds: float) -> None:
    """More time for the test that runs, where pytest-timeout's alarm is set."""
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    if left > 0:
        signal.setitimer(signal.ITIMER_REAL, left + seconds)


class Signals:
    """Turns SIGINT and SIGTERM into one KeyboardInterrupt, until `restore`.

    The first signal stops the run. Later ones are ignored, so that they cannot interrupt the stop.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._interrupt)
                for number in (signal.SIGINT, signal.SIGTERM)
            }

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        if not self._session.interrupted:
            self._session.interrupted = True
            raise KeyboardInterrupt(signal.Signals(number).name)

    def restore(self) -> None:
        """Put back what handled the signals before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
