"""Kernel names of a profile: read, classified, and held against what the path claims."""

from __future__ import annotations

import gzip
import json
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from sm121 import cli
from sm121.core import profile
from sm121.core.data_file import DataFileError, parse
from sm121.core.errors import UsageError
from sm121.core.verdict import NotRun
from sm121.evidence import kernel_profile, profiler
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.kernel_profile import (
    KernelNames,
    KernelProfile,
    load_names,
    part_of,
    read,
    read_nsys,
    read_trace,
    table,
)
from sm121.evidence.profiler import profile_decode
from sm121.evidence.requirement import kernel_contradictions

GB10 = profile.load("sm121-gpt-oss-120b").kernel_path
CPU = profile.load("cpu-tiny-gpt-oss").kernel_path

MARLIN = (
    "void marlin_moe_wna16::Marlin<__nv_bfloat16, 1125899906909960l, 256, 1, 8, 8>(int4 const*)"
)
CUTLASS = (
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::"
    "GroupProblemShape<cute::tuple<long, long, long>>, cutlass::gemm::collective::CollectiveMma<"
    "cutlass::gemm::MainloopSm120ArrayTmaWarpSpecializedBlockScaled<2, 2>, cutlass::float_e2m1_t>>>"
)
QUANTISE = (
    "void tensorrt_llm::kernels::quantize_with_block_size<"
    "(tensorrt_llm::BlockScaleQuantizationType)2, __nv_bfloat16, 32, true>(int, int, "
    "int, int, __nv_bfloat16 const*, float const*)"
)
ATTENTION = (
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<(flashinfer::"
    "MaskMode)1, 16u, 1u, 1u, 4u, 4u>>(flashinfer::PagedParams)"
)
DENSE = "std::enable_if<true, void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float>"

# A name of each kind, as profilers print it.
PARTS = [
    (MARLIN, "moe"),
    (CUTLASS, "moe"),
    ("void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<__nv_bfloat16>", "moe"),
    ("void tensorrt_llm::kernels::cutlass_kernels::finalizeMoeRoutingKernel<float>", "moe"),
    ("void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*)", "moe"),
    ("void vllm::moe::topkGatingSoftmax<4, 128, 4, 16, 32, int>", "moe"),
    ("void vllm::swigluoai_and_mul_kernel<c10::BFloat16>", "moe"),
    ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu", "moe"),
    ("_p_matmul_ogs_NNT_bf16xbf16xmxfp4_128x256x64x1", "moe"),
    ("fused_moe_kernel", "moe"),
    ("fused_moe_kernel_gptq_awq", "moe"),
    ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x8x512_s6_et128x8_m128x8x32_sm100f", "moe"),
    ("void mul_mat_id_mxfp4<...>", "moe"),
    ("_C::cpu_fused_moe", "moe"),
    (ATTENTION, "attention"),
    ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention"),
    ("void flashinfer::PersistentVariableLengthMergeStatesKernel<...>", "attention"),
    ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 64, 256>>", "attention"),
    ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<>>>",
     "attention"),
    ("kernel_unified_attention_2d", "attention"),
    ("kernel_unified_attention", "attention"),
    ("reduce_segments", "attention"),
    ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "attention"),
    ("vllm::unified_attention_with_output", "attention"),
    ("_C::cpu_attention_with_kv_cache", "attention"),
    ("_C::cpu_attn_reshape_and_cache", "attention"),
    ("void flash_attn_ext_f16<64, 64, 16, 4, false>", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64", "attention"),
    (DENSE, "dense"),
    ("void marlin::Marlin<__nv_bfloat16, 256, 1, 8, 8>", "dense"),
    ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "dense"),
    ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_NNT", "dense"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "dense"),
    ("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8", "dense"),
    ("void mul_mat_vec_q<(ggml_type)8, 1, false>", "dense"),
    ("void mul_mat_q<(ggml_type)8, 64, false>", "dense"),
    ("_C::onednn_mm", "dense"),
    ("aten::mm", "dense"),
    (QUANTISE, "quantise"),
    ("void vllm::cvt_fp16_to_fp4<__nv_bfloat16, false>", "quantise"),
    ("void per_token_group_quant_8bit_kernel<c10::BFloat16, c10::Float8_e4m3fn>", "quantise"),
    ("void quantize_mmq_q8_1<(mmq_q8_1_ds_layout)0>", "quantise"),
    ("quantize_mmq_mxfp4", "quantise"),
    ("fused_moe_120", "moe"),
    ("batch_prefill_attention_sink_dtype_q_bf16", "attention"),
    ("xqa", "attention"),
    ("fp4_quantization_120f", "quantise"),
    ("aten::mul", "other"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>", "other"),
    ("void vllm::rms_norm_kernel<c10::BFloat16>", "other"),
    ("triton_poi_fused_add_0", "other"),
    ("Memcpy DtoD (Device -> Device)", "other"),
]  # fmt: skip


def event(name: str, category: str, start: float, took: float, tid: int = 1) -> dict:
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": tid, "ts": start,
            "dur": took, "args": {"External id": 1}}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., Path]:
    """A trace file of some events, as torch writes it."""

    def write(*events: dict, name: str = "w.pt.trace.json.gz") -> Path:
        text = json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "x"}, indent=2)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


def gpu(*names: str) -> KernelProfile:
    """A profile of these kernels, one millisecond each."""
    sums = {name: kernel_profile._Sum(1, 1e-3) for name in names}
    return kernel_profile._profile("gpu", Path("trace.json"), 4, sums)


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_kernel_name_has_its_part(name: str, part: str) -> None:
    assert part_of(name) == part


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("void mul_mat_vec_q<(ggml_type)39, (int)1, (bool)0, (bool)0>(void const*)", "moe"),
        ("void mul_mat_q<(ggml_type)39, (int)64, (bool)0>(char const*)", "moe"),
        ("void mm_ids_helper<(int)4>(int const*)", "moe"),
        ("void mul_mat_vec_q<(ggml_type)8, (int)1, (bool)0, (bool)0>(void const*)", "dense"),
    ],
)
def test_experts_of_llama_cpp_are_told_by_their_type(name: str, part: str) -> None:
    assert kernel_profile.part_of(name) == part


def test_every_entry_of_the_data_file_is_reached() -> None:
    reached = {
        next((entry.id for entry in load_names().name if entry.regex.search(name)), None)
        for name, _ in [*PARTS, *EXTRA]
    }
    assert {entry.id for entry in load_names().name} - reached == set()


EXTRA = [
    ("_downcast_to_mxfp", "quantise"),
    ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<Dense>>", "dense"),
    ("triton_tem_fused_mm_0", "dense"),
    ("single_prefill_with_kv_cache", "attention"),
    ("gemm_sm120", "dense"),
    ("void soft_max_f32<true, 0, 0, __half>", "attention"),
    ("nvfp4_quantization_x", "quantise"),
]


def test_gpu_kernels_count_and_operators_beside_them_do_not(trace: Callable[..., Path]) -> None:
    path = trace(
        event("execute_context_0(0)_generation_1(1)", "user_annotation", 0, 50),
        event("execute_context_1(5)_generation_0(0)", "user_annotation", 60, 50),
        event("aten::mm", "cpu_op", 0, 1000),
        event(MARLIN, "kernel", 0, 60),
        event(MARLIN, "kernel", 100, 20),
        event(ATTENTION, "kernel", 70, 15),
        event("rms_norm_kernel", "kernel", 90, 5),
        event("Memset", "gpu_memset", 0, 1000),
    )
    seen = read_trace(path)
    assert (seen.kind, seen.steps) == ("gpu", 1)
    assert seen.seconds == pytest.approx(100e-6)
    assert seen.parts["moe"].share == pytest.approx(0.80)
    assert seen.parts["moe"].calls == 2
    assert seen.parts["attention"].share == pytest.approx(0.15)
    assert seen.parts["other"].share == pytest.approx(0.05)
    assert sum(part.share for part in seen.parts.values()) == pytest.approx(1)
    assert seen.kernels[0].name == MARLIN


def test_operators_have_their_own_time_only(trace: Callable[..., Path]) -> None:
    path = trace(
        event("aten::linear", "cpu_op", 0, 100),
        event("_C::onednn_mm", "cpu_op", 10, 80),
        event("aten::view", "cpu_op", 20, 5),
        event("aten::add", "cpu_op", 100, 10),
        event("aten::add", "cpu_op", 0, 7, tid=2),  # another thread encloses nothing
        name="w.pt.trace.json",
    )
    seen = read_trace(path)
    times = {kernel.name: kernel.seconds * 1e6 for kernel in seen.kernels}
    assert times == pytest.approx(
        {"aten::linear": 20, "_C::onednn_mm": 75, "aten::view": 5, "aten::add": 17}
    )
    assert seen.kind == "cpu"


def test_trace_is_streamed(tmp_path: Path) -> None:
    """80,000 kernels, 12 MB of text, in a few megabytes."""
    path = tmp_path / "large.pt.trace.json.gz"
    one = json.dumps(event(MARLIN, "kernel", 0, 1))
    with gzip.open(path, "wt", compresslevel=1) as stream:
        stream.write('{"traceEvents": [\n')
        stream.writelines(f"{one},\n" for _ in range(80_000))
        stream.write(f"{one}\n]}}")
    tracemalloc.start()
    try:
        seen = read_trace(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen.parts["moe"].calls == 80_001
    assert peak < 8 << 20


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"not a trace", b'{"traceEvents": []}', b'{"traceEvents": [{"ph": "X"',
     b'{"traceEvents": [{"ph": "X"}, 5, "x", null, garbage]}'],
)  # fmt: skip
def test_what_is_no_trace_is_said(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"t\.json: expected"):
        read_trace(path)
    cut = tmp_path / "t.json.gz"
    cut.write_bytes(gzip.compress(content or b"x" * 100)[:-9])
    with pytest.raises(UsageError, match="expected a Chrome trace"):
        read_trace(cut)


@pytest.mark.parametrize(
    "event",
    [
        '"cat": "cpu_op", "dur": 1, "ts": "x"',
        '"cat": "cpu_op", "dur": 1, "ts": null',
        '"cat": "cpu_op", "dur": 1, "ts": 1, "pid": [1]',
        '"cat": "kernel", "dur": ' + "9" * 5000,
        '"args": ' + "[" * 100_000 + "]" * 100_000,
    ],
    ids=["text", "null", "list", "digits", "depth"],
)
def test_event_of_another_form_is_said(tmp_path: Path, event: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(f'{{"traceEvents": [{{"ph": "X", "name": "k", {event}}}]}}')
    with pytest.raises(UsageError, match=r"t\.json: expected a Chrome trace"):
        read_trace(path)


def test_damaged_archive_is_said(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(bytes(range(256)) * 50))
    whole[12:40] = b"\xff" * 28
    path = tmp_path / "t.json.gz"
    path.write_bytes(whole)
    with pytest.raises(UsageError, match="expected a Chrome trace"):
        read_trace(path)


@pytest.mark.parametrize("took", ["NaN", "-7", "Infinity"])
def test_kernel_that_took_no_possible_time_was_there(tmp_path: Path, took: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "dur": 5},'
        f'{{"ph": "X", "cat": "kernel", "name": "b", "dur": {took}}}]}}'
    )
    seen = read_trace(path)
    assert sorted(seen.names()) == ["a", "b"]
    assert seen.seconds == pytest.approx(5e-6)


@pytest.mark.parametrize("row", ["5,nan,1,x", "5,5,1", "5,5,,x", "5,5,1," + "x" * 200_000])
def test_row_of_another_form_is_said(row: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        read_nsys(f"Time (%),Total Time (ns),Instances,Name\n{row}\n", Path("k.csv"))


NSYS = f"""Generating SQLite file report.sqlite from report.nsys-rep
Processing [report.sqlite] with [cuda_gpu_kern_sum.py]...
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
60.0,6000000,36,1,1,1,1,0.0,"{CUTLASS}"
30.0,3000000,72,1,1,1,1,0.0,"{DENSE}"
5.0,500000,72,1,1,1,1,0.0,"{QUANTISE}"
5.0,500000,36,1,1,1,1,0.0,"{ATTENTION}"

"""


def test_table_of_nsys_is_read_the_same_way(tmp_path: Path) -> None:
    file = tmp_path / "kernels.csv"
    file.write_text(NSYS)
    seen = read(file)
    assert seen.seconds == pytest.approx(0.01)
    shares = {part: time.share for part, time in seen.parts.items()}
    assert shares == pytest.approx(
        {"attention": 0.05, "moe": 0.6, "dense": 0.3, "quantise": 0.05, "other": 0}
    )
    path = KernelPath(moe="FLASHINFER_CUTLASS_MXFP4_MXFP8")
    assert kernel_contradictions(GB10, path, seen) == []


@pytest.mark.parametrize("text", ["", "SKIPPED: no CUDA kernel data", NSYS.splitlines()[2]])
def test_table_of_nsys_without_kernels_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        read_nsys(text, Path("k.csv"))


def test_nsys_that_is_missing_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotRun, match="nsys is not on PATH"):
        read(tmp_path / "report.nsys-rep")


def test_nsys_report_is_read_by_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program in its place that answers as nsys does."""
    fake = tmp_path / "nsys"
    fake.write_text(f"#!{sys.executable}\nimport sys\nassert 'cuda_gpu_kern_sum' in sys.argv\n"
                    f"print({NSYS!r})\n")  # fmt: skip
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read(tmp_path / "report.nsys-rep").parts["moe"].calls == 36
    fake.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('cannot open the report')\n")
    with pytest.raises(NotRun, match="cannot open the report"):
        read(tmp_path / "report.nsys-rep")


# ------------------------------------------------------------------------------ planted faults

CUTLASS_RAN = (CUTLASS, QUANTISE, ATTENTION, DENSE)
MARLIN_RAN = (MARLIN, ATTENTION, DENSE)
TRITON_RAN = ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1", ATTENTION, DENSE)


@pytest.mark.parametrize(
    ("moe", "names"),
    [
        ("FLASHINFER_CUTLASS_MXFP4_MXFP8", CUTLASS_RAN),
        ("MARLIN", MARLIN_RAN),
        ("BATCHED_MARLIN", MARLIN_RAN),
        ("TRITON", TRITON_RAN),
    ],
)
def test_kernels_of_the_path_pass(moe: str, names: tuple[str, ...]) -> None:
    assert kernel_contradictions(GB10, KernelPath(moe=moe), gpu(*names)) == []


@pytest.mark.parametrize(
    ("moe", "names", "expected"),
    [
        ("FLASHINFER_CUTLASS_MXFP4_MXFP8", MARLIN_RAN, "must not see a kernel .*marlin"),
        ("FLASHINFER_CUTLASS_MXFP4_MXFP8", MARLIN_RAN, "must see a kernel .*Sm120Array"),
        ("FLASHINFER_CUTLASS_MXFP4_MXFP8", (*CUTLASS_RAN, MARLIN), "must not see .*Marlin<"),
        ("FLASHINFER_CUTLASS_MXFP4_MXFP8", (CUTLASS, ATTENTION, DENSE), "must see .*quantize"),
        ("MARLIN", CUTLASS_RAN, "must not see .*Sm120Array"),
        ("TRITON", MARLIN_RAN, "must see a kernel '_matmul_ogs_"),
        ("MARLIN", (MARLIN, DENSE), "must have kernels of attention"),
        ("MARLIN", (ATTENTION, DENSE), "must have kernels of moe"),
        ("EMULATION", (DENSE, ATTENTION), "EMULATION has no rule"),
        (None, MARLIN_RAN, "no evidence shows the MoE backend"),
    ],
)
def test_kernels_of_another_path_fail(
    moe: str | None, names: tuple[str, ...], expected: str
) -> None:
    wrong = kernel_contradictions(GB10, KernelPath(moe=moe), gpu(*names))
    assert any(re.search(expected, line) for line in wrong), wrong


def test_cpu_operators_of_another_path_fail() -> None:
    right = ("_C::cpu_fused_moe", "_C::cpu_attention_with_kv_cache", "_C::onednn_mm")
    path = KernelPath(moe="CPU")
    assert kernel_contradictions(CPU, path, gpu(*right)) == []
    assert kernel_contradictions(CPU, path, gpu(*right[1:]))
    assert kernel_contradictions(CPU, path, gpu(*right, "aten::scaled_dot_product_attention"))


# ------------------------------------------------------------------------------- what is written


def test_table_shows_parts_and_kernels() -> None:
    text = table(gpu(*CUTLASS_RAN, "a|b`c"), rows=2)
    assert "| moe | 20.0% | 1.000 | 1 |" in text
    assert "4 decode steps" in text
    assert "3 more" in text
    assert all(line.count("|") < 40 for line in text.splitlines())


def test_command_prints_a_trace(
    trace: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(event(MARLIN, "kernel", 0, 60), event(ATTENTION, "kernel", 70, 20))
    assert cli.main(["path", "--trace", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["kernels"]["parts"]["moe"]["share"] == 0.75
    assert cli.main(["path", "--trace", str(path), "--table"]) == 0
    assert "| moe | 75.0% |" in capsys.readouterr().out
    assert cli.main(["path", "--trace", str(path.with_name("none.json"))]) == 4
    assert "expected a trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[[name]]\nid = "a"\npart = "colour"\nregex = "x"\nsource = "me and you"', "part"),
        ('[[name]]\nid = "a"\npart = "moe"\nregex = "("\nsource = "me and you"', "regular expr"),
        ("", "name"),
    ],
)
def test_wrong_file_of_names_is_refused(text: str, expected: str) -> None:
    with pytest.raises(DataFileError, match=expected):
        parse(text, KernelNames, "names.toml")


def test_server_without_a_profiler_is_not_run(
    fault_server: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sm121.core.server import Endpoint

    monkeypatch.setattr(profiler, "_WRITTEN_WITHIN_S", 0.5)
    server = fault_server()
    endpoint = Endpoint(server.base_url, server.key, "fault-model")
    with pytest.raises(NotRun, match=r"no /start_profile|wrote no trace|0 of 2 decode steps"):
        profile_decode(endpoint, tmp_path, steps=2)
