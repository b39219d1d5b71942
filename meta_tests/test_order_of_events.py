"""The order of events of a run, as the spine logs it, against a written list."""

import importlib
import os
import signal
import time
from pathlib import Path

import pytest
from data_rows import from_data

from sm121.plugin import MODULES

HERE = Path(__file__).parent
BEGINNING = ["levels found", "tests selected", "opened"]
END = ["report written", "released"]
LAST = "last test ended"


@pytest.fixture
def begin(start_pytest, fault_server, tmp_path):
    """Start a run, attached to a server; gives it and a reader of each process's steps."""

    def start(*arguments, samples: str = "{}", warm: bool = True):
        run = start_pytest(
            *("-p", "meta_tests.scenarios.log_of_steps", "--arch", "cpu"),
            *(*fault_server().options, *arguments),
            environment={
                "SM121_META_STEPS": str(tmp_path / "steps-"),
                "SM121_META_SAMPLES": samples,
            },
            warm=warm,
        )

        def steps(process: str = "main") -> list[str]:
            file = tmp_path / f"steps-{process}"
            assert file.is_file(), run.output
            return file.read_text().splitlines()

        return run, steps

    return start


VERDICTS = "meta_tests/scenarios/verdicts.py"


@from_data
def test_a_run_that_ends_by_itself(begin, arguments, status, between):
    run, steps = begin(*arguments)
    assert run.wait() == status, run.output
    closed = "closed FAIL" if status else "closed PASS"
    assert steps() == [*BEGINNING, *between, LAST, closed, *END]


def test_a_run_that_is_interrupted(begin):
    """Nothing is measured any more, and the last word is written all the same."""
    both = f"{VERDICTS}::test_pass", "meta_tests/scenarios/endings.py::test_waits"
    run, steps = begin(*both, warm=False)
    run.wait_for("correctness: 2 checks", 60)
    deadline = time.monotonic() + 60
    while "decided PASS" not in steps() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)  # the next test waits
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 2, run.output
    assert steps() == [*BEGINNING, "decided PASS", LAST, "closed NOT_RUN", *END]


def test_a_run_that_measures(begin):
    """The machine is read again before anything is stored or closed."""
    samples = '{"ttft_p50": [90.0, 91.0, 92.0, 90.5, 91.5, 90.2]}'
    run, steps = begin("meta_tests/scenarios/measurements.py", samples=samples)
    run.wait()
    assert steps()[:3] == BEGINNING
    after = steps()[steps().index("box read again") :]
    assert after[:2] == ["box read again", LAST] and after[-2:] == END, run.output


@pytest.mark.slow("a run with workers")
def test_a_run_that_loses_a_worker(begin):
    """The controller opens the run after a worker has, and closes it when the parts are merged."""
    run, steps = begin(
        "meta_tests/scenarios/spread.py", "-n2", "-k", "among or in_order or all_the_same"
    )
    assert run.wait() == 1, run.output
    controller = [step for step in steps() if step != "a worker ended"]
    assert controller == ["opened", LAST, "workers' parts merged", "closed FAIL", *END]
    assert steps().count("a worker ended") >= 2
    assert steps().index("workers' parts merged") > max(
        index for index, step in enumerate(steps()) if step == "a worker ended"
    )
    lost = [name for name in ("gw0", "gw1") if "released" not in steps(name)]
    assert len(lost) == 1 and steps(lost[0])[:3] == BEGINNING
    (other,) = {"gw0", "gw1"} - set(lost)
    assert steps(other)[:3] == BEGINNING and steps(other)[-4] == LAST
    assert steps(other)[-2:] == END


@pytest.mark.slow("a run with workers")
def test_workers_that_no_n_asked_for(begin):
    """xdist's own words, ``--tx``: no hook made a controller before its first worker was."""
    both = (f"{VERDICTS}::test_pass", f"{VERDICTS}::test_fail")
    run, _ = begin(*both, "-d", "--tx", "2*popen")
    assert run.wait() == 4 and "--dist load: expected -n N alone" in run.output, run.output
    run, steps = begin(*both, "--dist", "loadgroup", "--tx", "2*popen")
    assert run.wait() == 1, run.output
    decided = {test["id"].rpartition("::")[2]: test["verdict"] for test in run.verdict["tests"]}
    assert decided == {"test_pass": "PASS", "test_fail": "FAIL"}, run.output
    assert steps()[-4:] == ["workers' parts merged", "closed FAIL", *END]


@pytest.mark.slow("another end by the same signal")
def test_a_run_that_is_interrupted_after_a_measurement(begin, tmp_path):
    """No history is looked for when the loop did not return; what was measured is kept."""
    samples = '{"ttft_p50": [90.0, 91.0, 92.0, 90.5, 91.5, 90.2], "startup_s": {"waits": true}}'
    run, steps = begin(
        *("meta_tests/scenarios/measurements.py", "-v", "--benchmark-autosave"),
        *("--benchmark-storage", str(tmp_path / "none")),
        samples=samples,
        warm=False,
    )
    run.wait_for("[startup_s]", 60)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 2, run.output
    assert "INTERNALERROR" not in run.output, run.output
    assert run.verdict["metrics"]["ttft_p50"]["rounds"] == 6
    assert (run.report / "report.html").is_file() and steps()[-2:] == END


def test_every_hook_is_implemented_once_and_in_one_module():
    """No plugin of the set but the spine has a hook: its order is no one else's."""
    found = {
        name: module
        for module in MODULES
        for name in vars(importlib.import_module(module))
        if name.startswith("pytest_")
    }
    assert set(found.values()) == {"sm121.plugin.spine"}
    assert 20 <= len(found) <= 30, sorted(found)
