"""While the baseline starts numerics and compilation are done, and nothing beside what is timed."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sm121.compilation import gb10, probes
from sm121.core.unmet import Fact, text
from sm121.core.verdict import NotRun
from sm121.kernels import cases
from sm121.kernels.child import Ended
from sm121.kernels.serving import Choice
from sm121.kernels.under_test import Kernels

pytestmark = pytest.mark.timeout(300)

HERE = Path(__file__).parent
PROVIDER = """
import os, time
from sm121.kernels.torch_provider import TorchProvider

class Telling(TorchProvider):
    name = "telling"
    def route(self, logits, k):
        with open(os.environ["SM121_META_EVENTS"], "a") as file:
            file.write("route\\n")
        time.sleep(float(os.environ.get("SM121_META_SLOW", "0")))
        shares, ids = super().route(logits, k)
        return shares * float(os.environ.get("SM121_META_FACTOR", "1")), ids

provider = Telling()
"""


@pytest.fixture
def engine(tmp_path):
    """Arguments of a run whose engine is scripted, and its environment."""
    (tmp_path / "telling.py").write_text(PROVIDER)
    environment = {
        "SM121_META_PYTHON": sys.executable,
        "SM121_META_SERVER": "scripted_engine.py",
        "SM121_META_EVENTS": str(tmp_path / "events"),
        "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))),
    }
    arguments = (
        *("--arch", "cpu", "--kernel-trace", "off", "--kernel-provider", "telling:provider"),
        *("--engine-python", str(HERE / "fake_python.py")),
    )
    return arguments, environment


STARTS = (
    "tests/test_smoke.py::test_stop_leaves_nothing_behind",
    "tests/test_smoke.py::test_server_is_ready_in_time",
    "tests/test_kernel.py::test_routing_takes_top_k_then_softmax",
)


def events(environment) -> list[str]:
    return Path(environment["SM121_META_EVENTS"]).read_text().split()


def test_numerics_are_done_while_the_baseline_starts_and_not_again(engine, run_pytest):
    arguments, environment = engine
    status, run = run_pytest(*arguments, *STARTS, environment=environment)
    assert status == 0, run.output
    happened = events(environment)
    second = happened.index("start", happened.index("start") + 1)
    assert happened.count("start") == 2 and "route" in happened[:second], happened
    assert "route" not in happened[second:], "the start of the server under test has it alone"
    judged = [t for t in run.verdict["tests"] if "routing" in t["id"]]
    assert len(judged) > 20 and {t["verdict"] for t in judged} == {"PASS"}
    assert {t["kernel"]["provider"] for t in judged} == {"telling:provider"}


def test_what_is_wrong_is_found_there_too(engine, run_pytest):
    arguments, environment = engine
    status, run = run_pytest(
        *arguments, *STARTS, environment={**environment, "SM121_META_FACTOR": "1.01"}
    )
    assert status == 1, run.output
    failed = [t for t in run.verdict["tests"] if t["verdict"] == "FAIL"]
    assert failed and all("of the error at most" in t["message"] for t in failed), failed


def test_an_interrupted_run_ends_at_once_and_leaves_nothing(engine, start_pytest):
    arguments, environment = engine
    run = start_pytest(*arguments, *STARTS, environment={**environment, "SM121_META_SLOW": "100"})
    run.wait_for("smoke: ", 60.0)
    while not Path(environment["SM121_META_EVENTS"]).is_file() or "route" not in events(
        environment
    ):
        assert run.process.poll() is None, run.output
    run.remember()
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait(40.0) == 2, run.output
    assert not run.left(), run.left()


def test_another_path_than_expected_is_judged_anew(run_pytest, engine):
    """The numerics of the expected kernels say nothing of those that the log shows."""
    arguments, environment = engine
    arguments = [
        word for word in arguments if "telling" not in word and word != "--kernel-provider"
    ]
    sinks = "tests/test_kernel.py::test_decode_attention_sinks"
    asked = (*arguments, *STARTS[:2], "tests/test_smoke.py::test_health", sinks)
    for attention, wanted in (("CPU_ATTN", "PASS"), ("FLASH_ATTN", "NOT_RUN")):
        given = {**environment, "SM121_META_ARGUMENTS": f"--attention {attention}"}
        _status, run = run_pytest(*asked, environment=given)
        judged = [t for t in run.verdict["tests"] if "sinks" in t["id"]]
        assert judged and {t["verdict"] for t in judged} == {wanted}, run.output


def fact_of(case) -> Fact:
    return Fact(f"line of {case}")


class Counting:
    """Answers as `sm121.kernels.child.Child`, and counts."""

    def __init__(self) -> None:
        self.asked = []

    def ask(self, question, name, case, within_s=None):
        self.asked.append((question, name, case))
        return [{"required": f"line of {case}"}]


def test_a_case_is_judged_once():
    child, chosen = Counting(), cases.GROUPS["routing"][:3]
    kernels = Kernels({"route": Choice(None, provider="any")}, lambda _name: child)
    with ThreadPoolExecutor(1) as worker:
        kernels.begin(chosen[:2], worker)
    assert [kernels.wrong(case) for case in chosen] == [[fact_of(case)] for case in chosen]
    assert len(child.asked) == 3
    assert kernels.judged == ("route", "any"), "the report names what judged the test"


def test_a_probe_is_compiled_once(tmp_path):
    try:
        compilation = gb10.find(sys.executable, tmp_path)
    except NotRun as reason:
        pytest.skip(str(reason))
    name = probes.names("probes")[0]
    with ThreadPoolExecutor(1) as worker:
        compilation.begin([name], worker)
    made = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert made and not compilation.wrong_outcomes(name)
    assert made == {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}


class OneAtATime(Counting):
    """Notices two who ask at the same time."""

    busy = False

    def ask(self, question, name, case, within_s=None):
        assert not self.busy, "two questions at once: whose answer is the next one?"
        self.busy = True
        time.sleep(0.1)
        self.busy = False
        return super().ask(question, name, case)


def test_a_process_is_asked_one_thing_at_a_time():
    """A case that was not begun waits for those that were: they have one process."""
    child, chosen = OneAtATime(), cases.GROUPS["routing"][:5]
    kernels = Kernels({"route": Choice(None, provider="any")}, lambda _name: child)
    with ThreadPoolExecutor(1) as worker:
        kernels.begin(chosen[:4], worker)
        assert kernels.wrong(chosen[4]) == [fact_of(chosen[4])]
        assert kernels.wrong_replayed(chosen[0]) == [fact_of(chosen[0])]
    assert len(child.asked) == 6


@pytest.mark.timeout(30)
def test_what_was_left_out_is_asked_by_its_own_test():
    """The smoke level failed meanwhile, or nothing must run beside what is timed."""
    child, chosen = OneAtATime(), cases.GROUPS["routing"][:4]
    kernels = Kernels({"route": Choice(None, provider="any")}, lambda _name: child)
    worker = ThreadPoolExecutor(1)
    kernels.begin(chosen, worker)
    worker.shutdown(cancel_futures=True)
    assert [kernels.wrong(case) for case in chosen] == [[fact_of(case)] for case in chosen]
    assert len(child.asked) == 4


class Ending(Counting):
    """Its process ends with each case but the first."""

    def ask(self, question, name, case, within_s=None):
        super().ask(question, name, case)
        if len(self.asked) > 1:
            raise Ended(Fact("a result", "the process ended with SIGABRT"))
        return []


def test_a_kernel_that_ends_its_process_is_asked_again_by_its_own_test():
    child, chosen = Ending(), cases.GROUPS["routing"][:4]
    kernels = Kernels({"route": Choice(None, provider="any")}, lambda _name: child)
    with ThreadPoolExecutor(1) as worker:
        kernels.begin(chosen, worker)
    assert len(child.asked) == 2, "in the background it is not tried again and again"
    assert not kernels.wrong(chosen[0])
    assert all("SIGABRT" in text(kernels.wrong(case)) for case in chosen[1:])
    assert len(child.asked) == 5
