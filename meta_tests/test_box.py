"""The machine's state: each defect is seen, a healthy machine is QUALIFIED, nothing is guessed."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time

import psutil
import pytest

from sm121.core import profile
from sm121.measure import box
from sm121.measure.box import BoxState, Device, Reading

GB10 = profile.load("sm121-gpt-oss-120b").box
CPU = profile.load("cpu-tiny-gpt-oss").box


def reading(**fields) -> Reading:
    device = {
        "device": "cuda:0",
        "bandwidth_gb_s": 226.0,
        "bandwidth_spread": 0.01,
        "bandwidth_best_gb_s": 229.0,
        "bandwidth_method": "",
        "buffer_mib": 1024.0,
        "matrix_tflop_s": 88.0,
        "matrix_spread": 0.01,
        "matrix_method": "",
        "sm_clock_mhz": 2418,
    }
    whole = {"memory_available_gib": 50.0, "other_load": 0.01, "seconds": 3.0}
    device.update({k: v for k, v in fields.items() if k in Device.model_fields})
    whole.update({k: v for k, v in fields.items() if k in Reading.model_fields and k != "device"})
    return Reading(device=None if "problem" in fields else Device(**device), **whole)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"bandwidth_gb_s": 150.0}, "memory bandwidth: required 218 GB/s"),
        ({"sm_clock_mhz": 799, "power_w": 19.5}, "SM clock under load: required 1200 MHz"),
        ({"matrix_tflop_s": 36.5}, "matrix rate: required 60 TFLOP/s"),
        ({"bandwidth_spread": 0.4}, "memory bandwidth is unsteady"),
        ({"matrix_spread": 0.4}, "matrix rate is unsteady"),
        ({"throttled": True}, "clocks are throttled"),
        ({"other_load": 0.6, "others": ["make (7): 300%"]}, "others work here"),
        ({"gpu_others": [4711]}, "others are on the GPU: processes [4711]"),
    ],
)
def test_each_defect_degrades_the_box(fields, why):
    state, reason = box.judge(GB10, reading(**fields))
    assert state is BoxState.DEGRADED and why in reason, reason
    state, after = box.judge(GB10, reading(), reading(**fields))
    assert state is BoxState.DEGRADED and "after the measurements" in after


def test_a_box_that_changes_in_between_is_degraded():
    state, reason = box.judge(GB10, reading(bandwidth_gb_s=250.0), reading(bandwidth_gb_s=219.0))
    assert state is BoxState.DEGRADED and "changed from 250 to 219" in reason


def test_others_who_worked_in_between_are_seen():
    state, reason = box.judge(GB10, reading(), reading(), load_during=0.6)
    assert state is BoxState.DEGRADED and "during the measurements" in reason
    assert box.judge(GB10, reading(), reading(), load_during=0.1)[0] is BoxState.QUALIFIED
    late = reading(other_load=0.9)
    assert box.judge(GB10, reading(), late, load_during=0.1)[0] is BoxState.QUALIFIED
    assert box.judge(GB10, late, reading(), load_during=0.1)[0] is BoxState.DEGRADED


def test_a_healthy_box_is_qualified_also_where_nvml_says_nothing():
    assert box.judge(GB10, reading(), reading())[0] is BoxState.QUALIFIED
    silent = reading(sm_clock_mhz=None, power_w=None, temperature_c=None, throttled=None)
    assert box.judge(GB10, silent)[0] is BoxState.QUALIFIED


def test_what_was_not_measured_is_unknown():
    assert box.judge(None, reading())[0] is BoxState.UNKNOWN
    assert box.judge(GB10, None)[0] is BoxState.UNKNOWN
    state, reason = box.judge(GB10, reading(problem="measuring cuda:0 needs torch"))
    assert state is BoxState.UNKNOWN and "needs torch" in reason


def test_a_reading_of_this_machine():
    start = time.monotonic()
    seen = box.read("cpu")
    assert time.monotonic() - start < 15
    assert seen.device is not None and 0.5 < seen.device.bandwidth_gb_s < 2000
    assert 1e-4 < seen.device.matrix_tflop_s < 100
    assert seen.device.sm_clock_mhz is None and seen.gpu_others is None
    assert seen.memory_available_gib > 0


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_who_else_works_here_is_seen_and_what_is_ours_is_not():
    # A stranger: not a child of this process.
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
        with_stranger = box.read("cpu")
        assert with_stranger.other_load > 0.5 / (os.cpu_count() or 1) * 0.6
        assert any(f"({stranger.pid})" in line for line in with_stranger.others)
        claimed = box.read("cpu", own=lambda: [stranger])
        assert not any(f"({stranger.pid})" in line for line in claimed.others)
        child = multiprocessing.get_context("fork").Process(target=spin, args=(4.0,))
        child.start()
        ours = box.read("cpu", own=lambda: [stranger])
        child.join()
        assert not any(f"({child.pid})" in line for line in ours.others)
    finally:
        stranger.kill()


def test_a_gpu_that_is_not_there_is_said():
    seen = box.read("cuda:0")
    assert seen.device is None and "cuda:0" in seen.problem


def test_the_subcommand():
    done = subprocess.run(
        [sys.executable, "-m", "sm121", "box", "--profile", "cpu-tiny-gpt-oss"],
        capture_output=True,
        text=True,
    )
    *json_lines, verdict = done.stdout.strip().splitlines()
    assert json.loads("\n".join(json_lines))["device"]["device"] == "cpu"
    state = verdict.split(":")[0]
    assert (done.returncode, state) in {(0, "QUALIFIED"), (1, "DEGRADED")}, done


SAMPLES = json.dumps({"tg32@d0": [53.0, 53.2, 52.9, 53.1, 53.05]})


@pytest.fixture
def on_a_box(run_pytest, fault_server, tmp_path):
    """A run of a measurement on this machine, held against a [box] of one's own."""

    def go(**limits):
        text = profile.shipped()["cpu-tiny-gpt-oss"].read_text("utf-8")
        head, _, rest = text.partition("[box]\n")
        tail = rest[rest.index("\n[") :]
        lines = "\n".join(f"{key} = {value}" for key, value in limits.items())
        path = tmp_path / "own.toml"
        path.write_text(f"{head}[box]\n{lines}\n{tail}")
        server = fault_server()
        status, run = run_pytest(
            "--profile", str(path), "--base-url", server.base_url, "--api-key", server.key,
            f"--benchmark-storage={tmp_path}/s", "--benchmark-autosave",
            "meta_tests/scenarios/measurements.py",
            environment={"SM121_META_SAMPLES": SAMPLES},
        )  # fmt: skip
        return status, run.verdict, run

    return go


EASY = {"max_spread": 9, "max_drift": 9, "max_other_load": 1}


def test_a_degraded_box_makes_performance_inconclusive(on_a_box, tmp_path):
    status, file, run = on_a_box(**EASY, roofline_tolerance=100)
    assert status == 0, run.output
    assert file["box"]["state"] == "QUALIFIED", file["box"]
    assert file["box"]["before"]["device"] and file["box"]["after"]["device"]
    assert 0 < file["metrics"]["tg32@d0"]["roofline"] < 5

    impossible = '{ value = 1e6, source = "nobody" }'
    status, file, run = on_a_box(**EASY, bandwidth_gb_s=impossible)
    assert status == 1 and file["verdict"] == "INCONCLUSIVE", run.output
    assert file["box"]["state"] == "DEGRADED"
    assert file["metrics"]["tg32@d0"]["verdict"] == "INCONCLUSIVE"
    assert "the box is DEGRADED" in file["tests"][0]["message"]
    stored = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("s/*/*.json"))]
    kept = [item["benchmarks"][0]["extra_info"] for item in stored]
    assert [info["box"]["state"] for info in kept] == ["QUALIFIED", "DEGRADED"]
    assert [info["verdict"] for info in kept] == ["PASS", "INCONCLUSIVE"]
    assert all(info["box"]["after"] for info in kept), "how it ended, not how it was then"


def test_an_engine_that_still_spins_is_waited_for():
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        process = psutil.Process(spinning.pid)
        assert not box.wait_until_idle(lambda: [process], within_s=0.5)
    finally:
        spinning.kill()
        spinning.wait()
    assert box.wait_until_idle(lambda: [process], within_s=5.0)
