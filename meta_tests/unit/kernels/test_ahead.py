"""Kernel cases are checked while a server starts, and their tests get the outcomes."""

import threading
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest

from sm121.core.unmet import Fact
from sm121.core.waiting import until
from sm121.engines.pool import PoolHooks
from sm121.kernels import child, serving, under_test
from sm121.kernels.ahead import Ahead, PlannedCase
from sm121.kernels.cases import RouteCase
from sm121.plugin import kernels

FIRST = RouteCase("first")
SECOND = RouteCase("second", seed=1)
PROVIDER = "torch"
WRONG = [Fact("1 of 4 weights", "2")]


class Checks:
    """Scripted checks. Each one waits until the test lets it end."""

    def __init__(self, outcomes):
        self.outcomes = outcomes
        self.begun = []
        self.may_end = threading.Semaphore(0)
        self.ahead = Ahead(self, [PlannedCase(PROVIDER, case) for case in outcomes])

    def __call__(self, planned):
        self.begun.append(planned.case)
        assert self.may_end.acquire(timeout=60)
        outcome = self.outcomes[planned.case]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def start(self):
        """Have all cases checked while a server starts."""
        self.may_end.release(len(self.outcomes))
        with self.ahead.during_a_start():
            until(lambda: len(self.begun) == len(self.outcomes), 60)
        self.ahead.wait()

    def kernels(self):
        """The kernels of a run. A check that a test makes itself has the fault `late`."""
        choices = dict.fromkeys(serving.OPERATIONS, serving.ProviderChoice(None, provider=PROVIDER))
        return under_test.Kernels(choices, lambda _name: Late(), self.ahead)


class Late:
    def ask(self, *_arguments):
        return [{"required": "late"}]


def requirements(facts):
    return [fact.required for fact in facts]


def test_a_test_gets_the_outcome_of_its_case():
    checks = Checks({FIRST: WRONG, SECOND: []})
    checks.start()
    assert checks.kernels().faults(FIRST) == WRONG
    assert checks.kernels().faults(SECOND) == []
    assert checks.begun == [FIRST, SECOND]


def test_an_outcome_is_taken_once():
    checks = Checks({FIRST: []})
    checks.start()
    assert checks.kernels().faults(FIRST) == []
    assert requirements(checks.kernels().faults(FIRST)) == ["late"]


def test_a_case_that_did_not_begin_is_checked_by_its_test():
    """The server is ready while the first case is checked. The second one would run beside the
    tests of that server."""
    checks = Checks({FIRST: [], SECOND: []})
    with checks.ahead.during_a_start():
        until(lambda: checks.begun == [FIRST], 60)
    checks.may_end.release(2)
    checks.ahead.wait()
    assert checks.kernels().faults(FIRST) == []
    assert requirements(checks.kernels().faults(SECOND)) == ["late"]
    assert checks.begun == [FIRST]


def test_only_the_first_start_has_checks_beside_it():
    checks = Checks({FIRST: []})
    checks.start()
    with checks.ahead.during_a_start():
        pass
    assert checks.begun == [FIRST]


def test_a_start_that_fails_keeps_the_outcomes():
    checks = Checks({FIRST: WRONG})
    checks.may_end.release()
    with suppress(RuntimeError), checks.ahead.during_a_start():
        until(lambda: checks.begun, 60)
        raise RuntimeError("the server ended")
    assert checks.kernels().faults(FIRST) == WRONG


def test_an_error_of_a_check_is_the_error_of_its_test():
    checks = Checks({FIRST: ValueError("no such operation")})
    checks.start()
    with pytest.raises(ValueError, match="no such operation"):
        checks.kernels().faults(FIRST)


def test_a_case_of_another_provider_is_checked_by_its_test():
    """The log of the ready server can show another kernel than the profile expects."""
    checks = Checks({FIRST: []})
    checks.start()
    assert checks.ahead.take(PlannedCase("vllm-cpu", FIRST)) is None


def test_an_interrupted_start_leaves_no_process():
    process = child.of_this_process()
    ended = []

    def check(_planned):
        process._start()
        try:
            return process._read_line(process._process, None)
        except child.ProcessEnded as error:
            ended.append(error)
            raise

    ahead = Ahead(check, [PlannedCase(PROVIDER, FIRST), PlannedCase(PROVIDER, SECOND)])
    config = SimpleNamespace(stash={kernels.CHILDREN: [process], kernels._AHEAD: ahead})
    with suppress(KeyboardInterrupt), ahead.during_a_start():
        until(lambda: process._process is not None, 60)
        raise KeyboardInterrupt
    pid = process._process.pid
    kernels.end_processes(config)
    assert len(ended) == 1 and process._process is None
    assert not psutil.pid_exists(pid)


@pytest.fixture
def beside(monkeypatch):
    """Return the function that runs beside a start in a run of one kernel case; None if none."""
    choice = serving.ProviderChoice(None, provider=PROVIDER)
    monkeypatch.setattr(
        kernels, "_choose_providers", lambda _session: dict.fromkeys(serving.OPERATIONS, choice)
    )
    monkeypatch.setattr(
        kernels, "_begin_processes", lambda _config, _session: lambda _provider: Late()
    )

    def begin(arch, worker=None, marks=("kernel_cases",)):
        item = SimpleNamespace(
            get_closest_marker=lambda name: name if name in marks else None,
            callspec=SimpleNamespace(params={"case": FIRST}),
        )
        pool = SimpleNamespace(hooks=PoolHooks())
        servers = SimpleNamespace(pool=pool)
        run = SimpleNamespace(servers=servers, target=SimpleNamespace(arch=arch))
        settings = SimpleNamespace(worker=worker, kernels=SimpleNamespace(provider=None))
        config = SimpleNamespace(stash={}, add_cleanup=lambda _function: None)
        kernels.check_beside_the_start(config, SimpleNamespace(run=run, settings=settings), [item])
        ahead = config.stash.get(kernels._AHEAD)
        assert pool.hooks.beside == (PoolHooks.beside if ahead is None else ahead.during_a_start)
        return ahead

    return begin


def test_the_cases_of_a_run_on_a_cpu_are_checked_beside_the_start(beside):
    ahead = beside("cpu")
    with ahead.during_a_start():
        until(ahead._outcomes[PlannedCase(PROVIDER, FIRST)].done, 60)
    assert requirements(ahead.take(PlannedCase(PROVIDER, FIRST))) == ["late"]


@pytest.mark.parametrize(
    ("arch", "worker", "marks"),
    [
        pytest.param("sm121", None, ("kernel_cases",), id="a GPU"),
        pytest.param("cpu", object(), ("kernel_cases",), id="with -n"),
        pytest.param("cpu", None, ("kernel_cases", "skip"), id="a skipped test"),
        pytest.param("cpu", None, (), id="no kernel test"),
    ],
)
def test_no_case_is_checked_beside_the_start(beside, arch, worker, marks):
    assert beside(arch, worker, marks) is None
