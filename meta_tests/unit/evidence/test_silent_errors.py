"""An error that ends no process is found in the server's log and in the kernel's messages.

A healthy log contains none."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from meta_tests.fakes.run_events import stand_in
from meta_tests.fakes.scripted_sessions import VARIABLES, script
from meta_tests.fakes.servers import executable
from meta_tests.faults.false_greens.errors import API, CORE, ILLEGAL, LOGGED, REPORTED, stack
from meta_tests.texts import text_file
from meta_tests.unit.evidence.error_logs import READY, errors
from sm121.core.server import Endpoint, Node, Server
from sm121.engines.endings import StopReport
from sm121.engines.memory import Returned
from sm121.evidence import failure_tables, kernel_messages
from sm121.evidence.silent_errors import ErrorReader, of_the_kernel
from sm121.run.log_errors import LogErrors
from sm121.run.server_decisions import logged_errors
from sm121.run.verdict_file import BESIDE


def kernel_log(folder: Path, dmesg: str, journalctl: str = "exit 1") -> str:
    """Return the PATH of a machine on which the two programs for kernel messages behave in the
    given way."""
    executable(folder / "dmesg", dmesg)
    executable(folder / "journalctl", journalctl)
    return f"{folder}:{os.environ['PATH']}"


def outcome_of(folder: Path, doing, **variables: str):
    """Return the result of a run with this event."""
    with mock.patch.dict(os.environ, {**VARIABLES, **variables}):
        return script(SimpleNamespace(tmp_path=folder), "run", doing)


KINDS = {}
for kind, (_, rows) in LOGGED.items():
    for name in rows:
        KINDS[name] = (kind, rows[name])


@pytest.mark.parametrize(("kind", "lines"), KINDS.values(), ids=KINDS)
def test_a_survived_error_is_certain_if_its_kind_is_known(tmp_path, kind, lines):
    reported = errors(tmp_path, lines)
    assert (kind != "unknown", kind) in reported
    assert [each for each in reported if each[0]] == [(True, kind)] * (kind != "unknown")


def _of_two_ranks(exception: str) -> str:
    """Return the lines that both ranks of a Ray server print together when a finalizer raises."""
    ignored = "Exception ignored in: <function CPUDNNLGEMMHandler.__del__ at 0x7f37>"
    ranks = ("(CpuRayWorkerProc pid=7) ", "(CpuRayWorkerProc pid=8, ip=10.0.0.2) ")
    stacks = [stack(rank, ignored, "/v/vllm/_custom_ops.py", exception) for rank in ranks]
    lines = []
    for both in zip(*map(str.splitlines, stacks), strict=True):
        lines.extend(both)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("exception", "kinds"),
    [
        pytest.param(
            "RecursionError: maximum recursion depth exceeded in comparison",
            (),
            id="RecursionError: maximum recursion depth exceeded in",
        ),
        pytest.param(
            str.format("RuntimeError: {}", ILLEGAL),
            ((True, "illegal_memory_access"), (True, "illegal_memory_access")),
            id="builtins.str.format RuntimeError: {} ILLEGAL, True",
        ),
    ],
)
def test_exceptions_that_python_ignores_are_no_server_error(tmp_path, exception, kinds):
    assert errors(tmp_path, _of_two_ranks(exception)) == [*kinds]


@pytest.mark.parametrize(
    ("lines", "kinds"),
    [
        pytest.param(
            (
                "(EngineCore_DP0 pid=8) ERROR 11-20 10:00:01 [core.py:1750] Error in "
                "preprocessing prompt inputs\n"
                "(EngineCore_DP0 pid=8) ERROR 11-20 10:00:01 [core.py:1750] Traceback "
                "(most recent call last):\n"
                "(EngineCore_DP0 pid=8) ERROR 11-20 10:00:01 [core.py:1750]   File "
                '"/v/a.py", line 1, in f\n'
                "(EngineCore_DP0 pid=8) ERROR 11-20 10:00:01 [core.py:1750]     raise "
                "ValueError(why)\n"
                "(EngineCore_DP0 pid=8) ERROR 11-20 10:00:01 [core.py:1750] ValueError: x"
            ),
            ((True, "engine_traceback"),),
            id="of a process of the engine",
        ),
        pytest.param(
            (
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] Error in preprocessing "
                "prompt inputs\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] Traceback (most recent "
                "call last):\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1]   File "
                '"/v/vllm/v1/engine/core.py", line 1, in f\n'
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1]     raise ValueError(why)\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] KeyError: x"
            ),
            ((True, "engine_traceback"),),
            id="with a frame of the engine",
        ),
        pytest.param(
            (
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] Error in preprocessing "
                "prompt inputs\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] Traceback (most recent "
                "call last):\n"
                '(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1]   File "/v/a.py", line 1, '
                "in f\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1]     raise ValueError(why)\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] RuntimeError: CUDA error: "
                "an illegal memory access was encountered"
            ),
            ((True, "illegal_memory_access"),),
            id="an illegal access",
        ),
        pytest.param(
            (
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] Error in preprocessing "
                "prompt inputs\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] other\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] odd\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] Traceback (most recent "
                "call last):\n"
                '(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1]   File "/v/a.py", line 1, '
                "in f\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1]     raise ValueError(why)\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] ValueError: x"
            ),
            ((False, "unknown"), (False, "unknown"), (False, "unknown")),
            id="a stack under another message",
        ),
        pytest.param(
            (
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] Error in preprocessing "
                "prompt inputs\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] Traceback (most recent "
                "call last):\n"
                '(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1]   File "/v/a.py", line 1, '
                "in f\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1]     raise ValueError(why)\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] ValueError: x\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] Error in preprocessing "
                "prompt inputs\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] Traceback (most recent "
                "call last):\n"
                '(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1]   File "/v/a.py", line 1, '
                "in f\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1]     raise ValueError(why)\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [a.py:1] ValueError: x\n"
                "(APIServer pid=7) ERROR 11-20 10:00:01 [b.py:1] ValueError: x"
            ),
            ((False, "unknown"),),
            id="too many",
        ),
    ],
)
def test_a_refusal_excuses_the_stack_under_it_alone(tmp_path, lines, kinds):
    assert errors(tmp_path, lines) == [*kinds]


def test_a_row_is_of_its_engine(tmp_path):
    line = API.format("serving.py") + "Error with model x, type='NotFoundError'"
    assert errors(tmp_path, line) == []
    assert errors(tmp_path, line, engine="sglang") == [(False, "unknown")]


def test_each_error_is_given_once_as_the_log_grows(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(f"{CORE}{ILLEGAL}\n")
    # The suite attaches to a server whose log already contains the error.
    reader = ErrorReader("vllm", log.stat().st_size)
    traced = stack(CORE, "x", "/v/a.py", "KeyError: 'x'").replace("\n", "\nINFO: x\n")
    kinds = []
    for piece in (traced[:90], traced[90:200], traced[200:], "\nINFO: x", f"\n{CORE}odd\n"):
        with log.open("a") as file:
            file.write(piece)
        kinds.append([error.kind for error in reader.read(log)])
    assert kinds == [["unknown"], [], [], ["engine_traceback"], ["unknown"]]


@pytest.mark.parametrize("kind", REPORTED)
def test_the_kernel_reports_an_error(kind):
    clean, variants = REPORTED[kind]
    lines = [f"[    9.123456] {message}" for _, message in variants.values()]
    healthy = [f"[    9.123456] {clean[1]}"] * (clean[0] != "cpu" or kind == "ecc")
    messages = kernel_messages.KernelMessages((*lines, *healthy))
    assert [*messages.xids, *messages.host_faults] == lines
    reported = of_the_kernel([*lines, *lines])
    certain = kind in ("xid", "ecc", "config")
    assert {(error.certain, error.kind) for error in reported} == {(certain, kind)}
    assert len(reported) == len(lines)


@pytest.mark.parametrize(
    ("message", "observed"),
    [
        (
            "NVRM: Xid (PCI:000f:01:00): 31, pid=7",
            "xid: the driver reported Xid 31 of the GPU at PCI 000f:01:00",
        ),
        ("NVRM: GPU 000f:01:00.0: GPU has fallen off the bus.", "xid: NVRM"),
        (
            "NVRM: GPU 000f:01:00.0: RmInitAdapter failed! (0x62:0xffff:2477)",
            "config: the NVIDIA driver cannot bring up the GPU",
        ),
        ("EDAC MC0: 1 UE memory read error on DIMM_0", "ecc: EDAC MC0"),
        ("Memory failure: 0x1a2b: recovery action: Failed", "ecc: Memory failure"),
        ("nvme0n1: I/O error, dev nvme0n1, sector 1234", "unknown: nvme0n1"),
    ],
)
def test_a_kernel_message_is_the_same_finding_in_each_run(message, observed):
    """Its time was a part of the finding, so `--against` called the same finding new."""
    beginnings = (
        "[    9.123456] ",
        "[74215.000001] ",
        "[   12.5][ T1234] ",
        "[   12.5] gx10 kernel: ",
    )
    found = set()
    for beginning in beginnings:
        errors_found = of_the_kernel([f"{beginning}{message}"])
        (decision,) = logged_errors(errors_found, "messages", ("smoke", "at the end"), str)
        found.add(decision.facts[0].observed)
    assert found == {observed}


def test_unreadable_kernel_messages_are_reported_on_a_gpu(tmp_path):
    """Unreadable kernel messages on a GPU are reported as a remark, and in a certificate's line
    beside the levels."""
    path = kernel_log(tmp_path, *["echo not permitted >&2\nexit 1"] * 2)
    unread = []
    remarks = []

    def doing(session):
        for arch in ("cpu", "sm121", "sm121"):
            session.run.target = dataclasses.replace(session.run.target, arch=arch)
            session.kernel.judge()
            unread.append(session.kernel.unread)
        remarks.extend(session.run.record.file.remarks)

    outcome = outcome_of(tmp_path, doing, PATH=path)
    assert outcome.green and unread[0] is None and "not permitted" in unread[1]
    assert remarks.count(unread[1]) == 1


NO_MEMORY = (
    "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)"
)


@pytest.mark.parametrize(
    ("offsets", "verdict"),
    [
        pytest.param((0.2, 0.3), "PASS", id="0.2 0.3, PASS"),
        pytest.param((0.2, 2.0), "INCONCLUSIVE", id="0.2 2.0, INCONCLUSIVE"),
        pytest.param((), "PASS", id="PASS"),
    ],
)
def test_failed_allocations_of_the_driver_are_errors_except_at_a_start(tmp_path, offsets, verdict):
    """Failed allocations of the driver are errors, except during a start (vllm#56824).

    Of four starts of a healthy GB10, three had the message. `offsets` are seconds after the
    beginning of a start that took one second."""

    def doing(session):
        lines = [f"[{session.kernel.before.at + offset:.6f}] {NO_MEMORY}" for offset in offsets]
        executable(tmp_path / "dmesg", "cat <<E\n" + "\n".join(["[    0.1] boot", *lines]) + "\nE")
        session.run.target = dataclasses.replace(session.run.target, arch="sm121")
        session.run.servers.pool.start_spans.append(
            (session.kernel.before.at, session.kernel.before.at + 1)
        )
        session.kernel.judge()
        assert bool(offsets) == any(
            "vllm#56824" in remark for remark in session.run.record.file.remarks
        )

    path = f"{tmp_path}:{os.environ['PATH']}"
    assert outcome_of(tmp_path, doing, PATH=path).verdict == verdict


def test_each_accepted_error_has_a_reason_and_no_row_accepts_all():
    for row in failure_tables.load_failures().accepted:
        assert row.regex.search("an error") is None, row.id


@pytest.mark.parametrize(
    "raised",
    [
        pytest.param(
            ("ImportError: cannot import name '_C' from partially initialized module 'deep_gemm'"),
            id="ImportError: cannot import name '_C' from partially",
        ),
        pytest.param(
            "OSError: libnvshmem.so.3: cannot open shared object file",
            id="OSError: libnvshmem.so.3: cannot open shared object file",
        ),
        "RuntimeError: no kernel image",
    ],
)
def test_warnings_of_a_start_are_no_error_of_a_serving_server(tmp_path, raised):
    lines = text_file("start-that-warned.log").format(raised=raised).splitlines()
    log = tmp_path / "server.log"
    log.write_text("\n".join([*lines, READY]) + "\n", "utf-8")
    assert ErrorReader("vllm").read(log) == []
    assert errors(tmp_path, *lines) == [(False, "engine_traceback")], "the same while it serves"


@pytest.mark.parametrize(("stamp", "count"), [("[    9.000001] ", 1), ("", 0)])
def test_a_flood_hides_no_error_and_lines_without_times_cannot_be_read(
    tmp_path, monkeypatch, stamp, count
):
    boot = "[    0.5] boot" if stamp else "boot"
    flood = f"echo '{boot}\n{stamp}NVRM: Xid (PCI:1): 31'; seq -f '{stamp}%g' 5000"
    monkeypatch.setenv("PATH", kernel_log(tmp_path, flood))
    messages = kernel_messages.since(1.0)
    assert len(messages.xids) == count and (messages.unavailable is None) == bool(count)


@pytest.mark.parametrize(
    ("dmesg", "journal", "unread"),
    [
        ("[    9.0] x", None, "its first line is later than the server"),
        pytest.param(
            "[    9.0] x",
            "[    2.0] host kernel: x",
            "its first line is later than the server",
            id="( 9.0) x, ( 2.0) host kernel: x, its first line is of",
        ),
        pytest.param(
            "[    1.5] NVRM: Xid (PCI:1): 31",
            None,
            "its first line is later than the server",
            id="( 1.5) NVRM: Xid (PCI:1): 31, its first line is of",
        ),
        ("[    0.5] boot", None, ""),
        ("[    9.0] x", "[    0.5] host kernel: boot", ""),
        ("", None, ""),
    ],
)
def test_a_truncated_kernel_log_proves_nothing(tmp_path, monkeypatch, dmesg, journal, unread):
    programs = ["exit 1" if line is None else f"echo '{line}'" for line in (dmesg, journal)]
    monkeypatch.setenv("PATH", kernel_log(tmp_path, *programs))
    messages = kernel_messages.since(1.0)
    assert unread in (messages.unavailable or "") and bool(messages.unavailable) == bool(unread)
    assert len(messages.xids) == ("Xid" in dmesg)


@pytest.mark.parametrize(
    ("arch", "messages", "verdict"),
    [
        pytest.param(
            "sm121",
            ("[ 9.1] NVRM: Xid (PCI:000f:01:00): 31, pid=7",),
            "FAIL",
            id="sm121, ( 9.1) NVRM: Xid (PCI:000f:01:00): 31, pid=7",
        ),
        pytest.param(
            "sm121",
            ("[ 9.1] NVRM: GPU at PCI:000f:01:00: GPU has fallen off the bus.",),
            "FAIL",
            id="sm121, ( 9.1) NVRM: GPU at PCI:000f:01:00: GPU has",
        ),
        pytest.param(
            "sm121",
            (("[ 9.1] mlx5_core 0000:01:00.0: device's health compromised - reached miss count"),),
            "INCONCLUSIVE",
            id="sm121, ( 9.1) mlx5_core 0000:01:00.0: device's health",
            marks=pytest.mark.slow("inconclusive, as out of memory is"),
        ),
        pytest.param(
            "cpu",
            ("[ 9.1] Out of memory: Killed process 7 (python3)",),
            "INCONCLUSIVE",
            id="cpu, ( 9.1) Out of memory: Killed process 7 (python3)",
        ),
        pytest.param(
            "cpu",
            ("[ 9.1] NVRM: Xid (PCI:000f:01:00): 31, pid=7",),
            "PASS",
            id="cpu, ( 9.1) NVRM: Xid (PCI:000f:01:00): 31, pid=7, PASS",
        ),
        pytest.param(
            "sm121",
            ("[ 9.1] EDAC MC0: 1 CE memory read error",),
            "PASS",
            id="sm121, ( 9.1) EDAC MC0: 1 CE memory read error, PASS",
            marks=pytest.mark.slow("passes, as an Xid does on a CPU"),
        ),
    ],
)
def test_the_kernel_of_another_node_counts_too(tmp_path, arch, messages, verdict):
    def doing(session):
        session.run.target = dataclasses.replace(session.run.target, arch=arch)
        kernels = {"node 1 (spark2)": kernel_messages.KernelMessages(messages)}
        session.server_stopped("x", StopReport(0, (), True, Returned(), 1.0, kernels=kernels))

    outcome = outcome_of(tmp_path, doing)
    assert outcome.verdict == verdict and ("node 1 (spark2)" in outcome.text) != outcome.green


@pytest.mark.parametrize(
    ("rank", "managed", "line", "kinds"),
    [
        pytest.param(
            0,
            True,
            (
                "(EngineCore pid=8) ERROR 11-20 10:00:01 [core.py:1] CUDA error: an "
                "illegal memory access was encountered"
            ),
            ("illegal_memory_access",),
            id="0, managed, (EngineCore pid=8) ERROR 11-20 10:00:01",
        ),
        pytest.param(
            1,
            True,
            (
                "(Worker_TP1 pid=8) ERROR 11-20 10:00:01 [w.py:1] CUDA error: an illegal "
                "memory access was encountered"
            ),
            ("illegal_memory_access",),
            id="1, managed, (Worker_TP1 pid=8) ERROR 11-20 10:00:01",
        ),
        pytest.param(
            1,
            False,
            ("(Worker_TP1 pid=8) WARNING 11-20 10:00:01 [w.py:1] NaN in logits, request dropped"),
            ("nan",),
            id="1, not managed, (Worker_TP1 pid=8) WARNING 11-20",
        ),
        pytest.param(
            1,
            False,
            "gb10:7:9 [0] NCCL WARN NET/IB : rocep1s0f0:1 Got async event : port error",
            ("nccl",),
            id="1, not managed, gb10:7:9 (0) NCCL WARN NET/IB",
        ),
        pytest.param(
            1,
            True,
            "(Worker_TP1 pid=8) ERROR 11-20 10:00:01 [w.py:1] odd",
            ("unknown",),
            id="1, managed, (Worker_TP1 pid=8) ERROR 11-20 10:00:01 (2)",
        ),
        pytest.param(
            1,
            True,
            "(Worker_TP1 pid=8) INFO 11-20 10:00:01 [w.py:1] as ever",
            (),
            id="1, managed, (Worker_TP1 pid=8) INFO 11-20 10:00:01",
        ),
        pytest.param(
            1,
            False,
            "s:1:1 [0] NCCL INFO dlvsym failed on f - libmlx5.so: undefined symbol: f",
            (),
            id="1, not managed, s:1:1 (0) NCCL INFO dlvsym failed on f",
        ),
    ],
)
def test_each_node_of_a_server_is_read(tmp_path, rank, managed, line, kinds):
    logs = [tmp_path / f"rank{number}.log" for number in (0, 1)]
    for log in logs:
        log.write_text(f"{READY}\n")
    nodes = tuple(Node(number, f"spark{number + 1}", log) for number, log in enumerate(logs))
    server = Server(Endpoint("http://h", None, "m"), managed, "vllm", None, logs[0], None, 1.0,
                    "vllm", nodes=nodes)  # fmt: skip
    decisions = []
    run = stand_in(
        attached=server, pool=None, life=SimpleNamespace(accounted=False, state=lambda: None),
        follow_log=lambda: None, phase=("smoke", "in the run"), redact=str,
        emit=lambda event: decisions.append(event.test.id),
    )  # fmt: skip
    errors = LogErrors(record=run.record, servers=run.servers)
    errors.judge()
    with logs[rank].open("a") as file:
        file.write(f"{line}\n")
    errors.judge()
    errors.judge()
    source = "log of rank0" if rank == 0 else "log of node 1 (spark2)"
    assert decisions == [f"{BESIDE}{kind} in the {source}" for kind in kinds]
