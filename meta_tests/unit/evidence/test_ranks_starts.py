"""The logs must belong to one start, and to all of its ranks."""

import pytest

from meta_tests.unit.evidence.rank_logs import require_lines, two_logs
from sm121.evidence import ranks as rank_paths


@pytest.mark.parametrize("by", ["nnodes", "ray"])
@pytest.mark.parametrize(
    ("launcher", "ranks", "change", "wrong", "silent", "remark"),
    [
        pytest.param(
            None,
            (0, 1),
            ("(world_size=|world size )2", r"\g<1>3"),
            ("^world size of rank 0 on .*: expected 2, got 3", "^world size of rank 1"),
            None,
            None,
            id="a world of three",
        ),
        pytest.param(
            None,
            (0, 1),
            ("(world_size=|world size )2", r"\g<1>1"),
            ("^world size of rank 0 on .*: expected 2, got 1", "^world size of rank 1"),
            None,
            None,
            id="each for itself",
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
            ("^rank 1: expected its lines in a log, got none",),
            None,
            id="a rank that is in no log",
        ),
        pytest.param(
            "nnodes",
            (1,),
            ("rank=1|rank 1", {"rank=": "rank=0", "rank ": "rank 0"}),
            None,
            ("^rank 1: expected its lines in a log", "^rank 0: expected its lines in one log"),
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
                    r"^the logs are from different starts \(rank 0 on spark1: commId "
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
            ("^the logs are from different starts",),
            None,
            id="the log of another start, in the words of NCCL 2.29",
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
            ("^transport of rank 1", "^the logs are from different starts .*48 h apart"),
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
            ("^transport of rank 1", "^the logs are from different starts .*48 h apart"),
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
    ],
)
def test_a_fault_of_a_rank_is_named(launcher, ranks, change, wrong, silent, remark, by, tmp_path):
    if launcher not in (None, by):
        pytest.skip("a fault of the other launcher's log")
    server = two_logs(tmp_path, by, ranks, change)
    require_lines(server, by, wrong=wrong, silent=silent, remarks=remark)


@pytest.mark.parametrize("hours", [("11-30 23", "12-01 00"), ("02-28 23", "03-01 00")])
def test_the_turn_of_a_month_is_no_other_start(hours, tmp_path):
    """Two logs can belong to one start even if the month changes between their lines.

    The logs share no id of a start, so only the time decides."""
    nodes = []
    for rank, hour in enumerate(hours):
        (tmp_path / hour).mkdir()
        instead = {"NCCL": "NCCL version 2.28.9", "INFO": f"INFO {hour}"}
        change = ("NCCL INFO .*|INFO 11-22 10", instead)
        nodes.append(two_logs(tmp_path / hour, "nnodes", [0, 1], change).nodes[rank])
    of_ranks = rank_paths.read_ranks([(node.name, node.log) for node in nodes], "vllm")
    assert not [line for line in rank_paths.missing(of_ranks, 2) if "from different starts" in line]


@pytest.mark.parametrize(
    ("pids", "prefixes"),
    [
        pytest.param((7, 8), (("",), (", ip=10.0.0.2",)), id="two hosts"),
        pytest.param((7, 7), (("",), (", ip=10.0.0.2",)), id="equal pids"),
        pytest.param((7, 8), ((", ip=10.0.0.2", ""), ("", ", ip=10.0.0.2")), id="one host"),
    ],
)
def test_ranks_of_two_ray_nodes(tmp_path, pids, prefixes):
    """Ranks on two Ray nodes are read.

    `prefixes` is the text after each rank's pid in Ray's lines; on one host, each occurs twice."""
    lines = ["INFO:     Application startup complete."]
    for rank, pid in enumerate(pids):
        for prefix in prefixes[rank]:
            of_worker = f"(RayWorkerProc pid={pid}{prefix}) (Worker pid={pid}) INFO 11-27 07:01:27"
            of_rank = f"world_size=2 rank={rank} local_rank=0 distributed_init_method=tcp://h:1"
            lines.append(f"{of_worker} [parallel_state.py:1906] {of_rank} backend=gloo")
    (log := tmp_path / "server.log").write_text("\n".join(lines) + "\n")
    ranks = rank_paths.read_ranks([("spark1", log)], "vllm")
    assert [(each.rank, each.node) for each in ranks] == [(0, "spark1"), (1, "10.0.0.2")]
    for line in rank_paths.missing(ranks, 2):
        assert "two logs" not in line
