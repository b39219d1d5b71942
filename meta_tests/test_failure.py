"""The classifier of crashes: causes are told from consequences, and noise is no crash."""

from __future__ import annotations

from pathlib import Path

import pytest
from logs import read_lines

from sm121.core.data_file import DataFileError, parse
from sm121.evidence.failure import (
    Cause,
    FailureSet,
    classify,
    classify_lines,
    load_failures,
    relevant_lines,
)
from sm121.evidence.log_lines import clean

DATA = Path(__file__).parent / "data"
ERROR = "(EngineCore pid=7) ERROR 11-20 10:19:39 [core.py:1510] "

CASES = {
    "xid": [
        "[78478.1] NVRM: Xid (PCI:000f:01:00): 13, Graphics SM Warp Exception: Illegal Instruction"
    ],
    "oom_host_kill": [
        "[78478.861842] Memory cgroup out of memory: Killed process 221 (VLLM::EngineCor) "
        "total-vm:1kB"
    ],
    "oom_jit_build": ['/bin/bash: line 1: 80034 Killed  "$CICC_PATH/cicc" --c++17'],
    "oom_device": [
        ERROR + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    ],
    "oom_free_memory": [
        "ValueError: Free memory on device (14.45/122.82 GiB) on startup is less than",
        "desired GPU memory utilization (0.7, 85.98 GiB)",
    ],
    "oom_no_kv_blocks": [
        ERROR + "ValueError: No available memory for the cache blocks. Try increasing"
    ],
    "oom_kv_too_small": [
        ERROR
        + "ValueError: To serve at least one request (0.5 GiB KV cache is needed, which is larger "
        "than the available KV cache memory (0.1 GiB)."
    ],
    "oom_host_allocation": [
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"
    ],
    "illegal_instruction": [
        ERROR + "torch.AcceleratorError: CUDA error: an illegal instruction was encountered"
    ],
    "illegal_memory_access": [
        ERROR + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    ],
    "device_assert": [
        "RuntimeError: Runtime check failed at nvfp4.cuh:78: CUDA error: device-side assert "
        "triggered"
    ],
    "arch_no_supported": [
        "RuntimeError: No supported CUDA architectures found for major versions [10]."
    ],
    "arch_ptxas_name": [
        "(EngineCore pid=1) ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"
    ],
    "arch_ptxas_feature": [
        "ptxas x.ptx, line 7; error : Feature 'cvt.e2m1x2.f32' not supported on .target 'sm_121'"
    ],
    "arch_nvcc_name": ["nvcc fatal   : Unsupported gpu architecture 'compute_121a'"],
    "arch_no_kernel_image": [
        "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    ],
    "arch_refused": ["csrc/apis/gemm.hpp:99: Unsupported architecture or scaling factor types"],
    "jit_compiler_error": [
        '/x/flashinfer/fusion.cuh(487): error: identifier "batchIdx" is undefined'
    ],
    "jit_ninja": ["ninja: build stopped: subcommand failed."],
    "jit_no_compiler": [
        "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"
    ],
    "jit_inductor": [ERROR + "torch._inductor.exc.InductorError: LoweringException: x"],
    "port_in_use": ["OSError: [Errno 98] Address already in use"],
    "config_argument": ["api_server.py: error: unrecognized arguments: --moe-backnd"],
    "config_cuda_initialisation": [
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet ready",
        "RuntimeError: No CUDA GPUs are available",
        "RuntimeError: CUDA error: initialization error",
    ],
    "config_environment": [
        "ValueError: Unknown vLLM environment variable detected: VLLM_MXFP4_BACKEND"
    ],
    "config_attention": [
        "ValueError: Selected backend AttentionBackendEnum.FLASHINFER is not valid for this "
        "configuration. Reason: ['attention sinks not supported']"
    ],
    "config_moe": ["ValueError: moe_backend='flashinfer_b12x' is not supported for MXFP4 MoE."],
    "config_model": [
        "OSError: /models/x does not appear to have a file named config.json. Checkout"
    ],
    "config_validation": [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, User-specified max_model_len (4000000) is greater than the derived",
    ],
    "import_error": ["ImportError: cannot import name 'KVFP4QuantizeUtil' from 'sglang'"],
    "import_library": ["ImportError: /x/_C.so: undefined symbol: _ZN3c104impl"],
    "hang_timeout": [ERROR + "TimeoutError: RPC call to execute_model timed out."],
    "hang_broadcast": [
        "INFO 01-01 00:00:00 [shm_broadcast.py:1] No available shared memory broadcast block "
        "found in 60 seconds."
    ],
    "garbage_harmony": [
        "(APIServer pid=1) ERROR 11-20 10:19:39 [x.py:1] openai_harmony.HarmonyError: "
        "unexpected tokens"
    ],
    "crash_native": ["!!!!!!! Segfault encountered !!!!!!"],
    "exception": [ERROR + "AssertionError: auto_functionalized was not removed"],
    "engine_process_died": [
        ERROR + "Worker proc VllmWorker-0 died unexpectedly (exit code: 9), shutting down executor."
    ],
    "engine_dead": [ERROR + "EngineCore failed to start."],
}


def kind_of(identity: str) -> str:
    return next(entry.kind for entry in load_failures().failure if entry.id == identity)


@pytest.mark.parametrize("identity", sorted(CASES))
def test_cause_is_recognised(identity: str) -> None:
    lines = CASES[identity]
    cause = classify_lines(lines, 1)
    assert cause.kind == kind_of(identity)
    assert cause.lines
    assert cause.owner
    assert "\n" not in cause.summary
    assert read_lines(lines).failure == kind_of(identity)


def test_every_failure_has_a_case() -> None:
    assert {entry.id for entry in load_failures().failure} == set(CASES)


def test_every_case_reaches_its_own_entry() -> None:
    entries = {entry.id: entry for entry in load_failures().failure}
    missed = [
        name
        for name, lines in CASES.items()
        if not any(entries[name].search(clean(line)) for line in lines)
    ]
    assert missed == []


def test_every_kind_that_a_log_can_show_is_covered() -> None:
    kinds = {kind_of(identity) for identity in CASES}
    assert kinds == {
        "oom",
        "illegal_memory_access",
        "illegal_instruction",
        "unsupported_arch",
        "jit_build",
        "xid",
        "import_error",
        "hang",
        "garbage_output",
        "engine_dead",
        "port",
        "config",
        "unknown",
    }


def test_cause_wins_over_consequences() -> None:
    cause = classify_lines(
        [
            ERROR + "EngineCore failed to start.",
            ERROR + "torch.OutOfMemoryError: CUDA out of memory.",
            ERROR + "RuntimeError: Worker failed with error 'CUDA error'",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed "
            "core proc(s): {}",
        ],
        1,
    )
    assert cause.kind == "oom"
    assert cause.lines[0] == "torch.OutOfMemoryError: CUDA out of memory."
    assert "EngineCore failed to start." in cause.lines


def test_first_of_equally_specific_lines_wins() -> None:
    lines = [
        ERROR + "torch.AcceleratorError: CUDA error: an illegal instruction was encountered",
        ERROR + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    ]
    assert classify_lines(lines).kind == "illegal_instruction"
    assert classify_lines(lines[::-1]).kind == "illegal_memory_access"


@pytest.mark.parametrize("prefix", ["", "(APIServer pid=1) ", ERROR])
def test_detail_of_a_refused_configuration_is_told(prefix: str) -> None:
    cause = classify_lines([prefix + line for line in CASES["config_validation"]], 1)
    assert cause.kind == "config"
    assert "max_model_len (4000000)" in cause.summary


def test_long_line_is_cut_around_what_matters() -> None:
    line = ERROR + "RuntimeError: " + "x" * 2_000 + " CUDA out of memory. " + "y" * 2_000
    cause = classify_lines([line], 1)
    assert "CUDA out of memory" in cause.summary
    assert len(cause.summary) <= 400


def test_unknown_exception_of_a_dead_engine_is_named() -> None:
    cause = classify_lines([*CASES["exception"], *CASES["engine_dead"]], 1)
    assert cause.kind == "engine_dead"
    assert "auto_functionalized" in cause.summary


@pytest.mark.parametrize(
    ("exit_code", "kind", "says"),
    [
        (137, "oom", "probably"),
        (-9, "oom", "probably"),
        (-11, "engine_dead", "SIGSEGV"),
        (139, "engine_dead", "SIGSEGV"),
        (-4, "illegal_instruction", "SIGILL"),
        (-15, "engine_dead", "told to stop"),
        (0, "engine_dead", "exited with status 0"),
        (3, "unknown", "status 3"),
        (None, "unknown", "not known"),
    ],
)
def test_silent_end(exit_code: int | None, kind: str, says: str) -> None:
    cause = classify_lines(
        ["INFO 11-20 10:19:39 [core.py:1] Loading weights took 1 seconds"], exit_code
    )
    assert cause.kind == kind
    assert says in cause.summary
    assert cause.lines == ["Loading weights took 1 seconds"]


def test_error_of_a_request_is_not_blamed_for_the_end() -> None:
    lines = HARMLESS["request error of a live server"]
    assert classify_lines(lines, -9).kind == "oom"
    assert "told to stop" in classify_lines(lines, -15).summary
    assert "prompt is too long" in classify_lines(lines, 1).summary  # nothing better is known


def test_log_outweighs_exit_status() -> None:
    assert classify_lines(CASES["port_in_use"], 137).kind == "port"


def test_killed_engine_process_is_not_blamed_on_the_api_server() -> None:
    cause = classify_lines(CASES["engine_dead"], 1)
    assert cause.kind == "engine_dead"
    assert "outside" in cause.summary
    assert "dmesg" in (cause.remedy or "")


HARMLESS = {
    "warning level": ["WARNING 11-20 10:17:56 [base.py:380] ValueError: Tokenizer not available"],
    "request error of a live server": [
        "INFO:     Application startup complete.",
        "(APIServer pid=1) ERROR 11-20 10:17:56 [serving.py:1] ValueError: prompt is too long",
    ],
    "request whose role harmony does not know (vLLM 0.24 answers 500)": [
        "INFO:     Application startup complete.",
        '(APIServer pid=1)   File "/usr/lib/python3/pydantic/main.py", line 280, in __init__',
        "(APIServer pid=1)     validated_self = self.__pydantic_validator__.validate_python(data)",
        "(APIServer pid=1) pydantic_core.ValidationError: 1 validation error for Author",
        "(APIServer pid=1) role",
        "(APIServer pid=1)   Input should be 'user', 'assistant', 'system', 'developer' or 'tool'",
        "(APIServer pid=1) ValidationError: 1 validation error for ResponseTextConfig",
    ],
    "start that went on": [
        ERROR + "RuntimeError: first try",
        "INFO:     Application startup complete.",
    ],
    "engine that went on": [
        *CASES["hang_broadcast"],
        "INFO 01-01 00:09:00 [core.py:1] init engine took 540 s",
    ],
    "clean stop": [
        "INFO:     Application startup complete.",
        "(EngineCore pid=3) INFO 08-21 09:45:37 [core.py:1214] [shutdown] EngineCore: trigger "
        "received signal=SIGTERM",
        "(APIServer pid=1) ERROR 08-21 09:45:37 [async_llm.py:1] "
        "vllm.v1.engine.exceptions.EngineDeadError: x",
        "(APIServer pid=1) WARNING 08-21 09:45:37 [utils.py:626] [shutdown] force killing "
        "remaining processes count=1",
    ],
    "not fatal at ERROR level": [
        "ERROR 03-27 12:18:33 [fa_utils.py:145] Cannot use FA version 2 is not supported"
    ],
    "stack frame that quotes a message": ['    raise ValueError("Address already in use")'],
}


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_noise_is_no_failure(name: str) -> None:
    assert read_lines(HARMLESS[name]).failure is None


def test_engine_that_dies_while_serving_is_a_failure() -> None:
    lines = [
        "INFO:     Application startup complete.",
        *CASES["exception"],
        ERROR + "EngineCore encountered a fatal error.",
    ]
    assert read_lines(lines).failure == "engine_dead"


def real(name: str, exit_code: int | None) -> Cause:
    return classify(DATA / f"vllm-0.32-{name}.log", exit_code)


@pytest.mark.parametrize(
    ("name", "exit_code", "kind", "says"),
    [
        ("bad-flag", 2, "config", "--moe-backnd"),
        ("no-config-json", 1, "config", "Invalid repository ID"),
        ("port-held", 1, "port", "Address already in use"),
        ("import-error", 1, "import_error", "No module named"),
        ("cpu-kv-too-small", 1, "oom", "KV cache"),
        ("cpu-killed-at-start", 1, "engine_dead", "outside ended the process"),
        ("cpu-compiled-then-killed", 0, "engine_dead", "exited unexpectedly"),
        ("cpu-stopped", 0, "engine_dead", "told to stop"),
    ],
)
def test_real_endings_of_the_cpu_engine(name: str, exit_code: int, kind: str, says: str) -> None:
    cause = real(name, exit_code)
    assert cause.kind == kind
    assert says in cause.summary


def test_relevant_lines_hold_the_cause_and_the_end() -> None:
    lines = relevant_lines(DATA / "vllm-0.32-cpu-kv-too-small.log", 6)
    assert len(lines) <= 6
    assert len(set(lines)) == len(lines)
    assert any("larger than the available KV cache memory" in line for line in lines)
    assert "Engine core initialization failed" in lines[-1]
    assert not any(line.startswith(("File ", "Traceback")) for line in lines)


def test_relevant_lines_name_the_innermost_frame(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "Traceback (most recent call last):\n"
        '  File "/x/outer.py", line 1, in main\n    run()\n'
        '  File "/x/inner.py", line 98, in run\n    raise OSError\n'
        "OSError: [Errno 98] Address already in use\n" * 3,
        encoding="utf-8",
    )
    assert relevant_lines(log) == [
        "OSError: [Errno 98] Address already in use [/x/inner.py:98 in run]"
    ]


def test_relevant_lines_of_many_keep_first_and_last(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    words = ["".join(chr(97 + (n // 26**k) % 26) for k in range(3)) for n in range(500)]
    log.write_text("".join(f"{ERROR}problem {word}\n" for word in words), encoding="utf-8")
    assert relevant_lines(log, 4) == [f"problem {words[n]}" for n in (0, 1, -2, -1)]
    with pytest.raises(ValueError, match="at least 1"):
        relevant_lines(log, 0)


ENTRY = """[markers]
ready = ['ready']
stopped = ['stopped']
[[failure]]
id = "one"
kind = "{kind}"
rank = 10
hint = ["x"]
regex = '{regex}'
owner = "me"
source = "here, log"
{more}
"""


@pytest.mark.parametrize(
    ("kind", "regex", "more", "expected"),
    [
        ("oops", "x", "", "kind"),
        ("oom", "(x", "", "regular expression"),
        ("oom", "x", "summary = '{nothing}'", "summary may name"),
        ("oom", "x", "colour = 1", "colour"),
    ],
)
def test_wrong_failure_file_is_refused(kind: str, regex: str, more: str, expected: str) -> None:
    text = ENTRY.format(kind=kind, regex=regex, more=more)
    with pytest.raises(DataFileError, match=expected) as error:
        parse(text, FailureSet, "mine.toml")
    assert "mine.toml: key failure.one" in str(error.value)
