"""The classifier of crashes: causes are told from consequences, and noise is no crash."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import get_args

import pytest
from logs import read_lines

from sm121.core.data_file import DataFileError, parse
from sm121.evidence import death
from sm121.evidence.failure import (
    Cause,
    FailureSet,
    Kind,
    classify,
    classify_lines,
    explain,
    load_failures,
)
from sm121.evidence.kernel_messages import KernelMessages
from sm121.evidence.log_lines import clean

DATA = Path(__file__).parent / "data"
ERROR = "(EngineCore pid=7) ERROR 11-20 10:19:39 [core.py:1510] "

_LOGS = tomllib.loads((DATA / "causes.toml").read_text("utf-8"))
#: Lines that reach each row, by its id.
CASES: dict[str, list[str]] = {name: log["lines"] for name, log in _LOGS["cause"].items()}
#: The same classes in the words of other versions and engines: kind and lines.
PUBLISHED: dict[str, tuple[str, list[str]]] = {
    name: (log["kind"], log["lines"]) for name, log in _LOGS["published"].items()
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
    assert {kind_of(identity) for identity in CASES} == set(get_args(Kind))


AFTERMATH = [
    ERROR + "EngineCore failed to start.",
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {}",
]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_words_have_class_owner_and_remedy(name: str) -> None:
    kind, lines = PUBLISHED[name]
    for log in (lines, [*lines, *AFTERMATH], ["INFO:     Application startup complete.", *lines]):
        if log[0].startswith("INFO") and (kind == "checkpoint" or name == "none of the kernels"):
            continue  # weights are read, and kernels chosen, before the server serves
        cause = classify_lines([*log, *AFTERMATH], 1)
        assert cause.kind == kind, cause.summary
        assert len(cause.owner) > 10
        assert len(cause.remedy or "") > 20
        assert read_lines(log).failure == kind


def test_error_answer_of_a_server_is_explained() -> None:
    answer = (
        "openai.InternalServerError: Error code: 500 - {'error': {'message': 'error downloading or "
        "loading vocab file: failed to download or load vocab file', 'code': 500}}"
    )
    told = explain(answer)
    assert told is not None
    assert told.startswith("vocabulary: ")
    assert "TIKTOKEN_ENCODINGS_BASE" in told
    assert explain(answer.replace("500", "400")) is None
    assert explain("Error code: 500 - {'error': {'message': 'RuntimeError: no'}}") is None
    assert explain("AssertionError: required 500 tokens, seen 499") is None


def test_why_each_kernel_refused_is_told() -> None:
    for lines in (
        CASES["no_kernel_for_layer"],
        PUBLISHED["the reasons are wrapped by the poster"][1],
    ):
        summary = classify_lines([*lines, *AFTERMATH], 1).summary
        assert "cannot implement due to" in summary or "requires capability" in summary


@pytest.mark.parametrize(
    ("cause", "messenger"),
    [
        (CASES["illegal_instruction"], PUBLISHED["the watchdog's thread"][1]),
        (CASES["oom_device"], PUBLISHED["NCCL 2.30"][1]),
        (CASES["cutlass_internal"], CASES["hang_collective"]),
        (CASES["harmony_vocabulary"], CASES["garbage_harmony"]),
        (CASES["checkpoint_broken"], CASES["checkpoint_other_names"]),
    ],
)
def test_messenger_is_not_blamed(cause: list[str], messenger: list[str]) -> None:
    for lines in ([*cause, *messenger], [*messenger, *cause]):
        assert classify_lines([*lines, *AFTERMATH], 1).kind == classify_lines(cause, 1).kind


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
    "the driver says something else": [
        "[78478.1] NVRM: nvCheckOkFailedNoLog: Check failed: Call not supported "
        "[NV_ERR_NOT_SUPPORTED] (0x00000056) returned from x @ y.c:1",
        "[    5.0] NVRM: loading NVIDIA UNIX Open Kernel Module for aarch64  580.126.09",
    ],
    "graphs of pieces that were captured": [
        "[2026-05-14 20:48:43] Piecewise CUDA Graph is enabled by default as an experimental "
        "feature",
        "[2026-05-14 20:48:43] Capture piecewise CUDA graph end. Time elapsed: 9 s.",
    ],
    "memory and NCCL at work": [
        "INFO 11-20 10:17:56 [gpu_worker.py:1] to avoid running out of memory, lower it",
        "spark:1:1 [0] NCCL INFO cudaDriverVersion 13010",
        "INFO 11-20 10:17:56 [x.py:1] cudaFuncSetAttribute MaxDynamicSharedMemorySize 101376",
        "INFO 11-20 10:17:56 [x.py:1] TMA descriptor initialized",
        "INFO 11-20 10:17:56 [x.py:1] PTX was compiled with toolchain 13.1",
        "INFO 11-20 10:17:56 [envs.py:1] VLLM_PORT 8000 is taken",
    ],
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
    "deprecated way of starting (vLLM 0.31 and later)": [
        "/usr/lib/python3/vllm/entrypoints/openai/api_server.py:25: DeprecationWarning: "
        "`vllm.entrypoints.openai.api_server` is deprecated and will likely be unsupported in a "
        "future version. Use the corresponding function from `vllm.entrypoints.launchers` instead.",
        "/usr/lib/python3/vllm/entrypoints/openai/api_server.py:51: DeprecationWarning: The "
        "`python -m vllm.entrypoints.openai.api_server` command is deprecated and may be removed "
        "in a future release. Please use `vllm server` instead.",
        "  warnings.warn(",
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
    "tactics that the autotuner skips on SM12x": [
        "(EngineCore pid=7) 2025-11-11 06:41:27,319 - WARNING - autotuner.py:485 - flashinfer.jit: "
        "[Autotuner]: Skipping tactic <MoERunner object at 0x7c70> 15, due to failure while "
        "profiling: [TensorRT-LLM][ERROR] Assertion failed: Failed to initialize cutlass TMA WS "
        "grouped gemm. Error: Error Internal (/w/x.cu:60)",
        "(EngineCore pid=7) 1       0x7c6dd0a58b16 tensorrt_llm::common::throwRuntimeError + 97",
        "WARNING 11-20 10:17:56 [autotuner.py:9] [Autotuner]: Skipping tactic 3: OutOfResources: "
        "out of resource: shared memory",
    ],
    "kernels that are looked at and left": [
        "INFO 11-20 10:17:56 [__init__.py:604] Selected CutlassFp8BlockScaledMMKernel for "
        "Fp8LinearMethod",
        "DEBUG 11-20 10:17:56 [mxfp4.py:713] Mxfp4 MoE backend 'FLASHINFER_TRTLLM' does not "
        "support the deployment configuration since kernel does not support current device cuda.",
        "WARNING 11-20 10:17:56 [__init__.py:1233] NVFP4 linear falling back to the slow emulation "
        "backend as no optimized backend is available",
    ],
    "a checkpoint that is read": [
        "Loading safetensors checkpoint shards: 100% Completed | 14/14 [00:26<00:00,  1.88it/s]",
        "WARNING 11-20 10:17:56 [gemma2.py:372] Some weights are not initialized from checkpoints: "
        "{'layers.23.mlp.down_proj.weight'}",
        "INFO 11-20 10:17:56 [weight_utils.py:1] No model.safetensors.index.json found in remote.",
    ],
    "NCCL at its work and at its end": [
        "spark:2301:2981 [0] NCCL INFO NET/Plugin: Failed to find ncclNetPlugin symbol",
        "[rank0]:[W814 07:51:20.5 ProcessGroupNCCL.cpp:1575] Warning: WARNING: "
        "destroy_process_group() was not called before program exit, which can leak resources.",
        "[rank0]:[I814 07:51:20.5 ProcessGroupNCCL.cpp:980] [PG ID 0 Rank 0] ProcessGroupNCCL "
        "environments: NCCL version: 2.28.9, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC: 600",
    ],
    "a request that no backend takes": [
        "INFO:     Application startup complete.",
        "(APIServer pid=1) ERROR 11-20 10:17:56 [serving.py:1] ValueError: No valid structured "
        "output backend found for this grammar",
    ],
    "a key that a request lacks": [
        "INFO:     Application startup complete.",
        "(APIServer pid=1) ERROR 11-20 10:17:56 [serving.py:1] KeyError: 'layers.0.tool.name'",
        "(APIServer pid=1) ERROR 11-20 10:17:56 [serving.py:1] NotImplementedError: this backend "
        "has no logprobs for prompts",
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


ENTRY = """[markers]
ready = ['ready']
stopped = ['stopped']
fatal = ['fatal']
engine_process = ['core']
engine_frame = ['core']
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


SERVES = "INFO:     Application startup complete."
MATMUL = "RuntimeError: mat1 and mat2 shapes cannot be multiplied"
SWEPT = [{"pid": 7, "name": "VLLM::EngineCor", "status": -9}]
#: An exception ends the engine's core, and the engine itself then kills what is left.
SWEPT_UP = {
    "start": [*AFTERMATH[:1], ERROR + MATMUL, *AFTERMATH[1:]],
    "serving": [
        SERVES,
        ERROR + "EngineCore encountered a fatal error.",
        ERROR + "Traceback (most recent call last):",
        ERROR + MATMUL,
        "(APIServer pid=1) ERROR 11-20 10:19:40 [async_llm.py:1] EngineDeadError: see above",
        "INFO:     Shutting down",
    ],
    "sglang": [
        SERVES,
        "[2026-01-01 10:00:00] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/x/a.py", line 3, in f',
        MATMUL,
        "[2026-01-01 10:00:00] Received sigquit from a child process.",
    ],
}


@pytest.mark.parametrize("exit_code", [1, -9, None])
@pytest.mark.parametrize("name", SWEPT_UP)
def test_the_earliest_fatal_line_is_above_how_the_rest_was_swept_up(name, exit_code) -> None:
    logged = classify_lines(SWEPT_UP[name], exit_code)
    unreadable = KernelMessages(unavailable="not permitted")
    found = death.cause_of(logged, exits=SWEPT, kernel=unreadable, kills=0, pids={7})
    assert found.summary == MATMUL and found.kind == "engine_dead"
    # What says that memory was short stays above it.
    assert death.cause_of(logged, exits=SWEPT, kernel=unreadable, kills=1, pids={7}).kind == "oom"


@pytest.mark.parametrize("lives", [1, 3])
def test_an_error_of_a_request_is_no_cause_of_what_ends_the_engine_later(lives, tmp_path) -> None:
    life = "(APIServer pid=1) INFO 11-20 10:2{}:40 [loggers.py:1] Engine 000: Running: 1 reqs"
    lines = [
        SERVES,
        "(APIServer pid=1) ERROR 11-20 10:19:39 [serving.py:1] ValueError: too long",
        *(life.format(n) for n in range(lives)),
        *SWEPT_UP["serving"][1:],
    ]
    log = tmp_path / "server.log"
    log.write_text("\n".join(lines))
    assert classify_lines(lines, 1).summary == classify(log, 1).summary == MATMUL


def test_an_error_of_a_request_does_not_hide_a_kill() -> None:
    """The core said nothing: somebody killed it."""
    lines = [
        SERVES,
        "(APIServer pid=1) ERROR 11-20 10:19:39 [serving.py:1] ValueError: too long",
        "(APIServer pid=1) ERROR 11-20 11:19:40 [async_llm.py:1] EngineDeadError: x",
    ]
    logged = classify_lines(lines, 0)
    found = death.cause_of(logged, exits=SWEPT, kernel=KernelMessages(), kills=0, pids={7})
    assert found.kind == "killed"
