"""The transport between the ranks of a server is read from their logs and from counters."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meta_tests.fakes import loopback
from meta_tests.fakes.run_events import stand_in
from meta_tests.folders import ROOT
from meta_tests.unit.evidence.rank_logs import OWN, require_lines, two_logs
from sm121.core.server import Endpoint
from sm121.evidence import ranks as rank_paths
from sm121.evidence import transport
from sm121.evidence.kernel_path import read_log
from sm121.performance import bench
from sm121.run import spanning
from sm121.run.paths import KernelPaths

EVIDENCE = ROOT / "docs" / "evidence" / "h100-x2-transport.log"


@pytest.mark.parametrize("by", ["nnodes", "ray"])
@pytest.mark.parametrize(
    ("launcher", "ranks", "change", "wrong", "silent", "remark"),
    [
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
                    r"^transport of rank 0 on .*: expected RoCE or IB, got Socket \(NCCL INFO "
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
            ("^transport of rank 1 on .*got Socket",),
            None,
            None,
            id="TCP on one rank",
        ),
        pytest.param(
            None,
            (0,),
            (r"\[receive\] via NET/IB/1", "[receive] via NET/Socket/1"),
            ("^transport of rank 0 on .*got Socket",),
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
                r"^transport of rank 0 on .*got Socket \(NCCL INFO Using network Socket\)",
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
        pytest.param(None, (0, 1), (":1/RoCE", ":1/IB"), None, None, None, id="InfiniBand"),
    ],
)
def test_a_fault_of_a_rank_is_named(launcher, ranks, change, wrong, silent, remark, by, tmp_path):
    if launcher not in (None, by):
        pytest.skip("a fault of the other launcher's log")
    server = two_logs(tmp_path, by, ranks, change)
    require_lines(server, by, wrong=wrong, silent=silent, remarks=remark)


def _counters(root: Path, device: str, pair: tuple[object, object]) -> None:
    folder = root / device / "ports" / "1" / "counters"
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(("port_xmit_data", "port_rcv_data"), pair, strict=True):
        (folder / name).write_text(f"{value}\n")


#: The bytes for 1,024 tokens of gpt-oss-120b. They are half of 37 all-reduce sums of 2,880 values
#: with two bytes each.
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
def test_port_counters_show_the_devices_of_a_prompt(carried, other, kinds, devices, tmp_path):
    """Port counters show which devices carried a prompt.

    `carried` is each device's share of a prompt's bytes. `other` contains the readings of one more
    device, before and after."""
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


def test_counters_prove_the_transport_of_this_machines_ranks_only(tmp_path):
    assert OWN.nodes is not None
    mute = [[0, 1], ("NCCL INFO .*", "NCCL version 2.28.9")]
    server = two_logs(tmp_path, "nnodes", *mute)
    for share, wrong in ((1.0, 0), (0.0, 2)):
        counted = transport.by_counters({"rocep1s0f1": int(share * LEAST)}, LEAST)
        judged = spanning.judge_ranks(server, OWN.nodes, OWN.path_of("stock"), counted)
        assert len(judged.wrong) == wrong and not judged.silent, judged
    tcp = two_logs(tmp_path, "nnodes", [0, 1], (r"via NET/IB/\d", "via NET/Socket/0"))
    rdma = transport.by_counters({"rocep1s0f1": 9 * LEAST}, LEAST)
    assert len(spanning.judge_ranks(tcp, OWN.nodes, OWN.path_of("stock"), rdma).wrong) == 2


@pytest.mark.parametrize(("section", "kind"), [(1, "P2P"), (2, "Socket"), (3, "SHM")])
def test_real_lines_of_nccl_show_its_transport(section, kind, tmp_path):
    log = tmp_path / "server.log"
    log.write_text(EVIDENCE.read_text("utf-8").split("\n$ ")[section], "utf-8")
    paths = rank_paths.read_ranks([("host", log)], "vllm")
    carried = [transport.of_path(each.path) for each in paths]
    assert [each.rank for each in paths] == [0, 1]
    assert [each.kinds for each in carried if each is not None] == [[kind], [kind]]


@pytest.mark.parametrize("ranks", [[], [0], [1], [0, 1]])
def test_numbers_over_tcp_are_invalid(ranks, tmp_path):
    server = two_logs(tmp_path, "nnodes", ranks, (r"via NET/IB/\d", "via NET/Socket/0"))
    run = stand_in(
        profile=OWN,
        file=SimpleNamespace(engine=SimpleNamespace(model="openai/gpt-oss-120b")),
    )  # fmt: skip
    target = SimpleNamespace(require_profile=lambda: OWN)
    paths = KernelPaths(target=target, record=run.record, configurations=None, servers=None)
    paths.of = lambda of: read_log(of.log, "vllm")
    paths.contradictions = lambda of: paths._contradictions(of, "stock")
    run.paths = paths
    invalid, _ = bench._check_path(run, server)
    assert [each.reason for each in invalid] == ["kernel_path"] * bool(ranks)
    for each in invalid:
        assert "got Socket" in each.evidence
