"""The watchers of a server and of its machine continue after any error."""

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
from unittest.mock import Mock

import psutil
import pytest

from meta_tests.texts import text_file
from sm121.core import profile, waiting
from sm121.core.configuration import ServerConfiguration
from sm121.engines import life, pool, registry
from sm121.engines.managed import ManagedServer
from sm121.engines.sign_reader import SignReader
from sm121.engines.signs import Signs
from sm121.engines.starting import StartLimits
from sm121.evidence import death, failure, kernel_messages
from sm121.evidence.resources import ResourceSampler
from sm121.run import directory

MORE_THAN_THERE_IS = 1e18
GIB = 1 << 30
CONFIGURATION = ServerConfiguration(
    name="x", engine="vllm", python=sys.executable, model="none", served_name="none"
)


def test_the_floor_is_looked_at_where_no_server_runs():
    lines: list[str] = []
    sampler = ResourceSampler(list, floor_bytes=MORE_THAN_THERE_IS, on_floor=lines.append)
    sampler.sample()
    assert len(lines) == 1 and "before the machine freezes" in lines[0], lines
    sampler.sample()
    assert len(lines) == 2, "what it ended may have been starting: it is ended again"


@pytest.mark.parametrize(
    ("available", "times"), [(1 << 20, 1), (0, 1), (GIB - 1, 1), (GIB, 0), (1 << 40, 0)]
)
def test_the_floor_of_another_node_is_named(available, times):
    lines: list[str] = []
    nodes = lambda: {"node 1 (spark2)": available}  # noqa: E731
    ResourceSampler(list, floor_bytes=GIB, on_floor=lines.append, nodes=nodes).sample()
    assert len(lines) == times, lines
    for line in lines:
        assert line.startswith("node 1 (spark2): MemAvailable: expected ")


def test_the_floor_is_watched_when_processes_cannot_be_read():
    lines: list[str] = []
    troubles: list[str] = []
    refused = Mock(side_effect=psutil.AccessDenied(1))
    looks = {"on_floor": lines.append, "on_trouble": troubles.append, "interval_s": 0.01}
    sampler = ResourceSampler(refused, floor_bytes=MORE_THAN_THERE_IS, **looks)
    sampler.start()
    assert waiting.until(lambda: len(lines) >= 3, 10.0, every_s=0.01), troubles
    sampler.stop()
    assert len(troubles) == 1 and "AccessDenied" in troubles[0], "said once"


def test_peaks_are_of_host_and_device_together_and_of_one_way_to_know_them():
    # While a server starts beside another program, only the memory of the whole GPU is known.
    samples = [SimpleNamespace(device=900, total=1000, source="the whole GPU")]
    for device, total in ((None, None), (70, 80), (60, 90)):
        samples.append(SimpleNamespace(device=device, total=total, source="by process"))
    sampler = ResourceSampler(lambda: [psutil.Process()], held=Mock(side_effect=samples))
    for _ in samples:
        sampler.sample()
    peaks = sampler.resources
    assert (peaks.device_peak_bytes, peaks.memory_peak_bytes) == (70, 90)
    assert peaks.memory_source == "by process" and peaks.tree_rss_peak_bytes > 0


def test_a_run_without_a_server_is_ended_too_and_leaves_a_bundle(run_pytest, tmp_path):
    text = profile.shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")
    file = tmp_path / "mine.toml"
    file.write_text(re.sub(r"(?m)^(memory_floor_gib = \{ value = )[\d.]+", r"\g<1>100000", text))
    status, run = run_pytest(
        "--arch", "cpu", "--profile", str(file), "meta_tests/whole/scenarios/without_a_server.py",
    )  # fmt: skip
    assert status != 0 and run.verdict["verdict"] == "INCONCLUSIVE", run.output
    last = run.verdict["tests"][-1]
    assert last["verdict"] == "NOT_RUN" and "the run was ended" in last["message"], last
    (crash,) = run.verdict["crashes"]
    assert crash["kind"] == "memory_floor", crash
    assert (run.report / crash["bundle"] / "bundle.json").is_file()


def test_a_server_that_is_starting_is_watched(monkeypatch, tmp_path):
    watched: list[list[str]] = []

    class Starting:
        configuration = CONFIGURATION
        secrets = ()
        stopped = None
        launch = SimpleNamespace(
            log=tmp_path / "server.log",
            pids_when_ready=frozenset(),
            processes=lambda: ["its process"],
        )

        def __init__(self, *_arguments):
            pass

        def start(self):
            watched.append(servers.processes())
            return SimpleNamespace(startup_s=1.0, compiled=())

    monkeypatch.setattr(pool, "ManagedServer", Starting)
    limits = StartLimits(1, 1, 1)

    servers = pool.ServerPool(limits=limits, directory=tmp_path, run_id="x")
    assert servers.processes() == []
    servers.get(CONFIGURATION)
    assert watched == [["its process"]]


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
    """The supervisor continues on a full disk, where it can write neither its file nor the log."""
    scratch = tmp_path / "scratch"
    pids = tmp_path / "pids"
    code = text_file("server-of-a-child.txt").format(pids=str(pids))
    with Path("/dev/full").open("w") as full:
        supervisor = supervised(tmp_path / "no" / "x.json", scratch, code, stdout=full, stderr=full)
    time.sleep(6.0)  # the child that it tried to record has ended
    assert supervisor.poll() is None, "it lives, and with it the server's end"
    server = psutil.Process(int(pids.read_text()))
    supervisor.stdin.close()  # the same happens when pytest is killed
    supervisor.wait(30)
    assert not server.is_running() and not scratch.exists()


def test_a_supervisor_gives_the_exit_status_that_it_cannot_write(tmp_path):
    supervisor = supervised(tmp_path / "no" / "x.json", tmp_path / "scratch", "raise SystemExit(3)")
    supervisor.communicate(timeout=30)
    assert supervisor.returncode == 3


VAGUE = failure.Cause(kind="engine_dead", summary="the engine is dead", owner="the engine")
NO_KERNEL = kernel_messages.KernelMessages()


@pytest.mark.parametrize(
    ("before", "number", "kind", "named"),
    [
        # vLLM ends its workers in this way
        (None, "SIGKILL", "engine_dead", False),
        (None, "SIGTERM", "engine_dead", False),
        # the engine crashed while it was being stopped
        (None, "SIGSEGV", "engine_dead", True),
        # another process killed the engine before the stop
        ("SIGKILL", "SIGKILL", "killed", True),
    ],
)
def test_a_worker_that_our_stop_killed_is_no_cause(tmp_path, before, number, kind, named):
    ready = tmp_path / "ready"
    status = tmp_path / "server-x.status.json"
    core = text_file("core-with-a-worker.txt").format(ready=str(ready))
    code = text_file("engine-with-a-core.txt").format(core=core, number=number, ready=str(ready))
    supervisor = supervised(status, tmp_path / "scratch", code)
    assert waiting.until(lambda: ready.is_file() and ready.read_text(), 60.0)
    worker = int(ready.read_text())
    if before is not None:
        time.sleep(2.5)  # wait until the supervisor knows the worker
        os.kill(worker, signal.Signals[before])
        time.sleep(0.5)
    supervisor.terminate()
    supervisor.wait(30)
    supervisor.stdin.close()
    exits = json.loads(status.read_text())["exits"]
    cause = death.cause_of(VAGUE, exits=exits, kernel=NO_KERNEL, kills=0, pids={worker})
    assert cause.kind == kind
    assert (str(worker) in cause.summary) is named, (cause.summary, exits)
    assert worker in {entry["pid"] for entry in exits}, "the bundle has it all the same"


def test_each_start_has_a_status_of_its_own(tmp_path):
    engine = registry.engine("llama-cpp")
    first = ManagedServer(CONFIGURATION, engine, StartLimits(1, 1, 1), tmp_path, "x")
    first.launch.log.write_text("it ran")
    first.launch.supervision.status_file.write_text(
        json.dumps({"exit_status": -9, "exits": [], "pid": 7})
    )
    second = ManagedServer(CONFIGURATION, engine, StartLimits(1, 1, 1), tmp_path, "x")
    assert second.launch.log.name == "server-x-2.log" and second.launch.exit_status is None
    status = {"exit_status": None, "exits": [], "pid": 8}
    second.launch.supervision.status_file.write_text(json.dumps(status))
    assert first.launch.exit_status == -9 and second.launch.exit_status is None


@pytest.mark.parametrize(
    ("status", "at", "answers", "ended"),
    [
        (-9, 20.0, False, True),
        (-9, 20.0, True, False),
        (-9, 5.0, False, False),
        (-15, 20.0, False, False),
        (1, 20.0, False, False),
    ],
)
def test_a_helper_process_that_the_engine_ended_is_no_crash(
    monkeypatch, status, at, answers, ended
):
    exits = [{"pid": 7, "name": "helper", "status": status, "monotonic_s": at}]
    launch = SimpleNamespace(
        was_stopped=False, exit_status=None, exits=lambda: exits, pids_when_ready=frozenset()
    )
    managed = SimpleNamespace(launch=launch)
    monkeypatch.setattr(life.ManagedLife, "answers", lambda _life: answers)
    assert life.ManagedLife(managed).ended_since(10.0) is ended


def test_the_next_run_waits_until_the_killed_ones_server_is_ended(tmp_path):
    """The next run waits until the killed run's supervisor has ended the server.

    The supervisor still writes a bundle into the report directory, which is then moved as a whole.
    """
    report = tmp_path / "report"
    first = directory.lock_directory(report)
    (report / "verdict.json").write_text("{}")
    slow = (
        "import signal, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), exit(0)));"
        "print('ready', flush=True); time.sleep(600)"
    )
    log = (report / "server-x.log").open("w+")
    supervisor = supervised(
        report / "server-x.status.json", tmp_path / "scratch", slow, stdout=log, stderr=log
    )
    assert waiting.until(lambda: "ready" in (report / "server-x.log").read_text(), 60.0)
    supervisor.stdin.close()
    first.lock.close()  # the same happens when pytest is killed
    assert supervisor.poll() is None
    second = directory.lock_directory(report)
    assert not psutil.pid_exists(supervisor.pid) or supervisor.wait(10) is not None
    assert [item.name for item in report.iterdir() if not item.name.startswith(".")] == ["earlier"]
    (moved,) = (report / "earlier").iterdir()
    assert list(moved.glob("crashes/*-suite_killed/bundle.json")), sorted(moved.rglob("*"))
    second.lock.close()
    log.close()


@pytest.mark.parametrize("step_s", [1.0, -1.0, 3600.0, None])
def test_a_clock_that_is_set_makes_no_other_server(monkeypatch, step_s):
    """If the system clock is changed, a process keeps its identity.

    If the step is None, another process is compared, which has another identity.
    """

    def child() -> psutil.Process:
        started = children.enter_context(subprocess.Popen(["sleep", "60"]))
        children.callback(started.kill)
        return psutil.Process(started.pid)

    tester = psutil.Process()
    booted = psutil.boot_time()
    with contextlib.ExitStack() as children:
        serving = [tester, child()]
        reader = SignReader(None, SimpleNamespace(
            listening=lambda again: [tester], below=lambda _of: [], large=lambda _share: {*serving},
            find=lambda: [psutil.Process(each.pid) for each in serving],
        ))  # fmt: skip
        before = Signs(reader._living())
        if step_s is None:
            serving[1] = child()
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + (step_s or 0.0))
        changes = [*before.changes(Signs(reader._living()))]
    assert bool(changes) == (step_s is None), changes
