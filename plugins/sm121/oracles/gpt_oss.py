"""gpt-oss written down once more, from its definition, to say what the right log-probabilities are.
Plain PyTorch in float64 or float32, no cache, no kernel, nothing taken from an engine. Sources: the
gpt-oss model card (OpenAI 2025, arXiv:2508.10925) and reference implementation (openai/gpt-oss,
gpt_oss/torch/model.py) for attention sinks, routing and the clamped SwiGLU; YaRN (Peng et al. 2023,
arXiv:2309.00071) for the rotary embedding. Shapes: T tokens, V vocabulary, H hidden, Hq query
heads, Hkv key/value heads, D head size, E experts, I intermediate size."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as functional
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from sm121.oracles import attention as attention_oracle
from sm121.oracles import moe, mxfp4, rounding
from sm121.oracles.formats import EXACT, Rounding

_QUERY_CHUNK = 512


@pydantic_dataclass(frozen=True, kw_only=True, config=ConfigDict(populate_by_name=True))
class GptOssConfig:
    """What the definition needs to know of config.json."""

    layers: int = Field(validation_alias="num_hidden_layers")
    hidden: int = Field(validation_alias="hidden_size")
    query_heads: int = Field(validation_alias="num_attention_heads")
    kv_heads: int = Field(validation_alias="num_key_value_heads")
    head_dim: int
    experts: int = Field(validation_alias="num_local_experts")
    top_k: int = Field(validation_alias="num_experts_per_tok")
    intermediate: int = Field(validation_alias="intermediate_size")
    vocabulary: int = Field(validation_alias="vocab_size")
    eps: float = Field(validation_alias="rms_norm_eps")
    window: int = Field(validation_alias="sliding_window")
    sliding_layers: tuple[bool, ...] = Field(validation_alias="layer_types")
    rope_theta: float
    rope_factor: float = Field(validation_alias="factor")
    rope_original_positions: int = Field(validation_alias="original_max_position_embeddings")
    rope_beta_fast: float = Field(validation_alias="beta_fast")
    rope_beta_slow: float = Field(validation_alias="beta_slow")
    limit: float = Field(validation_alias="swiglu_limit")
    rope_truncate: bool = Field(validation_alias="truncate", default=True)
    alpha: float = Field(validation_alias="swiglu_alpha", default=1.702)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "GptOssConfig":
        """Read the Hugging Face keys. Raises ValueError: another model or rope, a missing key."""
        if (model := data.get("model_type")) != "gpt_oss":
            raise ValueError(f"config.json is of a {model!r} model, not of gpt_oss")
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        if (kind := rope.get("rope_type")) != "yarn":
            raise ValueError(f"config.json has rope type {kind!r}; gpt-oss has 'yarn'")
        values = {**data, **rope}
        if "layer_types" in data:
            values["layer_types"] = [kind == "sliding_attention" for kind in data["layer_types"]]
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            where, what = (error.errors()[0][key] for key in ("loc", "msg"))
            raise ValueError(f"config.json lacks {where[0]!r}: {what}") from None


#: The matrices [out, in] of the experts by their number: a tensor [E, out, in], or what reads one
#: when it is asked for.
Matrices: TypeAlias = Any
#: Rows of a vocabulary matrix [V, H], by a slice or a tensor of numbers: a tensor, or what reads
#: them when they are asked for.
Rows: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer. q, k, v, o: (weight [out, in], bias [out]); experts: [E, out, in] and [E, out]."""

    attention_norm: Tensor
    q: tuple[Tensor, Tensor]
    k: tuple[Tensor, Tensor]
    v: tuple[Tensor, Tensor]
    o: tuple[Tensor, Tensor]
    sinks: Tensor
    mlp_norm: Tensor
    router: tuple[Tensor, Tensor]
    gate_up: tuple[Matrices, Tensor]
    down: tuple[Matrices, Tensor]


@dataclasses.dataclass(frozen=True)
class Weights:
    """A model's weights. The vocabulary matrices [V, H] stay BF16 and are widened where used."""

    config: GptOssConfig
    embedding: Rows
    layers: Sequence[Layer]
    norm: Tensor
    head: Rows
    #: What is rounded on the way: nothing, in the definition (`sm121.oracles.rounded`).
    rounding: Rounding = EXACT

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype


def stream(checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Weights:
    """The weights of a checkpoint directory in the Hugging Face format, MXFP4 or BF16 experts
    alike, read when they are asked for: one layer is in memory at a time, of its experts the one
    that computes, and of the vocabulary the rows that are used. Raises FileNotFoundError without
    config.json or *.safetensors, ValueError for a missing tensor when its layer is read."""
    stored = Stored(checkpoint, device)
    return Weights(
        config=stored.config,
        embedding=_StoredRows(stored, "model.embed_tokens.weight"),
        layers=Latest(
            stored.config.layers,
            lambda n: layer(stored, n, dtype, lambda name: experts(stored, name, dtype)),
        ),
        norm=stored.tensor("model.norm.weight").to(dtype),
        head=_StoredRows(stored, "lm_head.weight"),
    )


class Stored:
    """The tensors of a checkpoint as they are in its files, read when they are asked for."""

    def __init__(self, checkpoint: Path, device: str = "cpu") -> None:
        from safetensors import safe_open

        self._device = device
        text = (checkpoint / "config.json").read_text("utf-8")
        self.config = GptOssConfig.from_json(json.loads(text))
        self.checkpoint = checkpoint
        if not (files := sorted(checkpoint.glob("*.safetensors"))):
            raise FileNotFoundError(f"{checkpoint} holds no *.safetensors")
        self._file_of: dict[str, Any] = {}
        for file in files:
            handle: Any = safe_open(file, framework="pt")
            self._file_of |= dict.fromkeys(handle.keys(), handle)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def _of(self, name: str) -> Any:
        if name not in self._file_of:
            raise ValueError(f"{self.checkpoint} has no tensor {name}")
        return self._file_of[name]

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._of(name).get_tensor(name)
        return tensor.to(self._device)

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Of a tensor what has these indices in its first dimension."""
        rows: Tensor = self._of(name).get_slice(name)[start:end]
        return rows.to(self._device)


class Latest(Sequence[Any]):
    """Layers, or experts' matrices, that are read by their number; the last one is kept."""

    def __init__(self, length: int, read: Callable[[int], Any]) -> None:
        self._length, self._read = length, read
        self._last: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, n: Any) -> Any:
        if not 0 <= n < self._length:
            raise IndexError(n)
        if self._last is None or self._last[0] != n:
            self._last = None  # before the next one is read
            self._last = n, self._read(n)
        return self._last[1]


def experts(stored: Stored, name: str, dtype: torch.dtype) -> Latest:
    """The experts' matrices of that name, dequantised or transposed one at a time."""

    def read(expert: int) -> Tensor:
        def part(end: str) -> Tensor:
            return stored.rows(f"{name}{end}", expert, expert + 1)[0]

        if f"{name}_blocks" not in stored:
            return part("").to(dtype).T.contiguous()
        return dequantised(part("_blocks"), part("_scales"), dtype)

    return Latest(stored.config.experts, read)


def dequantised(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of MXFP4 as the checkpoint has it: blocks [rows, B, 16] u8, scales [rows, B] u8 ->
    [rows, 32 B]. `mxfp4.dequantise` says the same, one element at a time."""
    pairs = blocks.flatten(1).contiguous().view(torch.int16).int() & 0xFFFF
    values = functional.embedding(pairs, _four_values(dtype, blocks.device.type))
    sizes = torch.ldexp(torch.ones_like(scales, dtype=dtype), scales.int() - mxfp4.E8M0_BIAS)
    sizes.masked_fill_(scales == mxfp4.E8M0_NAN, math.nan)
    return (values.view(*scales.shape, mxfp4.BLOCK) * sizes[..., None]).flatten(1)


@functools.cache
def _four_values(dtype: torch.dtype, device: str) -> Tensor:
    """[65536, 4]: the four elements in each pair of bytes."""
    values = torch.tensor([*mxfp4.E2M1_VALUES, *(-v for v in mxfp4.E2M1_VALUES)], dtype=dtype)
    pairs = torch.arange(1 << 16)
    return torch.stack([values[pairs >> shift & 15] for shift in (0, 4, 8, 12)], 1).to(device)


class _StoredRows:
    def __init__(self, stored: Stored, name: str) -> None:
        self._stored, self._name = stored, name

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        if isinstance(rows, slice):
            return self._stored.rows(self._name, rows.start, rows.stop)
        numbers, inverse = rows.unique(return_inverse=True)
        parts = [self._stored.rows(self._name, row, row + 1) for row in numbers.tolist()]
        return torch.cat(parts)[inverse]


def layer(stored: Stored, n: int, dtype: torch.dtype, matrices: Callable[[str], Matrices]) -> Layer:
    """Layer n of a checkpoint; ``matrices`` reads the experts' of a name."""
    prefix = f"model.layers.{n}"

    def tensor(name: str) -> Tensor:
        return stored.tensor(f"{prefix}.{name}").to(dtype)

    def linear(name: str) -> tuple[Tensor, Tensor]:
        return tensor(f"{name}.weight"), tensor(f"{name}.bias")

    def mixed(name: str) -> tuple[Matrices, Tensor]:
        return matrices(f"{prefix}.{name}"), tensor(f"{name}_bias")

    return Layer(
        attention_norm=tensor("input_layernorm.weight"),
        q=linear("self_attn.q_proj"),
        k=linear("self_attn.k_proj"),
        v=linear("self_attn.v_proj"),
        o=linear("self_attn.o_proj"),
        sinks=tensor("self_attn.sinks"),
        mlp_norm=tensor("post_attention_layernorm.weight"),
        router=linear("mlp.router"),
        gate_up=mixed("mlp.experts.gate_up_proj"),
        down=mixed("mlp.experts.down_proj"),
    )


def rotary(config: GptOssConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin [T, D/2] for positions [T], already times YaRN's attention scaling (mscale)."""
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
    angle = positions.float()[:, None] * frequency.float().to(positions.device)
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


#: Rotated keys and values [S, Hkv, D] of one text in one layer.
Past: TypeAlias = tuple[Tensor, Tensor]


def attention(weights: Weights, n: int, x: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
    """The attention of layer n on normalised x [T, H] -> [T, H]: causal, grouped-query, with sinks.
    A sink is one more logit a head, beside the scaled scores, that takes its share of the softmax
    and gives nothing. In sliding layers a token sees itself and the window - 1 tokens before it.
    `past` is what came before these tokens; it comes back with them in it."""
    config, layer, way = weights.config, weights.layers[n], weights.rounding
    near, cached = rounding.activations(way), rounding.cached(way)
    length, inputs = x.shape[0], rounding.inputs(way, "qkv")(x)
    q, k, v = (
        near(_linear(inputs, *part)).view(length, -1, config.head_dim)
        for part in (layer.q, layer.k, layer.v)
    )
    before = 0 if past is None else len(past[0])
    positions = torch.arange(before, before + length, device=x.device)
    cos, sin = (near(part) for part in rotary(config, positions, x.dtype))
    q, k, v = near(_rotate(q, cos, sin)), cached(near(_rotate(k, cos, sin))), cached(v)
    if past is not None:
        k, v = torch.cat((past[0], k)), torch.cat((past[1], v))
    window = config.window if config.sliding_layers[n] else None
    scale = 1 / math.sqrt(config.head_dim)
    attend = functools.partial(attention_oracle.attend, sinks=layer.sinks, scale=scale)
    parts = []
    for start in range(0, length, _QUERY_CHUNK):  # keys that none of the queries sees are left out
        end = min(start + _QUERY_CHUNK, length)
        first = 0 if window is None else max(0, before + start - window + 1)
        keys = slice(first, before + end)
        visible = attention_oracle.visible_keys(
            positions[start:end] - first, before + end - first, window
        )
        parts.append(attend(q[start:end], k[keys], v[keys], visible))
    mixed = rounding.inputs(way, "o")(near(torch.cat(parts).flatten(1)))
    return near(_linear(mixed, *layer.o)), (k, v)


def last_norm(weights: Weights, x: Tensor) -> Tensor:
    """What the output matrix is multiplied with, [T, H], of what comes out of the last layer."""
    normed = rms_norm(x, weights.norm, weights.config.eps)
    near = rounding.activations(weights.rounding)
    return rounding.inputs(weights.rounding, "lm_head")(near(normed))


def embedded(weights: Weights, token_ids: Sequence[int]) -> Tensor:
    """What goes into the first layer, [T, H]. Raises ValueError for an empty or unknown token."""
    ids = torch.tensor(list(token_ids), dtype=torch.int64)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= weights.config.vocabulary:
        raise ValueError(f"token ids must be one or more of 0..{weights.config.vocabulary - 1}")
    rows: Tensor = weights.embedding[ids]
    return rows.to(weights.dtype)


def after_layer(
    models: Sequence[Weights], n: int, x: Sequence[Tensor], past: Sequence[Past] | None = None
) -> tuple[list[Tensor], list[Past]]:
    """What layer n makes of several texts, each [T, H] and each by its model; and their keys and
    values. Their experts are the same, and each is read once: the models may differ in all else."""
    pasts: list[Past] = []
    after, normed, routes = [], [], []
    for i, (model, each) in enumerate(zip(models, x, strict=True)):
        layer, eps = model.layers[n], model.config.eps
        near = rounding.activations(model.rounding)
        rows = near(rms_norm(each, layer.attention_norm, eps))
        added, keys_values = attention(model, n, rows, None if past is None else past[i])
        pasts.append(keys_values)
        after.append(near(each + added))
        normed.append(near(rms_norm(after[-1], layer.mlp_norm, eps)))
        routes.append(moe.route(near(_linear(normed[-1], *layer.router)), model.config.top_k))
    mixed = [torch.zeros_like(each) for each in normed]
    for e in torch.cat([chosen.flatten() for _, chosen in routes]).unique().tolist():
        # Texts that round alike go through the expert together.
        alike: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
        for i, (model, (_, chosen)) in enumerate(zip(models, routes, strict=True)):
            tokens, rank = (chosen == e).nonzero(as_tuple=True)
            if len(tokens):
                alike.setdefault(model.rounding.name, []).append((i, tokens, rank))
        for parts in alike.values():
            rows = torch.cat([normed[i][tokens] for i, tokens, _ in parts])
            outputs = _expert(models[parts[0][0]], n, e, rows)
            for (i, tokens, rank), part in zip(
                parts, outputs.split([len(tokens) for _, tokens, _ in parts]), strict=True
            ):
                mixed[i].index_add_(0, tokens, part * routes[i][0][tokens, rank, None])
    nears = [rounding.activations(model.rounding) for model in models]
    return [
        near(each + near(out)) for near, each, out in zip(nears, after, mixed, strict=True)
    ], pasts


def _expert(weights: Weights, n: int, e: int, rows: Tensor) -> Tensor:
    """What expert e of layer n makes of normalised rows [n, H]."""
    config, layer = weights.config, weights.layers[n]
    near = rounding.activations(weights.rounding)
    near_input = rounding.expert_inputs(weights.rounding)
    t = near(_linear(near_input(rows), layer.gate_up[0][e], layer.gate_up[1][e]))
    t = moe.swiglu(t[:, 0::2], t[:, 1::2], alpha=config.alpha, limit=config.limit)
    return near(_linear(near_input(near(t)), layer.down[0][e], layer.down[1][e]))
