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

Tensors are given by position, on the provider's device; alpha, limit, sinks, window and scale are
given by keyword. The letters: T tokens, H hidden, I intermediate, E experts, k experts a token, Hq
query heads, Hkv key/value heads, D head size, B sequences, V vocabulary.

Activations (x, q, k, v, y, o) are bfloat16. A provider that serves in float32 may return float32,
and is then judged by the tolerances of float32. In packed bytes the even element is in the low
nibble. Experts may be in any order within a token, and of any integer type. An operation returns
new tensors and leaves its arguments as they are.

The operations with `_fp8` keep keys and values in E4M3 under scales of one, saturated, as the
engine writes them. Keys and values may be the halves of one tensor [..., 2 D], as in vLLM 0.32's
cache; a provider that keeps a cache then keeps them in this form, too.

A provider may also have `prepare(operation, *arguments, **keywords)`, for the work that an engine
does once, when it loads weights or plans a step. It returns a call without arguments that runs the
operation on these tensors, or None. Weights, cache, block table and lengths stay as they are
between calls; the call reads the `ACTIVATIONS` anew. `Declaration` has the attributes by which a
provider describes itself.
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

#: The plain operation of each one with an FP8 KV cache.
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
    #: [E, 2I, H], rows interleaved gate, up as in the checkpoint.
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
    """The arguments of causal attention of whole sequences, one after the other."""

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
    #: Tokens that a query attends to, itself included; None for all.
    window: int | None
    #: The factor of the scores.
    scale: float


class DecodeAttention(NamedTuple):
    """The arguments of attention of one new token a sequence over a paged cache."""

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
    #: Tokens that a query attends to, itself included; None for all.
    window: int | None
    #: The factor of the scores.
    scale: float


#: The positions of the arguments that a prepared call reads anew.
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
    """Return the provider's prepared call, or the plain operation on these arguments.

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
    """The description that a provider gives of itself, as attributes of the same names.

    The values here are the defaults. Tests check what a provider declares, and leave open what it
    does not declare.
    """

    name: str = "unnamed"
    device: str = "cpu"
    #: Operations whose results are the same bit for bit each time.
    deterministic: frozenset[str] = frozenset()
    #: A value of `sm121.oracles.mxfp4.ScaleRule`; None: any of them, but one throughout.
    mxfp4_scale_rule: str | None = None
    #: A value of `sm121.oracles.mxfp8.ScaleRule`; None: any of them, but one throughout.
    mxfp8_scale_rule: str | None = None
    #: Tokens a page that `decode_attention` takes.
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
    #: How an FP8 cache is written: E4M3's "nearest" value, or the one towards zero ("cut").
    kv_fp8: str = "nearest"
    #: Operations that the engine has nowhere by itself, each with the reason: nothing to judge.
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
