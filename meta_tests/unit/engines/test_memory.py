"""Memory that a stopped server has not released is distinguished from the memory of other
processes."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from meta_tests.fakes import servers
from meta_tests.fakes.run_events import new_file, stand_in
from sm121.engines import memory, process_tree, server_memory
from sm121.engines.endings import StopReport
from sm121.engines.memory import DeviceUse, Memory, Returned
from sm121.engines.server_memory import ServerMemory, ServerMemoryReader
from sm121.machine.timeline import ServerDeviceMemory
from sm121.plugin import kernels, outcomes, stash
from sm121.regression.ab_run import AbRun
from sm121.run.event_log import EventLog
from sm121.run.record import RunRecord
from sm121.run.servers import Servers
from sm121.run.verdict_file import TestReport

GIB = 2**30


def at(
    *, available: int = 100, taken: int | str = 10, shared: int = 0, used: int | None = None,
    held: int | None = None, gpu: bool = True,
) -> Memory:  # fmt: skip
    def size(value: int | str | None) -> int | None:
        return value * GIB if isinstance(value, int) else None

    device = DeviceUse(size(used), size(held)) if gpu else None
    return Memory(available * GIB, size(taken), shared * GIB, device)


@pytest.mark.parametrize(
    ("before", "after", "missing", "unproven"),
    [
        # Without a GPU, the memory of visible processes belongs to them, in any container.
        pytest.param(
            {"gpu": False},
            {"available": 95, "taken": 15, "gpu": False},
            0,
            False,
            id="gpu False, available 95 taken 15 gpu False, 0, not",
        ),
        pytest.param(
            {"gpu": False},
            {"available": 95, "gpu": False},
            5,
            False,
            id="gpu False, available 95 gpu False, 5, not unproven",
        ),
        # Files in memory and locked pages have no known owner.
        pytest.param(
            {"gpu": False},
            {"available": 83, "shared": 17, "gpu": False},
            0,
            True,
            id="gpu False, available 83 shared 17 gpu False, 0, unproven",
        ),
        pytest.param(
            {"gpu": False},
            {"available": 63, "shared": 17, "gpu": False},
            20,
            False,
            id="gpu False, available 63 shared 17 gpu False, 20, not",
        ),
        pytest.param(
            {"taken": "unknown", "gpu": False},
            {"available": 95, "taken": "unknown", "gpu": False},
            0,
            True,
            id="taken unknown gpu False, available 95 taken unknown gpu",
        ),
        # A GPU with its own memory, of which another process, or pytest itself, has taken 2 GiB.
        pytest.param(
            {"used": 4, "held": 3},
            {"used": 6, "held": 5},
            0,
            False,
            id="used 4 held 3, used 6 held 5, 0, not unproven",
        ),
        pytest.param(
            {"used": 4, "held": 3},
            {"used": 6, "held": 3},
            2,
            False,
            id="used 4 held 3, used 6 held 3, 2, not unproven",
        ),
        # A container does not show the processes of other containers.
        pytest.param({"used": 4}, {"used": 6}, 0, True, id="used 4, used 6, 0, unproven"),
        pytest.param({"used": 4}, {"used": 4}, 0, False, id="used 4, used 4, 0, not unproven"),
        pytest.param(
            {"used": 4},
            {"used": 4, "available": 90},
            10,
            False,
            id="used 4, used 4 available 90, 10, not unproven",
        ),
        pytest.param(
            {"used": 4},
            {"used": 4, "available": 90, "taken": 20},
            0,
            False,
            id="used 4, used 4 available 90 taken 20, 0, not unproven",
        ),
        # With unified memory (GB10), device memory of others belongs to no process of the system.
        pytest.param(
            {"held": 3},
            {"available": 90, "held": 13},
            0,
            False,
            id="held 3, available 90 held 13, 0, not unproven",
        ),
        pytest.param(
            {"held": 3},
            {"available": 90, "held": 3},
            10,
            False,
            id="held 3, available 90 held 3, 10, not unproven",
        ),
        pytest.param(
            {"held": 3},
            {"available": 90, "held": 3, "taken": 20},
            0,
            False,
            id="held 3, available 90 held 3 taken 20, 0, not unproven",
        ),
        pytest.param(
            {"held": 3},
            {"available": 90, "held": 3, "shared": 10},
            0,
            True,
            id="held 3, available 90 held 3 shared 10, 0, unproven",
        ),
        pytest.param({}, {"available": 90}, 0, True, id="available 90, 0, unproven"),
        pytest.param(
            {},
            {"available": 90, "taken": 20},
            0,
            False,
            id="available 90 taken 20, 0, not unproven",
        ),
    ],
)
def test_memory_that_others_hold_is_not_missing(before, after, missing, unproven):
    returned = at(**before).returned(at(**after))
    assert returned.missing_bytes == missing * GIB
    assert (returned.unproven_bytes > 0) is unproven


@pytest.mark.parametrize("in_a_file", [False, True], ids=["a process", "a file in memory"])
def test_memory_that_an_unseen_process_takes_is_no_leak_of_the_server(in_a_file):
    """Memory of an invisible process is no leak of the server: the kernel's memory account includes
    it."""
    apart = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no namespace of processes can be made here")
    file = Path("/dev/shm") / f"sm121-meta-{os.getpid()}"
    try:
        with servers.program("reader-of-memory.txt", before=apart) as reader:
            assert reader.stdout.readline() == "read\n"
            with servers.program("taker-of-memory.txt", *[str(file)] * in_a_file) as taker:
                assert taker.stdout.readline() == "taken\n"
                missing, _ = reader.communicate("\n", timeout=20.0)
    finally:
        file.unlink(missing_ok=True)
    assert int(missing) == 0


class Failed(Exception):
    """A driver that does not answer."""


def nvml(used: int | None, compute: dict[int | str, int | None], gpus: int = 1) -> SimpleNamespace:
    """A driver with the functions that the suite uses.

    `compute` is the memory of each process; the keys are pids."""

    def memory_info(_handle):
        if used is None:
            raise Failed("not supported")
        return SimpleNamespace(used=used)

    def holding(sizes):
        rows = [SimpleNamespace(pid=int(p), usedGpuMemory=size) for p, size in sizes.items()]
        return lambda _handle: rows

    return SimpleNamespace(
        NVMLError=Failed, nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: gpus, nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=memory_info, nvmlDeviceGetComputeRunningProcesses=holding(compute),
        nvmlDeviceGetGraphicsRunningProcesses=holding({7: 5}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("driver", "namespace", "found"),
    [
        pytest.param(
            nvml(100, {"7": 5, "8": 6}),
            memory._OF_THE_MACHINE,
            DeviceUse(100, 11),
            id="nvml 100 7 5 8 6, memory._OF_THE_MACHINE, DeviceUse 100",
        ),
        pytest.param(
            nvml(None, {"7": 5, "8": 6}),
            memory._OF_THE_MACHINE,
            DeviceUse(None, 11),
            id="nvml None 7 5 8 6, memory._OF_THE_MACHINE, DeviceUse",
        ),
        pytest.param(
            nvml(100, {"8": None}),
            memory._OF_THE_MACHINE,
            DeviceUse(100, None),
            id="nvml 100 8 None, memory._OF_THE_MACHINE, DeviceUse 100",
        ),
        pytest.param(
            nvml(100, {}),
            "pid:[4026532000]",
            DeviceUse(100, None),
            id="nvml 100, pid:(4026532000), DeviceUse 100 None",
        ),
    ],
)
def test_memory_by_process_needs_a_view_of_all_processes(monkeypatch, driver, namespace, found):
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(memory, "_namespace", lambda: namespace)
    assert memory._device_use() == found


@pytest.mark.parametrize(
    ("driver", "held", "source"),
    [
        pytest.param(
            nvml(100, {"7": 5, "8": 6}),
            11,
            "NVML, by process",
            id="nvml 100 7 5 8 6, 11, NVML, by process",
        ),
        # process 7 uses the GPU for graphics only
        pytest.param(
            nvml(100, {"8": 6}), 11, "NVML, by process", id="nvml 100 8 6, 11, NVML, by process"
        ),
        pytest.param(
            nvml(None, {"7": 5, "9": 50}),
            5,
            "NVML, by process",
            id="nvml None 7 5 9 50, 5, NVML, by process",
        ),
        pytest.param(
            nvml(100, {"7": 5, "8": None}),
            100,
            "whole GPU",
            id="nvml 100 7 5 8 None, 100, whole GPU",
        ),
        pytest.param(
            nvml(None, {"7": None}), None, "MemAvailable", id="nvml None 7 None, MemAvailable"
        ),
    ],
)
def test_device_memory_of_a_process_tree(monkeypatch, driver, held, source):
    if held in (100, None):
        driver.nvmlDeviceGetGraphicsRunningProcesses = lambda _handle: []
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    tree = ServerDeviceMemory()
    assert tree.used({7, 8}) == held and source in tree.source


@pytest.mark.parametrize(
    ("before", "after", "device", "total", "source"),
    [
        # process 7 uses the GPU for graphics, with 5 of the unit of these rows
        pytest.param(nvml(100, {}), nvml(170, {"8": 66}), 71, 81, "(NVML)", id="a GPU"),
        pytest.param(nvml(None, {}), nvml(None, {"8": 66}), 71, 81, "(NVML)", id="GB10"),
        pytest.param(
            nvml(100, {}),
            nvml(170, {"8": None}),
            70,
            80,
            "since before the server started",
            id="a container",
        ),
        pytest.param(
            nvml(None, {}),
            nvml(None, {"8": None}),
            None,
            40,
            "GPU and host share the memory",
            id="GB10 without processes",
        ),
    ],
)
def test_total_memory_of_a_server(monkeypatch, before, after, device, total, source):
    """The total memory of a server: the host holds 6 GiB of a model that has 66 GiB on the
    device."""
    available = [50, 10]
    machine = SimpleNamespace(
        virtual_memory=lambda: SimpleNamespace(available=available.pop(0)), Process=None
    )
    monkeypatch.setattr(server_memory, "psutil", machine)
    monkeypatch.setitem(sys.modules, "pynvml", before)
    reader = ServerMemoryReader(gpu=True)
    monkeypatch.setitem(sys.modules, "pynvml", after)
    use = reader.read({7, 8}, 10)
    assert (use.device, use.total) == (device, total) and source in use.source


def test_once_processes_are_shown_nothing_else_is_taken_for_the_servers(monkeypatch):
    """Once NVML has shown memory by process, memory of other processes never counts as the
    server's."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml(100, {8: 66}))
    reader = ServerMemoryReader(gpu=True)
    assert reader.read({8}, 10).device == 66
    monkeypatch.setitem(sys.modules, "pynvml", nvml(5000, {9: 4900}))
    source = "resident memory of the processes, plus their GPU memory (NVML)"
    assert reader.read({8}, 10) == ServerMemory(None, None, source)


def test_a_comparison_has_the_memory_of_the_device_beside_the_whole(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(None, {os.getpid(): 66 * GIB}))
    pool = SimpleNamespace(processes=lambda: [psutil.Process()])
    run = AbRun(stand_in(pool=pool), sides=(), plan=None, attach=None)
    metrics = run._memory(ServerMemoryReader(gpu=True))
    assert metrics["device_memory_gib"].value == 66.0
    assert 66.0 < metrics["memory_gib"].value < 70.0
    (alone,) = run._memory(ServerMemoryReader(gpu=False)).values()
    assert 0.0 < alone.value < 4.0, "what is not there is no metric"


@pytest.mark.parametrize(
    ("driver", "gpu", "total", "source"),
    [
        pytest.param(nvml(100, {"8": 66}), False, 10, "", id="no GPU"),
        pytest.param(nvml(100, {}, gpus=0), True, None, "not known", id="a silent driver"),
    ],
)
def test_device_memory_that_the_driver_does_not_report_is_unknown(
    monkeypatch, driver, gpu, total, source
):
    """Device memory that the driver does not report is unknown.

    Without a GPU, only the resident memory counts."""
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    memory_of_server = ServerMemoryReader(gpu=gpu).read({8}, 10)
    assert memory_of_server.total == total and memory_of_server.device is None
    assert source in memory_of_server.source


def test_device_memory_is_unknown_with_several_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(100, {9: 50}, gpus=2))
    monkeypatch.setenv("PATH", "")
    tree = ServerDeviceMemory()
    assert tree.used({8}) is None and "shows 2 GPUs" in tree.source


def hearing_of_stops() -> tuple[Servers, list[str]]:
    """The servers of a run, with only the part that handles stops, and the remarks of the run."""
    remarks = []
    record = RunRecord(directory=Path(), log=EventLog(new_file()), say=lambda *_: None)
    record.remark = remarks.append
    return Servers(target=None, record=record, configurations=None), remarks


def test_leftovers_of_any_server_fail_the_run():
    """Anything that a server leaves behind makes the run fail, even if the next server of the same
    name stopped cleanly."""
    run, _ = hearing_of_stops()
    core = process_tree.Survivor(4711, "running", "VLLM::EngineCore")
    run.note_stop(
        "marlin", StopReport(0, (core,), False, Returned(100 * GIB), 1.0, log="server-marlin.log")
    )
    run.note_stop("marlin", StopReport(0, (), True, Returned(), 1.0, log="server-marlin-2.log"))
    assert not run.stops["server-marlin.log"].clean and run.stops["server-marlin-2.log"].clean
    (test,) = run.record.file.tests
    assert test.verdict == "FAIL" and "VLLM::EngineCore" in test.message
    assert "100.0 GiB" in test.message and run.record.ledger.complete


@pytest.mark.parametrize(
    ("identity", "gated"),
    [
        ("tests/test_smoke.py::test_health", True),
        ("end of the run::server-marlin", False),
    ],
)
def test_leftovers_of_a_server_do_not_stop_later_levels(identity, gated):
    failed = TestReport(id=identity, level="smoke", verdict="FAIL")
    session = SimpleNamespace(run=stand_in(ledger=[failed], aborted=None, halted=None))
    why = outcomes.why_not(session, SimpleNamespace(stash={stash.LEVEL: "matrix"}))
    assert ("the smoke level failed" in why) if gated else why is None


def test_memory_that_may_be_missing_is_no_pass():
    """In a container, the holder of missing memory is unknown.

    A leak must not pass there, although it is not proven."""
    before = at(used=4)
    after = at(used=80)
    run, remarks = hearing_of_stops()
    for _ in range(2):  # the matrix stops many servers of the same name
        run.note_stop("marlin", StopReport(0, (), True, before.returned(after), 1.0))
    (test,) = run.record.file.tests
    assert test.verdict == "INCONCLUSIVE" and "76.0 GiB less device memory" in test.message
    assert run.record.ledger.complete and len(remarks) == 2
    run.note_stop("triton", StopReport(0, (), True, Returned(), 1.0))
    assert run.record.file.tests == [test]


def stopped_with(*losses: int, took: int = 85, unified: bool = True, seen: bool = False):
    """Return the tests and remarks of a run whose servers used this memory, and left this many GiB
    without a visible holder.

    The container is as docker creates it, unless all processes are visible.
    """
    run, remarks = hearing_of_stops()
    free = 110
    used = 4
    for number, lost in enumerate(losses):
        device = {"used": None if unified else used, "held": 3 if seen else None}
        before = at(available=free, **device)
        at_work = at(available=free - took, **device | ({} if unified else {"used": used + took}))
        free = free - lost * unified
        used = used + lost
        after = at(available=free, **device | ({} if unified else {"used": used}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Memory, "now", lambda after=after: after)
            returned = before.returned_within(0.0, at_work)
        report = StopReport(0, (), True, returned, 1.0, log=f"server-{number}.log")
        run.note_stop("marlin", report)
    return [test.verdict.value for test in run.record.file.tests], remarks


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "a GPU's own memory"])
# The GiB that are missing after each stop, and the memory of the servers in GiB.
@pytest.mark.parametrize(
    ("losses", "took", "verdict", "remarks"),
    [
        pytest.param((2, 0, 2, 0), None, None, 2, id="2 0 2 0, 2"),
        pytest.param((0, 0), None, None, 0, id="0 0, 0"),
        # the size of the canary's server
        pytest.param((2,), 16, None, 1, id="2, 16, 1"),
        # a small loss at each stop, or a large loss at one stop
        pytest.param((2, 2), None, "INCONCLUSIVE", None, id="2 2, INCONCLUSIVE"),
        pytest.param((0, 2, 2, 2), None, "INCONCLUSIVE", None, id="0 2 2 2, INCONCLUSIVE"),
        pytest.param((5,), None, "INCONCLUSIVE", None, id="5, INCONCLUSIVE"),
        pytest.param((0, 80), None, "INCONCLUSIVE", None, id="0 80, INCONCLUSIVE"),
    ],
)
def test_a_leak_in_a_container_is_no_pass_and_a_healthy_one_is_proven(
    unified, losses, took, verdict, remarks
):
    """In a container, a leak does not pass, and a healthy server is proven to be healthy.

    2 GiB may be unexplained once: a driver keeps some memory after its first use, and other
    processes use the machine. A remark says so each time, and how to see all processes."""
    verdicts, lines = stopped_with(*losses, took=took or 85, unified=unified)
    assert {*verdicts} == ({verdict} if verdict else set())
    assert lines if remarks is None else len(lines) == remarks
    if not verdict and lines and took is None:
        assert "2.0 GiB less device memory" in lines[0] and "docker run --pid=host" in lines[0]


def test_missing_memory_of_another_node_has_its_name():
    ours = Returned(missing_bytes=1)
    theirs = Returned(2, 5 * GIB, "device memory", usual=False)
    both = ours.with_other(theirs, "node 1 (spark2)")
    assert (both.missing_bytes, both.unproven_bytes) == (3, 5 * GIB)
    assert "5.0 GiB less device memory of node 1 (spark2) is free" in str(both)
    assert ours.with_other(Returned(2), "node 1") == Returned(missing_bytes=3)


def test_a_leak_is_proven_if_all_processes_are_visible():
    assert stopped_with(2, seen=True) == (["FAIL"], [])


@pytest.mark.parametrize(
    ("level", "following", "ended"),
    [
        ("kernel", "kernel", 0),
        ("kernel", "correctness", 1),
        ("kernel", None, 1),
        ("smoke", None, 0),
    ],
)
def test_the_kernel_level_gives_device_memory_back(level, following, ended):
    process = Mock()
    config = SimpleNamespace(stash={kernels.CHILDREN: [process]})
    item = SimpleNamespace(stash={stash.LEVEL: level}, config=config)
    after = SimpleNamespace(stash={stash.LEVEL: following}) if following else None
    kernels.end_processes_after_the_level(item, after)
    assert process.close.call_count == ended
