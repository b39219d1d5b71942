"""Failures of owners' GB10s: each has its kind, in several wordings, beside a similar healthy
line."""

import pytest

from meta_tests.logs import read_lines
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
        row(
            "libtvm_ffi",
            "import_error",
            "ImportError: /v/lib/python3.12/site-packages/cutlass/_mlir/lib/libtvm_ffi.so: "
            "undefined symbol: TVMFFIEnvGetStream",
        ),
        row(
            "torchvision's extension",
            "import_error",
            "ImportError: /v/torchvision/_C.so: undefined symbol: _ZN3c106detailE",
        ),
        row(
            "docker before CUDA",
            "config",
            "docker: Error response from daemon: nvidia-container-cli: requirement error: "
            "unsatisfied condition: cuda>=13.0, please update your driver to a newer version",
        ),
        *(
            row(f"cuBLAS, {status}", kind, f"RuntimeError: CUDA error: CUBLAS_STATUS_{status} when")
            for status, kind in (
                ("NOT_SUPPORTED", "kernel_launch"),
                ("INVALID_VALUE", "kernel_launch"),
                ("NOT_INITIALIZED", "kernel_launch"),
                ("EXECUTION_FAILED", "device_assert"),
                ("ALLOC_FAILED", "oom"),
            )
        ),
        row(
            "TensorRT-LLM's attention",
            "no_kernel",
            "[11/20/2026-10:00:01] [TRT-LLM] [I] Using LLM with PyTorch backend",
            "[11/20/2026-10:00:30] [TRT-LLM] [E] FMHA kernels are not found (/s/dispatcher.cpp:3)",
            "RuntimeError: Executor worker returned error",
        ),
        row(
            "TensorRT-LLM's CUDA call",
            "kernel_launch",
            "[TensorRT-LLM][ERROR] CUDA runtime error in ::cudaLaunchKernelExC(): invalid value",
        ),
        row(
            "TensorRT-LLM's memory",
            "oom",
            "[TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMalloc(): out of memory (/s/x.h:2)",
        ),
        row("a leading blank", "config", " " + SELECTOR),
        row("a leading blank behind a prefix", "config", ENGINE + " " + SELECTOR),
    ],
)
def test_failure_has_its_kind_and_a_remedy(kind: str, lines: tuple[str, ...]) -> None:
    cause = classify_lines(lines, 1)
    assert cause.kind == kind == read_lines(lines).failure
    assert len(cause.owner) > 10
    assert cause.owner != "engine core"
    assert len(cause.remedy or "") > 20


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("apache-tvm-ffi", "ImportError: /v/libtvm_ffi.so: undefined symbol: TVMFFIEnvGetStream"),
        ("torchvision", "ImportError: /v/torchvision/_C.so: undefined symbol: _ZN3c106detailE"),
        ("torchaudio", "OSError: /v/torchaudio/lib/libtorchaudio.so: undefined symbol: _ZN3c10E"),
        ("built for another torch", "ImportError: /v/vllm/_C.abi3.so: undefined symbol: _ZN3c10E"),
    ],
)
def test_missing_symbol_names_the_package(package: str, line: str) -> None:
    cause = classify_lines([line], 1)
    assert cause.kind == "import_error"
    assert package in (cause.remedy or "")


@pytest.mark.parametrize(
    ("needed", "command"),
    [
        ("0.6.14", "then flashinfer download-cubin "),
        ("0.6.16.post1", "then flashinfer download-cubin "),
        ("0.6.17", "then flashinfer download-kernels (before "),
        ("0.7.0", "then flashinfer download-kernels (before "),
    ],
)
def test_skew_names_the_command_of_the_release(needed: str, command: str) -> None:
    line = (
        "RuntimeError: flashinfer-cubin version (0.6.13) does not match flashinfer version "
        f"({needed})."
    )
    remedy = classify_lines([line], 1).remedy or ""
    assert remedy.startswith("pip uninstall flashinfer-cubin ")
    assert command in remedy


@pytest.mark.parametrize("prefix", ["", "RuntimeError: NVPTX compiler invocation failed, log: "])
@pytest.mark.parametrize(
    ("feature", "target", "helps"),
    [
        ("cvt with .e2m1x2", "sm_121", True),
        ("cvt with .e2m1x2", "sm_120", True),
        ("cvt with .e2m1x2", "sm_121a", False),
        ("tcgen05", "sm_120a", False),
        ("tcgen05", "sm_120f", False),
        ("tcgen05.alloc", "sm_121", False),
        ("wgmma.fence", "sm_121", False),
    ],
)
def test_the_remedy_adds_the_missing_architecture_suffix(
    feature: str, target: str, helps: bool, prefix: str
) -> None:
    """The remedy adds the missing suffix of the architecture.

    No target of SM12x has tcgen05 or wgmma, so no suffix helps for those."""
    line = (
        f"{prefix}ptxas application ptx input, line 4; error   : Feature '{feature}' not supported "
        f"on .target '{target}'"
    )
    for text in (line, line.replace("application ptx input", "/tmp/k.ptx")):
        remedy = classify_lines([text], 1).remedy or ""
        assert ("FLASHINFER_CUDA_ARCH_LIST" in remedy) is helps
        assert helps or "TRITON_ATTN" in remedy


def test_the_last_line_of_ptxas_hides_no_cause_of_cute_dsl() -> None:
    engine = "(EngineCore_DP0 pid=233) ERROR 10-03 14:22:09 [core.py:1101] "
    lines = [
        f"{engine}RuntimeError: NVPTX compiler invocation failed, error log:",
        f"{engine}ptxas application ptx input, line 6; error   : Unknown modifier '.x'",
        f"{engine}ptxas fatal   : Ptx assembly aborted due to errors",
    ]
    cause = classify_lines(lines, 1)
    assert "CuTe DSL" in cause.summary and "nvidia-cutlass-dsl" in (cause.remedy or "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param(
            "AttributeError: module 'flashinfer' has no attribute 'mxfp4_quantize'",
            "the engine and flashinfer-python",
            id="a-function-that-flashinfer-lacks",
        ),
        pytest.param(
            "ImportError: cannot import name 'xqa_batch_decode' from 'flashinfer.decode' (/x)",
            "the engine and flashinfer-python",
            id="an-import-that-flashinfer-lacks",
        ),
        pytest.param(
            "RuntimeError: from_dlpack received an invalid capsule. Note that DLTensor capsules "
            "can be consumed only once",
            "apache-tvm-ffi",
            id="tvm-ffi-before-0.1.11",
        ),
        pytest.param(
            "RuntimeError: Couldn't load custom C++ ops. This can happen if your PyTorch and "
            "torchvision versions are incompatible",
            "torchvision",
            id="torchvision-in-its-own-words",
        ),
        pytest.param(
            "RuntimeError: Failed to fetch the cubin artifact index https://x after 4 attempts",
            "no network",
            id="index-of-the-downloaded-kernels",
        ),
        pytest.param(
            "RuntimeError: CUDA error: API call is not supported in the installed CUDA driver",
            "driver",
            id="driver-older-than-the-call",
        ),
        pytest.param(
            "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up "
            "environment, e.g. changing env variable CUDA_VISIBLE_DEVICES after program start.",
            "not visible",
            id="gpu-not-visible",
        ),
    ],
)
def test_start_failure_names_the_part_of_the_installation(line: str, said: str) -> None:
    prefix = "(EngineCore pid=60) ERROR 07-12 01:09:15 [core.py:708] "
    cause = classify_lines([f"{prefix}EngineCore failed to start.", prefix + line], 1)
    assert said in cause.owner and cause.remedy


@pytest.mark.parametrize(
    "package",
    [
        "flashinfer-cubin package (cubins will be downloaded on demand to /h): flashinfer-cubin",
        "flashinfer-jit-cache package (kernels will be JIT-compiled instead): flashinfer-jit-cache",
        "flashinfer jit-cache provider flashinfer-jit-cache-cu130: flashinfer-jit-cache-cu130",
    ],
)
def test_ignored_kernel_package_is_a_fallback(package) -> None:
    """An ignored package of kernels is a fallback. The lines are those of FlashInfer 0.7.4."""
    line = (
        f"(EngineCore pid=8) Ignoring incompatible {package} version (0.6.13) does not match "
        "flashinfer version (0.7.4). Run `flashinfer download-kernels` to install matching kernel "
        "wheels, or set FLASHINFER_DISABLE_VERSION_CHECK=1 to use the installed version anyway."
    )
    start = "(APIServer pid=1) INFO 11-20 10:00:01 [utils.py:293] vLLM API server version 0.32.0"
    path = read_lines([start, line])
    assert path.fallbacks == ["flashinfer_package_ignored"]
    assert path.failure is None
    assert read_lines([start]).fallbacks == []


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
        pytest.param(
            "[Autotuner]: Skipping tactic: CUBLAS_STATUS_NOT_SUPPORTED when calling", id="a tactic"
        ),
        pytest.param(
            "[11/20/2026-10:00:30] [TRT-LLM] [W] FMHA kernels are not found, unfused is used",
            id="TensorRT-LLM's warning",
        ),
    ],
)
def test_lines_that_resemble_a_failure_are_none(line: str) -> None:
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
    from sm121.evidence.failure_tables import load_failures

    rows = (*load_preflight().rule, *load_failures().failure)
    remedy = next(each.remedy for each in rows if each.id == kind)
    assert "flashinfer-cubin" not in remedy
    for command in ("vllm download-kernels", "flashinfer download-kernels"):
        assert command in remedy
    assert "flashinfer download-cubin" in remedy  # FlashInfer 0.6.14 to 0.6.16
