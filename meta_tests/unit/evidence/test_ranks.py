"""For a server on two machines, each rank has its path and its transport, and a fault names the
rank."""

import json
import re

import pytest

from meta_tests.fakes import whole_run
from meta_tests.unit.evidence.rank_logs import OWN, require_lines, two_logs
from sm121 import cli
from sm121.core.server import Node
from sm121.evidence.failure import Cause
from sm121.report import page, stored, summary
from sm121.run import spanning, verdict_file
from sm121.session import crashes


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
            (1,),
            ("in 6 secs, took 0.87", "in 9 secs, took -0.17"),
            None,
            None,
            None,
            id="graphs that took another time",
        ),
    ],
)
def test_a_fault_of_a_rank_is_named(launcher, ranks, change, wrong, silent, remark, by, tmp_path):
    if launcher not in (None, by):
        pytest.skip("a fault of the other launcher's log")
    server = two_logs(tmp_path, by, ranks, change)
    require_lines(server, by, wrong=wrong, silent=silent, remarks=remark)


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
    assert any(line.startswith("rank 1: expected its lines") for line in answer["unequal"])


def test_page_and_summary_show_each_rank(tmp_path):
    assert OWN.nodes is not None
    server = two_logs(tmp_path, "nnodes", [1], ("NCCL INFO .*", "NCCL version 2.28.9"))
    run = whole_run.whole()
    run.engine.nodes = spanning.judge_ranks(server, OWN.nodes, OWN.path_of("stock")).rows()
    rows = [r"| 0 | spark1 | FLASHINFER, MARLIN, LBHNC", r"| 1 | spark2 | FLASHINFER"]
    text = summary.markdown(run).replace("\\", "")
    assert all(row in text for row in rows) and "transport not proven" in text
    (tmp_path / verdict_file.NAME).write_text(run.model_dump_json(), "utf-8")
    html = page.html(stored.read(tmp_path))
    assert html.count("<td>spark1</td>") == html.count("<td>spark2</td>") == 1
    assert "via NET/IB/0" in html and "<td>not proven</td>" in html


# `launcher` limits a row to this launcher. `wrong` makes each number INVALID, `silent` is not
# proven, and `remark` only costs speed. The logs are from an attached server on two nodes that no
# longer sends tokens; rank 0's log comes first.
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
            r"according to node 0 \(rank0.log\), the rank at the other end of a connection is "
            r"gone: .*10.0.0.2",
            id="RuntimeError: (gloo/transport/tcp/pair.cc:534) (2)",
        ),
        pytest.param(
            (
                "ray.exceptions.ActorDiedError: The actor died because its node has died. "
                "Node Id: ab, ip: 10.0.0.2"
            ),
            None,
            "nccl",
            r"according to node 0 \(rank0.log\), .*ip: 10.0.0.2",
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
