"""Two ranks of a real vLLM on this machine's CPU.

They start, a fault happens in one rank, and then the clients, the cause and the machine are
checked."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from meta_tests.folders import ROOT
from meta_tests.unit.engines.two_nodes import watch_of
from sm121.answers import golden, prompts
from sm121.client.completions import Asker
from sm121.core import profile, waiting
from sm121.core.configuration import ServerConfiguration
from sm121.core.server import Server
from sm121.engines import process_tree
from sm121.engines.life import Alive, Dead
from sm121.engines.managed import ManagedServer
from sm121.engines.options import GivenEngine
from sm121.engines.pool import ServerPool
from sm121.engines.starting import StartLimits
from sm121.evidence import crash_bundle
from sm121.session import target
from sm121.session.options import GivenTarget
from sm121.session.settings import Settings

RUN = f"meta-two-real-{os.getpid()}"


@pytest.fixture(scope="module")
def pool(canary_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """The pool that starts servers with two ranks."""
    limits = StartLimits(600, 180, 20)
    folder = tmp_path_factory.mktemp("two")
    made = ServerPool(limits=limits, directory=folder, run_id=RUN)
    yield made
    made.stop()


def start(pool: ServerPool) -> tuple[Server, ManagedServer]:
    server = pool.get(float32("cpu-tiny-gpt-oss-tp2"))
    managed = pool.current
    assert managed is not None and pool.life is not None
    assert isinstance(pool.life.state(), Alive)
    return server, managed


def float32(name: str) -> ServerConfiguration:
    """Return the configuration of a profile."""
    chosen = profile.load(name)
    settings = Settings(
        target=GivenTarget(profile=chosen), engine=GivenEngine(python=sys.executable), root=ROOT
    )
    return target.configurations(settings, chosen, notify=lambda _line: None)["float32"]


def worker_of_rank_1(managed: ManagedServer) -> psutil.Process:
    """Return the process with rank 1's part of the model."""
    assert waiting.until(lambda: watch_of(managed).others[0].state.get("tree"), 20.0)
    tree = watch_of(managed).others[0].state["tree"]
    return psutil.Process(max(tree, key=lambda entry: entry["rss_bytes"])["pid"])


def shared_memory(managed: ManagedServer) -> set[Path]:
    """Return the shared memory of both ranks.

    A process that has ended since the agent's last reading maps nothing."""
    maps = []
    others = [entry["pid"] for entry in watch_of(managed).others[0].state["tree"]]
    for pid in (*(process.pid for process in managed.launch.processes()), *others):
        with contextlib.suppress(psutil.NoSuchProcess):
            maps += [mapped.path for mapped in psutil.Process(pid).memory_maps()]
    return {Path(path) for path in maps if path.startswith("/dev/shm/") and "deleted" not in path}


def clients(server: Server, plant) -> list[tuple[str, float]]:
    """Return the results of four clients that run while a fault is injected, with their durations
    in seconds."""
    ended: list[tuple[str, float]] = []

    def ask() -> None:
        body = {"model": "canary", "prompt": "One", "max_tokens": 4000, "ignore_eos": True}
        with server.endpoint.http(timeout_s=120) as http:
            try:
                answer = str(http.post("/v1/completions", json=body).status_code)
            except httpx.HTTPError as error:
                answer = type(error).__name__
        ended.append((answer, time.monotonic()))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    began = time.monotonic()
    plant()
    for thread in threads:
        thread.join(130)
    return [(answer, at - began) for answer, at in ended]


FAULTS = {
    "killed": (signal.SIGKILL, "killed", "SIGKILL", 15),
    "stopped": (signal.SIGSTOP, "node", "is stopped by a signal", 30),
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("killed", marks=pytest.mark.slow),
        pytest.param("stopped", marks=pytest.mark.slow),
    ],
)
def test_rank_of_a_real_vllm(pool, fault):
    number, kind, sentence, within_s = FAULTS[fault]
    server, managed = start(pool)
    assert [node.rank for node in server.nodes] == [0, 1] and server.nodes[1].log is not None
    assert "world_size=2 rank=1" in server.nodes[1].log.read_text()
    segments = shared_memory(managed)
    answers = clients(server, lambda: worker_of_rank_1(managed).send_signal(number))
    assert len(answers) == 4 and all(a != "200" and s < within_s for a, s in answers), answers
    state = pool.life.state()
    assert isinstance(state, Dead) and state.cause.kind == kind, state
    assert "node 1 (this machine)" in state.cause.summary and sentence in state.cause.summary
    assert "this machine" in state.cause.owner
    evidence = crash_bundle.Evidence(
        state.cause, state.what, log=managed.launch.log, nodes=managed.described()
    )
    bundle = crash_bundle.write(evidence, managed.directory / "crashes", str)
    assert {"server.log", "node-1.log", "node-1.json"} <= {file.name for file in bundle.iterdir()}
    report = pool.stop()
    assert report is not None and not report.survivors and report.port_free, report
    assert report.memory.missing_bytes == 0
    assert not process_tree.marked(process_tree.RUN_ID, RUN)
    assert segments and not any(file.exists() for file in segments), segments


@pytest.mark.slow("two starts; what may differ is in test_golden.py, without an engine")
def test_golden_file_of_one_node_holds_for_two(pool, canary_bf16):
    texts = prompts.continuations()
    bound = profile.load("cpu-tiny-gpt-oss-tp2").correctness.golden
    recorded = golden.record(
        Asker(pool.get(float32("cpu-tiny-gpt-oss"))), texts, dtype="float32", engine="vllm",
        model=golden.identity("canary", canary_bf16), engine_version=None, environment={},
        configuration="float32",
    )  # fmt: skip
    server, _ = start(pool)
    result = golden.compare(recorded, Asker(server), texts, bound["float32"], {})
    result.hold(bound["float32"])
    pool.stop()
