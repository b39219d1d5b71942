"""Who watches over a server and its machine goes on watching, whatever goes wrong meanwhile."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from data_rows import from_data

from sm121.core import profile
from sm121.core.configuration import ServerConfiguration
from sm121.engines import life, pool, registry
from sm121.engines.attached_life import SignReader, Signs
from sm121.engines.managed import ManagedServer
from sm121.evidence import death, failure, kernel_messages
from sm121.evidence.resources import ResourceSampler
from sm121.run import directory

MORE_THAN_THERE_IS = 1e18
GIB = 1 << 30
CONFIGURATION = ServerConfiguration(
    name="x", engine="vllm", python=sys.executable, model="none", served_name="none"
)


def test_the_floor_is_looked_at_where_no_server_runs():
    said: list[str] = []
    sampler = ResourceSampler(lambda: [], floor_bytes=MORE_THAN_THERE_IS, on_floor=said.append)
    sampler.sample()
    assert len(said) == 1 and "before the machine wedges" in said[0], said
    sampler.sample()
    assert len(said) == 2, "what it ended may have been starting: it is ended again"


@pytest.mark.parametrize(
    ("bytes_there", "times"), [(1 << 20, 1), (0, 1), (GIB - 1, 1), (GIB, 0), (1 << 40, 0)]
)
def test_the_floor_of_another_node_is_named(bytes_there, times):
    said: list[str] = []
    ResourceSampler(
        list, floor_bytes=GIB, on_floor=said.append, nodes=lambda: {"node 1 (spark2)": bytes_there}
    ).sample()
    assert len(said) == times, said
    assert all(line.startswith("node 1 (spark2): MemAvailable is ") for line in said)


def test_the_floor_is_watched_when_processes_cannot_be_read():
    said: list[str] = []
    troubles: list[str] = []

    def refused():
        raise psutil.AccessDenied(1)

    sampler = ResourceSampler(
        refused,
        interval_s=0.01,
        floor_bytes=MORE_THAN_THERE_IS,
        on_floor=said.append,
        on_trouble=troubles.append,
    )
    sampler.start()
    deadline = time.monotonic() + 10
    while len(said) < 3:
        assert time.monotonic() < deadline and sampler.is_alive(), (said, troubles)
        time.sleep(0.01)
    sampler.stop()
    assert len(troubles) == 1 and "AccessDenied" in troubles[0], "said once"


def test_peaks_are_of_host_and_device_together_and_of_one_way_to_know_them():
    def held(device, total, source):
        return SimpleNamespace(device=device, total=total, source=source)

    samples = [
        held(900, 1000, "the whole GPU"),  # while it starts, beside somebody else
        held(None, None, "by process"),
        held(70, 80, "by process"),
        held(60, 90, "by process"),
    ]
    sampler = ResourceSampler(
        lambda: [psutil.Process()], held=lambda _pids, _resident: samples.pop(0)
    )
    for _ in range(4):
        sampler.sample()
    seen = sampler.resources
    assert (seen.device_peak_bytes, seen.memory_peak_bytes) == (70, 90)
    assert seen.memory_source == "by process" and seen.tree_rss_peak_bytes > 0


def test_a_run_without_a_server_is_ended_too_and_leaves_a_bundle(run_pytest, tmp_path):
    text = profile.shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")
    file = tmp_path / "mine.toml"
    file.write_text(re.sub(r"(?m)^(memory_floor_gib = \{ value = )[\d.]+", r"\g<1>100000", text))
    status, run = run_pytest(
        "--arch", "cpu", "--profile", str(file), "meta_tests/scenarios/turns.py", "-k", "shares",
        environment={"TURNS": str(tmp_path / "note.txt"), "SHARES_S": "1"},
    )  # fmt: skip
    assert status != 0 and run.verdict["verdict"] == "INCONCLUSIVE", run.output
    last = run.verdict["tests"][-1]
    assert last["verdict"] == "NOT_RUN" and "the run was ended" in last["message"], last
    (crash,) = run.verdict["crashes"]
    assert crash["kind"] == "memory_floor", crash
    assert (run.report / crash["bundle"] / "bundle.json").is_file()


def test_a_server_that_is_starting_is_watched(monkeypatch, tmp_path):
    seen: list[list[str]] = []

    class Starting:
        configuration, secrets, log = CONFIGURATION, (), tmp_path / "server.log"
        stopped, pids_when_ready = None, frozenset()

        def __init__(self, *_arguments):
            pass

        def processes(self):
            return ["its process"]

        def start(self):
            seen.append(servers.processes())
            return SimpleNamespace(startup_s=1.0, compiled=())

    monkeypatch.setattr(pool, "ManagedServer", Starting)
    servers = pool.ServerPool(
        limits=pool.StartLimits(1, 1, 1),
        directory=tmp_path,
        run_id="x",
        notify=lambda _name, _line: None,
    )
    assert servers.processes() == []
    servers.get(CONFIGURATION)
    assert seen == [["its process"]]


def supervised(status: Path, scratch: Path, code: str, **options) -> subprocess.Popen:
    scratch.mkdir()
    return subprocess.Popen(
        [
            sys.executable, "-m", "sm121.engines.supervisor", "--status", str(status),
            "--scratch", str(scratch), "--grace", "2", "--", sys.executable, "-c", code,
        ],
        stdin=subprocess.PIPE, **options,
    )  # fmt: skip


@pytest.mark.slow("six seconds of a supervisor")
def test_a_supervisor_that_cannot_write_supervises_all_the_same(tmp_path):
    """A full disk: neither its file nor the log can be written when a child ends."""
    scratch, pids = tmp_path / "scratch", tmp_path / "pids"
    code = (
        "import os, pathlib, subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3)']);"
        f"pathlib.Path({str(pids)!r}).write_text(str(os.getpid()));"
        "time.sleep(600)"
    )
    with Path("/dev/full").open("w") as full:
        supervisor = supervised(tmp_path / "no" / "x.json", scratch, code, stdout=full, stderr=full)
    time.sleep(6.0)  # its child has ended, which was to be written down
    assert supervisor.poll() is None, "it lives, and with it the server's end"
    server = psutil.Process(int(pids.read_text()))
    supervisor.stdin.close()  # as when pytest is killed
    supervisor.wait(30)
    assert not server.is_running() and not scratch.exists()


def test_a_supervisor_gives_the_exit_status_that_it_cannot_write(tmp_path):
    supervisor = supervised(tmp_path / "no" / "x.json", tmp_path / "scratch", "raise SystemExit(3)")
    _, _ = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 3


#: An engine with a core and a worker, both of which it ends when it is told to end.
ENGINE = """
import os, pathlib, signal, subprocess, sys, time
ready = pathlib.Path({ready!r})
core = subprocess.Popen([sys.executable, "-c", {core!r}])
def end(*_):
    core.kill()
    core.wait()
    os.kill(int(ready.read_text()), signal.{number})
    time.sleep(0.5)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
time.sleep(600)
"""
CORE = """
import pathlib, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({ready!r}).write_text(str(worker.pid))
time.sleep(600)
"""
VAGUE = failure.Cause(kind="engine_dead", summary="the engine is dead", owner="the engine")
NO_KERNEL = kernel_messages.KernelMessages()


@from_data
def test_a_worker_that_our_stop_killed_is_no_cause(tmp_path, before, number, kind, named):
    ready, status = tmp_path / "ready", tmp_path / "server-x.status.json"
    core = CORE.format(ready=str(ready))
    code = ENGINE.format(core=core, number=number, ready=str(ready))
    supervisor = supervised(status, tmp_path / "scratch", code)
    while not ready.is_file() or not ready.read_text():
        assert supervisor.poll() is None
        time.sleep(0.05)
    worker = int(ready.read_text())
    if before is not None:
        time.sleep(2.5)  # until the supervisor knows of it
        os.kill(worker, signal.Signals[before])
        time.sleep(0.5)
    supervisor.terminate()
    supervisor.wait(30)
    supervisor.stdin.close()
    exits = json.loads(status.read_text())["exits"]
    found = death.cause_of(VAGUE, exits=exits, kernel=NO_KERNEL, kills=0, pids={worker})
    assert found.kind == kind
    assert (str(worker) in found.summary) is named, (found.summary, exits)
    assert worker in {entry["pid"] for entry in exits}, "the bundle has it all the same"


def test_each_start_has_a_status_of_its_own(tmp_path):
    engine = registry.engine("llama-cpp")
    first = ManagedServer(CONFIGURATION, engine, pool.StartLimits(1, 1, 1), tmp_path, "x")
    first.log.write_text("it ran")
    first._status_file.write_text(json.dumps({"exit_status": -9, "exits": [], "pid": 7}))
    second = ManagedServer(CONFIGURATION, engine, pool.StartLimits(1, 1, 1), tmp_path, "x")
    assert second.log.name == "server-x-2.log" and second.exit_status is None
    second._status_file.write_text(json.dumps({"exit_status": None, "exits": [], "pid": 8}))
    assert first.exit_status == -9 and second.exit_status is None


@from_data
def test_a_helper_that_was_sent_home_is_no_death(monkeypatch, status, at, answers, ended):
    exits = [{"pid": 7, "name": "helper", "status": status, "monotonic_s": at}]
    managed = SimpleNamespace(
        was_stopped=False, exit_status=None, exits=lambda: exits, pids_when_ready=frozenset()
    )
    monkeypatch.setattr(life.ManagedLife, "answers", lambda _life: answers)
    assert life.ManagedLife(managed).ended_since(10.0) is ended


def test_the_next_run_waits_until_the_killed_ones_server_is_ended(tmp_path):
    """Its supervisor still writes a bundle into the directory, which is then moved as a whole."""
    report = tmp_path / "report"
    held = directory.take(report)
    (report / "verdict.json").write_text("{}")
    slow = (
        "import signal, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), exit(0)));"
        "print('ready', flush=True); time.sleep(600)"
    )
    log = (report / "server-x.log").open("w+")
    supervisor = supervised(
        report / "server-x.status.json", tmp_path / "scratch", slow, stdout=log, stderr=log
    )
    while "ready" not in (report / "server-x.log").read_text():
        assert supervisor.poll() is None
        time.sleep(0.05)
    supervisor.stdin.close()
    held.lock.close()  # as pytest does when it is killed
    assert supervisor.poll() is None
    taken = directory.take(report)
    assert not psutil.pid_exists(supervisor.pid) or supervisor.wait(1) is not None
    assert [item.name for item in report.iterdir() if not item.name.startswith(".")] == ["earlier"]
    (kept,) = (report / "earlier").iterdir()
    assert list(kept.glob("crashes/*-suite_killed/bundle.json")), sorted(kept.rglob("*"))
    taken.lock.close()
    log.close()


@pytest.mark.parametrize("step_s", [1.0, -1.0, 3600.0, None])
def test_a_clock_that_is_set_makes_no_other_server(monkeypatch, step_s):
    """A process is the same whatever the clock says; another one is not (None)."""

    def child() -> psutil.Process:
        started = children.enter_context(subprocess.Popen(["sleep", "60"]))
        children.callback(started.kill)
        return psutil.Process(started.pid)

    own, booted = psutil.Process(), psutil.boot_time()
    with contextlib.ExitStack() as children:
        serving = [own, child()]
        reader = SignReader(None, SimpleNamespace(
            listening=lambda again: [own], below=lambda _of: [], large=lambda _share: {*serving},
            find=lambda: [psutil.Process(each.pid) for each in serving],
        ))  # fmt: skip
        before = Signs(reader._living())
        if step_s is None:
            serving[1] = child()
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + (step_s or 0.0))
        changes = [*before.changes(Signs(reader._living()))]
    assert bool(changes) == (step_s is None), changes
