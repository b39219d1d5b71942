"""The state of the stress level while a load runs in another thread, is stopped, or never
begins."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from meta_tests.fakes import servers
from meta_tests.fakes.run_events import give, new_file, stand_in, with_events
from sm121.client.jobs import Job, JobOutcome, LoadResult
from sm121.client.load import LoadClient
from sm121.client.patience import Patience
from sm121.core import level_settings, profile, verdict, waiting
from sm121.core.server import Endpoint, Server
from sm121.engines import capabilities
from sm121.plugin import performance, stash
from sm121.run.load import Load
from sm121.run.verdict_file import EngineReport
from sm121.stress import aftermath, checks, memory, restart
from sm121.stress.level import Stress
from sm121.stress.player import LoadPlayer

EXACT = level_settings.AgreementBound(max_abs=1e-3, mean_abs=1e-4, fork=0, source="a test")

ENDPOINT = Endpoint("http://127.0.0.1:9", "key", "canary")
JOB = Job("x", {"prompt": "x"}, 4)


def test_in_flight_requests_can_be_listed_while_they_change():
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
            for outcome in client.under_way():
                assert isinstance(outcome, JobOutcome)
    finally:
        ended.set()
        thread.join()


def test_the_time_limit_of_a_test_ends_a_load():
    """If the time limit of a test raises an exception in a callback of the event loop, the
    exception is not lost."""

    def on_signal(_number, _frame):
        pytest.fail("Timeout (>1.0s) from pytest-timeout.")

    looks: list[None] = []

    def stop() -> None:
        looks.append(None)
        if len(looks) == 2:  # while the loop runs a callback
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
def begin() -> tuple[SimpleNamespace, Callable[[], Stress]]:
    """Return a run and a level whose server does not exist. No load is sent."""
    loads: list[Load | None] = []
    run = stand_in(
        profile=profile.load("cpu-tiny-gpt-oss"), aborted=None, abort=lambda _text: None,
        pool=None, crashes=SimpleNamespace(under_load=loads.append, loads=loads),
        processes=lambda: [], say=lambda *_arguments: None,
    )  # fmt: skip
    server = Server(ENDPOINT, False, "vllm", "0", None, None, None)
    return run, lambda: Stress(run, server, capabilities.capabilities_of("vllm", "0.32.0"), EXACT)


def sampling() -> int:
    return sum(thread.name == "sm121-memory" for thread in threading.enumerate())


def test_a_level_whose_first_load_fails_is_seen_by_the_bundle_and_leaves_no_thread(
    begin, monkeypatch
):
    def fails(*_arguments):
        assert sampling() == 1
        raise RuntimeError("no throughput")

    monkeypatch.setattr(aftermath, "read_throughput", fails)
    run, make = begin
    with pytest.raises(RuntimeError, match="no throughput"):
        make()
    (load,) = run.servers.crashes.loads
    assert load.client.under_way() == []
    assert sampling() == 0
    item = SimpleNamespace(config=SimpleNamespace(stash={}), stash={stash.LEVEL: "performance"})
    performance.end_with_its_level(item, run.servers)
    assert run.servers.crashes.loads[-1] is None, "a later bundle shows nothing of this server"


@pytest.mark.parametrize(
    ("lasts_s", "at_least", "sent"),
    [
        pytest.param(None, 0, 12, id="all without a duration"),
        pytest.param(60.0, 3, 12, id="all within a long duration"),
        pytest.param(0.0, 3, 3, id="the least number on a slow machine"),
        pytest.param(0.0, 12, 12, id="all where all are asked for"),
    ],
)
def test_a_load_is_sized_by_seconds(lasts_s, at_least, sent):
    with servers.stress_server() as endpoint:
        client = LoadClient(endpoint, Patience(20.0, 20.0))
        load = client.run([JOB] * 12, concurrency=2, lasts_s=lasts_s, at_least=at_least)
    assert len(load.outcomes) == sent


def test_only_the_profile_of_the_cpu_sends_fewer_requests():
    loads = {name: profile.load(name).stress.load_s for name in profile.shipped()}
    on_a_gpu = [name for name in loads if not name.startswith("cpu-")]
    assert len(on_a_gpu) >= 4 and not any(loads[name] for name in on_a_gpu)
    assert loads["cpu-tiny-gpt-oss"] is not None


@pytest.mark.parametrize(
    ("started", "last", "ended", "silent"),
    [
        # the request had ended before the stop
        (10.0, 19.0, 19.5, 0.0),
        # the connection stayed open without data
        (10.0, 19.0, 80.0, 60.0),
        # the request was answered completely
        (10.0, 79.0, 80.0, 1.0),
        # the answer arrives at once, or never
        (10.0, None, 80.0, 60.0),
        # the request was accepted after the stop, and never answered
        (25.0, None, 85.0, 60.0),
        # the request was refused at once
        (25.0, None, 25.1, 0.1),
    ],
)
def test_seconds_a_client_waits_after_the_stop(started, last, ended, silent):
    outcome = JobOutcome(1, JOB, started=started, last=last, ended=ended)
    assert restart.silent_after(outcome, 20.0) == pytest.approx(silent)


@pytest.mark.parametrize("wait_s", [0.0, 60.0])
def test_a_client_that_hangs_after_the_stop_is_a_fault(monkeypatch, wait_s):
    """A client that hangs after the server's stop is a fault.

    An engine that died causes this, while its API server waits for the connections."""
    stopped: list[float] = []

    def load(client, jobs, **_options):
        done = [client._begin(job) for job in jobs]
        if stopped:
            return LoadResult([], 0.0, 1.0)
        for outcome in done[:2]:
            client._finish(outcome)
        waiting.until(lambda: stopped, 60.0, every_s=0.005)
        for outcome in done[2:]:
            outcome.problem = ("connection", "reset")
            outcome.ended = stopped[0] + wait_s
        return LoadResult(done, 0.0, 1.0)

    monkeypatch.setattr(checks, "faults", lambda *_arguments, **_how: [])
    monkeypatch.setattr(LoadClient, "run", load)
    report = SimpleNamespace(clean=True, log="server-x.log")
    stop = lambda: stopped.append(time.monotonic()) or report  # noqa: E731
    server = SimpleNamespace(endpoint=ENDPOINT)
    run = stand_in(stop=stop, server=lambda: server)
    client = LoadClient(ENDPOINT, Patience(1, 1))

    def go(jobs=8, *more):
        return restart.under_load(run, client, [JOB] * jobs, 2, EXACT, lambda: None, 10.0, *more)

    if not wait_s:
        assert "6 requests were cancelled" in go()
        return
    with pytest.raises(AssertionError, match=r"got 60 s for 6 of 8 requests"):
        go()
    # A release with this known bug is excused for as many requests as its engine can run at the
    # same time.
    remarks: list[str] = []
    give(run, remark=remarks.append)
    deviation = capabilities.capabilities_of("vllm", "0.32.0").deviation(
        "restart-under-load", "silent"
    )
    for jobs, expected in ((8, pytest.raises(AssertionError)), (4, contextlib.nullcontext())):
        stopped.clear()
        with expected:
            go(jobs, deviation)
    assert len(remarks) == 1 and "a known deviation of >=0.32: expected each client" in remarks[0]


@pytest.mark.parametrize(("ends_by_itself", "decided"), [(True, False), (False, True)])
def test_a_stop_counts_only_while_requests_run(begin, monkeypatch, ends_by_itself, decided):
    """A stop of the server counts only if it happens while requests run, and after some requests
    have ended."""
    monkeypatch.setattr(aftermath, "read_throughput", lambda *_arguments: None)
    monkeypatch.setattr(LoadPlayer, "take", lambda _self, _source, count: [JOB] * count)
    monkeypatch.setattr(checks, "faults", lambda *_arguments, **_how: [])
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
    run, make = begin
    level = make()
    level.timeline.stop()
    run.server = lambda: SimpleNamespace(endpoint=ENDPOINT)
    report = SimpleNamespace(clean=True, log="server-x.log")
    give(run, pool=SimpleNamespace(current=object()), stop=lambda: stopped.set() or report)
    if decided:
        level.restarted_under_load()
    else:
        with pytest.raises(verdict.Inconclusive, match="cancelled 0 of 2000"):
            level.restarted_under_load()


def test_the_level_runs_from_a_script_on_an_attached_server(begin, tmp_path):
    """The level runs from a script, without pytest, on an attached server.

    The test covers the loads, the check after the load, memory.json and its part of verdict.json.
    Checks that are not possible on an attached server are NOT_RUN."""
    run, _ = begin
    engine = EngineReport(name="vllm", managed=False, model="canary")
    lines: list[str] = []
    give(
        run,
        target=SimpleNamespace(arch="cpu"),
        directory=tmp_path,
        attached_life=SimpleNamespace(no_memory="memory is not known here"),
        unproven=lambda _line: None,
        file=new_file(engine=engine),
        say=lambda _what, line: lines.append(line),
    )
    with_events(run)
    with servers.stress_server() as endpoint:
        server = Server(endpoint, False, "vllm", "0.32.0", None, None, None)
        level = Stress(run, server, capabilities.capabilities_of("vllm", "0.32.0"), EXACT)
        assert [load.client for load in run.servers.crashes.loads] == [level.client]
        level.sustained()
        level.brim()
        level.unruly()
        level.afterwards.check_idle()
        with pytest.raises(verdict.NotRun, match="memory is not known here"):
            level.afterwards.check_memory(more=False)
        with pytest.raises(verdict.NotRun, match="is not restarted"):
            level.restarted_under_load()
        level.close()
        assert level.client.under_way() == []
    assert lines[0].startswith("sustained: 200 requests in ") and "0 failed" in lines[0]
    assert run.record.file.memory.samples == 0, "the processes of an attached server are not known"
    whole = memory.MemoryFile.model_validate_json((tmp_path / "memory.json").read_text())
    assert [sample for sample in whole.samples if sample.running is not None], "read from /metrics"
    assert sampling() == 0
