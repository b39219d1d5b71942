"""SGLang and llama.cpp on a GB10: the values that a healthy log proves, and the logs that fail.

The lines have the words of the engines' sources and of published logs of gpt-oss-120b.
"""

import pytest

from sm121.core import profile
from sm121.evidence import requirement
from sm121.evidence.kernel_path import read_log
from sm121.report import references

SGLANG = (
    "[2026-11-29 10:00:01] Detected SM120 and MXFP4 quantization format for GPT-OSS model, "
    "enabling FlashInfer CUTLASS MXFP4 MOE kernel.",
    "[2026-11-29 10:00:02] server_args={'model_path': 'openai/gpt-oss-120b', 'dtype': "
    "'bfloat16', 'kv_cache_dtype': 'auto', 'attention_backend': 'triton', "
    "'disable_cuda_graph': False, 'speculative_algorithm': None, 'moe_runner_backend': "
    "'flashinfer_mxfp4'}",
    "[2026-11-29 10:01:40] Capture cuda graph end. Time elapsed: 13.63 s.",
    "[2026-11-29 10:01:41] max_total_num_tokens=450240, chunked_prefill_size=8192, "
    "max_prefill_tokens=16384, max_running_requests=8, context_len=131072",
    "[2026-11-29 10:01:42] The server is fired up and ready to roll!",
)
LLAMA_CPP = (
    "ggml_cuda_init: found 1 CUDA devices:",
    "  Device 0: NVIDIA GB10, compute capability 12.1, VMM: yes",
    "build_info: b11434-0c1e570",
    "llama_model_loader: - type  f32:  433 tensors",
    "llama_model_loader: - type q8_0:  146 tensors",
    "llama_model_loader: - type mxfp4:  108 tensors",
    "load_tensors: offloaded 37/37 layers to GPU",
    "resolve_fused_ops: Flash Attention enabled",
    "llama_kv_cache: size = 4608.00 MiB (131072 cells,  18 layers,  8/1 seqs), K (f16): 2304.00 "
    "MiB, V (f16): 2304.00 MiB",
    "common_speculative_init: no implementations specified for speculative decoding",
    "main: server is listening on http://127.0.0.1:8080",
)
HEALTHY = {"sglang": SGLANG, "llama-cpp": LLAMA_CPP}


def wrong(engine, tmp_path, before="", after="") -> list[str]:
    """Return the contradictions between an engine's profile and its healthy log with one change."""
    log = tmp_path / "server.log"
    log.write_text("\n".join(HEALTHY[engine]).replace(before or "\0", after) + "\n")
    judged = profile.load(f"sm121-gpt-oss-120b-{engine}")
    found = requirement.contradictions(judged.path_of("stock"), read_log(log, engine), log, "stock")
    return [str(contradiction) for contradiction in found]


@pytest.mark.parametrize("engine", HEALTHY)
def test_a_healthy_log_is_the_required_path(engine, tmp_path):
    assert wrong(engine, tmp_path) == []


@pytest.mark.parametrize(
    ("engine", "before", "after", "says"),
    [
        pytest.param("sglang", "'triton'", "'torch_native'", "torch_native", id="attention"),
        pytest.param("sglang", "'flashinfer_mxfp4'", "'triton'", "triton", id="experts in BF16"),
        pytest.param("sglang", "graph': False", "graph': True", "cuda_graphs", id="no graphs"),
        pytest.param("sglang", "=131072", "=8192", "8192", id="a shorter context"),
        pytest.param("llama-cpp", "37/37", "20/37", "37/37", id="experts on the CPU"),
        pytest.param("llama-cpp", "NVIDIA GB10", "NVIDIA GeForce", "GB10", id="another GPU"),
        pytest.param("llama-cpp", "mxfp4:  108", "q4_K:  108", "mxfp4", id="another file"),
        pytest.param("llama-cpp", "K (f16)", "K (q8_0)", "q8_0", id="a quantised cache"),
        pytest.param(
            "llama-cpp", "Attention enabled", "Attention not supported", "none", id="no FA"
        ),
    ],
)
def test_another_path_is_red(engine, before, after, says, tmp_path):
    lines = wrong(engine, tmp_path, before, after)
    assert any(says in line for line in lines), lines


@pytest.mark.parametrize("engine", HEALTHY)
def test_the_published_rates_hold_the_gates(engine):
    """Each gate on a rate or on the time of a token is based on a published number in the
    references."""
    published = {}
    for row in references.load().reference:
        if row.name.lower() == engine.replace("-", "."):
            published.update(row.values)
    gates = profile.load(f"sm121-gpt-oss-120b-{engine}").performance.gates
    judged = [gate for gate in gates if gate.metric != "startup_s"]
    assert len(judged) == {"sglang": 2, "llama-cpp": 10}[engine]
    for gate in judged:
        value = published[gate.metric]
        if gate.at_most is not None:
            assert value <= gate.at_most <= 1.26 * value, gate
        else:
            assert 0.8 * value <= gate.minimum <= 0.91 * value <= gate.target <= value, gate
