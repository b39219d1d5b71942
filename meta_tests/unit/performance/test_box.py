"""The machine's state in a run: which processes are the server's, and which decisions a change of
the machine invalidates."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import psutil
import pytest

from meta_tests.fakes import servers
from meta_tests.fakes.box_readings import reading
from meta_tests.fakes.run_events import stand_in, with_events
from sm121.core import architecture, profile
from sm121.core.server import Endpoint, Server
from sm121.engines.attached_processes import AttachedProcesses
from sm121.machine import box, cpu_use
from sm121.machine.cpu_use import CpuUse
from sm121.performance.box import RunBox
from sm121.run.verdict_file import EngineReport, MetricReport, TestReport, VerdictFile


@dataclass
class Serving:
    """A server that somebody else started, as the kernel shows it."""

    port: int
    listener: int
    core: int


@contextlib.contextmanager
def served() -> Iterator[Serving]:
    """A server outside of the run, whose listening process starts an engine core in its own
    session."""
    with servers.program("server-with-a-core.txt") as process:
        port, core = map(int, process.stdout.readline().split())
        yield Serving(port, process.pid, core)
        psutil.Process(core).kill()


@pytest.fixture
def serving() -> Iterator[Serving]:
    with served() as server:
        yield server


def at(*serving: Serving) -> list[str]:
    return [f"http://127.0.0.1:{server.port}" for server in serving]


def driver(*gpus: set[int]) -> SimpleNamespace:
    """An NVML with several GPUs, each with the pids that compute on it."""
    processes = []
    for pids in gpus:
        processes.append([SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids])
    return SimpleNamespace(
        NVMLError=OSError, nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus), nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=processes.__getitem__,
    )  # fmt: skip


@pytest.fixture
def run_box(monkeypatch):
    """The machine's state in a run on a GPU, which is attached to a URL or has a pool of its own
    servers."""
    monkeypatch.setattr(box, "_measure_apart", lambda _device: reading().device)
    monkeypatch.setattr(architecture, "detect", lambda: architecture.Detection("sm121", ""))
    monkeypatch.setattr(box, "_WATCHED_S", 0.1)
    monkeypatch.setattr(box, "_IDLE_OVER_S", 0.1)
    # Processes of this test are its descendants. Processes of other tests are not.
    for module in (box, cpu_use):
        monkeypatch.setattr(module, "processes_of_run", lambda own: [psutil.Process(), *own()])

    def make(*urls: str, gpus=(set(),), pool=None) -> tuple[RunBox, VerdictFile, list[str]]:
        monkeypatch.setitem(sys.modules, "pynvml", driver(*gpus))
        engine = EngineReport(name="vllm", managed=not urls, model="x")
        file = VerdictFile(arch="sm121", profile="x", started="now", engine=engine)
        remarks: list[str] = []
        attached = [Server(Endpoint(url, "", "x"), False, "vllm", "0", None, None, None)
                    for url in urls[:1]]  # fmt: skip
        mine = profile.load("sm121-gpt-oss-120b")
        calm = mine.box.model_copy(update={"max_other_load": 1.0, "memory_available_gib": None})
        run = stand_in(
            file=file, target=SimpleNamespace(arch="sm121"), pool=pool,
            profile=mine.model_copy(update={"box": calm}),
            attached=attached[0] if attached else None, attached_life=None,
            say=lambda *_line: None, remark=remarks.append, redact=str,
            unproven=lambda line: line in file.unproven or file.unproven.append(line),
        )  # fmt: skip
        return RunBox(with_events(run), also=urls), file, remarks

    return make


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_the_processes_of_an_attached_server_are_found_by_its_port(serving, host):
    processes = AttachedProcesses(f"http://{host}:{serving.port}/v1").find()
    assert {process.pid for process in processes} == {serving.listener, serving.core}


def test_a_port_without_a_listener_and_another_machine_have_no_processes():
    assert AttachedProcesses("http://127.0.0.1:1").find() == []
    elsewhere = AttachedProcesses("http://192.0.2.1:8000")
    assert not elsewhere.here and elsewhere.find() == []


def test_all_who_hold_the_listening_socket_are_the_server():
    """All processes that hold the listening socket belong to the server, for example vLLM's API
    servers, which its launcher forks."""
    with servers.program("forked-listener.txt") as process:
        port, child = map(int, process.stdout.readline().split())
        processes = AttachedProcesses(f"http://127.0.0.1:{port}").find()
        assert {each.pid for each in processes} == {process.pid, child}


def test_an_attached_servers_own_load_is_not_other_load(serving, run_box):
    assert run_box  # descendants of this test do not belong to the run
    both = {serving.listener, serving.core}
    find = AttachedProcesses(*at(serving)).find
    assert both <= set(CpuUse.take(find).run_seconds)
    assert not both & set(CpuUse.take(list).run_seconds)


def test_the_engine_of_an_attached_server_is_no_stranger(serving, run_box):
    mine, file, _ = run_box(*at(serving), gpus=[{serving.core}])
    mine.read_before()
    mine.read_beside()
    assert file.box.state == "QUALIFIED" and not file.unproven, file.box
    assert file.box.after.gpu_others == [] and file.box.after.gpu_unattributed is None


@pytest.mark.parametrize("beside", [True, False], ids=["the server's GPU", "another GPU"])
def test_another_process_on_an_attached_servers_gpu_is_other_load(serving, run_box, beside):
    gpus = [{serving.core, 4711}] if beside else [{4711}, {serving.core}]
    mine, file, _ = run_box(*at(serving), gpus=gpus)
    mine.read_before()
    assert file.box.state == ("DEGRADED" if beside else "QUALIFIED"), file.box
    assert ("other processes use the GPU: [4711]" in file.box.reason) is beside


def test_both_sides_of_a_comparison_are_the_runs_own(serving, run_box):
    """Both sides of a comparison belong to the run.

    A and B are attached at the same time, on one GPU."""
    with served() as other:
        gpus = [{serving.core, other.core}]
        urls = at(serving, other)
        both, file, _ = run_box(*urls, gpus=gpus)
        both.read_before()
        assert file.box.state == "QUALIFIED", file.box
        one, file, _ = run_box(urls[0], gpus=gpus)
        one.read_before()
        assert file.box.state == "DEGRADED" and str(other.core) in file.box.reason


@pytest.mark.parametrize(
    ("on_the_gpu", "said"),
    [
        pytest.param((4711,), "got processes [4711]", id="behind a proxy or in a container"),
        pytest.param((), "got nobody", id="elsewhere behind a tunnel"),
    ],
)
def test_unknown_users_of_the_gpu_are_reported_once(serving, run_box, on_the_gpu, said):
    mine, file, _ = run_box(*at(serving), gpus=[{*on_the_gpu}])
    mine.read_before()
    mine.read_beside()
    assert file.box.state == "QUALIFIED" and said in file.box.reason, file.box
    (line,) = file.unproven
    assert (
        "cannot tell which process uses the GPU" in line
        and "Attach to the server's own port" in line
    )


def test_a_server_of_another_user_is_reported_and_its_load_not_counted(run_box):
    mine, file, _ = run_box("http://127.0.0.1:1")
    mine.read_before()
    mine.read_beside()
    assert file.box.state == "QUALIFIED" and file.box.load_during is None
    assert sum("which process listens at 127.0.0.1:1" in line for line in file.unproven) == 1


@pytest.mark.parametrize(
    ("device", "verdicts", "message"),
    [
        pytest.param({}, ("PASS", "FAIL", "PASS"), None, id="the same"),
        pytest.param(
            {"bandwidth_gb_s": 280.0},
            ("PASS", "INCONCLUSIVE", "NOT_RUN"),
            "the machine became faster",
            id="faster",
        ),
        pytest.param(
            {"bandwidth_gb_s": 201.0},
            ("INCONCLUSIVE", "INCONCLUSIVE", "NOT_RUN"),
            "to 201",
            id="slower",
        ),
    ],
)
def test_a_changed_machine_changes_earlier_decisions(
    run_box, monkeypatch, device, verdicts, message
):
    """A changed machine changes earlier decisions: a PASS, a FAIL, and a metric without a gate, all
    made before the machine is read again."""
    mine, file, remarks = run_box(pool=pool_of())
    ledger = mine.run.record.ledger
    mine.read_before()
    for name, verdict, minimum in (("a", "PASS", 1.0), ("b", "FAIL", 9.0), ("c", "PASS", None)):
        file.metrics[name] = MetricReport(value=5.0, unit="tok/s", minimum=minimum, verdict=verdict)
        ledger.decide(TestReport(id=name, level="performance", verdict=verdict, metrics=[name]))
    monkeypatch.setattr(box, "_measure_apart", lambda _device: reading(**device).device)
    mine.read_at_the_end()
    assert [file.metrics[name].verdict for name in "abc"] == [*verdicts]
    decided = {test.id: test.verdict for test in ledger}
    assert [decided[name] for name in "ab"] == [*verdicts[:2]] and decided["c"] == "PASS"
    assert [test.message for test in ledger if message and message in test.message] or not message
    for line in remarks:
        assert "although" not in line


def test_a_faster_machine_and_nothing_that_failed_is_a_remark(run_box, monkeypatch):
    mine, file, remarks = run_box(pool=pool_of())
    mine.run.record.remark = lambda line, **_: remarks.append(line)
    mine.read_before()
    file.metrics["a"] = MetricReport(value=5.0, unit="tok/s", minimum=1.0, verdict="PASS")
    monkeypatch.setattr(box, "_measure_apart", lambda _device: reading(bandwidth_gb_s=280.0).device)
    mine.read_at_the_end()
    assert file.metrics["a"].verdict == "PASS" and not list(mine.run.record.ledger)
    assert file.box.state == "DEGRADED" and "changed from 226 to 280" in remarks[-1]


def pool_of(*pids: int) -> SimpleNamespace:
    return SimpleNamespace(starts=[], processes=lambda: [psutil.Process(pid) for pid in pids])


def test_load_is_found_although_a_container_hides_pids(serving, run_box):
    """Load of other processes is found although NVML may show the host's pids, which do not exist
    in the container."""
    mine, file, remarks = run_box(gpus=[{4711}], pool=pool_of(serving.core))
    mine.read_before()
    mine.read_beside()
    assert file.box.state == "QUALIFIED" and not file.unproven
    assert len(remarks) == 1 and "cannot tell which process" in remarks[0]
    mine, file, remarks = run_box(gpus=[{4711}], pool=pool_of())
    mine.read_before()
    assert file.box.state == "DEGRADED" and "other processes use the GPU: [4711]" in file.box.reason
    assert file.box.remedy == "end the other work on this machine"


@pytest.mark.parametrize("slow", [True, False])
def test_a_crash_is_followed_by_a_reading_only_where_something_is_measured_later(
    run_box, monkeypatch, slow
):
    mine, file, _ = run_box(pool=pool_of())
    mine.run.record.remark = lambda _line, **_how: None
    mine.read_before()
    mine.begin()
    fields = {"bandwidth_gb_s": 120.0} if slow else {}
    monkeypatch.setattr(box, "_measure_apart", lambda _device: reading(**fields).device)
    mine.run.servers.crashed += 1
    assert file.box.state == "QUALIFIED" and file.box.after is None
    mine.begin()
    assert file.box.state == ("DEGRADED" if slow else "QUALIFIED")
    assert bool(mine.refuted) is slow
    monkeypatch.setattr(box, "_measure_apart", lambda _device: reading().device)
    mine.read_at_the_end()
    assert file.box.state == ("DEGRADED" if slow else "QUALIFIED"), "it was, while it measured"
    assert (file.box.remedy is not None) is slow
    mine.run.servers.crashed += 1
    assert not mine.unread


@pytest.mark.parametrize("slow_in", ["both", "the comparison", "neither"])
def test_the_box_of_a_comparison_is_not_that_of_the_rates(run_box, monkeypatch, slow_in):
    """The machine's state in a comparison is not that of the rates. --ab reads the machine itself,
    because the performance level ended before it."""
    mine, file, _ = run_box(pool=pool_of())
    mine.run.record.remark = lambda _line, **_how: None
    mine.read_before()
    for name, slow in (("rates", slow_in == "both"), ("comparison", slow_in != "neither")):
        fields = {"bandwidth_gb_s": 120.0} if slow else {}
        monkeypatch.setattr(
            box, "_measure_apart", lambda _device, fields=fields: reading(**fields).device
        )
        if name == "rates":
            mine.begin()
            mine.read_at_the_end()
        else:
            beside = mine.read_beside()
    assert file.box.state == ("DEGRADED" if slow_in == "both" else "QUALIFIED")
    assert beside.state == ("DEGRADED" if slow_in != "neither" else "QUALIFIED")


@pytest.mark.parametrize(
    ("device", "readings", "taken", "best"),
    [
        pytest.param("cpu", [(0.49, 210.0), (0.0, 230.0)], 2, 230.0, id="busy-then-quiet"),
        pytest.param("cpu", [(0.49, 230.0), (0.4, 210.0)], 2, 230.0, id="busy-twice"),
        pytest.param("cpu", [(0.02, 210.0), (0.0, 230.0)], 1, 210.0, id="quiet"),
        pytest.param("cuda:0", [(0.49, 210.0), (0.0, 230.0)], 1, 210.0, id="a-gpu-beside-it"),
    ],
)
def test_the_bandwidth_of_a_busy_cpu_is_measured_once_more(
    run_box, monkeypatch, device, readings, taken, best
):
    script = [
        reading(device=device, other_load=load, bandwidth_gb_s=gb_s, bandwidth_best_gb_s=gb_s)
        for load, gb_s in readings
    ]
    left = iter(script)
    monkeypatch.setattr(box, "read_machine", lambda *_words, **_options: next(left))
    monkeypatch.setattr(box, "wait_until_idle", lambda *_words, **_options: None)
    of_run, file, _ = run_box(pool=SimpleNamespace(processes=list, starts=[]))
    of_run.read_before()
    assert file.box.before.device.bandwidth_best_gb_s == best
    assert len(script) - len(list(left)) == taken
