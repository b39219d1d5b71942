"""Causal grouped-query attention with sinks and a sliding window, contiguous and paged.

Source: the gpt-oss reference implementation (openai/gpt-oss, gpt_oss/torch/model.py, `sdpa`). A
sink is an additional logit for each head, in natural-log units and without the scale. It takes part
in the softmax, but has no value that contributes to the output.

Shapes: Hq query heads, Hkv key/value heads, D head size. Query head h reads KV head
h div (Hq / Hkv).
"""

import itertools

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, sinks: Tensor | None, scale: float
) -> Tensor:
    """Compute softmax attention in the dtype of q.

    Args:
        q: [T, Hq, D].
        k: [S, Hkv, D].
        v: [S, Hkv, D].
        visible: [T, S] bool; every query must see at least one key.
        sinks: [Hq]. For -inf, the head has no sink. If None, no head has a sink.
        scale: The factor by which the scores are multiplied.

    Returns:
        [T, Hq, D].
    """
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
    """Return which keys a query at each position sees.

    Args:
        positions: [T], the positions of the queries.
        keys: The number of keys, which begin at position 0.
        window: The sliding window, which includes the query itself; None for no window.

    Returns:
        [T, keys] bool.
    """
    distance = positions[:, None] - torch.arange(keys, device=positions.device)[None, :]
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    return visible


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
    """Compute causal attention over several concatenated sequences.

    Args:
        q: [T, Hq, D].
        k: [T, Hkv, D].
        v: [T, Hkv, D].
        cu_seqlens: [n + 1], the first token of each of n sequences, and T.
        sinks: [Hq]; None if no head has a sink.
        window: The sliding window; None for no window.
        scale: The factor by which the scores are multiplied.

    Returns:
        [T, Hq, D] float64. Each token sees its own sequence up to itself.
    """
    q = q.cpu().double()
    k = k.cpu().double()
    v = v.cpu().double()
    if sinks is not None:
        sinks = sinks.cpu().double()
    out = torch.zeros_like(q)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        if start == end:
            continue
        span = slice(start, end)
        length = end - start
        visible = visible_keys(torch.arange(length), length, window)
        out[span] = attend(q[span], k[span], v[span], visible, sinks=sinks, scale=scale)
    return out


def gather_pages(kv_cache: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of one sequence from a paged cache.

    Args:
        kv_cache: [blocks, 2, Hkv, block, D].
        pages: The sequence's row of the block table.
        length: The number of tokens.

    Returns:
        Keys and values, both [length, Hkv, D].
    """
    block = kv_cache.shape[3]
    count = -(-length // block)  # rounded up
    blocks = kv_cache[pages[:count].long()]
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
    """Compute the attention of one query for each sequence, at its last position.

    Args:
        q: [B, Hq, D].
        kv_cache: [blocks, 2, Hkv, block, D].
        block_table: [B, pages].
        seq_lens: [B], including the query's own token.
        sinks: [Hq]; None if no head has a sink.
        window: The sliding window; None for no window.
        scale: The factor by which the scores are multiplied.

    Returns:
        [B, Hq, D] float64.
    """
    if sinks is not None:
        sinks = sinks.cpu().double()
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b, length in enumerate(seq_lens.tolist()):
        k, v = gather_pages(kv_cache.cpu(), block_table[b].cpu(), length)
        visible = visible_keys(torch.tensor([length - 1]), length, window)
        query = q[b : b + 1].cpu().double()
        out[b] = attend(query, k.double(), v.double(), visible, sinks=sinks, scale=scale)[0]
    return out
