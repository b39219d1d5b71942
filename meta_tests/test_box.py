"""The machine's state: each defect is seen, a healthy machine is QUALIFIED, nothing is guessed."""

import ctypes
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from operator import mul
from types import SimpleNamespace

import psutil
import pytest
from texts import text_file

from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.measure import box, machine, stream_bandwidth
from sm121.measure.box import BoxState, Device, Reading

GB10 = profile.load("sm121-gpt-oss-120b").box

DEVICE = Device(
    device="cuda:0", bandwidth_gb_s=226.0, bandwidth_spread=0.01, bandwidth_best_gb_s=229.0,
    bandwidth_method="", buffer_mib=1024.0, matrix_tflop_s=88.0, matrix_spread=0.01,
    matrix_method="", sm_clock_mhz=2418,
)  # fmt: skip


def reading(**fields) -> Reading:
    device = DEVICE.model_copy(update={k: v for k, v in fields.items() if k in Device.model_fields})
    whole = {"memory_available_gib": 50.0, "other_load": 0.01, "seconds": 3.0}
    whole |= {k: v for k, v in fields.items() if k in Reading.model_fields}
    return Reading(device=None if "problem" in fields else device, **whole)


def judged(*readings, **options) -> tuple[BoxState, str]:
    judgement = box.judge(*readings, **options)
    return judgement.state, judgement.reason


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        pytest.param(
            {"bandwidth_gb_s": 150.0},
            "memory bandwidth: required 200 GB/s",
            id="bandwidth_gb_s 150.0, memory bandwidth: required 200",
        ),
        pytest.param(
            {"sm_clock_mhz": 799, "power_w": 19.5},
            "SM clock under load: required 2050 MHz",
            id="sm_clock_mhz 799 power_w 19.5, SM clock under load",
        ),
        pytest.param(
            {"matrix_tflop_s": 36.5},
            "matrix rate: required 70 TFLOP/s",
            id="matrix_tflop_s 36.5, matrix rate: required 70 TFLOP/s",
        ),
        pytest.param(
            {"bandwidth_gb_s": 70.0},
            "memory bandwidth: required 200 GB/s",
            id="bandwidth_gb_s 70.0, memory bandwidth: required 200 GB/s",
        ),
        # A mild cap at 100 W, by each thing that may tell it.
        pytest.param(
            {"matrix_tflop_s": 60.0},
            "matrix rate: required 70 TFLOP/s",
            id="matrix_tflop_s 60.0, matrix rate: required 70 TFLOP/s",
        ),
        pytest.param(
            {"sm_clock_mhz": 1900},
            "SM clock under load: required 2050 MHz",
            id="sm_clock_mhz 1900, SM clock under load: required 2050",
        ),
        pytest.param(
            {"power_limit_w": 100.0, "power_limit_default_w": 140.0},
            "the GPU's power is limited: required its default of 140 W, seen 100 W",
            id="power_limit_w 100.0 power_limit_default_w 140.0, the",
        ),
        pytest.param(
            {"power_capped": 0.95, "power_w": 74.0},
            "seen in 95% of the samples at 74 W",
            id="power_capped 0.95 power_w 74.0, seen in 95% of the",
        ),
        pytest.param(
            {"bandwidth_spread": 0.4},
            "memory bandwidth is unsteady",
            id="bandwidth_spread 0.4, memory bandwidth is unsteady",
        ),
        pytest.param(
            {"matrix_spread": 0.4},
            "matrix rate is unsteady",
            id="matrix_spread 0.4, matrix rate is unsteady",
        ),
        pytest.param(
            {"throttled": True}, "clocks are throttled", id="throttled True, clocks are throttled"
        ),
        pytest.param(
            {"other_load": 0.6, "others": ["make (7): 300%"]},
            "others work here",
            id="other_load 0.6 others make (7): 300%, others work here",
        ),
        pytest.param(
            {"gpu_others": [4711]},
            "others are on the GPU: processes [4711]",
            id="gpu_others 4711, others are on the GPU: processes (4711)",
        ),
    ],
)
def test_each_defect_degrades_the_box(fields, why):
    state, reason = judged(GB10, reading(**fields))
    assert state is BoxState.DEGRADED and why in reason, reason
    state, after = judged(GB10, reading(), reading(**fields))
    assert state is BoxState.DEGRADED and "after the measurements" in after


@pytest.mark.parametrize(
    ("profile_of", "before", "after", "load_during", "state", "why"),
    [
        pytest.param(
            "sm121-gpt-oss-120b",
            {"bandwidth_gb_s": 250.0},
            {"bandwidth_gb_s": 219.0},
            None,
            "DEGRADED",
            "changed from 250 to 219",
            id="it changes in between",
        ),
        pytest.param(
            "sm121-gpt-oss-120b",
            {},
            {},
            0.6,
            "DEGRADED",
            "during the measurements",
            id="others worked in between",
        ),
        pytest.param("sm121-gpt-oss-120b", {}, {}, 0.1, "QUALIFIED", None, id="hardly anybody did"),
        pytest.param(
            "sm121-gpt-oss-120b",
            {},
            {"other_load": 0.9},
            0.1,
            "QUALIFIED",
            None,
            id="others come at the end",
        ),
        pytest.param(
            "sm121-gpt-oss-120b",
            {"other_load": 0.9},
            {},
            0.1,
            "DEGRADED",
            None,
            id="others were there at first",
        ),
        pytest.param("sm121-gpt-oss-120b", {}, {}, None, "QUALIFIED", None, id="healthy"),
        pytest.param(
            "sm121-gpt-oss-120b",
            {"sm_clock_mhz": None, "power_w": None, "temperature_c": None, "throttled": None},
            None,
            None,
            "QUALIFIED",
            None,
            id="healthy, and NVML says nothing",
        ),
        # Data centre GPUs reach their power limit under any matrix load, and their profiles
        # have no other limit.
        pytest.param(
            "sm90-tiny-gpt-oss",
            {"power_capped": 1.0, "power_limit_w": 700.0},
            None,
            None,
            "QUALIFIED",
            None,
            id="at the power limit of a data centre's GPU",
        ),
        pytest.param(None, {}, None, None, "UNKNOWN", None, id="no box is required"),
        pytest.param(
            "sm121-gpt-oss-120b", None, None, None, "UNKNOWN", None, id="nothing was measured"
        ),
        pytest.param(
            "sm121-gpt-oss-120b",
            {"problem": "measuring cuda:0 needs torch"},
            None,
            None,
            "UNKNOWN",
            "needs torch",
            id="it could not be measured",
        ),
    ],
)
def test_readings_give_a_state(profile_of, before, after, load_during, state, why):
    """Of the box that a profile requires, by two readings."""
    required = profile_of and profile.load(profile_of).box
    readings = (fields if fields is None else reading(**fields) for fields in (before, after))
    judgement = box.judge(required, *readings, load_during=load_during)
    assert judgement.state is BoxState[state] and (why or "") in judgement.reason, judgement


@pytest.mark.parametrize(
    ("before", "after", "refuted"),
    [
        pytest.param({"bandwidth_gb_s": 201.0}, {}, ("FAIL", "INCONCLUSIVE"), id="faster"),
        pytest.param(
            {"bandwidth_gb_s": 201.0},
            {"matrix_tflop_s": 75.0},
            ("FAIL", "INCONCLUSIVE", "PASS"),
            id="memory faster, matrices slower",
        ),
        pytest.param({}, {"bandwidth_gb_s": 201.0}, ("FAIL", "INCONCLUSIVE", "PASS"), id="slower"),
        pytest.param(
            {"bandwidth_gb_s": 201.0},
            {"throttled": True},
            ("FAIL", "INCONCLUSIVE", "PASS"),
            id="faster and throttled",
        ),
        pytest.param({}, {}, (), id="the same"),
    ],
)
def test_a_machine_that_became_faster_refutes_no_pass(before, after, refuted):
    """What passed on the slower machine passes on this one; what failed may not have to."""
    judgement = box.judge(GB10, reading(**before), reading(**after))
    assert judgement.refuted == {*refuted}
    assert (judgement.state is BoxState.DEGRADED) == bool(refuted), "no baseline for later runs"


@pytest.mark.parametrize(
    "published",
    [
        # One of eight nodes: p10, least, median; and medians of another (tonyd2wild#1).
        pytest.param(
            {"bandwidth_gb_s": 208.8, "matrix_tflop_s": 75.2, "sm_clock_mhz": 2184},
            id="bandwidth_gb_s 208.8 matrix_tflop_s 75.2 sm_clock_mhz",
        ),
        pytest.param(
            {"bandwidth_gb_s": 206.5, "matrix_tflop_s": 75.4, "sm_clock_mhz": 2190},
            id="bandwidth_gb_s 206.5 matrix_tflop_s 75.4 sm_clock_mhz",
        ),
        pytest.param(
            {"bandwidth_gb_s": 218.5, "matrix_tflop_s": 78.8, "sm_clock_mhz": 2184},
            id="bandwidth_gb_s 218.5 matrix_tflop_s 78.8 sm_clock_mhz",
        ),
        pytest.param(
            {"bandwidth_gb_s": 230.0, "matrix_tflop_s": 76.9, "sm_clock_mhz": 2190},
            id="bandwidth_gb_s 230.0 matrix_tflop_s 76.9 sm_clock_mhz",
        ),
        # After it was stuck, and hours later (trap 124).
        pytest.param(
            {"matrix_tflop_s": 91.6, "sm_clock_mhz": 2281, "power_w": 92.5},
            id="matrix_tflop_s 91.6 sm_clock_mhz 2281 power_w 92.5",
        ),
        pytest.param(
            {"matrix_tflop_s": 91.5, "sm_clock_mhz": 2385, "power_capped": 0.1},
            id="matrix_tflop_s 91.5 sm_clock_mhz 2385 power_capped 0.1",
        ),
        pytest.param(
            {"power_limit_w": 140.0, "power_limit_default_w": 140.0, "power_capped": 0.0},
            id="power_limit_w 140.0 power_limit_default_w 140.0",
        ),
    ],
)
def test_healthy_gb10s_are_qualified(published):
    state, reason = judged(GB10, reading(**published), reading(**published))
    assert state is BoxState.QUALIFIED, reason


@pytest.mark.parametrize(
    ("clock", "share"),
    [
        # locked at 2,200 MHz, as published, and at 2,100
        (2184, "2184 MHz under load, 96%"),
        (2190, "2190 MHz under load, 96%"),
        (2085, "2085 MHz under load, 91%"),
        # without a lock, and where nothing is told
        (2281, None),
        (2405, None),
        (None, None),
    ],
)
def test_a_capped_clock_is_said_with_its_share(clock, share):
    """Of a machine that is fit: `nvidia-smi -lgc 0,2200` slows every rate by a little."""
    capped = reading(sm_clock_mhz=clock)
    state, reason = judged(GB10, capped, capped)
    assert state is BoxState.QUALIFIED and ("the SM clock is capped" in reason) is bool(share)
    assert reason.count(share or "GB/s") == 1 and box.capped(None, capped) is None


@pytest.mark.parametrize(
    ("system", "arch", "name"),
    [
        pytest.param(
            "Linux 6.17.0-1008-nvidia, driver 580.126.09",
            None,
            "Linux 6.17.0-1008-nvidia",
            id="Linux 6.17.0-1008-nvidia, driver 580.126.09, Linux",
        ),
        ("Linux 7.0.0-1019-nvidia, driver 580.173.02", None, "Linux 7.0.0-1019-nvidia"),
        ("Linux 7.0.0-31-generic, driver 580.173.02", None, "Linux 7.0.0-31"),
        pytest.param(
            "Linux 6.11.0-1016-nvidia, driver 580.95.05",
            None,
            "Linux 6.11.0-1016-nvidia, driver 580.95.05",
            id="Linux 6.11.0-1016-nvidia, driver 580.95.05, Linux",
        ),
        ("Linux 6.17.0-1031-nvidia, driver 610.43.02", None, "driver 610.43.02"),
        # eight healthy nodes, the effort's, a release before and after, another GPU
        ("Linux 6.17.0-1032-nvidia, driver 580.173.02", None, None),
        ("Linux 6.17.0-1026-nvidia, driver 580.173.02", None, None),
        ("Linux 7.0.0-30-generic, driver 580.173.02", None, None),
        ("Linux 6.17.0-10080-nvidia, driver 580.126.09", None, None),
        ("Linux 6.11.0-1016-nvidia, driver 580.126.09", None, None),
        ("Linux 6.18.5, driver None", None, None),
        ("Linux 7.0.0-1019-nvidia, driver 580.159.04", "sm90", None),
    ],
)
def test_a_system_that_is_known_to_be_bad_is_said(system, arch, name):
    lines = machine.faults(arch or "sm121", system)
    assert [line.partition(": ")[0] for line in lines] == ([name] if name else [])


def test_a_power_cap_is_read_under_load(monkeypatch):
    """From NVML while matrices are multiplied; what a GB10 answers with N/A is null."""
    import pynvml

    clocks = iter([2400, 1900, 1890, 1910, 1905])
    limits_mw = {"EnforcedPowerLimit": 100_000, "PowerManagementDefaultLimit": 140_000}

    def driver(**limits):
        def not_supported(*_arguments):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

        answers = {
            "ClockInfo": lambda *_: next(clocks),
            "PowerUsage": lambda _handle: 74_000,
            "CurrentClocksThrottleReasons": lambda _handle: (
                pynvml.nvmlClocksThrottleReasonSwPowerCap
            ),
            "Temperature": lambda *_: 61,
            **{name: (lambda _handle, name=name: limits.get(name)) for name in limits_mw},
        }
        if not limits:
            answers |= dict.fromkeys([*limits_mw, "CurrentClocksThrottleReasons"], not_supported)
        for name in ("nvmlInit", "nvmlShutdown"):
            monkeypatch.setattr(pynvml, name, lambda: None)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", answer)
        samples = iter([True] * (5 if limits else 1) + [False])
        return stream_bandwidth._nvml_while(lambda: next(samples), 0)

    read = driver(**limits_mw)
    assert read["sm_clock_mhz"] == 1905, "the first sample is before the cap acts"
    assert (read["power_limit_w"], read["power_limit_default_w"]) == (100.0, 140.0)
    assert read["power_capped"] == 1.0 and read["throttled"] is False
    clocks = iter([2400])
    silent = driver()
    assert (silent["power_limit_w"], silent["power_capped"]) == (None, None)
    assert silent["sm_clock_mhz"] == 2400


def test_a_reading_of_this_machine():
    start = time.monotonic()
    read = box.read("cpu")
    assert time.monotonic() - start < 15
    assert read.device is not None and 0.5 < read.device.bandwidth_gb_s < 2000
    assert 1e-4 < read.device.matrix_tflop_s < 100
    assert read.device.sm_clock_mhz is None and read.gpu_others is None
    assert read.memory_available_gib > 0


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.alone(occupies_the_cpu=True)
def test_who_else_works_here_is_seen_and_what_is_ours_is_not():
    # A stranger: not a child of this process, which is the parent of its orphans (prctl(2)) once a
    # test before this one has started a server.
    subreaper = 36
    assert ctypes.CDLL(None).prctl(subreaper, 0, 0, 0, 0) == 0
    code = (
        "import os, subprocess, sys\n"
        "spin = 'import time; e = time.monotonic() + 30\\nwhile time.monotonic() < e: pass'\n"
        "p = subprocess.Popen([sys.executable, '-c', spin], start_new_session=True, "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(p.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    stranger = psutil.Process(int(done.stdout))
    try:
        assert stranger not in psutil.Process().children(recursive=True)
        while sum(stranger.cpu_times()[:2]) < 0.1:  # its interpreter is loading still
            time.sleep(0.02)
        with_stranger = box.read("cpu")
        assert with_stranger.other_load > 0.5 / (os.cpu_count() or 1) * 0.6
        assert any(f"({stranger.pid})" in line for line in with_stranger.others)
        child = multiprocessing.get_context("fork").Process(target=spin, args=(2.5,))
        child.start()
        with_both = box.read("cpu", own=lambda: [stranger])
        child.join()
        for process in (stranger, child):
            assert not any(f"({process.pid})" in line for line in with_both.others)
    finally:
        stranger.kill()


def test_a_gpu_that_is_not_there_is_said():
    read = box.read("cuda:0")
    assert read.device is None and "cuda:0" in read.problem


def test_the_subcommand():
    command = [sys.executable, "-m", "sm121", "box", "--json", "--profile", "cpu-tiny-gpt-oss"]
    done = subprocess.run(command, capture_output=True, text=True)
    *json_lines, verdict = done.stdout.strip().splitlines()
    assert json.loads("\n".join(json_lines))["device"]["device"] == "cpu"
    state = verdict.split(":")[0]
    assert (done.returncode, state) in {(0, "QUALIFIED"), (1, "DEGRADED")}, done


class Gpu:
    """torch on a GPU whose speed is a function of its time, from when it begins to work."""

    bfloat16 = None

    def __init__(self, speed: Callable[[float], float]) -> None:
        self.speed, self.now = speed, 0.0
        self.cuda = SimpleNamespace(
            Event=lambda **_: GpuEvent(self), synchronize=lambda: None, OutOfMemoryError=MemoryError
        )

    def randn(self, *_shape: object, **_how: object) -> None:
        """A matrix."""

    def ones(self, shape: object, **_how: object) -> SimpleNamespace:
        rows, columns = shape if isinstance(shape, tuple) else (shape, 1)
        return SimpleNamespace(numel=lambda: rows * columns)

    def matmul(self, *_matrices: object) -> None:
        self.now += 1.6e-3 / self.speed(self.now)

    def mv(self, *_matrices: object) -> None:
        self.now += 0.25e-3 / self.speed(self.now)

    amax = mv


class GpuEvent:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.at = self.gpu.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "GpuEvent") -> float:
        return (end.at - self.at) * 1e3


#: An idle H200 begins above what it can hold, and is then pulled below it: in seven timings of
#: 20 ms, 5 of 17 readings were spread over 10 %.
SETTLES = {
    "from a boost": lambda t: 1.25 if t < 0.08 else 1.0,
    "from idle clocks": lambda t: min(1.0, 0.3 + t),
    "in waves": lambda t: 1.0 + 0.2 * math.exp(-3 * t) * math.cos(40 * t),
}


#: Nor does it ever settle.
UNSTEADY = {
    "two clocks in turns": lambda t: 1.0 if t % 0.6 < 0.3 else 0.7,
    "throttled after a second": lambda t: 1.0 if t < 1.5 else 0.6,
}


@pytest.mark.parametrize("name", [*SETTLES, *UNSTEADY])
def test_only_clocks_that_settle_are_of_a_steady_machine(monkeypatch, name):
    gpu = (SETTLES | UNSTEADY)[name]
    monkeypatch.setattr(stream_bandwidth, "gpu_torch", lambda _device: Gpu(gpu))
    rates, _ = stream_bandwidth.matrix_rate("cuda:0")
    reads = stream_bandwidth.read_bandwidth(1 << 30, device="cuda:0").samples
    matrices, memory = box._quartile_spread(rates), box._quartile_spread(reads)
    off = abs(statistics.median(rates) / (2.0 * 8192**3 / 1.6e-3 / 1e12) - 1)
    if name in SETTLES:
        assert max(matrices, memory, off) < 0.02, (matrices, memory, off)
    else:
        assert max(matrices, memory) > GB10.max_spread or off > 0.2, (matrices, memory, off)


SAMPLES = {"tg32@d0": [53.0, 53.2, 52.9, 53.1, 53.05]}


@pytest.fixture
def on_a_box(run_pytest, fault_server, tmp_path):
    def go(samples: dict, *arguments: str, environment: dict[str, str] | None = None, **limits):
        text = profile.shipped()["cpu-tiny-gpt-oss"].read_text("utf-8") + text_file("one-gate.toml")
        head, _, rest = text.partition("[box]\n")
        tail = rest[rest.index("\n[") :]
        lines = "\n".join(f"{key} = {value}" for key, value in limits.items())
        path = tmp_path / "own.toml"
        path.write_text(f"{head}[box]\n{lines}\n{tail}")
        status, run = run_pytest(
            "--profile", str(path), *fault_server().options,
            f"--benchmark-storage={tmp_path}/s", "--benchmark-autosave",
            *arguments, "meta_tests/scenarios/measurements.py",
            environment={"SM121_META_SAMPLES": json.dumps(samples), **(environment or {})},
        )  # fmt: skip
        return status, run.verdict, run

    return go


#: A metric that is counted: no clock decides it.
SHARE = {"samples": [82.6], "unit": "%", "higher_is_better": True}
EASY = {"max_spread": 9, "max_drift": 9, "max_other_load": 1}
IMPOSSIBLE = {"bandwidth_gb_s": '{ value = 1e6, source = "nobody" }'}


@pytest.mark.slow("two runs that measure the machine; test_run_box.py asks in this process")
def test_a_degraded_box_makes_performance_inconclusive(on_a_box, tmp_path):
    """What is timed; what is counted stands."""
    status, file, run = on_a_box(SAMPLES, **EASY, roofline_tolerance=100)
    assert status == 0, run.output
    assert file["box"]["state"] == "QUALIFIED", file["box"]
    assert file["box"]["before"]["device"] and file["box"]["after"]["device"]
    assert file["metrics"]["tg32@d0"]["roofline"] is None, "no log shows what this server reads"

    status, file, run = on_a_box(SAMPLES | {"acceptance@1": SHARE}, **EASY, **IMPOSSIBLE)
    assert status == 1 and file["verdict"] == "INCONCLUSIVE", run.output
    assert file["box"]["state"] == "DEGRADED"
    assert file["metrics"]["tg32@d0"]["verdict"] == "INCONCLUSIVE"
    assert file["metrics"]["acceptance@1"]["verdict"] == "PASS"
    assert "the box is DEGRADED" in file["tests"][0]["message"]
    stored = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("s/*/*.json"))]
    infos = [item["benchmarks"][0]["extra_info"] for item in stored]
    assert [info["box"]["state"] for info in infos] == ["QUALIFIED", "DEGRADED"]
    assert [info["verdict"] for info in infos] == ["PASS", "INCONCLUSIVE"]
    assert all(info["box"]["after"] for info in infos), "how it ended, not how it was then"


@pytest.mark.alone(occupies_the_cpu=True)
def test_an_engine_that_still_spins_is_waited_for():
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        process = psutil.Process(spinning.pid)
        assert not box.wait_until_idle(lambda: [process], within_s=0.5)
    finally:
        spinning.kill()
        spinning.wait()
    assert box.wait_until_idle(lambda: [process], within_s=5.0)


@pytest.mark.parametrize(
    ("says", "status", "expected"),
    [
        pytest.param(
            "QUALIFIED  fit", 0, (0, "QUALIFIED  fit"), id="QUALIFIED fit, 0, 0 QUALIFIED fit"
        ),
        pytest.param(
            "DEGRADED  a stuck clock",
            1,
            (1, "DEGRADED  a stuck clock"),
            id="DEGRADED a stuck clock, 1, 1 DEGRADED a stuck clock",
        ),
        ("", 0, "no box was read there"),
        ("usage: python", 4, "no box was read there"),
        pytest.param(
            mul("x", 99999),
            0,
            "no box was read there: it ended with 0; last: xxx",
            id="without end",
        ),
        pytest.param("DEGRADED \x1b[31m", 1, (1, r"DEGRADED \x1b[31m"), id="a colour"),
    ],
)
def test_the_box_of_another_node(says, status, expected, tmp_path):
    script = tmp_path / "node"
    script.write_text(f"import sys\nassert sys.argv[1:4] == ['-m', 'sm121', 'box']\n"
                      f"print({says!r}, end='')\nsys.exit({status})\n")  # fmt: skip
    command = f"{sys.executable} {script}"
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            box.of_node(command, "cpu-tiny-gpt-oss")
    else:
        state, line = expected
        assert box.of_node(command, "cpu-tiny-gpt-oss") == (state, f"\n{command}\n{line}\n")


@pytest.mark.parametrize(
    ("command", "reason"),
    [("/nowhere/ssh spark2", "/nowhere/ssh spark2: "), ("ssh 'spark2", "ssh 'spark2: No closing")],
)
def test_a_node_that_cannot_be_reached(command, reason):
    with pytest.raises(UsageError, match=f"--node-command {reason}"):
        box.of_node(command, "cpu-tiny-gpt-oss")


TWO = SAMPLES | {"pp2048@d0": [900.0, 901.0, 899.0, 900.5, 900.2]}


@pytest.mark.parametrize(
    ("slow_in", "verdict", "state"),
    [
        pytest.param(["test_later"], "PASS", "QUALIFIED", id="slow after the measurements"),
        pytest.param(["pp2048"], "INCONCLUSIVE", "DEGRADED", id="slow while measured"),
        pytest.param(["pp2048", "later"], "INCONCLUSIVE", "DEGRADED", id="slow to the end"),
        pytest.param(["nothing"], "PASS", "QUALIFIED", id="healthy"),
    ],
)
def test_the_box_is_read_when_the_last_measuring_level_ends(on_a_box, slow_in, verdict, state):
    """What the machine does later says nothing about the numbers."""
    least = {"bandwidth_gb_s": '{ value = 50.0, source = "the test" }'}
    plugin = ("-p", "meta_tests.scenarios.scripted_box")
    _, file, run = on_a_box(
        TWO, *plugin, "meta_tests/scenarios/after_measuring.py",
        environment={"SM121_META_SLOW_IN": json.dumps(slow_in)}, **EASY, **least,
    )  # fmt: skip
    assert (file["verdict"], file["box"]["state"]) == (verdict, state), run.output
    assert file["metrics"]["tg32@d0"]["verdict"] == verdict
    assert [test["verdict"] for test in file["tests"] if "later" in test["id"]] == ["PASS"]
    assert file["box"]["after"]["device"]
