"""Tests that measure time wait for an idle machine, and are repeated if other work disturbed
them."""

import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from meta_tests import quiet
from meta_tests.folders import ROOT
from meta_tests.quiet import ATTEMPTS, Attempt

BUSY = 0.6
QUIET = 0.02


def attempt(outcome: str, others: float, by_itself: bool = True) -> Attempt:
    return Attempt([SimpleNamespace(failed=outcome == "failed")], others, by_itself)


@pytest.mark.parametrize(
    ("attempts", "runs", "outcome"),
    [
        pytest.param([("passed", QUIET)], 1, "passed", id="passed"),
        pytest.param([("passed", BUSY)], 1, "passed", id="passed on a busy machine"),
        pytest.param([("failed", QUIET)], 1, "failed", id="failed on a quiet machine"),
        pytest.param([("failed", BUSY), ("passed", QUIET)], 2, "passed", id="disturbed once"),
        pytest.param(
            [("failed", QUIET, False), ("passed", QUIET)], 2, "passed", id="failed beside another"
        ),
        pytest.param(
            [("failed", QUIET, False), ("failed", QUIET)], 2, "failed", id="failed by itself, too"
        ),
        pytest.param([("passed", QUIET, False)], 1, "passed", id="passed beside another"),
        pytest.param([("failed", BUSY)] * ATTEMPTS, ATTEMPTS, "failed", id="disturbed each time"),
    ],
)
def test_only_a_failure_beside_others_is_run_again(attempts, runs, outcome):
    made = [attempt(*each) for each in attempts]
    waiting = iter(made)
    asked: list[bool] = []

    def run(by_itself: bool) -> Attempt:
        asked.append(by_itself)
        return next(waiting)

    ran = quiet.until_one_stands(run)
    assert asked == [False] + [True] * (runs - 1)
    assert ran == made and next(waiting, None) is None
    assert ran[-1].reports[0].failed == (outcome == "failed")


@pytest.mark.parametrize(
    ("loads", "looks"),
    [
        pytest.param([QUIET], 1, id="quiet"),
        pytest.param([BUSY, BUSY, QUIET], 3, id="quiet after two seconds"),
        pytest.param([BUSY] * 200, int(quiet.WAIT_S), id="never quiet"),
    ],
)
def test_a_test_waits_for_a_quiet_moment_and_not_for_ever(loads, looks):
    seen: list[float] = []

    def others() -> float:
        seen.append(loads[len(seen)])
        return seen[-1]

    quiet.wait_for_a_quiet_moment(others, clock=lambda: float(len(seen)))
    assert len(seen) == looks


def test_a_whole_test_is_set_up_again(tmp_path):
    """A repeated test gets new fixtures.

    The report contains the result of the last run, and states that there was another run.
    """
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone: it measures time\n")
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\nfrom meta_tests import quiet\n"
        "from meta_tests.quiet import pytest_runtest_protocol, pytest_terminal_summary\n"
        "quiet.LOCK = Path(__file__).with_name('lock')\n"
        # With these values, the machine is never quiet.
        "quiet.OTHERS, quiet.WAIT_S, quiet.WATCHED_S = -1.0, 0.0, 0.0\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\nruns = []\n"
        "@pytest.fixture\ndef number():\n    runs.append(1)\n    return len(runs)\n"
        "@pytest.mark.alone\ndef test_it(number):\n    assert number == 2\n"
        "def test_another():\n    assert len(runs) == 2\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    for words in ([], ["-n", "1"]):
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout
        assert "1 tests that measure time were run again" in done.stdout, done.stdout
        assert re.search(r"test_it: run 2 times; at first: E .*assert 1 == 2", done.stdout)


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        pytest.param(False, False, False, id="two beside each other"),
        pytest.param(True, False, True, id="by itself first"),
        pytest.param(False, True, True, id="by itself second"),
    ],
)
def test_a_test_by_itself_has_no_other_beside_it(first, second, waits, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setattr(quiet, "LOCK", tmp_path / "cache" / "lock")
    entered = threading.Event()

    def other() -> None:
        with quiet.held(second):
            entered.set()

    with quiet.held(first) as is_by_itself:
        assert is_by_itself is first
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(0.3 if waits else 10.0) is not waits
    thread.join()
    assert entered.is_set()


def test_without_workers_each_test_is_by_itself(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(quiet, "LOCK", tmp_path / "cache" / "lock")
    with quiet.held(False) as is_by_itself:
        assert is_by_itself
    assert not quiet.LOCK.parent.exists()
