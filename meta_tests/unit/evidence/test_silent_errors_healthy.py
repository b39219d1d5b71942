"""A healthy log contains no silent error."""

import pytest

from meta_tests.faults.false_greens.errors import LOGGED
from meta_tests.folders import DATA
from meta_tests.unit.evidence.error_logs import errors
from sm121.evidence.silent_errors import ErrorReader

#: Logs of servers that ran until their owner stopped them, or stopped recording.
HEALTHY = (
    "vllm-0.32-cpu-stopped.log", "vllm-0.32-cpu-asked-otherwise.log", "gb10/eugr_version.log",
    "gb10/fused_0804_clean.log", "gb10/unfused_0804_clean.log",
)  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_has_none(name):
    assert ErrorReader("vllm").read(DATA / name) == []


#: Lines from vLLM 0.32 or its source code.
HEALTHY_LINES = (
    ("(APIServer pid=7) WARNING 11-20 10:00:01 [envs.py:1] VLLM_COMPUTE_NANS_IN_LOGITS is set"),
    (
        "Error handling request from 127.0.0.1\n"
        "Traceback (most recent call last):\n"
        '  File "/v/aiohttp/web.py", line 1, in f\n'
        "    raise ValueError(why)\n"
        "aiohttp.client_exceptions.ClientConnectionResetError: Cannot write to "
        "transport"
    ),
    ("[2026-11-20 10:00:01,123 E 7 9] x.cc:1: no connection to the event+metrics exporter agent"),
    (
        "(raylet) [2026-11-20 10:00:01,123 E 7 9] (raylet) main.cc:1032: Failed to "
        "establish connection to the metrics exporter agent. Exporter agent "
        "status: RpcError: out of retries"
    ),
    (
        "(pid=7) [2026-11-20 10:00:01,123 E 7 9] core_worker_process.cc:825: "
        "Failed to establish connection to the metrics exporter agent. Metrics "
        "will not be exported."
    ),
    ("[2026-11-20 10:00:01,123 E 7 9] metric_exporter.cc:206: Export metrics to agent failed: x"),
    (
        "ERROR 01-28 06:35:44 [gpt_oss_triton_kernels_moe.py:34] Failed to import "
        "Triton kernels. Please make sure your triton version is compatible. "
        "Error: No module named 'x'"
    ),
    (
        "(APIServer pid=7) ERROR 11-20 10:00:01 [repo_utils.py:1] Error retrieving "
        "file list: Repo id must be in the form 'repo_name': "
        "'/models/gpt-oss-120b'., retrying 1 of 2"
    ),
    "UserWarning: resource_tracker: process died unexpectedly, relaunching.",
    ("Received request cmpl-1: prompt: 'CUDA error: an illegal memory access', params: x"),
    (
        "(EngineCore pid=8) INFO 11-20 10:00:01 [w.py:1] SpecDecoding metrics: "
        "Mean acceptance length: nan, Accepted: 0 tokens, Drafted: 0 tokens, "
        "Per-position acceptance rate: nan, nan, Avg Draft acceptance rate: nan%"
    ),
    (
        "(EngineCore pid=8) INFO 11-20 10:00:01 [w.py:1] Engine 000: Running: 0 "
        "reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: nan%"
    ),
    (
        "(EngineCore pid=8) WARNING 11-20 10:00:01 [w.py:1] "
        "VLLM_COMPUTE_NANS_IN_LOGITS is enabled: detection of NaN in logits costs "
        "a copy each step"
    ),
    ("(EngineCore pid=8) INFO 11-20 10:00:01 [w.py:1] Model Runner Output: nans in logits: 0"),
    (
        "(EngineCore pid=8) WARNING 11-20 10:00:01 [w.py:1] "
        "ModelRunnerOutput(req_ids=[], num_nans_in_logits={'cmpl-1': 0})"
    ),
    (
        "llama_perf_sampler_print:    sampling time =       0.00 ms /     1 runs   "
        "(     nan ms per token,     -nan tokens per second)"
    ),
    "/v/x.py:3: RuntimeWarning: All-NaN slice encountered",
    ("gb10:7:9 [0] NCCL WARN NET/IB : rocep1s0f0:1 Got async event : GID table change"),
    (
        "gb10:7:9 [0] NCCL WARN NET/IB : rocep1s0f0:1 Got non-fatal async event: "
        "GID table change(18)"
    ),
    "gb10:7:9 [0] NCCL WARN NET/IB : rocep1s0f0:1 GID table changed",
    ("gb10:7:9 [0] NCCL WARN NET/IB : rocep1s0f0:1 Got async event : client reregistration"),
    (
        "gb10:7:7 [0] NCCL WARN NUMA auto balancing enabled which can lead to "
        'variability in the NCCL performance! Disable by "sudo sysctl '
        'kernel.numa_balancing=0"'
    ),
    (
        "E0000 00:00:1732095600.123456    123 cuda_dnn.cc:8310] Unable to register "
        "cuDNN factory: Attempting to register factory for plugin cuDNN when one "
        "has already been registered"
    ),
    (
        "[2026-11-20 10:00:01,123 E 7 9] file_system_monitor.cc:116: "
        "/tmp/ray/session_2026 is over 95% full, available space: 20 GB; capacity: "
        "900 GB. Object creation will fail if spilling is required."
    ),
    "(APIServer pid=7) INFO 11-20 10:00:01 [x.py:1] ECC error count 0",
    "2026-11-20 10:00:01,123 MainProcess INFO no ERROR: fine",
    "[11/20/26 10:00:00] INFO     fine",
    '{"level": 30, "msg": "fine"}',
    '{"levelno": 30, "message": "fine"}',
    '{"severity": "WARNING", "message": "fine"}',
    ('{"status": "error", "code": 400, "level": "info", "message": "a request was refused"}'),
    '{"message": "done", "status": 500}',
    ('{"text": "fine", "record": {"level": {"name": "INFO", "no": 20}, "exception": null}}'),
    (
        '{"levelname": "ERROR", "message": "Error in preprocessing prompt inputs", '
        r'"exc_info": "Traceback (most recent call last):\n  File \"/v/a.py\", line '
        r'1\nValueError: too long"}'
    ),
    (
        "(APIServer pid=7) ERROR 11-20 10:00:01 [serving_chat.py:1] Error in "
        "preprocessing prompt inputs\n"
        "(APIServer pid=7) ERROR 11-20 10:00:01 [serving_chat.py:1] Traceback "
        "(most recent call last):\n"
        "(APIServer pid=7) ERROR 11-20 10:00:01 [serving_chat.py:1]   File "
        '"/v/chat.py", line 1, in f\n'
        "(APIServer pid=7) ERROR 11-20 10:00:01 [serving_chat.py:1]     raise "
        "ValueError(why)\n"
        "(APIServer pid=7) ERROR 11-20 10:00:01 [serving_chat.py:1] ValueError: "
        "This model's maximum context length is 4608 tokens."
    ),
    (
        "(APIServer pid=7) ERROR 11-20 10:00:01 [serving_chat.py:1] Error in "
        "preprocessing prompt inputs\n"
        "(APIServer pid=7) ERROR 11-20 10:00:01 [serving_chat.py:1] Traceback "
        "(most recent call last):\n"
        "(APIServer pid=7) ERROR 11-20 10:00:01 [serving_chat.py:1]   File "
        '"/v/chat.py", line 1, in f\n'
        "(APIServer pid=7) ERROR 11-20 10:00:01 [serving_chat.py:1]     raise "
        "ValueError(why)\n"
        "(APIServer pid=7) ERROR 11-20 10:00:01 [serving_chat.py:1] "
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for Author\n"
        "(APIServer pid=7) ERROR 11-20 10:00:01 [serving_chat.py:1] role"
    ),
    (
        "(APIServer pid=7) ERROR 11-20 10:00:01 [openai_tool_parser.py:1] Error "
        "decoding JSON tool call from response.\n"
        "(APIServer pid=7) ERROR 11-20 10:00:01 [openai_tool_parser.py:1] "
        "Traceback (most recent call last):\n"
        "(APIServer pid=7) ERROR 11-20 10:00:01 [openai_tool_parser.py:1]   File "
        '"/usr/lib/python3.12/json/decoder.py", line 1, in f\n'
        "(APIServer pid=7) ERROR 11-20 10:00:01 [openai_tool_parser.py:1]     "
        "raise ValueError(why)\n"
        "(APIServer pid=7) ERROR 11-20 10:00:01 [openai_tool_parser.py:1] "
        "json.decoder.JSONDecodeError: Unterminated"
    ),
    (
        "(APIServer pid=7) ERROR 11-20 10:00:01 [fa_utils.py:1] Cannot use FA "
        "version 2 is not supported due to x"
    ),
)


def test_a_healthy_line_is_no_error(tmp_path):
    """The lines of healthy servers are not errors. vLLM 0.32 writes them, or its source contains
    them (`source` of the rows)."""
    healthy = [clean for clean, _ in LOGGED.values()]
    healthy += HEALTHY_LINES
    assert {lines: errors(tmp_path, lines) for lines in healthy} == {key: [] for key in healthy}
