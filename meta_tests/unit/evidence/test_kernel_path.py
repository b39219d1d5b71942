"""The reader of kernel paths: each signature matches its line, and no misleading line is
evidence."""

from collections.abc import Iterable
from importlib.resources import files
from types import SimpleNamespace

import pytest

from meta_tests.folders import DATA
from meta_tests.logs import lines_of, proofs, read_lines, stated
from sm121.core import profile
from sm121.core.data_file import DataFileError
from sm121.evidence import log_lines, log_message
from sm121.evidence.kernel_path import LogReader, mistaken_environment, read_log, shown
from sm121.evidence.signatures import load_signatures
from sm121.run.paths import KernelPaths

CORE = "(EngineCore pid=7) INFO 10-05 02:13:33 "

LINES = lines_of("vllm-lines.toml")

PROVES = proofs(LINES["proves"])


@pytest.mark.parametrize(("line", "field", "value"), PROVES)
def test_line_proves_value(line, field, value):
    path = read_lines([line])
    assert shown(path, field) == value
    assert path.evidence[field] in log_message.clean(line).text
    assert len(path.evidence[field]) <= 400


@pytest.mark.parametrize("line", LINES["silent"] + LINES["benign"])
def test_line_proves_nothing(line):
    path = read_lines([line])
    # A backend that was refused is a failure, and does not prove a backend.
    assert stated(path).keys() <= {"failure"} and path.log.version is None
    assert path.failure is None or line not in LINES["benign"]


def unreached(engine: str, lines: Iterable[str]) -> list[str]:
    """Return signatures of an engine's path that match none of these lines."""
    cleaned = [log_message.clean(line) for line in lines]
    silent = []
    for entry in load_signatures(engine).signature:
        if entry.field != "progress" and not any(entry.search(line) for line in cleaned):
            silent.append(entry.id)
    return silent


def test_every_vllm_path_signature_is_exercised():
    """Every signature of vLLM's kernel path is matched by a line here.

    Otherwise, a signature could match nothing without anybody noticing."""
    lines = (*(line for line, _, _ in PROVES), *LINES["fallbacks"].values(), *LINES["others"])
    assert unreached("vllm", lines) == []
    fallbacks = {entry.id for entry in load_signatures("vllm").of("fallback")}
    assert fallbacks == set(LINES["fallbacks"]), "each has a line of its own"


@pytest.mark.parametrize("kind", sorted(LINES["fallbacks"]))
def test_a_logged_fallback_is_found(kind):
    path = read_lines([LINES["fallbacks"][kind]])
    assert kind in path.fallbacks
    assert path.evidence[f"fallbacks.{kind}"]


@pytest.mark.parametrize(
    ("line", "fallbacks"),
    [
        pytest.param(
            "FlashInfer is not available. Falling back to PyTorch-native",
            ("sampler_pytorch",),
            id="FlashInfer is not available. Falling back to",
        ),
        pytest.param(
            (
                "(EngineCore pid=7) WARNING 10-05 02:13:33 [topk_topp_sampler.py:9] "
                "FlashInfer top-p/top-k sampling not supported on compute capability 12.1; "
                "falling back to PyTorch-native sampler."
            ),
            ("sampler_pytorch",),
            id="(EngineCore pid=7) WARNING 10-05 02:13:33",
        ),
        pytest.param(
            (
                "(EngineCore pid=7) INFO 10-05 02:13:33 [gdn.py:9] Falling back to the "
                "Triton GDN decode path"
            ),
            (),
            id="(EngineCore pid=7) INFO 10-05 02:13:33 (gdn.py:9)",
        ),
        pytest.param(
            ("(EngineCore pid=7) INFO 10-05 02:13:33 [mxfp4.py:311] [MXFP4] Auto-selected: Triton"),
            (),
            id="(EngineCore pid=7) INFO 10-05 02:13:33 (mxfp4.py:311)",
        ),
    ],
)
def test_other_wordings_of_a_fallback_are_found(line, fallbacks):
    assert read_lines([line]).fallbacks == [*fallbacks]


@pytest.mark.parametrize(
    ("line", "fallbacks"),
    [
        pytest.param(
            (
                "[cuda.py:507] Using TRITON_ATTN attention backend out of potential "
                "backends: ['TRITON_ATTN']."
            ),
            ("attention_one_candidate",),
            id="(cuda.py:507) Using TRITON_ATTN attention backend out",
        ),
        pytest.param(
            (
                "[cuda.py:351] Using TRITON_ATTN attention backend out of potential "
                "backends: ('TRITON_ATTN',)"
            ),
            ("attention_one_candidate",),
            id="(cuda.py:351) Using TRITON_ATTN attention backend out",
        ),
        pytest.param(
            (
                "[cuda.py:507] Using FLASHINFER attention backend out of potential "
                "backends: ['FLASHINFER', 'TRITON_ATTN']."
            ),
            (),
            id="(cuda.py:507) Using FLASHINFER attention backend out of",
        ),
        pytest.param(
            (
                "[nvfp4.py:242] Using 'MARLIN' NvFp4 MoE backend out of potential "
                "backends: ['MARLIN']."
            ),
            ("moe_one_candidate",),
            id="(nvfp4.py:242) Using 'MARLIN' NvFp4 MoE backend out of",
        ),
        pytest.param(
            (
                "[nvfp4.py:242] Using 'MARLIN' NvFp4 MoE backend out of potential "
                "backends: ['FLASHINFER_CUTLASS', 'MARLIN']."
            ),
            (),
            id="(nvfp4.py:242) Using 'MARLIN' NvFp4 MoE backend out of (2)",
        ),
    ],
)
def test_a_choice_among_candidates_is_a_silent_fallback(line, fallbacks):
    path = read_lines([CORE + line])
    assert path.silent_fallbacks == [*fallbacks]
    assert path.fallbacks == []
    for name in fallbacks:
        assert f"silent_fallbacks.{name}" in path.evidence


WRAPPERS = (
    "\x1b[1;36m(EngineCore_DP0 pid=9)\x1b[0;0m INFO 11-28 15:27:47 {}",
    "^[[0;36m(EngineCore_DP0 pid=9)^[[0;0m INFO 01-27 00:31:44 {}",
    "[1;36m(EngineCore_DP0 pid=9)[0;0m INFO 09-30 18:36:53 {}",
    "Aug 18 22:22:14 spark vllm[18]: (Worker_TP0 pid=18) INFO 08-18 22:22:14 {}",
    (
        "(EngineCore pid=5) \x1b[36m(RayWorkerProc pid=7, ip=192.0.2.11)\x1b[0m "
        "(Worker_TP1 pid=7) INFO 06-20 01:23:34 {}"
    ),
    "46:(Worker pid=90) INFO 09-23 07:05:04 {}",
    "server.log:46:(Worker pid=90) INFO 09-23 07:05:04 {}",
    "vllm-1  | (EngineCore pid=1) INFO 03-10 15:49:42 {}",
    "2026-03-10T15:49:42.123456789Z (EngineCore pid=1) INFO 03-10 15:49:42 {}",
    "2026-03-10T15:49:42.1Z stdout F (EngineCore pid=1) INFO 03-10 15:49:42 {}",
    r'{{"log":"(EngineCore pid=1) INFO 03-10 15:49:42 {}\n","stream":"stdout"}}',
    "INFO 2026-01-30 13:11:39.808 {}",
    "{}",
)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_are_stripped(wrapper):
    path = read_lines([wrapper.format("[cuda.py:427] Using FLASH_ATTN backend.")])
    assert path.attention == "FLASH_ATTN"
    assert path.evidence["attention"] == "Using FLASH_ATTN backend."


def test_unknown_variables():
    line = "WARNING 07-02 21:58:11 [envs.py:2027] Unknown vLLM environment variable detected: "
    names = ["VLLM_ATTENTION_BACKEND", "VLLM_BUILD_URL", "VLLM_CPU_PORT_8000_TCP"]
    path = read_lines([line + name for name in (*names, names[0])])
    assert path.unknown_env == names
    assert mistaken_environment(path) == ["VLLM_ATTENTION_BACKEND"]


@pytest.mark.parametrize(
    ("log", "version", "states"),
    [
        pytest.param(
            "vllm-0.32-cpu-stopped.log",
            "0.32.0",
            {
                "moe": "CPU",
                "cuda_graphs": False,
                "kv_layout": "LBHNC",
                "speculative": "none",
                "dtype": "float32",
                "quantization": "none",
                "unknown_env": ["VLLM_ATTENTION_BACKEND"],
                "fallbacks": ["runner_v2_to_v1"],
                "silent_fallbacks": ["moe_one_candidate"],
            },
            id="vllm-0.32-cpu-stopped.log, 0.32.0, moe CPU cuda_graphs",
        ),
    ],
)
def test_a_real_log_states_its_path(log, version, states):
    path = read_log(DATA / log)
    assert (stated(path), path.log.version) == (states, version)
    assert "version" not in path.model_dump()


def test_binary_and_endless_lines(tmp_path):
    log = tmp_path / "server.log"
    good = (CORE + "[cuda.py:427] Using FLASH_ATTN backend.").encode()
    binary = b"\xff\xfe\x00\x80" * 50_000
    endless = b"x" * 3_000_000
    log.write_bytes(binary + b"\n" + endless + b"\r\n" + good + b"\r" + b"\x00" * 100)
    assert max(map(len, log_lines.read_raw_lines(log))) <= log_lines.LINE_LIMIT
    assert read_log(log).attention == "FLASH_ATTN"


def test_memory_does_not_grow_with_the_log():
    unknown = "WARNING [envs.py:1] Unknown vLLM environment variable detected: VLLM_"
    path = read_lines(f"{unknown}{n}" for n in range(2_000))
    assert 0 < len(path.unknown_env) < 1_000


@pytest.mark.parametrize(
    ("engine", "line", "field", "value"),
    [
        pytest.param(
            "sglang",
            (
                "[2026-06-07 11:57:02] server_args=ServerArgs(model_path='m', "
                "prefill_attention_backend=None, attention_backend='triton', "
                "moe_runner_backend='auto')"
            ),
            "attention",
            "triton",
            id="sglang, (2026-06-07 11:57:02)",
        ),
        pytest.param(
            "sglang",
            ("[2026-06-07 11:57:02] server_args=ServerArgs(moe_runner_backend='flashinfer_mxfp4')"),
            "moe",
            "flashinfer_mxfp4",
            id="sglang, (2026-06-07 11:57:02) (2)",
        ),
        pytest.param(
            "sglang",
            (
                "[2026-06-07 11:57:01] Attention backend not specified. Use flashinfer "
                "backend by default."
            ),
            "attention",
            "flashinfer",
            id="sglang, (2026-06-07 11:57:01) Attention backend not",
        ),
        pytest.param(
            "sglang",
            "[2026-06-07 11:57:57] Capture cuda graph end. Time elapsed: 13.63 s.",
            "cuda_graphs",
            True,
            id="sglang, (2026-06-07 11:57:57) Capture cuda graph end.",
        ),
        pytest.param(
            "sglang",
            "[2026-06-07 11:57:57] Decode batch, #running-req: 1, cuda graph: False, gen",
            "cuda_graphs",
            False,
            id="sglang, (2026-06-07 11:57:57) Decode batch",
        ),
        pytest.param(
            "sglang",
            "[2026-06-07 11:57:02] server_args=ServerArgs(speculative_algorithm=None)",
            "speculative",
            "none",
            id="sglang, (2026-06-07 11:57:02) (3)",
        ),
        ("llama-cpp", "llama_context: flash_attn    = enabled", "attention", "FLASH_ATTN"),
        pytest.param(
            "llama-cpp",
            ("common_speculative_init: no implementations specified for speculative decoding"),
            "speculative",
            "none",
            id="llama-cpp, common_speculative_init: no implementations",
        ),
    ],
)
def test_other_engines(engine, line, field, value):
    assert shown(read_lines([line], engine), field) == value


def test_every_signature_file_loads():
    folder = files("sm121.fixtures") / "signatures"
    names = {name for item in folder.iterdir() if (name := item.name).endswith(".toml")}
    names = {name.removesuffix(".toml") for name in names}
    assert {"vllm", "sglang", "llama-cpp", "failures"} <= names
    for name in names - {"failures"}:
        assert load_signatures(name).engine == name


def test_unknown_engine_is_refused():
    with pytest.raises(DataFileError, match=r"known engines: .*vllm"):
        read_lines([], "nobody")


@pytest.mark.parametrize(
    ("name", "change", "managed", "wrong"),
    [
        pytest.param("cpu-tiny-gpt-oss", ("", ""), False, (), id="cpu-tiny-gpt-oss, not managed"),
        pytest.param("cpu-tiny-gpt-oss", ("", ""), True, (), id="cpu-tiny-gpt-oss, managed"),
        pytest.param(
            "cpu-tiny-gpt-oss",
            ("Using CPU Unq", "Using TPU Unq"),
            False,
            ("moe: expected CPU",),
            id="cpu-tiny-gpt-oss, Using CPU Unq Using TPU Unq, not",
        ),
        pytest.param(
            "sm90-tiny-gpt-oss",
            ("", ""),
            False,
            ("attention: expected FLASH_ATTN",),
            id="sm90-tiny-gpt-oss, not managed, attention: required",
        ),
    ],
)
def test_values_that_the_engine_does_not_log_are_not_judged(tmp_path, name, change, managed, wrong):
    """Values that the engine does not log are not judged.

    vLLM on the CPU logs no attention backend, so this value is not proven. The other values are
    judged."""
    log = tmp_path / "server.log"
    log.write_text((DATA / "vllm-0.32-cpu-stopped.log").read_text("utf-8").replace(*change))
    loaded = profile.load(name)
    path = read_log(log)
    under_test = loaded.configurations[loaded.under_test]
    server = SimpleNamespace(configuration=under_test if managed else None, log=log)
    target = SimpleNamespace(require_profile=lambda: loaded)
    paths = KernelPaths(target=target, record=None, configurations=None, servers=None)
    paths.of = lambda _server: path
    paths.spanned = lambda _server: None
    if managed:
        assert paths.unlogged(server) is None
        return
    lines = [*map(str, paths._contradictions(server, loaded.under_test))]
    lines = [line for line in lines if ": expected" in line and "variables" not in line]
    assert len(lines) == len(wrong), lines
    for line, text in zip(lines, wrong, strict=True):
        assert line.startswith(text)


def test_lines_of_metrics_are_read_once(monkeypatch, tmp_path):
    """The lines of /metrics are read only once.

    A server that has run for a week has 60,000 of them in its log."""
    start = "(APIServer pid=1) INFO 11-20 10:00:01 [utils.py:293] vLLM API server version 0.32.0"
    metrics = (
        "(APIServer pid=1) INFO 11-20 10:01:{:02d} [loggers.py:248] Engine 000: Avg prompt "
        "throughput: {}.4 tokens/s, Avg generation throughput: 30.1 tokens/s, Running: 1 reqs, "
        "Waiting: 0 reqs, GPU KV cache usage: 0.1%, Prefix cache hit rate: 21.0%"
    )
    log = tmp_path / "server.log"
    log.write_text("\n".join([start, *(metrics.format(at, at) for at in range(60))]) + "\n")
    taken = []
    take = LogReader.take
    monkeypatch.setattr(
        LogReader,
        "take",
        lambda reader, line: (taken.append(line.text), take(reader, line)),
    )
    read_log(log)
    assert 2 <= len(taken) <= 4, taken
