"""Problems of prefill and decode attention."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sm121.kernels import cases
from sm121.kernels.problem import Problem, ToleranceJudge, normal, off_edges
from sm121.kernels.protocol import Declaration
from sm121.oracles import attention, rounding

#: The standard deviation of queries, keys and values.
_SPREAD = 1.25
#: Cache entries that no kernel may read are multiplied by this factor.
_UNREAD = 100
#: The number of pages of a cache that belong to no sequence.
_SPARE_PAGES = 2
#: How a cache rounds keys and values, for each value of the provider's `kv_fp8`; "bfloat16": no
#: rounding.
_CACHED: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": rounding.to_e4m3,
    "cut": rounding.to_e4m3_cut,
    "bfloat16": rounding.same,
}


def prefill(case: cases.PrefillCase) -> Problem:
    """Build a problem of causal attention over whole sequences.

    Args:
        case: The case.
    """
    generator = torch.Generator().manual_seed(case.seed)
    q, k, v = _qkv(case, sum(case.lengths), generator)
    edges = torch.tensor([0, *case.lengths]).cumsum(0).int()
    keywords = _keywords(case, generator)
    arguments = (q, k, v, edges)
    rows = _oracle_rows(case, attention.prefill, arguments, keywords)
    return Problem(
        operation=case.operation,
        arguments=arguments,
        judge=_judge(case, tuple(q.shape), rows),
        keywords=keywords,
        strided=case.strided or case.packed,
        reference=rows(""),
    )


def decode(case: cases.DecodeCase) -> Problem:
    """Build a problem of attention of one new token per sequence over a paged cache.

    Args:
        case: The case.
    """
    generator = torch.Generator().manual_seed(case.seed)
    q, _, _ = _qkv(case, len(case.lengths), generator)
    cache, table = _paged_cache(case, generator)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    keywords = _keywords(case, generator)
    arguments = (q, cache, table, lengths)
    rows = _oracle_rows(case, attention.decode, arguments, keywords)
    return Problem(
        operation=case.operation,
        arguments=arguments,
        judge=_judge(case, tuple(q.shape), rows),
        keywords=keywords,
        strided=case.strided or case.packed,
        block=case.block,
        reference=rows(""),
    )


def as_cached(
    case: cases.PrefillCase | cases.DecodeCase, arguments: tuple[Any, ...], written: str = ""
) -> list[Any]:
    """Return the arguments, with keys and values rounded as in a cache.

    Args:
        case: The case.
        arguments: The arguments of its problem.
        written: How the cache rounds, a key of `_CACHED`; empty for the default of the case.
    """
    if not written:
        written = "nearest" if case.kv == "fp8" else "bfloat16"
    to_cache = _CACHED[written]
    inputs = list(arguments)
    inputs[1] = to_cache(inputs[1])
    if isinstance(case, cases.PrefillCase):
        inputs[2] = to_cache(inputs[2])
    return inputs


def _judge(
    case: cases.PrefillCase | cases.DecodeCase,
    shape: tuple[int, ...],
    rows: Callable[[str], Tensor],
) -> ToleranceJudge:
    """Return the judge of a case.

    `rows` returns the oracle's output for a KV cache with the given rounding.
    """
    definitions: dict[str, Callable[[], Tensor]] = {}
    if case.kv == "fp8":
        for written in _CACHED:
            definitions[f"a cache of {written} values"] = functools.partial(rows, written)

    def expected(declared: Declaration) -> Tensor:
        return rows(declared.kv_fp8 if case.kv == "fp8" else "")

    return ToleranceJudge(
        operation=case.operation, shape=shape, reference=expected, definitions=definitions
    )


def _oracle_rows(
    case: cases.PrefillCase | cases.DecodeCase,
    oracle: Callable[..., Tensor],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Callable[[str], Tensor]:
    """Return a function that computes the oracle's output once per rounding of the KV cache."""

    @functools.cache
    def rows(written: str) -> Tensor:
        return oracle(*as_cached(case, arguments, written), **keywords).flatten(0, 1)

    return rows


def _keywords(
    case: cases.PrefillCase | cases.DecodeCase, generator: torch.Generator
) -> dict[str, Any]:
    return {
        "sinks": _sinks(case.sinks, case.query_heads, generator),
        "window": case.window,
        "scale": case.head_dim**-0.5,
    }


def _sinks(kind: cases.Sinks, heads: int, generator: torch.Generator) -> Tensor | None:
    # The sinks are close to the log-sum-exp of the scores of some tens of keys, so that a sink has
    # a measurable share of the softmax.
    values = (normal(generator, heads) * 1.5 + 3).bfloat16().float()
    if kind == "none":
        return None
    if kind == "usual":
        return values
    if kind == "mixed":
        extremes = torch.tensor([30.0, -30.0, 0.0, 90.0])
        return torch.where(torch.arange(heads) % 2 == 0, extremes.repeat(heads)[:heads], values)
    return torch.full((heads,), 30.0 if kind == "high" else -30.0)


def _qkv(
    case: cases.PrefillCase | cases.DecodeCase, tokens: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [T, Hq, D], k and v [T, Hkv, D]: slices of one tensor if the case is strided."""
    heads = case.query_heads + 2 * case.kv_heads
    fused = (normal(generator, tokens, heads, case.head_dim) * _SPREAD).bfloat16()
    if case.kv == "fp8":
        fused = off_edges(fused)
    fused[:, : case.query_heads] *= 2.0**-case.power
    fused[:, case.query_heads :] *= 2.0**case.power
    q, k, v = fused.split((case.query_heads, case.kv_heads, case.kv_heads), 1)
    if not case.strided:
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()
    if case.packed:
        k, v = torch.cat((k, v), -1).split(case.head_dim, -1)
    return q, k, v


def _paged_cache(case: cases.DecodeCase, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a cache [pages, 2, Hkv, block, D], its pages in random order, and its block table."""
    pages = [-(-length // case.block) for length in case.lengths]
    # Pages that belong to no sequence, and the unused ends of last pages, hold large values. A
    # kernel that reads them gives a wrong output.
    total = sum(pages) + _SPARE_PAGES
    cache = normal(generator, total, 2, case.kv_heads, case.block, case.head_dim) * _SPREAD
    cache = cache * 2.0**case.power
    order = torch.randperm(total, generator=generator)
    width = max(pages, default=1)
    columns = 2 * width if case.strided else width
    table = order[-1].expand(len(case.lengths), columns).clone().int()
    unread = torch.ones(total, case.block, dtype=torch.bool)
    start = 0
    for b, (count, length) in enumerate(zip(pages, case.lengths, strict=True)):
        in_use = order[start : start + count]
        table[b, :count] = in_use.int()
        unread[in_use] = (torch.arange(count * case.block) >= length).view(count, case.block)
        start += count
    cache = torch.where(unread[:, None, None, :, None], cache * _UNREAD, cache).bfloat16()
    if case.kv == "fp8":
        cache = off_edges(cache)
    if case.packed:
        cache = torch.stack(cache.unbind(1), -2).movedim(-2, 1)
    return cache, table[:, :width]
