"""xdist's workers die in every order: each test runs once, each killer is told of, none waits."""

import random
from types import SimpleNamespace

import pytest
from data_rows import from_data
from xdist.scheduler import loadscope

from sm121.plugin.controller import by_groups

KERNELS = [f"kernel{n}" for n in range(10)]
SERVER = [f"server{n}" for n in range(6)]
ORDERS = 150
#: What counts xdist's workers; it had the other name before 3.7.
_SPECIFICATIONS = next(
    name for name in ("parse_tx_spec_config", "parse_spec_config") if hasattr(loadscope, name)
)
#: A worker that takes the place of another needs longer to start than a test to run.
_STARTING = 0.15


class Worker:
    """A worker of xdist as its scheduler sees it."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.shutting_down = False
        self.queue: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.queue.extend(indices)

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def runs(self) -> bool:
        """It runs a test when it knows the next one, or that there is none (xdist/remote.py)."""
        return bool(self.queue) and (len(self.queue) > 1 or self.shutting_down)


class Session:
    """What xdist's controller does, in an order of events drawn at random."""

    def __init__(self, order: int, workers: int, tests: list[str], killers: list[str]) -> None:
        config = SimpleNamespace(option=SimpleNamespace(loadscopereorder=True))
        groups = dict.fromkeys(SERVER, "under-test")
        self.random = random.Random(order)
        self.tests, self.killers = tests, killers
        self.scheduler = by_groups(config, None, lambda: groups)
        self.scheduler.log = lambda *_words: None
        self.ran: list[str] = []
        self.reported: list[str | None] = []
        self.died: list[str] = []
        self.starting: list[Worker] = []
        self.ready: list[Worker] = []
        self.workers = [Worker(number) for number in range(workers)]
        for worker in self.workers:
            self.scheduler.add_node(worker)
        for worker in self.workers:
            self.scheduler.add_node_collection(worker, tests)
        self.scheduler.schedule()

    def run(self) -> None:
        while events := self._events():
            happens, worker = self.random.choices(
                events, [1.0 if name == "test" else _STARTING for name, _ in events]
            )[0]
            getattr(self, f"_{happens}")(worker)
            if self.scheduler.tests_finished:
                for each in self.workers:
                    each.shutdown()

    def _events(self) -> list[tuple[str, Worker]]:
        events = [("test", worker) for worker in self.workers if worker.runs]
        events += [("is_ready", worker) for worker in self.starting[:1]]
        return events + [("has_collected", worker) for worker in self.ready[:1]]

    def _test(self, worker: Worker) -> None:
        index = worker.queue[0]
        test = self.tests[index]
        if test in self.killers:
            self.died.append(test)
            worker.queue.clear()
            self.workers.remove(worker)
            self.starting.append(Worker(len(self.died) + 10))
            self.reported.append(self.scheduler.remove_node(worker))
        else:
            worker.queue.pop(0)
            self.ran.append(test)
            self.scheduler.mark_test_complete(worker, index)

    def _is_ready(self, worker: Worker) -> None:
        self.starting.remove(worker)
        self.ready.append(worker)
        self.workers.append(worker)
        self.scheduler.add_node(worker)

    def _has_collected(self, worker: Worker) -> None:
        self.ready.remove(worker)
        self.scheduler.add_node_collection(worker, self.tests)
        self.scheduler.schedule()


@from_data
def test_each_test_runs_once_whoever_dies(monkeypatch, workers, tests, killers):
    monkeypatch.setattr(loadscope, _SPECIFICATIONS, lambda _config: range(workers))
    for order in range(ORDERS):
        session = Session(order, workers, [*tests], [*killers])
        session.run()
        state = (
            f"order {order}: ran {session.ran}, died {session.died}, reported {session.reported}"
        )
        assert sorted(session.ran + session.died) == sorted(tests), state
        assert session.reported == session.died, state
        assert not any(worker.queue for worker in session.workers), state


@pytest.fixture
def two_workers(monkeypatch):
    """A scheduler, two workers of it, and one that takes the place of another."""
    monkeypatch.setattr(loadscope, _SPECIFICATIONS, lambda _config: range(2))
    config = SimpleNamespace(option=SimpleNamespace(loadscopereorder=True))
    scheduler = by_groups(config, None, dict)
    scheduler.log = lambda *_words: None
    workers = [Worker(number) for number in range(3)]
    for worker in workers[:2]:
        scheduler.add_node(worker)
    return scheduler, workers


def test_a_worker_may_die_before_the_others_have_collected(two_workers):
    scheduler, (first, second, instead) = two_workers
    scheduler.add_node_collection(first, KERNELS)
    assert scheduler.remove_node(first) is None
    scheduler.add_node(instead)
    scheduler.add_node_collection(second, KERNELS)
    assert not scheduler.collection_is_completed, "work is handed out when both have collected"
    scheduler.add_node_collection(instead, KERNELS)
    scheduler.schedule()
    assert second.queue and instead.queue


def test_a_worker_that_has_collected_something_else_is_ended(two_workers):
    scheduler, (first, second, instead) = two_workers
    for worker in (first, second):
        scheduler.add_node_collection(worker, KERNELS)
    scheduler.schedule()
    assert scheduler.remove_node(first) == KERNELS[first.queue[0]]
    scheduler.add_node(instead)
    scheduler.add_node_collection(instead, [*KERNELS, "new"])
    assert instead.shutting_down and not instead.queue
