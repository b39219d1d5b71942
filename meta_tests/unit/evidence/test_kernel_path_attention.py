"""Lines of vLLM 0.20 to 0.32 about the kernels for decode, drafts and matrix products."""

from pathlib import Path

import pytest

from meta_tests.folders import DATA
from meta_tests.logs import read_lines
from sm121.core import profile
from sm121.core.engine_settings import KernelPathRequirement
from sm121.core.verdict import NotRun
from sm121.evidence import requirement
from sm121.evidence.kernel_path import KernelPath, read_log
from sm121.kernels import cases, serving
from sm121.kernels.under_test import Kernels
from sm121.run import served
from sm121.run.engine_report import EngineReport
from sm121.run.merge import merge_shards
from sm121.run.shard_report import ShardReport
from sm121.run.verdict_file import VerdictFile

GB10_LOGS = DATA / "gb10"
DECODE = ("decode_attention", "decode_attention_fp8")

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
    parts = [each.part for each in wrong]
    assert parts == ([] if kernel == "xqa" else ["attention_decode"])


def test_a_log_without_the_decode_kernel_proves_none(tmp_path: Path) -> None:
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


# Which provider tests it


def judging(path: KernelPath, operation: str, arch: str = "sm121") -> serving.ProviderChoice:
    (choice,) = serving.choices("vllm", arch, path, operation)
    return choice


@pytest.mark.parametrize("operation", DECODE)
@pytest.mark.parametrize("log", ["unfused_0804_clean", "fused_0804_clean", "eugr_version"])
def test_fa2_judges_the_decode_of_the_build_with_52_tok_s(log: str, operation: str) -> None:
    path = read_log(GB10_LOGS / f"{log}.log")
    assert judging(path, operation).provider == "flashinfer-fa2"
    assert judging(path, operation.replace("decode", "prefill")).provider == "flashinfer"


@pytest.mark.parametrize("operation", DECODE)
@pytest.mark.parametrize(
    ("kernel", "provider"),
    [("xqa", "flashinfer"), ("trtllm-gen", "flashinfer"), ("flashinfer-native", "flashinfer-fa2")],
)
def test_the_kernel_that_a_release_names_decides_who_judges(
    kernel: str, provider: str, operation: str
) -> None:
    assert judging(read_lines([DTYPES.format(kernel)]), operation).provider == provider


@pytest.mark.parametrize("kernel", [None, "cutlass-mla"], ids=["not shown", "a new one"])
@pytest.mark.parametrize("operation", DECODE)
def test_an_unknown_kernel_for_decode_is_not_run(kernel: str | None, operation: str) -> None:
    path = KernelPath(attention="FLASHINFER", attention_decode=kernel, kv_cache_dtype="fp8")
    choice = judging(path, operation)
    kernels = Kernels({operation: choice}, lambda _name: pytest.fail("must not be started"))
    (case,) = cases.GROUPS["decode_fp8" if operation.endswith("fp8") else "decode"][:1]
    with pytest.raises(NotRun, match="nothing shows a known one of them; --kernel-provider"):
        kernels.faults(case)
    assert judging(path, operation.replace("decode", "prefill")).provider == "flashinfer"


@pytest.mark.parametrize(("attention", "provider"), [("TRITON_ATTN", "vllm"), ("FLASH_ATTN", None)])
def test_other_attention_needs_no_kernel_for_decode(attention: str, provider: str | None) -> None:
    assert judging(KernelPath(attention=attention), "decode_attention").provider == provider


def test_layers_that_decode_by_two_kernels_have_two_judges() -> None:
    path = KernelPath(
        attention="FLASHINFER",
        attention_decode="xqa",
        also={"attention_decode": ["flashinfer-native"]},
    )
    choices = serving.choices("vllm", "sm121", path, "decode_attention")
    assert [choice.provider for choice in choices] == ["flashinfer", "flashinfer-fa2"]
    assert len(serving.choices("vllm", "sm121", path, "prefill_attention")) == 1


@pytest.mark.parametrize(
    ("configuration", "identity", "provider"),
    [
        pytest.param("mxfp4", "0.14.0+mxfp4", "flashinfer-fa2", id="the build with 52 tok/s"),
        pytest.param("cutlass", "0.33.0", "flashinfer", id="a release"),
    ],
)
def test_before_a_server_ran_the_profile_says_which_kernel_decodes(
    configuration: str, identity: str, provider: str
) -> None:
    judged = profile.load("sm121-gpt-oss-120b").judging(configuration, identity)
    path = served.expected(judged.path_of(configuration), None)
    assert judging(path, "decode_attention").provider == provider


def test_shards_keep_the_kernel_that_was_expected() -> None:
    path = KernelPath(attention="FLASHINFER", attention_decode="flashinfer-native")
    parts = {}
    for index in (1, 2):
        engine = EngineReport(name="vllm", managed=True, model="m")
        file = VerdictFile(arch="sm121", profile="p", started="now", engine=engine)
        file.engine.served = served.list_tested_kernels(file, path)
        file.shard = ShardReport(index=index, of=2, tests=[])
        parts[f"shards/{index}"] = file
    judged = {kernel.operation: kernel for kernel in merge_shards(parts).engine.served}
    assert judged["decode_attention"].provider == "flashinfer-fa2"
    assert judged["decode_attention"].attention_decode == "flashinfer-native"
    assert judged["prefill_attention"].attention_decode is None
