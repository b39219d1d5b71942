"""A signal ends a run, wherever in the code it arrives."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from sm121.session.signals import Signals


@pytest.fixture
def signals():
    """What a session does with SIGINT."""
    signals = Signals(SimpleNamespace(interrupted=False))
    yield signals
    signals.restore()


class Dying:
    """Python drops what its `__del__` raises."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)


def test_a_signal_in_a_finalizer_ends_the_run_a_moment_later(signals):
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        Dying()
        time.sleep(5)


def test_a_signal_in_a_frame_that_is_at_no_line_yet_comes_a_moment_later(signals):
    nowhere = SimpleNamespace(f_lineno=None, f_back=None, f_code=SimpleNamespace(co_name="f"))
    signals._interrupt(signal.SIGINT, nowhere)
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        time.sleep(5)


def test_a_signal_that_other_code_swallowed_is_raised_again(signals):
    signals.again()
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    os.kill(os.getpid(), signal.SIGINT)  # a second one does not interrupt the stop
    with pytest.raises(KeyboardInterrupt, match="went on"):
        signals.again()
