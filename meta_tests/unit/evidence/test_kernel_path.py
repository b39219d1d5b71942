"""The reader of kernel paths: every signature reads its line, no trap is taken for evidence."""

from collections.abc import Iterable
from importlib.resources import files
from types import SimpleNamespace

import pytest

from meta_tests.folders import DATA
from meta_tests.logs import lines_of, proofs, read_lines, stated
from sm121.core import profile
from sm121.core.data_file import DataFileError
from sm121.evidence import log_lines, log_message
from sm121.evidence.kernel_path import mistaken_environment, read_log
from sm121.evidence.signatures import load_signatures, startup_progress
from sm121.run.harness import Harness

CORE = "(EngineCore pid=7) INFO 10-05 02:13:33 "
LINES = lines_of("vllm-lines.toml")
PROVES = proofs(LINES["proves"])


@pytest.mark.parametrize(("line", "field", "value"), PROVES)
def test_line_proves_value(line, field, value):
    path = read_lines([line])
    assert getattr(path, field) == value
    assert path.evidence[field] in log_message.clean(line).text
    assert len(path.evidence[field]) <= 400


@pytest.mark.parametrize("line", LINES["silent"] + LINES["benign"])
def test_line_proves_nothing(line):
    path = read_lines([line])
    # A refused backend is a failure, and proves no backend.
    assert stated(path).keys() <= {"failure"} and path.version is None
    assert path.failure is None or line not in LINES["benign"]


def unreached(engine: str, lines: Iterable[str]) -> list[str]:
    """Signatures of an engine's path that reach none of these lines."""
    cleaned = [log_message.clean(line) for line in lines]
    return [
        entry.id
        for entry in load_signatures(engine).signature
        if entry.field != "progress" and not any(entry.search(line) for line in cleaned)
    ]


def test_every_vllm_path_signature_is_exercised():
    """A signature that no line here reaches could be dead without anyone noticing."""
    lines = (*(line for line, _, _ in PROVES), *LINES["fallbacks"].values(), *LINES["others"])
    assert unreached("vllm", lines) == []
    fallbacks = {entry.id for entry in load_signatures("vllm").of("fallback")}
    assert fallbacks == set(LINES["fallbacks"]), "each has a line of its own"


@pytest.mark.parametrize("kind", sorted(LINES["fallbacks"]))
def test_fallback_is_told(kind):
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
def test_a_fallback_is_told_in_other_words(line, fallbacks):
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
def test_a_choice_of_one_is_told(line, fallbacks):
    path = read_lines([CORE + line])
    assert path.silent_fallbacks == [*fallbacks]
    assert path.fallbacks == []
    assert all(f"silent_fallbacks.{name}" in path.evidence for name in fallbacks)


@pytest.mark.parametrize(
    ("engine", "lines", "fields", "unknown", "evidence"),
    [
        pytest.param(
            None,
            (
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [cuda.py:507] Using FLASHINFER "
                    "attention backend out of potential backends: ['FLASHINFER']."
                ),
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [mxfp4.py:499] Using 'MARLIN' "
                    "Mxfp4 MoE backend."
                ),
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [gpu_model_runner.py:5071] Loading "
                    "drafter model..."
                ),
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [cuda.py:446] Using "
                    "AttentionBackendEnum.FLASH_ATTN backend."
                ),
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [mxfp4.py:499] Using 'TRITON' "
                    "Mxfp4 MoE backend."
                ),
            ),
            {"attention": "FLASHINFER", "moe": "MARLIN"},
            None,
            None,
            id="the target counts, the drafter does not",
        ),
        pytest.param(
            None,
            (
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [gpu_model_runner.py:5071] Loading "
                    "drafter model..."
                ),
                (
                    "(Worker pid=2) INFO 11-24 02:21:02 [sm121_probe.py:40] Resolved attention "
                    "backend: CPU_ATTN (CPUAttentionBackendImpl), 5 layers; in all 4 with "
                    "sinks, 2 with a window"
                ),
                (
                    "(Worker pid=2) INFO 11-24 02:21:02 [sm121_probe.py:55] Resolved MoE "
                    "backend: CPU (CPUExperts), 4 layers"
                ),
            ),
            {"attention": "CPU_ATTN", "moe": "CPU"},
            None,
            None,
            id="the speaking worker speaks of the target when the drafter is there",
        ),
        pytest.param(
            None,
            (
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [unquantized.py:364] Using TRITON "
                    "Unquantized MoE backend out of potential backends: []."
                ),
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [mxfp4.py:499] Using 'MARLIN' "
                    "Mxfp4 MoE backend."
                ),
            ),
            {"moe": "MARLIN"},
            None,
            None,
            id="quantised experts outweigh unquantised ones",
        ),
        pytest.param(
            None,
            (
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [mxfp4.py:499] Using 'MARLIN' "
                    "Mxfp4 MoE backend."
                ),
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [mxfp4.py:499] Using 'TRITON' "
                    "Mxfp4 MoE backend."
                ),
            ),
            {"moe": "MARLIN"},
            None,
            {"moe_also": "TRITON"},
            id="a second value of equal strength is shown",
        ),
        pytest.param(
            None,
            (
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [__init__.py:683] Using "
                    "FlashInferCutlassNvFp4LinearKernel for NVFP4 GEMM"
                ),
                (
                    "(EngineCore pid=7) WARNING 10-05 02:13:33 [marlin_utils_fp4.py:300] Your "
                    "GPU does not have native support for FP4 computation but FP4 quantization "
                    "is being used. Weight-only FP4 compression will be used leveraging the "
                    "Marlin kernel."
                ),
            ),
            {"native_fp4": False},
            None,
            None,
            id="native linear layers do not make weight-only experts native",
        ),
        pytest.param(
            None,
            (
                (
                    "(APIServer pid=1) INFO 10-05 02:13:00 [model.py:733] Resolved "
                    "architecture: GptOssForCausalLM"
                ),
                (
                    "(EngineCore pid=7) WARNING 10-05 02:13:33 [marlin_utils_fp4.py:226] Your "
                    "GPU does not have native support for FP4 computation but FP4 quantization "
                    "is being used. Weight-only FP4 compression will be used leveraging the "
                    "Marlin kernel."
                ),
            ),
            {"moe": "MARLIN"},
            None,
            None,
            id="Marlin is inferred for gpt-oss",
        ),
        pytest.param(
            None,
            (
                (
                    "(EngineCore pid=7) WARNING 10-05 02:13:33 [marlin_utils_fp4.py:226] Your "
                    "GPU does not have native support for FP4 computation but FP4 quantization "
                    "is being used. Weight-only FP4 compression will be used leveraging the "
                    "Marlin kernel."
                ),
            ),
            None,
            ("moe",),
            None,
            id="the linear layers of a dense model may be Marlin, too",
        ),
        pytest.param(
            None,
            (
                (
                    "(APIServer pid=1) INFO 10-05 02:13:00 [model.py:733] Resolved "
                    "architecture: GptOssForCausalLM"
                ),
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [core.py:133] Initializing a V1 "
                    "LLM engine (v0.32.0) with config: device_config=cpu, x=1"
                ),
            ),
            None,
            ("attention",),
            None,
            id="vLLM says nothing about the attention of a CPU",
        ),
        pytest.param(
            None,
            (
                (
                    "(APIServer pid=1) INFO 10-05 02:13:00 [model.py:733] Resolved "
                    "architecture: GptOssForCausalLM"
                ),
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [core.py:133] Initializing a V1 "
                    "LLM engine (v0.32.0) with config: device_config=cpu, x=1"
                ),
                (
                    "(Worker pid=6825) INFO 11-20 10:27:20 [sm121_probe.py:40] Resolved "
                    "attention backend: CPU_ATTN (CPUAttentionBackendImpl), 4 layers; in all 4 "
                    "with sinks, 2 with a window"
                ),
            ),
            {"attention": "CPU_ATTN"},
            None,
            {"attention": "4 with sinks"},
            id="the attention of a CPU is what the layers hold",
        ),
        pytest.param(
            None,
            (
                (
                    "(EngineCore pid=7) WARNING 10-05 02:13:33 [vllm.py:375] Cudagraph is "
                    "disabled under eager mode"
                ),
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [gpu_model_runner.py:6582] Graph "
                    "capturing finished in 5 secs, took 0.35 GiB"
                ),
            ),
            {"cuda_graphs": True},
            None,
            None,
            id="capture outweighs an eager setting",
        ),
        pytest.param(
            None,
            (
                (
                    "(APIServer pid=1) INFO 10-05 02:13:00 [model.py:733] Resolved "
                    "architecture: GptOssForCausalLM"
                ),
                "WARN: Your GPU does not have native support for FP4 computation but FP4",
                "      quantization is being used. Weight-only FP4 compression will be used",
                "      leveraging the Marlin kernel.",
            ),
            {"moe": "MARLIN", "native_fp4": False},
            None,
            None,
            id="lines wrapped by the poster are joined",
        ),
        pytest.param(
            None,
            (
                (
                    "a  | (EngineCore pid=1) INFO 03-10 15:49:42 [cuda.py:427] Using "
                    "FLASH_ATTN backend."
                ),
                (
                    "b  | (EngineCore pid=1) INFO 03-10 15:49:42 [cuda.py:427] Using "
                    "FLASH_ATTN backend."
                ),
            ),
            {"attention": "FLASH_ATTN"},
            None,
            None,
            id="servers mixed into one log that agree",
        ),
        pytest.param(
            None,
            (
                (
                    "a  | (EngineCore pid=1) INFO 03-10 15:49:42 [cuda.py:427] Using "
                    "FLASH_ATTN backend."
                ),
                (
                    "b  | (EngineCore pid=1) INFO 03-10 15:49:42 [cuda.py:427] Using "
                    "TRITON_ATTN backend."
                ),
            ),
            None,
            ("attention",),
            {"attention_also": "2 servers"},
            id="servers mixed into one log that do not",
        ),
        pytest.param(
            None,
            (
                (
                    "(APIServer pid=1) INFO 10-05 02:13:00 [api_utils.py:347]  ▄▄ ▄█ █     █   "
                    "  █ ▀▄▀ █  version 0.32.0"
                ),
                ("(EngineCore pid=7) INFO 10-05 02:13:33 [cuda.py:427] Using FLASH_ATTN backend."),
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [utils.py:347] Using NHD KV cache "
                    "layout."
                ),
                (
                    "(APIServer pid=1) INFO 10-05 02:13:00 [api_utils.py:347]  ▄▄ ▄█ █     █   "
                    "  █ ▀▄▀ █  version 0.32.0"
                ),
                ("(EngineCore pid=7) INFO 10-05 02:13:33 [cuda.py:427] Using TRITON_ATTN backend."),
            ),
            {"attention": "TRITON_ATTN"},
            ("kv_layout",),
            None,
            id="the last run of a restarted server counts",
        ),
        pytest.param(
            None,
            (
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [mxfp4.py:499] Using 'TRITON' "
                    "Mxfp4 MoE backend."
                ),
                (
                    "(APIServer pid=1) INFO 10-05 02:13:33 [utils.py:1] vLLM API server "
                    "version 0.25.1"
                ),
                (
                    "(EngineCore pid=7) INFO 10-05 02:13:33 [mxfp4.py:499] Using 'MARLIN' "
                    "Mxfp4 MoE backend."
                ),
            ),
            {"moe": "MARLIN"},
            None,
            None,
            id="a log that begins in the run before shows the last one",
        ),
        pytest.param(
            None,
            (
                "INFO 12-31 23:59:50 [api_server.py:1] vLLM API server version 0.14.0",
                (
                    "INFO 01-01 00:00:10 [cuda.py:345] Using AttentionBackendEnum.FLASHINFER "
                    "backend."
                ),
            ),
            {"attention": "FLASHINFER"},
            None,
            None,
            id="the turn of a year is no older run",
        ),
        pytest.param(
            "sglang",
            (
                (
                    "[2026-11-23 19:15:30] The current platform does not support Intel AMX, "
                    "will fallback to torch_native backend."
                ),
            ),
            {"fallbacks": ["no_amx"]},
            None,
            None,
            id="SGLang falls back",
        ),
        pytest.param(
            "sglang",
            (
                (
                    "server_args=ServerArgs(attention_backend='triton', "
                    "decode_attention_backend=None, prefill_attention_backend=None)"
                ),
            ),
            {"attention": "triton"},
            None,
            None,
            id="attention of one kind",
        ),
        pytest.param(
            "sglang",
            (
                (
                    "server_args=ServerArgs(attention_backend='triton', "
                    "decode_attention_backend='triton')"
                ),
            ),
            {"attention": "triton"},
            None,
            None,
            id="attention of one kind (2)",
        ),
        pytest.param(
            "sglang",
            (
                (
                    "server_args=ServerArgs(attention_backend='triton', "
                    "decode_attention_backend='trtllm_mha')"
                ),
            ),
            None,
            ("attention",),
            None,
            id="attention of two kinds has no one name",
        ),
        pytest.param(
            "sglang",
            (
                (
                    "server_args=ServerArgs(attention_backend='triton', "
                    "prefill_attention_backend='fa3')"
                ),
            ),
            None,
            ("attention",),
            None,
            id="attention of two kinds has no one name (2)",
        ),
        pytest.param(
            "sglang",
            ("Prefill batch, #new-seq: 1, cuda graph: False", "Decode batch, cuda graph: True"),
            {"cuda_graphs": True},
            None,
            None,
            id="prefill without graphs says nothing of decode",
        ),
        pytest.param(
            "sglang",
            (
                "server_args=ServerArgs(moe_runner_backend='auto')",
                "llama_context: flash_attn = auto",
            ),
            None,
            ("attention", "moe", "cuda_graphs"),
            None,
            id="auto is no answer",
        ),
        pytest.param(
            "llama-cpp",
            (
                "server_args=ServerArgs(moe_runner_backend='auto')",
                "llama_context: flash_attn = auto",
            ),
            None,
            ("attention", "moe", "cuda_graphs"),
            None,
            id="auto is no answer (2)",
        ),
        pytest.param(
            "llama-cpp",
            (
                (
                    "0.00.002.211 I cmn  common_param: system_info: n_threads = 1 "
                    "(n_threads_batch = 1) / 2 | CPU : SSE3 = 1 | REPACK = 1 | "
                ),
                "0.01.238.191 I load_tensors:   CPU_Mapped model buffer size =   204.99 MiB",
            ),
            {"moe": "CPU"},
            None,
            None,
            id="llama.cpp: experts on the CPU, where there is nothing else",
        ),
        pytest.param(
            "llama-cpp",
            (
                (
                    "system_info: n_threads = 10 (n_threads_batch = 10) / 20 | CUDA : ARCHS = "
                    "1210 | BLACKWELL_NATIVE_FP4 = 1 | CPU : NEON = 1 | "
                ),
                "load_tensors:   CPU_Mapped model buffer size =   586.82 MiB",
                "load_tensors:        CUDA0 model buffer size = 59851.68 MiB",
            ),
            None,
            ("moe",),
            None,
            id="llama.cpp: experts beside a GPU",
        ),
        pytest.param(
            "llama-cpp",
            ("0.01.238.191 I load_tensors:   CPU_Mapped model buffer size =   204.99 MiB",),
            None,
            ("moe",),
            None,
            id="llama.cpp: experts of a log without its device",
        ),
    ],
)
def test_lines_together_show_a_path(engine, lines, fields, unknown, evidence):
    """Fields with their values, fields without one, and a part of the evidence of some."""
    path = read_lines(lines, engine or "vllm")
    expected = (fields or {}) | dict.fromkeys(unknown or ())
    assert {field: getattr(path, field) for field in expected} == expected
    for field, part in (evidence or {}).items():
        assert part in path.evidence[field]
    also = {field for field in path.evidence if field.endswith("_also")}
    assert also <= (evidence or {}).keys()


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
    assert (stated(path), path.version) == (states, version)
    assert "version" not in path.model_dump()


def test_binary_and_endless_lines(tmp_path):
    log = tmp_path / "server.log"
    good = (CORE + "[cuda.py:427] Using FLASH_ATTN backend.").encode()
    binary, endless = b"\xff\xfe\x00\x80" * 50_000, b"x" * 3_000_000
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
    assert getattr(read_lines([line], engine), field) == value


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
    ("line", "phase"),
    [
        pytest.param(
            (
                "Loading safetensors checkpoint shards:  33% Completed | 1/3 [00:00<00:00, "
                " 2.81it/s]"
            ),
            "loading weights (33 %)",
            id="Loading safetensors checkpoint shards: 33% Completed |",
        ),
        pytest.param(
            "Capturing CUDA graphs (decode, FULL):  60%|██████    | 3/5",
            "capturing CUDA graphs (60 %)",
            id="Capturing CUDA graphs (decode, FULL): 60%| | 3/5",
        ),
        pytest.param(
            (
                "(EngineCore pid=7) INFO 10-05 02:13:33 [gpu_model_runner.py:4481] "
                "Starting to load model m..."
            ),
            "loading weights",
            id="(EngineCore pid=7) INFO 10-05 02:13:33",
        ),
        pytest.param(
            (
                "(EngineCore pid=7) INFO 10-05 02:13:33 [default_loader.py:384] Loading "
                "weights took 5.15 seconds"
            ),
            "weights loaded",
            id="(EngineCore pid=7) INFO 10-05 02:13:33 (2)",
        ),
        pytest.param(
            (
                "(EngineCore pid=7) INFO 10-05 02:13:33 [cpu_model_runner.py:87] Warming "
                "up model for the compilation..."
            ),
            "compiling",
            id="(EngineCore pid=7) INFO 10-05 02:13:33 (3)",
        ),
        pytest.param(
            ("(EngineCore pid=7) INFO 10-05 02:13:33 [cpu_model_runner.py:91] Warming up done."),
            "warming up",
            id="(EngineCore pid=7) INFO 10-05 02:13:33 (4)",
        ),
        pytest.param(
            (
                "(EngineCore pid=7) INFO 10-05 02:13:33 [gpu_worker.py:760] Available KV "
                "cache memory: 35.64 GiB"
            ),
            "profiling memory",
            id="(EngineCore pid=7) INFO 10-05 02:13:33 (5)",
        ),
        pytest.param(
            (
                "(EngineCore pid=7) INFO 10-05 02:13:33 [kv_cache_utils.py:2328] CPU KV "
                "cache size: 87,296 tokens, Maximum"
            ),
            "allocating the KV cache",
            id="(EngineCore pid=7) INFO 10-05 02:13:33 (6)",
        ),
        pytest.param(
            "[3/10] /usr/local/cuda/bin/nvcc -c x.cu -o x.cuda.o",
            "building kernels (JIT) (3 of 10)",
            id="(3/10) /usr/local/cuda/bin/nvcc -c x.cu -o x.cuda.o",
        ),
        pytest.param(
            (
                "(EngineCore pid=7) INFO 10-05 02:13:33 [entry.py:139] Starting vLLM "
                "server on http://0.0.0.0:8000"
            ),
            "opening the port",
            id="(EngineCore pid=7) INFO 10-05 02:13:33 (entry.py:139)",
        ),
        pytest.param(
            "(APIServer pid=1) INFO:     Application startup complete.",
            "ready",
            id="(APIServer pid=1) INFO: Application startup complete.",
        ),
        pytest.param(
            'INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK',
            None,
            id='INFO: 127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK',
        ),
        pytest.param(
            ("(EngineCore pid=7) WARNING 10-05 02:13:33 [base.py:380] Chat template warmup failed"),
            None,
            id="(EngineCore pid=7) WARNING 10-05 02:13:33 (base.py:380)",
        ),
    ],
)
def test_startup_progress(line, phase):
    assert startup_progress(line) == phase


def test_startup_progress_of_a_real_start():
    lines = (DATA / "vllm-0.32-cpu-stopped.log").read_text("utf-8").splitlines()
    phases = [phase for phase in map(startup_progress, lines) if phase]
    assert (phases[0], phases[-1]) == ("starting the API server", "ready")
    assert len(set(phases)) >= 7


@pytest.mark.parametrize(
    ("name", "change", "managed", "wrong"),
    [
        pytest.param("cpu-tiny-gpt-oss", ("", ""), False, (), id="cpu-tiny-gpt-oss, not managed"),
        pytest.param("cpu-tiny-gpt-oss", ("", ""), True, (), id="cpu-tiny-gpt-oss, managed"),
        pytest.param(
            "cpu-tiny-gpt-oss",
            ("Using CPU Unq", "Using TPU Unq"),
            False,
            ("moe: required CPU",),
            id="cpu-tiny-gpt-oss, Using CPU Unq Using TPU Unq, not",
        ),
        pytest.param(
            "sm90-tiny-gpt-oss",
            ("", ""),
            False,
            ("attention: required FLASH_ATTN",),
            id="sm90-tiny-gpt-oss, not managed, attention: required",
        ),
    ],
)
def test_what_an_engine_does_not_log_is_not_held_to_it(tmp_path, name, change, managed, wrong):
    """vLLM on the CPU logs no attention. What it cannot show is not proven; the rest is judged."""
    log = tmp_path / "server.log"
    log.write_text((DATA / "vllm-0.32-cpu-stopped.log").read_text("utf-8").replace(*change))
    loaded, path = profile.load(name), read_log(log)
    under_test = loaded.configurations[loaded.under_test]
    server = SimpleNamespace(configuration=under_test if managed else None, log=log)
    harness = SimpleNamespace(profile=loaded, spanned=lambda _server: None)
    harness.kernel_path = lambda _server: path
    harness.unlogged = lambda server: Harness.unlogged(harness, server)
    if managed:
        assert harness.unlogged(server) is None
        return
    lines = [*map(str, Harness._contradictions(harness, server, loaded.under_test))]
    lines = [line for line in lines if "required" in line and "variables" not in line]
    assert len(lines) == len(wrong), lines
    assert all(line.startswith(text) for line, text in zip(lines, wrong, strict=True))
