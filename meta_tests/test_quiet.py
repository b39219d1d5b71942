"""When tests that measure time wait, and when one is run again."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import quiet
from quiet import ATTEMPTS, Attempt

BUSY, QUIET = 0.6, 0.02


def attempt(outcome: str, others: float) -> Attempt:
    return Attempt([SimpleNamespace(failed=outcome == "failed")], others)


@pytest.mark.parametrize(
    ("attempts", "runs", "outcome"),
    [
        pytest.param([("passed", QUIET)], 1, "passed", id="passed"),
        pytest.param([("passed", BUSY)], 1, "passed", id="passed on a busy machine"),
        pytest.param([("failed", QUIET)], 1, "failed", id="failed on a quiet machine"),
        pytest.param([("failed", BUSY), ("passed", QUIET)], 2, "passed", id="disturbed once"),
        pytest.param([("failed", BUSY)] * ATTEMPTS, ATTEMPTS, "failed", id="disturbed each time"),
    ],
)
def test_only_a_failure_beside_others_is_run_again(attempts, runs, outcome):
    made = [attempt(*each) for each in attempts]
    waiting = iter(made)
    last = quiet.first_that_stands(lambda: next(waiting))
    assert last is made[runs - 1] and next(waiting, None) is None
    assert last.reports[0].failed == (outcome == "failed")


@pytest.mark.parametrize(
    ("loads", "looks"),
    [
        pytest.param([QUIET], 1, id="quiet"),
        pytest.param([BUSY, BUSY, QUIET], 3, id="quiet after two seconds"),
        pytest.param([BUSY] * 200, int(quiet.WAIT_S), id="never quiet"),
    ],
)
def test_a_test_waits_for_a_quiet_second_and_not_for_ever(loads, looks):
    seen: list[float] = []

    def others() -> float:
        seen.append(loads[len(seen)])
        return seen[-1]

    quiet.wait_for_a_quiet_second(others, clock=lambda: float(len(seen)))
    assert len(seen) == looks


def test_a_whole_test_is_set_up_again(tmp_path):
    """With its fixtures; what is reported is the last run."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone: it measures time\n")
    (tmp_path / "conftest.py").write_text(
        "import quiet\nfrom quiet import pytest_runtest_protocol\n"
        "quiet.OTHERS, quiet.WAIT_S, quiet.WATCHED_S = -1.0, 0.0, 0.0\n"  # never a quiet second
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\nruns = []\n"
        "@pytest.fixture\ndef number():\n    runs.append(1)\n    return len(runs)\n"
        "@pytest.mark.alone\ndef test_it(number):\n    assert number == 2\n"
        "def test_another():\n    assert len(runs) == 2\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(quiet.__file__.rpartition("/")[0]), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout
