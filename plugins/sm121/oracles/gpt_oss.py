"""gpt-oss written down once more, from its definition, to say what the right log-probabilities are.

Plain PyTorch in float64 or float32, no cache, no kernel, nothing taken from an engine. Sources: the
gpt-oss model card (OpenAI 2025, arXiv:2508.10925) and reference implementation (openai/gpt-oss,
gpt_oss/torch/model.py) for attention sinks, routing and the clamped SwiGLU; YaRN (Peng et al. 2023,
arXiv:2309.00071) for the rotary embedding. A model with a mistake is this one with other weights or
another configuration, which is how the suite knows that it would notice one.

Shapes: T tokens, V vocabulary, H hidden, Hq query heads, Hkv key/value heads, D head size, E
experts, I intermediate size.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sm121.oracles import attention as attention_oracle
from sm121.oracles import moe, mxfp4, routing

_VOCABULARY_CHUNK = 16_384
_QUERY_CHUNK = 512


@dataclasses.dataclass(frozen=True)
class GptOssConfig:
    """What the definition needs to know of config.json."""

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    intermediate: int
    vocabulary: int
    eps: float
    window: int
    sliding_layers: tuple[bool, ...]
    rope_theta: float
    rope_factor: float
    rope_original_positions: int
    rope_beta_fast: float
    rope_beta_slow: float
    rope_truncate: bool
    alpha: float
    limit: float

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GptOssConfig:
        """Read the Hugging Face keys. Raises ValueError for another model, a missing key or another
        rope."""
        if data.get("model_type") != "gpt_oss":
            raise ValueError(
                f"config.json is of a {data.get('model_type')!r} model, not of gpt_oss"
            )
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        if rope.get("rope_type") != "yarn":
            raise ValueError(
                f"config.json has rope type {rope.get('rope_type')!r}; gpt-oss has 'yarn'"
            )
        try:
            return cls(
                layers=data["num_hidden_layers"],
                hidden=data["hidden_size"],
                query_heads=data["num_attention_heads"],
                kv_heads=data["num_key_value_heads"],
                head_dim=data["head_dim"],
                experts=data["num_local_experts"],
                top_k=data["num_experts_per_tok"],
                intermediate=data["intermediate_size"],
                vocabulary=data["vocab_size"],
                eps=data["rms_norm_eps"],
                window=data["sliding_window"],
                sliding_layers=tuple(kind == "sliding_attention" for kind in data["layer_types"]),
                rope_theta=float(
                    rope["rope_theta"] if "rope_theta" in rope else data["rope_theta"]
                ),
                rope_factor=rope["factor"],
                rope_original_positions=rope["original_max_position_embeddings"],
                rope_beta_fast=rope["beta_fast"],
                rope_beta_slow=rope["beta_slow"],
                rope_truncate=rope.get("truncate", True),
                alpha=data.get("swiglu_alpha", 1.702),
                limit=data["swiglu_limit"],
            )
        except KeyError as error:
            raise ValueError(f"config.json lacks {error.args[0]!r}") from None


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer. q, k, v, o: (weight [out, in], bias [out]); experts as [E, out, in] and [E,
    out]."""

    attention_norm: Tensor
    q: tuple[Tensor, Tensor]
    k: tuple[Tensor, Tensor]
    v: tuple[Tensor, Tensor]
    o: tuple[Tensor, Tensor]
    sinks: Tensor
    mlp_norm: Tensor
    router: tuple[Tensor, Tensor]
    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Weights:
    """A model's weights. The two vocabulary matrices [V, H] stay BF16 and are widened where they
    are used."""

    config: GptOssConfig
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The type that everything is computed in."""
        return self.norm.dtype


def load(checkpoint: Path, dtype: torch.dtype = torch.float32) -> Weights:
    """The weights of a checkpoint directory in the Hugging Face format, MXFP4 or BF16 experts
    alike.

    Raises FileNotFoundError without config.json or *.safetensors, ValueError when a tensor is
    missing.
    """
    from safetensors import safe_open

    config = GptOssConfig.from_json(json.loads((checkpoint / "config.json").read_text("utf-8")))
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{checkpoint} holds no *.safetensors")
    stored: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - a safe_open handle is no dict
                stored[name] = handle.get_tensor(name)

    def tensor(name: str) -> Tensor:
        if name not in stored:
            raise ValueError(f"{checkpoint} has no tensor {name}")
        return stored[name].to(dtype)

    def linear(name: str) -> tuple[Tensor, Tensor]:
        return tensor(f"{name}.weight"), tensor(f"{name}.bias")

    def experts(name: str) -> tuple[Tensor, Tensor]:
        if f"{name}_blocks" in stored:
            blocks, scales = stored[f"{name}_blocks"].numpy(), stored[f"{name}_scales"].numpy()
            values = mxfp4.dequantise(blocks.reshape(*blocks.shape[:-2], -1), scales)
            weight = torch.from_numpy(values).to(dtype)
        else:
            weight = tensor(name).transpose(1, 2).contiguous()
        return weight, tensor(f"{name}_bias")

    layers = []
    for n in range(config.layers):
        prefix = f"model.layers.{n}"
        layers.append(
            Layer(
                attention_norm=tensor(f"{prefix}.input_layernorm.weight"),
                q=linear(f"{prefix}.self_attn.q_proj"),
                k=linear(f"{prefix}.self_attn.k_proj"),
                v=linear(f"{prefix}.self_attn.v_proj"),
                o=linear(f"{prefix}.self_attn.o_proj"),
                sinks=tensor(f"{prefix}.self_attn.sinks"),
                mlp_norm=tensor(f"{prefix}.post_attention_layernorm.weight"),
                router=linear(f"{prefix}.mlp.router"),
                gate_up=experts(f"{prefix}.mlp.experts.gate_up_proj"),
                down=experts(f"{prefix}.mlp.experts.down_proj"),
            )
        )
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name not in stored:
            raise ValueError(f"{checkpoint} has no tensor {name}")
    return Weights(
        config=config,
        embedding=stored["model.embed_tokens.weight"],
        layers=tuple(layers),
        norm=tensor("model.norm.weight"),
        head=stored["lm_head.weight"],
    )


def rotary(config: GptOssConfig, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin [T, D/2] for positions 0..T-1, already times YaRN's attention scaling (mscale)."""
    half = config.head_dim // 2
    steps = torch.arange(half, dtype=torch.float64)
    frequency = config.rope_theta ** (-steps / half)

    def dimension(turns: float) -> float:
        # The dimension that makes `turns` turns over the original context.
        period = config.rope_original_positions / (turns * 2 * math.pi)
        return half * math.log(period) / math.log(config.rope_theta)

    low, high = dimension(config.rope_beta_fast), dimension(config.rope_beta_slow)
    if config.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, config.head_dim - 1.0)
    stretched = ((steps - low) / (high - low)).clamp(0, 1)
    frequency = frequency * (1 - stretched) + frequency / config.rope_factor * stretched
    mscale = 0.1 * math.log(config.rope_factor) + 1
    # The reference and every engine keep frequencies and angles in float32. At position 500 that
    # turns a pair by up to 3e-5 rad, far more than the rest of float32 costs, so it is part of the
    # definition here.
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency.float()
    angle = angle.double()
    return (angle.cos() * mscale).to(dtype), (angle.sin() * mscale).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.T + bias


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D]: dimension i with i + D/2 (the NeoX halves)."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention(weights: Weights, n: int, x: Tensor) -> Tensor:
    """The attention of layer n on normalised x [T, H] -> [T, H]: causal, grouped-query, with sinks.

    A sink is one more logit a head, beside the scaled scores, that takes its share of the softmax
    and gives nothing. In sliding layers a token sees itself and the window - 1 tokens before it.
    """
    config, layer = weights.config, weights.layers[n]
    length = x.shape[0]
    q, k, v = (
        _linear(x, *part).view(length, -1, config.head_dim) for part in (layer.q, layer.k, layer.v)
    )
    cos, sin = rotary(config, length, x.dtype)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    window = config.window if config.sliding_layers[n] else None
    scale = 1 / math.sqrt(config.head_dim)
    parts = []
    for start in range(0, length, _QUERY_CHUNK):  # keys that none of the queries sees are left out
        end = min(start + _QUERY_CHUNK, length)
        first = 0 if window is None else max(0, start - window + 1)
        visible = attention_oracle.visible_keys(
            torch.arange(start - first, end - first), end - first, window
        )
        keys = slice(first, end)
        parts.append(
            attention_oracle.attend(
                q[start:end], k[keys], v[keys], visible, sinks=layer.sinks, scale=scale
            )
        )
    return _linear(torch.cat(parts).flatten(1), *layer.o)


def experts(weights: Weights, n: int, x: Tensor) -> Tensor:
    """The mixture of experts of layer n on normalised x [T, H] -> [T, H]."""
    config, layer = weights.config, weights.layers[n]
    shares, chosen = routing.route(_linear(x, *layer.router), config.top_k)

    def expert(e: int, rows: Tensor) -> Tensor:
        t = _linear(rows, layer.gate_up[0][e], layer.gate_up[1][e])
        t = moe.swiglu(t[:, 0::2], t[:, 1::2], alpha=config.alpha, limit=config.limit)
        return _linear(t, layer.down[0][e], layer.down[1][e])

    return moe.mixture(x, shares, chosen, expert)


def hidden_states(weights: Weights, token_ids: Sequence[int]) -> Tensor:
    """The normalised last hidden state of each token, [T, H]. Raises ValueError for an empty or
    unknown token."""
    config = weights.config
    ids = torch.tensor(list(token_ids), dtype=torch.int64)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= config.vocabulary:
        raise ValueError(f"token ids must be one or more of 0..{config.vocabulary - 1}")
    x = weights.embedding[ids].to(weights.dtype)
    for n, layer in enumerate(weights.layers):
        x = x + attention(weights, n, rms_norm(x, layer.attention_norm, config.eps))
        x = x + experts(weights, n, rms_norm(x, layer.mlp_norm, config.eps))
    return rms_norm(x, weights.norm, config.eps)


def _logit_chunks(weights: Weights, states: Tensor) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, weights.config.vocabulary, _VOCABULARY_CHUNK):
        rows = weights.head[start : start + _VOCABULARY_CHUNK].to(states.dtype)
        yield start, states @ rows.T


def log_probabilities(
    weights: Weights, token_ids: Sequence[int], positions: Sequence[int] | None = None
) -> Tensor:
    """log p(token | everything up to each position), [positions, V]; all T positions unless some
    are named.

    A full row is V numbers (1.6 MB in float64 for gpt-oss): name the positions that are wanted.
    """
    states = hidden_states(weights, token_ids)
    if positions is not None:
        states = states[list(positions)]
    logits = torch.cat([chunk for _, chunk in _logit_chunks(weights, states)], -1)
    return logits.log_softmax(-1)


def next_token_log_probabilities(weights: Weights, token_ids: Sequence[int]) -> Tensor:
    """log p of each token that really follows, [T - 1]: what an engine reports as prompt
    log-probabilities.

    Never holds [T, V]: the vocabulary is walked in chunks. The logits that are only summed over are
    float32, their sum is float64: that costs below 1e-5 and saves half of the time.
    """
    states = hidden_states(weights, token_ids)[:-1]
    targets = weights.head[torch.tensor(list(token_ids)[1:], dtype=torch.int64)].to(states.dtype)
    coarse = states.float()
    total = torch.full((len(states),), -math.inf, dtype=torch.float64)
    for _, logits in _logit_chunks(weights, coarse):
        most = logits.max(-1, keepdim=True).values
        shares = (logits - most).exp_().sum(-1, dtype=torch.float64)
        total = torch.logaddexp(total, most[:, 0].double() + shares.log())
    return (states * targets).sum(-1) - total.to(states.dtype)
