"""For a server on two nodes, each fault is reported in time, and nothing is left behind."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import psutil
import pytest

from meta_tests.fakes.run_events import stand_in, with_events
from meta_tests.fakes.servers import executable, program
from meta_tests.fakes.two_ranks import COMMAND, TwoRanks
from meta_tests.folders import ROOT
from meta_tests.unit.engines.two_nodes import (
    RUN,
    configuration,
    left_of,
    spanning,
    watch_of,
    with_bounds,
)
from sm121.core import data_file, waiting
from sm121.core.configuration import Span
from sm121.core.errors import UsageError
from sm121.engines import managed_evidence, nodes, ports, registry, server_errors
from sm121.engines.life import Alive, Dead, ManagedLife
from sm121.engines.managed import ManagedServer
from sm121.evidence import crash_bundle
from sm121.evidence.kernel_messages import KernelBefore
from sm121.run.paths import KernelPaths


@pytest.fixture
def bounds(monkeypatch):
    """Shorter time limits for nodes, and an engine with a name.

    On two busy cores, reports may be 2 s late."""
    monkeypatch.setitem(registry._ENGINES, TwoRanks.name, TwoRanks())
    data = data_file.load("nodes.toml", nodes.NodesFile)
    shorter = ("stopped_after_s", "token_within_s")
    tenths = {name: getattr(data, name).value / 10 for name in shorter}
    with_bounds(monkeypatch, silent_after_s=4, unreachable_after_s=4, **tenths)


@pytest.fixture
def make(tmp_path, bounds):
    made = []

    def build(*arguments: str, traces: str | None = None, **span) -> ManagedServer:
        started = dataclasses.replace(configuration(*arguments, **span), traces=traces)
        server = spanning(tmp_path, started)
        made.append(server)
        return server

    yield build
    for server in made:
        server.stop()


def process_of(rank: int, commands: dict[int, str]) -> list[int]:
    """Return the pid of a rank that one of these commands has started."""
    named = [pid for pid, words in commands.items() if f"--rank {rank}" in words]
    return [pid for pid in named if "supervisor" not in commands[pid]]


def rank_1(server: ManagedServer) -> psutil.Process:
    """Return the process of rank 1 on the other node."""

    def pids() -> list[int]:
        tree = watch_of(server).others[0].state.get("tree", ())
        return process_of(1, {entry["pid"]: entry["command"] for entry in tree})

    assert waiting.until(pids, 5.0), watch_of(server).others[0].state
    return psutil.Process(pids()[0])


def rank_0(server: ManagedServer) -> psutil.Process:
    commands = {each.pid: " ".join(each.cmdline()[2:]) for each in server.launch.processes()}
    return psutil.Process(process_of(0, commands)[0])


def agent(server: ManagedServer) -> subprocess.Popen:
    rank_1(server)
    return watch_of(server).others[0]._process


def asked(server: ManagedServer) -> tuple[str, float]:
    """Return a client's answer to a request for one token, and its duration in seconds."""
    began = time.monotonic()
    endpoint = server.endpoint
    with endpoint.http(timeout_s=60) as http:
        try:
            status = http.post("/v1/completions", json={"prompt": "x"}).status_code
        except httpx.HTTPError as error:
            return type(error).__name__, time.monotonic() - began
    return str(status), time.monotonic() - began


def test_serves_and_leaves_nothing_on_any_node(make, tmp_path):
    traces = tmp_path / "of another machine" / "report" / "traces"
    server = make(traces=str(traces))
    running = server.start()
    assert [(n.rank, n.name) for n in running.nodes] == [(0, "this machine"), (1, "this machine")]
    assert isinstance(ManagedLife(server).state(), Alive)
    process = rank_1(server)
    traces.mkdir(parents=True)
    (traces / "rank-1.json").write_text("{}")
    log = running.nodes[1].log
    report = server.stop()
    assert report.clean, report
    assert not traces.parents[1].exists()
    assert not process.is_running() and not left_of(RUN)
    assert log is not None and "rank 1 serves" in log.read_text()


def test_kernel_of_each_other_node_is_read(make, tmp_path, monkeypatch):
    lines = (  # the driver has found no memory four times a second for 12 seconds
        r"now = time.monotonic(); print(f'[{now:.6f}] NVRM: Xid (PCI:1): 31, pid=7\n[0.1] boot'); "
        r"[print(f'[{now - n / 4:.6f}] NVRM: [NV_ERR_NO_MEMORY]') for n in range(48, -1, -1)]"
    )
    executable(tmp_path / "dmesg", f'exec {sys.executable} -Sc "import time; {lines}"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    server = make()
    server.start()
    rank_1(server)
    (name, kernel), *others = server.stop().kernels.items()
    assert name == "node 1 (this machine)" and not others
    assert len(kernel.xids) == 1 and kernel.unavailable is not None, "its buffer begins later"
    assert kernel.no_memory and kernel.no_memory_at_start, "at a start it may be well"


@pytest.mark.parametrize(
    "same",
    [
        pytest.param(True, id="one build", marks=pytest.mark.slow("the same with two builds")),
        pytest.param(False, id="two builds"),
    ],
)
def test_nccl_that_each_node_mapped_is_recorded_and_compared(make, tmp_path, monkeypatch, same):
    libraries = [tmp_path / name / "libnccl.so.2" for name in ("here", "there")]
    for library in libraries:
        library.parent.mkdir()
        library.write_bytes(b"NCCL 2.28.9" if same else str(library).encode())
    monkeypatch.setenv("SM121_META_NCCL", str(libraries[0]))
    server = make(command=("env", f"SM121_META_NCCL={libraries[1]}", *COMMAND))
    server.start()
    rank_1(server)
    remarks: list[str] = []
    run = stand_in(
        pool=SimpleNamespace(nccl_by_node=server.nccl_by_node),
        file=SimpleNamespace(environment={}),
        remark=remarks.append,
    )
    with_events(run)

    def recorded() -> list[str]:
        KernelPaths._note_nccl(run)
        rows = run.record.file.environment["nccl"].values()
        return [row["path"] for (row,) in rows]

    assert waiting.until(lambda: recorded() == [*map(str, libraries)], 15.0), recorded()
    assert bool(remarks) is not same
    for line in remarks:
        assert line.startswith("libnccl of node 1 ") and "vllm issue 42354" in line, line


def test_rank_that_is_killed(make):
    server = make()
    server.start()
    rank_1(server).send_signal(signal.SIGKILL)
    answer, seconds = asked(server)
    assert answer != "200" and seconds < 5
    state = ManagedLife(server).state()
    assert isinstance(state, Dead) and state.cause.kind == "killed"
    assert "node 1 (this machine)" in state.cause.summary and "SIGKILL" in state.cause.summary
    assert "the sender of SIGKILL" in state.cause.owner and "this machine" in state.cause.owner
    (log, facts) = server.described()["node-1"]
    assert log is not None and facts["available_bytes"] > 0 and facts["exits"]
    evidence = crash_bundle.Evidence(
        state.cause, state.what, log=server.launch.log, nodes=server.described()
    )
    bundle = crash_bundle.write(evidence, server.directory / "crashes", str)
    assert "rank 0 waits" in (bundle / "server.log").read_text()
    assert "rank 1 serves" in (bundle / "node-1.log").read_text()
    assert json.loads((bundle / "node-1.json").read_text())["exits"][0]["status"] == -9
    server.stop()
    assert not left_of(RUN)
    assert server.start().nodes, "the next start works"


def test_the_bundle_of_a_hang_has_the_stacks_of_both_nodes(make):
    server = make()
    server.start()
    rank_1(server).send_signal(signal.SIGUSR1)
    state = ManagedLife(server).state()
    assert isinstance(state, Dead) and "generates no token within" in state.what
    evidence = managed_evidence.gather(
        server, state.cause, state.what, before=KernelBefore(), secrets=()
    )
    bundle = crash_bundle.write(evidence, server.directory / "crashes", str)
    assert "do_POST" in (bundle / "stacks.txt").read_text()
    assert "wait_for_ever" in (bundle / "node-1-stacks.txt").read_text()
    assert "node-1-stacks.txt" in (bundle / "README.md").read_text()


@pytest.mark.parametrize(
    ("of", "number", "node", "what"),
    [
        pytest.param(
            rank_1,
            signal.SIGSTOP,
            "node 1 (this machine)",
            "is stopped by a signal",
            id="a rank is stopped",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            rank_0,
            signal.SIGSTOP,
            "node 0 (this machine)",
            "is stopped by a signal",
            id="rank 0 is stopped",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            agent,
            signal.SIGSTOP,
            "node 1 (this machine)",
            "has sent nothing for",
            id="a node is silent",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            agent,
            signal.SIGKILL,
            "node 1 (this machine)",
            "its command ended with -9",
            id="a node's command is killed",
        ),
    ],
)
def test_every_client_has_an_answer_in_time(make, of, number, node, what):
    server = make()
    server.start()
    of(server).send_signal(number)
    answers: list[tuple[str, float]] = []
    clients = [threading.Thread(target=lambda: answers.append(asked(server))) for _ in range(3)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(20)
    assert len(answers) == 3 and all(seconds < 10 for _, seconds in answers), answers
    assert waiting.until(lambda: server.fault() is not None, 5.0)
    cause = server.fault().cause
    assert node in cause.summary and what in cause.summary, cause
    assert "this machine" in cause.owner
    assert server.launch.stacks and set(server.other_nodes.stacks()) == {"node-1"}
    server.stop()
    # A node whose command was killed ends its rank without the suite.
    assert waiting.until(lambda: not left_of(RUN), 10.0)
    assert server.start().nodes, "the next start works"


@pytest.fixture
def second_host() -> Iterator[str]:
    """A network namespace with a link to this one. The address on this side is 10.77.0.1."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a second network namespace needs root and iproute2")
    name = f"sm121-{os.getpid()}"
    link = f"sm{os.getpid()}"[:13]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        ip = lambda words: subprocess.run(["ip", *words.split()], check=True)  # noqa: E731
        ip(f"link add {link}a type veth peer name {link}b netns {name}")
        for host, end, number in (("", "a", 1), (f"-n {name} ", "b", 2)):
            ip(f"{host}addr add 10.77.0.{number}/30 dev {link}{end}")
            ip(f"{host}link set {link}{end} up")
        ip(f"-n {name} link set lo up")
        yield name
    finally:
        # Wait, because creating a namespace takes time.
        subprocess.run(["ip", "link", "del", f"{link}a"], check=False)
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.slow("a link that is given up after so long")
def test_link_that_goes_down(make, second_host):
    command = ("ip", "netns", "exec", second_host, *COMMAND)
    server = make(command=command, address="10.77.0.1")
    server.start()
    assert asked(server)[0] == "200"
    # The node of the rank has already reported that it reaches this machine. Otherwise the reason
    # would be a blocked port.
    rank_1(server)
    link = ("ip", "-n", second_host, "link", "set", f"sm{os.getpid()}"[:13] + "b")
    subprocess.run([*link, "down"], check=True)
    answer, seconds = asked(server)
    assert answer != "200" and seconds < 15
    fault = server.fault(settle_s=5)
    assert fault is not None and "node 1 " in fault.cause.summary, fault
    assert "the link is down" in fault.cause.summary and "unreachable" in fault.cause.summary
    server.stop()
    assert not left_of(RUN)
    with pytest.raises(UsageError, match=r"node 1 .* cannot connect to 10.77.0.1:\d+ of this"):
        nodes.check_nodes(configuration(command=command, address="10.77.0.1"))
    subprocess.run([*link, "up"], check=True)
    assert server.start().nodes, "the next start works"


def block(host: str, packets: str) -> None:
    """Drop packets in the namespace without an error, before the routes to the host itself."""
    rule = f"add pref 0 ipproto tcp {packets} blackhole"
    for words in ("add pref 1 lookup local", "del pref 0", rule):
        subprocess.run(["ip", "-n", host, "rule", *words.split()], check=True)


@pytest.mark.slow("a connection that is given up after so long")
@pytest.mark.parametrize(
    ("rule", "during"),
    [
        pytest.param("sport {0}", "a start", id="the master port, from the start"),
        pytest.param("sport {0}", "a token", id="what comes from the master port"),
        pytest.param("dport {0}", "a token", id="what goes to the master port"),
        pytest.param("sport {1}", None, id="another port"),
    ],
)
def test_port_that_is_blocked(make, second_host, rule, during):
    """A blocked port is reported.

    `during` is the part of the start or of the run that it affects.
    """
    port = ports.free_port("10.77.0.1")
    command = ("ip", "netns", "exec", second_host, *COMMAND)
    server = make(command=command, address=f"10.77.0.1:{port}")
    sysctl = ("sysctl", "-qw", "net.ipv4.tcp_early_demux=0")
    subprocess.run(["ip", "netns", "exec", second_host, *sysctl], check=True)
    if during == "a start":
        block(second_host, rule.format(port))
        with pytest.raises(server_errors.ServerExited) as failed:
            server.start()
        fault = failed.value
    else:
        server.start()
        assert asked(server)[0] == "200"
        block(second_host, rule.format(port, port + 1))
        answer, seconds = asked(server)
        assert (answer == "200") == (during is None) and seconds < 15
        fault = server.fault(settle_s=5)
    if during is None:
        assert fault is None and isinstance(ManagedLife(server).state(), Alive)
        return
    assert fault is not None and fault.cause.summary.startswith("node 1 (this machine)"), fault
    assert "a port is blocked" in fault.cause.summary and f"10.77.0.1:{port}" in fault.cause.summary
    server.stop()
    assert not left_of(RUN)


@pytest.mark.slow("the suite is killed, and its nodes end by themselves")
def test_suite_that_is_killed_leaves_nothing(tmp_path):
    with program("suite-on-two-nodes.txt", str(ROOT), str(tmp_path)) as suite:
        assert suite.stdout.readline() == "up\n"
        assert len(left_of("meta-killed")) >= 4
        suite.kill()
    assert waiting.until(lambda: not left_of("meta-killed"), 30.0)


def test_a_rank_that_dies_at_its_start_has_its_own_cause(make):
    server = make("--dies-at-start")
    with pytest.raises(server_errors.ServerExited) as failed:
        server.start()
    assert failed.value.cause.kind == "oom" and "node 1" in failed.value.cause.summary
    assert "node-1" in failed.value.log.name
    assert not left_of(RUN)


def test_nodes_are_looked_at_before_a_start(bounds):
    looks = nodes.check_nodes(configuration())
    assert [str(look.node) for look in looks] == ["node 0 (this machine)", "node 1 (this machine)"]
    with pytest.raises(UsageError, match=r"node 1 .* differs from this machine: VLLM_ONLY_THERE 1"):
        nodes.check_nodes(configuration(command=("env", "VLLM_ONLY_THERE=1", *COMMAND)))


def test_port_that_a_leftover_holds_is_one_line(make):
    with socket.create_server(("127.0.0.1", 0)) as leftover:
        address = f"127.0.0.1:{leftover.getsockname()[1]}"
        held = rf"{address}: the port .* held by pid {os.getpid()}\b"
        with pytest.raises(UsageError, match=held):
            nodes.check_nodes(configuration(address=address))
        with pytest.raises(server_errors.ServerExited, match=held):
            make(address=address).start()
    assert make(address=address).start().nodes
    assert nodes.master(Span("nnodes", 2, (COMMAND,), "localhost"))[0] == "127.0.0.1"
    for wrong in ("192.0.2.1", "127.0.0.1:x", "127.0.0.1:0", "127.0.0.1:65536"):
        why = "ADDRESS:PORT" if ":" in wrong else "an address of this machine"
        with pytest.raises(UsageError, match=why):
            nodes.master(Span("nnodes", 2, (COMMAND,), wrong))
