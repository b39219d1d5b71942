"""``sm121 path`` on parts of logs: the end of a long log, a worker's stack, kernel messages,
another engine's log.

Existing values are read, and missing ones are null."""

import json
from pathlib import Path

import pytest

from sm121 import cli
from sm121.evidence.kernel_path import detect_engine

STEADY = [
    "(APIServer pid=1) INFO 11-20 10:00:10 [loggers.py:259] Engine 000: Avg prompt throughput: "
    "12.0 tokens/s, Avg generation throughput: 31.4 tokens/s, Running: 1 reqs, Waiting: 0 reqs, "
    "GPU KV cache usage: 0.4%, Prefix cache hit rate: 61.2%",
    '(APIServer pid=1) INFO:     10.0.0.7:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    "(APIServer pid=1) INFO 11-20 10:00:20 [loggers.py:259] Engine 000: Avg prompt throughput: "
    "0.0 tokens/s, Avg generation throughput: 52.1 tokens/s, Running: 2 reqs, Waiting: 0 reqs, "
    "GPU KV cache usage: 0.4%, Prefix cache hit rate: 61.2%",
]
DRAFTS = (
    "(APIServer pid=1) INFO 11-20 10:00:20 [metrics.py:100] SpecDecoding metrics: Mean acceptance "
    "length: 2.41, Accepted throughput: 20.10 tokens/s, Drafted throughput: 42.80 tokens/s, "
    "Accepted: 201 tokens, Drafted: 428 tokens, Per-position acceptance rate: 0.700, 0.410, "
    "0.300, Avg Draft acceptance rate: 47.0%"
)
WORKER = "(Worker_TP0 pid=215) ERROR 01-20 13:03:50 [multiproc_executor.py:749] "
STACK = [
    WORKER + "Traceback (most recent call last):",
    WORKER
    + '  File "/usr/lib/python3/dist-packages/vllm/v1/worker/gpu_worker.py", line 209, in run',
    WORKER + "    torch.cuda.set_device(device)",
]
MEMORY = WORKER + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
XID = "[78478.1] NVRM: Xid (PCI:000f:01:00): 13, pid=7, name=vllm, Graphics SM Warp Exception"
TRTLLM = [
    "[TensorRT-LLM][INFO] Engine version 1.2.0 found in the config file",
    "[TensorRT-LLM][ERROR] CUDA runtime error in cudaMallocAsync: out of memory",
]
CUBLAS = "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"


def read(lines: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    file = folder / "server.log"
    file.write_text("".join(f"{line}\n" for line in lines))
    assert cli.main(["path", str(file), "--json"]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize(
    ("lines", "engine", "failure"),
    [
        pytest.param(STEADY, "vllm", None, id="the steady state"),
        pytest.param([DRAFTS], "vllm", None, id="metrics of speculation"),
        pytest.param(STACK, "vllm", None, id="a worker's stack without its end"),
        pytest.param([*STACK, MEMORY], "vllm", "oom", id="a worker's stack"),
        pytest.param(
            ["(RayWorkerWrapper pid=7, ip=10.0.0.2) torch.OutOfMemoryError: CUDA out of memory."],
            "vllm",
            "oom",
            id="a worker by Ray",
        ),
        pytest.param(
            ["(Worker_PP1 pid=7) ERROR 01-20 13:03:50 [executor.py:1] ImportError: no such name"],
            "vllm",
            "import_error",
            id="a worker of a pipeline",
        ),
        pytest.param([XID], None, "xid", id="dmesg"),
        pytest.param(
            ["Nov 28 10:00:00 gb10 kernel: Out of memory: Killed process 221 (vllm) total-vm:1kB"],
            None,
            "oom",
            id="the kernel by journald",
        ),
        pytest.param(
            [
                "2026-11-28T10:00:00,123456+01:00 NVRM: Xid (PCI:000f:01:00): 119, pid=7, "
                "name=VLLM::EngineCor, Timeout after 45s of waiting for RPC response from GPU0 GSP!"
            ],
            None,
            "xid",
            id="dmesg with a date",
        ),
        pytest.param(
            ["kern  :warn  : [12345.678901] NVRM: Xid (PCI:000f:01:00): 13, pid=7, name=vllm.bin"],
            None,
            "xid",
            id="dmesg with levels",
        ),
        pytest.param(
            [
                "Nov 28 10:00:00 spark kernel: NVRM: Xid (PCI:000f:01:00): 31, pid=7, name=x",
                "Nov 28 10:00:01 spark systemd[1]: vllm.service: Main process exited, code=killed",
            ],
            None,
            "xid",
            id="a unit by journald",
        ),
        pytest.param(
            [f"vllm.1  | {line}" for line in TRTLLM], None, "oom", id="a service named as an engine"
        ),
        pytest.param(
            [
                "NVRM: Xid (PCI:000f:01:00): 13, Graphics SM Warp Exception",
                "Fatal Python error: Aborted",
                '  File "flashinfer/fused_moe/core.py", line 490 in cutlass_fused_moe',
            ],
            None,
            "xid",
            id="a frame of FlashInfer, which several engines call",
        ),
        pytest.param(
            [
                "Collecting vllm==0.29.0",
                "  Downloading vllm-0.29.0-cp38-abi3-manylinux_2_31_aarch64.whl (412 MB)",
                "ERROR: No matching distribution found for flashinfer-cubin==0.6.18",
                "ImportError: cannot import name 'x' from 'y'",
            ],
            None,
            "import_error",
            id="pip",
        ),
        pytest.param(
            [
                "slot launch_slot_: id  0 | task 123 | processing task",
                "srv  log_server_r: request: POST /v1/chat/completions 127.0.0.1 200",
            ],
            "llama-cpp",
            None,
            id="the steady state of llama-server",
        ),
        pytest.param(TRTLLM, None, "oom", id="TensorRT-LLM"),
        pytest.param([CUBLAS], None, "device_assert", id="a lone cuBLAS error"),
        pytest.param(
            ["Nov 28 10:00:00 spark kernel: NVRM: Xid (PCI:000f:01:00): 79, GPU has fallen off"],
            None,
            "xid",
            id="an Xid by journald",
        ),
        pytest.param(
            ["[TensorRT-LLM][ERROR] Assertion failed: beamWidth > 0 (/s/x.cpp:3)"],
            None,
            "unknown",
            id="TensorRT-LLM's own error",
        ),
        pytest.param(
            ["[ 1234.567890] INFO: task VLLM::EngineCor:42 blocked for more than 122 seconds."],
            None,
            "host",
            id="a blocked task",
        ),
        pytest.param(
            ["[ 1234.567890] python3[221]: segfault at 10 ip 07f1 sp 07ff error 4 in x.so[7f+1]"],
            None,
            "engine_dead",
            id="a segfault in dmesg",
        ),
        pytest.param(
            ["[11/28/2026-10:00:09] [TRT-LLM] [E] Failed to initialize: CUDA out of memory"],
            None,
            "oom",
            id="TensorRT-LLM's Python",
        ),
        pytest.param(
            [f"2026-11-28T10:00:00.000000000Z {STEADY[0]}"], "vllm", None, id="docker logs -t"
        ),
        pytest.param([f"vllm-1  | {STEADY[0]}"], "vllm", None, id="docker compose logs"),
        pytest.param(
            ["INFO 11-20 10:00:00 [cuda.py:1] Using FLASHINFER backend out of potential backends:"],
            "vllm",
            None,
            id="one line that proves a value",
        ),
    ],
)
def test_an_excerpt_is_read_and_its_engine_is_not_guessed(
    lines, engine, failure, tmp_path, capsys
) -> None:
    answer = read(lines, tmp_path, capsys)
    assert (answer["engine"], answer["failure"]) == (engine, failure)
    assert "version" in answer["missing"] and answer["next"]
    assert (answer["remedy"] is not None) is (failure is not None)


def test_the_lines_of_every_ten_seconds_are_read(tmp_path, capsys) -> None:
    answer = read([*STEADY, DRAFTS], tmp_path, capsys)
    assert answer["serving"] == {"generation_tok_s": 52.1, "running": 2, "accepted_length": 2.41}
    assert "from the start of the server on" in str(answer["next"])
    assert read([*STACK, MEMORY], tmp_path, capsys)["serving"] is None


def test_an_unknown_engine_is_printed_as_not_known(tmp_path, capsys) -> None:
    file = tmp_path / "dmesg.txt"
    file.write_text(XID + "\n")
    assert cli.main(["path", str(file)]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first == "engine not known"
    assert any(row.startswith("failed") and "Xid 13" in row for row in rows)


def test_kernels_compiled_during_inference_are_shown(tmp_path, capsys) -> None:
    line = (
        "(EngineCore pid=7) WARNING 11-20 10:00:12 [jit_monitor.py:147] Triton kernel JIT "
        "compilation during inference: _fwd_kernel. This causes a latency spike"
    )
    answer = read([STEADY[0], line, STEADY[2]], tmp_path, capsys)
    assert [text.split(":")[0] for text in answer["compiled"]] == [
        "Triton kernel JIT compilation during inference"
    ]
    assert read(STEADY, tmp_path, capsys)["compiled"] == []
    (tmp_path / "server.log").write_text(f"{STEADY[0]}\n{line}\n")
    assert cli.main(["path", str(tmp_path / "server.log")]) == 0
    assert "compiled during inference" in capsys.readouterr().out


def test_the_rows_have_what_is_served(tmp_path, capsys) -> None:
    file = tmp_path / "tail.log"
    file.write_text("\n".join([*STEADY, DRAFTS]) + "\n")
    assert cli.main(["path", str(file)]) == 0
    rows = capsys.readouterr().out
    assert "highest 52.1 tok/s, 2 requests running; 2.41 tokens of a step accepted" in rows


@pytest.mark.parametrize("text", ["vllm==0.32.0\nflashinfer-python==0.7.2\n", "hello\n", ""])
def test_a_file_without_a_log_line_is_refused(text: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "server.log"
    file.write_text(text)
    assert cli.main(["path", str(file)]) == 4
    assert "expected the log of a server" in capsys.readouterr().err


def test_the_engine_of_an_excerpt_is_detected_by_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text("(EngineCore pid=7) INFO 11-20 10:19:39 [core.py:96] ready\n")
    assert detect_engine(file) == "vllm"
