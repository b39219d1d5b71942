"""A server on the user's Ray cluster: what it requires, and what it leaves behind on the
cluster."""

import ast
import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from meta_tests.documents import altered
from meta_tests.fakes import servers
from meta_tests.fakes.run_events import stand_in, with_events
from meta_tests.folders import ROOT
from sm121.core import profile, waiting
from sm121.core.configuration import ServerConfiguration, Span
from sm121.core.errors import UsageError
from sm121.engines import ports, ray_cluster
from sm121.engines.managed import ManagedServer
from sm121.engines.options import GivenEngine
from sm121.engines.pool import ServerPool
from sm121.engines.python_engine import IN_ENGINE
from sm121.engines.ray_cluster import RayNodes
from sm121.engines.starting import StartLimits
from sm121.run.paths import KernelPaths
from sm121.session import target
from sm121.session.options import GivenTarget
from sm121.session.settings import Settings

CONFIGURATION = ServerConfiguration(
    "ray", "vllm", sys.executable, "none", "canary", span=Span("ray", 2)
)


def node(name: str, address: str) -> dict[str, Any]:
    packages = {"vllm": "0.32.0", "torch": "2.13.0", "nvidia-nccl-cu13": "2.28.3"}
    facts = {"host": name, "python": "3.12.3", "packages": packages, "variables": {}}
    facts |= {"gpus": ["NVIDIA GB10"], "available_bytes": 100 << 30, "segments": [], "nccl": []}
    resources = {"CPU": 20.0, "GPU": 1.0}
    return {"name": name, "address": address, "resources": resources, "facts": facts, "why": None}


CLUSTER: dict[str, Any] = {"groups": [], "holders": []}
CLUSTER["nodes"] = [node("spark1", "10.0.0.1"), node("spark2", "10.0.0.2")]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        pytest.param(
            {"nodes": [node("spark1", "10.0.0.1")]},
            "expected 2 nodes with 1 GPU each, got spark1",
            id="one node",
        ),
        pytest.param(
            {
                "nodes": [
                    node("spark1", "10.0.0.1"),
                    node("spark2", "10.0.0.2"),
                    node("spark3", "10.0.0.3"),
                ]
            },
            (
                "expected 2 nodes with 1 GPU each, got spark1 10.0.0.1: 1 GPU; spark2 "
                "10.0.0.2: 1 GPU; spark3"
            ),
            id="a node more",
        ),
        pytest.param(
            {"nodes.1.resources.GPU": 0.0}, "spark2 10.0.0.2: 0 GPU", id="a node without a GPU"
        ),
        pytest.param(
            {"nodes.1.facts.gpus": ["NVIDIA H100"]},
            "node 1 (spark2) differs from node 0",
            id="another GPU",
        ),
        pytest.param(
            {"nodes.1.facts.packages.vllm": "0.31.0"},
            "vllm 0.31.0, expected 0.32.0",
            id="another vLLM",
        ),
        pytest.param(
            {"nodes.1.facts.python": "3.11.7"},
            "Python 3.11.7, expected 3.12.3",
            id="another Python",
        ),
        pytest.param(
            {"nodes.1.facts.packages.nvidia-nccl-cu13": "2.27"},
            "nvidia-nccl-cu13 2.27, expected 2.28.3",
            id="another NCCL",
        ),
        pytest.param(
            {"nodes.1.facts.variables": {"VLLM_MXFP4_USE_MARLIN": "1"}},
            "USE_MARLIN 1",
            id="a variable",
        ),
        pytest.param(
            {"nodes.1.facts": None},
            "node 1 (spark2) of the Ray cluster does not answer",
            id="a node is silent",
        ),
        pytest.param(
            {"groups": ["unnamed (ab12)"]}, "an earlier server still uses", id="a placement group"
        ),
        pytest.param(
            {"holders": ["RayWorkerProc (pid 7)"]}, "RayWorkerProc (pid 7). End it", id="an actor"
        ),
    ],
)
def test_cluster_is_refused_in_one_line(monkeypatch, changes, what):
    cluster = altered(CLUSTER, changes)
    monkeypatch.setattr(ray_cluster, "_ask", lambda *_: cluster)
    with pytest.raises(UsageError) as refused:
        ray_cluster.check_cluster(CONFIGURATION, "sm121", 1)
    assert what in str(refused.value) and "\n" not in str(refused.value), refused.value


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="nothing"),
        pytest.param(
            {"nodes.1.facts.variables": {"VLLM_HOST_IP": "10.0.0.2"}},
            id="nodes.1.facts.variables VLLM_HOST_IP 10.0.0.2",
        ),
        pytest.param(
            {"nodes.1.facts.available_bytes": 1073741824},
            id="nodes.1.facts.available_bytes 1073741824",
        ),
    ],
)
def test_cluster_that_is_as_required(monkeypatch, changes):
    monkeypatch.setattr(ray_cluster, "_ask", lambda *_: altered(CLUSTER, changes))
    looks = ray_cluster.check_cluster(CONFIGURATION, "sm121", 1)
    assert [str(look.node) for look in looks] == ["node 0 (spark1)", "node 1 (spark2)"]


def test_another_nccl_on_a_node_is_refused_before_the_start(monkeypatch):
    cluster = altered(CLUSTER, {"nodes.1.facts.packages.nvidia-nccl-cu13": "2.27.7"})
    monkeypatch.setattr(ray_cluster, "_ask", lambda *_: cluster)
    with pytest.raises(UsageError, match=r"node 1 \(spark2\) differs from .*nvidia-nccl-cu13"):
        ray_cluster.check_cluster(CONFIGURATION, "sm121", 1)


@pytest.mark.parametrize("same", [True, False], ids=["one build", "two builds"])
def test_nccl_that_ray_workers_mapped_is_recorded_and_compared(monkeypatch, server, places, same):
    first = {"path": "/v/nvidia/nccl/lib/libnccl.so.2", "sha256": "a" * 64}
    second = first if same else {"path": "/usr/lib/libnccl.so.2.27.7", "sha256": "b" * 64}
    changes = {"nodes.0.facts.nccl": [first], "nodes.1.facts.nccl": [second]}
    monkeypatch.setattr(ray_cluster, "_ask", lambda *_: altered(CLUSTER, changes))
    places.note_ranks()
    remarks: list[str] = []
    run = stand_in(
        pool=SimpleNamespace(nccl_by_node=server.nccl_by_node),
        file=SimpleNamespace(environment={}),
        remark=remarks.append,
    )
    with_events(run)
    KernelPaths._note_nccl(run)
    recorded = run.record.file.environment["nccl"]
    assert recorded == {"node 0 (spark1)": [first], "node 1 (spark2)": [second]}
    assert bool(remarks) is not same
    for line in remarks:
        assert line.startswith("libnccl of node 1 (spark2)") and "vllm issue 42354" in line, line


#: A program that maps a file, and then prints a line.
MAPS = (
    "import mmap, sys; file = open(sys.argv[1], 'rb'); "
    "held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ); print('mapped', flush=True); "
    "sys.stdin.read()"
)


@pytest.mark.parametrize("name", ["ray::RayWorkerProc", "python3"])
def test_task_of_a_node_reads_the_nccl_of_its_actors(tmp_path, name):
    """The task of a node reads the NCCL library of its actors.

    Ray pickles the task without its file, and this test runs the same source."""
    script = ast.parse((IN_ENGINE / "sm121_ray.py").read_text("utf-8"))
    functions: list[ast.stmt] = []
    for statement in script.body:
        if isinstance(statement, ast.FunctionDef) and statement.name in ("nccl_of_actors", "facts"):
            statement.decorator_list = []
            functions.append(statement)
    space: dict[str, Any] = {"Any": Any}
    exec(compile(ast.Module(functions, []), "facts", "exec"), space)
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"NCCL 2.28.9")
    command = [name, "-c", MAPS, str(library)]
    with subprocess.Popen(
        command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as actor:
        assert actor.stdout is not None and actor.stdout.readline() == b"mapped\n"
        rows = [row for row in space["facts"]([], [], [])["nccl"] if row["path"] == str(library)]
        assert actor.stdin is not None
        actor.stdin.close()
    expected = {"path": str(library), "sha256": hashlib.sha256(b"NCCL 2.28.9").hexdigest()}
    assert rows == ([expected] if name.startswith("ray::") else [])


def test_no_cluster_is_one_line():
    with pytest.raises(UsageError, match=r"--launcher ray: no cluster answers .* ray start --head"):
        ray_cluster.check_cluster(CONFIGURATION, "sm121", 1)


@pytest.fixture
def places(monkeypatch) -> RayNodes:
    """Return the nodes of a running server."""
    made = RayNodes(CONFIGURATION)
    for number, entry in enumerate(CLUSTER["nodes"]):
        made.nodes += (ray_cluster.Node(number, entry["name"]),)
    monkeypatch.setattr(ray_cluster, "_REMOVED_WITHIN_S", 0.3)
    return made


@pytest.fixture
def server(tmp_path, places) -> ManagedServer:
    """Return the server of these nodes, without a process."""
    engine = ray_cluster.registry.engine("vllm")
    limits = StartLimits(1, 1, 1)
    return ManagedServer(CONFIGURATION, engine, limits, tmp_path, "meta", other_nodes=places)


TIMED_OUT = "GetTimeoutError: Get timed out"
LOST = {"Ray has lost the node": altered(CLUSTER, {"nodes": CLUSTER["nodes"][:1]})}
LOST[TIMED_OUT] = altered(CLUSTER, {"nodes.1.why": TIMED_OUT})


@pytest.mark.parametrize("how", LOST)
def test_node_that_is_lost_has_a_name(monkeypatch, server, how):
    monkeypatch.setattr(ray_cluster, "_ask", lambda *_: LOST[how])
    assert server.fault() is None, "the cluster is asked where something is amiss alone"
    fault = server.fault(settle_s=1.0)
    assert fault is not None and fault.cause.summary == f"node 1 (spark2): {how}"
    assert "the operator of spark2" in fault.cause.owner


def test_leftovers_on_the_cluster_are_named(monkeypatch, server, places):
    answers = iter([CLUSTER, altered(CLUSTER, {"holders": ["RayWorkerProc (pid 7)"]}), CLUSTER])
    monkeypatch.setattr(ray_cluster, "_ask", lambda *_: next(answers))
    assert server.stop().clean, "an actor takes a moment to end"
    holding = altered(CLUSTER, {"holders": ["RayWorkerProc (pid 7)"]})
    monkeypatch.setattr(ray_cluster, "_ask", lambda *_: holding)
    places.nodes = (ray_cluster.Node(0, "spark1"),)
    report = server.stop()
    assert not report.clean and "RayWorkerProc (pid 7)" in str(report.survivors[0])


@pytest.mark.parametrize("noted", [["psm_1"], []], ids=["it served", "its start failed"])
def test_shared_memory_of_ranks_is_removed(monkeypatch, server, places, noted):
    removals: list[list[str]] = []

    def answer(_configuration, remove=()):
        removals.append([*remove])
        return altered(CLUSTER, {"nodes.1.facts.segments": ["psm_1"]})

    monkeypatch.setattr(ray_cluster, "_ask", answer)
    places.segments += noted
    assert server.stop().clean
    assert removals[-1] == ["psm_1"] and len(removals) == 2 - len(noted)


def test_a_cluster_that_ended_during_a_start_is_the_cause(monkeypatch, server):
    def answer(*_):
        raise UsageError("--launcher ray: no cluster answers")

    monkeypatch.setattr(ray_cluster, "_ask", answer)
    report = server.stop()
    assert not report.clean and "no cluster answers" in str(report.survivors[0])


def ray(*words: str) -> None:
    environment = {**os.environ, "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    subprocess.run(command, env=environment, check=True, timeout=180, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[None]:
    """A real Ray cluster of two nodes on this host, with one rank each."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install ray")
    port = str(ports.free_port())
    before = {process.pid for process in psutil.process_iter()}
    small = ("--num-cpus=1", "--num-gpus=0", "--object-store-memory=100000000")
    small = (*small, '--resources={"sm121_rank": 1}')
    try:
        ray("start", "--head", f"--port={port}", "--include-dashboard=false", *small)
        ray("start", f"--address=127.0.0.1:{port}", "--node-ip-address=127.0.0.2", *small)
        yield
    finally:
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or ())
            if process.pid not in before and any(part in words for part in RAYS):
                process.kill()


#: Texts in the command lines of Ray's processes.
RAYS = ("/ray/", " ray.", "ray::")


def _refused(configuration) -> str:
    try:
        ray_cluster.check_cluster(configuration, "cpu", 1)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.slow("a Ray cluster, and a start of vLLM on it")
def test_real_cluster(cluster, canary_bf16, tmp_path):
    chosen = profile.load("cpu-tiny-gpt-oss-tp2")
    settings = Settings(
        target=GivenTarget(profile=chosen),
        engine=GivenEngine(python=sys.executable, launcher="ray"),
        root=ROOT,
    )
    configuration = target.configurations(settings, chosen, notify=print)["float32"]
    assert len(ray_cluster.check_cluster(configuration, "cpu", 1)) == 2
    with pytest.raises(UsageError, match="expected 2 nodes with 2 sm121_rank each"):
        ray_cluster.check_cluster(configuration, "cpu", 2)
    with servers.program("holder-of-a-rank.txt") as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="a task with 1 sm121_rank"):
            ray_cluster.check_cluster(configuration, "cpu", 1)
    assert waiting.until(lambda: not _refused(configuration), 60.0, every_s=1.0)
    pool = ServerPool(limits=StartLimits(600, 180, 20), directory=tmp_path, run_id="ray")
    try:
        server = pool.get(configuration)
        assert len(server.nodes) == 2
        with pytest.raises(UsageError, match="an earlier server still uses the cluster"):
            ray_cluster.check_cluster(configuration, "cpu", 1)
    finally:
        report = pool.stop()
    assert report is not None and report.clean, report
    assert len(ray_cluster.check_cluster(configuration, "cpu", 1)) == 2
