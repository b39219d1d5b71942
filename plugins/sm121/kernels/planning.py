"""Paged caches, and the base class of the GPU providers, which prepare a step before its calls."""

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
#: The number of MXFP4 elements in a byte.
_ELEMENTS_A_BYTE = 2
#: The number of MXFP4 elements that share a scale.
_ELEMENTS_A_SCALE = 32


class PlanningProvider(ABC):
    """The base class of providers whose operations are calls prepared for given tensors.

    A subclass prepares the calls in its `plan_` methods. If there are no tokens, the method returns
    None, because the engine then launches nothing.
    """

    device = "cuda"
    block_sizes = (16, 32, 64, 128)

    @abstractmethod
    def plan_experts(self, inputs: protocol.FusedMoe) -> Call | None:
        """Return a call that computes y [T, H].

        Args:
            inputs: The operation's arguments.
        """

    @abstractmethod
    def plan_prefill(self, inputs: protocol.PrefillAttention, *, fp8: bool = False) -> Call | None:
        """Return a call that computes o [T, Hq, D].

        Args:
            inputs: The operation's arguments.
            fp8: Whether the cache is in E4M3.
        """

    @abstractmethod
    def plan_decode(self, inputs: protocol.DecodeAttention, *, fp8: bool = False) -> Call | None:
        """Return a call that computes o [B, Hq, D].

        Args:
            inputs: The operation's arguments.
            fp8: Whether the cache is in E4M3.
        """

    @abstractmethod
    def plan_linear(self, x: Tensor, weight: Packed) -> Call:
        """Return a call that computes y [M, N].

        Args:
            x: [M, K].
            weight: packed [N, K/2] and scales [N, K/32].
        """

    def prepare(self, operation: Operation, *arguments: Any, **keywords: Any) -> Call | None:
        """Return a call that runs an operation; see `sm121.kernels.protocol`.

        Args:
            operation: The operation.
            *arguments: Its tensors.
            **keywords: Its other arguments.

        Returns:
            The call, or None for an operation that is not planned.
        """
        plan: Call | None
        fp8 = operation in ("prefill_attention_fp8", "decode_attention_fp8")
        if operation == "fused_moe":
            plan = self.plan_experts(protocol.FusedMoe(*arguments, **keywords))
        elif operation in ("prefill_attention", "prefill_attention_fp8"):
            plan = self.plan_prefill(protocol.PrefillAttention(*arguments, **keywords), fp8=fp8)
        elif operation in ("decode_attention", "decode_attention_fp8"):
            plan = self.plan_decode(protocol.DecodeAttention(*arguments, **keywords), fp8=fp8)
        elif operation == "mxfp4_linear":
            plan = self.plan_linear(*arguments)
        else:
            return None
        if plan is None:
            return functools.partial(new_like, arguments[0])
        return plan

    def _run(self, operation: Operation, *arguments: Any, **keywords: Any) -> Tensor:
        return protocol.prepared(self, operation, *arguments, **keywords)()

    fused_moe = functools.partialmethod(_run, "fused_moe")
    prefill_attention = functools.partialmethod(_run, "prefill_attention")
    decode_attention = functools.partialmethod(_run, "decode_attention")
    prefill_attention_fp8 = functools.partialmethod(_run, "prefill_attention_fp8")
    decode_attention_fp8 = functools.partialmethod(_run, "decode_attention_fp8")
    mxfp4_linear = functools.partialmethod(_run, "mxfp4_linear")

    def lm_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the logits [T, V] with cuBLAS, as vLLM's unquantised linear layers do.

        Args:
            x: [T, H].
            weight: [V, H].
        """
        return functional.linear(x, weight)


def new_like(activations: Tensor) -> Tensor:
    """Return an uninitialised, contiguous tensor for an output.

    Args:
        activations: A tensor with the shape, dtype and device of the output.
    """
    return torch.empty_like(activations, memory_format=torch.contiguous_format)


def in_fp8(kv_cache: Tensor, write: Callable[..., None]) -> Tensor:
    """Return a cache in E4M3.

    Args:
        kv_cache: [blocks, 2, Hkv, block, D].
        write: Writes tokens. Its arguments are k and v [T, Hkv, D], the pages of keys and of values
            [blocks, block, Hkv, D], and the slots of the tokens.
    """
    cache = torch.zeros_like(kv_cache, dtype=torch.float8_e4m3fn)
    k = kv_cache[:, 0].transpose(1, 2).flatten(0, 1)
    v = kv_cache[:, 1].transpose(1, 2).flatten(0, 1)
    key_pages = cache[:, 0].transpose(1, 2)
    value_pages = cache[:, 1].transpose(1, 2)
    write(k, v, key_pages, value_pages, torch.arange(len(k), device=k.device))
    return cache


def side_by_side(keys: Tensor, values: Tensor) -> bool:
    """Return whether each head's value is stored directly after its key, as in vLLM 0.32's cache.

    Args:
        keys: [..., D]. In this layout, neighbouring heads are 2 D elements apart.
        values: As `keys`.
    """
    apart: int = 2 * keys.shape[-1]
    return bool(keys.stride(-2) == apart and values.stride(-2) == apart)


def with_dense_heads(tokens: Tensor) -> Tensor:
    """Return tokens whose heads are contiguous, as vLLM's cache-writing kernels require.

    These kernels take the stride of a token, but assume the other strides.

    Args:
        tokens: [T, Hkv, D].

    Returns:
        The same tensor, or a copy if the heads have gaps between them.
    """
    size = tokens.shape[2]
    if tokens.stride(1) == size and tokens.stride(2) == 1:
        return tokens
    return tokens.contiguous()


def padded(weights: tuple[Tensor, Tensor], rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Pad packed elements and scales [E, rows, K] with zeros.

    Args:
        weights: The packed elements and the scales.
        rows: The number of rows to add.
        columns: The number of columns to add, in elements.
    """
    packed, scales = weights
    wide = functional.pad(packed, (0, columns // _ELEMENTS_A_BYTE, 0, rows))
    wide_scales = functional.pad(scales, (0, columns // _ELEMENTS_A_SCALE, 0, rows))
    return wide.contiguous(), wide_scales.contiguous()


@dataclass(frozen=True)
class Paging:
    """The pages of concatenated sequences.

    Attributes:
        edges: The first token of each sequence, and the end of the last one.
        page: The page size in tokens.
    """

    edges: list[int]
    page: int

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence."""
        return [end - start for start, end in itertools.pairwise(self.edges)]

    @property
    def counts(self) -> list[int]:
        """The number of pages of each sequence."""
        return [-(-length // self.page) for length in self.lengths]

    @property
    def last(self) -> list[int]:
        """The number of tokens in the last page of each sequence."""
        tokens = []
        for length, count in zip(self.lengths, self.counts, strict=True):
            full_pages = max(count - 1, 0)
            tokens.append(length - full_pages * self.page)
        return tokens

    @property
    def pages(self) -> int:
        """The number of pages of all sequences."""
        return sum(self.counts)

    def slots(self) -> Tensor:
        """Return the slot of each token in the cache, page * page size + offset: [T] int64."""
        offsets = torch.arange(self.page)
        parts = [torch.empty(0, dtype=torch.int64)]
        for pages, length in zip(self.table(), self.lengths, strict=True):
            places = pages[:, None] * self.page + offsets
            parts.append(places.flatten()[:length])
        return torch.cat(parts)

    def table(self) -> Tensor:
        """Return the block table [n, largest number of pages] int32, padded with page 0."""
        table = torch.zeros(len(self.counts), max(self.counts, default=1) or 1, dtype=torch.int32)
        first = 0
        for row, count in zip(table, self.counts, strict=True):
            row[:count] = torch.arange(first, first + count)
            first += count
        return table
