"""An independent implementation of gpt-oss, which computes reference log-probabilities.

It is plain PyTorch in float64 or float32, without paged caches, fused kernels or code from an
engine.

Sources: the gpt-oss model card (OpenAI 2025, arXiv:2508.10925) and reference implementation
(openai/gpt-oss, gpt_oss/torch/model.py) for attention sinks, routing and the clamped SwiGLU; YaRN
(Peng et al. 2023, arXiv:2309.00071) for the rotary embedding.

Shapes: T tokens, V vocabulary, H hidden, Hq query heads, Hkv key/value heads, D head size, E
experts, I intermediate size.

`stored_weights` reads the weights of a checkpoint.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from sm121.oracles import attention as attention_oracle
from sm121.oracles import moe, rounding
from sm121.oracles.formats import EXACT, Rounding

#: The number of queries whose scores are in memory at a time.
_QUERY_CHUNK = 512


@pydantic_dataclass(frozen=True, kw_only=True, config=ConfigDict(populate_by_name=True))
class GptOssConfig:
    """The values of config.json that this implementation needs, named by Hugging Face's keys."""

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
        """Read the content of config.json.

        Args:
            data: The content.

        Raises:
            ValueError: The model is not gpt-oss, its rotary embedding is not YaRN, or a key is
                missing.
        """
        model = data.get("model_type")
        if model != "gpt_oss":
            raise ValueError(f"config.json is of a {model!r} model, not of gpt_oss")
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        rope_type = rope.get("rope_type")
        if rope_type != "yarn":
            raise ValueError(f"config.json has rope type {rope_type!r}; gpt-oss has 'yarn'")
        values = {**data, **rope}
        if "layer_types" in data:
            values["layer_types"] = [kind == "sliding_attention" for kind in data["layer_types"]]
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"config.json lacks {first['loc'][0]!r}: {first['msg']}") from None


#: A weight [out, in] and its bias [out].
Linear: TypeAlias = tuple[Tensor, Tensor]
#: The matrices [out, in] of the experts. They are a tensor [E, out, in], or a sequence that reads a
#: matrix from the file when it is accessed.
Matrices: TypeAlias = Any
#: A vocabulary matrix [V, H]. It is a tensor, or an object that reads rows from the file when they
#: are accessed by a slice or a tensor of indices.
Rows: TypeAlias = Any


class Latest(Sequence[Any]):
    """A sequence whose entries are read on access. Only the last entry is kept in memory.

    Args:
        length: The number of entries.
        read: Reads the entry with an index.
    """

    def __init__(self, length: int, read: Callable[[int], Any]) -> None:
        self._length = length
        self._read = read
        self._last: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(index)
        if self._last is None or self._last[0] != index:
            self._last = None  # frees the last item before the next one is read
            self._last = (index, self._read(index))
        return self._last[1]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The weights of one layer."""

    #: [H].
    attention_norm: Tensor
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    #: [Hq].
    sinks: Tensor
    #: [H].
    mlp_norm: Tensor
    router: Linear
    #: The experts' matrices, and their bias [E, 2I].
    gate_up: tuple[Matrices, Tensor]
    #: The experts' matrices, and their bias [E, H].
    down: tuple[Matrices, Tensor]


@dataclasses.dataclass(frozen=True)
class Weights:
    """A model's weights."""

    config: GptOssConfig
    #: [V, H] in BF16; converted to the dtype of the computation on use.
    embedding: Rows
    layers: Sequence[Layer]
    #: [H].
    norm: Tensor
    #: [V, H] in BF16; converted to the dtype of the computation on use.
    head: Rows
    #: The rounding of the server whose results are computed (`sm121.oracles.rounded`).
    rounding: Rounding = EXACT

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        return self.norm.dtype


def rotary(config: GptOssConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the rotary embedding of positions, multiplied by YaRN's attention scaling (mscale).

    Args:
        config: The model.
        positions: [T].
        dtype: The dtype of the result.

    Returns:
        Cosine and sine, both [T, D/2].
    """
    half = config.head_dim // 2
    steps = torch.arange(half, dtype=torch.float64)
    frequency = config.rope_theta ** (-steps / half)

    def dimension(turns: float) -> float:
        """Return the dimension whose angle makes this many turns over the original context."""
        period = config.rope_original_positions / (turns * 2 * math.pi)
        return half * math.log(period) / math.log(config.rope_theta)

    low = dimension(config.rope_beta_fast)
    high = dimension(config.rope_beta_slow)
    if config.rope_truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0.0)
    high = min(high, config.head_dim - 1.0)
    stretched = ((steps - low) / (high - low)).clamp(0, 1)
    frequency = frequency * (1 - stretched) + frequency / config.rope_factor * stretched
    mscale = 0.1 * math.log(config.rope_factor) + 1
    # The reference and all engines keep frequencies and angles in float32. At position 500, this
    # changes an angle by up to 3e-5 rad, far more than any other effect of float32. Therefore
    # float32 is treated as a part of the definition.
    angle = positions.float()[:, None] * frequency.float().to(positions.device)
    angle = angle.double()
    return (angle.cos() * mscale).to(dtype), (angle.sin() * mscale).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Args:
        x: [..., H].
        weight: [H].
        eps: The constant that prevents a division by zero.
    """
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.T + bias


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D]. Dimension i is paired with i + D/2 (NeoX style)."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


#: Rotated keys and values [S, Hkv, D] of one text in one layer.
Past: TypeAlias = tuple[Tensor, Tensor]


def attention(weights: Weights, n: int, x: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
    """Compute the causal grouped-query attention of a layer, with sinks.

    For the sinks, see `sm121.oracles.attention`. In sliding layers, a token sees itself and the
    window - 1 tokens before it.

    Args:
        weights: The model.
        n: The index of the layer.
        x: Normalised states [T, H].
        past: The keys and values of the preceding tokens.

    Returns:
        [T, H], and the keys and values of all tokens.
    """
    config = weights.config
    layer = weights.layers[n]
    served = weights.rounding
    near = rounding.activations(served)
    to_cache = rounding.cached(served)
    inputs = rounding.inputs(served, "qkv")(x)

    def project(linear: Linear) -> Tensor:
        return near(_linear(inputs, *linear)).view(len(x), -1, config.head_dim)

    before = 0 if past is None else len(past[0])
    positions = torch.arange(before, before + len(x), device=x.device)
    cos, sin = rotary(config, positions, x.dtype)
    cos = near(cos)
    sin = near(sin)
    q = near(_rotate(project(layer.q), cos, sin))
    k = to_cache(near(_rotate(project(layer.k), cos, sin)))
    v = to_cache(project(layer.v))
    if past is not None:
        k = torch.cat((past[0], k))
        v = torch.cat((past[1], v))
    attended = _attend_in_chunks(layer, config, config.sliding_layers[n], q, k, v)
    mixed = rounding.inputs(served, "o")(near(attended.flatten(1)))
    return near(_linear(mixed, *layer.o)), (k, v)


def _attend_in_chunks(
    layer: Layer, config: GptOssConfig, slides: bool, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Compute attention for the last T of S tokens: q [T, Hq, D], k and v [S, Hkv, D]."""
    length = len(q)
    before = len(k) - length
    positions = torch.arange(before, before + length, device=q.device)
    window = config.window if slides else None
    scale = 1 / math.sqrt(config.head_dim)
    parts = []
    for start in range(0, length, _QUERY_CHUNK):
        end = min(start + _QUERY_CHUNK, length)
        # Leave out the keys that none of these queries sees.
        first = 0 if window is None else max(0, before + start - window + 1)
        keys = slice(first, before + end)
        visible = attention_oracle.visible_keys(
            positions[start:end] - first, before + end - first, window
        )
        part = attention_oracle.attend(
            q[start:end], k[keys], v[keys], visible, sinks=layer.sinks, scale=scale
        )
        parts.append(part)
    return torch.cat(parts)


def last_norm(weights: Weights, x: Tensor) -> Tensor:
    """Apply the model's last norm, and return the inputs of the output matrix.

    Args:
        weights: The model.
        x: The states after the last layer, [T, H].

    Returns:
        [T, H].
    """
    normed = rms_norm(x, weights.norm, weights.config.eps)
    near = rounding.activations(weights.rounding)
    return rounding.inputs(weights.rounding, "lm_head")(near(normed))


def embedded(weights: Weights, token_ids: Sequence[int]) -> Tensor:
    """Return the embeddings of tokens, which are the inputs of the first layer.

    Args:
        weights: The model.
        token_ids: T ids.

    Returns:
        [T, H].

    Raises:
        ValueError: There is no token, or an id is not in the vocabulary.
    """
    ids = torch.tensor(list(token_ids), dtype=torch.int64)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= weights.config.vocabulary:
        raise ValueError(f"token ids must be one or more of 0..{weights.config.vocabulary - 1}")
    rows: Tensor = weights.embedding[ids]
    return rows.to(weights.dtype)


@dataclasses.dataclass(frozen=True)
class _Routed:
    """The state of one text between the attention and the experts of a layer."""

    #: The states after the attention, [T, H].
    states: Tensor
    #: The normalised states, [T, H].
    normed: Tensor
    #: The routing weights from `moe.route`, [T, k].
    shares: Tensor
    #: The experts from `moe.route`, [T, k].
    experts: Tensor


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """The tokens of one text that chose an expert."""

    #: The index of the text.
    text: int
    tokens: Tensor
    #: For each token, the index of the expert among the token's choices.
    ranks: Tensor


def after_layer(
    models: Sequence[Weights], n: int, x: Sequence[Tensor], past: Sequence[Past] | None = None
) -> tuple[list[Tensor], list[Past]]:
    """Compute one layer for several texts.

    The models of the texts must have the same experts, so that each expert is read only once. In
    all other respects, the models may differ.

    Args:
        models: The model of each text.
        n: The index of the layer.
        x: The states of each text before the layer, [T, H].
        past: The keys and values of the preceding tokens of each text.

    Returns:
        The states of each text after the layer, and its keys and values.
    """
    pasts: list[Past] = []
    routed: list[_Routed] = []
    for index, (model, states) in enumerate(zip(models, x, strict=True)):
        before = None if past is None else past[index]
        text, keys_values = _until_routed(model, n, states, before)
        routed.append(text)
        pasts.append(keys_values)
    mixed = [torch.zeros_like(text.normed) for text in routed]
    for expert in torch.cat([text.experts.flatten() for text in routed]).unique().tolist():
        for group in _chosen_alike(models, routed, expert):
            rows = torch.cat([routed[part.text].normed[part.tokens] for part in group])
            outputs = _expert(models[group[0].text], n, expert, rows)
            lengths = [len(part.tokens) for part in group]
            for part, output in zip(group, outputs.split(lengths), strict=True):
                shares = routed[part.text].shares[part.tokens, part.ranks, None]
                mixed[part.text].index_add_(0, part.tokens, output * shares)
    after = []
    for model, text, output in zip(models, routed, mixed, strict=True):
        near = rounding.activations(model.rounding)
        after.append(near(text.states + near(output)))
    return after, pasts


def _until_routed(model: Weights, n: int, x: Tensor, past: Past | None) -> tuple[_Routed, Past]:
    """Compute the attention of a layer and the choice of its experts."""
    layer = model.layers[n]
    eps = model.config.eps
    near = rounding.activations(model.rounding)
    added, keys_values = attention(model, n, near(rms_norm(x, layer.attention_norm, eps)), past)
    states = near(x + added)
    normed = near(rms_norm(states, layer.mlp_norm, eps))
    shares, experts = moe.route(near(_linear(normed, *layer.router)), model.config.top_k)
    return _Routed(states, normed, shares, experts), keys_values


def _chosen_alike(
    models: Sequence[Weights], routed: Sequence[_Routed], expert: int
) -> list[list[_Chosen]]:
    """Group the tokens that are routed to an expert by the rounding of the model of their text."""
    groups: dict[str, list[_Chosen]] = {}
    for index, (model, text) in enumerate(zip(models, routed, strict=True)):
        tokens, ranks = (text.experts == expert).nonzero(as_tuple=True)
        if len(tokens):
            groups.setdefault(model.rounding.name, []).append(_Chosen(index, tokens, ranks))
    return list(groups.values())


def _expert(weights: Weights, n: int, expert: int, rows: Tensor) -> Tensor:
    """Compute one expert of a layer on normalised rows [m, H]."""
    config = weights.config
    near = rounding.activations(weights.rounding)
    near_input = rounding.expert_inputs(weights.rounding)
    matrices, biases = weights.layers[n].gate_up
    sums = near(_linear(near_input(rows), matrices[expert], biases[expert]))
    gate = sums[:, 0::2]
    up = sums[:, 1::2]
    hidden = near(moe.swiglu(gate, up, alpha=config.alpha, limit=config.limit))
    matrices, biases = weights.layers[n].down
    return near(_linear(near_input(hidden), matrices[expert], biases[expert]))
