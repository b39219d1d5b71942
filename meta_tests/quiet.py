"""Tests that measure time (marker ``alone``) wait for a quiet second. One that failed while others
used the machine is run again; a failure on a quiet machine stands."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from _pytest.runner import runtestprotocol

from sm121.measure.box import CpuUse

#: How long the machine is watched before a test, in seconds.
WATCHED_S = 1.0
#: How long a test waits for a quiet second, at most; then it runs all the same.
WAIT_S = 45.0
#: Share of the CPU that others may take on a quiet machine: a fifth of one of two cores.
OTHERS = 0.1
#: Runs of a test, at most. Its own timeout holds for all of them.
ATTEMPTS = 2


@dataclass(frozen=True)
class Attempt:
    """One run of a test. ``others``: the share of the CPU that others took meanwhile."""

    reports: Sequence[pytest.TestReport]
    others: float

    @property
    def stands(self) -> bool:
        """Whether its outcome is the test's: it did not fail, or the machine was quiet."""
        return self.others <= OTHERS or not any(report.failed for report in self.reports)


def first_that_stands(run: Callable[[], Attempt], attempts: int = ATTEMPTS) -> Attempt:
    """Run until an attempt stands; the last one stands in any case."""
    attempt = run()
    for _ in range(attempts - 1):
        if attempt.stands:
            break
        attempt = run()
    return attempt


def wait_for_a_quiet_second(
    others: Callable[[], float], clock: Callable[[], float] = time.monotonic
) -> None:
    """Return when `others` took no more than `OTHERS` for a second, or after `WAIT_S`."""
    began = clock()
    while others() > OTHERS and clock() - began < WAIT_S:
        pass


def others_for_a_second() -> float:
    """Return the share of the CPU that others take within a second from now."""
    before = CpuUse.take(list)
    time.sleep(WATCHED_S)
    return CpuUse.take(list).since(before)[0]


def _run(item: pytest.Item, nextitem: pytest.Item | None) -> Attempt:
    wait_for_a_quiet_second(others_for_a_second)
    item._initrequest()  # what a run before has set up is gone
    before = CpuUse.take(list)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    return Attempt(reports, CpuUse.take(list).since(before)[0])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test with the marker ``alone``; None for others."""
    if item.get_closest_marker("alone") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    attempt = first_that_stands(lambda: _run(item, nextitem))
    for report in attempt.reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
