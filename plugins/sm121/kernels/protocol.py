"""What a kernel provider is: an object with any subset of these operations, each a method.

| operation | gives |
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

Tensors are given by position, on the provider's device; alpha, limit, sinks, window and scale by
keyword. T tokens, H hidden, I intermediate, E experts, k experts a token, Hq query heads, Hkv
key/value heads, D head size, B sequences, V vocabulary. Activations (x, q, k, v, y, o) are
bfloat16; what serves in float32 may give that, and is held to it. In packed bytes the even element
is in the low nibble. Experts may be in any order within a token, and of any integer type. An
operation returns new tensors and leaves its arguments as they are. With `_fp8` the provider keeps
keys and values in E4M3 under scales of one, saturated, as its engine writes them. Keys and values
may be the halves of one tensor [..., 2 D], as in vLLM 0.32's cache: a provider that keeps a cache
keeps them so.

A provider may also have `prepare(operation, *arguments, **keywords)`, for what an engine does once,
when it loads weights or plans a step. It returns a call without arguments that runs the operation
on these tensors, or None. Weights, cache, block table and lengths stay as they are between calls;
`ACTIVATIONS` are read anew. What it can say of itself, as attributes, is in `Declaration`."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

if TYPE_CHECKING:
    from torch import Tensor

Operation = Literal[
    "mxfp4_quantize", "mxfp4_dequantize", "mxfp8_quantize", "route", "fused_moe",
    "prefill_attention", "decode_attention", "prefill_attention_fp8", "decode_attention_fp8",
    "lm_head", "mxfp4_linear",
]  # fmt: skip

Packed: TypeAlias = "tuple[Tensor, Tensor]"
"""MXFP4 weights: packed [E, rows, K/2] u8, scales [E, rows, K/32] u8 E8M0."""


class FusedMoe(NamedTuple):
    """The mixture of experts with the clamped SwiGLU."""

    x: "Tensor"
    """[T, H]"""
    weights: "Tensor"
    """[T, k] float32"""
    ids: "Tensor"
    """[T, k] int32"""
    w1: Packed
    """[E, 2I, H], rows interleaved gate, up as in the checkpoint."""
    w1_bias: "Tensor | None"
    """[E, 2I] bfloat16"""
    w2: Packed
    """[E, H, I]"""
    w2_bias: "Tensor | None"
    """[E, H] bfloat16"""
    alpha: float
    limit: float


class PrefillAttention(NamedTuple):
    """Causal attention of whole sequences, one after the other."""

    q: "Tensor"
    """[T, Hq, D]"""
    k: "Tensor"
    """[T, Hkv, D]"""
    v: "Tensor"
    """[T, Hkv, D]"""
    cu_seqlens: "Tensor"
    """[sequences + 1] int32: where each begins, and the end of the last."""
    sinks: "Tensor | None"
    """[Hq] float32, in natural-log units."""
    window: int | None
    """Tokens that each sees, itself included."""
    scale: float


class DecodeAttention(NamedTuple):
    """Attention of one new token a sequence over a paged cache."""

    q: "Tensor"
    """[B, Hq, D]"""
    kv_cache: "Tensor"
    """[blocks, 2, Hkv, block, D]"""
    block_table: "Tensor"
    """[B, pages] int32"""
    seq_lens: "Tensor"
    """[B] int32, the new token included."""
    sinks: "Tensor | None"
    window: int | None
    scale: float


ACTIVATIONS: dict[Operation, tuple[int, ...]] = {
    "mxfp4_quantize": (0,), "mxfp4_dequantize": (0, 1), "mxfp8_quantize": (0,), "route": (0,),
    "fused_moe": (0, 1, 2), "prefill_attention": (0, 1, 2), "decode_attention": (0,),
    "prefill_attention_fp8": (0, 1, 2), "decode_attention_fp8": (0,), "lm_head": (0,),
    "mxfp4_linear": (0,),
}  # fmt: skip
"""Which arguments a prepared call reads anew."""


def prepared(
    provider: Any, operation: Operation, *arguments: Any, **keywords: Any
) -> Callable[[], Any]:
    """The provider's prepared call, or the plain operation on these arguments."""
    prepare = getattr(provider, "prepare", None)
    call = None if prepare is None else prepare(operation, *arguments, **keywords)
    if call is None:
        call = functools.partial(getattr(provider, operation), *arguments, **keywords)
    return cast("Callable[[], Any]", call)


@dataclass(frozen=True)
class Declaration:
    """What a provider says of itself, as attributes of the same names; these are the defaults. A
    statement is a promise: what is declared is tested, what is not is left open."""

    name: str = "unnamed"
    device: str = "cpu"
    deterministic: frozenset[str] = frozenset()
    """Operations whose results are the same bit for bit each time."""
    mxfp4_scale_rule: str | None = None
    """One of the values of `sm121.oracles.mxfp4.ScaleRule`; None: any of them, one throughout."""
    mxfp8_scale_rule: str | None = None
    """One of the values of `sm121.oracles.mxfp8.ScaleRule`; None: any of them, one throughout."""
    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    """Tokens a page that `decode_attention` takes."""
    graphs: frozenset[str] = frozenset()
    """Operations whose prepared call can be captured in a CUDA graph and replayed."""
    rounds_each_expert: bool = False
    """Whether `fused_moe` rounds what each expert gives to bfloat16 before the weighted sum."""
    activations: str = "bfloat16"
    """What `fused_moe` multiplies: "bfloat16"; "mxfp8": x and the hidden activations quantised by
    `mxfp8_scale_rule`, with the roundings of `sm121.oracles.moe.mxfp8_activations`; or "e4m3": the
    same with scales of one (identity), saturated."""
    linear_activations: str = "bfloat16"
    """What `mxfp4_linear` multiplies: "bfloat16", or "mxfp4": x quantised by `mxfp4_scale_rule`."""
    kv_fp8: str = "nearest"
    """How an FP8 cache is written: E4M3's "nearest" value, or the one towards zero ("cut")."""
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    """Operations that the engine has nowhere by itself, each with the reason: nothing to judge."""


def declaration(provider: Any) -> Declaration:
    """What a provider declares. Raises TypeError where an attribute is of the wrong kind."""
    attributes: dict[str, Any] = {"name": type(provider).__name__}
    for name, default in dataclasses.asdict(Declaration()).items():
        if hasattr(provider, name):
            value = getattr(provider, name)
            attributes[name] = value if default is None else type(default)(value)
    return Declaration(**attributes)
