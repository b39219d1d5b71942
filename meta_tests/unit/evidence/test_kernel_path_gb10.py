"""Logs of a real GB10 with the build that reaches 52 tok/s.

Each field is read from its line, with any prefix or wrapper."""

import json
import re
import tomllib
from collections.abc import Callable

import pytest

from meta_tests.folders import DATA
from meta_tests.logs import read_lines, stated
from sm121 import cli
from sm121.core import builds
from sm121.evidence.kernel_path import detect_engine, read_log, search_last_start
from sm121.evidence.log_message import clean
from sm121.evidence.signatures import startup_progress

GB10 = DATA / "gb10"
LOGS = sorted(path.stem for path in GB10.glob("*.log"))

#: The fields that each log shows. All other fields are null or empty.
SHOWN = {
    "unfused_0804_clean": {
        "speculative": "none",
        "kv_cache_dtype": "fp8",
        "dtype": "bfloat16",
        "load_format": "fastsafetensors",
        "quantization": "mxfp4",
        "context": 131072,
        "prefix_caching": True,
        "attention": "FLASHINFER",
        "attention_decode": "flashinfer-native",
        "moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8",
        "cuda_graphs": True,
        "kv_layout": "HND",
        "native_fp4": True,
        "requantised": ["lm_head"],
        "moe_variant": "unfused",
        "moe_tiles": "(64, 128)",
    },
    "fused_0804_clean": {
        "speculative": "none",
        "kv_cache_dtype": "fp8",
        "dtype": "bfloat16",
        "load_format": "fastsafetensors",
        "quantization": "mxfp4",
        "context": 131072,
        "prefix_caching": True,
        "attention": "FLASHINFER",
        "attention_decode": "flashinfer-native",
        "moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8",
        "cuda_graphs": True,
        "kv_layout": "HND",
        "native_fp4": True,
        "requantised": ["lm_head"],
        "moe_variant": "fused",
        "moe_tiles": "(64, 128)",
    },
    "eugr_version": {
        "speculative": "none",
        "kv_cache_dtype": "fp8",
        "dtype": "bfloat16",
        "load_format": "fastsafetensors",
        "quantization": "mxfp4",
        "context": 131072,
        "prefix_caching": True,
        "attention": "FLASHINFER",
        "attention_decode": "flashinfer-native",
        "moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8",
        "cuda_graphs": True,
        "kv_layout": "HND",
        "native_fp4": True,
        "requantised": ["lm_head"],
        "moe_variant": "unfused",
        "moe_tiles": "(64, 128)",
    },
    "unfused_0804_profiled": {
        "speculative": "none",
        "kv_cache_dtype": "fp8",
        "dtype": "bfloat16",
        "load_format": "fastsafetensors",
        "quantization": "mxfp4",
        "context": 131072,
        "prefix_caching": True,
        "attention": "FLASHINFER",
        "attention_decode": "flashinfer-native",
        "moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8",
        "cuda_graphs": True,
        "kv_layout": "HND",
        "native_fp4": True,
        "requantised": ["lm_head"],
        "failure": "engine_dead",
    },
    "crash_tile_128x128": {
        "speculative": "none",
        "kv_cache_dtype": "fp8",
        "dtype": "bfloat16",
        "load_format": "fastsafetensors",
        "quantization": "mxfp4",
        "context": 131072,
        "prefix_caching": True,
        "attention": "FLASHINFER",
        "attention_decode": "flashinfer-native",
        "moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8",
        "cuda_graphs": True,
        "kv_layout": "HND",
        "native_fp4": True,
        "requantised": ["lm_head"],
        "failure": "engine_dead",
    },
    "issue5_illegal_address": {
        "speculative": "none",
        "kv_cache_dtype": "fp8",
        "dtype": "bfloat16",
        "load_format": "fastsafetensors",
        "quantization": "mxfp4",
        "context": 131072,
        "prefix_caching": True,
        "failure": "illegal_memory_access",
    },
    "issue22_unknown_argument": {"failure": "config"},
    "a start after the log": {
        "moe_variant": "fused",
        "moe_tiles": "(64, 128)",
        "cuda_graphs": True,
    },
}
EVIDENCE = {
    "attention": "Using AttentionBackendEnum.FLASHINFER backend.",
    "moe": "[MXFP4] Using backend: CUTLASS (--mxfp4-backend)",
    "native_fp4": "[MXFP4] Using backend: CUTLASS (--mxfp4-backend)",
    "kv_layout": "Using HND KV cache layout for FLASHINFER backend.",
    "requantised": "[MXFP4] lm_head quantized: torch.Size([201088, 2880]) BF16",
    "moe_variant": "JIT-compiling 1 unfused MoE module(s) for SM121: [(64, 128)]",
    "cuda_graphs": "Graph capturing finished in 6 secs",
    "context": "max_seq_len=131072",
    "kv_cache_dtype": "kv_cache_dtype=fp8",
}

PREFIXES: dict[str, str] = tomllib.loads((DATA / "prefixes.toml").read_text("utf-8"))
#: Text around a line, for cases in which a prefix is not sufficient.
WRAPS: dict[str, Callable[[str], str]] = {
    "docker's file": lambda line: json.dumps({"log": line + "\n", "stream": "stderr"}),
    "journald's JSON": lambda line: json.dumps({"_PID": "7", "MESSAGE": line}),
    "fluentd": lambda line: json.dumps({"ts": 1.5, "message": line}),
    "Ray's own count": lambda line: line + " [repeated 3x across cluster]",
    **{name: (lambda line, p=prefix: p + line) for name, prefix in PREFIXES.items()},
}


def lines_of(name: str) -> list[str]:
    return (GB10 / f"{name}.log").read_text("utf-8").splitlines()


@pytest.mark.parametrize("name", LOGS)
def test_each_field_is_what_the_log_shows_and_the_rest_is_null(name):
    path = read_log(GB10 / f"{name}.log")
    assert stated(path) == SHOWN[name]
    assert set(SHOWN[name]) <= set(path.evidence)
    for key in path.evidence:
        assert not key.endswith("_also")


def test_each_field_has_its_line():
    path = read_log(GB10 / "unfused_0804_clean.log")
    for name, line in EVIDENCE.items():
        assert line in path.evidence[name], name


@pytest.mark.parametrize("name", LOGS)
def test_build_and_engine_are_known(name):
    log = GB10 / f"{name}.log"
    path = read_log(log)
    assert detect_engine(log) == "vllm"
    identity = None if name == "issue22_unknown_argument" else "0.14.0+mxfp4"
    assert builds.identity(path.log.version, build=path.log.build) == identity
    # If the version does not show the build, only the build's own lines do.
    assert path.log.build == ("mxfp4" if "moe" in SHOWN[name] else None)


def same_path(name: str, wrap: Callable[[str], str]) -> None:
    bare, path = (read_lines(map(each, lines_of(name))) for each in (str, wrap))
    assert path.model_dump() == bare.model_dump()
    assert (path.log.version, path.log.build, path.log.asked) == (
        bare.log.version,
        bare.log.build,
        bare.log.asked,
    )


def _behind_prefixes() -> list:
    """Return each log with each prefix.

    `make test` uses each log and each prefix at least once, and the clean build's log with each
    prefix."""
    cases = []
    for number, name in enumerate(LOGS):
        for place, prefix in enumerate(WRAPS):
            is_sample = name == "unfused_0804_clean" or place % len(LOGS) == number
            marks = [] if is_sample else [pytest.mark.slow("another log behind this prefix")]
            cases.append(pytest.param(name, prefix, marks=marks, id=f"{name}-{prefix}"))
    return cases


@pytest.mark.parametrize(("name", "prefix"), _behind_prefixes())
def test_behind_any_prefix_it_is_the_same_path(name, prefix):
    same_path(name, WRAPS[prefix])


@pytest.mark.parametrize(
    "prefix",
    [
        "[vllm] ",
        "vllm-7d9c5b8f6-x2x9z vllm ",
        "2/9/2026, 7:04:49 AM ",
        pytest.param("    46\t", id="46"),
        "x ## vllm: ",
    ],
)
@pytest.mark.parametrize("name", ["unfused_0804_clean", "eugr_version"])
def test_an_unknown_prefix_before_the_servers_own_is_removed(name, prefix):
    same_path(name, lambda line: prefix + line)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(
            "| gpt-oss 120B MXFP4 MoE | 59.02 GiB | 116.83 B |",
            id="| gpt-oss 120B MXFP4 MoE | 59.02 GiB | 116.83 B |",
        ),
        "| 12 | 34 |",
        "[MXFP4] Using backend: CUTLASS (--mxfp4-backend)",
        pytest.param(
            "[3/10] /usr/local/cuda/bin/nvcc -c x.cu -o x.cuda.o",
            id="(3/10) /usr/local/cuda/bin/nvcc -c x.cu -o x.cuda.o",
        ),
        "[0/5] step",
        "[Autotuner]: Autotuning process ends",
        "[core.py:96]",
        "CUDA error: out of memory",
        "NCCL error: unhandled system error",
        "vllm: error: unrecognized arguments: --x",
        "    raise ValueError",
        "1234 tokens | 5 requests",
        "12:30 is no moment",
        pytest.param(
            "the answer was '(APIServer pid=1) INFO 02-09 07:04:49 [x.py:1] x'",
            id="the answer was '(APIServer pid=1) INFO 02-09 07:04:49",
        ),
    ],
)
def test_a_message_that_resembles_a_prefix_is_kept(message):
    assert clean(message).text == message
    assert clean(f"2026-05-01 19:08:33.706 | {message}").text == message
    assert clean(f"(EngineCore pid=7) INFO 02-09 07:04:49 [x.py:1] {message}").text == message


def test_a_log_without_its_beginning_shows_its_values():
    lines = lines_of("fused_0804_clean")
    start = next(n for n, line in enumerate(lines) if "JIT-compiling" in line)
    path = read_lines(lines[start:])
    assert stated(path) == SHOWN["a start after the log"]
    assert (path.log.version, path.log.build, path.log.asked) == (None, None, None)


@pytest.mark.parametrize("count", [2, 12, 18, 25, 40, 60])
def test_the_end_of_the_run_before_is_not_this_one(count):
    """The last lines of an earlier run at the beginning of a log do not count for the later run."""
    before = [line.replace("02-09", "02-08") for line in lines_of("fused_0804_clean")]
    before.append("(EngineCore_DP0 pid=9) ERROR 02-08 08:00:00 [core.py:1] EngineDeadError: x")
    path = read_lines([*before[-count:], *lines_of("unfused_0804_profiled")])
    assert stated(path) == SHOWN["unfused_0804_profiled"]


NSYS = (
    "Generating '/tmp/nsys-report-6fcf.qdstrm'",
    "[1/8] [========================100%] server.nsys-rep",
    "[6/8] Executing 'cuda_gpu_kern_sum' stats report",
    (" 18.2  123456789  4536  168000.0  void marlin_moe_wna16::Marlin<__nv_bfloat16>"),
    "Using 'MARLIN' Mxfp4 MoE backend.",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
)


@pytest.mark.parametrize("name", ["unfused_0804_clean", "eugr_version"])
@pytest.mark.parametrize("first", [0, 18, 25, 40])
@pytest.mark.parametrize("prefix", ["", "vllm-1  | "])
def test_lines_of_an_older_run_in_an_overwritten_log_do_not_count(name, first, prefix):
    """Lines of an older run in an overwritten log do not count.

    The file was longer before it was overwritten, so an old start, its end and nsys' table remain.
    """
    lines = lines_of(name)
    older = lines_of("fused_0804_clean")[first:]
    died = "(APIServer pid=9) ERROR 02-09 07:22:01 [async_llm.py:551] AsyncLLM EngineDeadError: x"
    path = read_lines(prefix + line for line in [*lines, *older, died, *NSYS])
    assert stated(path) == SHOWN[name]
    assert path.log.version == read_lines(lines).log.version


def test_no_rule_is_met_or_broken_by_what_is_older(tmp_path):
    log = tmp_path / "server.log"
    older = lines_of("fused_0804_clean")[18:]
    log.write_text("\n".join([*lines_of("unfused_0804_clean"), *older, *NSYS]) + "\n")
    path = read_log(log)
    patterns = [*map(re.compile, ("marlin_moe_wna16::Marlin<", "\\w+ MoE module", "Mxfp4 MoE"))]
    ((_, line),) = search_last_start(log, path.log.begins, patterns, path.log.ends)
    assert line.split("JIT-compiling ")[1] == "1 unfused MoE module(s) for SM121: [(64, 128)]"
    assert len([*search_last_start(log, path.log.begins, patterns)]) == 4


@pytest.mark.parametrize("before", [["fused_0804_clean"], []], ids=len)
def test_a_newer_start_counts_and_what_nsys_prints_behind_it_does_not(before):
    logs = []
    for name in (*before, "unfused_0804_clean"):
        logs.extend(lines_of(name))
    assert stated(read_lines(logs)) == SHOWN["unfused_0804_clean"]
    assert stated(read_lines([*logs, *NSYS])) == SHOWN["unfused_0804_clean"]


def test_a_start_is_followed():
    phases = [p for p in map(startup_progress, lines_of("unfused_0804_clean")) if p]
    for phase in ("loading weights (100 %)", "building kernels (JIT)", "kernels built", "ready"):
        assert phase in phases


ASKED = {
    "--attention-backend FLASHINFER": "resolved",
    "--mxfp4-backend CUTLASS": "resolved",
    "--mxfp4-layers moe,qkv,o,lm_head": "not_proven",
    "--kv-cache-dtype fp8": "resolved",
    "--max-model-len 131072": "resolved",
    "--enable-prefix-caching true": "resolved",
    "--load-format fastsafetensors": "resolved",
    "--quantization mxfp4": "resolved",
}


@pytest.mark.parametrize("name", ["unfused_0804_profiled", "eugr_version", "crash_tile_128x128"])
def test_the_command_shows_the_requested_values(name, capsys):
    assert cli.main(["path", str(GB10 / f"{name}.log"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {report["by"]: report["state"] for report in answer["requested"]} == ASKED
    assert answer["differences"] == []
    assert answer["engine"] == "vllm"
