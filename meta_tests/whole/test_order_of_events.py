"""The order of a run's events, as the module `spine` logs it, equals a written list."""

import importlib
import os
import signal
import time
from types import SimpleNamespace

import pytest

from sm121.core import waiting
from sm121.plugin import MODULES
from sm121.session.signals import Signals

BEGINNING = ["levels found", "tests selected", "opened"]
END = ["report written", "released"]
LAST = "last test ended"
SAMPLES = '"ttft_p50": [90.0, 91.0, 92.0, 90.5, 91.5, 90.2]'


@pytest.fixture
def begin(start_pytest, fault_server, tmp_path):
    """Start a run that attaches to a server.

    Return the run and a reader of each process's steps.
    """

    def start(*arguments, samples: str = "{}", warm: bool = True):
        files = {"SM121_META_STEPS": str(tmp_path / "steps-"), "SM121_META_SAMPLES": samples}
        logged = ("-p", "meta_tests.whole.scenarios.log_of_steps", "--arch", "cpu")
        words = (*logged, *fault_server().options, *arguments)
        run = start_pytest(*words, environment=files, warm=warm)

        def steps(process: str = "main") -> list[str]:
            file = tmp_path / f"steps-{process}"
            assert file.is_file(), run.output
            return file.read_text().splitlines()

        return run, steps

    return start


VERDICTS = "meta_tests/whole/scenarios/verdicts.py"


@pytest.mark.parametrize(
    ("arguments", "status", "between"),
    [
        pytest.param(
            ("meta_tests/whole/scenarios/verdicts.py::test_pass",),
            0,
            ("decided PASS",),
            id="passes",
        ),
        pytest.param(
            ("meta_tests/whole/scenarios/verdicts.py::test_pass", "--shard=1/2"),
            0,
            ("decided PASS",),
            id="a shard",
        ),
        pytest.param(
            (
                "meta_tests/whole/scenarios/verdicts.py::test_fail",
                "meta_tests/whole/scenarios/verdicts.py::test_invalid",
            ),
            1,
            ("decided FAIL", "decided INVALID"),
            id="fails",
        ),
        # The suite searches for the cause of a timeout before it decides on the test.
        pytest.param(
            ("meta_tests/whole/scenarios/out_of_time.py",),
            1,
            ("crash looked for", "decided FAIL"),
            id="its server may not be well",
        ),
    ],
)
def test_a_run_that_ends_by_itself(begin, arguments, status, between):
    run, steps = begin(*arguments)
    assert run.wait() == status, run.output
    closed = "closed FAIL" if status else "closed PASS"
    assert steps() == [*BEGINNING, *between, LAST, closed, *END]


def test_a_run_that_is_interrupted(begin):
    """After an interrupt, the run starts no further measurement, and still writes its last line."""
    both = f"{VERDICTS}::test_pass", "meta_tests/whole/scenarios/endings.py::test_waits"
    run, steps = begin(*both, warm=False)
    run.wait_for("correctness: 2 checks", 60)
    waiting.until(lambda: "decided PASS" in steps(), 60.0)
    time.sleep(1)  # the next test waits for the stop
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == run.verdict["exit_status"] == 2, run.output
    assert steps() == [*BEGINNING, "decided PASS", LAST, "closed NOT_RUN", *END]


def test_a_run_that_measures(begin):
    """After a measurement, the suite reads the machine's state again before it stores anything."""
    run, steps = begin("meta_tests/whole/scenarios/measurements.py", samples=f"{{{SAMPLES}}}")
    run.wait()
    assert steps()[:3] == BEGINNING
    after = steps()[steps().index("box read again") :]
    assert after[:2] == ["box read again", LAST] and after[-2:] == END, run.output
    assert after.count("box read again") == 1


@pytest.mark.slow("a run with workers")
def test_a_run_that_loses_a_worker(begin):
    """If a worker is lost, the first process merges the parts after all workers have ended."""
    chosen = ("-n2", "-k", "among or in_order or all_the_same")
    run, steps = begin("meta_tests/whole/scenarios/spread.py", *chosen)
    assert run.wait() == 1, run.output
    assert steps() == ["a worker ended", "a worker ended", "parts joined FAIL", "released"]
    lost, other = sorted(("gw0", "gw1"), key=lambda name: "released" in steps(name))
    assert "released" not in steps(lost) and steps(lost)[:3] == BEGINNING
    assert steps(other)[:3] == BEGINNING and steps(other)[-2:] == END


@pytest.mark.slow("another end by the same signal")
def test_a_run_that_is_interrupted_after_a_measurement(begin, tmp_path):
    """An interrupted run does not read the history, but keeps its measurements."""
    samples = f'{{{SAMPLES}, "startup_s": {{"waits": true}}}}'
    words = ("-v", "--benchmark-autosave", "--benchmark-storage", str(tmp_path / "none"))
    scenario = "meta_tests/whole/scenarios/measurements.py"
    run, steps = begin(scenario, *words, samples=samples, warm=False)
    run.wait_for("[startup_s]", 60)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 2, run.output
    assert "INTERNALERROR" not in run.output, run.output
    assert run.verdict["metrics"]["ttft_p50"]["rounds"] == 6
    assert (run.report / "report.html").is_file() and steps()[-2:] == END


def test_every_hook_is_implemented_once_and_in_one_module():
    hooks = {}
    for module in MODULES:
        for name in vars(importlib.import_module(module)):
            if name.startswith("pytest_"):
                hooks[name] = module
    assert set(hooks.values()) == {"sm121.plugin.spine"}
    assert 20 <= len(hooks) <= 32, sorted(hooks)


# A signal ends a run at any place in the code


class Interruptible:
    """A session that has only the parts which its signal handler uses."""

    interrupted = False

    def interrupt(self) -> None:
        self.interrupted = True


@pytest.fixture
def signals():
    """How a session reacts to SIGINT."""
    signals = Signals(Interruptible())
    yield signals
    signals.restore()


class Dying:
    """An object with a `__del__` whose exceptions Python ignores."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)


def test_a_signal_in_a_finalizer_ends_the_run_a_moment_later(signals):
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        Dying()
        time.sleep(5)


def test_a_signal_in_a_frame_that_is_at_no_line_yet_comes_a_moment_later(signals):
    nowhere = SimpleNamespace(f_lineno=None, f_back=None, f_code=SimpleNamespace(co_name="f"))
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        signals._interrupt(signal.SIGINT, nowhere)
        time.sleep(5)


def test_a_signal_that_other_code_swallowed_is_raised_again(signals):
    signals.again()
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    os.kill(os.getpid(), signal.SIGINT)  # a second signal does not interrupt the stop
    with pytest.raises(KeyboardInterrupt, match="continued"):
        signals.again()
