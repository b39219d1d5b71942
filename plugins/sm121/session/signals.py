"""Signals: SIGTERM ends a run in the same way as Ctrl-C; SIGALRM ends a test."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from traceback import walk_stack
from types import FrameType
from typing import Any

from sm121.session.session import Session

#: The delay in seconds after which a signal is sent again if it came at the wrong moment.
_A_MOMENT = 0.01


def give_time(seconds: float) -> None:
    """Extend the timeout of the running test, if pytest-timeout's alarm is set.

    Args:
        seconds: The added time.
    """
    remaining_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if remaining_s > 0:
        signal.setitimer(signal.ITIMER_REAL, remaining_s + seconds)


@contextlib.contextmanager
def own_time() -> Iterator[None]:
    """Do not count the time within the block for the running test's timeout."""
    remaining_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining_s)


class Signals:
    """Turns SIGINT and SIGTERM into one KeyboardInterrupt, until `restore`.

    Later signals are ignored. A signal is sent again a moment later if Python would drop it (in a
    `__del__`), or if pytest could not print its place (a frame without a line).

    Args:
        session: The session to end.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._session.interrupted:
            return
        if _is_wrong_moment(frame):
            main = threading.main_thread().ident
            assert main is not None
            threading.Timer(_A_MOMENT, signal.pthread_kill, (main, number)).start()
            return
        self._session.interrupt()
        raise KeyboardInterrupt(signal.Signals(number).name)

    def again(self) -> None:
        """Raise KeyboardInterrupt again if other code caught the exception of a signal."""
        if self._session.interrupted:
            raise KeyboardInterrupt("the run was interrupted, but continued")

    def restore(self) -> None:
        """Restore the earlier signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _is_wrong_moment(frame: FrameType | None) -> bool:
    """Whether an exception raised in a frame would be dropped or could not be printed."""
    for each, _ in walk_stack(frame):
        if each.f_code.co_name == "__del__" or each.f_lineno is None:
            return True
    return False
