"""Failures in logs of other kinds: a compiler's text behind an engine's prefix, the Linux kernel,
TensorRT-LLM, truncated lines."""

import pytest

from meta_tests.logs import read_lines
from sm121.evidence.failure import classify_lines

ENGINE = "(EngineCore_DP0 pid=233) ERROR 11-30 14:22:09 [core.py:1101] "
#: The text of nvidia-cutlass-dsl 4.8.1 for an error of ptxas, and for an error of libNVVM.
PTXAS = [
    "error: PTX assembly failed",
    "",
    "  --> /v/flashinfer/kernel.py:80:4",
    "  error: ptxas rejected the PTX generated for this kernel while compiling it to SASS.",
    "  note: target architecture: sm_121a",
    "  note: ptxas log:",
    "        ptxas application ptx input, line 1008; error   : Unexpected instruction types",
    "        ptxas fatal   : Ptx assembly aborted due to errors",
]
NVVM = [
    "error: NVVM backend compilation failed",
    "  error: libNVVM failed while compiling generated device IR.",
    "  note: target architecture: sm_121a",
]
HEADER = "cutlass.base_dsl.compiler.CompilerDiagnosticError: "


def behind(prefix: str, lines: list[str]) -> list[str]:
    return [prefix + line for line in lines]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param([HEADER + PTXAS[0], *PTXAS[1:]], id="ptxas, an exception"),
        pytest.param(PTXAS, id="ptxas"),
        pytest.param(PTXAS[3:], id="ptxas, the beginning is cut off"),
        pytest.param(PTXAS[6:], id="the log of ptxas alone"),
        pytest.param([HEADER + NVVM[0], *NVVM[1:]], id="libNVVM, an exception"),
        pytest.param(NVVM[1:], id="libNVVM, the beginning is cut off"),
    ],
)
def test_a_compilers_text_behind_a_prefix_has_its_cause(text: list[str]) -> None:
    lines = behind(ENGINE, text)
    cause = classify_lines(lines, 1)
    assert cause.kind == "jit_build" == read_lines(lines).failure
    assert "CuTe DSL" in cause.summary


def test_an_internal_error_of_cute_dsl_has_its_cause() -> None:
    lines = behind(
        ENGINE,
        [
            "cutlass.base_dsl.common.DSLRuntimeError: ",
            "error[INTERNAL]: The compiler hit an internal DSL problem while compiling your code.",
        ],
    )
    assert classify_lines(lines, 1).kind == "jit_build"
    assert classify_lines(lines[1:], 1).kind == "jit_build"


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(['    raise RuntimeError("PTX assembly failed")'], id="the log begins in it"),
        pytest.param(
            [
                "Traceback (most recent call last):",
                '  File "/v/compiler.py", line 258, in compile',
                "    raise CompilerDiagnosticError(formatted, raw_error=error_msg) from e",
            ],
            id="a whole stack",
        ),
        pytest.param(
            ['  File "/v/cuda.py", line 3, in f', "    # CUDA error: invalid argument"],
            id="a stack without its first line",
        ),
    ],
)
def test_quoted_source_code_is_no_cause(lines: list[str]) -> None:
    assert read_lines(behind(ENGINE, lines)).failure is None


def test_stacks_of_two_processes_are_kept_apart() -> None:
    lines = [
        "(Worker_TP0 pid=7) ERROR 11-30 10:00:00 [a.py:1] Traceback (most recent call last):",
        '(Worker_TP0 pid=7) ERROR 11-30 10:00:00 [a.py:1]   File "/v/a.py", line 3, in f',
        "(Worker_TP1 pid=8) INFO 11-30 10:00:00 [a.py:1] Loading weights took 3 seconds",
        '(Worker_TP0 pid=7) ERROR 11-30 10:00:00 [a.py:1]     raise E("PTX assembly failed")',
    ]
    assert read_lines(lines).failure is None


CAPTURING = "CUDA error: operation not permitted when stream is capturing"


@pytest.mark.parametrize(
    "line",
    [
        ENGINE + "torch.AcceleratorError: " + CAPTURING,
        CAPTURING + " (current device: 0, in function launch_mul_mat_q)",
        "RuntimeError: BatchDecodeWithPagedKVCache failed with error operation not permitted when "
        "stream is capturing",
        ENGINE + "Search for `cudaErrorStreamCaptureUnsupported' in https://docs.nvidia.com",
    ],
    ids=["torch", "llama.cpp", "FlashInfer", "cut off above"],
)
def test_a_call_in_a_capture_has_its_own_cause(line: str) -> None:
    cause = classify_lines([line], 1)
    assert cause.kind == "kernel_launch"
    assert "while a CUDA graph is captured" in cause.summary
    assert "--enforce-eager" in (cause.remedy or "")


def test_a_kernels_error_in_a_capture_is_the_cause() -> None:
    lines = behind(
        ENGINE,
        [
            "RuntimeError: CUDA error: operation failed due to a previous error during capture",
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        ],
    )
    assert "earlier error" in classify_lines(lines[:1], 1).summary
    assert classify_lines(lines, 1).kind == "illegal_memory_access"


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("host", "INFO: task VLLM::EngineCor:4242 blocked for more than 122 seconds."),
        ("host", "watchdog: BUG: soft lockup - CPU#3 stuck for 26s! [python3:4242]"),
        ("host", "Unable to handle kernel NULL pointer dereference at virtual address 10"),
        ("host", "Kernel panic - not syncing: Fatal exception"),
        (
            "engine_dead",
            "python3[221]: unhandled level 2 translation fault (11) at 0x10, esr 0x92000006, in x",
        ),
        ("oom", "Out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:1kB"),
        (
            "oom",
            "oom-kill:constraint=CONSTRAINT_NONE,cpuset=x,task_memcg=/x,task=python3,pid=4,uid=0",
        ),
    ],
    ids=lambda value: value[:20],
)
def test_a_message_of_the_linux_kernel_alone_has_its_cause(kind: str, line: str) -> None:
    line = "Nov 30 10:00:00 spark kernel: " + line
    cause = classify_lines([line])
    assert cause.kind == kind == read_lines([line]).failure
    assert len(cause.remedy or "") > 20


TRTLLM = "[11/30/2026-09:33:30] [TRT-LLM] [RANK 0] [E] "


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("nccl", TRTLLM + "[TensorRT-LLM][ERROR] Assertion failed: Failed, NCCL error /s/n.cpp:9"),
        ("unsupported_arch", "[TensorRT-LLM][ERROR] Assertion failed: Unsupported Arch (/s/x:3)"),
        ("unknown", "[TRT-LLM] [E] [_torch][RANK 0] Failed to initialize executor on rank 0: x"),
    ],
    ids=lambda value: value[-30:],
)
def test_an_error_of_tensorrt_llm_alone_has_its_cause(kind: str, line: str) -> None:
    cause = classify_lines([line], 1)
    assert cause.kind == kind == read_lines([line]).failure
    assert cause.owner != "engine core"
    assert len(cause.remedy or "") > 20


def test_a_warning_of_tensorrt_llm_is_no_failure() -> None:
    assert read_lines(["[TensorRT-LLM][WARNING] Assertion is off"]).failure is None
    assert read_lines(["[11/30/2026-09:33:30] [TRT-LLM] [W] no valid config"]).failure is None


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("oom", "torch.OutOfMemoryEr"),
        ("oom", "ValueError: Free memory on device cu"),
        ("illegal_memory_access", "torch.AcceleratorError: CUDA error: an illegal mem"),
        ("illegal_instruction", "torch.AcceleratorError: CUDA error: an illegal inst"),
        ("unsupported_arch", "RuntimeError: No supported CUDA archit"),
        ("unsupported_arch", "ptxas fatal   : Value 'sm_121a' is not defined for opt"),
        ("import_error", "RuntimeError: flashinfer-cubin version (0.6.13) does not match flashi"),
        ("import_error", "ModuleNotFoundError: No mod"),
        ("jit_build", "subprocess.CalledProcessError: Command '['ninja', '-v', '-C', '/root/.ca"),
        ("jit_build", "RuntimeError: Could not find nvcc and def"),
        ("config", "ValueError: Selected backend AttentionBack"),
        ("nccl", "torch.distributed.DistBackendError: NCCL er"),
    ],
    ids=lambda value: value[-25:],
)
@pytest.mark.parametrize("mark", ["", ">", "…"])
def test_a_cut_line_is_known_by_its_beginning(kind: str, line: str, mark: str) -> None:
    assert classify_lines([ENGINE + line + mark], 1).kind == kind


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(ENGINE + "RuntimeError: CUDA error: an illegal ", id="two kinds"),
        pytest.param(ENGINE + "RuntimeError: CUDA error:", id="many kinds"),
        pytest.param(ENGINE + "NameError: name 'x' is not defined", id="a name"),
        pytest.param(ENGINE + "ValueError: the shape does not match", id="a shape"),
        pytest.param(ENGINE + "OSError: [Errno 2] No such file or directory", id="a file"),
    ],
)
def test_a_line_that_is_cut_too_early_is_unknown(line: str) -> None:
    assert classify_lines([line], 1).kind == "unknown"


def test_the_beginning_of_a_failure_at_info_is_none() -> None:
    line = "INFO 11-30 10:00:00 [gpu_worker.py:9] Free memory on device cuda:0"
    assert read_lines([line]).failure is None


@pytest.mark.parametrize("needed", ["0.5.3", "0.6.9", "0.6.13", "0.6.13.post1"])
def test_up_to_0_6_13_the_kernel_package_of_the_same_version_is_the_remedy(needed: str) -> None:
    line = (
        "RuntimeError: flashinfer-cubin version (0.6.1) does not match flashinfer version "
        f"({needed})."
    )
    assert "pip install flashinfer-cubin==X" in (classify_lines([line], 1).remedy or "")


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: Failed to download cubins",
        ENGINE + "RuntimeError: Failed to download cubins: fmha/x.cubin, gemm/y.cubin",
        "Cubin download failed: <urlopen error [Errno -2] Name or service not known>",
    ],
)
def test_kernels_that_cannot_be_downloaded_have_their_cause(line: str) -> None:
    cause = classify_lines([line], 1)
    assert cause.kind == "no_kernel"
    assert "flashinfer download-kernels" in (cause.remedy or "")
    assert "flashinfer-cubin==X with the X of FlashInfer, up to 0.6.13" in (cause.remedy or "")


def test_ninja_without_a_compilers_error_has_its_own_remedy() -> None:
    ninja = ENGINE + "subprocess.CalledProcessError: Command '['ninja', '-v', '-C', '/c/ops']' "
    lines = [ninja + "returned non-zero exit status 1."]
    remedy = classify_lines(lines, 1).remedy or ""
    assert "MAX_JOBS" in remedy and "above" not in remedy
    assert "install the CUDA toolkit, ninja and a C++ compiler" in remedy
    error = "/v/gemm.cu(12): error: identifier is undefined"
    assert "gemm.cu(12)" in classify_lines([error, *lines], 1).summary
