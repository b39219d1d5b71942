"""The reader of kernel paths: SGLang and llama.cpp, how the engine of a log is recognised, and
large logs."""

import json
import random
import resource
import shutil
from collections.abc import Iterator

import pytest

from meta_tests.folders import DATA
from meta_tests.logs import lines_of, proofs, read_lines, stated
from meta_tests.unit.evidence.test_kernel_path import unreached
from sm121 import cli
from sm121.evidence import signatures
from sm121.evidence.kernel_path import KernelPath, detect_engine, read_log, shown
from sm121.evidence.signatures import startup_progress

CORE = "(EngineCore pid=7) INFO 10-05 02:13:33 "
# The dictionary in the log of SGLang 0.5.23 (shortened).
SERVER_ARGS = (
    "[2026-06-07 11:57:02] server_args=ServerArgs(model_path='m', "
    "dtype='bfloat16', load_format='safetensors', quantization='mxfp4', "
    "kv_cache_dtype='fp8_e4m3', attention_backend='triton', "
    "moe_runner_backend='flashinfer_mxfp4', speculative_algorithm='EAGLE3', "
    "disable_cuda_graph=True, x=1)"
)
SERVER_DICT = (
    "[2026-11-23 19:15:33] server_args={'model_path': 'm', 'load_format': "
    "'safetensors', 'dtype': 'bfloat16', 'quantization': 'mxfp4', "
    "'kv_cache_dtype': 'fp8_e4m3', 'served_model_name': 'n', "
    "'attention_backend': 'torch_native', 'decode_attention_backend': None, "
    "'disable_cuda_graph': True, 'speculative_algorithm': None, "
    "'speculative_moe_runner_backend': 'triton', 'moe_runner_backend': "
    "'triton_kernel'}"
)
NO_AMX = (
    "[2026-11-23 19:15:30] The current platform does not support Intel AMX, "
    "will fallback to torch_native backend."
)
WEIGHTS_LOADED = (
    "[2026-06-07 11:57:43 TP0] Load weight end. type=GptOssForCausalLM, "
    "dtype=torch.bfloat16, quant=mxfp4, avail mem=50.00 GB, mem usage=63.00 GB."
)
LINES = lines_of("engine-lines.toml")
SGLANG, LLAMA = (proofs(LINES[engine]["proves"]) for engine in ("sglang", "llama-cpp"))
ON_A_CPU = (
    (
        "0.00.002.211 I cmn  common_param: system_info: n_threads = 1 "
        "(n_threads_batch = 1) / 2 | CPU : SSE3 = 1 | REPACK = 1 | "
    ),
    "0.01.238.191 I load_tensors:   CPU_Mapped model buffer size =   204.99 MiB",
)


@pytest.mark.parametrize(
    ("engine", "line", "field", "value"),
    [(engine, *proof) for engine in LINES for proof in proofs(LINES[engine]["proves"])],
)
def test_line_proves_value(engine, line, field, value):
    assert shown(read_lines([line], engine), field) == value


def test_progress_of_a_start_has_steps_of_its_engine():
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


QUOTED = (
    "Using 'MARLIN' Mxfp4 MoE backend. Using HND KV cache layout. "
    "torch.OutOfMemoryError: CUDA out of memory. Unknown vLLM environment "
    "variable detected: VLLM_FOO NVRM: Xid (PCI:0): 13, pid=1"
)


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(
            ("(APIServer pid=1) INFO 10-05 02:13:33 [logger.py:40] Received request c-1: prompt: "),
            id="(APIServer pid=1) INFO 10-05 02:13:33 (logger.py:40)",
        ),
        pytest.param(
            ("(APIServer pid=1) DEBUG 10-05 02:13:33 [logger.py:40] Request c-1 details: prompt: "),
            id="(APIServer pid=1) DEBUG 10-05 02:13:33 (logger.py:40)",
        ),
        pytest.param(
            (
                "(APIServer pid=1) INFO 10-05 02:13:33 [logger.py:40] Generated response "
                "c-1: output: "
            ),
            id="(APIServer pid=1) INFO 10-05 02:13:33 (logger.py:40) (2)",
        ),
        pytest.param(
            "[2026-06-07 11:57:02] Receive: obj=GenerateReqInput(text=",
            id="(2026-06-07 11:57:02) Receive",
        ),
    ],
)
def test_quoted_user_text_proves_nothing(before, tmp_path):
    line = f"{before}'{QUOTED}'"
    log = tmp_path / "server.log"
    log.write_text(line + "\n")
    assert read_log(log) == read_lines([line]) == KernelPath()


@pytest.mark.parametrize(
    ("engine", "first", "last"),
    [
        pytest.param(
            "sglang",
            ("server_args=ServerArgs(attention_backend='triton', moe_runner_backend='triton')"),
            ("server_args=ServerArgs(attention_backend='flashinfer', moe_runner_backend='auto')"),
            id="sglang",
        ),
        pytest.param(
            "llama-cpp",
            "build_info: b1\nllama_context: flash_attn    = enabled",
            "build_info: b2\nllama_context: flash_attn    = disabled",
            id="llama-cpp",
        ),
    ],
)
def test_the_last_start_in_a_log_counts(engine, first, last):
    alone = read_lines(last.split("\n"), engine)
    assert read_lines([*first.split("\n"), *last.split("\n")], engine) == alone


@pytest.mark.parametrize(
    ("lines", "engine"),
    [
        ([line for line, _, _ in SGLANG], "sglang"),
        ([line for line, _, _ in LLAMA], "llama-cpp"),
        ([CORE + "[mxfp4.py:499] Using 'MARLIN' Mxfp4 MoE backend."], "vllm"),
        (["NVRM: Xid (PCI:000f:01:00): 13, pid=1"], None),
        (["[Nov30 10:00] NVRM: Xid (PCI:000f:01:00): 13, pid=1, name=VLLM::EngineCor"], None),
        (['"msg": "NVRM: Xid (PCI:000f:01:00): 13, pid=1, name=VLLM::EngineCor"'], None),
        (["[  +0.000004] Out of memory: Killed process 12 (VLLM::EngineCor) total-vm:1kB"], None),
        (["oom-kill:constraint=CONSTRAINT_NONE,task=VLLM::EngineCor,pid=12,uid=0"], None),
        (["|    0   N/A  N/A      12      C   VLLM::EngineCore          90000MiB |"], None),
        (["[TRT-LLM] [I] Loading /models/vllm/gpt-oss-120b"], None),
        ([""], None),
    ],
)
def test_the_engine_is_detected_from_its_log(lines, engine, tmp_path):
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
    metrics = tmp_path / "metrics.txt"
    cache = tmp_path / "cached_ops"
    metrics.write_text('vllm:cache_config_info{block_size="64",cache_dtype="fp8"} 1.0\n')
    binary = DATA / "moe-mxfp8-mxfp4-plain-sm121.fatbin"
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


# ------------------------------------------------------------------------------------ A large log

POOL = [
    *(line for line, _, _ in (*SGLANG, *LLAMA)),
    *(
        f"{CORE}{line}"
        for line in (
            ("[cuda.py:507] Using FLASHINFER attention backend out of potential backends: ['X']."),
            "[mxfp4.py:499] Using 'MARLIN' Mxfp4 MoE backend.",
            ("[loggers.py:257] Engine 000: Avg prompt throughput: 12.3 tokens/s, Running: 1 reqs"),
            (
                "[core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: x, "
                "device_config=cpu"
            ),
        )
    ),
    *(
        ('(APIServer pid=1) INFO:     127.0.0.1:55282 - "POST /v1/completions HTTP/1.1" 200 OK'),
        "     wrapped, speculative_config=None, kv_cache_dtype=fp8, y",
        '  File "core.py", line 490 in cutlass_fused_moe',
        "Traceback (most recent call last):",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "INFO:     Application startup complete.",
        (
            "vllm-1  | (EngineCore pid=7) INFO 10-05 02:13:33 [cuda.py:427] Using "
            "FLASH_ATTN backend."
        ),
        (
            "vllm-2  | (EngineCore pid=7) INFO 10-05 02:13:33 [cuda.py:427] Using "
            "TRITON_ATTN backend."
        ),
        "(APIServer pid=1) ERROR 10-05 02:13:33 [core.py:9] EngineDeadError",
        "plain words without anything, number 5",
    ),
]


def texts(count: int) -> Iterator[str]:
    drawn = random.Random(7)
    for _ in range(count):
        lines = []
        for _ in range(120):
            line = drawn.choice(POOL)
            if drawn.random() < 0.5:
                characters = []
                for c in line:
                    if c.isdigit():
                        characters.append(str(drawn.randrange(10)))
                    else:
                        characters.append(c)
                line = "".join(characters)
            lines += [line] * drawn.choice((1, 1, 1, 3))
        yield "\n".join(lines)


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow("more texts"))])
def test_a_file_is_read_as_its_lines_are(tmp_path, count):
    """Reading a file gives the same result as reading its lines, although lines that differ only in
    digits are skipped."""
    log = tmp_path / "server.log"
    for text in texts(count):
        log.write_text(text)
        for engine in signatures.known_engines():
            read = read_log(log, engine)
            lines = read_lines(text.split("\n"), engine)
            for path in (read, lines):  # only a file shows where the last start begins
                path.log.begins.clear()
                path.log.ends.clear()
            assert read == lines


def test_a_large_log_is_read_fast_and_in_bounded_memory(tmp_path):
    """A large log is read quickly and in little memory.

    It has 100 MB of a server that ran for days, and the kernel choice is at its end."""
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
    assert after.ru_maxrss - before.ru_maxrss < 50 * 1024  # the unit is KiB
    # This takes 0.4 s on an idle core, and 4 s for a gigabyte. On a busy machine, it may take
    # twenty times as long.
    assert after.ru_utime - before.ru_utime < 8.0
