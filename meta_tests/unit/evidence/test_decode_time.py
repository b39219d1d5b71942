"""The time of a decode step is divided into parts, the host's share is computed, and a decision
follows."""

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
from sm121.evidence.decode_time import DecodeTime, Judgement, Limits, StreamTime
from sm121.evidence.profile_files import read_profile

GUIDE = Limits(20.0, "guide", 1.0)
#: The time of the kernels of a step in a fake trace, in seconds.
BUSY_S = 36 * LAYER_US / 1e6


def time_of(
    path: Path, token_s: float | None = None, tokens_per_step: float | None = None
) -> DecodeTime:
    stream = None if token_s is None else StreamTime(token_s, tokens_per_step)
    time = decode_time.measure(read_profile(path), stream)
    assert time is not None
    return time


def judged(path: Path, time: DecodeTime, *backends: str, limits: Limits = GUIDE) -> Judgement:
    return decode_time.judge(read_profile(path), time, limits, backends=backends)


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
    time = time_of(path, token_s=2.02 * BUSY_S)
    assert time.host_share == pytest.approx(0.505, abs=0.01) and time.clock == "stream"
    (line,) = decode_time.follows(time)
    assert line.startswith("the host takes 50% of the step") and "CUDA graphs" in line
    assert judged(path, time).faults == [
        "decode: expected at most 20 ms a token (guide), got 22.4 ms",
        "host: expected at most 50% of a step, got 50.5% (11.3 ms)",
    ]


def test_the_cost_of_the_profiler_is_not_the_host_s(tmp_path):
    """The cost of the profiler does not count as the host's share.

    On an H200, a step took 3.95 ms, and 4.5 to 8.3 ms while the profiler ran."""
    path = decode_traces.write(tmp_path / "w.pt.trace.json", steps=64, host_us=36 * LAYER_US)
    time = time_of(path, token_s=1.01 * BUSY_S)
    assert time.host_share == pytest.approx(0.01, abs=2e-3)
    assert time.step_ms == pytest.approx(1010 * BUSY_S, abs=1e-3)
    assert time.traced_step_ms == pytest.approx(2000 * BUSY_S, rel=0.02)
    assert sum(row.share for row in time.rows) == pytest.approx(1.0, abs=2e-3)
    for line in decode_time.follows(time):
        assert "host" not in line
    assert judged(path, time) == Judgement()


def test_a_trace_alone_only_bounds_the_host_s_share(tmp_path):
    path = decode_traces.write(tmp_path / "w.pt.trace.json", steps=64, host_us=36 * LAYER_US)
    time = time_of(path)
    assert (time.clock, time.host_share) == ("profiler", pytest.approx(0.5, abs=0.01))
    line = decode_time.follows(time)[-1]
    assert line.startswith("the host takes at most 50% of the step: a trace includes the cost")
    judgement = judged(path, time)  # kernels take 11 of 22 ms
    (line,) = judgement.not_run
    assert not judgement.faults and "got" not in line and "a step of the trace took 2" in line
    healthy = decode_traces.write(tmp_path / "h.pt.trace.json", steps=64)
    assert judged(healthy, time_of(healthy)) == Judgement()
    path = decode_traces.write(tmp_path / "w.pt.trace.json", steps=64, slower=4.0)
    (line,) = judged(path, time_of(path)).faults
    assert line == "decode: expected at most 20 ms a token (guide), its kernels took 30.5 ms"
    path = decode_traces.write(tmp_path / "w.pt.trace.json", steps=64, host_us=72 * LAYER_US)
    *_, line = judged(path, time_of(path)).not_run
    assert line.startswith("host: expected at most 50% of a step, got 66.3% with the cost of the")


def test_a_healthy_drafter_is_judged_by_the_time_of_a_token(tmp_path):
    """A server with a healthy drafter is judged by the time of a token.

    A step of 26 ms generates 2.8 tokens."""
    path = decode_traces.write(tmp_path / "w.pt.trace.json", slower=3.0, step_tokens=4)
    busy_s = BUSY_S + 36 * 360e-6
    time = time_of(path, 1.08 * busy_s / 2.8, 2.8)
    assert (time.tokens_per_step, time.clock) == (2.8, "stream")
    assert time.token_ms == pytest.approx(9.3, abs=0.1)
    assert time.step_ms == pytest.approx(26.0, abs=0.3)
    assert time.host_share == pytest.approx(0.08 / 1.08, abs=2e-3)
    rows = {row.row: row for row in time.rows}
    assert rows["moe_fc1"].calls_per_token == pytest.approx(36 / 2.8, abs=0.01)
    assert sum(row.token_ms or 0 for row in time.rows) == pytest.approx(time.token_ms, rel=2e-3)
    assert judged(path, time) == Judgement()


@pytest.mark.parametrize("tokens", [1.5, 2.0, 2.8])
def test_a_host_that_takes_half_of_a_step_is_noticed_behind_a_drafter(tmp_path, tokens):
    path = decode_traces.write(tmp_path / "w.pt.trace.json", step_tokens=4)
    time = time_of(path, 2.1 * BUSY_S / tokens, tokens)
    (line,) = judged(path, time).faults
    assert line.startswith("host: expected at most 50% of a step, got 52.4%")
    assert any("the host takes 52% of the step" in line for line in decode_time.follows(time))


def test_a_slow_token_of_a_drafter_is_noticed(tmp_path):
    path = decode_traces.write(tmp_path / "w.pt.trace.json", slower=4.0, step_tokens=4)
    (line,) = judged(path, time_of(path, 0.0291, 1.05)).faults
    assert line == "decode: expected at most 20 ms a token (guide), got 29.1 ms"


def test_a_drafter_without_counters_has_no_time_of_a_step(tmp_path):
    path = decode_traces.write(tmp_path / "w.pt.trace.json", host_us=80 * LAYER_US, step_tokens=4)
    time = time_of(path, 0.0093)
    assert (time.clock, time.token_ms, time.tokens_per_step) == ("profiler", 9.3, None)
    judgement = judged(path, time)
    assert judgement.faults == []
    (line,) = judgement.not_run
    assert line.endswith("the server's /metrics do not show how many tokens a step generates")


def test_a_file_of_a_drafter_bounds_the_time_of_a_token(tmp_path):
    """For a file of a server with a drafter, only bounds of the time per token are known.

    A step generates one to four tokens."""
    path = decode_traces.write(tmp_path / "w.pt.trace.json", step_tokens=4)
    assert judged(path, time_of(path)) == Judgement(), "11 ms a step"
    path = decode_traces.write(tmp_path / "w.pt.trace.json", step_tokens=4, slower=3.0)
    (line,) = judged(path, time_of(path)).not_run
    assert "the kernels of a step took 24" in line and "how many tokens a step" in line
    path = decode_traces.write(tmp_path / "w.pt.trace.json", step_tokens=4, slower=20.0)
    (line, more) = judged(path, time_of(path)).faults + judged(path, time_of(path)).not_run
    assert line == "decode: expected at most 20 ms a token (guide), its kernels took 33.6 ms"
    assert more.startswith("MoE GEMM at batch 1: expected at most 1 ms a layer, got 3.6 ms for the")
    path = decode_traces.write(tmp_path / "w.pt.trace.json", step_tokens=4, slower=30.0)
    assert "got 1.35 ms" in judged(path, time_of(path)).faults[0]


def test_overlapping_kernels_are_counted_once_in_the_step(tmp_path):
    events = [event(DENSE, "kernel", 10.0 * n, 11.0) for n in range(10)]
    path = tmp_path / "w.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert time_of(path).overlap == pytest.approx(110 / 101 - 1, abs=1e-3)


def test_a_healthy_decode_has_no_fault_and_is_about_the_experts(tmp_path):
    path = decode_traces.write(tmp_path / "w.pt.trace.json.gz")
    time = time_of(path)
    assert judged(path, time, "CUTLASS") == Judgement()
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
    time = time_of(path)
    (line,) = judged(path, time, "FLASHINFER_CUTLASS_MXFP4_MXFP8").faults
    assert line.startswith(
        "MoE: expected kernels of FLASHINFER_CUTLASS_MXFP4_MXFP8, got moe_marlin"
    )
    assert judged(path, time, "CUTLASS", "MARLIN") == Judgement()
    assert judged(path, time) == Judgement()


def kernels(path: Path, *names: str, steps: int = 1, more: str = "") -> Path:
    """Write a trace in which these kernels follow each other with gaps of 10 µs."""
    events = [event(name, "kernel", 10.0 * n, 1.0 + n % 2) for n, name in enumerate(names)]
    step = "execute_context_0(0)_generation_1(1)"
    events += [event(step, "user_annotation", 0.0, 5.0) for _ in range(steps)]
    events += [event(more, "user_annotation", 0.0, 5.0)]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_no_kernel_of_the_experts_is_not_the_requested_backend(tmp_path):
    path = kernels(tmp_path / "w.pt.trace.json", ATTENTION, DENSE)
    judgement = judged(path, time_of(path), "CUTLASS")
    (line,) = judgement.faults
    assert line.startswith(
        f"MoE: expected kernels of CUTLASS, got none; the longest are {DENSE[:9]}"
    )
    (line,) = judgement.not_run
    assert "expected kernels of the experts' products, got none" in line
    dense = Limits(20.0, "guide", None)
    assert judged(path, time_of(path), limits=dense) == Judgement()
    path = kernels(tmp_path / "w.pt.trace.json", ATTENTION, "void cut<int, flo")
    judgement = judged(path, time_of(path), "CUTLASS", limits=dense)
    assert judgement.faults == [] and "names of kernels are truncated" in judgement.not_run[0]


def test_an_odd_number_of_products_is_not_run(tmp_path):
    path = kernels(tmp_path / "w.pt.trace.json", *3 * [KERNELS["CUTLASS"]])
    judgement = judged(path, time_of(path), "CUTLASS")
    assert judgement.faults == []
    (line,) = judgement.not_run
    assert line.startswith("MoE GEMM at batch 1: expected launches in pairs of FC1 and FC2")


def test_a_trace_without_marks_of_steps_is_not_run(tmp_path):
    path = kernels(tmp_path / "w.pt.trace.json", *2 * [KERNELS["CUTLASS"]], steps=0)
    (line,) = judged(path, time_of(path), "CUTLASS").not_run
    assert (
        "expected a profile that marks decode steps, got w.pt.trace.json, which marks none" in line
    )


@pytest.mark.parametrize(
    "more", ["context_1(2048)_generation_0(0)", "context_1(9)_generation_1(1)"]
)
def test_a_trace_with_a_prefill_is_not_run(tmp_path, more):
    """A trace that contains a prefill is NOT_RUN, because the kernels of prefill and decode cannot
    be distinguished."""
    experts = 2 * [KERNELS["CUTLASS"]]
    path = kernels(tmp_path / "w.pt.trace.json", *experts, more=f"execute_{more}")
    (line,) = judged(path, time_of(path), "CUTLASS").not_run
    assert "expected a profile of decode steps alone, w.pt.trace.json has 1 with a prefill" in line


def test_a_prompt_without_a_limit_is_not_run(tmp_path):
    path = decode_traces.write(tmp_path / "w.pt.trace.json")
    limits = Limits(None, "profile x has no limit for a prompt of 9 tokens", 1.0)
    (line,) = judged(path, time_of(path), limits=limits).not_run
    assert line == "decode: profile x has no limit for a prompt of 9 tokens"


def test_a_stream_that_counts_no_tokens_is_not_run(tmp_path):
    path = decode_traces.write(tmp_path / "w.pt.trace.json")
    profile = read_profile(path).model_copy(update={"decoding": True})
    (line,) = decode_time.judge(profile, time_of(path), GUIDE).not_run
    assert "does not count the tokens of its stream" in line


def test_a_small_model_that_leaves_its_gpu_idle_is_healthy(tmp_path):
    path = decode_traces.write(tmp_path / "w.pt.trace.json", layers=1)
    assert judged(path, time_of(path, token_s=0.002)) == Judgement()


def test_a_slow_product_misses_the_gate_of_1_ms(tmp_path):
    path = decode_traces.write(tmp_path / "w.pt.trace.json", slower=6.0, layers=4)
    (line,) = judged(path, time_of(path)).faults
    assert line == "MoE GEMM at batch 1: expected at most 1 ms a layer, got 1.08 ms"


def test_the_fused_product_is_the_first_one_in_a_trace_that_begins_within_a_layer(tmp_path):
    path = kernels(tmp_path / "w.pt.trace.json", *2 * [KERNELS["CUTLASS"], GATED])
    products = read_profile(path).products
    assert products is not None and products.pairs == 2
    assert (products.first_s, products.second_s) == pytest.approx((4e-6, 2e-6))


def test_a_table_of_nsys_has_no_times_of_steps():
    path = TABLES_OF_GB10 / "fused_0804_kernels.csv"
    time = time_of(path)
    (line,) = judged(path, time, "CUTLASS").not_run
    assert "the experts and the host: expected a profile that marks decode steps" in line
    assert (time.of, time.steps, time.step_ms, time.host_share) == ("kernels", None, None, None)
    rows = {row.row: row for row in time.rows}
    assert "host" not in rows and rows["dense"].calls_per_token is None
    assert "moe_products" in rows and "moe_fc1" not in rows, "the table has no order"


def test_a_trace_of_a_cpu_has_no_kernels(tmp_path):
    path = tmp_path / "w.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": [event("aten::mm", "cpu_op", 0.0, 5.0)]}))
    assert decode_time.measure(read_profile(path)) is None
