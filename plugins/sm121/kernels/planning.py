"""Base of the providers on a GPU: weights are put in order and a step is planned once. And pages,
for kernels that read nothing but a paged cache."""

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from sm121.kernels import protocol
from sm121.kernels.protocol import Operation, Packed

Call = Callable[[], Tensor]


class PlanningProvider(ABC):
    """Experts and attention as prepared calls; a subclass plans each for given tensors. A plan is
    None where there are no tokens: the engine launches nothing then."""

    device = "cuda"
    block_sizes = (16, 32, 64, 128)

    @abstractmethod
    def plan_experts(self, inputs: protocol.FusedMoe) -> Call | None:
        """A call that computes y [T, H]."""

    @abstractmethod
    def plan_prefill(self, inputs: protocol.PrefillAttention, *, fp8: bool = False) -> Call | None:
        """A call that computes o [T, Hq, D]. `fp8`: of a cache in E4M3."""

    @abstractmethod
    def plan_decode(self, inputs: protocol.DecodeAttention, *, fp8: bool = False) -> Call | None:
        """A call that computes o [B, Hq, D]. `fp8`: of a cache in E4M3."""

    @abstractmethod
    def plan_linear(self, x: Tensor, weight: Packed) -> Call:
        """A call that computes y [M, N]."""

    def prepare(self, operation: Operation, *arguments: Any, **keywords: Any) -> Call | None:
        plan: Call | None
        fp8 = operation.endswith("_fp8")
        if operation == "fused_moe":
            plan = self.plan_experts(protocol.FusedMoe(*arguments, **keywords))
        elif operation.startswith("prefill_attention"):
            plan = self.plan_prefill(protocol.PrefillAttention(*arguments, **keywords), fp8=fp8)
        elif operation.startswith("decode_attention"):
            plan = self.plan_decode(protocol.DecodeAttention(*arguments, **keywords), fp8=fp8)
        elif operation == "mxfp4_linear":
            plan = self.plan_linear(*arguments)
        else:
            return None
        return plan or (lambda: new_like(arguments[0]))

    def _run(self, operation: Operation, *arguments: Any, **keywords: Any) -> Tensor:
        return protocol.prepared(self, operation, *arguments, **keywords)()

    fused_moe = functools.partialmethod(_run, "fused_moe")
    prefill_attention = functools.partialmethod(_run, "prefill_attention")
    decode_attention = functools.partialmethod(_run, "decode_attention")
    prefill_attention_fp8 = functools.partialmethod(_run, "prefill_attention_fp8")
    decode_attention_fp8 = functools.partialmethod(_run, "decode_attention_fp8")
    mxfp4_linear = functools.partialmethod(_run, "mxfp4_linear")

    def lm_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """[T, V] by cuBLAS, as vLLM's unquantised linear layers compute it."""
        return functional.linear(x, weight)


def new_like(activations: Tensor) -> Tensor:
    """Memory for an output of the shape of these activations, without their strides."""
    return torch.empty_like(activations, memory_format=torch.contiguous_format)


def in_fp8(kv_cache: Tensor, write: Callable[..., None]) -> Tensor:
    """The cache [blocks, 2, Hkv, block, D] in E4M3. `write` has tokens of k and v [T, Hkv, D],
    pages of both [blocks, block, Hkv, D] and the places of the tokens in them."""
    cache = torch.zeros_like(kv_cache, dtype=torch.float8_e4m3fn)
    k, v, *pages = (of[:, i].transpose(1, 2) for of in (kv_cache, cache) for i in (0, 1))
    k, v = (part.flatten(0, 1) for part in (k, v))
    write(k, v, *pages, torch.arange(len(k), device=k.device))
    return cache


def side_by_side(keys: Tensor, values: Tensor) -> bool:
    """Whether each head's value lies behind its key, as vLLM 0.32 packs a cache.

    Args:
        keys: [..., D], in elements at strides of 2 D where that is so.
        values: As `keys`.
    """
    apart: int = 2 * keys.shape[-1]
    return all(part.stride(-2) == apart for part in (keys, values))


def padded(weights: tuple[Tensor, Tensor], rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Packed elements and scales [E, rows, K] with more rows and columns (elements) of zeros."""
    packed, scales = (
        functional.pad(part, (0, columns // per, 0, rows)).contiguous()
        for part, per in zip(weights, (2, 32), strict=True)
    )
    return packed, scales


@dataclass(frozen=True)
class Paging:
    """Where the tokens of sequences with these edges lie in pages of `page` tokens."""

    edges: list[int]
    page: int

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in itertools.pairwise(self.edges)]

    @property
    def counts(self) -> list[int]:
        """Pages of each sequence."""
        return [-(-length // self.page) for length in self.lengths]

    @property
    def last(self) -> list[int]:
        """Tokens in the last page of each sequence."""
        return [
            length - max(count - 1, 0) * self.page
            for length, count in zip(self.lengths, self.counts, strict=True)
        ]

    @property
    def pages(self) -> int:
        return sum(self.counts)

    def slots(self) -> Tensor:
        """[T] int64: the place of each token in the cache, counted in tokens."""
        tables = zip(self.table(), self.lengths, strict=True)
        offsets = torch.arange(self.page)
        parts = [(pages[:, None] * self.page + offsets).flatten()[:size] for pages, size in tables]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts])

    def table(self) -> Tensor:
        """[n, most pages] int32; what a sequence does not have is page 0."""
        table = torch.zeros(len(self.counts), max(self.counts, default=1) or 1, dtype=torch.int32)
        firsts = itertools.accumulate(self.counts, initial=0)
        for row, first, count in zip(table, firsts, self.counts, strict=False):
            row[:count] = torch.arange(first, first + count)
        return table
