"""The time of a decode step by parts, the host's share, and the conclusion."""

import json
from pathlib import Path

import pytest

from meta_tests.fakes import decode_traces
from meta_tests.fakes.decode_traces import LAYER_US
from meta_tests.unit.evidence.kernel_tables import (
    ATTENTION,
    DENSE,
    GATED,
    KERNELS,
    QUANTISE,
    TABLES_OF_GB10,
    event,
)
from sm121.evidence import decode_time
from sm121.evidence.decode_parts import row_of
from sm121.evidence.decode_time import DecodeTime
from sm121.evidence.profile_files import read_profile


def time_of(path: Path, token_s: float | None = None) -> DecodeTime:
    time = decode_time.measure(read_profile(path), token_s)
    assert time is not None
    return time


@pytest.mark.parametrize(
    ("name", "row"),
    [
        (KERNELS["MARLIN"], "moe_products"),
        (GATED, "moe_products"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu", "moe_products"),
        ("void vllm::moe::topkGatingSoftmax<4, 128, 4, 16, 32, int>", "routing"),
        ("computeStridesFusedActivation", "routing"),
        ("void vllm::swigluoai_and_mul_kernel<c10::BFloat16>", "moe_other"),
        ("void vllm::rms_norm_kernel<c10::BFloat16>", "norms"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", "norms"),
        ("void at::native::elementwise_kernel<128>", "other"),
        (ATTENTION, "attention"),
        (QUANTISE, "quantise"),
    ],
)
def test_a_kernel_has_its_row(name, row):
    assert row_of(name) == row


def test_the_rows_add_up_to_the_step(tmp_path):
    time = time_of(decode_traces.write(tmp_path / "w.pt.trace.json.gz", host_us=500.0))
    rows = {row.row: row for row in time.rows}
    assert (time.steps, time.of, time.launches, time.kernels) == (8, "step", 1, 36 * 13)
    assert sum(row.share for row in time.rows) == pytest.approx(1.0, abs=2e-3)
    first, second = rows["moe_fc1"], rows["moe_fc2"]
    assert (first.average_us, second.average_us) == pytest.approx((120.0, 60.0))
    assert first.calls_per_token == second.calls_per_token == 36
    assert rows["routing"].token_ms == pytest.approx(36 * 11 / 1e3)
    assert time.moe_layer_ms == pytest.approx(0.180)
    # Eight steps have seven gaps between them.
    assert time.step_ms == pytest.approx((36 * LAYER_US + 500 * 7 / 8) / 1e3, rel=1e-3)


def test_a_host_that_takes_half_of_a_step_is_noticed(tmp_path):
    host = 36 * LAYER_US
    path = decode_traces.write(tmp_path / "w.pt.trace.json", steps=64, host_us=host)
    time = time_of(path, token_s=2 * 36 * LAYER_US / 1e6)
    assert time.host_share == pytest.approx(0.5, abs=0.01) and time.clock == "stream"
    (line,) = decode_time.follows(time)
    assert line.startswith("the host takes 50% of the step") and "CUDA graphs" in line
    wrong = decode_time.faults(read_profile(path), time)
    assert wrong == ["decode: expected at most 20 ms a token, got 22.2 ms"]


def test_the_cost_of_the_profiler_is_not_the_host_s(tmp_path):
    """On an H200 a step took 3.95 ms, and 4.5 to 8.3 ms while the profiler ran."""
    path = decode_traces.write(tmp_path / "w.pt.trace.json", steps=64, host_us=36 * LAYER_US)
    busy_s = 36 * LAYER_US / 1e6
    time = time_of(path, token_s=1.01 * busy_s)
    assert time.host_share == pytest.approx(0.01, abs=2e-3)
    assert time.step_ms == pytest.approx(1010 * busy_s, abs=1e-3)
    assert time.traced_step_ms == pytest.approx(2000 * busy_s, rel=0.02)
    assert sum(row.share for row in time.rows) == pytest.approx(1.0, abs=2e-3)
    assert not any("host" in line for line in decode_time.follows(time))
    assert decode_time.faults(read_profile(path), time) == []


def test_a_trace_alone_only_bounds_the_host_s_share(tmp_path):
    path = decode_traces.write(tmp_path / "w.pt.trace.json", steps=64, host_us=36 * LAYER_US)
    time = time_of(path)
    assert (time.clock, time.host_share) == ("profiler", pytest.approx(0.5, abs=0.01))
    line = decode_time.follows(time)[-1]
    assert line.startswith("the host takes at most 50% of the step: a trace includes the cost")
    assert decode_time.faults(read_profile(path), time) == [], "kernels take 11 of 22 ms"
    path = decode_traces.write(tmp_path / "w.pt.trace.json", steps=64, slower=4.0)
    (line,) = decode_time.faults(read_profile(path), time_of(path))
    assert line.startswith("decode: expected at most 20 ms a token, got 30.5 ms")


def test_a_token_of_a_server_that_drafts_is_not_a_step(tmp_path):
    path = decode_traces.write(tmp_path / "w.pt.trace.json.gz")
    assert time_of(path, token_s=0.4 * 36 * LAYER_US / 1e6).clock == "profiler"


def test_overlapping_kernels_are_counted_once_in_the_step(tmp_path):
    events = [event(DENSE, "kernel", 10.0 * n, 11.0) for n in range(10)]
    path = tmp_path / "w.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert time_of(path).overlap == pytest.approx(110 / 101 - 1, abs=1e-3)


def test_a_healthy_decode_has_no_fault_and_is_about_the_experts(tmp_path):
    path = decode_traces.write(tmp_path / "w.pt.trace.json.gz")
    time = time_of(path)
    assert decode_time.faults(read_profile(path), time, backends=["CUTLASS"]) == []
    (line,) = decode_time.follows(time)
    assert line.startswith("MoE takes 6") and "MoE kernel (CUTLASS, tiles)" in line


@pytest.mark.parametrize(
    ("only", "what"),
    [(ATTENTION, "attention takes"), (QUANTISE, "quantisation takes")],
    ids=["attention", "quantisation"],
)
def test_the_decision_table_names_the_longest_part(tmp_path, only, what):
    path = decode_traces.write(tmp_path / "w.pt.trace.json", only=only)
    assert [line.startswith(what) for line in decode_time.follows(time_of(path))].count(True) == 1


def test_marlin_where_cutlass_was_asked_for(tmp_path):
    path = decode_traces.write(tmp_path / "w.pt.trace.json", experts="MARLIN")
    profile, time = read_profile(path), time_of(path)
    (line,) = decode_time.faults(profile, time, backends=["FLASHINFER_CUTLASS_MXFP4_MXFP8"])
    assert line.startswith(
        "MoE: expected kernels of FLASHINFER_CUTLASS_MXFP4_MXFP8, got moe_marlin"
    )
    assert decode_time.faults(profile, time, backends=["CUTLASS", "MARLIN"]) == []
    assert decode_time.faults(profile, time) == []


def test_a_slow_product_misses_the_gate_of_1_ms(tmp_path):
    path = decode_traces.write(tmp_path / "w.pt.trace.json", slower=6.0, layers=4)
    (line,) = decode_time.faults(read_profile(path), time_of(path))
    assert line == "MoE GEMM at batch 1: expected at most 1 ms a layer, got 1.08 ms"


def test_the_fused_product_is_the_first_one_in_a_trace_that_begins_within_a_layer(tmp_path):
    kernels = [KERNELS["CUTLASS"], GATED, KERNELS["CUTLASS"], GATED]
    events = [event(name, "kernel", 10.0 * n, 1.0 + n % 2) for n, name in enumerate(kernels)]
    path = tmp_path / "w.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    products = read_profile(path).products
    assert products is not None and products.pairs == 2
    assert (products.first_s, products.second_s) == pytest.approx((4e-6, 2e-6))


def test_a_table_of_nsys_has_no_times_of_steps():
    time = time_of(TABLES_OF_GB10 / "fused_0804_kernels.csv")
    assert (time.of, time.steps, time.step_ms, time.host_share) == ("kernels", None, None, None)
    rows = {row.row: row for row in time.rows}
    assert "host" not in rows and rows["dense"].calls_per_token is None
    assert "moe_products" in rows and "moe_fc1" not in rows, "the table has no order"


def test_a_trace_of_a_cpu_has_no_kernels(tmp_path):
    path = tmp_path / "w.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": [event("aten::mm", "cpu_op", 0.0, 5.0)]}))
    assert decode_time.measure(read_profile(path)) is None
