"""The reader of kernel paths: SGLang and llama.cpp, whose log it is, and a log of any size."""

import json
import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_rows import from_data, table
from logs import lines_of, proofs, read_lines, stated
from test_kernel_path import unreached

from sm121 import cli
from sm121.evidence import signatures
from sm121.evidence.kernel_path import KernelPath, detect_engine, read_log
from sm121.evidence.signatures import startup_progress

CORE = "(EngineCore pid=7) INFO 10-05 02:13:33 "
# The dictionary as 0.5.23 logged it (shortened).
SERVER_ARGS, SERVER_DICT, NO_AMX, WEIGHTS_LOADED = (
    table(__name__, name) for name in ("SERVER_ARGS", "SERVER_DICT", "NO_AMX", "WEIGHTS_LOADED")
)
LINES = lines_of("engine-lines.toml")
SGLANG, LLAMA = (proofs(LINES[engine]["proves"]) for engine in ("sglang", "llama-cpp"))
ON_A_CPU = table(__name__, "ON_A_CPU")


@pytest.mark.parametrize(
    ("engine", "line", "field", "value"),
    [(engine, *proof) for engine in LINES for proof in proofs(LINES[engine]["proves"])],
)
def test_line_proves_value(engine, line, field, value):
    assert getattr(read_lines([line], engine), field) == value


def test_a_start_is_followed_in_the_words_of_its_engine():
    assert startup_progress(SERVER_DICT, "sglang") == "starting the server"
    line = "[2026-11-23 19:16:07] Init parallel begin."
    assert startup_progress(line, "sglang") == "starting the workers"
    assert startup_progress(SERVER_DICT, "vllm") is None


@pytest.mark.parametrize(
    ("line", "engine"), [(line, engine) for engine in LINES for line in LINES[engine]["silent"]]
)
def test_line_of_another_engine_proves_nothing(line, engine):
    assert stated(read_lines([line], engine)) == {}


@pytest.mark.parametrize(("engine", "lines"), [("sglang", SGLANG), ("llama-cpp", LLAMA)])
def test_every_signature_of_the_engine_is_exercised(engine, lines):
    disabled = "Disabling CUDA graph capture for native FP4 KV cache"
    every = (*(line for line, _, _ in lines), *ON_A_CPU, disabled, NO_AMX)
    assert unreached(engine, every) == []


QUOTED = table(__name__, "QUOTED")


@from_data
def test_what_users_write_proves_nothing(before, tmp_path):
    line = f"{before}'{QUOTED}'"
    log = tmp_path / "server.log"
    log.write_text(line + "\n")
    assert read_log(log) == read_lines([line]) == KernelPath()


@from_data
def test_of_a_server_that_was_restarted_the_last_run_counts(engine, first, last):
    alone = read_lines(last.split("\n"), engine)
    assert read_lines([*first.split("\n"), *last.split("\n")], engine) == alone


@pytest.mark.parametrize(
    ("lines", "engine"),
    [
        ([line for line, _, _ in SGLANG], "sglang"),
        ([line for line, _, _ in LLAMA], "llama-cpp"),
        ([CORE + "[mxfp4.py:499] Using 'MARLIN' Mxfp4 MoE backend."], "vllm"),
        (["NVRM: Xid (PCI:000f:01:00): 13, pid=1"], None),
        ([""], None),
    ],
)
def test_the_log_tells_whose_it_is(lines, engine, tmp_path):
    log = tmp_path / "server.log"
    log.write_text("\n".join(lines))
    assert detect_engine(log) == engine


def test_command_reads_the_log_of_any_engine(tmp_path, capsys):
    log = tmp_path / "server.log"
    log.write_text(SERVER_ARGS + "\n")
    assert cli.main(["path", str(log), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["engine"], answer["attention"]) == ("sglang", "triton")


def test_command_reads_metrics_and_a_jit_cache(tmp_path, capsys):
    metrics, cache = tmp_path / "metrics.txt", tmp_path / "cached_ops"
    metrics.write_text('vllm:cache_config_info{block_size="64",cache_dtype="fp8"} 1.0\n')
    binary = Path(__file__).parent / "data" / "moe-mxfp8-mxfp4-plain-sm121.fatbin"
    (cache / "fused_moe_120").mkdir(parents=True)
    shutil.copy(binary, cache / "fused_moe_120" / "fused_moe_120.fatbin")
    assert cli.main(["path", "--metrics", str(metrics), "--jit-cache", str(cache)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["block_size"], answer["kv_cache_dtype"]) == ("64", "fp8")
    (compiled,) = answer["jit_cache"]
    assert (compiled["name"], compiled["part"]) == ("fused_moe_120", "moe")
    assert (compiled["state"], compiled["sass"]) == ("plain", ["sm_121"])
    assert "sm_121" in answer["evidence"]["jit_cache.fused_moe_120"]


EXCERPT = [
    WEIGHTS_LOADED,
    "[2026-06-07 11:57:57] Capture cuda graph end. Time elapsed: 13.63 s.",
    "[2026-06-07 11:58:25] Decode batch, #running-req: 1, cuda graph: True, gen throughput "
    "(token/s): 60.1",
]


@pytest.mark.parametrize("first", range(len(EXCERPT)))
def test_an_excerpt_of_sglang_is_known_without_its_first_lines(first, tmp_path):
    log = tmp_path / "server.log"
    log.write_text("\n".join(EXCERPT[first:]) + "\n")
    assert detect_engine(log) == "sglang"
    path = read_log(log, "sglang")
    assert (path.cuda_graphs, path.attention, path.moe) == (True, None, None)
    assert path.dtype == ("bfloat16" if first == 0 else None)


# ------------------------------------------------------------------------------------ a large log

POOL = [
    *(line for line, _, _ in (*SGLANG, *LLAMA)),
    *(f"{CORE}{line}" for line in table(__name__, "OF_THE_CORE")),
    *table(__name__, "OF_OTHERS"),
]


def texts() -> Iterator[str]:
    drawn = random.Random(7)
    for _ in range(8):
        lines = []
        for _ in range(120):
            line = drawn.choice(POOL)
            if drawn.random() < 0.5:
                line = "".join(str(drawn.randrange(10)) if c.isdigit() else c for c in line)
            lines += [line] * drawn.choice((1, 1, 1, 3))
        yield "\n".join(lines)


def test_a_file_is_read_as_its_lines_are(tmp_path):
    """Skipping what differs in digits alone changes no answer."""
    log = tmp_path / "server.log"
    for text in texts():
        log.write_text(text)
        for engine in signatures.known_engines():
            read, lines = read_log(log, engine), read_lines(text.split("\n"), engine)
            # Where the last start begins is known of a file only.
            of_a_file: dict[str, dict[str, int]] = {"begins": {}, "ends": {}}
            assert read.model_copy(update=of_a_file) == lines.model_copy(update=of_a_file)


def test_a_large_log_is_read_fast_and_in_bounded_memory(tmp_path):
    """100 MB of a server that served for days; the choice stands at the end of them."""
    log = tmp_path / "server.log"
    block = "".join(
        f"(APIServer pid=1) INFO 10-05 02:{n % 60:02}:33 [loggers.py:257] Engine 000: Avg prompt "
        f"throughput: {n}.3 tokens/s, Avg generation throughput: 59.{n} tokens/s, Running: 1 reqs\n"
        f'(APIServer pid=1) INFO:     127.0.0.1:{n} - "POST /v1/completions HTTP/1.1" 200 OK\n'
        for n in range(5_000)
    ).encode()
    with log.open("wb") as stream:
        while stream.tell() < 100 << 20:
            stream.write(block)
        stream.write((CORE + "[mxfp4.py:499] Using 'MARLIN' Mxfp4 MoE backend.\n").encode())
    before = resource.getrusage(resource.RUSAGE_SELF)
    path = read_log(log)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert path.moe == "MARLIN"
    assert after.ru_maxrss - before.ru_maxrss < 50 * 1024  # KiB
    # 0.4 s on a quiet core, 4 s for a gigabyte; twenty times that on a machine that does much else
    assert after.ru_utime - before.ru_utime < 8.0
