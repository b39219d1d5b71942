"""Traces of decode steps in the format of the torch profiler on a GPU."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from meta_tests.unit.evidence.kernel_tables import (
    ATTENTION,
    CUTLASS,
    DENSE,
    MARLIN,
    QUANTISE,
    WRITE,
    event,
)

#: The kernels of a layer with their times in microseconds: about 0.5 ms per layer.
LAYER = (
    ("void vllm::rms_norm_kernel<c10::BFloat16>", 5.0),
    (DENSE, 30.0),
    (WRITE, 3.0),
    (ATTENTION, 40.0),
    (DENSE, 20.0),
    ("void vllm::rms_norm_kernel<c10::BFloat16>", 5.0),
    ("void vllm::moe::topkGating<4, 128, 4, 16, 32, int>", 4.0),
    ("void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*)", 3.0),
    (QUANTISE, 10.0),
    ("FC1", 120.0),
    ("void vllm::swigluoai_and_mul_kernel<c10::BFloat16>", 4.0),
    ("FC2", 60.0),
    ("void vllm::moe::moe_sum_kernel<c10::BFloat16, 4>", 4.0),
)
#: The time of a layer's kernels in microseconds.
LAYER_US = sum(took for _, took in LAYER)
EXPERTS = {"MARLIN": MARLIN, "CUTLASS": CUTLASS}


def write(
    path: Path,
    *,
    experts: str = "CUTLASS",
    steps: int = 8,
    layers: int = 36,
    host_us: float = 20.0,
    slower: float = 1.0,
    only: str = "",
    step_tokens: int | None = 1,
) -> Path:
    """Write a trace.

    Args:
        path: The file, ``.json`` or ``.json.gz``.
        experts: The kernels of the experts' products, a key of `EXPERTS`.
        steps: The number of decode steps.
        layers: The number of layers of a step.
        host_us: The time of each step in which no kernel runs, in microseconds.
        slower: The factor on the time of the experts' products.
        only: The name of the only kernel that takes ten times as long.
        step_tokens: The number of tokens that a step computes: the model's own and the drafts.
            None: the trace does not show it.
    """
    events = list(_events(experts, steps, layers, host_us, slower, only, step_tokens))
    content = {"schemaVersion": 1, "deviceProperties": [], "traceEvents": events, "traceName": "x"}
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path


def _events(
    experts: str,
    steps: int,
    layers: int,
    host_us: float,
    slower: float,
    only: str,
    step_tokens: int | None,
) -> Iterator[dict]:
    now = 1000.0
    for _ in range(steps):
        begun = now
        now += host_us
        yield event("cudaGraphLaunch", "cuda_runtime", now - 5, 4, tid=2)
        for _ in range(layers):
            for name, took in LAYER:
                is_product = name in ("FC1", "FC2")
                took *= slower if is_product else 1.0
                took *= 10.0 if name == only else 1.0
                kernel = EXPERTS[experts] if is_product else name
                yield event(kernel, "kernel", now, took, tid=3)
                now += took
        name = "execute_context_0(0)_generation_1"
        if step_tokens is not None:
            name += f"({step_tokens})"
        yield event(name, "user_annotation", begun, now - begun, tid=2)
