"""What a kernel provider is: an object with any subset of these operations.

All tensors are torch tensors on the provider's device; T tokens, H hidden, I intermediate, E
experts, k experts a token, Hq query heads, Hkv key/value heads, D head size, B sequences.
Activations (x, q, k, v, y, o) are bfloat16. An operation returns new tensors, reads its arguments
and leaves them as they are. What a provider can say of itself beyond that is in `Declaration`; each
of these is an attribute that may be missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

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
    "lm_head",
]

Packed: TypeAlias = "tuple[Tensor, Tensor]"
"""MXFP4 weights: packed [E, rows, K/2] u8, even element in the low nibble; scales [E, rows, K/32]
u8 E8M0."""


class Mxfp4Quantizer(Protocol):
    """Values to MXFP4."""

    def mxfp4_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, K] -> packed [M, K/2] u8, scales [M, K/32] u8 E8M0."""
        ...


class Mxfp4Dequantizer(Protocol):
    """MXFP4 to values."""

    def mxfp4_dequantize(self, packed: Tensor, scales: Tensor) -> Tensor:
        """packed [M, K/2] u8, scales [M, K/32] u8 -> [M, K] float32."""
        ...


class Mxfp8Quantizer(Protocol):
    """Values to MXFP8."""

    def mxfp8_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, K] -> q [M, K] float8_e4m3fn, scales [M, K/32] u8 E8M0."""
        ...


class Router(Protocol):
    """The choice of experts."""

    def route(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> shares [T, k] of a softmax over the k largest, experts [T, k] of an
        integer type; in any order within a token."""
        ...


class FusedMoe(Protocol):
    """The mixture of experts with the clamped SwiGLU."""

    def fused_moe(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        w1: Packed,
        w1_bias: Tensor | None,
        w2: Packed,
        w2_bias: Tensor | None,
        *,
        alpha: float,
        limit: float,
    ) -> Tensor:
        """x [T, H], weights [T, k] float32, ids [T, k] int32, w1 [E, 2I, H] with rows interleaved
        gate, up as in the checkpoint, w2 [E, H, I], biases [E, 2I] and [E, H] bfloat16 -> y [T,
        H]."""
        ...


class PrefillAttention(Protocol):
    """Attention of whole sequences."""

    def prefill_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        *,
        sinks: Tensor | None,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """q [T, Hq, D]; k, v [T, Hkv, D]; cu_seqlens [n + 1] int32; causal; the window counts the
        token itself; sinks [Hq] float32 in natural-log units -> o [T, Hq, D]."""
        ...


class DecodeAttention(Protocol):
    """Attention of one new token a sequence over a paged cache."""

    def decode_attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        sinks: Tensor | None,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """q [B, Hq, D]; kv_cache [blocks, 2, Hkv, block, D]; block_table [B, pages] int32; seq_lens
        [B] int32, the new token included -> o [B, Hq, D]."""
        ...


class LmHead(Protocol):
    """The projection to the vocabulary."""

    def lm_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, H], weight [V, H], both bfloat16 -> [T, V] bfloat16."""
        ...


class Preparing(Protocol):
    """What an engine does once, when it loads weights or plans a step, and not in each call."""

    def prepare(
        self, operation: Operation, *arguments: Any, **keywords: Any
    ) -> Callable[[], Any] | None:
        """A call that runs the operation on these tensors, or None: there is nothing to prepare.

        Weights, cache, block table and lengths stay as they are between calls; the activations
        (x, weights and ids of the experts, q, k, v of attention, logits) are read anew each time.
        """
        ...


ACTIVATIONS: dict[Operation, tuple[int, ...]] = {
    "mxfp4_quantize": (0,),
    "mxfp4_dequantize": (0, 1),
    "mxfp8_quantize": (0,),
    "route": (0,),
    "fused_moe": (0, 1, 2),
    "prefill_attention": (0, 1, 2),
    "decode_attention": (0,),
    "lm_head": (0,),
}
"""Which arguments a prepared call reads anew."""


def prepared(
    provider: Any, operation: Operation, *arguments: Any, **keywords: Any
) -> Callable[[], Any]:
    """The provider's prepared call, or the plain operation on these arguments."""
    prepare = getattr(provider, "prepare", None)
    if prepare is not None:
        call: Callable[[], Any] | None = prepare(operation, *arguments, **keywords)
        if call is not None:
            return call
    return functools.partial(getattr(provider, operation), *arguments, **keywords)


@dataclass(frozen=True)
class Declaration:
    """What a provider says of itself, as attributes of the same names; these are the defaults.

    A statement is a promise: what is declared is tested, what is not is left open.
    """

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


def declaration(provider: Any) -> Declaration:
    """What a provider declares. Raises TypeError where an attribute is of the wrong kind."""
    default = Declaration()
    name = getattr(provider, "name", type(provider).__name__)
    return Declaration(
        name=str(name),
        device=str(getattr(provider, "device", default.device)),
        deterministic=frozenset(getattr(provider, "deterministic", default.deterministic)),
        mxfp4_scale_rule=getattr(provider, "mxfp4_scale_rule", default.mxfp4_scale_rule),
        mxfp8_scale_rule=getattr(provider, "mxfp8_scale_rule", default.mxfp8_scale_rule),
        block_sizes=tuple(getattr(provider, "block_sizes", default.block_sizes)),
        graphs=frozenset(getattr(provider, "graphs", default.graphs)),
        rounds_each_expert=bool(getattr(provider, "rounds_each_expert", False)),
    )
