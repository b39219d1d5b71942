"""Lines of vLLM 0.20 to 0.32 that say which kernels decode, draft and multiply."""

from pathlib import Path

import pytest
from logs import read_lines

from sm121.core.engine_settings import KernelPathRequirement
from sm121.evidence import requirement

CORE = "(EngineCore pid=7) INFO 11-20 10:00:00 "
DTYPES = (
    CORE + "[flashinfer.py:967] FlashInfer resolved query dtypes: prefill=torch.bfloat16, "
    "decode=torch.bfloat16, decode_backend={}, kv_cache_dtype=torch.float8_e4m3fn, arch=sm121"
)


@pytest.mark.parametrize("kernel", ["xqa", "flashinfer-native", "trtllm-gen"])
def test_the_kernel_for_decode_is_a_value_that_a_profile_can_require(
    kernel: str, tmp_path: Path
) -> None:
    path = read_lines([DTYPES.format(kernel)])
    assert (path.attention, path.attention_decode) == ("FLASHINFER", kernel)
    assert f"decode_backend={kernel}" in path.evidence["attention_decode"]
    required = KernelPathRequirement(attention_decode=("xqa",), source="a test")
    log = tmp_path / "server.log"
    log.write_text(DTYPES.format(kernel) + "\n")
    wrong = requirement.contradictions(required, path, log, "mxfp4")
    assert [line.partition(":")[0] for line in wrong] == (
        [] if kernel == "xqa" else ["attention_decode"]
    )


def test_a_log_that_does_not_say_it_leaves_it_open(tmp_path: Path) -> None:
    path = read_lines([CORE + "[cuda.py:1] Using FLASHINFER attention backend."])
    assert path.attention_decode is None
    required = KernelPathRequirement(attention_decode=("xqa",), source="a test")
    assert requirement.not_shown(required, path) == ["attention_decode"]


@pytest.mark.parametrize(
    ("kernel", "native"),
    [
        ("FlashInferCuteDslNvFp4W4A16LinearKernel", False),
        ("B12xNvFp4W4A16LinearKernel", False),
        ("FlashInferCuteDslNvFp4LinearKernel", True),
        ("FlashInferMxFp4LinearKernel", True),
        ("MarlinNvFp4LinearKernel", None),
    ],
)
def test_a_kernel_with_wide_activations_is_not_native(kernel: str, native: bool | None) -> None:
    assert (
        read_lines([CORE + f"[__init__.py:1196] Using {kernel} for NVFP4 GEMM"]).native_fp4
        is native
    )


@pytest.mark.parametrize("joined", ["run multiple", "runmultiple"], ids=["0.32", "0.14"])
def test_several_tokens_of_one_layer_are_speculation_by_mtp(joined: str) -> None:
    line = (
        "(APIServer pid=1) WARNING 06-01 21:35:49 [speculative.py:722] Enabling "
        f"num_speculative_tokens > 1 will {joined} times of forward on same MTP layer,which may "
        "result in lower acceptance rate"
    )
    assert read_lines([line]).speculative == "mtp"


def test_a_downgrade_of_graphs_for_drafts_is_a_fallback() -> None:
    line = (
        CORE.replace("INFO", "WARNING") + "[compilation.py:1460] CUDAGraphMode.FULL is not "
        "supported with spec-decode for attention backend FlashInferBackend (support: "
        "AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE); setting cudagraph_mode=PIECEWISE"
    )
    path = read_lines([line])
    assert path.fallbacks == ["cudagraph_downgrade"] and path.cuda_graphs is None
