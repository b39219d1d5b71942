"""Messages in the source code of FlashInfer 0.7.4, torch 2.13, Triton 3.6 and vLLM 0.32 have the
right kind of failure and advice. `test_failure_variants.py` tests the wordings of releases."""

import pytest

from meta_tests.logs import read_lines
from sm121.evidence.failure import classify_lines

ENGINE = "(EngineCore_DP0 pid=9) ERROR 11-20 10:19:39 [core.py:868] "


def row(identity: str, kind: str, advice: str, *lines: str) -> object:
    return pytest.param(kind, advice, lines, id=identity)


@pytest.mark.parametrize(
    ("kind", "advice", "lines"),
    [
        row(
            "an error code of FlashInfer",
            "kernel_launch",
            "JIT cache",
            "RuntimeError: RopeQuantize failed with error code invalid resource handle",
        ),
        row(
            "a function in small letters",
            "kernel_launch",
            "JIT cache",
            "RuntimeError: single_prefill_with_kv_cache_sm90 failed with error: invalid argument",
        ),
        row(
            "the workspace of a function",
            "kernel_launch",
            "JIT cache",
            "RuntimeError: BatchDecodeWithPagedKVCache workspace size failed with error "
            "invalid argument",
        ),
        row(
            "a plan",
            "kernel_launch",
            "JIT cache",
            "RuntimeError: Failed to plan prefill with error: invalid argument",
        ),
        row(
            "a tensor map",
            "kernel_launch",
            "JIT cache",
            "RuntimeError: cuTensorMapEncodeTiled (3D, 'A') failed: CUresult=1",
        ),
        row(
            "a launch",
            "kernel_launch",
            "JIT cache",
            "RuntimeError: cudaLaunchKernelExC for the main kernel failed: invalid argument",
        ),
        row(
            "shared memory",
            "kernel_launch",
            "JIT cache",
            "RuntimeError: failed to opt in to dynamic shared memory: invalid argument",
        ),
        row(
            "a tile of the experts",
            "kernel_launch",
            "12.1a",
            "RuntimeError: Unsupported tile shape config 128128 for MoE gemm.",
        ),
        row(
            "CUDA's number of an instruction",
            "illegal_instruction",
            "--engine-debug",
            "RuntimeError: cuLaunchKernelEx failed with error code 715",
        ),
        row(
            "CUDA's number of an address",
            "illegal_memory_access",
            "--engine-debug",
            "RuntimeError: cudaLaunchKernelExC for the peer push failed: CUresult=700",
        ),
        row(
            "CUDA's number of memory",
            "oom",
            "--gpu-memory-utilization",
            "RuntimeError: cuMemCreate failed: CUresult=2",
        ),
        row(
            "an architecture left out of a build",
            "unsupported_arch",
            "12.1a",
            "RuntimeError: FP4 gemm kernel is not compiled with support for this Architecture.",
        ),
        row(
            "experts without an architecture",
            "unsupported_arch",
            "12.1a",
            "RuntimeError: Arch unsupported for MoE GEMM",
        ),
        row(
            "CuTe DSL's one architecture",
            "unsupported_arch",
            "--attention-backend",
            "cutlass.cute.nvgpu.common.OpError: expects arch to be Arch.sm_100a, got Arch.sm_121a",
        ),
        row(
            "Blackwell of data centres",
            "no_kernel",
            "--attention-backend",
            "ValueError: indexer_kv_dtype='mxfp4' requires Blackwell datacenter GPUs (sm_10x)",
        ),
        row(
            "another GPU with an article",
            "no_kernel",
            "--attention-backend",
            "RuntimeError: this attention requires an SM90 GPU",
        ),
        row(
            "another GPU by its compute capability",
            "no_kernel",
            "--attention-backend",
            "NotImplementedError: this kernel requires a sm_100 device",
        ),
        row(
            "TRT-LLM-gen's products",
            "no_kernel",
            "12.1a",
            "RuntimeError: Error in function 'selectKernel' at /x/runner.cu:238: No kernel found "
            "for the given options: mDtypeA: E2m1",
        ),
        row(
            "cuDNN without a plan",
            "no_kernel",
            "nvidia-cudnn",
            "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
        ),
        row(
            "cuDNN's parameters",
            "kernel_launch",
            "nvidia-cudnn",
            "RuntimeError: cuDNN error: CUDNN_STATUS_BAD_PARAM",
        ),
        row(
            "cuDNN's handle",
            "kernel_launch",
            "--gpu-memory-utilization",
            "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        ),
        row(
            "FlashInfer's workspace",
            "oom",
            "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE",
            "RuntimeError: Error in function 'aligned_alloc' at /x/allocator.h:63: Buffer overflow "
            "when allocating memory for batch_prefill_tmp_v with size 4096 and alignment 16",
        ),
        row(
            "ninja's child of 137",
            "oom",
            "MAX_JOBS",
            "RuntimeError: Ninja build failed. Ninja output:",
            "FAILED: [code=137] fused_moe.cuda.o",
            "ninja: build stopped: subcommand failed.",
        ),
        row(
            "nvcc's child of signal 9",
            "oom",
            "MAX_JOBS",
            "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
            "ninja: build stopped: subcommand failed.",
        ),
        row(
            "ninja without end",
            "jit_build",
            "MAX_JOBS",
            "subprocess.TimeoutExpired: Command '['ninja', '-v']' timed out after 1800 seconds",
        ),
        row(
            "Python's header",
            "jit_build",
            "python3-dev",
            "/tmp/x/cuda_utils.c:6:10: fatal error: Python.h: No such file or directory",
            "subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/x/cuda_utils.c']' "
            "returned non-zero exit status 1.",
        ),
        row(
            "no C compiler",
            "jit_build",
            "gcc",
            "RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",
        ),
        row(
            "no ninja",
            "jit_build",
            "ninja",
            "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)",
        ),
        row(
            "Triton's passes",
            "jit_build",
            "triton",
            "'sm_121a' is not a recognized processor for this target (ignoring processor)",
            "RuntimeError: PassManager::run failed",
        ),
        row(
            "torchaudio of another CUDA",
            "import_error",
            "torchaudio",
            "RuntimeError: Detected that PyTorch and TorchAudio were compiled with different CUDA "
            "versions.",
        ),
        row(
            "CuTe DSL too old",
            "import_error",
            "pip check",
            "RuntimeError: SM120 FMHA requires nvidia-cutlass-dsl>=4.7.0; found 4.4.1",
        ),
        row(
            "no manifest",
            "no_kernel",
            "download-kernels",
            "RuntimeError: Failed to fetch the checksum manifest for artifact pin 'a/fmha' from "
            "https://mirror.example/checksums.txt.",
        ),
        row(
            "no downloads",
            "no_kernel",
            "download-kernels",
            "RuntimeError: Artifact not found locally: fmha.cubin (looked at /c/fmha.cubin). "
            "FLASHINFER_NO_DOWNLOAD is set",
        ),
    ],
)
def test_messages_of_engine_sources_have_kind_and_advice(kind, advice, lines) -> None:
    for prefix in ("", ENGINE):
        logged = [prefix + line for line in lines]
        cause = classify_lines(logged, 1)
        assert cause.kind == kind == read_lines(logged).failure
        assert len(cause.owner) > 10
        assert advice in (cause.remedy or "")


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            "(APIServer pid=3) ERROR 11-20 10:19:39 [serving.py:9] Tool call failed with error: "
            "invalid argument",
            id="a tool's",
        ),
        pytest.param(
            "(APIServer pid=3) ERROR 11-20 10:19:39 [serving.py:9] Tool get_weather failed with "
            "error: invalid value",
            id="a tool's with a name",
        ),
        pytest.param(
            "(EngineCore_DP0 pid=9) WARNING 11-20 10:19:39 [a.py:1] SM120 FMHA requires "
            "nvidia-cutlass-dsl>=4.7.0; found 4.4.1",
            id="an older package",
        ),
        pytest.param(
            "vllm 0.32.0 requires torch==2.13.0, but you have torch 2.14.0 which is incompatible.",
            id="pip's at the start of a container",
        ),
        pytest.param(
            "[Autotuner]: Skipping tactic: Unsupported tile shape config 128128 for MoE gemm.",
            id="tuning by tile",
        ),
        pytest.param(
            "[Autotuner]: Skipping tactic: FP4 gemm kernel is not compiled with support for this "
            "Architecture.",
            id="tuning by build",
        ),
        pytest.param(
            "E1120 10:19:39 select_algorithm.py:2] Exception "
            "triton.compiler.errors.CompilationError for benchmark choice TritonTemplateCaller",
            id="tuning by torch",
        ),
        pytest.param(
            "/opt/torch/nn/modules/conv.py:456: UserWarning: Plan failed with a cudnnException: "
            "cudnnFinalizeDescriptor Failed cudnn_status: CUDNN_STATUS_NOT_SUPPORTED (Triggered "
            "internally at ../aten/src/ATen/native/cudnn/Conv_v8.cpp:919.)",
            id="a plan that torch leaves out",
        ),
        pytest.param(
            "W1120 10:19:39.000000 123 torch/x.py:1] cuDNN error: CUDNN_STATUS_BAD_PARAM",
            id="a warning of torch's logger",
        ),
        pytest.param(
            "(EngineCore_DP0 pid=9) INFO 11-20 10:19:39 [a.py:1] worker 7 died due to signal 9",
            id="a process that compiles nothing",
        ),
        pytest.param(
            "(EngineCore_DP0 pid=9) WARNING 11-20 10:19:39 [cubin_loader.py:158] Downloading "
            "https://mirror.example/checksums.txt: attempt 1 failed: timed out",
            id="a second attempt",
        ),
    ],
)
def test_a_similar_line_is_no_kernel_failure(line) -> None:
    assert read_lines([line]).failure in (None, "unknown")
