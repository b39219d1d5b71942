"""A remedy names options of the engine that wrote the log, and no option of vLLM for another
engine's log."""

import re

import pytest

from sm121.evidence import remedies
from sm121.evidence.failure import Cause, classify_lines
from sm121.evidence.failure_tables import load_failures

#: Options and words that only vLLM has.
OF_VLLM = re.compile(
    r"--(?:gpu-memory-utilization|max-num|max-model-len|moe-backend|linear-backend|enforce-eager"
    r"|engine-|num-gpu-blocks|kv-cache-memory)|\bVLLM_|\bvllm\b|\bvLLM\b|TRITON_ATTN|\bmarlin\b"
)


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm", "llama-cpp", "ollama", None])
def test_no_remedy_for_another_engine_names_options_of_vllm(engine: str | None) -> None:
    failures = load_failures()
    for row in (*failures.failure, *failures.ending):
        if row.id == "config_port_variable":
            continue  # the log line itself contains VLLM_PORT
        cause = Cause(kind=row.kind, summary="", owner="", remedy=row.remedy)
        assert not OF_VLLM.search(remedies.for_engine(cause, engine).remedy or ""), row.id
        assert remedies.for_engine(cause, "vllm") == cause


@pytest.mark.parametrize(
    ("engine", "option"),
    [
        ("vllm", "lower --gpu-memory-utilization, --max-num-seqs or --max-model-len"),
        ("sglang", "lower --mem-fraction-static, --max-running-requests or --context-length"),
        ("tensorrt-llm", "kv_cache_config.free_gpu_memory_fraction, max_batch_size or max_seq_len"),
        ("ollama", "lower num_gpu, OLLAMA_NUM_PARALLEL or OLLAMA_CONTEXT_LENGTH"),
        (None, "lower the server's share of the GPU's memory"),
    ],
)
def test_a_remedy_names_the_options_of_its_engine(engine: str | None, option: str) -> None:
    cause = classify_lines(["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"])
    assert option in (remedies.for_engine(cause, engine).remedy or "")


@pytest.mark.parametrize(
    ("text", "engine", "writer"),
    [
        ("[TensorRT-LLM][ERROR] x", None, "tensorrt-llm"),
        ('time=2026-11-30 msg="ollama runner" x', "llama-cpp", "ollama"),
        ("ggml_cuda_init: found 1 CUDA devices", "llama-cpp", "llama-cpp"),
        ("[TensorRT-LLM][ERROR] x", "vllm", "vllm"),
        ("NVRM: Xid 13", None, None),
    ],
    ids=["TensorRT-LLM", "Ollama", "llama-server", "vLLM", "dmesg"],
)
def test_the_writer_of_a_log_is_known_by_its_words(text, engine, writer, tmp_path) -> None:
    log = tmp_path / "server.log"
    log.write_text(text + "\n")
    assert remedies.writer(log, engine) == writer
