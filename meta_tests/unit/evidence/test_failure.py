"""The classifier of crashes distinguishes causes from consequences, and does not report harmless
lines as crashes."""

import tomllib
from operator import add, getitem
from typing import get_args

import pytest

from meta_tests.folders import DATA
from meta_tests.logs import read_lines
from sm121.evidence import death, log_message
from sm121.evidence.failure import classify, classify_lines, explain
from sm121.evidence.failure_tables import Kind, load_failures
from sm121.evidence.kernel_messages import KernelMessages

ERROR = "(EngineCore pid=7) ERROR 11-20 10:19:39 [core.py:1510] "

SERVES = "INFO:     Application startup complete."
_LOGS = tomllib.loads((DATA / "causes.toml").read_text("utf-8"))
#: For each row of the data, lines that it matches.
CASES = {name: log["lines"] for name, log in _LOGS["cause"].items()}
#: For each subject, lines of healthy servers and drivers.
HARMLESS = {name: log["lines"] for name, log in _LOGS["harmless"].items()}
#: Lines of other versions and engines that belong to the same classes: the kind and the lines.
PUBLISHED = _LOGS["published"]
KINDS = {entry.id: entry.kind for entry in load_failures().failure}


@pytest.mark.parametrize("identity", sorted(CASES))
def test_cause_is_recognised(identity: str) -> None:
    cause = classify_lines(CASES[identity], 1)
    assert cause.kind == KINDS[identity] == read_lines(CASES[identity]).failure
    assert cause.lines and cause.owner and "\n" not in cause.summary


def test_every_failure_has_a_case_that_reaches_it() -> None:
    entries = {entry.id: entry for entry in load_failures().failure}
    assert set(entries) == set(CASES) and set(KINDS.values()) == set(get_args(Kind))
    for name, lines in CASES.items():
        assert any(entries[name].search(log_message.clean(line)) for line in lines), name


AFTERMATH = [
    ERROR + "EngineCore failed to start.",
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {}",
]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_messages_have_class_owner_and_remedy(name: str) -> None:
    kind = PUBLISHED[name]["kind"]
    lines = PUBLISHED[name]["lines"]
    logs = [lines, [*lines, *AFTERMATH]]
    # Weights are read and kernels are chosen before the server is ready, so these errors cannot
    # come later.
    if kind != "checkpoint" and name != "none of the kernels":
        logs.append([SERVES, *lines])
    for log in logs:
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
    explained = explain(answer)
    assert explained.startswith("vocabulary: ")
    assert "TIKTOKEN_ENCODINGS_BASE" in explained
    assert explain(answer.replace("500", "400")) is None
    assert explain("Error code: 500 - {'error': {'message': 'RuntimeError: no'}}") is None
    assert explain("AssertionError: expected 500 tokens, got 499") is None


def test_the_reason_of_each_refused_kernel_is_shown() -> None:
    for lines in (
        CASES["no_kernel_for_layer"],
        PUBLISHED["the reasons are wrapped by the poster"]["lines"],
    ):
        summary = classify_lines([*lines, *AFTERMATH], 1).summary
        assert "cannot implement due to" in summary or "requires capability" in summary


@pytest.mark.parametrize(
    ("cause", "messenger"),
    [
        pytest.param(
            tuple(CASES.get("illegal_instruction")),
            tuple(getitem(PUBLISHED.get("the watchdog's thread"), "lines")),
            id="CASES.get illegal_instruction, operator.getitem",
        ),
        pytest.param(
            tuple(CASES.get("oom_device")),
            tuple(getitem(PUBLISHED.get("NCCL 2.30"), "lines")),
            id="CASES.get oom_device, operator.getitem PUBLISHED.get",
        ),
        pytest.param(
            tuple(CASES.get("cutlass_internal")),
            tuple(CASES.get("hang_collective")),
            id="CASES.get cutlass_internal, CASES.get hang_collective",
        ),
        pytest.param(
            tuple(CASES.get("harmony_vocabulary")),
            tuple(CASES.get("garbage_harmony")),
            id="CASES.get harmony_vocabulary, CASES.get garbage_harmony",
        ),
        pytest.param(
            tuple(CASES.get("checkpoint_broken")),
            tuple(CASES.get("checkpoint_other_names")),
            id="CASES.get checkpoint_broken, CASES.get",
        ),
    ],
)
def test_a_line_that_reports_another_process_is_not_the_cause(
    cause: list[str], messenger: list[str]
) -> None:
    for lines in ([*cause, *messenger], [*messenger, *cause]):
        assert classify_lines([*lines, *AFTERMATH], 1).kind == classify_lines(cause, 1).kind


def test_cause_wins_over_consequences() -> None:
    began, ended = AFTERMATH
    memory = ERROR + "torch.OutOfMemoryError: CUDA out of memory."
    worker = ERROR + "RuntimeError: Worker failed with error 'CUDA error'"
    cause = classify_lines([began, memory, worker, ended], 1)
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
def test_a_refused_configuration_has_its_detail(prefix: str) -> None:
    cause = classify_lines([prefix + line for line in CASES["config_validation"]], 1)
    assert cause.kind == "config"
    assert "max_model_len (4000000)" in cause.summary


def test_long_line_is_cut_around_what_matters() -> None:
    line = ERROR + "RuntimeError: " + "x" * 2_000 + " CUDA out of memory. " + "y" * 2_000
    cause = classify_lines([line], 1)
    assert "CUDA out of memory" in cause.summary
    assert len(cause.summary) <= 400


@pytest.mark.parametrize(
    ("lines", "exit_code", "kind", "says", "remedy"),
    [
        pytest.param(
            tuple(add(CASES.get("exception"), CASES.get("engine_dead"))),
            1,
            "engine_dead",
            "auto_functionalized",
            None,
            id="an unknown exception of a dead engine is named",
        ),
        pytest.param(
            tuple(CASES.get("engine_dead")),
            1,
            "engine_dead",
            "outside",
            "dmesg",
            id="a killed process of the engine is not blamed on the API server",
        ),
        pytest.param(
            tuple(CASES.get("port_in_use")),
            137,
            "port",
            "",
            None,
            id="the log outweighs the exit status",
        ),
        # the error of a request is not the cause of the end
        pytest.param(
            tuple(HARMLESS.get("request error of a live server")),
            -9,
            "oom",
            "killed by SIGKILL",
            None,
            id="HARMLESS.get request error of a live server, -9, oom",
        ),
        pytest.param(
            tuple(HARMLESS.get("request error of a live server")),
            -15,
            "engine_dead",
            "received a request to stop",
            None,
            id="HARMLESS.get request error of a live server, -15",
        ),
        pytest.param(
            tuple(HARMLESS.get("request error of a live server")),
            1,
            "unknown",
            "prompt is too long",
            None,
            id="where nothing better is known",
        ),
    ],
)
def test_lines_and_a_status_have_a_cause(lines, exit_code, kind, says, remedy) -> None:
    cause = classify_lines(lines, exit_code)
    assert cause.kind == kind
    assert says in cause.summary
    assert (remedy or "") in (cause.remedy or "")


@pytest.mark.parametrize(
    ("exit_code", "kind", "says"),
    [
        (137, "oom", "probably"),
        (-9, "oom", "probably"),
        (-11, "engine_dead", "SIGSEGV"),
        (139, "engine_dead", "SIGSEGV"),
        (-4, "illegal_instruction", "SIGILL"),
        (-15, "engine_dead", "received a request to stop"),
        (0, "engine_dead", "exited with status 0"),
        (3, "unknown", "status 3"),
        (None, "unknown", "not known"),
    ],
)
def test_silent_end(exit_code: int | None, kind: str, says: str) -> None:
    line = "INFO 11-20 10:19:39 [core.py:1] Loading weights took 1 seconds"
    cause = classify_lines([line], exit_code)
    assert cause.kind == kind and says in cause.summary
    assert cause.lines == ["Loading weights took 1 seconds"]


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_noise_is_no_failure(name: str) -> None:
    assert read_lines(HARMLESS[name]).failure is None


def test_engine_that_dies_while_serving_is_a_failure() -> None:
    fatal = ERROR + "EngineCore encountered a fatal error."
    assert read_lines([SERVES, *CASES["exception"], fatal]).failure == "engine_dead"


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
        ("cpu-stopped", 0, "engine_dead", "received a request to stop"),
    ],
)
def test_real_endings_of_the_cpu_engine(name: str, exit_code: int, kind: str, says: str) -> None:
    cause = classify(DATA / f"vllm-0.32-{name}.log", exit_code)
    assert cause.kind == kind
    assert says in cause.summary


MATMUL = "RuntimeError: mat1 and mat2 shapes cannot be multiplied"
OF_A_REQUEST = "(APIServer pid=1) ERROR 11-20 10:19:39 [serving.py:1] ValueError: too long"
SWEPT = [{"pid": 7, "name": "VLLM::EngineCor", "status": -9}]
#: An exception ends the engine's core, and the engine then kills the remaining processes.
SWEPT_UP = {
    "start": (
        ("(EngineCore pid=7) ERROR 11-20 10:19:39 [core.py:1510] EngineCore failed to start."),
        (
            "(EngineCore pid=7) ERROR 11-20 10:19:39 [core.py:1510] RuntimeError: mat1 "
            "and mat2 shapes cannot be multiplied"
        ),
        (
            "(APIServer pid=1) RuntimeError: Engine core initialization failed. See "
            "root cause above. Failed core proc(s): {}"
        ),
    ),
    "serving": (
        "INFO:     Application startup complete.",
        (
            "(EngineCore pid=7) ERROR 11-20 10:19:39 [core.py:1510] EngineCore "
            "encountered a fatal error."
        ),
        (
            "(EngineCore pid=7) ERROR 11-20 10:19:39 [core.py:1510] Traceback (most "
            "recent call last):"
        ),
        (
            "(EngineCore pid=7) ERROR 11-20 10:19:39 [core.py:1510] RuntimeError: mat1 "
            "and mat2 shapes cannot be multiplied"
        ),
        ("(APIServer pid=1) ERROR 11-20 10:19:40 [async_llm.py:1] EngineDeadError: see above"),
        "INFO:     Shutting down",
    ),
    "sglang": (
        "INFO:     Application startup complete.",
        ("[2026-01-01 10:00:00] Scheduler hit an exception: Traceback (most recent call last):"),
        '  File "/x/a.py", line 3, in f',
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        "[2026-01-01 10:00:00] Received sigquit from a child process.",
    ),
}


@pytest.mark.parametrize("exit_code", [1, -9, None])
@pytest.mark.parametrize("name", SWEPT_UP)
def test_the_earliest_fatal_line_is_above_how_the_rest_was_swept_up(name, exit_code) -> None:
    logged = classify_lines(SWEPT_UP[name], exit_code)
    unreadable = KernelMessages(unavailable="not permitted")
    cause = death.cause_of(logged, exits=SWEPT, kernel=unreadable, kills=0, pids={7})
    assert cause.summary == MATMUL and cause.kind == "engine_dead"
    # Evidence of too little memory has priority.
    assert death.cause_of(logged, exits=SWEPT, kernel=unreadable, kills=1, pids={7}).kind == "oom"


@pytest.mark.parametrize("lives", [1, 3])
def test_an_error_of_a_request_is_no_cause_of_what_ends_the_engine_later(lives, tmp_path) -> None:
    life = "(APIServer pid=1) INFO 11-20 10:2{}:40 [loggers.py:1] Engine 000: Running: 1 reqs"
    lines = [
        SERVES,
        OF_A_REQUEST,
        *(life.format(n) for n in range(lives)),
        *SWEPT_UP["serving"][1:],
    ]
    log = tmp_path / "server.log"
    log.write_text("\n".join(lines))
    assert classify_lines(lines, 1).summary == classify(log, 1).summary == MATMUL


def test_an_error_of_a_request_does_not_hide_a_kill() -> None:
    """The error of a single request does not hide a kill.

    The core logged nothing, because another process killed it."""
    lines = [
        SERVES,
        OF_A_REQUEST,
        "(APIServer pid=1) ERROR 11-20 11:19:40 [async_llm.py:1] EngineDeadError: x",
    ]
    logged = classify_lines(lines, 0)
    cause = death.cause_of(logged, exits=SWEPT, kernel=KernelMessages(), kills=0, pids={7})
    assert cause.kind == "killed"


def test_only_processes_of_the_engine_are_named_as_killed() -> None:
    """Only processes of the engine are reported as killed.

    On an H200, the engine had started and ended helper processes whose status only the engine knew.
    """
    logged = classify_lines([SERVES, "vllm.v1.engine.exceptions.EngineDeadError: x"], 0)
    exits = [
        {"pid": 3783, "name": "python3", "status": 0},
        # vLLM used this process to inspect the model.
        {"pid": 4198, "name": "python3", "status": None},
        {"pid": 4783, "name": "VLLM::EngineCore", "status": None},
        {"pid": 6138, "name": "gcc-real", "status": None},
        {"pid": 6139, "name": "cc1", "status": None},
        {"pid": 6319, "name": "ptxas", "status": None},
    ]
    cause = death.cause_of(logged, exits=exits, kernel=KernelMessages(), kills=0, pids={4783})
    assert cause.kind == "killed"
    assert cause.summary.startswith("VLLM::EngineCore (4783) ended without a message")


def test_a_process_without_an_engines_name_is_named_as_killed() -> None:
    """A process without an engine's name is reported as killed: an engine core that is killed
    before it has its name, or one of an engine that sets no name."""
    logged = classify_lines([SERVES, "vllm.v1.engine.exceptions.EngineDeadError: x"], 0)
    exits = [{"pid": 7, "name": "python3", "status": None}]
    cause = death.cause_of(logged, exits=exits, kernel=KernelMessages(), kills=0, pids={7})
    assert cause.summary.startswith("python3 (7) ended without a message")
