"""The level's own bookkeeping while a load runs in another thread, is stopped, or never begins."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from sm121.plugin.run import RUN

from sm121.answers.agreement import Bound
from sm121.client.connection import Patience
from sm121.client.load import Job, JobOutcome, LoadClient, LoadResult
from sm121.core import profile
from sm121.core.server import Endpoint
from sm121.core.verdict import Inconclusive
from sm121.plugin import stress
from sm121.plugin.selection import LEVEL

ENDPOINT = Endpoint("http://127.0.0.1:9", "key", "canary")
JOB = Job("x", {"prompt": "x"}, 4)


def test_what_is_in_flight_can_be_asked_while_it_changes():
    client = LoadClient(ENDPOINT, Patience(1, 1))
    ended = threading.Event()

    def load() -> None:
        while not ended.is_set():
            for _ in range(50):
                client._begin(JOB)
            for outcome in list(client.in_flight.values()):
                client._finish(outcome)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(3000):
            assert all(isinstance(outcome, JobOutcome) for outcome in client.under_way())
    finally:
        ended.set()
        thread.join()


def test_the_time_limit_of_a_test_ends_a_load():
    """What a signal raises is not lost in a callback of the event loop."""

    def on_signal(_number, _frame):
        pytest.fail("Timeout (>1.0s) from pytest-timeout.")

    looks: list[None] = []

    def stop() -> None:
        looks.append(None)
        if len(looks) == 2:  # in the loop, where it has a callback's turn
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            endpoint = Endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}", "key", "canary")
            client = LoadClient(endpoint, Patience(4.0, 4.0), stop=stop)
            began = time.monotonic()
            with pytest.raises(pytest.fail.Exception, match="pytest-timeout"):
                client.run([JOB, JOB])
            assert time.monotonic() - began < 3.0
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(client.under_way()) == 2, "a bundle shows what was under way"
    assert not [thread for thread in threading.enumerate() if thread.name == "sm121-load"]


@pytest.fixture
def begin(monkeypatch) -> Callable[..., tuple[SimpleNamespace, stress.Stress]]:
    """A level on a server that is not there; no load is sent."""
    monkeypatch.setattr(stress, "bound", lambda *_arguments: Bound(1e-3, 1e-4, 0.0))
    monkeypatch.setattr(stress, "announce", lambda *_arguments: None)

    def make() -> tuple[SimpleNamespace, stress.Stress]:
        run = SimpleNamespace(
            profile=profile.load("cpu-tiny-gpt-oss"),
            aborted=None,
            abort=lambda _text: None,
            pool=None,
            observer=None,
            config=None,
        )
        server = SimpleNamespace(endpoint=ENDPOINT, engine="vllm", version="0", configuration=None)
        able = SimpleNamespace(require=lambda *_names: None, engine="vllm")
        return run, lambda: stress.Stress(run, server, able)

    return make


def sampling() -> int:
    return sum(thread.name == "sm121-memory" for thread in threading.enumerate())


def test_a_level_whose_first_load_fails_is_seen_by_the_bundle_and_leaves_no_thread(
    begin, monkeypatch
):
    def fails(_self):
        assert sampling() == 1
        raise RuntimeError("no throughput")

    monkeypatch.setattr(stress.Stress, "_throughput", fails)
    run, make = begin()
    with pytest.raises(RuntimeError, match="no throughput"):
        make()
    assert run.observer is not None and run.observer.client.under_way() == []
    assert sampling() == 0
    item = SimpleNamespace(config=SimpleNamespace(stash={RUN: run}), stash={LEVEL: "performance"})
    stress.pytest_runtest_setup(item)
    assert run.observer is None, "a later level's bundle shows nothing of this server"


@pytest.mark.parametrize(("ends_by_itself", "decided"), [(True, False), (False, True)])
def test_a_restart_counts_only_under_load(begin, monkeypatch, ends_by_itself, decided):
    """The server's stop must come while requests are under way, some having ended."""
    monkeypatch.setattr(stress.Stress, "_throughput", lambda _self: None)
    monkeypatch.setattr(stress.Stress, "_take", lambda _self, _source, count: [JOB] * count)
    monkeypatch.setattr(stress.checks, "faults", lambda *_arguments, **_how: [])
    stopped = threading.Event()

    def load(client, jobs, **_options) -> LoadResult:
        done = [client._begin(job) for job in jobs[:50]]
        for outcome in done[:20]:
            client._finish(outcome)
        if not ends_by_itself:
            stopped.wait(10)
            for outcome in done[20:]:
                outcome.problem = "connection", "reset"
        for outcome in done[20:]:
            client._finish(outcome)
        return LoadResult(done, 0.0, 1.0)

    monkeypatch.setattr(LoadClient, "run", load)
    run, make = begin()
    level = make()
    level.timeline.stop()
    run.server = lambda: SimpleNamespace(endpoint=ENDPOINT)
    run.pool = SimpleNamespace(
        current=object(), stop=lambda: stopped.set() or SimpleNamespace(clean=True)
    )
    if decided:
        level.restarted_under_load()
    else:
        with pytest.raises(Inconclusive, match="0 of 2000 broken off"):
            level.restarted_under_load()
