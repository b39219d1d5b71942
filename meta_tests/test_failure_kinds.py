"""Failures of owners' GB10s that had no name: each by its kind, in several of its wordings, and the
healthy line beside it."""

import pytest
from logs import read_lines

from sm121.evidence.failure import classify_lines

ENGINE = "(EngineCore_DP0 pid=9) ERROR 11-20 10:19:39 [core.py:868] "
LAUNCHER = "(APIServer pid=3) ERROR 06-10 15:50:56 [registry.py:961] "
PTX = "ptxas application ptx input, line 706; error   : Unexpected instruction types for 'cvt'"
NINJA = "subprocess.CalledProcessError: Command '['ninja', '-v', '-C', '/c/cached_ops']' "
SELECTOR = (
    "No valid attention backend found for cuda with AttentionSelectorConfig(head_size=64, "
    "dtype=torch.bfloat16, kv_cache_dtype=fp8_e4m3, block_size=None, has_sink=True). "
    "Reasons: {FLASH_ATTN: [sink not supported]}."
)


def row(identity: str, kind: str, *lines: str) -> object:
    return pytest.param(kind, lines, id=identity)


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        row("ninja alone", "jit_build", ENGINE + NINJA + "returned non-zero exit status 1."),
        row("ninja, bare", "jit_build", NINJA + "returned non-zero exit status 255."),
        row(
            "nvcc alone",
            "jit_build",
            "subprocess.CalledProcessError: Command '['/usr/local/cuda/bin/nvcc', '-c']' "
            "returned non-zero exit status 2.",
        ),
        row("ninja is killed", "oom", ENGINE + NINJA + "died with <Signals.SIGKILL: 9>."),
        row("ninja's child is killed", "oom", NINJA + "returned non-zero exit status 137."),
        row(
            "Triton without its reason",
            "jit_build",
            ENGINE
            + "triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error",
        ),
        row(
            "Triton on one line",
            "unsupported_arch",
            "triton.runtime.errors.PTXASError: PTXAS error: PTX codegen error: sm_121a",
        ),
        row("Triton before 3.4", "jit_build", "RuntimeError: `ptxas` failed with error code 255:"),
        row("CuTe DSL's log alone", "jit_build", "[rank0]: " + PTX),
        row(
            "CuTe DSL, parsing",
            "jit_build",
            "ptxas application ptx input, line 47; fatal : Parsing",
        ),
        row(
            "CuTe DSL, code alone",
            "jit_build",
            ENGINE + "error: unknown: NVPTX compiler invocation failed with error code: 4",
        ),
        row(
            "FlashInfer's decode",
            "kernel_launch",
            ENGINE + "RuntimeError: BatchDecodeWithPagedKVCache failed with error invalid argument",
        ),
        row(
            "FlashInfer's MLA, with a colon",
            "kernel_launch",
            ENGINE + "RuntimeError: BatchMLAPagedAttention failed with error: invalid argument",
        ),
        row(
            "FlashInfer's error on a second line",
            "kernel_launch",
            ENGINE + "tvm.error.InternalError: Check failed: (status == cudaSuccess) is false:",
            ENGINE + "  BatchPrefillWithPagedKVCache failed with error invalid resource handle",
        ),
        row(
            "FlashInfer's illegal access on a second line",
            "illegal_memory_access",
            ENGINE + "tvm.error.InternalError: Check failed: (status == cudaSuccess) is false:",
            ENGINE + "  SinglePrefillWithKVCache failed with error an illegal memory access was "
            "encountered",
        ),
        row(
            "torch's handle",
            "kernel_launch",
            ENGINE + "torch.AcceleratorError: CUDA error: invalid resource handle",
        ),
        row(
            "no device function",
            "unsupported_arch",
            ENGINE + "RuntimeError: CUDA error: invalid device function",
        ),
        row(
            "cuDNN, 715",
            "illegal_instruction",
            ENGINE + 'RuntimeError: cuDNN SDPA failed ["CUDNN_BACKEND_API_FAILED"]: err 715 != '
            "CUDA_SUCCESS CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER",
        ),
        row(
            "cuDNN, 700",
            "illegal_memory_access",
            ENGINE + "RuntimeError: CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER err 700",
        ),
        row(
            "cuDNN, no number",
            "device_assert",
            ENGINE + "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUBLAS",
        ),
        row(
            "cuDNN's memory",
            "oom",
            ENGINE + "RuntimeError: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        ),
        row(
            "cuDNN's architecture",
            "unsupported_arch",
            ENGINE + "RuntimeError: cuDNN error: CUDNN_STATUS_ARCH_MISMATCH",
        ),
        row(
            "TRT-LLM-gen's attention",
            "unsupported_arch",
            ENGINE + "tvm.error.InternalError: Error in function 'TllmGenFmhaRunner' at "
            "/x/fmhaRunner.cuh:37: Unsupported architecture",
        ),
        row(
            "another runner of FlashInfer",
            "unsupported_arch",
            ENGINE + "RuntimeError: Error in function 'getRunner' at /x/runner.cu:9: SM 121 is not "
            "supported on this device",
        ),
        row("a number alone", "unsupported_arch", ENGINE + "RuntimeError: CUDA driver error: 222"),
        row(
            "803, by torch",
            "config",
            ENGINE + "torch.AcceleratorError: CUDA error: system has unsupported display driver / "
            "cuda driver combination",
        ),
        row(
            "804",
            "config",
            ENGINE + "RuntimeError: CUDA error 804: forward compatibility was attempted",
        ),
        row(
            "jit-cache of another release",
            "import_error",
            "RuntimeError: flashinfer-jit-cache version (0.6.13+cu130) does not match flashinfer "
            "version (0.6.14). Please install the same version of both packages.",
        ),
        row(
            "tvm-ffi behind a prefix",
            "import_error",
            LAUNCHER + "terminate called after throwing an instance of 'tvm::ffi::Error'",
            LAUNCHER
            + "  what():  TypeAttr `__ffi_repr__` is already registered for type index 130.",
            LAUNCHER + "Fatal Python error: Aborted",
        ),
        row(
            "torchaudio",
            "import_error",
            "RuntimeError: operator torchaudio::forced_align does not exist",
        ),
        row("a leading blank", "config", " " + SELECTOR),
        row("a leading blank behind a prefix", "config", ENGINE + " " + SELECTOR),
    ],
)
def test_failure_has_its_kind_and_a_remedy(kind: str, lines: tuple[str, ...]) -> None:
    cause = classify_lines(lines, 1)
    assert cause.kind == kind == read_lines(lines).failure
    assert len(cause.owner) > 10
    assert len(cause.remedy or "") > 20


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("INFO 11-20 10:19:39 [a.py:1] request 715: error rate 0.0", id="a number"),
        pytest.param(
            "INFO 11-20 10:19:39 [a.py:1] Unsupported architecture of a drafter", id="INFO"
        ),
        pytest.param(
            "[Autotuner]: Skipping tactic: ptxas application ptx input, line 3; error : no",
            id="tuning",
        ),
        pytest.param(
            ENGINE + '    raise RuntimeError("ptxas application ptx input")', id="a frame"
        ),
    ],
)
def test_what_only_looks_like_one_is_none(line: str) -> None:
    assert read_lines([line]).failure is None


def test_a_dtype_that_an_error_quotes_is_not_the_path() -> None:
    for prefix in (" ", ENGINE + " ", ENGINE + "ValueError: "):
        path = read_lines([prefix + SELECTOR])
        assert (path.kv_cache_dtype, path.dtype, path.failure) == (None, None, "config")


def test_the_configuration_line_still_shows_them() -> None:
    line = (
        "(EngineCore_DP0 pid=9) INFO 11-20 10:19:39 [core.py:96] Initializing a V1 LLM engine "
        "(v0.28.0) with config: model='m', speculative_config=None, dtype=torch.bfloat16, "
        "kv_cache_dtype=fp8_e4m3, structured_outputs_config=StructuredOutputsConfig(backend='auto')"
    )
    path = read_lines([line])
    assert (path.kv_cache_dtype, path.dtype) == ("fp8_e4m3", "bfloat16")


@pytest.mark.parametrize("kind", ["attention_needs_network", "config_attention"])
def test_advice_names_no_package_that_ends_before_the_release(kind: str) -> None:
    from sm121.engines.preflight import load_preflight
    from sm121.evidence.failure import load_failures

    rows = (*load_preflight().rule, *load_failures().failure)
    remedy = next(each.remedy for each in rows if each.id == kind)
    assert "flashinfer-cubin" not in remedy
    assert "vllm download-kernels" in remedy and "flashinfer download-kernels" in remedy
