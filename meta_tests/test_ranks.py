"""Each rank of a server on two machines has its path and its transport, and a fault names them."""

import hashlib
import json
import mmap
import re
import socket
import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loopback
import psutil
import pytest
import whole_run
from data_rows import from_data

from sm121 import cli
from sm121.core import profile
from sm121.core.server import Endpoint, Node, Server
from sm121.evidence import mapped, transport, unanswered
from sm121.evidence import ranks as rank_paths
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_path import read_log
from sm121.performance import bench
from sm121.report import page, stored, summary
from sm121.run import spanning, verdict_file
from sm121.run.harness import Harness
from sm121.session import crashes

WORDS: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "data" / "two-sparks.toml").read_text("utf-8")
)
EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence" / "h100-x2-transport.log"
OWN = profile.load("sm121x2-gpt-oss-120b").judging("stock", "0.33.0")


def _changed(text: str, pattern: str, instead: str | dict[str, str]) -> str:
    """`instead`: of a table the first whose key is in what matched."""

    def one(match: re.Match[str]) -> str:
        if isinstance(instead, str):
            return match.expand(instead)
        return match.expand(next(new for key, new in instead.items() if key in match[0]))

    return re.sub(pattern, one, text, flags=re.M)


def _rank(rank: int, launcher: str) -> str:
    """The lines of a rank, as its launcher has them."""
    pid, host, ip = 100 + rank, WORDS["hosts"][rank], WORDS["addresses"][rank]
    text = WORDS["worker"].replace("{ip}", ip)
    lines = text.replace("{rank}", str(rank)).replace("{peer}", str(1 - rank)).strip().splitlines()
    ray = f"(EngineCore pid=90) (RayWorkerWrapper pid={pid}, ip={ip}) " if launcher == "ray" else ""
    named = False
    for index, line in enumerate(lines):
        prefix = f"(Worker{f'_TP{rank}' if named else ''} pid={pid}) "
        named = named or "is assigned as" in line
        nccl = f"{host}:{pid}:{pid} [0] "
        lines[index] = ray + {"V": "" if ray else prefix, "N": nccl}[line[0]] + line[2:]
    return "\n".join(lines)


def two_logs(folder: Path, launcher: str, ranks: Any = (), change: Any = ("x", "x")) -> Server:
    """A server on two Sparks whose log, or logs, have a fault in the lines of `ranks`."""
    texts = [_rank(0, launcher), _rank(1, launcher)]
    if launcher == "nnodes":
        texts[1] = WORDS["headless"].strip() + "\n" + texts[1]
    texts = [_changed(text, *change) if n in ranks else text for n, text in enumerate(texts)]
    texts[0] = WORDS["head"].strip() + "\n" + texts[0]
    if launcher == "ray":
        texts = ["\n".join(texts)]
    nodes = []
    for rank, text in enumerate(texts):
        log = folder / f"node{rank}.log"
        log.write_text(text + "\n", "utf-8")
        nodes.append(Node(rank, f"spark{rank + 1}", log))
    if launcher == "ray":
        nodes.append(Node(1, "spark2"))
    return Server(
        Endpoint("http://10.0.0.1:8000", "none", "gpt-oss-120b"), False, "vllm", "0.33.0",
        nodes[0].log, None, None, reader="vllm", nodes=tuple(nodes),
    )  # fmt: skip


@pytest.mark.parametrize("by", ["nnodes", "ray"])
@from_data
def test_a_fault_of_a_rank_is_named(launcher, ranks, change, wrong, silent, remark, by, tmp_path):
    if launcher not in (None, by):
        pytest.skip("a fault of the other launcher's log")
    assert OWN.nodes is not None
    server = two_logs(tmp_path, by, ranks, change)
    judged = spanning.look(server, OWN.nodes, OWN.path_of("stock"))
    for lines, patterns in (
        ([*map(str, judged.wrong)], wrong), (judged.silent, silent), (judged.remarks, remark)
    ):  # fmt: skip
        patterns = patterns or ()
        assert len(lines) == len(patterns), lines
        assert all(any(re.search(each, line) for line in lines) for each in patterns), lines
    names = ("spark1", "spark2") if by == "nnodes" else WORDS["addresses"]
    lines = [*map(str, judged.wrong), *judged.remarks]
    assert all(any(node in line for node in names) for line in lines)


@pytest.mark.parametrize("hours", [("11-30 23", "12-01 00"), ("02-28 23", "03-01 00")])
def test_the_turn_of_a_month_is_no_other_start(hours, tmp_path):
    """The logs name no start that both have: the time alone tells."""
    nodes = []
    for rank, hour in enumerate(hours):
        (tmp_path / hour).mkdir()
        instead = {"NCCL": "NCCL version 2.28.9", "INFO": f"INFO {hour}"}
        change = ("NCCL INFO .*|INFO 11-22 10", instead)
        nodes.append(two_logs(tmp_path / hour, "nnodes", [0, 1], change).nodes[rank])
    of_ranks = rank_paths.read_ranks([(node.name, node.log) for node in nodes], "vllm")
    assert not [line for line in rank_paths.missing(of_ranks, 2) if "not of one start" in line]


def _counters(root: Path, device: str, pair: tuple[object, object]) -> None:
    folder = root / device / "ports" / "1" / "counters"
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(("port_xmit_data", "port_rcv_data"), pair, strict=True):
        (folder / name).write_text(f"{value}\n")


#: Of 1,024 tokens of gpt-oss-120b: half of 37 sums of 2,880 values of two bytes each.
LEAST = transport.least_bytes(1024, 2880, 37)


@from_data
def test_counters_tell_what_carried_a_prompt(carried, other, kinds, devices, tmp_path):
    """`carried`: by device, its share of what a prompt costs; `other`: what the counters of one
    more read before it, and after it."""
    readings = []
    for moment in (0, 1):
        for device, share in carried.items():
            words = moment * int(2 * LEAST * share / 8)
            _counters(tmp_path, device, (5_000_000_000 + words, 7 + words))
        if other is not None:
            _counters(tmp_path, "rocep1s0f0", (other[moment],) * 2)
        readings.append(transport.read_counters(tmp_path))
    by = transport.by_counters(transport.difference(*readings), LEAST)
    assert (by and (tuple(by.kinds), by.devices)) == (kinds and (tuple(kinds), devices)), by


@pytest.mark.parametrize(("host", "counts"), [("localhost", True), ("spark1.invalid", False)])
def test_a_prompt_is_counted_where_a_rank_is_here(tmp_path, monkeypatch, host, counts):
    class Carrying(loopback.JsonHandler):
        def do_POST(self) -> None:
            _counters(tmp_path, "rocep1s0f1", (self.asked()["max_tokens"] * LEAST,) * 2)
            self.say({})

    monkeypatch.setattr(transport, "read_counters", partial(transport.read_counters, tmp_path))
    _counters(tmp_path, "rocep1s0f1", (0, 0))
    with loopback.serving(Carrying) as url:
        endpoint = Endpoint(url.replace("127.0.0.1", host), "none", "x")
        server: Any = SimpleNamespace(managed=False, endpoint=endpoint)
        model = {"hidden_size": 2880, "num_hidden_layers": 36}
        by = spanning.count_a_prompt(server, OWN.nodes, model)
    assert (by is not None) == counts


def test_counters_speak_where_no_line_does_and_for_no_other_rank(tmp_path):
    assert OWN.nodes is not None
    mute = [[0, 1], ("NCCL INFO .*", "NCCL version 2.28.9")]
    server = two_logs(tmp_path, "nnodes", *mute)
    for share, wrong in ((1.0, 0), (0.0, 2)):
        counted = transport.by_counters({"rocep1s0f1": int(share * LEAST)}, LEAST)
        judged = spanning.look(server, OWN.nodes, OWN.path_of("stock"), counted)
        assert len(judged.wrong) == wrong and not judged.silent, judged
    tcp = two_logs(tmp_path, "nnodes", [0, 1], (r"via NET/IB/\d", "via NET/Socket/0"))
    rdma = transport.by_counters({"rocep1s0f1": 9 * LEAST}, LEAST)
    assert len(spanning.look(tcp, OWN.nodes, OWN.path_of("stock"), rdma).wrong) == 2


@pytest.mark.parametrize(("section", "kind"), [(1, "P2P"), (2, "Socket"), (3, "SHM")])
def test_real_lines_of_nccl_tell_what_it_uses(section, kind, tmp_path):
    log = tmp_path / "server.log"
    log.write_text(EVIDENCE.read_text("utf-8").split("\n$ ")[section], "utf-8")
    paths = rank_paths.read_ranks([("host", log)], "vllm")
    carried = [transport.of_path(each.path) for each in paths]
    assert [each.rank for each in paths] == [0, 1]
    assert [each.kinds for each in carried if each is not None] == [[kind], [kind]]


def test_the_command_shows_each_rank(tmp_path, capsys):
    server = two_logs(tmp_path, "nnodes", [1], ("'MARLIN'", "'TRITON'"))
    logs = [str(node.log) for node in server.nodes]
    assert cli.main(["path", *logs]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^rank 0 .*MARLIN, LBHNC, .*RoCE, 2 RDMA devices, vLLM 0.33.0$", text, re.M)
    assert "moe of rank 1 on" in text
    assert cli.main(["path", logs[0], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [node["rank"] for node in answer["nodes"]] == [0]
    assert any(line.startswith("rank 1: no line of the logs") for line in answer["unequal"])


def test_page_and_summary_show_each_rank(tmp_path):
    assert OWN.nodes is not None
    server = two_logs(tmp_path, "nnodes", [1], ("NCCL INFO .*", "NCCL version 2.28.9"))
    run = whole_run.whole()
    run.engine.nodes = spanning.look(server, OWN.nodes, OWN.path_of("stock")).rows()
    rows = [r"| 0 | spark1 | FLASHINFER, MARLIN, LBHNC", r"| 1 | spark2 | FLASHINFER"]
    text = summary.markdown(run).replace("\\", "")
    assert all(row in text for row in rows) and "transport not proven" in text
    (tmp_path / verdict_file.NAME).write_text(run.model_dump_json(), "utf-8")
    html = page.html(stored.read(tmp_path))
    assert html.count("<td>spark1</td>") == html.count("<td>spark2</td>") == 1
    assert "via NET/IB/0" in html and "<td>not proven</td>" in html


@pytest.mark.parametrize("ranks", [[], [0], [1], [0, 1]])
def test_numbers_over_tcp_are_invalid(ranks, tmp_path):
    server = two_logs(tmp_path, "nnodes", ranks, (r"via NET/IB/\d", "via NET/Socket/0"))
    harness: Any = SimpleNamespace(
        profile=OWN, _counted={}, kernel_path=lambda of: read_log(of.log, "vllm"),
        file=SimpleNamespace(engine=SimpleNamespace(model="openai/gpt-oss-120b")),
    )  # fmt: skip
    harness.spanned = partial(Harness.spanned, harness)
    harness.unlogged = partial(Harness.unlogged, harness)
    harness.contradictions = lambda of: Harness._contradictions(harness, of, "stock")
    invalid, _ = bench._against_the_path(harness, server)
    assert [each.reason for each in invalid] == ["kernel_path"] * bool(ranks)
    assert all("seen Socket" in each.evidence for each in invalid)


@from_data
def test_lost_node_of_an_attached_server_is_named(tmp_path, rank_0, rank_1, kind, expected):
    served = []
    for rank, line in enumerate((rank_0, rank_1)):
        log = tmp_path / f"rank{rank}.log"
        log.write_text(f"INFO:     Application startup complete.\n{line}\n")
        served.append(Node(rank, log.name, log if line else None))
    cause = crashes._by_logs(Cause(kind="hang", summary="no token", owner="engine"), served)
    assert cause.kind == kind and re.match(expected, cause.summary), cause
    assert cause.owner == "engine" or re.search(r"; on rank[01]\.log$", cause.owner), cause


@from_data
def test_ranks_of_two_ray_nodes(tmp_path, pids, prefixes):
    """`prefixes`: what follows each rank's pid in Ray's lines. On one host each comes twice."""
    lines = ["INFO:     Application startup complete."]
    for rank, pid in enumerate(pids):
        for prefix in prefixes[rank]:
            of_worker = f"(RayWorkerProc pid={pid}{prefix}) (Worker pid={pid}) INFO 11-27 07:01:27"
            of_rank = f"world_size=2 rank={rank} local_rank=0 distributed_init_method=tcp://h:1"
            lines.append(f"{of_worker} [parallel_state.py:1906] {of_rank} backend=gloo")
    (log := tmp_path / "server.log").write_text("\n".join(lines) + "\n")
    ranks = rank_paths.read_ranks([("spark1", log)], "vllm")
    assert [(each.rank, each.node) for each in ranks] == [(0, "spark1"), (1, "10.0.0.2")]
    assert not any("two logs" in line for line in rank_paths.missing(ranks, 2))


# Whose packets nobody acknowledges: by the kernel's table of connections.


@from_data
def test_connection_without_an_answer(
    monkeypatch, tmp_path, table, local, remote, state, timer, times, inode, expected
):
    monkeypatch.setattr(unanswered, "_NET", tmp_path)
    for name in ("tcp", "tcp6"):
        (tmp_path / name).write_text("  sl  local_address\n")
    with socket.socket() as local_socket, (tmp_path / (table or "tcp")).open("a") as lines:
        name = Path(f"/proc/self/fd/{local_socket.fileno()}").readlink().name
        inode = inode or name.removeprefix("socket:[")[:-1]
        entry = f"{local} {remote} {state} 00000001:00000000 {timer}:00000019 {times:08X}"
        lines.write(f"   1: {entry}     0        0 {inode} 2 0 99 0 0 10 -1\n")
        lines.flush()
        ends = unanswered.unanswered(lambda: [psutil.Process()], {"10.77.0.1", "2001:db8::1"})
    assert ends == ([expected] if expected else [])


def test_a_kernel_without_such_a_table_tells_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(unanswered, "_NET", tmp_path / "none")
    assert unanswered.unanswered(lambda: [psutil.Process()], {"10.77.0.1"}) == []


def test_nccl_that_was_replaced_since_has_no_digest(tmp_path):
    """An update meanwhile: the process has the old one, of which nothing can be read."""
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"NCCL 2.28.9")
    with library.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ):
        (row,) = mapped.nccl([psutil.Process()])
        assert row.path == str(library)
        assert row.sha256 == hashlib.sha256(b"NCCL 2.28.9").hexdigest()
        library.unlink()
        assert mapped.nccl([psutil.Process()]) == [row.model_copy(update={"sha256": None})]
        library.write_bytes(b"NCCL 2.29.1")
        assert mapped.nccl([psutil.Process()]) == [row.model_copy(update={"sha256": None})]
    assert mapped.nccl([psutil.Process()]) == []


def test_a_node_without_a_digest_is_not_compared():
    def of(sha256: str | None) -> list[mapped.MappedLibrary]:
        return [mapped.MappedLibrary(path="/usr/lib/libnccl.so.2", sha256=sha256)]

    assert mapped.different({"node 0": of(None), "node 1": of("a"), "node 2": of("a")}) == []
    (line,) = mapped.different({"node 0": of("a"), "node 1": of(None), "node 2": of("b")})
    assert line.startswith("libnccl of node 2: expected sha256 a as node 0, got b.")
