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

import psutil
import pytest

from meta_tests.fakes import loopback, whole_run
from meta_tests.folders import DATA, ROOT
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

WORDS: dict[str, Any] = tomllib.loads((DATA / "two-sparks.toml").read_text("utf-8"))
EVIDENCE = ROOT / "docs" / "evidence" / "h100-x2-transport.log"
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
@pytest.mark.parametrize(
    ("launcher", "ranks", "change", "wrong", "silent", "remark"),
    [
        pytest.param(
            None,
            (0,),
            ("'MARLIN'", "'FLASHINFER_CUTLASS_MXFP4_MXFP8'"),
            (
                (
                    "^moe of rank 0 on .*: FLASHINFER_CUTLASS_MXFP4_MXFP8, of rank 1 on .*: "
                    r"MARLIN \(Using '"
                ),
            ),
            None,
            None,
            id="one rank on other experts than the required ones: the first",
        ),
        pytest.param(
            None,
            (1,),
            ("'MARLIN'", "'TRITON'"),
            (r"^moe of rank 1 on .*: TRITON, of rank 0 on .*: MARLIN \(Using '",),
            None,
            None,
            id="one rank on other experts than the required ones: the second",
        ),
        pytest.param(
            None,
            (1,),
            ("Using FLASHINFER attention", "Using TRITON_ATTN attention"),
            (
                (
                    "^attention of rank 1 on .*: TRITON_ATTN, of rank 0 on .*: FLASHINFER "
                    r"\(Using TRITON"
                ),
            ),
            None,
            None,
            id="another attention",
        ),
        pytest.param(
            None,
            (1,),
            ("LBHNC", "LBNHC"),
            ("^kv_layout of rank 1 on .*: LBNHC",),
            None,
            None,
            id="another layout",
        ),
        pytest.param(
            None,
            (1,),
            (
                r"PIECEWISE=11 \(largest=64\), FULL=7 \(largest=64\)",
                "PIECEWISE=51 (largest=512), FULL=35 (largest=256)",
            ),
            ("^graph_sizes of rank 1 on .*largest=512.*, of rank 0 on .*largest=64",),
            None,
            None,
            id="unequal graphs",
        ),
        pytest.param(
            None,
            (1,),
            (
                "Graph capturing finished in .*",
                (
                    "Skipping CUDA graph capture. To turn on CUDA graph capture, set "
                    "-O.cudagraph_mode"
                ),
            ),
            ("^cuda_graphs of rank 1 on .*: False, of rank 0 on .*: True",),
            None,
            None,
            id="graphs on one rank alone",
        ),
        pytest.param(
            None,
            (0,),
            ("FULL=7 ", "FULL=5 "),
            ("^graph_sizes of rank",),
            None,
            None,
            id="another number of graphs",
        ),
        pytest.param(
            "nnodes",
            (1,),
            (r"vLLM \(v0\.33\.0\)", "vLLM (v0.32.1)"),
            (r"^version of rank 1 on .*: 0\.32\.1, of rank 0 on .*: 0\.33\.0",),
            None,
            None,
            id="another version",
        ),
        pytest.param(
            "nnodes",
            (1,),
            (
                r"^(INFO .*group\.)$",
                (
                    "\\1\n"
                    "INFO 11-22 10:00:01 [api_utils.py:286] non-default args: {'model_tag': "
                    "'x', 'headless': True, 'node_rank': 1, 'tensor_parallel_size': 2, "
                    "'chat_template': 'x', 'max_num_seqs': 4, 'gpu_memory_utilization': 0.7}"
                ),
            ),
            ("^argument max_num_seqs of rank 1 on .*: 4, of rank 0 on .*: 8$",),
            None,
            None,
            id="other arguments",
        ),
        pytest.param(
            "nnodes",
            (1,),
            (
                r"^(INFO .*group\.)$",
                (
                    "\\1\n"
                    "INFO 11-22 10:00:01 [api_utils.py:286] non-default args: {'headless': "
                    "True, 'gpu_memory_utilization': 0.7, 'max_num_seqs': 8, 'root_path': "
                    "'/v', 'tensor_parallel_size': 2}"
                ),
            ),
            None,
            None,
            None,
            id="a healthy twin: what only the first rank serves, in another order",
        ),
        pytest.param(
            None,
            (1,),
            (
                "^(.*)Using 'MARLIN' Mxfp4 MoE backend.$",
                "\\g<0>\n\\1MXFP4 layer 3 forced to TRITON",
            ),
            ("^fallback moe_layer_forced of rank 1 on .*: MXFP4 layer 3 forced to TRITON",),
            None,
            None,
            id="a layer of one rank on another backend",
        ),
        pytest.param(
            None,
            (1,),
            (
                "^(.*)Using 'MARLIN' Mxfp4 MoE backend.$",
                "\\g<0>\n\\1Falling back to the PyTorch-native implementation of top-p",
            ),
            ("^fallback sampler_pytorch of rank 1 on ",),
            None,
            None,
            id="the sampler of one rank",
        ),
        pytest.param(
            "nnodes",
            (1,),
            (
                r"^INFO .*group\.$",
                (
                    "\\g<0>\n"
                    "WARNING 11-22 10:00:01 [vllm.py:9] Overriding cudagraph_mode from "
                    "FULL_AND_PIECEWISE to PIECEWISE"
                ),
            ),
            ("^fallback cudagraph_mode_overridden of rank 1 on ",),
            None,
            None,
            id="the graphs of one node, in the words of the process that starts its ranks",
        ),
        pytest.param(
            None,
            (0, 1),
            (
                "^(.*)Using 'MARLIN' Mxfp4 MoE backend.$",
                "\\g<0>\n\\1Falling back to the PyTorch-native implementation of top-p",
            ),
            None,
            None,
            None,
            id="a healthy twin: a fallback of all ranks, which is judged as of one",
        ),
        pytest.param(
            None,
            (0, 1),
            ("(world_size=|world size )2", r"\g<1>3"),
            ("^world size of rank 0 on .*: required 2, seen 3", "^world size of rank 1"),
            None,
            None,
            id="a world of three",
        ),
        pytest.param(
            None,
            (0, 1),
            ("(world_size=|world size )2", r"\g<1>1"),
            ("^world size of rank 0 on .*: required 2, seen 1", "^world size of rank 1"),
            None,
            None,
            id="each for itself",
        ),
        pytest.param(
            None,
            (0, 1),
            (
                r"NET/IB : Using .*|Using network IB|via NET/IB/\d",
                {
                    "NET/IB : Using": "NET/IB : No device found.",
                    "Using network IB": "Using network Socket",
                    "via NET/IB": "via NET/Socket/0",
                },
            ),
            (
                (
                    r"^transport of rank 0 on .*: required RoCE or IB, seen Socket \(NCCL INFO "
                    r"Channel .* via NET/Socket/0\)"
                ),
                "^transport of rank 1",
            ),
            None,
            None,
            id="TCP: no device in the container",
        ),
        pytest.param(
            None,
            (1,),
            (r"via NET/IB/\d", "via NET/Socket/0"),
            ("^transport of rank 1 on .*seen Socket",),
            None,
            None,
            id="TCP on one rank",
        ),
        pytest.param(
            None,
            (0,),
            (r"\[receive\] via NET/IB/1", "[receive] via NET/Socket/1"),
            ("^transport of rank 0 on .*seen Socket",),
            None,
            None,
            id="one channel of several by TCP, though devices were found",
        ),
        pytest.param(
            None,
            (0, 1),
            (
                r"NCCL INFO Channel \d+/0 .*|Using network IB",
                {"Channel": "NCCL INFO Trees", "Using network IB": "Using network Socket"},
            ),
            (
                r"^transport of rank 0 on .*seen Socket \(NCCL INFO Using network Socket\)",
                "^transport of rank 1",
            ),
            None,
            None,
            id="TCP by the network alone, without lines of channels",
        ),
        pytest.param(
            None,
            (0, 1),
            (r"NCCL INFO (Channel \d+/0 .*|Using network IB)", "NCCL INFO Trees"),
            None,
            ("^transport of rank 0 on .*NCCL_DEBUG=INFO", "^transport of rank 1"),
            None,
            id="devices were found, and nothing shows that they carry",
        ),
        pytest.param(
            None,
            (0, 1),
            ("NCCL INFO .*", "NCCL version 2.28.9"),
            None,
            ("^transport of rank 0 on .*NCCL_DEBUG=INFO", "^transport of rank 1"),
            None,
            id="no word of NCCL",
        ),
        pytest.param(
            None,
            (1,),
            ("NCCL INFO .*", "NCCL version 2.28.9"),
            None,
            ("^transport of rank 1 on .*NCCL_DEBUG=INFO",),
            None,
            id="no word of NCCL on one node",
        ),
        pytest.param(
            None,
            (0, 1),
            ("via NET/IB/1", "via NET/IB/0"),
            None,
            None,
            ("^rank 0 on .*: 1 of 2 RDMA devices carry bytes", "^rank 1"),
            id="half the fabric",
        ),
        pytest.param(
            None,
            (0, 1),
            (r" \[1\]roceP2p1s0f1:1/RoCE|via NET/IB/1", {"[1]roce": "", "via": "via NET/IB/0"}),
            None,
            None,
            ("^rank 0 on .*: 1 of 2 RDMA devices carry bytes", "^rank 1"),
            id="half the fabric, one device found",
        ),
        pytest.param(
            None,
            (1,),
            (
                r" \[1\]roceP2p1s0f1:1/RoCE|NCCL INFO Channel \d+/0 .*",
                {"[1]roce": "", "Channel": "NCCL INFO Trees"},
            ),
            None,
            None,
            ("^rank 1 on .*: 1 of 2 RDMA devices carry bytes",),
            id="half the fabric by the network alone",
        ),
        pytest.param(
            None,
            (1,),
            (".*(Using FLASHINFER|Using LBHNC|MoE backend|CUDA graph|Graph capturing).*", ""),
            None,
            (
                "^attention of rank 1 on .*: no line shows it",
                "^moe of rank 1 on",
                "^cuda_graphs of rank 1 on",
            ),
            None,
            id="a rank whose log ends before it loads",
        ),
        pytest.param(
            None,
            (1,),
            (".+", ""),
            None,
            ("^rank 1: no line of the logs is of it",),
            None,
            id="a rank that is in no log",
        ),
        pytest.param(
            "nnodes",
            (1,),
            ("rank=1|rank 1", {"rank=": "rank=0", "rank ": "rank 0"}),
            None,
            ("^rank 1: no line of the logs", "^rank 0: two logs show it"),
            None,
            id="the same log twice",
        ),
        pytest.param(
            "nnodes",
            (1,),
            ("commId 0x3470ca318760efc8", "commId 0x99ff00ca31876001"),
            None,
            (
                (
                    r"^the logs are not of one start \(rank 0 on spark1: commId "
                    "0x3470ca318760efc8, rank 1 on spark2: commId 0x99ff"
                ),
            ),
            None,
            id="the log of another start",
        ),
        pytest.param(
            "nnodes",
            (1,),
            (
                "ncclCommInitRankConfig (.*)0x3470ca318760efc8",
                r"[Rank 1] ncclCommInitRankConfig \g<1>0x99ff00ca31876001",
            ),
            None,
            ("^the logs are not of one start",),
            None,
            id="the log of another start, in the words of NCCL 2.29",
        ),
        pytest.param(
            None,
            (0, 1),
            (
                "NCCL INFO Connected all rings",
                "NCCL INFO NET/IB: Subnet-aware routing: overriding dev 1 with dev 0",
            ),
            None,
            None,
            ("^rank 0 on .*: 1 of 2 RDMA devices carry bytes", "^rank 1"),
            id="half the fabric, since one device stands in for the other",
        ),
        pytest.param(
            "nnodes",
            (1,),
            (
                "NCCL INFO .*|192.168.100.15:29501 backend",
                {"NCCL": "NCCL version 2.28.9", "192": "192.168.100.15:31234 backend"},
            ),
            None,
            ("^transport of rank 1",),
            None,
            id="the log of another start, of a server without words of NCCL",
        ),
        pytest.param(
            "nnodes",
            (1,),
            ("NCCL INFO .*|INFO 11-22", {"NCCL": "NCCL version 2.28.9", "INFO": "INFO 11-20"}),
            None,
            ("^transport of rank 1", "^the logs are not of one start .*48 h apart"),
            None,
            id="the log of another day, of a server without words of NCCL",
        ),
        pytest.param(
            "nnodes",
            (1,),
            (
                "NCCL INFO .*|.*29501.*|INFO 11-22",
                {"NCCL": "NCCL version 2.28.9", "29501": "", "INFO": "INFO 11-20"},
            ),
            None,
            ("^transport of rank 1", "^the logs are not of one start .*48 h apart"),
            None,
            id="the log of another day, which names no start",
        ),
        pytest.param(
            "nnodes",
            (1,),
            (
                "NCCL INFO .*|INFO 11-22 10",
                {"NCCL": "NCCL version 2.28.9", "INFO": "INFO 11-21 21"},
            ),
            None,
            ("^transport of rank 1",),
            None,
            id="a healthy twin: another time zone there",
        ),
        pytest.param(
            "nnodes",
            (1,),
            ("INFO 11-22", "INFO 01-02"),
            None,
            None,
            None,
            id="a healthy twin: another clock there, and the start is NCCL's of both",
        ),
        pytest.param(
            None,
            (1,),
            ("^(.*Using ')MARLIN('.*)$", "\\g<0>\n\\1TRITON\\2"),
            (
                (
                    r"^moe of rank 1 on .*: MARLIN, TRITON, of rank 0 on .*: MARLIN \(Using "
                    "'TRITON"
                ),
            ),
            None,
            None,
            id="a second kind of experts beside the required one, on one rank",
        ),
        pytest.param(
            None,
            (0,),
            ("^(.*)Using FLASHINFER( attention.*)$", "\\g<0>\n\\1Using TRITON_ATTN\\2"),
            (
                (
                    "^attention of rank 0 on .*: FLASHINFER, TRITON_ATTN, of rank 1 on .*: "
                    r"FLASHINFER \(Using TRITON"
                ),
            ),
            None,
            None,
            id="a second attention backend, on the first rank",
        ),
        pytest.param(
            None,
            (1,),
            (".*(CUDA graph|Graph capturing).*", ""),
            None,
            ("^cuda_graphs of rank 1 on .*: no line shows it",),
            None,
            id="graphs of one rank, and not a word of the other's",
        ),
        # What is healthy all the same.
        pytest.param(
            None,
            (0, 1),
            ("^(.*Using ')MARLIN('.*)$", "\\g<0>\n\\1TRITON\\2"),
            None,
            None,
            None,
            id="a second kind of experts on both ranks",
        ),
        pytest.param(
            None,
            (1,),
            (
                (
                    r"^(.*NCCL INFO ncclCommInitRankConfig comm 0x)\w+ rank 1 nranks 2 "
                    r"(.*commId )\w+(.*)$"
                ),
                "\\1b rank 0 nranks 1 \\g<2>0xdead\\3\n\\g<0>",
            ),
            None,
            None,
            None,
            id="a communicator of one rank before that of both",
        ),
        pytest.param(
            None,
            (0, 1),
            (
                "^(.*)Using 'MARLIN'(.*)$",
                (
                    "\\g<0>\n"
                    "\\1Loading drafter model...\n"
                    r"\1Using 'TRITON'\2"
                ),
            ),
            None,
            None,
            None,
            id="a drafter with kernels of its own",
        ),
        pytest.param(None, (), ("x", "x"), None, None, None, id="healthy"),
        pytest.param(
            None,
            (0, 1),
            (
                r"NET/IB/(\d)|network IB",
                {"NET": r"NET/IBext_v10/\1", "network": "network IBext_v10"},
            ),
            None,
            None,
            None,
            id="a plugin of NVIDIA's image",
        ),
        pytest.param(
            None,
            (0, 1),
            ("NCCL INFO", "transport/net_ib.cc:449 NCCL INFO"),
            None,
            None,
            None,
            id="NCCL of 2.28 tells its place",
        ),
        pytest.param(
            None, (0, 1), (r"(via NET/IB/\d)", r"\1/GDRDMA"), None, None, None, id="with GPU Direct"
        ),
        pytest.param(
            None,
            (1,),
            ("in 6 secs, took 0.87", "in 9 secs, took -0.17"),
            None,
            None,
            None,
            id="graphs that took another time",
        ),
        pytest.param(
            None,
            (0, 1),
            (
                r"\[0\]rocep1s0f1:1/RoCE \[1\]roceP2p1s0f1:1/RoCE|NET/IB/1",
                {
                    "Using": "",
                    "[0]": "[0]={[0] rocep1s0f1:1/RoCE, [1] roceP2p1s0f1:1/RoCE} ",
                    "NET/": "NET/IB/0",
                },
            ),
            None,
            None,
            None,
            id="two devices that NCCL has merged into one",
        ),
        pytest.param(
            None,
            (0, 1),
            (r"NET/IB/\d", "NET/IB/2"),
            None,
            None,
            None,
            id=("two devices that NCCL has made into a third, of a number that its list has not"),
        ),
        pytest.param(
            None,
            (0, 1),
            ("ncclCommInitRankConfig comm", "[Rank 1] ncclCommInitRankConfig comm"),
            None,
            None,
            None,
            id="NCCL of 2.29 tells the rank before a start",
        ),
        pytest.param(
            None,
            (0, 1),
            ("ncclCommInitRankConfig comm", "comm"),
            None,
            None,
            None,
            id="NCCL before 2.21 names no function",
        ),
        pytest.param(
            "nnodes",
            (1,),
            (
                r"\A",
                (
                    "INFO 11-22 09:00:00 [serve.py:224] Launching vLLM (v0.32.0) headless "
                    "multiproc executor, with head node address 10.0.0.1:2 for "
                    "torch.distributed process group.\n"
                    "spark-4440:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [receive] via "
                    "NET/Socket/0\n"
                    "(Worker_TP1 pid=9) INFO 11-22 09:00:43 [cuda.py:507] Using TRITON_ATTN "
                    "attention backend out of potential backends: ['TRITON_ATTN'].\n"
                ),
            ),
            None,
            None,
            None,
            id="an older start in the same file, which ran otherwise",
        ),
        pytest.param(None, (0, 1), (":1/RoCE", ":1/IB"), None, None, None, id="InfiniBand"),
    ],
)
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


@pytest.mark.parametrize(
    ("carried", "other", "kinds", "devices"),
    [
        pytest.param(
            {"rocep1s0f1": 0.5, "roceP2p1s0f1": 0.5}, None, ("RoCE",), 2, id="both devices"
        ),
        pytest.param({"rocep1s0f1": 1.0, "roceP2p1s0f1": 0.0}, None, ("RoCE",), 1, id="one of two"),
        pytest.param(
            {"rocep1s0f1": 0.0, "roceP2p1s0f1": 0.0}, None, ("Socket",), None, id="nothing: TCP"
        ),
        pytest.param(
            {"rocep1s0f1": 0.0001, "roceP2p1s0f1": 0.0},
            None,
            ("Socket",),
            None,
            id="a heartbeat: TCP",
        ),
        pytest.param(
            {"rocep1s0f1": 0.4},
            None,
            ("Socket",),
            1,
            id="the half that another program may have sent: TCP",
        ),
        pytest.param(
            {"rocep1s0f1": 1.0},
            ("N/A (no PMA)", "N/A (no PMA)"),
            ("RoCE",),
            1,
            id="a port without counters",
        ),
        pytest.param({"rocep1s0f1": 1.0}, ("", ""), ("RoCE",), 1, id="a port that is dead"),
        pytest.param(
            {"rocep1s0f1": 1.0},
            ("4294967295", "4294967295"),
            ("RoCE",),
            1,
            id="a counter of 32 bits that was full before",
        ),
        pytest.param(
            {"rocep1s0f1": 1.0},
            ("N/A (no PMA)", "9000000000"),
            ("RoCE",),
            1,
            id="a port that comes up has counted before",
        ),
        pytest.param(
            {"rocep1s0f1": 1.0},
            ("4294967000", "4294967295"),
            ("RoCE",),
            1,
            id="a counter that is full now",
        ),
        pytest.param(
            {"rocep1s0f1": 1.0}, ("4294967000", "12"), ("RoCE",), 1, id="a counter that began anew"
        ),
        pytest.param(
            {"rocep1s0f1": 1.0}, ("4294967000", ""), ("RoCE",), 1, id="a port that went away"
        ),
        pytest.param(
            {"rocep1s0f1": 0.0},
            ("N/A (no PMA)", "N/A (no PMA)"),
            None,
            None,
            id="N/A beside an idle port: it does not tell",
        ),
        pytest.param(
            {"rocep1s0f1": 0.0},
            ("4294967000", "4294967295"),
            None,
            None,
            id="a full counter beside an idle port: it does not tell",
        ),
        pytest.param(
            {"rocep1s0f1": 0.0},
            ("4294967000", "12"),
            None,
            None,
            id="a counter that began anew beside an idle port: it does not tell",
        ),
        pytest.param(
            {"rocep1s0f1": 0.0},
            ("4294967000", ""),
            None,
            None,
            id="a port that went away beside an idle one: it does not tell",
        ),
        pytest.param({"rocep1s0f1": 2.0}, None, ("RoCE",), 1, id="one device, and twice of it"),
    ],
)
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
    invalid, _ = bench._check_path(harness, server)
    assert [each.reason for each in invalid] == ["kernel_path"] * bool(ranks)
    assert all("seen Socket" in each.evidence for each in invalid)


# `launcher`: only with that launcher. `wrong` makes each number INVALID, `silent` is not proven,
# `remark` only costs speed.
# Logs of an attached server on two nodes whose tokens do not come any more, rank 0's first.
@pytest.mark.parametrize(
    ("rank_0", "rank_1", "kind", "expected"),
    [
        pytest.param(
            (
                "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer "
                "[10.0.0.2]:41234"
            ),
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            "oom",
            r"node 1 \(rank1.log\): torch.OutOfMemoryError: ",
            id="RuntimeError: (gloo/transport/tcp/pair.cc:534)",
        ),
        pytest.param(
            (
                "torch.distributed.DistBackendError: NCCL error in: x, remote process "
                "exited or there was a network error"
            ),
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "illegal_memory_access",
            r"node 1 \(rank1.log\): RuntimeError: CUDA error: an illegal",
            id="torch.distributed.DistBackendError: NCCL error in: x",
        ),
        pytest.param(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            (
                "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection reset by peer "
                "[10.0.0.1]:41234"
            ),
            "oom",
            r"node 0 \(rank0.log\): torch.OutOfMemoryError: ",
            id="torch.OutOfMemoryError: CUDA out of memory. Tried to",
        ),
        pytest.param(
            (
                "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer "
                "[10.0.0.2]:41234"
            ),
            "INFO 11-20 10:00:00 [loggers.py:1] as ever",
            "nccl",
            r"as node 0 \(rank0.log\) says, the rank at the other end is gone: .*10.0.0.2",
            id="RuntimeError: (gloo/transport/tcp/pair.cc:534) (2)",
        ),
        pytest.param(
            (
                "ray.exceptions.ActorDiedError: The actor died because its node has died. "
                "Node Id: ab, ip: 10.0.0.2"
            ),
            None,
            "nccl",
            r"as node 0 \(rank0.log\) says, .*ip: 10.0.0.2",
            id="ray.exceptions.ActorDiedError: The actor died because",
        ),
        pytest.param(
            "INFO 11-20 10:00:00 [loggers.py:1] as ever",
            "INFO 11-20 10:00:00 [loggers.py:1] as ever",
            "hang",
            "no token",
            id="INFO 11-20 10:00:00 (loggers.py:1) as ever, INFO 11-20",
        ),
        ("INFO 11-20 10:00:00 [loggers.py:1] as ever", None, "hang", "no token"),
    ],
)
def test_lost_node_of_an_attached_server_is_named(tmp_path, rank_0, rank_1, kind, expected):
    served = []
    for rank, line in enumerate((rank_0, rank_1)):
        log = tmp_path / f"rank{rank}.log"
        log.write_text(f"INFO:     Application startup complete.\n{line}\n")
        served.append(Node(rank, log.name, log if line else None))
    cause = crashes._by_logs(Cause(kind="hang", summary="no token", owner="engine"), served)
    assert cause.kind == kind and re.match(expected, cause.summary), cause
    assert cause.owner == "engine" or re.search(r"; on rank[01]\.log$", cause.owner), cause


@pytest.mark.parametrize(
    ("pids", "prefixes"),
    [
        pytest.param((7, 8), (("",), (", ip=10.0.0.2",)), id="two hosts"),
        pytest.param((7, 7), (("",), (", ip=10.0.0.2",)), id="equal pids"),
        pytest.param((7, 8), ((", ip=10.0.0.2", ""), ("", ", ip=10.0.0.2")), id="one host"),
    ],
)
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


@pytest.mark.parametrize(
    ("table", "local", "remote", "state", "timer", "times", "inode", "expected"),
    [
        pytest.param(
            None,
            "02004D0A:C350",
            "01004D0A:733D",
            "01",
            "01",
            3,
            None,
            "10.77.0.2:50000 -> 10.77.0.1:29501",
            id="02004D0A:C350, 01004D0A:733D, 01, 01, 3",
        ),
        # one that does not come about
        pytest.param(
            None,
            "02004D0A:C350",
            "01004D0A:733D",
            "02",
            "01",
            4,
            None,
            "10.77.0.2:50000 -> 10.77.0.1:29501",
            id="02004D0A:C350, 01004D0A:733D, 02, 01, 4",
        ),
        # of torch's store
        pytest.param(
            "tcp6",
            "0000000000000000FFFF000002004D0A:C350",
            "0000000000000000FFFF000001004D0A:733D",
            "01",
            "01",
            9,
            None,
            "10.77.0.2:50000 -> 10.77.0.1:29501",
            id="tcp6, 0000000000000000FFFF000002004D0A:C350",
        ),
        pytest.param(
            "tcp6",
            "B80D0120000000000000000002000000:C350",
            "B80D0120000000000000000001000000:733D",
            "01",
            "01",
            5,
            None,
            "[2001:db8::2]:50000 -> [2001:db8::1]:29501",
            id="tcp6, B80D0120000000000000000002000000:C350",
        ),
        # It waits for data; two packets were lost; its peer reads nothing; another process; another
        # host.
        (None, "02004D0A:C350", "01004D0A:733D", "01", "00", 0, None, None),
        (None, "02004D0A:C350", "01004D0A:733D", "01", "01", 2, None, None),
        (None, "02004D0A:C350", "01004D0A:733D", "01", "04", 9, None, None),
        (None, "02004D0A:C350", "01004D0A:733D", "01", "01", 9, "1", None),
        (None, "02004D0A:C350", "08080808:01BB", "02", "01", 9, None, None),
    ],
)
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
        found = unanswered.unanswered(lambda: [psutil.Process()], {"10.77.0.1", "2001:db8::1"})
    assert [str(connection) for connection in found] == ([expected] if expected else [])
    assert {each.remote.address for each in found} <= {"10.77.0.1", "2001:db8::1"}


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
