"""The protocol of a kernel provider: an object with any subset of these operations as methods.

| operation | result |
|---|---|
| `mxfp4_quantize(x)`, x [M, K] | packed [M, K/2] u8, scales [M, K/32] u8 E8M0 |
| `mxfp4_dequantize(packed, scales)`, as above | [M, K] float32 |
| `mxfp8_quantize(x)`, x [M, K] | q [M, K] float8_e4m3fn, scales [M, K/32] u8 E8M0 |
| `route(logits, k)`, logits [T, E] | shares [T, k], a softmax over the k largest; experts [T, k] |
| `fused_moe(...)`: the fields of `FusedMoe` | y [T, H] |
| `prefill_attention(...)`: the fields of `PrefillAttention` | o [T, Hq, D] |
| `decode_attention(...)`: the fields of `DecodeAttention` | o [B, Hq, D] |
| `prefill_attention_fp8`, `decode_attention_fp8`: the same fields | the same, of an FP8 KV cache |
| `lm_head(x, weight)`, x [T, H], weight [V, H] | [T, V] bfloat16 |
| `mxfp4_linear(x, weight)`, x [M, K], weight (packed [N, K/2], scales [N, K/32]) | [M, N] |

Tensors are passed by position, on the provider's device; alpha, limit, sinks, window and scale are
passed by keyword. The letters: T tokens, H hidden size, I intermediate size, E experts, k experts
per token, Hq query heads, Hkv key/value heads, D head size, B sequences, V vocabulary size.

Activations (x, q, k, v, y, o) are bfloat16. A provider that serves in float32 may return float32;
then the tolerances of float32 apply. In a packed byte, the even element is in the low nibble. The
experts of a token may be in any order, and of any integer type. An operation returns new tensors
and does not modify its arguments.

The operations with `_fp8` store keys and values as saturated E4M3 with scales of one, as the engine
does. Keys and values may be the two halves of one tensor [..., 2 D], as in vLLM 0.32's cache; a
provider with a cache must then use this layout for it, too.

A provider may also have `prepare(operation, *arguments, **keywords)`, for the work that an engine
does once, when it loads weights or plans a step. It returns None, or a callable without arguments
that runs the operation on these tensors. Weights, cache, block table and lengths do not change
between calls. The `ACTIVATIONS` may change, and each call must read them again. `Declaration` lists
the attributes with which a provider describes itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

if TYPE_CHECKING:
    from torch import Tensor

Operation = Literal[
    "mxfp4_quantize",
    "mxfp4_dequantize",
    "mxfp8_quantize",
    "route",
    "fused_moe",
    "prefill_attention",
    "decode_attention",
    "prefill_attention_fp8",
    "decode_attention_fp8",
    "lm_head",
    "mxfp4_linear",
]

#: For each operation with an FP8 KV cache, the same operation with a bfloat16 cache.
PLAIN: Mapping[Operation, Operation] = {
    "prefill_attention_fp8": "prefill_attention",
    "decode_attention_fp8": "decode_attention",
}

#: MXFP4 weights: packed [E, rows, K/2] u8, scales [E, rows, K/32] u8 E8M0.
Packed: TypeAlias = "tuple[Tensor, Tensor]"


class FusedMoe(NamedTuple):
    """The arguments of the mixture of experts with the clamped SwiGLU."""

    #: [T, H].
    x: "Tensor"
    #: [T, k] float32.
    weights: "Tensor"
    #: [T, k] int32.
    ids: "Tensor"
    #: [E, 2I, H], with alternating gate and up rows, as in the checkpoint.
    w1: Packed
    #: [E, 2I] bfloat16.
    w1_bias: "Tensor | None"
    #: [E, H, I].
    w2: Packed
    #: [E, H] bfloat16.
    w2_bias: "Tensor | None"
    #: The factor of the gate within the sigmoid of SwiGLU.
    alpha: float
    #: The bound at which SwiGLU clamps gate and up.
    limit: float


class PrefillAttention(NamedTuple):
    """The arguments of causal attention over whole sequences, which are concatenated."""

    #: [T, Hq, D].
    q: "Tensor"
    #: [T, Hkv, D].
    k: "Tensor"
    #: [T, Hkv, D].
    v: "Tensor"
    #: [sequences + 1] int32: the first token of each sequence, and the end of the last one.
    cu_seqlens: "Tensor"
    #: [Hq] float32, in natural-log units.
    sinks: "Tensor | None"
    #: The number of tokens that a query attends to, itself included; None for all.
    window: int | None
    #: The factor by which the scores are multiplied.
    scale: float


class DecodeAttention(NamedTuple):
    """The arguments of attention of one new token per sequence over a paged cache."""

    #: [B, Hq, D].
    q: "Tensor"
    #: [blocks, 2, Hkv, block, D].
    kv_cache: "Tensor"
    #: [B, pages] int32.
    block_table: "Tensor"
    #: [B] int32, the new token included.
    seq_lens: "Tensor"
    #: [Hq] float32, in natural-log units.
    sinks: "Tensor | None"
    #: The number of tokens that a query attends to, itself included; None for all.
    window: int | None
    #: The factor by which the scores are multiplied.
    scale: float


#: The positions of the arguments that each run of a prepared call must read again.
ACTIVATIONS: dict[Operation, tuple[int, ...]] = {
    "mxfp4_quantize": (0,),
    "mxfp4_dequantize": (0, 1),
    "mxfp8_quantize": (0,),
    "route": (0,),
    "fused_moe": (0, 1, 2),
    "prefill_attention": (0, 1, 2),
    "decode_attention": (0,),
    "prefill_attention_fp8": (0, 1, 2),
    "decode_attention_fp8": (0,),
    "lm_head": (0,),
    "mxfp4_linear": (0,),
}


def prepared(
    provider: Any, operation: Operation, *arguments: Any, **keywords: Any
) -> Callable[[], Any]:
    """Return a callable that runs an operation on these arguments.

    The callable is the result of the provider's ``prepare``. If the provider has no ``prepare``, or
    if ``prepare`` returns None, the callable calls the operation itself.

    Args:
        provider: A kernel provider.
        operation: An operation that it has.
        *arguments: The operation's tensors.
        **keywords: The operation's other arguments.
    """
    prepare = getattr(provider, "prepare", None)
    if prepare is not None:
        call = prepare(operation, *arguments, **keywords)
        if call is not None:
            return cast("Callable[[], Any]", call)
    return functools.partial(getattr(provider, operation), *arguments, **keywords)


@dataclass(frozen=True)
class Declaration:
    """A provider's description of itself, in attributes of the same names.

    The values here are the defaults. Tests check the properties that a provider declares, and
    assume nothing about the others.
    """

    name: str = "unnamed"
    device: str = "cpu"
    #: Operations whose results are bitwise reproducible.
    deterministic: frozenset[str] = frozenset()
    #: A value of `sm121.oracles.mxfp4.ScaleRule`; None: any rule, but the same one for all blocks.
    mxfp4_scale_rule: str | None = None
    #: A value of `sm121.oracles.mxfp8.ScaleRule`; None: any rule, but the same one for all blocks.
    mxfp8_scale_rule: str | None = None
    #: The page sizes that `decode_attention` accepts, in tokens.
    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    #: Operations whose prepared call can be captured in a CUDA graph and replayed.
    graphs: frozenset[str] = frozenset()
    #: Whether `fused_moe` rounds each expert's output to bfloat16 before the weighted sum.
    rounds_each_expert: bool = False
    #: The activations that `fused_moe` multiplies: "bfloat16"; "mxfp8": x and the hidden
    #: activations quantised by `mxfp8_scale_rule`, with the roundings of
    #: `sm121.oracles.moe.mxfp8_activations`; or "e4m3": the same with scales of one (identity),
    #: saturated.
    activations: str = "bfloat16"
    #: The activations that `mxfp4_linear` multiplies: "bfloat16", or "mxfp4": x quantised by
    #: `mxfp4_scale_rule`.
    linear_activations: str = "bfloat16"
    #: How an FP8 cache is rounded: to E4M3's "nearest" value, or towards zero ("cut").
    kv_fp8: str = "nearest"
    #: Operations for which the engine has no kernel, with the reasons. They are not tested.
    absent: dict[str, str] = dataclasses.field(default_factory=dict)


def declaration(provider: Any) -> Declaration:
    """Return the declaration of a provider.

    Args:
        provider: A kernel provider.

    Raises:
        TypeError: An attribute is of the wrong type.
    """
    attributes: dict[str, Any] = {"name": type(provider).__name__}
    for name, default in dataclasses.asdict(Declaration()).items():
        if not hasattr(provider, name):
            continue
        value = getattr(provider, name)
        if default is not None:
            value = type(default)(value)
        attributes[name] = value
    return Declaration(**attributes)
