"""The tensors of the canary, which are expanded from ``fixtures/canary``, and BF16 in NumPy."""

import json
from importlib import resources
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sm121.checkpoint import tokenizer
from sm121.oracles import mxfp4

#: The twins have the same values: ``mxfp4`` in gpt-oss's formats, ``bf16`` in BF16.
Twin = Literal["mxfp4", "bf16"]
Array = NDArray[Any]

#: The number of layers of the canary.
LAYERS = 4
#: The seed of the noise in the rows of tokens that are not in the corpus.
_NOISE_SEED = 121
#: The number of rows whose noise is generated at a time.
_NOISE_ROWS = 8192
#: The stream of random numbers for the embedding.
_EMBEDDING_STREAM = 0
#: The stream of random numbers for the output matrix.
_HEAD_STREAM = 1
#: Half of BF16's last bit, as bits of float32, minus one.
_ALMOST_HALF = 0x7FFF


class StoredTensor(NamedTuple):
    """A tensor as safetensors stores it."""

    #: The dtype in safetensors. For ``BF16``, the array has the bits as u16.
    dtype: str
    array: Array


def tensors(twin: Twin) -> dict[str, StoredTensor]:
    """Return all tensors of a twin, sorted by name.

    Args:
        twin: The twin.
    """
    import safetensors.numpy

    shipped: dict[str, Array] = safetensors.numpy.load(read_data("weights.safetensors"))
    recipe = json.loads(read_data("weights.json"))
    tokens = shipped["tokens"].astype(np.int64)
    embedding = _expand(
        shipped["embed_tokens"], tokens, recipe["embedding_noise"], _EMBEDDING_STREAM
    )
    head = _expand(shipped["lm_head"], tokens, recipe["head_noise"], _HEAD_STREAM)
    result = {
        "model.embed_tokens.weight": StoredTensor("BF16", embedding),
        "lm_head.weight": StoredTensor("BF16", head),
        "model.norm.weight": StoredTensor("BF16", shipped["norm"]),
    }
    for n in range(LAYERS):
        layer = {}
        for name, array in shipped.items():
            number, _, short = name.partition(".")
            if number == str(n):
                layer[short] = array
        result.update(_layer_tensors(twin, f"model.layers.{n}", layer))
    return dict(sorted(result.items()))


def _layer_tensors(twin: Twin, prefix: str, layer: dict[str, Array]) -> dict[str, StoredTensor]:
    names = {
        "input_layernorm": "input_layernorm.weight",
        "post_attention_layernorm": "post_attention_layernorm.weight",
        "sinks": "self_attn.sinks",
        "router": "mlp.router.weight",
        "router_bias": "mlp.router.bias",
        "gate_up_bias": "mlp.experts.gate_up_proj_bias",
        "down_bias": "mlp.experts.down_proj_bias",
    }
    for side in "qkvo":
        names[f"{side}_proj"] = f"self_attn.{side}_proj.weight"
        names[f"{side}_bias"] = f"self_attn.{side}_proj.bias"
    result = {f"{prefix}.{name}": StoredTensor("BF16", layer[k]) for k, name in names.items()}
    for side in ("gate_up", "down"):
        blocks = layer[f"{side}_blocks"]
        scales = layer[f"{side}_scales"]
        name = f"{prefix}.mlp.experts.{side}_proj"
        if twin == "mxfp4":
            result[f"{name}_blocks"] = StoredTensor("U8", blocks)
            result[f"{name}_scales"] = StoredTensor("U8", scales)
        else:
            values = mxfp4.dequantise(blocks.reshape(*blocks.shape[:-2], -1), scales)
            # The layout of transformers' GptOssExperts: [E, in, out].
            result[name] = StoredTensor("BF16", _exact_bf16(values.swapaxes(1, 2), name))
    return result


def drafter_tensors() -> dict[str, StoredTensor]:
    """Return all tensors of the Eagle3 drafter (`LlamaForCausalLMEagle3`), sorted by name.

    The drafter's vocabulary contains only the tokens of the corpus. ``d2t`` [draft vocabulary] i64
    is the difference between the canary's id and the drafter's id of each token, and ``t2d``
    [vocabulary] marks the drafter's tokens. The drafter uses the canary's embedding.
    """
    import safetensors.numpy

    shipped: dict[str, Array] = safetensors.numpy.load(read_data("drafter.safetensors"))
    tokens = shipped.pop("tokens").astype(np.int64)
    prefixes = {
        **dict.fromkeys(("fc", "norm", "lm_head"), ""),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "midlayer.self_attn."),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "midlayer.mlp."),
    }
    result = {}
    for name, array in shipped.items():
        prefix = prefixes.get(name, "midlayer.")
        result[f"{prefix}{name}.weight"] = StoredTensor("BF16", array)
    result["d2t"] = StoredTensor("I64", tokens - np.arange(len(tokens)))
    known = np.zeros(tokenizer.VOCABULARY, dtype=np.uint8)
    known[tokens] = 1
    result["t2d"] = StoredTensor("BOOL", known)
    return dict(sorted(result.items()))


def _expand(compact: Array, known: Array, noise: float, stream: int) -> Array:
    """Expand [known + 1, H] BF16 bits to [vocabulary, H].

    The rows of known tokens are stored. Each element of the other rows is the element of the last
    row, which they share, plus or minus `noise`.
    """
    rows = np.empty((tokenizer.VOCABULARY, compact.shape[1]), dtype=np.uint16)
    shared = from_bf16(compact[-1])
    below = to_bf16(shared - noise)
    above = to_bf16(shared + noise)
    # Use PCG64's raw words, because they are the same in all versions of NumPy; distributions may
    # change.
    words = np.random.PCG64([_NOISE_SEED, stream])
    for start in range(0, len(rows), _NOISE_ROWS):
        block = rows[start : start + _NOISE_ROWS]
        raw = words.random_raw(block.size // 64).astype("<u8").view(np.uint8)
        signs = np.unpackbits(raw).reshape(block.shape)
        block[...] = np.where(signs == 1, above, below)
    rows[known] = compact[:-1]
    return rows


def from_bf16(bits: Array) -> NDArray[np.float32]:
    """Return the values of BF16 bits.

    Args:
        bits: u16 of any shape.

    Returns:
        The same shape in float32, exact.
    """
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: NDArray[np.float32]) -> Array:
    """Return the bits of the nearest BF16 values, ties to even.

    Args:
        values: Finite values of any shape.

    Returns:
        The same shape, u16.
    """
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    last_bit = (bits >> 16) & 1
    return ((bits + _ALMOST_HALF + last_bit) >> 16).astype(np.uint16)


def _exact_bf16(values: NDArray[np.float64], name: str) -> Array:
    bits = to_bf16(np.ascontiguousarray(values, dtype=np.float32))
    if not np.array_equal(from_bf16(bits).astype(np.float64), values):
        raise ValueError(f"{name} contains a value that BF16 cannot represent")
    return bits


def read_data(name: str) -> bytes:
    """Return the content of a file of ``fixtures/canary``.

    Args:
        name: The path of the file, relative to this folder.

    Raises:
        FileNotFoundError: There is no such file.
    """
    return (resources.files("sm121.fixtures") / "canary" / name).read_bytes()
