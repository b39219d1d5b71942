"""A managed server raises typed errors with their cause, in time, and leaves nothing behind."""

import dataclasses
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from meta_tests.fakes.two_ranks import TwoRanks
from meta_tests.folders import FAKES
from sm121.core import profile
from sm121.core.configuration import ServerConfiguration
from sm121.engines import ports, process_tree, registry, supervision
from sm121.engines.life import Alive, Dead, ManagedLife
from sm121.engines.managed import ManagedServer
from sm121.engines.server_errors import PortTaken, ServerExited, ServerStalled, ServerTimedOut
from sm121.engines.starting import StartHooks, StartLimits

FAULT_SERVER = FAKES / "fault_server.py"


class FaultEngine(TwoRanks):
    """An engine that starts the fault server."""

    name = "fault"

    def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
        command = [configuration.python, str(FAULT_SERVER), "--port", str(port)]
        return [*command, *configuration.arguments]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ManagedServer]]:
    made: list[ManagedServer] = []

    def build(fault: str, *, ready=20.0, stalled=20.0, stop=5.0, cold=0.0):
        configuration = ServerConfiguration(
            name=fault, engine="fault", python=sys.executable, model="none", served_name="canary",
            arguments=("--fault", fault),
        )  # fmt: skip
        progress: list[str] = []
        server = ManagedServer(
            configuration, FaultEngine(), StartLimits(ready, stalled, stop, cold), tmp_path,
            "meta-run", StartHooks(lambda phase: progress.append(phase.text)),
        )  # fmt: skip
        server.reported = progress  # type: ignore[attr-defined]
        made.append(server)
        return server

    yield build
    for server in made:
        server.stop()


def nothing_left(server: ManagedServer) -> bool:
    return not process_tree.marked(process_tree.SERVER_ID, server._server_id)


def gone(processes) -> bool:
    return not any(psutil.pid_exists(process.pid) for process in processes)


@pytest.mark.parametrize("fault", ["none", "stubborn", "orphan", "zombie"])
def test_serves_and_stops_clean(make, fault):
    """The server serves and stops cleanly, even if the supervisor or the server has an orphan or a
    zombie."""
    server = make(fault, **{"stop": 2.0} if fault == "stubborn" else {})
    running = server.start()
    life = ManagedLife(server)
    assert running.managed and running.startup_s is not None
    assert isinstance(life.state(), Alive) and life.answers()
    tree = server.launch.processes()
    children = []
    for each in tree:
        children.extend(each.children(recursive=True))
    every = {*tree, *children}
    assert len(every) == 2 + (fault in ("orphan", "zombie")), every
    assert os.getsid(tree[0].pid) != os.getsid(0), "the server has a session of its own"
    report = server.stop()
    assert report.clean and gone(every), report
    assert not life.answers()


def test_key_of_vllm_is_as_old_as_its_compiled_kernels(tmp_path, monkeypatch):
    """vLLM's API key is stored as long as its compiled kernels. vLLM 0.24 compiled again on an H100
    if the key changed."""
    configuration = ServerConfiguration("marlin", "vllm", sys.executable, "none", "canary")
    limits = StartLimits(1.0, 1.0, 1.0, 1.0)
    vllm = registry.engine("vllm")

    def key() -> str:
        server = ManagedServer(configuration, vllm, limits, tmp_path, "meta-run")
        assert server.secrets[0] not in repr(server), "it was never started"
        return server.secrets[0]

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "one"))
    first = key()
    assert len(first) == 32 and key() == first
    file = tmp_path / "one" / "sm121-api-key"
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    assert key() != first, "others may have read it"
    file.chmod(0o600)
    file.write_text("x")
    assert len(key()) == 32
    for root in (tmp_path / "other", "/proc/nowhere"):
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(root))
        assert len(key()) == 32 and key() != first
    assert key() != key(), "where nothing can be kept, each is a new one"


def test_no_api_key_begins_with_a_hyphen(tmp_path):
    """SGLang accepts the key only as an argument; argparse refuses a value that begins with a
    hyphen."""
    configuration = ServerConfiguration("sglang", "sglang", sys.executable, "none", "canary")
    limits = StartLimits(1.0, 1.0, 1.0, 1.0)
    sglang = registry.engine("sglang")
    keys = {
        ManagedServer(configuration, sglang, limits, tmp_path, "meta-run").secrets[0]
        for _ in range(1000)
    }
    assert len(keys) == 1000
    assert not [key for key in keys if key.startswith("-")]


def test_api_key_is_random_and_on_no_command_line(make):
    first = make("none")
    second = make("none")
    assert first.secrets != second.secrets
    first.start()
    for process in first.launch.processes():
        assert first.secrets[0] not in " ".join(process.cmdline())
    assert first.secrets[0] not in repr(first)


def failed_start(server: ManagedServer, error: type[Exception]) -> tuple[str, str, float]:
    """Start a server that fails.

    Return the message of the error, the kind of its cause, and the duration in seconds."""
    began = time.monotonic()
    with pytest.raises(error) as caught:
        server.start()
    seconds = time.monotonic() - began
    assert nothing_left(server)
    return str(caught.value), caught.value.cause.kind, seconds


def test_an_end_during_start_up_is_reported_at_once_with_its_cause(make):
    server = make("exit-0", ready=60.0)
    text, kind, seconds = failed_start(server, ServerExited)
    # The fault server lives for one second. On a busy machine, it needs a part of this time to
    # start.
    assert seconds < 1.0 + 6.0, f"reported {seconds:.1f} s after the start, dead after 1 s"
    assert "status 0" in text and kind == "engine_dead" and str(server.launch.log) in text, text
    text, kind, _ = failed_start(make("exit-oom"), ServerExited)
    assert "out of memory" in text and kind == "oom", text


@pytest.mark.parametrize(
    "others",
    [
        "0.7.2/121a/cached_ops/moe",
        pytest.param("0.6.16/90a/cached_ops/fa2", marks=pytest.mark.slow),
        pytest.param("0.7.2/120f/cached_ops/gemm", marks=pytest.mark.slow),
    ],
)
def test_never_ready_is_reported_at_the_timeout_with_the_last_progress(make, empty_cache, others):
    """A server that never becomes ready is reported at the time limit with its last progress.

    Files that another process compiles into the same cache do not count as progress of this start.
    """
    folder = empty_cache / "FLASHINFER_WORKSPACE_BASE/.cache/flashinfer" / others
    folder.mkdir(parents=True)
    (folder / "build.ninja").write_text("build 1.o: cuda_compile 1.cu")
    os.utime(folder / "build.ninja", (time.time() + 60,) * 2)
    server = make("never-ready", ready=4.0)
    text, _, seconds = failed_start(server, ServerTimedOut)
    assert 4.0 <= seconds < 9.0, f"expected an end at the timeout of 4 s, got {seconds:.1f} s"
    assert "loading weights" in text
    assert any("loading weights" in line for line in server.reported)
    assert not any("JIT" in line for line in server.reported), server.reported


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = tmp_path / "base"
    for name in ("FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"):
        monkeypatch.setenv(name, str(base / name))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(base / "inductor"))
    return base


def test_a_cold_start_has_its_own_time(make, empty_cache):
    """A start that compiles has its own time limit.

    It compiles for six seconds, and a warm start may take four. The compiled modules are shown. The
    same start with the filled cache is warm."""
    granted: list[float] = []
    server = make("compiles", ready=4.0, cold=60.0)
    server.hooks = dataclasses.replace(server.hooks, on_cold=granted.append)
    running = server.start()
    assert running.compiled == ("FlashInfer: fused_moe_120",)
    assert "fused_moe_120" in (running.why_cold or "") and "sm121 warm" in (running.why_cold or "")
    assert sum(granted) > 0, "the time of the test was prolonged as well"
    lines = [line for line in server.reported if "fused_moe_120" in line]
    assert lines and "of 6 files left" in lines[0], server.reported
    server.stop()
    again = make("compiles", ready=4.0, cold=60.0).start()
    assert again.compiled == () and again.why_cold is None


@pytest.mark.slow("as long as a cold start")
def test_a_cold_start_that_compiles_no_more_is_found(make, empty_cache):
    """A start that no longer compiles is reported after the time limit of a warm start, counted
    from the last compiled file.

    The time limit of a cold start is longer."""
    stuck = make("compiles-then-hangs", ready=4.0, cold=60.0)
    text, _, seconds = failed_start(stuck, ServerTimedOut)
    assert 5.5 < seconds < 15.0 and "after the last file that it compiled" in text
    shutil.rmtree(empty_cache)  # the first start has compiled the module
    # The start ends at the time limit.
    failed_start(make("compiles", ready=3.0, cold=4.0), ServerTimedOut)


@pytest.mark.slow("another compiler; a cold start that ends is tested above")
def test_a_compiler_that_works_on_its_first_file_is_no_sick_server(make, empty_cache):
    """A start may exceed its time limit while a compiler works on its first file."""
    running = make("compiles-one-file", ready=4.0, cold=60.0).start()
    assert running.compiled == ("FlashInfer: fused_moe_120",)


@pytest.mark.slow("two runs, one compiles for twenty seconds; a cold start alone is tested above")
def test_the_time_of_a_start_is_decided_by_a_warm_one(run_pytest, tmp_path, empty_cache):
    """Only a start with warm caches decides on the startup time.

    If a start compiles, the smoke level and the gate neither fail nor pass. The next run has warm
    caches, and decides."""
    file = tmp_path / "mine.toml"
    text = profile.shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")
    text = re.sub(r"ready_within_s = .*", 'ready_within_s = { value = 8, source = "test" }', text)
    # The test's own timeout is longer than usual, too.
    file.write_text(re.sub(r"smoke = \d+", "smoke = 15", text))
    arguments = (
        "--arch", "cpu", "--profile", str(file), "--kernel-trace", "off",
        "--engine-python", str(FAULT_SERVER.with_name("fake_python.py")),
        "tests/test_smoke.py::test_server_is_ready_in_time",
        "tests/test_performance.py::test_startup_time",
    )  # fmt: skip
    engine = {"SM121_META_PYTHON": sys.executable, "SM121_META_SERVER": "scripted_engine.py"}
    engine["SM121_META_ARGUMENTS"] = "--compiles 20"
    _status, cold = run_pytest(*arguments, environment=engine)
    tests = {test["id"].rpartition("::")[2]: test for test in cold.verdict["tests"]}
    verdicts = {"test_server_is_ready_in_time": "INCONCLUSIVE", "test_startup_time": "NOT_RUN"}
    for name, verdict in verdicts.items():
        assert tests[name]["verdict"] == verdict, cold.output
        assert "it compiled FlashInfer: fused_moe_120" in tests[name]["message"]
        assert "run again" in tests[name]["message"]
    assert "startup_s" not in cold.verdict["metrics"]
    assert cold.verdict["starts"][0]["compiled"] == ["FlashInfer: fused_moe_120"]
    assert "fused_moe_120, " in cold.output and "of 20 files left" in cold.output
    _status, warm = run_pytest(*arguments, environment=engine)
    assert warm.verdict["tests"][0]["verdict"] == "PASS", warm.output
    assert warm.verdict["metrics"]["startup_s"]["value"] > 0, "measured, whatever the box is"
    assert warm.verdict["starts"][0]["compiled"] == []


def test_a_hanging_start_differs_from_a_slow_one(make):
    """A start that hangs is distinguished from a slow one.

    Three starts run at the same time, because each waits for seconds."""
    silent = make("silent", ready=300.0, stalled=4.0)
    # The time limit is the same for a server that logs. That server exceeds the limit, and is not
    # called stalled.
    logs = make("never-ready", ready=6.0, stalled=4.0)
    health_only = make("health-only", ready=6.0, stalled=60.0)
    with ThreadPoolExecutor() as starts:
        stalled = starts.submit(failed_start, silent, ServerStalled)
        slow = starts.submit(failed_start, logs, ServerTimedOut)
        without_a_token = starts.submit(failed_start, health_only, ServerTimedOut)
    assert stalled.result()[2] < 60.0, "long before the timeout of 300 s"
    slow.result()
    assert "first token" in without_a_token.result()[0], "health alone is not ready"
    for server in (silent, logs, health_only):
        assert "fault_server.py" in server.launch.stacks, "they are taken before the stop"


@pytest.fixture
def stolen() -> Iterator[int]:
    """A port on which another process listens already."""
    with socket.create_server(("127.0.0.1", 0)) as thief:
        yield thief.getsockname()[1]


def test_a_stolen_port_is_retried_and_is_a_typed_error_where_each_is_stolen(
    make, monkeypatch, stolen
):
    offered = iter([stolen, ports.free_port()])
    monkeypatch.setattr(ports, "free_port", lambda: next(offered))
    server = make("none")
    assert not server.start().endpoint.base_url.endswith(f":{stolen}")
    assert any("taken" in line for line in server.reported), server.reported
    monkeypatch.setattr(ports, "free_port", lambda: stolen)
    assert failed_start(make("none"), PortTaken)[1] == "port"


def test_another_server_on_the_chosen_port_is_detected(make, fault_server, monkeypatch):
    other = fault_server("none", key="")
    port = int(other.base_url.rsplit(":", 1)[1])
    monkeypatch.setattr(ports, "free_port", lambda: port)
    with pytest.raises((PortTaken, ServerTimedOut)):
        make("silent", ready=4.0).start()
    assert other.process.poll() is None, "the other server is left alone"


def test_death_while_serving_is_typed_and_cleaned(make):
    server = make("dies-later")
    running = server.start()  # the first completion is the readiness check
    with running.endpoint.http() as http, pytest.raises(httpx.TransportError):
        http.post("/v1/completions", json={})
    state = ManagedLife(server).after_failure()
    assert isinstance(state, Dead) and "-9" in state.what and state.evidence == server.launch.log
    server.stop()
    assert nothing_left(server)


def test_death_of_the_supervisor_ends_the_server(make):
    """If the supervisor dies, nothing of the server remains.

    The suite finds the processes by their marker."""
    server = make("none")
    server.start()
    tree = server.launch.processes()
    tree[0].kill()
    assert server.stop().survivors == () and gone(tree)


def test_a_long_temporary_folder_is_no_obstacle(make, monkeypatch, tmp_path):
    """A long path of the temporary folder is no obstacle, although the paths of its Unix sockets
    may have at most 107 bytes.

    The limit is vLLM's zmq.IPC_PATH_MAX_LEN."""
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(supervision.tempfile, "tempdir", str(long))
    server = make("none")
    server.start()
    folder = str(server.launch.supervision.scratch)
    assert len(folder) + 1 + 36 <= 107, folder
    server.stop()
    assert not Path(folder).exists(), "and nothing of it is left"


def test_the_log_that_is_left_shows_no_secret(make):
    server = make("none")
    # The server's log contains this text.
    server.hooks = StartHooks(other_secrets=lambda: {"0.32.0"})
    server.start()
    assert "version 0.32.0" in server.launch.log.read_text()
    server.stop()
    assert "version [redacted]" in server.launch.log.read_text()


def test_a_server_does_not_end_with_another_python(make):
    """A server does not end together with another Python process that starts servers.

    mirakuru then kills processes that have the digits of its pid in any variable, such as another
    run's server."""
    server = make("none")
    server.start()
    each = "for digit in range(10):\n  if not os.fork():\n    os.getpid = lambda: digit; sys.exit()"
    code = f"import os, sys, sm121.engines.managed\n{each}\n  os.wait()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert server.launch.exit_status is None and ManagedLife(server).answers()
