"""Causal grouped-query attention with sinks and a sliding window, contiguous and paged. Source: the
gpt-oss reference implementation (openai/gpt-oss, gpt_oss/torch/model.py, `sdpa`): a sink is one
more logit a head, in natural-log units and not scaled, that takes its share of the softmax and
gives nothing. Hq query heads, Hkv key/value heads, D head size; query head h reads KV head h div
(Hq / Hkv)."""

import itertools

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, sinks: Tensor | None, scale: float
) -> Tensor:
    """Softmax attention in the dtype of q: q [T, Hq, D], k and v [S, Hkv, D] -> [T, Hq, D]. visible
    [T, S] bool; every query sees at least one key. sinks [Hq]; -inf is no sink."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for head in range(k.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        scores = torch.einsum("tgd,sd->gts", q[:, heads], k[:, head]) * scale
        scores = scores.masked_fill(~visible, -torch.inf)
        total = scores.logsumexp(-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks[heads, None].to(total.dtype))
        shares = (scores - total[..., None]).exp()
        out[:, heads] = torch.einsum("gts,sd->tgd", shares, v[:, head])
    return out


def visible_keys(positions: Tensor, keys: int, window: int | None) -> Tensor:
    """[T, keys] bool: which keys a query at each position sees; the window counts the query
    itself."""
    distance = positions[:, None] - torch.arange(keys, device=positions.device)[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    sinks: Tensor | None,
    window: int | None,
    scale: float,
) -> Tensor:
    """Sequences one after the other: q [T, Hq, D], k and v [T, Hkv, D], cu_seqlens [n + 1] -> [T,
    Hq, D] float64. Each token sees its own sequence up to itself."""
    q, k, v = (part.cpu().double() for part in (q, k, v))
    sinks = None if sinks is None else sinks.cpu().double()
    out = torch.zeros_like(q)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        span, length = slice(start, end), end - start
        if length:
            visible = visible_keys(torch.arange(length), length, window)
            out[span] = attend(q[span], k[span], v[span], visible, sinks=sinks, scale=scale)
    return out


def gather_pages(kv_cache: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values [length, Hkv, D] of one sequence from a paged cache [blocks, 2, Hkv, block,
    D]; pages: its row of the block table."""
    blocks = kv_cache[pages[: -(-length // kv_cache.shape[3])].long()]
    # [pages, 2, Hkv, block, D] -> [2, positions, Hkv, D]
    keys, values = blocks.transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, :length]
    return keys, values


def decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    sinks: Tensor | None,
    window: int | None,
    scale: float,
) -> Tensor:
    """One query a sequence, at its last position: q [B, Hq, D], block_table [B, pages], seq_lens
    [B] (the query's own token included) -> [B, Hq, D] float64."""
    sinks = None if sinks is None else sinks.cpu().double()
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b, length in enumerate(seq_lens.tolist()):
        k, v = gather_pages(kv_cache.cpu(), block_table[b].cpu(), length)
        visible = visible_keys(torch.tensor([length - 1]), length, window)
        query = q[b : b + 1].cpu().double()
        out[b] = attend(query, k.double(), v.double(), visible, sinks=sinks, scale=scale)[0]
    return out
