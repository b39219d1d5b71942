"""Wrong attention: the provider `torch` with one injected fault. `kernel_mutants` registers these
mutants."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meta_tests.faults.mutants import Before, Catalogue, broken
from sm121.kernels.torch_attention import TorchAttention
from sm121.kernels.torch_provider import TorchProvider

ATTENTION = ("prefill", "prefill_sinks", "decode", "decode_sinks")
LOG2_E = math.log2(math.e)
#: `right` is used to call a method of the correct class with the faulty object as `self`.
right = TorchProvider
CATALOGUE = Catalogue(TorchProvider, *ATTENTION)
mutant = CATALOGUE.mutant
method = CATALOGUE.method


def nhd_as_hnd(cache: Tensor) -> Tensor:
    blocks, two, heads, block, size = cache.shape
    return cache.reshape(blocks, two, block, heads, size).transpose(2, 3)


#: The mutants of a method: their names and the functions that replace it. A key contains the
#: method's name, and then the groups of cases that must detect the mutants.
METHODS: dict[tuple[str, ...], dict[str, Any]] = {
    ("kv_heads", "prefill", "decode"): {
        "KV heads interleaved": lambda self, query_heads, kv_heads, device: (
            torch.arange(query_heads, device=device) % kv_heads
        ),
        "KV head 0 for every query head": lambda self, query_heads, kv_heads, device: torch.zeros(
            query_heads, dtype=torch.int64
        ),
    },
    ("visible", "prefill"): {
        "causal mask off by one": Before(
            lambda queries, keys, window: (queries + 1, keys, window and window + 1)
        ),
        "no causal mask": lambda self, queries, keys, window: (
            (queries[:, None] >= 0) & (keys[None, :] >= 0)
        ),
    },
    ("attend", "prefill", "decode"): {
        "keys from 128 on left out": Before(lambda q, k, v, *rest: (q, k[:128], v[:128], *rest)),
        "keys and values swapped": Before(lambda q, k, v, *rest: (q, v, k, *rest)),
    },
    ("tile_sink", "prefill", "decode"): {
        "sink added in each tile": lambda self, sinks, highest: (
            0.0 if sinks is None else (sinks.float()[:, None, None] - highest).exp()
        ),
    },
    ("read_pages", "decode"): {
        "off by one page": Before(
            lambda cache, pages, length: (cache, torch.cat((pages[:1], pages[:-1])), length)
        ),
        "the newest token left out": Before(
            lambda cache, pages, length: (cache, pages, max(length - 1, 1))
        ),
        "NHD read as HND": Before(lambda cache, *rest: (nhd_as_hnd(cache), *rest)),
    },
    ("decode_attention", "decode"): {
        "block table of the next sequence": Before(
            lambda q, cache, block_table, *rest: (q, cache, block_table.roll(1, 0), *rest)
        ),
    },
}
CATALOGUE.add_all(METHODS)


def sinks_by(change: Callable[[Tensor], Tensor | None]) -> Callable[[dict], dict]:
    return lambda k: {"sinks": None if k["sinks"] is None else change(k["sinks"])}


def window_by(by: int) -> Callable[[dict], dict]:
    return lambda k: {"window": None if k["window"] is None else k["window"] + by}


#: The changed keyword arguments of both operations, and the groups, if not all. The keys are the
#: names of mutants.
KEYWORDS: dict[str, tuple[Any, ...]] = {
    "sink dropped": (sinks_by(lambda s: None),),
    "sink zeroed": (sinks_by(lambda s: s * 0),),
    "sink scaled by sm_scale": (sinks_by(lambda s: s * 0.125),),
    "sink in base-2 units": (sinks_by(lambda s: s * LOG2_E),),
    "sink + 0.1": (sinks_by(lambda s: s + 0.1),),
    "sink of the next head": (sinks_by(lambda s: s.roll(1)),),
    "one head's sink dropped": (
        sinks_by(lambda s: s.index_fill(0, torch.tensor([17]), -math.inf)),
    ),
    "window + 1": (window_by(1),),
    "window - 1": (window_by(-1),),
    "window ignored": (lambda k: {"window": None},),
    "window always on": (lambda k: {"window": 128}, "prefill", "decode"),
    "scale x 1.01": (lambda k: {"scale": k["scale"] * 1.01},),
    "no scale": (lambda k: {"scale": 1.0},),
    "base-2 exponential without log2(e)": (lambda k: {"scale": k["scale"] / LOG2_E},),
}


def with_keywords(name: str, change: Callable[[dict], dict]) -> Callable[..., Tensor]:
    operation = getattr(right, name)
    return lambda *arguments, **k: operation(*arguments, **{**k, **change(k)})


for name, (change, *groups) in KEYWORDS.items():
    both = ("prefill_attention", "decode_attention")
    methods = {operation: with_keywords(operation, change) for operation in both}
    mutant(name, *groups)(broken(right, **methods))


@method("start", "sink not in the running maximum", "decode_sinks", "prefill_sinks")
def _(self, query, sinks):
    highest, total = TorchAttention.start(self, query, None)
    return highest, total if sinks is None else total + sinks.float().exp()[:, None, None]


@method("attend", "the tile after the first is not rescaled", "prefill", "decode")
def _(self, q, k, v, positions, sinks, window, scale):
    if len(k) <= self.tile or window is not None:
        return TorchAttention.attend(self, q, k, v, positions, sinks, window, scale)
    early = TorchAttention.attend(
        self, q, k[: self.tile], v[: self.tile], positions, sinks, None, scale
    )
    whole = TorchAttention.attend(self, q, k, v, positions, sinks, None, scale)
    return torch.where(positions[:, None, None] < self.tile, whole, (early + whole) / 2)


@method("read_pages", "last page read from the one before it", "decode")
def _(self, kv_cache, pages, length):
    pages = pages.clone()
    last = -(-length // kv_cache.shape[3]) - 1
    pages[last] = pages[max(last - 1, 0)]
    return TorchAttention.read_pages(self, kv_cache, pages, length)


class _PastTheEnd(TorchAttention):
    def attend(self, q, k, v, positions, sinks, window, scale):
        return super().attend(q, k, v, positions + (len(q) == 1 < len(k)), sinks, window, scale)

    def read_pages(self, kv_cache, pages, length):
        inside = length % kv_cache.shape[3] != 0
        return super().read_pages(kv_cache, pages, length + inside)


mutant("one token too many: reads past the end", "decode")(
    type("PastTheEnd", (TorchProvider,), {"attention_class": _PastTheEnd})
)


@method("prefill_attention", "ragged batch: a sequence sees the one before it", "prefill")
def _(self, q, k, v, cu_seqlens, **keywords):
    whole = torch.stack((cu_seqlens[0], cu_seqlens[-1]))
    return right.prefill_attention(self, q, k, v, whole, **keywords)


class _WholePages(TorchAttention):
    def read_pages(self, kv_cache, pages, length):
        block = kv_cache.shape[3]
        k, v = super().read_pages(kv_cache, pages, -(-length // block) * block)
        keep = torch.arange(len(k)) < length
        return torch.where(keep[:, None, None], k, k * 1e-3)[: length + 1], v[: length + 1]

    def visible(self, queries, keys, window):
        mask = super().visible(queries, keys, window)
        return mask | (keys[None, :] == queries[:, None] + 1) if len(queries) == 1 else mask


mutant("a shared page's garbage is scaled into the output", "decode")(
    type("WholePages", (TorchProvider,), {"attention_class": _WholePages})
)


@method("decode_attention", "cache written to", "decode")
def _(self, q, kv_cache, *arguments, **keywords):
    out = right.decode_attention(self, q, kv_cache, *arguments, **keywords)
    kv_cache[0].zero_()
    return out
