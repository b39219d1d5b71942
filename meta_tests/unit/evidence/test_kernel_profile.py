"""Kernel names of a profile: read, classified, and compared with what the path claims."""

import csv
import gzip
import json
import math
import re
import tracemalloc
from collections.abc import Callable
from operator import add, mod, mul
from pathlib import Path

import pytest

from meta_tests.fakes.servers import executable
from meta_tests.folders import DATA, ROOT
from meta_tests.logs import lines_of
from meta_tests.texts import text_file
from sm121 import cli
from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.core.server import Endpoint
from sm121.core.verdict import NotRun
from sm121.evidence import kernel_profile, kernel_requirement, profiler
from sm121.evidence.kernel_names import load_names, part_of
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.kernel_profile import KernelProfile, Launches, build_profile
from sm121.evidence.kernel_proof import moe_variant, requantised, with_kernels
from sm121.evidence.kernel_trace import read_trace
from sm121.evidence.nsys import read_nsys
from sm121.evidence.profile_files import read_profile
from sm121.evidence.profiler import profile_decode

GB10 = profile.load("sm121-gpt-oss-120b").kernel_path
CPU = profile.load("cpu-tiny-gpt-oss").kernel_path

KERNELS = {
    "MARLIN": (
        "void marlin_moe_wna16::Marlin<__nv_bfloat16, 1125899906909960l, 256, 1, 8, 8>(int4 const*)"
    ),
    "CUTLASS": (
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::ge"
        "mm::GroupProblemShape<cute::tuple<long, long, long>>, "
        "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm120ArrayTm"
        "aWarpSpecializedBlockScaled<2, 2>, cutlass::float_e2m1_t>>>"
    ),
    "QUANTISE": (
        "void tensorrt_llm::kernels::quantize_with_block_size<(tensorrt_llm::BlockSca"
        "leQuantizationType)2, __nv_bfloat16, 32, true>(int, int, int, int, "
        "__nv_bfloat16 const*, float const*)"
    ),
    "ATTENTION": (
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits"
        "<(flashinfer::MaskMode)1, 16u, 1u, 1u, 4u, 4u>>(flashinfer::PagedParams)"
    ),
    "DENSE": (
        "std::enable_if<true, void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float>"
    ),
    "DENSE_MARLIN": (
        "void marlin::Marlin<(long)1125899906909960, (long)562949953487106>(int4 const*)"
    ),
    "WRITE": "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char>(int)",
    "FLASH": (
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdS"
        "m90<flash::CollectiveMainloopFwdSm90<2>>>>(flash::Params)"
    ),
    "BF16": "nvjet_sm121_tst_8x64_64x16_4x1_v_bz_bias_TNN",
}
MARLIN, CUTLASS, QUANTISE, ATTENTION, DENSE, DENSE_MARLIN, WRITE, FLASH, BF16 = KERNELS.values()
GATED = KERNELS["GATED"] = CUTLASS.replace("BlockScaled<2, 2>", "BlockScaledGated<2, 1>")

NAMES: dict[str, list[str]] = lines_of("kernel-names.toml")


def event(name: str, category: str, start: float, took: float, tid: int = 1) -> dict:
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": tid, "ts": start,
            "dur": took, "args": {"External id": 1}}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., Path]:
    def write(*events: dict, name: str = "w.pt.trace.json.gz") -> Path:
        text = json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "x"}, indent=2)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


def gpu(*names: str) -> KernelProfile:
    """`names`: of kernels, or keys of `KERNELS`."""
    launches = [Launches(KERNELS.get(name, name), 1, 1e-3) for name in names]
    return build_profile("gpu", Path("trace.json"), 4, launches)


NO_SHARES = dict.fromkeys(("attention", "moe", "dense", "quantise", "other"), 0)


def shares_of(profiled: KernelProfile) -> dict[str, float]:
    return {part: time.share for part, time in profiled.parts.items()}


@pytest.mark.parametrize(
    ("name", "part"),
    [(name, part) for part, names in NAMES.items() for name in names]
    + [
        *(
            ("void mul_mat_vec_q<(ggml_type)39, (int)1, (bool)0, (bool)0>(void const*)", "moe"),
            ("void mul_mat_q<(ggml_type)39, (int)64, (bool)0>(char const*)", "moe"),
            ("void mm_ids_helper<(int)4>(int const*)", "moe"),
            ("void mul_mat_vec_q<(ggml_type)8, (int)1, (bool)0, (bool)0>(void const*)", "dense"),
        )
    ],
)
def test_kernel_name_has_its_part(name, part):
    assert part_of(name) == part


def test_every_entry_of_the_data_file_is_reached():
    reached = {
        next((entry.id for entry in load_names().name if entry.regex.search(name)), None)
        for names in NAMES.values()
        for name in names
    }
    assert {entry.id for entry in load_names().name} - reached == set()


def test_gpu_kernels_count_and_operators_beside_them_do_not(trace):
    path = trace(
        event("execute_context_0(0)_generation_1(1)", "user_annotation", 0, 50),
        event("execute_context_1(5)_generation_0(0)", "user_annotation", 60, 50),
        event("aten::mm", "cpu_op", 0, 1000), event(MARLIN, "kernel", 0, 60),
        event(MARLIN, "kernel", 100, 20), event(ATTENTION, "kernel", 70, 15),
        event("rms_norm_kernel", "kernel", 90, 5), event("Memset", "gpu_memset", 0, 1000),
    )  # fmt: skip
    profiled = read_trace(path)
    assert (profiled.kind, profiled.steps) == ("gpu", 1)
    assert profiled.seconds == pytest.approx(100e-6)
    expected = NO_SHARES | {"moe": 0.8, "attention": 0.15, "other": 0.05}
    assert shares_of(profiled) == pytest.approx(expected)
    assert profiled.parts["moe"].calls == 2 and profiled.kernels[0].name == MARLIN


def test_operators_have_their_own_time_only(trace):
    times = {"aten::linear": (0, 100), "_C::onednn_mm": (10, 80), "aten::view": (20, 5)}
    events = [event(name, "cpu_op", *time) for name, time in times.items()]
    # Another thread encloses nothing.
    events += [event("aten::add", "cpu_op", 100, 10), event("aten::add", "cpu_op", 0, 7, tid=2)]
    profiled = read_trace(trace(*events, name="w.pt.trace.json"))
    own_times = {kernel.name: kernel.seconds * 1e6 for kernel in profiled.kernels}
    expected = {"aten::linear": 20, "_C::onednn_mm": 75, "aten::view": 5, "aten::add": 17}
    assert own_times == pytest.approx(expected) and profiled.kind == "cpu"


def test_trace_is_streamed(tmp_path):
    """80,000 kernels, 12 MB of text, in a few megabytes."""
    path = tmp_path / "large.pt.trace.json.gz"
    one = json.dumps(event(MARLIN, "kernel", 0, 1))
    with gzip.open(path, "wt", compresslevel=1) as stream:
        stream.write('{"traceEvents": [\n')
        stream.writelines(f"{one},\n" for _ in range(80_000))
        stream.write(f"{one}\n]}}")
    tracemalloc.start()
    try:
        profiled = read_trace(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert profiled.parts["moe"].calls == 80_001
    assert peak < 8 << 20


@pytest.mark.parametrize(
    ("content", "of_whole"),
    [
        ("", None),
        ("{}", None),
        ("not a trace", None),
        ('{"traceEvents": []}', "kernels or operators"),
        ('{"traceEvents": [{"ph": "X"', None),
        pytest.param(
            '{"traceEvents": [{"ph": "X"}, 5, "x", null, garbage]}',
            None,
            id='{"traceEvents": ({"ph": "X"}, 5, "x", null, garbage)}',
        ),
        # events of another form
        pytest.param(
            ('{"traceEvents": [{"ph": "X", "name": "k", "cat": "cpu_op", "dur": 1, "ts": "x"}]}'),
            None,
            id="text",
        ),
        pytest.param(
            ('{"traceEvents": [{"ph": "X", "name": "k", "cat": "cpu_op", "dur": 1, "ts": null}]}'),
            None,
            id="null",
        ),
        pytest.param(
            (
                '{"traceEvents": [{"ph": "X", "name": "k", "cat": "cpu_op", "dur": 1, '
                '"ts": 1, "pid": [1]}]}'
            ),
            None,
            id="list",
        ),
        pytest.param(
            mod(
                '{"traceEvents": [{"ph": "X", "name": "k", "cat": "kernel", "dur": %s}]}',
                mul("9", 5000),
            ),
            None,
            id="digits",
        ),
        pytest.param(
            mod(
                '{"traceEvents": [{"ph": "X", "name": "k", "args": %s}]}',
                add(mul("[", 100000), mul("]", 100000)),
            ),
            None,
            id="depth",
        ),
    ],
)
def test_what_is_no_trace_is_said(tmp_path, content, of_whole):
    whole, cut, damaged = (tmp_path / name for name in ("t.json", "cut.json.gz", "bad.json.gz"))
    whole.write_text(content)
    cut.write_bytes(gzip.compress(content.encode() or b"x" * 100)[:-9])
    packed = bytearray(gzip.compress(bytes(range(256)) * 50))
    packed[12:40] = b"\xff" * 28
    damaged.write_bytes(packed)
    for path in (whole, cut, damaged):
        expected = (path == whole and of_whole) or "a Chrome trace"
        with pytest.raises(UsageError, match=rf"{path.name}: expected {expected}"):
            read_trace(path)


@pytest.mark.parametrize("took", [math.nan, -7, math.inf])
def test_kernel_that_took_no_possible_time_was_there(trace, took):
    profiled = read_trace(trace(event("a", "kernel", 0, 5), event("b", "kernel", 0, took)))
    assert sorted(profiled.names()) == ["a", "b"]
    assert profiled.seconds == pytest.approx(5e-6)


@pytest.mark.parametrize("row", ["5,nan,1,x", "5,5,1", "5,5,,x", "5,5,1," + "x" * 200_000])
def test_row_of_another_form_is_said(row):
    with pytest.raises(UsageError, match="expected"):
        read_nsys(f"Time (%),Total Time (ns),Instances,Name\n{row}\n", Path("k.csv"))


NSYS = text_file("nsys.csv").format(
    CUTLASS=CUTLASS, DENSE=DENSE, QUANTISE=QUANTISE, ATTENTION=ATTENTION
)


def test_table_of_nsys_is_read_the_same_way(tmp_path):
    file = tmp_path / "kernels.csv"
    file.write_text(NSYS)
    profiled = read_profile(file)
    assert profiled.seconds == pytest.approx(0.01)
    shares = {"attention": 0.05, "moe": 0.6, "dense": 0.3, "quantise": 0.05}
    assert shares_of(profiled) == pytest.approx(NO_SHARES | shares)
    assert kernel_requirement.kernel_contradictions(GB10, REAL, profiled) == []


@pytest.mark.parametrize("text", ["", "SKIPPED: no CUDA kernel data", NSYS.splitlines()[2]])
def test_table_of_nsys_without_kernels_is_refused(text):
    with pytest.raises(UsageError, match="expected"):
        read_nsys(text, Path("k.csv"))


def test_nsys_that_is_missing_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotRun, match="nsys is not on PATH"):
        read_profile(tmp_path / "report.nsys-rep")


def test_nsys_report_is_read_by_nsys(tmp_path, monkeypatch):
    """With a program in its place that answers as nsys does."""
    (tmp_path / "table.csv").write_text(NSYS)
    prints = f"exec /bin/cat {tmp_path / 'table.csv'}"
    executable(tmp_path / "nsys", f'case "$*" in *cuda_gpu_kern_sum*) {prints};; esac; exit 1')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_profile(tmp_path / "report.nsys-rep").parts["moe"].calls == 36
    executable(tmp_path / "nsys", "echo cannot open the report >&2; exit 1")
    with pytest.raises(NotRun, match="cannot open the report"):
        read_profile(tmp_path / "report.nsys-rep")


# ------------------------------------------------------------------------------ planted faults

CUTLASS_RAN = (CUTLASS, QUANTISE, ATTENTION, DENSE)
#: A kernel of each attention backend, and those that several use.
OF_ATTENTION = {
    "FLASHINFER": ("ATTENTION", "kernel_mha", "fmhaSm100fKernel_QkvBfloat16OBfloat16H64PagedKv"),
    "TRITON_ATTN": ("kernel_unified_attention", "kernel_unified_attention_3d"),
    "FLASH_ATTN": ("FLASH", "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64>>()"),
    "triton": ("_fwd_grouped_kernel_stage1", "_fwd_kernel_stage1"),
}
SHARED = (WRITE, "merge_attn_states_kernel", "_copy_page_indices_kernel", "_fwd_kernel")


def judged(path: KernelPath, run: KernelProfile, required=GB10, layers: int | None = None):
    return (
        kernel_requirement.kernel_contradictions(required, path, run, layers),
        kernel_requirement.untold_of_kernels(required, path, run, layers),
    )


@pytest.mark.parametrize(
    ("moe", "names"),
    [
        pytest.param(
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            ("CUTLASS", "QUANTISE", "ATTENTION", "DENSE"),
            id="FLASHINFER_CUTLASS_MXFP4_MXFP8, CUTLASS QUANTISE",
        ),
        pytest.param(
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            ("CUTLASS", "QUANTISE", "ATTENTION", "DENSE", "DENSE_MARLIN"),
            id="FLASHINFER_CUTLASS_MXFP4_MXFP8, CUTLASS QUANTISE (2)",
        ),
        pytest.param(
            "MARLIN", ("MARLIN", "ATTENTION", "DENSE"), id="MARLIN, MARLIN ATTENTION DENSE"
        ),
        pytest.param(
            "BATCHED_MARLIN",
            ("MARLIN", "ATTENTION", "DENSE"),
            id="BATCHED_MARLIN, MARLIN ATTENTION DENSE",
        ),
        pytest.param(
            "TRITON",
            ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1", "ATTENTION", "DENSE"),
            id="TRITON, _matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1",
        ),
    ],
)
def test_kernels_of_the_path_pass(moe, names):
    assert judged(KernelPath(moe=moe, attention="FLASHINFER"), gpu(*names)) == ([], [])


@pytest.mark.parametrize(
    ("moe", "names", "expected"),
    [
        pytest.param(
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            ("MARLIN", "ATTENTION", "DENSE"),
            "a kernel of moe_marlin ran: void marlin",
            id="FLASHINFER_CUTLASS_MXFP4_MXFP8, MARLIN ATTENTION DENSE",
        ),
        pytest.param(
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            ("MARLIN", "ATTENTION", "DENSE"),
            "must see a kernel .*Sm120Array",
            id="FLASHINFER_CUTLASS_MXFP4_MXFP8, MARLIN ATTENTION DENSE (2)",
        ),
        pytest.param(
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            ("CUTLASS", "QUANTISE", "ATTENTION", "DENSE", "MARLIN"),
            "a kernel of moe_marlin ran",
            id="FLASHINFER_CUTLASS_MXFP4_MXFP8, CUTLASS QUANTISE",
        ),
        pytest.param(
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            ("CUTLASS", "ATTENTION", "DENSE"),
            "must see .*quantize",
            id="FLASHINFER_CUTLASS_MXFP4_MXFP8, CUTLASS ATTENTION",
        ),
        pytest.param(
            "MARLIN",
            ("CUTLASS", "QUANTISE", "ATTENTION", "DENSE"),
            "MARLIN, a kernel of moe_cutlass_sm120 ran",
            id="MARLIN, CUTLASS QUANTISE ATTENTION DENSE, MARLIN, a",
        ),
        pytest.param(
            "MARLIN",
            ("CUTLASS", "QUANTISE", "ATTENTION", "DENSE"),
            "MARLIN, no kernel of it ran",
            id="MARLIN, CUTLASS QUANTISE ATTENTION DENSE, MARLIN, no",
        ),
        pytest.param(
            "MARLIN",
            ("MARLIN", "ATTENTION", "DENSE", "fused_moe_kernel"),
            "a kernel of moe_triton_fused ran",
            id="MARLIN, MARLIN ATTENTION DENSE fused_moe_kernel, a",
        ),
        pytest.param(
            "TRITON",
            ("MARLIN", "ATTENTION", "DENSE"),
            "must see a kernel '_matmul_ogs_",
            id="TRITON, MARLIN ATTENTION DENSE, must see a kernel",
        ),
        pytest.param(
            "TRITON",
            ("fused_moe_kernel", "ATTENTION"),
            "must see a kernel '_matmul_ogs_",
            id="TRITON, fused_moe_kernel ATTENTION, must see a kernel",
        ),
        pytest.param(
            "MARLIN",
            ("MARLIN", "DENSE"),
            "must have kernels of attention",
            id="MARLIN, MARLIN DENSE, must have kernels of attention",
        ),
        pytest.param(
            "MARLIN",
            ("ATTENTION", "DENSE"),
            "must have kernels of moe",
            id="MARLIN, ATTENTION DENSE, must have kernels of moe",
        ),
        pytest.param(
            "EMULATION",
            ("DENSE", "ATTENTION"),
            "no kernel of the moe backend EMULATION is known",
            id="EMULATION, DENSE ATTENTION, no kernel of the moe",
        ),
        pytest.param(
            None,
            ("MARLIN", "ATTENTION", "DENSE"),
            "no evidence shows the moe backend",
            id="MARLIN ATTENTION DENSE, no evidence shows the moe",
        ),
    ],
)
def test_kernels_of_another_path_fail(moe, names, expected):
    wrong, untold = judged(KernelPath(moe=moe, attention="FLASHINFER"), gpu(*names))
    assert any(re.search(expected, line) for line in wrong), wrong
    assert untold == []


@pytest.mark.parametrize("named", OF_ATTENTION)
@pytest.mark.parametrize("ran", OF_ATTENTION)
def test_attention_of_another_backend_contradicts(named, ran):
    """On an H200 the log said FLASH_ATTN, and Triton's attention ran."""
    path = KernelPath(moe="MARLIN", attention=named)
    alike = named.lower()[:6] == ran.lower()[:6]
    required = (f"the log says {named}, no kernel of it ran",
                f"the log says {named}, a kernel of attention_")  # fmt: skip
    for name in OF_ATTENTION[ran]:
        wrong, untold = judged(path, gpu(MARLIN, name, *SHARED))
        assert untold == [] and len(wrong) == (0 if alike else 2)
        assert all(text in line for text, line in zip(required, wrong, strict=False)), wrong
        wrong, _ = judged(path, gpu(MARLIN, OF_ATTENTION[named][0], name))
        assert bool(wrong) is not alike, "one kernel of another backend is enough"


def test_real_profile_of_an_h200_passes():
    """vLLM 0.24 with FLASH_ATTN and Marlin, as docs/evidence keeps it: names are cut there too."""
    log = (ROOT / "docs" / "evidence" / "h200-server.log").read_text()
    rows = re.findall(r"^(attention|moe|dense) (\d+) 0\.\d+ (.+)$", log, re.M)
    assert len(rows) == 8
    assert [part_of(name) for *_, name in rows] == [part for part, *_ in rows]
    profiled = gpu(*(name for *_, name in rows))
    assert judged(KernelPath(moe="MARLIN", attention="FLASH_ATTN"), profiled) == ([], [])
    for other in ({"attention": "TRITON_ATTN"}, {"moe": "TRITON"}):
        path = KernelPath(**({"moe": "MARLIN", "attention": "FLASH_ATTN"} | other))
        assert len(judged(path, profiled)[0]) == 1


def test_drafter_may_have_another_attention():
    path = KernelPath(moe="MARLIN", attention="TRITON_ATTN", speculative="eagle3")
    assert judged(path, gpu(MARLIN, "kernel_unified_attention", FLASH)) == ([], [])
    wrong, _ = judged(path, gpu(MARLIN, FLASH))
    assert len(wrong) == 1


def test_every_backend_that_a_profile_names_has_kernels():
    loaded = [profile.load(name) for name in profile.shipped()]
    paths = [
        path
        for each in loaded
        for path in (each.kernel_path, *map(each.path_of, each.configurations))
    ]
    pairs = {(part, backend) for path in paths for part in ("attention", "moe")
             for backend in getattr(path, part) or ()}  # fmt: skip
    assert ("attention", "FLASH_ATTN") in pairs
    for part, backend in pairs:
        assert [e for e in load_names().name if e.part == part and e.belongs_to(backend)], backend


def test_cpu_operators_of_another_path_fail():
    right = ("_C::cpu_fused_moe", "_C::cpu_attention_with_kv_cache", "_C::onednn_mm")
    path = KernelPath(moe="CPU", attention="CPU_ATTN")
    assert judged(path, gpu(*right, "vllm::moe_forward"), CPU) == ([], [])
    for names in (right[1:], (right[0], right[2]), (*right, "aten::scaled_dot_product_attention")):
        assert kernel_requirement.kernel_contradictions(CPU, path, gpu(*names))


# ------------------------------------------------------------- real tables of a GB10, cut names

TABLES_OF_GB10 = DATA / "gb10"
REAL = KernelPath(moe="FLASHINFER_CUTLASS_MXFP4_MXFP8", attention="FLASHINFER")
TABLES = ("unfused", "fused")


def real(name: str) -> KernelProfile:
    return read_profile(TABLES_OF_GB10 / f"{name}_0804_kernels.csv")


def as_printed(file: Path, prefix: str = "") -> str:
    _, *rows = csv.reader(file.read_text().splitlines())
    head = ("Time (%)", "Total Time (ns)", "Instances", "Avg (ns)", "Name")
    body = [(r[0], f"{int(r[1]):,}", f"{int(r[2]):,}", f"{float(r[3]):,.1f}", r[8]) for r in rows]
    wide = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    rule = ["-" * width for width in wide]
    cells = [[*map(str.rjust, row[:4], wide), row[4].ljust(wide[4])] for row in (rule, *body)]
    title = "  ".join(map(str.center, head, wide))
    table = [f" {title}", *(" " + "  ".join(row) for row in cells)]
    other = " ".join(("100.0", "5".rjust(wide[1] + 2), "7".rjust(wide[2] + 2), "[CUDA memset]"))
    return "\n".join(
        prefix + line
        for line in (
            "INFO 02-09 07:47:42 [wrapper.py:64] Profiler stopped successfully.",
            "Generating '/tmp/nsys-report-6fcf.qdstrm'",
            "[5/8] Executing 'cuda_api_sum' stats report",
            "", "[6/8] Executing 'cuda_gpu_kern_sum' stats report", "", *table, "",
            "[7/8] Executing 'cuda_gpu_mem_time_sum' stats report", "", other,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        pytest.param(
            "unfused",
            {"moe": 0.71, "dense": 0.166, "attention": 0.074, "quantise": 0.005},
            id="unfused, moe 0.71 dense 0.166 attention 0.074 quantise",
        ),
        pytest.param(
            "fused",
            {"moe": 0.909, "dense": 0.053, "attention": 0.023, "quantise": 0.002},
            id="fused, moe 0.909 dense 0.053 attention 0.023 quantise",
        ),
    ],
)
def test_real_tables_have_their_shares(name, shares):
    profiled = real(name)
    for part, share in shares.items():
        assert profiled.parts[part].share == pytest.approx(share, abs=0.003), part
    other = {row.name for row in profiled.kernels if row.part == "other"}
    assert all(row.name in other for row in profiled.kernels if "triton_" in row.name)
    assert not any("compute" in name for name in other)


@pytest.mark.parametrize("prefix", ["", "vllm-1  | "])
@pytest.mark.parametrize("name", TABLES)
def test_printed_table_of_a_log_is_the_same_table(tmp_path, name, prefix):
    log = tmp_path / "server_profiled.log"
    log.write_text(as_printed(TABLES_OF_GB10 / f"{name}_0804_kernels.csv", prefix) + "\n")
    printed, table = read_profile(log), real(name)
    calls, expected = ([(k.name, k.calls) for k in each.kernels] for each in (printed, table))
    assert calls == expected and printed.parts == table.parts
    grouped = [calls for kernel, calls in expected if "GroupProblemShape" in kernel]
    assert name != "unfused" or grouped == [216, 4536], "rows of one cut name stay rows"


WHOLE = [name for names in NAMES.values() for name in names]


@pytest.mark.parametrize("name", [*WHOLE, FLASH, DENSE_MARLIN, WRITE, GATED])
def test_cut_name_is_never_of_another_part(name):
    for at in range(60, min(len(name), 120)):
        for end in ("…", "..."):
            assert part_of(name[:at] + end) in (part_of(name), "other"), name[:at]


@pytest.mark.parametrize("table", TABLES)
def test_cut_rows_of_real_tables_are_never_of_another_part(table):
    for row in real(table).kernels:
        for at in range(60, 99):
            assert part_of(row.name.rstrip("…")[:at] + "…") in (row.part, "other")


@pytest.mark.parametrize("name", TABLES)
def test_cut_names_are_untold_and_contradict_nothing(name):
    wrong, untold = judged(REAL, real(name), layers=36)
    assert wrong == []
    assert any(re.search(r"Sm120Array.*cannot be told, \d+ names are cut", line) for line in untold)
    path = KernelPath(moe="MARLIN", attention="TRITON_ATTN")
    wrong, _ = judged(path, real(name))
    assert len(wrong) == (3 if name == "fused" else 2), "what the names still tell contradicts"


# ------------------------------------------------------- layers beyond the checkpoint, the variant


def decoded(marlin: dict[str, int], steps: int | None = 16, layers: int = 36) -> KernelProfile:
    times = layers * (steps or 16)
    rows = {CUTLASS: 2 * times, QUANTISE: times, ATTENTION: times, WRITE: times, DENSE: times}
    rows |= {KERNELS.get(name, name): calls * (steps or 16) for name, calls in marlin.items()}
    launches = [Launches(name, calls, calls * 1e-5) for name, calls in rows.items()]
    return build_profile("gpu", Path("t.json"), steps, launches)


ALL = ["qkv", "o", "lm_head"]


@pytest.mark.parametrize(
    ("calls", "proven"),
    [
        pytest.param(
            {"DENSE_MARLIN": 73}, ("qkv", "o", "lm_head"), id="DENSE_MARLIN 73, qkv o lm_head"
        ),
        pytest.param(
            {
                "DENSE_MARLIN": 37,
                (
                    "void marlin::Marlin<(long)1125899906909960, (long)562949953487106>(int4 "
                    "const*)2"
                ): 36,
            },
            ("qkv", "o", "lm_head"),
            id="DENSE_MARLIN 37 void",
        ),
        pytest.param(
            {"DENSE_MARLIN": 72, "BF16": 1}, ("qkv", "o"), id="DENSE_MARLIN 72 BF16 1, qkv o"
        ),
        pytest.param(
            {"DENSE_MARLIN": 1, "BF16": 72}, ("lm_head",), id="DENSE_MARLIN 1 BF16 72, lm_head"
        ),
        pytest.param({"BF16": 73}, (), id="BF16 73"),
        pytest.param({"DENSE_MARLIN": 36, "BF16": 37}, None, id="DENSE_MARLIN 36 BF16 37"),
        pytest.param({"DENSE_MARLIN": 37, "BF16": 36}, None, id="DENSE_MARLIN 37 BF16 36"),
        pytest.param({"DENSE_MARLIN": 71}, None, id="DENSE_MARLIN 71"),
        pytest.param(
            {"void cutlass_scaled_mm_fp8<...>": 73}, None, id="void cutlass_scaled_mm_fp8<...> 73"
        ),
        pytest.param(
            {"BF16": 36, "void cutlass_scaled_mm_fp8<...>": 37},
            None,
            id="BF16 36 void cutlass_scaled_mm_fp8<...> 37",
        ),
        pytest.param({}, None, id="nothing"),
    ],
)
def test_calls_a_token_prove_the_layers(calls, proven):
    proven = None if proven is None else [*proven]
    assert requantised(decoded(calls), 36) == proven
    assert requantised(decoded({n: c * 24 // 36 for n, c in calls.items()}, layers=24), 36) is None
    unmarked = decoded(calls, steps=None)
    if proven not in (None, []):
        assert requantised(unmarked, 36) is None, "prefill may be in it"
    assert requantised(unmarked.model_copy(update={"decoding": True}), 36) == proven


def test_prefill_among_marked_steps_proves_nothing():
    profiled = decoded({DENSE_MARLIN: 73})
    assert requantised(profiled.model_copy(update={"steps": 8}), 36) is None


@pytest.mark.parametrize("name", TABLES)
def test_real_tables_prove_the_layers(name):
    path = with_kernels(KernelPath(requantised=["lm_head"]), real(name), 36)
    assert path.requantised == ALL
    assert "calls of dense Marlin in 66 passes of 36 layers" in path.evidence["requantised"]
    assert path.also == {}
    assert with_kernels(KernelPath(), real(name), None).requantised is None
    wrong = with_kernels(KernelPath(requantised=["router"]), real(name), 36)
    assert wrong.also == {"requantised": ["router"]}


# A kernel of each attention backend; those above by their name there.
@pytest.mark.parametrize(
    ("dropped", "proven"),
    [
        # prefill's rows alone
        pytest.param((2298, 2232), None, id="2298 2232"),
        # qkv or o: nobody knows which
        pytest.param((2232,), None, id="2232"),
        # Names as a GPU showed them.
        pytest.param((), ("qkv", "o", "lm_head"), id="qkv o lm_head"),
    ],
)
def test_real_table_with_fewer_layers_quantised(dropped, proven):
    fused = real("fused")
    rows = [k for k in fused.kernels if not ("marlin::" in k.name and k.calls in dropped)]
    layers = requantised(fused.model_copy(update={"kernels": rows}), 36)
    assert layers == (proven and [*proven])


def test_real_table_without_lm_head():
    unfused = real("unfused")
    rows = [k.model_copy(update={"calls": 2232}) if k.calls == 2298 else k for k in unfused.kernels]
    assert requantised(unfused.model_copy(update={"kernels": rows}), 36) == ["qkv", "o"]
    for number, row in enumerate(rows):  # prefill
        if row.calls == 2232 and row.part == "attention":
            rows[number] = row.model_copy(update={"seconds": 100.0})
    assert requantised(unfused.model_copy(update={"kernels": rows}), 36) is None


def test_variant_is_named_by_whole_names_and_helpers():
    assert moe_variant(gpu(MARLIN, ATTENTION)) is None
    assert moe_variant(real("fused")) == "fused"
    assert moe_variant(real("unfused")) is None, "Gated may be in what was cut"
    for logged, other, ran in (("unfused", GATED, "fused"), ("fused", ATTENTION, "unfused")):
        profiled = gpu(CUTLASS, other)
        assert moe_variant(profiled) == ran
        path = with_kernels(KernelPath(moe_variant=logged), profiled, 36)
        assert (path.moe_variant, path.also) == (ran, {"moe_variant": [logged]})
        assert with_kernels(KernelPath(moe_variant=ran), profiled, 36).also == {}


MXFP4 = GB10.model_copy(update={"requantised": tuple(ALL), "moe_variant": ("unfused",)})


@pytest.mark.parametrize(
    ("calls", "wrong", "untold"),
    [
        pytest.param({"DENSE_MARLIN": 73}, "", "", id="DENSE_MARLIN 73"),
        pytest.param(
            {"DENSE_MARLIN": 72, "BF16": 1},
            "requantised: required qkv, o, lm_head, seen .*1152 calls",
            "",
            id="DENSE_MARLIN 72 BF16 1, requantised: required qkv, o",
        ),
        pytest.param(
            {"BF16": 73},
            "requantised: .*0 calls of dense Marlin in 16 passes.*no layer",
            "",
            id="BF16 73, requantised: .*0 calls of dense Marlin in 16",
        ),
        pytest.param(
            {"DENSE_MARLIN": 36, "BF16": 37},
            "",
            "requantised: .*do not tell",
            id="DENSE_MARLIN 36 BF16 37, requantised: .*do not tell",
        ),
        pytest.param(
            {"DENSE_MARLIN": 73, "GATED": 36},
            "moe_variant: required unfused, seen .*BlockScaledGated",
            "",
            id="DENSE_MARLIN 73 GATED 36, moe_variant: required",
        ),
    ],
)
def test_configuration_is_held_to_layers_and_variant(calls, wrong, untold):
    judgement = judged(REAL, decoded(calls), MXFP4, 36)
    for lines, expected in zip(judgement, (wrong, untold), strict=True):
        assert bool(lines) is bool(expected), lines
        assert all(re.search(expected, line) for line in lines), lines


# ------------------------------------------------------------------------------- what is written


def test_table_shows_parts_and_kernels():
    text = kernel_profile.table(gpu(*CUTLASS_RAN, "a|b`c"), rows=2)
    assert "| moe | 20.0% | 1.000 | 1 |" in text
    assert "4 decode steps" in text
    assert "3 more" in text
    assert all(line.count("|") < 40 for line in text.splitlines())


def test_command_prints_a_trace(trace, capsys):
    path = trace(event(MARLIN, "kernel", 0, 60), event(ATTENTION, "kernel", 70, 20))
    assert cli.main(["path", "--trace", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["kernels"]["parts"]["moe"]["share"] == 0.75
    assert cli.main(["path", "--trace", str(path), "--table"]) == 0
    assert "| moe | 75.0% |" in capsys.readouterr().out


def test_command_names_variant_layers_and_what_the_log_says_wrongly(tmp_path, capsys):
    log, table = tmp_path / "server.log", tmp_path / "profiled.log"
    line = "INFO 02-09 07:05:01 [cuda.py:345] Using AttentionBackendEnum.FLASH_ATTN backend."
    log.write_text(f"{line}\n")
    table.write_text(as_printed(TABLES_OF_GB10 / "fused_0804_kernels.csv"))
    for logs, contradictions in (([], 0), ([str(log)], 1)):
        assert cli.main(["path", *logs, "--trace", str(table), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["moe_variant"], answer["requantised"]) == ("fused", ALL)
        assert "computeStridesGemm2Only" in answer["evidence"]["moe_variant"]
        assert "5034 calls of dense Marlin" in answer["evidence"]["requantised"]
        assert len(answer["contradictions"]) == contradictions, answer["contradictions"]


def test_server_without_a_profiler_is_not_run(fault_server, tmp_path, monkeypatch):
    monkeypatch.setattr(profiler, "_WRITTEN_WITHIN_S", 0.5)
    server = fault_server()
    endpoint = Endpoint(server.base_url, server.key, "fault-model")
    with pytest.raises(NotRun, match=r"no /start_profile|wrote no trace|0 of 2 decode steps"):
        profile_decode(endpoint, tmp_path, steps=2)
