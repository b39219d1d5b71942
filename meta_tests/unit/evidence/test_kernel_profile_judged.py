"""The profiled kernels are compared with the path."""

import re

import pytest

from meta_tests.folders import ROOT
from meta_tests.unit.evidence.kernel_tables import (
    ATTENTION,
    CUTLASS,
    DENSE,
    FLASH,
    MARLIN,
    QUANTISE,
    WRITE,
    gpu,
    judged,
)
from sm121.core import profile
from sm121.evidence import kernel_profile, kernel_requirement
from sm121.evidence.kernel_names import load_names, part_of
from sm121.evidence.kernel_path import KernelPath

CPU = profile.load("cpu-tiny-gpt-oss").kernel_path

CUTLASS_RAN = (CUTLASS, QUANTISE, ATTENTION, DENSE)

#: A kernel of each attention backend, and kernels that several backends use.
OF_ATTENTION = {
    "FLASHINFER": ("ATTENTION", "kernel_mha", "fmhaSm100fKernel_QkvBfloat16OBfloat16H64PagedKv"),
    "TRITON_ATTN": ("kernel_unified_attention", "kernel_unified_attention_3d"),
    "FLASH_ATTN": ("FLASH", "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64>>()"),
    "triton": ("_fwd_grouped_kernel_stage1", "_fwd_kernel_stage1"),
}

SHARED = (WRITE, "merge_attn_states_kernel", "_copy_page_indices_kernel", "_fwd_kernel")


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
            "got a kernel of moe_marlin: void marlin",
            id="FLASHINFER_CUTLASS_MXFP4_MXFP8, MARLIN ATTENTION DENSE",
        ),
        pytest.param(
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            ("MARLIN", "ATTENTION", "DENSE"),
            "expected a kernel .*Sm120Array",
            id="FLASHINFER_CUTLASS_MXFP4_MXFP8, MARLIN ATTENTION DENSE (2)",
        ),
        pytest.param(
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            ("CUTLASS", "QUANTISE", "ATTENTION", "DENSE", "MARLIN"),
            "got a kernel of moe_marlin",
            id="FLASHINFER_CUTLASS_MXFP4_MXFP8, CUTLASS QUANTISE",
        ),
        pytest.param(
            "FLASHINFER_CUTLASS_MXFP4_MXFP8",
            ("CUTLASS", "ATTENTION", "DENSE"),
            "expected a kernel .*quantize",
            id="FLASHINFER_CUTLASS_MXFP4_MXFP8, CUTLASS ATTENTION",
        ),
        pytest.param(
            "MARLIN",
            ("CUTLASS", "QUANTISE", "ATTENTION", "DENSE"),
            "MARLIN, as in the log, got a kernel of moe_cutlass_sm120",
            id="MARLIN, CUTLASS QUANTISE ATTENTION DENSE, MARLIN, a",
        ),
        pytest.param(
            "MARLIN",
            ("CUTLASS", "QUANTISE", "ATTENTION", "DENSE"),
            "a kernel of MARLIN, as in the log, got none",
            id="MARLIN, CUTLASS QUANTISE ATTENTION DENSE, MARLIN, no",
        ),
        pytest.param(
            "MARLIN",
            ("MARLIN", "ATTENTION", "DENSE", "fused_moe_kernel"),
            "got a kernel of moe_triton_fused",
            id="MARLIN, MARLIN ATTENTION DENSE fused_moe_kernel, a",
        ),
        pytest.param(
            "TRITON",
            ("MARLIN", "ATTENTION", "DENSE"),
            "expected a kernel '_matmul_ogs_",
            id="TRITON, MARLIN ATTENTION DENSE, expected a kernel",
        ),
        pytest.param(
            "TRITON",
            ("fused_moe_kernel", "ATTENTION"),
            "expected a kernel '_matmul_ogs_",
            id="TRITON, fused_moe_kernel ATTENTION, expected a kernel",
        ),
        pytest.param(
            "MARLIN",
            ("MARLIN", "DENSE"),
            "expected kernels of attention",
            id="MARLIN, MARLIN DENSE, expected kernels of attention",
        ),
        pytest.param(
            "MARLIN",
            ("ATTENTION", "DENSE"),
            "expected kernels of moe",
            id="MARLIN, ATTENTION DENSE, expected kernels of moe",
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
    """The attention kernels of another backend contradict the log.

    On an H200, the log named FLASH_ATTN, and Triton's attention ran."""
    path = KernelPath(moe="MARLIN", attention=named)
    alike = named.lower()[:6] == ran.lower()[:6]
    required = (f"expected a kernel of {named}, as in the log, got none",
                f"expected {named}, as in the log, got a kernel of attention_")  # fmt: skip
    for name in OF_ATTENTION[ran]:
        wrong, untold = judged(path, gpu(MARLIN, name, *SHARED))
        assert untold == [] and len(wrong) == (0 if alike else 2)
        assert all(text in line for text, line in zip(required, wrong, strict=False)), wrong
        wrong, _ = judged(path, gpu(MARLIN, OF_ATTENTION[named][0], name))
        assert bool(wrong) is not alike, "one kernel of another backend is enough"


def test_real_profile_of_an_h200_passes():
    """A real profile of an H200 passes: vLLM 0.24 with FLASH_ATTN and Marlin, from docs/evidence,
    with truncated names."""
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
    paths = []
    for each in loaded:
        paths.extend((each.kernel_path, *map(each.path_of, each.configurations)))
    pairs = set()
    for path in paths:
        for part in ("attention", "moe"):
            for backend in getattr(path, part) or ():
                pairs.add((part, backend))
    assert ("attention", "FLASH_ATTN") in pairs
    for part, backend in pairs:
        assert [e for e in load_names().name if e.part == part and e.belongs_to(backend)], backend


def test_cpu_operators_of_another_path_fail():
    right = ("_C::cpu_fused_moe", "_C::cpu_attention_with_kv_cache", "_C::onednn_mm")
    path = KernelPath(moe="CPU", attention="CPU_ATTN")
    assert judged(path, gpu(*right, "vllm::moe_forward"), CPU) == ([], [])
    for names in (right[1:], (right[0], right[2]), (*right, "aten::scaled_dot_product_attention")):
        assert kernel_requirement.kernel_contradictions(CPU, path, gpu(*names))


def test_table_shows_parts_and_kernels():
    text = kernel_profile.table(gpu(*CUTLASS_RAN, "a|b`c"), rows=2)
    assert "| moe | 20.0% | 1.000 | 1 |" in text
    assert "4 decode steps" in text
    assert "3 more" in text
    for line in text.splitlines():
        assert line.count("|") < 40
