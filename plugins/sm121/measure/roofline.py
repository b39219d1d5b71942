"""The most tokens a second that the memory allows: bandwidth over the bytes that a token costs.

To decode one token of one stream, every active weight and the whole KV cache in the window are read
once. No clock and no kernel can do better; only speculative decoding can, and several streams.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sm121.core.errors import Sm121Error

#: An element of MXFP4: 4 bits, and a scale of 8 bits for each 32 of them.
MXFP4_BITS = 4.25
_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}


@dataclass(frozen=True)
class Formats:
    """Bits per element of each part."""

    experts: float
    dense: float
    kv: float


#: The smallest formats that some engine serves a model in: all weights in MXFP4, the cache in FP8.
#: A checkpoint that is not quantised may be quantised while it is loaded.
SMALLEST = Formats(experts=MXFP4_BITS, dense=MXFP4_BITS, kv=8.0)


@dataclass(frozen=True)
class Traffic:
    """Bytes read for one token, by part."""

    experts: float
    attention: float
    router: float
    lm_head: float
    kv: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.experts + self.attention + self.router + self.lm_head + self.kv

    def __str__(self) -> str:
        parts = ("experts", "attention", "router", "lm_head", "kv")
        return ", ".join(f"{name} {_size(getattr(self, name))}" for name in parts)


@dataclass(frozen=True)
class Ceiling:
    """What bounds the rate, and the arithmetic of it."""

    traffic: Traffic
    #: What the memory was measured to give, and how much more than it allows is tolerated.
    gb_s: float
    tolerance: float

    @property
    def tok_s(self) -> float:
        """Tokens a second of one stream, without the tolerance."""
        return self.gb_s * 1e9 / self.traffic.total

    def share(self, rate: float) -> float:
        """How much of the bound was reached."""
        return rate / self.tok_s

    def broken_by(self, rate: float) -> str | None:
        """Why a rate cannot be, with the arithmetic; None if it can."""
        if rate <= self.tok_s * self.tolerance:
            return None
        return (
            f"above_roofline: {rate:.4g} tok/s x {_size(self.traffic.total)} a token "
            f"({self.traffic}) = {rate * self.traffic.total / 1e9:.4g} GB/s, and the memory was "
            f"measured to give {self.gb_s:.4g} GB/s (x {self.tolerance:g} tolerated)"
        )


def formats(config: Mapping[str, Any], dtype: str | None = None) -> Formats:
    """What the checkpoint's own formats are.

    Args:
        config: of the model (config.json).
        dtype: that the engine was told to compute in, if it was.
    """
    named = dtype if dtype in _BITS else str(config.get("dtype") or config.get("torch_dtype"))
    dense = _BITS.get(named, 16.0)
    method = (config.get("quantization_config") or {}).get("quant_method")
    return Formats(experts=MXFP4_BITS if method == "mxfp4" else dense, dense=dense, kv=dense)


def traffic(config: Mapping[str, Any], *, depth: int, formats: Formats) -> Traffic:
    """Bytes that one token at a depth costs, weights with their biases.

    Raises:
        Sm121Error: the configuration lacks something.
    """
    try:
        hidden, wide = int(config["hidden_size"]), int(config["intermediate_size"])
        layers, vocabulary = int(config["num_hidden_layers"]), int(config["vocab_size"])
        heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
        head = int(config["head_dim"])
        experts, chosen = int(config["num_local_experts"]), int(config["num_experts_per_tok"])
    except (KeyError, TypeError, ValueError) as error:
        raise Sm121Error(f"the model's configuration lacks {error}") from error
    window = int(config.get("sliding_window") or 0)
    kinds = config.get("layer_types")
    sliding = kinds.count("sliding_attention") if isinstance(kinds, list) else (layers + 1) // 2
    in_window = min(depth, window) if window else depth
    seen = sliding * in_window + (layers - sliding) * depth
    expert = (3 * wide * hidden) * formats.experts / 8 + (2 * wide + hidden) * 2
    queries, keys = heads * head, kv_heads * head
    projections = hidden * (queries + 2 * keys) + queries * hidden
    biases = (queries + 2 * keys + hidden) * 2
    return Traffic(
        experts=layers * chosen * expert,
        attention=layers * (projections * formats.dense / 8 + biases),
        router=layers * experts * (hidden + 1) * 2.0,
        lm_head=vocabulary * hidden * formats.dense / 8,
        kv=seen * 2 * keys * formats.kv / 8,
    )


def read_config(model: str) -> dict[str, Any] | None:
    """config.json of a checkpoint folder, or what ships of a hub id; None where neither is."""
    path = Path(model) / "config.json"
    if path.is_file():
        found = json.loads(path.read_text("utf-8"))
        return dict(found) if isinstance(found, dict) else None
    shipped = files("sm121.fixtures") / "models" / f"{model.rsplit('/', 1)[-1]}.json"
    return dict(json.loads(shipped.read_text("utf-8"))) if shipped.is_file() else None


def _size(size: float) -> str:
    return f"{size / 1e9:.3f} GB" if size >= 1e8 else f"{size / 1e6:.3f} MB"
