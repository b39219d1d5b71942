"""Kernels of a GB10 with short names, their traces and tables, and the decisions on them."""

import csv
from pathlib import Path

from meta_tests.folders import DATA
from meta_tests.logs import lines_of
from sm121.core import profile
from sm121.evidence import kernel_requirement
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.kernel_profile import KernelProfile, Launches, build_profile
from sm121.evidence.profile_files import read_profile

GB10 = profile.load("sm121-gpt-oss-120b").kernel_path

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


def gpu(*names: str) -> KernelProfile:
    """Return a profile of a GPU. `names` are names of kernels, or keys of `KERNELS`."""
    launches = [Launches(KERNELS.get(name, name), 1, 1e-3) for name in names]
    return build_profile("gpu", Path("trace.json"), 4, launches)


def judged(path: KernelPath, run: KernelProfile, required=GB10, layers: int | None = None):
    return (
        kernel_requirement.kernel_contradictions(required, path, run, layers),
        kernel_requirement.undecided_by_kernels(required, path, run, layers),
    )


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


ALL = ["qkv", "o", "lm_head"]
