"""Remedies that were tried without a GPU (docs/evidence/remedies-tried.md): each failure as
observed, and what helped."""

import pytest

from sm121.evidence.failure import classify_lines

LINKER = [
    "FAILED: [code=1] /h/.cache/flashinfer/0.7.2.post1/121a/cached_ops/page/page.so",
    "/usr/bin/ld: cannot find -lcudart: No such file or directory",
    "/usr/bin/ld: cannot find -lcuda: No such file or directory",
    "collect2: error: ld returned 1 exit status",
    "ninja: build stopped: subcommand failed.",
]
CUTE_DSL = [
    "error: PTX assembly failed",
    "  error: ptxas rejected the PTX generated for this kernel while compiling it to SASS.",
    "  note: ptxas log:",
    "        ptxas application ptx input, line 21; error   : Instruction 'tcgen05.fence' not "
    "supported on",
    "        .target 'sm_121a'",
    "        ptxas fatal   : Ptx assembly aborted due to errors",
]
PTXAS = "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"
SELECTED = (
    "ValueError: Selected backend AttentionBackendEnum.{} is not valid for this configuration. "
)
NO_BACKEND = (
    "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig("
    "head_size=64, dtype=torch.bfloat16, kv_cache_dtype={}, block_size={}, has_sink=True). "
    "Reasons: {{FLASH_ATTN: [attention sinks not supported], FLASHINFER: [{}], TRITON_ATTN: [{}]}}."
)
NO_SINKS = "attention sinks not supported"
NO_NVFP4 = "fa2 prefill misreads an NVFP4 KV cache at head_size 64"
NO_CACHE = "kv_cache_dtype not supported"
NO_BLOCK = "block_size not supported"
SKEW = "flashinfer-cubin version (0.6.13) does not match flashinfer version (0.6.18)."


@pytest.mark.parametrize(
    ("lines", "kind", "helped"),
    [
        pytest.param(
            [
                "torch._inductor.exc.InductorError: ImportError: "
                "/tmp/torchinductor_root/ab/cabxyz.main.so: file too short"
            ],
            "jit_build",
            "delete the folder of the .so in the line (for example /tmp/torchinductor_USER), ",
            id="a library of which a crash left a part",
        ),
        pytest.param(
            ["AssertionError: Torch not compiled with CUDA enabled"],
            "import_error",
            "/whl/cu130",
            id="torch for the CPU",
        ),
        pytest.param(
            ["OSError: libc10_cuda.so: cannot open shared object file: No such file or directory"],
            "import_error",
            "/whl/cu130",
            id="an extension beside torch for the CPU",
        ),
        pytest.param(
            [
                "ValueError: Type 'ffi.Tensor' already has a registered class (<class "
                "'tvm_ffi.core.Tensor'>); re-registering it with the larger wrapper class <class "
                "'tvm.runtime._tensor.Tensor'> is not supported."
            ],
            "import_error",
            "apache-tvm-ffi",
            id="TVM FFI of another release, by Python",
        ),
        pytest.param(LINKER, "jit_build", "CUDA_HOME", id="a library is not found"),
        pytest.param(
            [
                "ptxas k.ptx, line 4; error   : Instruction 'cvt with .e2m1x2' not supported on "
                ".target 'sm_121'",
                "ptxas fatal   : Ptx assembly aborted due to errors",
            ],
            "unsupported_arch",
            "FLASHINFER_CUDA_ARCH_LIST=12.1a",
            id="a target without its suffix",
        ),
        pytest.param(
            [
                "RuntimeError: FlashInfer requires GPUs with sm75 or higher. Detected "
                "TARGET_CUDA_ARCHS=[]."
            ],
            "config",
            "nvidia-smi",
            id="FlashInfer sees no GPU",
        ),
        pytest.param(
            ["FileNotFoundError: [Errno 2] No such file or directory: '/nonexistent/bin/nvcc'"],
            "jit_build",
            "set CUDA_HOME",
            id="no nvcc, by its path",
        ),
        pytest.param(
            [
                "RuntimeError: nvcc not found and PyTorch is not built with CUDA support. Could "
                "not determine CUDA version."
            ],
            "jit_build",
            "set CUDA_HOME",
            id="no nvcc, in FlashInfer's words",
        ),
        pytest.param(CUTE_DSL, "jit_build", "nvidia-cutlass-dsl", id="CuTe DSL 4.8"),
        pytest.param(
            [
                "ptxas k.ptx, line 4; error   : Instruction 'tcgen05.fence' not supported on "
                ".target 'sm_121a'",
                "ptxas fatal   : Ptx assembly aborted due to errors",
            ],
            "unsupported_arch",
            "TRITON_ATTN",
            id="an instruction of another GPU",
        ),
        pytest.param(
            ["RuntimeError: Triton only support CUDA 10.0 or higher, but got CUDA version: 13.0"],
            "unsupported_arch",
            "CUDA 12.9",
            id="a ptxas that is too new for Triton",
        ),
        pytest.param([PTXAS], "unsupported_arch", "Triton 3.4", id="ptxas alone"),
        pytest.param(
            ["PTXASError: PTXAS error: PTX codegen error: sm_121a"],
            "unsupported_arch",
            "Triton 3.4",
            id="Triton's ptxas",
        ),
        pytest.param(
            ["RuntimeError: " + SKEW], "import_error", "uv pip install pip", id="cubin, by uv"
        ),
        pytest.param(
            [
                "Cubin download failed: [Errno 2] No such file or directory: "
                "'/h/.cache/flashinfer/cubins/158f/fmha/trtllm-gen/checksums.txt'"
            ],
            "no_kernel",
            "run flashinfer download-cubin ",
            id="kernels without a network",
        ),
        pytest.param(
            [NO_BACKEND.format("nvfp4", None, f"{NO_SINKS}, {NO_NVFP4}", NO_CACHE)],
            "config",
            "--kv-cache-dtype auto",
            id="no backend for this cache",
        ),
        pytest.param(
            [SELECTED.format("TRITON_ATTN") + f"Reason: ['{NO_CACHE}']"],
            "config",
            "--kv-cache-dtype auto",
            id="TRITON_ATTN for a cache that it does not read",
        ),
        pytest.param(
            [SELECTED.format("FLASHINFER") + f"Reason: ['{NO_SINKS}', '{NO_NVFP4}']"],
            "config",
            "--kv-cache-dtype auto",
            id="FLASHINFER for a cache that it does not read",
        ),
        pytest.param(
            [NO_BACKEND.format("auto", 8, f"{NO_BLOCK}, {NO_SINKS}", NO_BLOCK)],
            "config",
            "omit --block-size",
            id="no backend for these blocks",
        ),
        pytest.param(
            [SELECTED.format("TRITON_ATTN") + f"Reason: ['{NO_BLOCK}']"],
            "config",
            "omit --block-size",
            id="TRITON_ATTN for these blocks",
        ),
        pytest.param(
            [SELECTED.format("FLASHINFER") + f"Reason: ['{NO_SINKS}']"],
            "config",
            "use TRITON_ATTN",
            id="FLASHINFER without sinks",
        ),
        pytest.param(
            ["ValueError: Unknown attention backend: 'NO_SUCH'. Valid options are: FLASH_ATTN"],
            "config",
            "in the message",
            id="an attention backend that does not exist",
        ),
        pytest.param(
            [
                "FAILED: k0.o ",
                "virtual memory exhausted: Cannot allocate memory",
                "ninja: build stopped: subcommand failed.",
            ],
            "oom",
            "MAX_JOBS",
            id="gcc has no memory",
        ),
        pytest.param(
            [
                "ptxas fatal   : Memory allocation failure",
                "ptxas fatal   : Ptx assembly aborted due to errors",
            ],
            "oom",
            "MAX_JOBS",
            id="ptxas has no memory",
        ),
        pytest.param(
            ["/usr/include/x.h(104): catastrophic error: out of memory"],
            "oom",
            "MAX_JOBS",
            id="cudafe++ has no memory",
        ),
        pytest.param(
            [
                "ValueError: To serve at least one request with the model's max seq len (131072), "
                "(0.25 GiB KV cache is needed, which is larger than the available KV cache memory "
                "(0.05 GiB)."
            ],
            "oom",
            "--num-gpu-blocks-override",
            id="a KV cache whose size an argument sets",
        ),
        pytest.param(
            [
                "ValueError: Available memory on node 0 (19.43/23.54 GiB) on startup is less than "
                "desired CPU memory utilization (0.92, 21.66 GiB)."
            ],
            "oom",
            "VLLM_CPU_KVCACHE_SPACE",
            id="the host's memory is not free",
        ),
        pytest.param(
            [
                "ValueError: VLLM_PORT 'tcp://10.96.12.7:8000' appears to be a URI. This may be "
                "caused by a Kubernetes service discovery issue"
            ],
            "config",
            "unset VLLM_PORT",
            id="VLLM_PORT is a URI",
        ),
    ],
)
def test_remedy_names_what_helped(lines: list[str], kind: str, helped: str) -> None:
    cause = classify_lines(lines, 1)
    assert cause.kind == kind
    assert helped in (cause.remedy or "")


def test_the_remedy_for_tvm_ffi_skew_avoids_force_reinstall() -> None:
    """The remedy for different versions of tvm-ffi does not contain `--force-reinstall`.

    This option also replaced cuda-bindings by a release that broke cuda-python."""
    line = "  what():  TypeAttr `__ffi_repr__` is already registered for type index 130."
    remedy = classify_lines([line], 1).remedy or ""
    assert "nvidia-cutlass-dsl[cu13]" in remedy
    assert "without --force-reinstall" in remedy


def test_missing_library_is_named() -> None:
    assert "libcudart" in classify_lines(LINKER, 1).summary
