"""Tests that measure time (marker ``alone``) wait until other processes leave the machine idle for
half a second.

Four of them run in workers of xdist at the same time, because most wait for a slow server. A test
that failed while others used the machine, or beside another test, is repeated by itself; a failure
by itself on an idle machine stands. The summary names each repeated test with its first failure, so
that a check that fails one time in three is visible although the run is green.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import pytest
from _pytest.runner import runtestprotocol

from meta_tests.folders import ROOT
from sm121.machine.cpu_use import CpuUse

#: For how many seconds the machine is watched before a test.
WATCHED_S = 0.5
#: How many seconds a test waits for an idle machine. After that, it runs in any case.
WAIT_S = 45.0
#: The share of the CPU that other processes may use on an idle machine. It is a fifth of one core,
#: if there are two.
OTHERS = 0.1
#: The largest number of runs of a test. Its timeout applies to all of them together.
ATTEMPTS = 3
#: The property of a report that contains the reason for a repetition of the test.
RUN_AGAIN = "run_again"
#: A lock that all workers share while they run tests. A test that must run alone holds it
#: exclusively.
LOCK = ROOT / ".cache" / "alone.lock"


@dataclass(frozen=True)
class Attempt:
    """One run of a test.

    Attributes:
        reports: pytest's reports.
        others: The share of the CPU that other processes used.
        by_itself: Whether no other test ran at the same time.
    """

    reports: Sequence[pytest.TestReport]
    others: float
    by_itself: bool = True

    @property
    def stands(self) -> bool:
        """Whether the outcome of the run counts, because the test passed or nothing disturbed
        it."""
        undisturbed = self.by_itself and self.others <= OTHERS
        return undisturbed or not any(report.failed for report in self.reports)

    @property
    def failure(self) -> str:
        """The failure and the disturbance in one line; empty if the test passed."""
        for report in self.reports:
            if report.failed:
                lines = report.longreprtext.strip().splitlines()
                errors = [line for line in lines if line.startswith("E ")] or lines[-1:]
                beside = f"others took {self.others:.0%} of the CPU"
                if not self.by_itself:
                    beside += ", beside other tests"
                words = " ".join(" ".join(errors).split())
                return f"{words[:200]} ({beside})"
        return ""


def until_one_stands(run: Callable[[bool], Attempt], most: int = ATTEMPTS) -> list[Attempt]:
    """Run a test until an attempt counts; the last attempt counts in any case.

    Args:
        run: Runs the test once. The argument says whether the test runs alone; this is true from
            the second attempt on.
        most: The largest number of runs.

    Returns:
        The attempts; the last one counts.
    """
    attempts = [run(False)]
    while not attempts[-1].stands and len(attempts) < most:
        attempts.append(run(True))
    return attempts


@contextmanager
def held(by_itself: bool) -> Iterator[bool]:
    """Hold the lock, and return whether no other test runs meanwhile.

    Without workers, no other test runs."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield True
        return
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if by_itself else fcntl.LOCK_SH)
        yield by_itself


def wait_for_a_quiet_moment(
    others: Callable[[], float], clock: Callable[[], float] = time.monotonic
) -> None:
    """Wait until `others` used at most the share `OTHERS` for `WATCHED_S` seconds, or until
    `WAIT_S` seconds are over."""
    began = clock()
    while others() > OTHERS and clock() - began < WAIT_S:
        pass


def processes_of_session() -> list[psutil.Process]:
    """Return the processes of all workers; empty if there are no workers."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return []
    return psutil.Process(os.getppid()).children(recursive=True)


def others_for_a_moment() -> float:
    """Return the share of the CPU that processes outside of this session use within the next
    `WATCHED_S` seconds."""
    before = CpuUse.take(processes_of_session)
    time.sleep(WATCHED_S)
    return CpuUse.take(processes_of_session).since(before)[0]


def _run(item: pytest.Item, nextitem: pytest.Item | None, by_itself: bool) -> Attempt:
    with held(by_itself) as is_by_itself:
        wait_for_a_quiet_moment(others_for_a_moment)
        item._initrequest()  # remove the fixtures of the earlier run
        before = CpuUse.take(list)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        others = CpuUse.take(list).since(before)[0]
    return Attempt(reports, others, is_by_itself)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test with the marker ``alone``; return None for other tests."""
    marker = item.get_closest_marker("alone")
    if marker is None:
        return None
    occupies = bool(marker.kwargs.get("occupies_the_cpu"))
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    attempts = until_one_stands(lambda again: _run(item, nextitem, again or occupies))
    reports = attempts[-1].reports
    if len(attempts) > 1:
        words = f"run {len(attempts)} times; at first: {attempts[0].failure}"
        reports[0].user_properties.append((RUN_AGAIN, words))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:
    """Print the names of the tests that were repeated."""
    lines = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, words in getattr(report, "user_properties", ()):
                if name == RUN_AGAIN:
                    lines.append(f"{report.nodeid}: {words}")
    if lines:
        terminalreporter.section(f"{len(lines)} tests that measure time were run again")
    for line in sorted(lines):
        terminalreporter.line(line)
