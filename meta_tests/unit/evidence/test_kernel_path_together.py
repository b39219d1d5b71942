"""Several log lines together show a kernel path."""

import pytest

from meta_tests.logs import read_lines
from sm121.evidence.kernel_path import shown


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
    """The lines show fields with their values, fields without a value, and a part of the evidence
    of some fields."""
    path = read_lines(lines, engine or "vllm")
    expected = (fields or {}) | dict.fromkeys(unknown or ())
    assert {field: shown(path, field) for field in expected} == expected
    for field, part in (evidence or {}).items():
        assert part in path.evidence[field]
    also = {field for field in path.evidence if field.endswith("_also")}
    assert also <= (evidence or {}).keys()
