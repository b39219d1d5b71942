"""Attention in plain PyTorch: a part of the provider `torch`.

Keys are processed tile by tile, with a running softmax. The softmax weights ("shares") are rounded
to the dtype of the queries before they are multiplied by the values, as in FlashAttention.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from sm121.kernels.protocol import DecodeAttention, PrefillAttention
from sm121.kernels.torch_codecs import TorchCodecs


class TorchAttention:
    """Prefill and decode attention with sinks and a window, on any device.

    Args:
        codecs: The steps of the provider's codecs.
    """

    #: The number of keys in one step of the running softmax.
    tile = 128

    def __init__(self, codecs: TorchCodecs) -> None:
        self.codecs = codecs

    def prefill_attention(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute causal attention over whole sequences.

        Args:
            *arguments: The fields of `PrefillAttention`, in their order.
            **keywords: The other fields.

        Returns:
            o [T, Hq, D].
        """
        inputs = PrefillAttention(*arguments, **keywords)
        q = inputs.q
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for start, end in itertools.pairwise(inputs.cu_seqlens.tolist()):
            out[start:end] = self.attend(
                q[start:end],
                inputs.k[start:end],
                inputs.v[start:end],
                torch.arange(end - start, device=q.device),
                inputs.sinks,
                inputs.window,
                inputs.scale,
            )
        return out

    def decode_attention(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute attention of one token per sequence over a paged cache.

        Args:
            *arguments: The fields of `DecodeAttention`, in their order.
            **keywords: The other fields.

        Returns:
            o [B, Hq, D].
        """
        inputs = DecodeAttention(*arguments, **keywords)
        q = inputs.q
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for b, length in enumerate(inputs.seq_lens.tolist()):
            k, v = self.read_pages(inputs.kv_cache, inputs.block_table[b], length)
            last = torch.tensor([length - 1], device=q.device)
            rows = self.attend(q[b : b + 1], k, v, last, inputs.sinks, inputs.window, inputs.scale)
            out[b] = rows[0]
        return out

    def cached(self, values: Tensor) -> Tensor:
        """Return keys or values as they are read back from an FP8 cache.

        Args:
            values: Keys or values of any shape and dtype. They are rounded to E4M3 with a scale of
                one, and saturated.

        Returns:
            The same shape and dtype.
        """
        return self.codecs.e4m3(values.float()).to(values.dtype)

    def read_pages(self, kv_cache: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one sequence.

        Args:
            kv_cache: [blocks, 2, Hkv, block, D].
            pages: The numbers of the sequence's pages, in their order.
            length: The number of tokens of the sequence.

        Returns:
            Keys and values, [length, Hkv, D] each.
        """
        at = torch.arange(length, device=kv_cache.device)
        block = kv_cache.shape[3]
        page = pages.long()[at // block]
        offset = at % block
        return kv_cache[page, 0, :, offset], kv_cache[page, 1, :, offset]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        sinks: Tensor | None,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """Compute attention of one sequence, by a running softmax over tiles of keys.

        Args:
            q: Queries [n, Hq, D].
            k: Keys [length, Hkv, D].
            v: Values [length, Hkv, D].
            positions: [n], the position of each query in the sequence.
            sinks: [Hq] in natural-log units, or None.
            window: The number of tokens that a query attends to, itself included; None for all.
            scale: The factor by which the scores are multiplied.

        Returns:
            o [n, Hq, D].
        """
        heads = self.kv_heads(q.shape[1], k.shape[1], q.device)
        query = q.float().transpose(0, 1)
        highest, total = self.start(query, sinks)
        o = torch.zeros_like(query)
        for first in range(0, len(k), self.tile):
            end = min(first + self.tile, len(k))
            key = k[first:end][:, heads].float().transpose(0, 1)
            value = v[first:end][:, heads].float().transpose(0, 1)
            at = torch.arange(first, end, device=q.device)
            scores = (query @ key.transpose(1, 2)) * self.score_scale(scale)
            scores = scores.masked_fill(~self.visible(positions, at, window), -math.inf)
            maximum = torch.maximum(highest, scores.amax(-1, keepdim=True))
            # A tile may have no visible key: exp(-inf - -inf) would be NaN.
            safe = torch.where(maximum.isinf(), 0.0, maximum)
            shares = (scores - safe).exp()
            decay = (highest - safe).exp()
            total = total * decay + shares.sum(-1, keepdim=True) + self.tile_sink(sinks, safe)
            o = o * decay + shares.to(q.dtype).float() @ value
            highest = maximum
        return (o / total).transpose(0, 1).to(q.dtype)

    def start(self, query: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the initial maximum and the initial sum of the running softmax.

        Args:
            query: [Hq, n, D].
            sinks: [Hq], or None.

        Returns:
            The maximum and the sum, [Hq, n, 1] each.
        """
        shape = (query.shape[0], query.shape[1], 1)
        if sinks is None:
            return query.new_full(shape, -math.inf), query.new_zeros(shape)
        return sinks.float()[:, None, None].expand(shape).clone(), query.new_ones(shape)

    def tile_sink(self, sinks: Tensor | None, highest: Tensor) -> Tensor | float:  # noqa: ARG002
        """Return what the sinks add to a tile's sum: zero, because `start` includes the sinks.

        Args:
            sinks: [Hq], or None.
            highest: [Hq, n, 1], the maximum up to this tile.
        """
        return 0.0

    def score_scale(self, scale: float) -> float:
        """Return the factor by which the scores are multiplied before the softmax.

        Args:
            scale: The operation's argument of this name, which is returned unchanged.
        """
        return scale

    def visible(self, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
        """Return which keys each query attends to.

        Args:
            queries: [n], positions.
            keys: [m], positions.
            window: The number of tokens that a query attends to, itself included; None for all.

        Returns:
            [n, m] bool.
        """
        distance = queries[:, None] - keys[None, :]
        mask = distance >= 0
        if window is None:
            return mask
        return mask & (distance < window)

    def kv_heads(self, query_heads: int, kv_heads: int, device: torch.device) -> Tensor:
        """Return the key/value head of each query head.

        Args:
            query_heads: The number of query heads.
            kv_heads: The number of key/value heads.
            device: The device of the result.

        Returns:
            [query_heads], integers.
        """
        return torch.arange(query_heads, device=device) // (query_heads // kv_heads)
