"""Failures of GB10 owners in the wording of neighbouring releases: each has its kind, its owner and
a remedy. `test_failure_kinds.py` has the original lines."""

import pytest

from meta_tests.logs import read_lines
from sm121.evidence.failure import classify_lines

ENGINE = "(EngineCore_DP0 pid=9) ERROR 11-20 10:19:39 [core.py:868] "
WORKER = "(Worker_TP0 pid=12) ERROR 09-02 08:11:02 [multiproc_executor.py:772] "


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        pytest.param(
            "jit_build",
            [
                "subprocess.CalledProcessError: Command '['/usr/local/bin/ninja', '-v',"
                " '-j', '4']' returned non-zero exit status 1."
            ],
            id="ninja 1",
        ),
        pytest.param(
            "jit_build",
            [
                WORKER + "RuntimeError: Ninja build failed. Ninja output:",
                WORKER + "ninja: error: loading 'build.ninja': No such file or directory",
            ],
            id="ninja 2",
        ),
        pytest.param(
            "jit_build",
            [
                ENGINE + "RuntimeError: Error building extension 'fused_moe_120': [1/9] /usr/loc"
                "al/cuda/bin/nvcc -ccbin g++"
            ],
            id="ninja 3",
        ),
        pytest.param(
            "jit_build",
            [ENGINE + "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"],
            id="ninja 4",
        ),
        pytest.param(
            "jit_build",
            [
                ENGINE + "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cu"
                "da' doesn't exist"
            ],
            id="ninja 5",
        ),
        pytest.param(
            "unsupported_arch",
            [
                "triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error",
                "`ptxas` stderr:",
                "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
            ],
            id="ptxas 1",
        ),
        pytest.param(
            "unsupported_arch",
            [
                ENGINE + "RuntimeError: Internal Triton PTX codegen error: ",
                "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
            ],
            id="ptxas 2",
        ),
        pytest.param(
            "unsupported_arch",
            [WORKER + "nvcc fatal   : Unsupported gpu architecture 'compute_121a'"],
            id="ptxas 3",
        ),
        pytest.param(
            "jit_build",
            [
                WORKER + "torch._inductor.exc.InductorError: PTXASError: PTXAS error: Internal T"
                "riton PTX codegen error"
            ],
            id="ptxas 4",
        ),
        pytest.param(
            "jit_build",
            [
                ENGINE + "cutlass.base_dsl.common.DSLRuntimeError: 💥💥💥 Error during runtime code"
                " generation for function `kernel` 💥💥💥"
            ],
            id="cute 1",
        ),
        pytest.param(
            "unsupported_arch",
            [
                ENGINE + "cutlass.cutlass_dsl.cutlass.DSLCudaRuntimeError: CUDA_ERROR_NO_BINARY_"
                "FOR_GPU (error code: 209)"
            ],
            id="cute 2",
        ),
        pytest.param(
            "jit_build",
            [
                ENGINE + "cutlass._mlir._mlir_libs._site_initialize.<locals>.MLIRError: Failure "
                "while executing pass pipeline: error: unknown: LLVM ERROR: Cannot sele"
                "ct: intrinsic %llvm.nvvm.tcgen05.ld"
            ],
            id="cute 3",
        ),
        pytest.param(
            "jit_build",
            [
                ENGINE + "cutlass.base_dsl.runtime.cuda.DSLCudaVerNotImplemented: CUDA DSL requi"
                "res CUDA version 12.9 or later"
            ],
            id="cute 4",
        ),
        pytest.param(
            "unsupported_arch",
            [
                ENGINE + "OpError: expects arch to be one of [Arch.sm_100a, Arch.sm_100f], but g"
                "ot Arch.sm_121a"
            ],
            id="cute 5",
        ),
        pytest.param(
            "kernel_launch",
            [
                WORKER + "RuntimeError: BatchPrefillWithRaggedKVCache failed with error invalid "
                "configuration argument"
            ],
            id="handle 1",
        ),
        pytest.param(
            "kernel_launch",
            [
                WORKER + "RuntimeError: BatchAttentionWithPagedKVCache failed with error: too ma"
                "ny resources requested for launch"
            ],
            id="handle 2",
        ),
        pytest.param(
            "kernel_launch",
            [WORKER + "RuntimeError: Failed to set maxDynamicSharedMemorySize: invalid argument"],
            id="handle 3",
        ),
        pytest.param(
            "kernel_launch",
            [WORKER + "RuntimeError: Triton Error [CUDA]: invalid resource handle"],
            id="handle 4",
        ),
        pytest.param(
            "kernel_launch",
            [WORKER + "RuntimeError: CUDA error (csrc/x.cu:88): invalid resource handle"],
            id="handle 5",
        ),
        pytest.param(
            "illegal_instruction",
            [
                ENGINE + "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER",
                "an illegal instruction was encountered",
            ],
            id="cudnn 1",
        ),
        pytest.param(
            "no_kernel",
            [
                ENGINE + "cudnn._compiled_module.cudnnGraphNotSupportedError: No valid engine co"
                "nfigs for Matmul_"
            ],
            id="cudnn 2",
        ),
        pytest.param(
            "no_kernel",
            [
                ENGINE + "RuntimeError: cuDNN Frontend error: [cudnn_frontend] Error: No executi"
                "on plans support the graph."
            ],
            id="cudnn 3",
        ),
        pytest.param(
            "import_error",
            [
                ENGINE + "RuntimeError: cuDNN version incompatibility: PyTorch was compiled  aga"
                "inst (9, 10, 2) but found runtime version (9, 8, 0)."
            ],
            id="cudnn 4",
        ),
        pytest.param(
            "illegal_instruction",
            [ENGINE + "cuLaunchKernelEx failed with error 715 (CUDA_ERROR_ILLEGAL_INSTRUCTION)"],
            id="cudnn 5",
        ),
        pytest.param(
            "unsupported_arch",
            [
                ENGINE + "RuntimeError: Error in function 'TllmGenFmhaRunner' at /w/fmhaRunner.c"
                "uh:31: Unsupported architecture"
            ],
            id="fmha 1",
        ),
        pytest.param(
            "unsupported_arch",
            [
                ENGINE + "RuntimeError: Error in function 'run' at /w/fmhaKernels.cuh:210: Missi"
                "ng TRTLLM-GEN kernel (context): qkvLayout=2, maskType=1"
            ],
            id="fmha 2",
        ),
        pytest.param(
            "no_kernel",
            [
                ENGINE + "flashinfer.utils.BackendSupportedError: trtllm_batch_decode_with_kv_ca"
                "che does not support backend 'trtllm-gen' with capability 121"
            ],
            id="fmha 3",
        ),
        pytest.param(
            "unsupported_arch",
            [ENGINE + "ValueError: trtllm-gen backend does not support SM121"],
            id="fmha 4",
        ),
        pytest.param(
            "unsupported_arch",
            [ENGINE + "RuntimeError: Unsupported SM architecture: 121"],
            id="fmha 5",
        ),
        pytest.param(
            "config",
            [
                ENGINE + "ValueError: Selected backend AttentionBackendEnum.FLASH_ATTN is not va"
                "lid for this configuration. Reason: ['sink not supported']"
            ],
            id="selector 1",
        ),
        pytest.param(
            "config",
            [
                ENGINE + "ValueError: No valid attention backend found for CudaPlatform with hea"
                "d_size: 64, dtype: torch.bfloat16, kv_cache_dtype: fp8, block_size: 16"
                ", use_v1: True"
            ],
            id="selector 2",
        ),
        pytest.param(
            "config",
            [
                ENGINE + "NotImplementedError: FlashAttention does not support fp8 kv-cache on t"
                "his device."
            ],
            id="selector 3",
        ),
        pytest.param(
            "import_error",
            [
                "RuntimeError: flashinfer-cubin version (0.6.13) does not match flashin"
                "fer version (0.6.18.post1). Please install the same version of both pa"
                "ckages. Set FLASHINFER_DISABLE_VERSION_CHECK=1 to bypass this check."
            ],
            id="skew cubin 1",
        ),
        pytest.param(
            "import_error",
            [WORKER + "ImportError: cannot import name 'ArtifactPath' from 'flashinfer_cubin'"],
            id="skew cubin 2",
        ),
        pytest.param(
            "import_error",
            [WORKER + "ModuleNotFoundError: No module named 'flashinfer.artifacts'"],
            id="skew cubin 3",
        ),
        pytest.param(
            "import_error",
            [
                "ImportError: /usr/local/lib/python3.12/dist-packages/tvm_ffi/core.abi3"
                ".so: undefined symbol: TVMFFIObjectDecRef"
            ],
            id="skew tvm 1",
        ),
        pytest.param(
            "import_error",
            [ENGINE + "ValueError: Global Function `ffi.Foo` is already registered"],
            id="skew tvm 2",
        ),
        pytest.param(
            "import_error",
            [ENGINE + "TypeError: Type key `cutlass.dsl.X` already registered with index 131"],
            id="skew tvm 3",
        ),
        pytest.param(
            "import_error",
            [
                ENGINE + "AttributeError: module 'tvm_ffi' has no attribute 'get_global_func_met"
                "adata'"
            ],
            id="skew tvm 4",
        ),
        pytest.param(
            "import_error",
            [
                ENGINE + "ImportError: cannot import name 'TensorSSA' from 'cutlass.cute' (/x/cu"
                "tlass/cute/__init__.py)"
            ],
            id="skew dsl 1",
        ),
        pytest.param(
            "import_error",
            [
                ENGINE + "AttributeError: module 'cutlass.cute.nvgpu' has no attribute 'OperandM"
                "ajorMode'"
            ],
            id="skew dsl 2",
        ),
        pytest.param(
            "import_error",
            ["RuntimeError: operator torchvision::roi_align does not exist"],
            id="skew tv 1",
        ),
        pytest.param(
            "import_error",
            [
                "RuntimeError: Detected that PyTorch and torchvision were compiled with"
                " different CUDA major versions. PyTorch has CUDA Version=13.0 and torc"
                "hvision has CUDA Version=12.8."
            ],
            id="skew tv 2",
        ),
        pytest.param(
            "import_error",
            [
                "AttributeError: partially initialized module 'torchvision' has no attr"
                "ibute 'extension' (most likely due to a circular import)"
            ],
            id="skew tv 3",
        ),
        pytest.param(
            "import_error",
            ["ImportError: /x/torchvision/_C.so: undefined symbol: _ZN3c1017RegisterOperatorsD1Ev"],
            id="skew tv 4",
        ),
        pytest.param(
            "config",
            [
                "RuntimeError: The NVIDIA driver on your system is too old (found versi"
                "on 12080). Please update your GPU driver"
            ],
            id="driver 1",
        ),
        pytest.param(
            "unsupported_arch",
            [
                ENGINE + "torch.AcceleratorError: CUDA error: the provided PTX was compiled with"
                " an unsupported toolchain."
            ],
            id="driver 2",
        ),
        pytest.param(
            "config",
            [
                ENGINE + "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: s"
                "ystem has unsupported display driver / cuda driver combination"
            ],
            id="driver 3",
        ),
        pytest.param(
            "unsupported_arch", [ENGINE + "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"], id="driver 4"
        ),
        pytest.param(
            "config",
            [ENGINE + "cuda.core._utils.cuda_utils.CUDAError: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"],
            id="driver 5",
        ),
        pytest.param(
            "import_error",
            [ENGINE + "ModuleNotFoundError: No module named 'cutlass.cute'"],
            id="nomod 1",
        ),
    ],
)
def test_a_wording_of_another_release_has_its_kind_and_a_remedy(kind, lines) -> None:
    cause = classify_lines(lines, 1)
    assert cause.kind == kind == read_lines(lines).failure
    assert len(cause.owner) > 10
    assert len(cause.remedy or "") > 20


@pytest.mark.parametrize(
    "line",
    [
        "INFO 11-20 10:00:00 [a.py:1] trtllm-gen backend does not support SM121, using XQA",
        "[Autotuner]: Skipping tactic: Missing TRTLLM-GEN kernel (context): qkvLayout=2",
        "[Autotuner]: Skipping tactic: DSLRuntimeError: Error during runtime code generation",
        "WARNING 11-20 10:00:00 [a.py:1] FlashAttention does not support fp8 kv-cache on this "
        "device",
    ],
    ids=["a choice", "tuning of TRT-LLM-gen", "tuning of CuTe DSL", "another backend"],
)
def test_a_healthy_servers_line_is_no_failure(line) -> None:
    assert read_lines([line]).failure is None
