"""SIGTERM ends a session in the same way as Ctrl-C; SIGALRM ends a test."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from traceback import walk_stack
from types import FrameType
from typing import Any

from sm121.session.session import Session

#: Seconds after which a signal that came at the wrong moment is sent once more.
_A_MOMENT = 0.01


def give_time(seconds: float) -> None:
    """Give more time to the test that runs, if pytest-timeout's alarm is set.

    Args:
        seconds: The added time.
    """
    remaining_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if remaining_s > 0:
        signal.setitimer(signal.ITIMER_REAL, remaining_s + seconds)


@contextlib.contextmanager
def own_time() -> Iterator[None]:
    """Stop the time of the test that runs while the block lasts."""
    remaining_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining_s)


class Signals:
    """Turns SIGINT and SIGTERM into one KeyboardInterrupt, until `restore`.

    Later signals are ignored. A signal that Python would drop (in a `__del__`), or with which
    pytest cannot print the place (a frame without a line), is sent again a moment later.

    Args:
        session: The session that a signal ends.
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
        self._session.interrupted = True
        raise KeyboardInterrupt(signal.Signals(number).name)

    def again(self) -> None:
        """Raise KeyboardInterrupt if a signal came and other code swallowed it."""
        if self._session.interrupted:
            raise KeyboardInterrupt("the run was interrupted, but continued")

    def restore(self) -> None:
        """Put back what handled the signals before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _is_wrong_moment(frame: FrameType | None) -> bool:
    """Whether an exception that is raised in a frame would be dropped, or could not be printed."""
    for each, _ in walk_stack(frame):
        if each.f_code.co_name == "__del__" or each.f_lineno is None:
            return True
    return False
