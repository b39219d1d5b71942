"""Generate the tensors of a synthetic checkpoint, with their names and shapes."""

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sm121.checkpoint import tokenizer
from sm121.checkpoint.canary_tensors import LAYERS, Array, Twin, from_bf16, tensors, to_bf16
from sm121.oracles import mxfp4

#: The number of layers and of experts of each shape. All other sizes are equal (config.json of
#: both).
SHAPES = {"gpt-oss-120b": (36, 128), "gpt-oss-20b": (24, 32)}
HIDDEN = INTERMEDIATE = 2880
HEADS = 64
KV_HEADS = 8
_HEAD_DIM = 64

# The sizes of the canary's part of the model.
_C_HIDDEN = 256
_C_EXPERTS = 8
_C_PAIRS = 128
_C_HEADS = 8
_C_KV_HEADS = 2
#: The median RMS of the canary's hidden state before each of its norms: before the attention and
#: the experts of each layer, and before the last norm (measured on the fixed prompts).
_CANARY_RMS = ((0.47, 1.3), (2.4, 3.0), (5.5, 5.6), (6.2, 6.6), (9.0,))

# The dimensions beside the canary's part: groups of token ids, and random values from `_REST` on.
_GROUPS = 16
_REST = _C_HIDDEN + _GROUPS
_IN_GROUP = 0.1
_OUT_OF_REACH = -2500.0
_RMS_OF_CODES = math.sqrt(sum(value**2 for value in mxfp4.E2M1_VALUES) / 8)
_EMBEDDED = 0.02
"""The RMS of the random part of the embedding."""
_GROWTH = 1.5
"""The mean square that all layers together add to the random part of the hidden state, as a
multiple of the embedding's mean square.
"""
_LOGIT = 0.08
"""The standard deviation that the random part adds to the logits of a token of median size."""


@dataclass(frozen=True)
class Synthetic:
    """The generated checkpoint: a shape, the number of its layers, and the seed."""

    shape: str
    layers: int
    seed: int
    twin: Twin

    @property
    def experts(self) -> int:
        """The number of experts of a layer."""
        return SHAPES[self.shape][1]

    @property
    def own_layers(self) -> dict[int, int]:
        """Return the layers that contain the canary's: the last ones, beginning with an even one,
        because even layers use the window."""
        if self.layers < LAYERS:
            return {}
        first = (self.layers - LAYERS) // 2 * 2
        return {first + n: n for n in range(LAYERS)}

    @property
    def step(self) -> float:
        """The RMS that the attention, or the experts, of one layer add to the random part."""
        return _EMBEDDED * math.sqrt(_GROWTH / (2 * self.layers))


#: A tensor: its safetensors dtype, its shape, and the function that generates it in parts.
Tensors = dict[str, tuple[str, tuple[int, ...], Callable[[], Iterator[Array]]]]


@functools.cache
def _canary() -> dict[str, Array]:
    return {name: array for name, (_, array) in tensors("mxfp4").items()}


def ends(wanted: Synthetic) -> Tensors:
    """Return the embedding, the last norm and the output matrix.

    Args:
        wanted: The synthetic model.
    """
    vocabulary = tokenizer.VOCABULARY
    own = bool(wanted.own_layers)

    def rows(name: str, part: int, std: float) -> Iterator[Array]:
        stream = np.random.PCG64([wanted.seed, 0, part])
        for start in range(0, vocabulary, 8192):
            ids = np.arange(start, min(start + 8192, vocabulary))
            block = np.zeros((len(ids), HIDDEN), np.uint16)
            if own:
                block[:, :_C_HIDDEN] = _canary()[name][start : start + len(ids)]
            if part == 0:  # one hidden dimension encodes each group of token ids
                group = (ids * 2_654_435_761 >> 16) % (wanted.experts // _C_EXPERTS)
                block[np.arange(len(ids)), _C_HIDDEN + group] = to_bf16(
                    np.array([_IN_GROUP], np.float32)
                )
            block[:, _REST:] = _normal(stream, (len(ids), HIDDEN - _REST), std)
            yield block

    head = _LOGIT / math.sqrt(HIDDEN - _REST)
    return {
        "model.embed_tokens.weight": (
            "BF16",
            (vocabulary, HIDDEN),
            lambda: rows("model.embed_tokens.weight", 0, _EMBEDDED),
        ),
        "lm_head.weight": (
            "BF16",
            (vocabulary, HIDDEN),
            lambda: rows("lm_head.weight", 1, head if own else 6 * head),
        ),
        "model.norm.weight": _norm(wanted, wanted.layers, 0, "model.norm.weight", 2),
    }


def _norm(
    wanted: Synthetic, n: int, half: int, own: str, part: int
) -> tuple[str, tuple[int, ...], Callable[[], Iterator[Array]]]:
    """Return norm weights for both parts of the hidden state.

    They scale the canary's part back to its own RMS. They scale the random part to an RMS of 1
    where the canary's part has its median RMS.
    """
    places = sorted(wanted.own_layers)
    before = sum(place < n for place in places)
    layer = min(before, LAYERS) if places else 0
    # Between two of the canary's layers, the hidden state is the one before the second of them.
    size = _CANARY_RMS[layer][half if n in places else 0]
    added = 2 * n + half
    rest = math.sqrt(_EMBEDDED**2 + added * wanted.step**2)
    whole = math.sqrt((size**2 * _C_HIDDEN * bool(places) + rest**2 * (HIDDEN - _REST)) / HIDDEN)
    energy = 1 + rest**2 * (HIDDEN - _REST) / (size**2 * _C_HIDDEN)

    def make() -> Iterator[Array]:
        weight = from_bf16(
            _normal(np.random.PCG64([wanted.seed, n + 1, part]), (HIDDEN,), 0.1, mean=1.0)
        )
        weight[_REST:] *= whole / rest
        weight[:_REST] = 1.0
        if places and (n in places or n == wanted.layers):
            back = math.sqrt(_C_HIDDEN / HIDDEN * energy)
            weight[:_C_HIDDEN] = from_bf16(_canary()[own]) * back
        yield to_bf16(weight)

    return "BF16", (HIDDEN,), make


@dataclass(frozen=True)
class _Layer:
    """The tensors of one layer without its experts, whose norms `_norm` returns."""

    wanted: Synthetic
    n: int

    @property
    def _own(self) -> int | None:
        return self.wanted.own_layers.get(self.n)

    def _of_canary(self, name: str) -> Array:
        return _canary()[f"model.layers.{self._own}.{name}"]

    def _stream(self, part: int) -> Any:
        return np.random.PCG64([self.wanted.seed, self.n + 1, part])

    def _heads(self, side: str) -> dict[int, int]:
        """Return the canary's heads. The keys are the numbers of the real heads."""
        if self._own is None:
            return {}
        if side != "q":
            return {h: h for h in range(_C_KV_HEADS)}
        a = _C_HEADS // _C_KV_HEADS
        b = HEADS // KV_HEADS
        return {h // a * b + h % a: h for h in range(_C_HEADS)}

    def projection(self, side: str, part: int, std: float) -> Array:
        """Return the projection of queries, keys or values, [heads, 64, H]."""
        count = HEADS if side == "q" else KV_HEADS
        made = _normal(self._stream(part), (count, _HEAD_DIM, HIDDEN), std)
        for head, of_canary in self._heads(side).items():
            weight = self._of_canary(f"self_attn.{side}_proj.weight")
            made[head] = 0
            made[head, :, :_C_HIDDEN] = weight.reshape(-1, _HEAD_DIM, _C_HIDDEN)[of_canary]
        return made

    def projection_bias(self, side: str, part: int) -> Array:
        """Return the bias of that projection, [heads, 64]."""
        count = HEADS if side == "q" else KV_HEADS
        made = _normal(self._stream(part), (count, _HEAD_DIM), 0.2)
        for head, of_canary in self._heads(side).items():
            bias = self._of_canary(f"self_attn.{side}_proj.bias")
            made[head] = bias.reshape(-1, _HEAD_DIM)[of_canary]
        return made

    def out(self) -> Array:
        """Return the output projection, [H, heads, 64]."""
        std = self.wanted.step / (0.6 * math.sqrt(HEADS * _HEAD_DIM))
        made = _normal(self._stream(7), (HIDDEN, HEADS, _HEAD_DIM), std)
        made[:_REST] = 0
        for head, of_canary in self._heads("q").items():
            weight = self._of_canary("self_attn.o_proj.weight")
            made[:_C_HIDDEN, head] = weight.reshape(_C_HIDDEN, -1, _HEAD_DIM)[:, of_canary]
        return made

    def out_bias(self) -> Array:
        """Return the bias of the output projection, [H]."""
        made = _normal(self._stream(8), (HIDDEN,), self.wanted.step / 2)
        made[:_REST] = 0
        if self._own is not None:
            made[:_C_HIDDEN] = self._of_canary("self_attn.o_proj.bias")
        return made

    def sinks(self) -> Array:
        """Return the attention sinks, [heads]."""
        made = _normal(self._stream(9), (HEADS,), 1.0, mean=5.0)
        for head, of_canary in self._heads("q").items():
            made[head] = self._of_canary("self_attn.sinks")[of_canary]
        return made

    def router(self) -> Array:
        """Return the router's weight, [experts, H]."""
        experts = self.wanted.experts
        groups = self.wanted.experts // _C_EXPERTS
        made = np.zeros((experts, HIDDEN), np.uint16)
        expert = np.arange(experts)
        if self._own is None:
            rest = HIDDEN - _REST
            made[:, _REST:] = _normal(self._stream(10), (experts, rest), 1.3 / math.sqrt(rest))
        else:
            made[:, :_C_HIDDEN] = self._of_canary("mlp.router.weight")[expert % _C_EXPERTS]
        home = (expert // _C_EXPERTS + 5 * self.n) % groups
        away = np.arange(groups)[None] != home[:, None]
        out_of_reach = to_bf16(np.array([_OUT_OF_REACH], np.float32))
        made[:, _C_HIDDEN : _C_HIDDEN + groups] = away * out_of_reach
        return made

    def router_bias(self) -> Array:
        """Return the router's bias, [experts]."""
        experts = self.wanted.experts
        if self._own is None:
            return _normal(self._stream(11), (experts,), 0.3)
        bias: Array = self._of_canary("mlp.router.bias")[np.arange(experts) % _C_EXPERTS]
        return bias

    def tensors(self) -> Tensors:
        """Return the norms, the attention and the router."""
        prefix = f"model.layers.{self.n}"
        of_canary = f"model.layers.{self._own}"
        parts: Tensors = {}
        for half, name in enumerate(("input_layernorm", "post_attention_layernorm")):
            norm = _norm(self.wanted, self.n, half, f"{of_canary}.{name}.weight", 12 + half)
            parts[f"{prefix}.{name}.weight"] = norm

        def add(name: str, shape: tuple[int, ...], make: Callable[[], Array]) -> None:
            parts[f"{prefix}.{name}"] = ("BF16", shape, lambda: iter((make(),)))

        for side, part, std in (("q", 1, 0.023), ("k", 3, 0.023), ("v", 5, 0.02)):
            width = (HEADS if side == "q" else KV_HEADS) * _HEAD_DIM
            name = f"self_attn.{side}_proj"
            weight = functools.partial(self.projection, side, part, std)
            add(f"{name}.weight", (width, HIDDEN), weight)
            add(f"{name}.bias", (width,), functools.partial(self.projection_bias, side, part + 1))
        add("self_attn.o_proj.weight", (HIDDEN, HEADS * _HEAD_DIM), self.out)
        add("self_attn.o_proj.bias", (HIDDEN,), self.out_bias)
        add("self_attn.sinks", (HEADS,), self.sinks)
        add("mlp.router.weight", (self.wanted.experts, HIDDEN), self.router)
        add("mlp.router.bias", (self.wanted.experts,), self.router_bias)
        return parts


def layer(wanted: Synthetic, n: int) -> Tensors:
    """Return all tensors of one layer.

    Args:
        wanted: The synthetic model.
        n: The index of the layer.
    """
    return _Layer(wanted, n).tensors() | experts(wanted, n)


@dataclass(frozen=True)
class _Matrices:
    """One of the two matrices of a layer's experts."""

    wanted: Synthetic
    layer: int
    side: str
    part: int
    rows: int
    columns: int
    #: The RMS of the matrix's values.
    rms: float
    #: The size of the canary's part: its first rows and columns.
    own_rows: int
    own_columns: int
    #: The number of first rows that are zero outside of the canary's part.
    empty: int

    @property
    def _own(self) -> str | None:
        own = self.wanted.own_layers.get(self.layer)
        if own is None:
            return None
        return f"model.layers.{own}.mlp.experts.{self.side}_proj"

    def packed(self, expert: int) -> tuple[Array, Array]:
        """Return the blocks [rows, columns / 32, 16] and scales [rows, columns / 32] of an
        expert."""
        shape = (self.rows, self.columns // mxfp4.BLOCK, 16)
        stream = np.random.PCG64([self.wanted.seed, self.layer + 1, self.part, expert])
        blocks = bytes_of(stream, shape)
        scales = scales_of(stream, shape[:2], self.rms)
        blocks[: self.empty] = 0
        if self._own is not None:
            here = slice(0, self.own_rows), slice(0, self.own_columns // mxfp4.BLOCK)
            blocks[here] = _canary()[f"{self._own}_blocks"][expert % _C_EXPERTS]
            scales[here] = _canary()[f"{self._own}_scales"][expert % _C_EXPERTS]
        return blocks, scales

    def values(self, expert: int) -> Array:
        """Return an expert's values in BF16, [columns, rows], as in transformers' GptOssExperts."""
        blocks, scales = self.packed(expert)
        sizes = np.ldexp(np.float32(1), scales.astype(np.int32) - mxfp4.E8M0_BIAS)
        pairs = _pairs()[blocks].reshape(*scales.shape, mxfp4.BLOCK) * sizes[..., None]
        # Exact, because an element has two significant bits.
        bits: Array = (pairs.view(np.uint32) >> 16).astype(np.uint16)
        return bits.reshape(self.rows, self.columns).T

    def bias(self, std: float) -> Array:
        """Return the experts' biases, [experts, rows]."""
        shape = (self.wanted.experts, self.rows)
        stream = np.random.PCG64([self.wanted.seed, self.layer + 1, self.part + 1])
        made = _normal(stream, shape, std)
        made[:, : self.empty] = 0
        if self._own is not None:
            its = _canary()[f"{self._own}_bias"]
            made[:, : self.own_rows] = its[np.arange(self.wanted.experts) % _C_EXPERTS]
        return made

    def tensors(self, bias_std: float) -> Tensors:
        name = f"model.layers.{self.layer}.mlp.experts.{self.side}_proj"
        count = self.wanted.experts
        blocks = self.columns // mxfp4.BLOCK

        def each(of: Callable[[int], Array]) -> Callable[[], Iterator[Array]]:
            return lambda: map(of, range(count))

        parts: Tensors = {
            f"{name}_bias": ("BF16", (count, self.rows), lambda: iter((self.bias(bias_std),)))
        }
        if self.wanted.twin == "bf16":
            parts[name] = ("BF16", (count, self.columns, self.rows), each(self.values))
            return parts
        of_blocks = (count, self.rows, blocks, 16)
        of_scales = (count, self.rows, blocks)
        parts[f"{name}_blocks"] = ("U8", of_blocks, each(lambda e: self.packed(e)[0]))
        parts[f"{name}_scales"] = ("U8", of_scales, each(lambda e: self.packed(e)[1]))
        return parts


def experts(wanted: Synthetic, n: int) -> Tensors:
    """Return the tensors of one layer's experts.

    Args:
        wanted: The synthetic model.
        n: The index of the layer.
    """
    own = n in wanted.own_layers
    up = _Matrices(
        wanted,
        n,
        "gate_up",
        20,
        2 * INTERMEDIATE,
        HIDDEN,
        3 / math.sqrt(HIDDEN),
        2 * _C_PAIRS,
        _C_HIDDEN,
        2 * _C_PAIRS if own else 0,
    )
    # The output of SwiGLU for inputs of 3, times four shares, has an RMS of about 5 (measured).
    down = _Matrices(
        wanted,
        n,
        "down",
        22,
        HIDDEN,
        INTERMEDIATE,
        wanted.step / (5 * math.sqrt(INTERMEDIATE)),
        _C_HIDDEN,
        _C_PAIRS,
        _REST,
    )
    return up.tensors(0.3) | down.tensors(wanted.step / 2)


@functools.cache
def _pairs() -> Array:
    """Return the two elements of each byte, [256, 2] float32."""
    values = np.array([*mxfp4.E2M1_VALUES, *(-v for v in mxfp4.E2M1_VALUES)], np.float32)
    code = np.arange(256)
    return np.stack([values[code & 15], values[code >> 4]], 1)


def scales_of(stream: Any, shape: tuple[int, ...], rms: float) -> Array:
    """Return two E8M0 scales, a factor of four apart, that give random codes an RMS.

    Args:
        stream: A bit generator of NumPy.
        shape: The shape of the result.
        rms: The RMS of the dequantised values.
    """
    energy = (rms / _RMS_OF_CODES) ** 2
    exponent = math.floor(math.log2(energy / 2) / 2)  # so that 2 <= energy / 4^exponent < 8
    share = (energy / 4**exponent - 1) / 15
    large = bytes_of(stream, shape) < 256 * share
    scales: Array = (mxfp4.E8M0_BIAS + exponent + 2 * large).astype(np.uint8)
    return scales


def bytes_of(stream: Any, shape: tuple[int, ...]) -> Array:
    # Raw words of PCG64 are the same in each version of NumPy; its distributions may differ.
    """Return random bytes, which are the same in each version of NumPy.

    Args:
        stream: A bit generator of NumPy.
        shape: The shape of the result.
    """
    count = math.prod(shape)
    words: Array = stream.random_raw(-(-count // 8)).astype("<u8", copy=False)
    return words.view(np.uint8)[:count].reshape(shape)


@functools.cache
def _quantiles() -> Array:
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / 65_536) for i in range(65_536)], np.float32)


def _normal(stream: Any, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Array:
    """Return normally distributed values as BF16 bits."""
    table = to_bf16(_quantiles() * np.float32(std) + np.float32(mean))
    codes = bytes_of(stream, (2 * math.prod(shape),)).view("<u2")
    made: Array = table[codes].reshape(shape)
    return made
