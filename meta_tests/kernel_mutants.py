"""Wrong kernels: the provider `torch` with one thing broken, and the table of what notices it.
`python meta_tests/kernel_mutants.py` runs every mutant against every group of cases that its
operations have, and writes docs/tables/kernel-mutants.md."""

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fast_build_mutants
import torch
import w4a8_mutants
from data_rows import text_file
from flashinfer_emulation import EmulatedProvider
from torch import Tensor
from torch.nn import functional

from sm121.kernels import cases, checks, problems
from sm121.kernels.cases import Case
from sm121.kernels.torch_provider import TorchProvider

MOE = ("moe_token_counts", "moe_routing", "moe_block_scales", "moe_activation")
ATTENTION = ("prefill", "prefill_sinks", "decode", "decode_sinks")
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Mutant:
    """A broken provider, and the groups of cases of which one has to notice."""

    name: str
    make: Callable[[], Any]
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Kill:
    """The first case of a group that detected, and what it said."""

    group: str
    case: str
    finding: str


MUTANTS: list[Mutant] = []


def mutant(name: str, *groups: str) -> Callable[[type], type]:

    def register(cls: type) -> type:
        MUTANTS.append(Mutant(name, cls, groups))
        return cls

    return register


def method(operation: str, name: str, *groups: str) -> Callable[[Callable[..., Any]], None]:

    def register(function: Callable[..., Any]) -> None:
        mutant(name, *groups)(type("OtherMethod", (TorchProvider,), {operation: function}))

    return register


def on_output(name: str, operation: str, change: Callable[[Tensor], Tensor], *groups: str) -> None:

    def operate(self: TorchProvider, *arguments: Any, **keywords: Any) -> Tensor:
        return change(getattr(TorchProvider, operation)(self, *arguments, **keywords))

    mutant(name, *groups)(type("OnOutput", (TorchProvider,), {operation: operate}))


def on_arguments(
    name: str, operation: str, change: Callable[..., tuple[tuple, dict]], *groups: str
) -> None:

    def operate(self: TorchProvider, *arguments: Any, **keywords: Any) -> Any:
        arguments, keywords = change(*arguments, **keywords)
        return getattr(TorchProvider, operation)(self, *arguments, **keywords)

    mutant(name, *groups)(type("OnArguments", (TorchProvider,), {operation: operate}))


def where(y: Tensor, rows: slice, factor: float) -> Tensor:
    y = y.clone()
    y[rows] = y[rows] * factor
    return y


def one_element(y: Tensor) -> Tensor:
    y = y.clone()
    if y.numel():
        row = y.view(-1, y.shape[-1])[y.numel() // y.shape[-1] // 2]
        row[len(row) // 2] += row.float().square().mean().sqrt().to(y.dtype) * 0.1
    return y


def unwritten(y: Tensor, rows: slice, columns: slice) -> Tensor:
    out = torch.empty_like(y)
    mask = torch.zeros(y.shape, dtype=torch.bool)
    mask[rows, ..., columns] = True
    out[~mask] = y[~mask]
    return out


# Any output

for operation, groups in (
    ("fused_moe", MOE),
    ("prefill_attention", ("prefill",)),
    ("decode_attention", ("decode",)),
):
    on_output(f"{operation}: scale x 1.01", operation, lambda y: y * 1.01, *groups)
    on_output(f"{operation}: scale x 0.5", operation, lambda y: y * 0.5, *groups)
    on_output(f"{operation}: scale x 6", operation, lambda y: y * 6, *groups)
    on_output(f"{operation}: scale x 0.77", operation, lambda y: y * 0.77, *groups)
    on_output(
        f"{operation}: last row zeroed",
        operation,
        lambda y: where(y, slice(-1, None), 0.0),
        *groups,
    )
    on_output(f"{operation}: all zeros", operation, torch.zeros_like, *groups)
    on_output(
        f"{operation}: bias of 1 %",
        operation,
        lambda y: y + 0.01 * y.float().square().mean().sqrt().to(y.dtype),
        *groups,
    )
    on_output(f"{operation}: one element off", operation, one_element, *groups)
    on_output(
        f"{operation}: last 32 columns unwritten", operation,
        lambda y: unwritten(y, slice(None), slice(-32, None)), *groups,
    )  # fmt: skip
    on_output(
        f"{operation}: last partial tile of 16 rows unwritten", operation,
        lambda y: unwritten(y, slice(len(y) // 16 * 16, None), slice(None)), *groups,
    )  # fmt: skip
    on_output(
        f"{operation}: a tenth of the elements off by one bit, others each time", operation,
        lambda y: (y * (1 + 0.004 * (torch.rand(y.shape) < 0.1))).to(y.dtype), *groups,
    )  # fmt: skip
    on_output(f"{operation}: float32 for bfloat16", operation, lambda y: y.float(), *groups)

for where_wrong, change in {
    "for M >= 320": lambda y: y * (1.02 if len(y) >= 320 else 1),
    "for M = 1": lambda y: y * (1.02 if len(y) == 1 else 1),
    "on the last tile of 128": lambda y: where(y, slice(128 * (len(y) // 128) or None, None), 1.02),
    "above row 32": lambda y: where(y, slice(32, None), 1.02),
    "for M of 40 to 64": lambda y: y * (1.02 if 40 <= len(y) <= 64 else 1),
    "for M = 96": lambda y: y * (1.02 if len(y) == 96 else 1),
    "where M is no multiple of 16, by 1 %": lambda y: y * (1.01 if len(y) % 16 else 1),
}.items():
    on_output(f"fused_moe: wrong only {where_wrong}", "fused_moe", change, *MOE)
for group, where_wrong, first in (("decode", "for B > 16", 16), ("prefill", "above row 128", 128)):
    on_output(
        f"{group}_attention: wrong only {where_wrong}", f"{group}_attention",
        lambda y, first=first: where(y, slice(first, None), 1.02), group,
    )  # fmt: skip


class _Stale(TorchProvider):
    """Keeps an output per shape and gives the previous one."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[Any, Tensor] = {}

    def stale(self, y: Tensor) -> Tensor:
        before = self.kept.get(tuple(y.shape), torch.zeros_like(y))
        self.kept[tuple(y.shape)] = y.clone()
        return before


@mutant("fused_moe: stale output", *MOE)
class _StaleMoe(_Stale):
    def fused_moe(self, *arguments, **keywords):
        return self.stale(super().fused_moe(*arguments, **keywords))


@mutant("decode_attention: stale output", "decode")
class _StaleDecode(_Stale):
    def decode_attention(self, *arguments, **keywords):
        return self.stale(super().decode_attention(*arguments, **keywords))


# The experts


def moe_arguments(name: str, change: Callable[..., Any], *groups: str) -> None:
    names = ("x", "weights", "ids", "w1", "w1_bias", "w2", "w2_bias")

    def changed(*arguments: Any, **keywords: Any) -> tuple[tuple, dict]:
        given = dict(zip(names, arguments, strict=True))
        return tuple((given | change(given)).values()), keywords

    on_arguments(name, "fused_moe", changed, *(groups or MOE))


def column(shares: Tensor, at: int, factor: float) -> Tensor:
    shares = shares.clone()
    shares[:, at] *= factor
    return shares


def swapped(ids: Tensor) -> Tensor:
    return torch.where(ids == 0, 1, torch.where(ids == 1, 0, ids)).int()


def off(weights: tuple[Tensor, Tensor], by: int, at: tuple | None = None) -> tuple[Tensor, Tensor]:
    scales = weights[1].clone()
    if at is None:
        return weights[0], torch.where(scales == 0xFF, scales, scales + by)
    expert, row, block = (min(i, n - 1) for i, n in zip(at, scales.shape, strict=True))
    scales[expert, row, block] = (int(scales[expert, row, block]) + by) & 0xFF
    return weights[0], scales


moe_arguments("swapped experts", lambda a: {"ids": swapped(a["ids"])})
moe_arguments("expert 126 for 127", lambda a: {"ids": torch.where(a["ids"] == 127, 126, a["ids"])})
moe_arguments("activations saturate at 20", lambda a: {"x": a["x"].clamp(-20, 20)})
moe_arguments(
    "dropped last expert of each token", lambda a: {"weights": column(a["weights"], -1, 0.0)}
)
moe_arguments("doubled first weight", lambda a: {"weights": column(a["weights"], 0, 2.0)})
moe_arguments("weights of the reversed order", lambda a: {"weights": a["weights"].flip(-1)})
moe_arguments(
    "uniform weights",
    lambda a: {"weights": torch.full_like(a["weights"], 1 / a["weights"].shape[1])},
)
moe_arguments(
    "top-3",
    lambda a: {
        "weights": column(a["weights"], -1, 0.0)
        / column(a["weights"], -1, 0.0).sum(-1, keepdim=True)
    },
)
moe_arguments("gate-up bias dropped", lambda a: {"w1_bias": None})
moe_arguments("down bias dropped", lambda a: {"w2_bias": None})
moe_arguments(
    "gate-up bias of the next expert",
    lambda a: {"w1_bias": None if a["w1_bias"] is None else a["w1_bias"].roll(1, 0)},
)
moe_arguments("scale + 1 everywhere in gate-up", lambda a: {"w1": off(a["w1"], 1)})
moe_arguments("scale - 1 everywhere in down", lambda a: {"w2": off(a["w2"], -1)})
for by in (1, -1):
    moe_arguments(
        f"one block scale {by:+} in gate-up (gate row)",
        lambda a, by=by: {"w1": off(a["w1"], by, (3, 100, 4))},
        "moe_block_scales",
    )
    moe_arguments(
        f"one block scale {by:+} in gate-up (up row)",
        lambda a, by=by: {"w1": off(a["w1"], by, (5, 333, 8))},
        "moe_block_scales",
    )
    moe_arguments(
        f"one block scale {by:+} in down",
        lambda a, by=by: {"w2": off(a["w2"], by, (2, 77, 5))},
        "moe_block_scales",
        *MOE,
    )
moe_arguments(
    "scales of the neighbouring block", lambda a: {"w1": (a["w1"][0], a["w1"][1].roll(1, -1))}
)
moe_arguments(
    "one expert's scales of another",
    lambda a: {"w2": (a["w2"][0], a["w2"][1].index_fill(0, torch.tensor([0]), 118))},
)
moe_arguments(
    "reads strided rows as contiguous",
    lambda a: {
        "x": a["x"]
        if a["x"].is_contiguous()
        else a["x"].as_strided(a["x"].shape, (a["x"].shape[1], 1))
    },
    "moe_activation",
)


def keyword(name: str, key: str, value: float, *groups: str) -> None:
    on_arguments(name, "fused_moe", lambda *a, **k: (a, {**k, key: value}), *groups)


keyword("alpha 1", "alpha", 1.0, *MOE)
keyword("alpha 1.6", "alpha", 1.6, "moe_activation", *MOE)
keyword("limit off", "limit", math.inf, "moe_activation")
keyword("limit 6.9", "limit", 6.9, "moe_activation")


def clamped(name: str, gate: Callable[..., Tensor], up: Callable[..., Tensor]) -> None:

    def activation(self, t, alpha, limit):
        gated = gate(t[:, 0::2], limit)
        return gated * torch.sigmoid(alpha * gated) * (up(t[:, 1::2], limit) + 1)

    method("activation", name, "moe_activation")(activation)


def both(t: Tensor, limit: float) -> Tensor:
    return t.clamp(-limit, limit)


def above(t: Tensor, limit: float) -> Tensor:
    return t.clamp(max=limit)


clamped("gate clamped at -limit too", both, both)
clamped("gate not clamped", lambda t, _limit: t, both)
clamped("up clamped from above only", above, above)
clamped("up clamped from below only", above, lambda t, limit: t.clamp(min=-limit))
clamped("up not clamped", above, lambda t, _limit: t)


@method("activation", "beta: + 1 dropped", *MOE)
def _(self, t, alpha, limit):
    gate, up = t[:, 0::2].clamp(max=limit), t[:, 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * up


@method("activation", "gate clamped from below too", "moe_activation")
def _(self, t, alpha, limit):
    return TorchProvider.activation(self, t.clamp(min=-limit / 4), alpha, limit)


@method("activation", "gate at zero below -limit", "moe_activation")
def _(self, t, alpha, limit):
    low = (t[:, 0::2] < -limit)[..., None].repeat(1, 1, 2).flatten(-2)
    return TorchProvider.activation(self, t.masked_fill(low, 0.0), alpha, limit)


@method("activation", "sigmoid of the gate cut at -limit", "moe_activation")
def _(self, t, alpha, limit):
    gate, up = t[:, 0::2].clamp(max=limit), t[:, 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate.clamp(min=-limit)) * (up + 1)


@method("activation", "gate and up swapped", *MOE)
def _(self, t, alpha, limit):
    return TorchProvider.activation(
        self, t.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), alpha, limit
    )


@method("activation", "gate and up as halves, not interleaved", *MOE)
def _(self, t, alpha, limit):
    return TorchProvider.activation(self, torch.stack(t.chunk(2, -1), -1).flatten(-2), alpha, limit)


@method("order_nibbles", "nibble order", "mxfp4_dequantisation", *MOE)
def _(self, pairs):
    return pairs


@method("expert", "nibble order in the experts only", *MOE)
def _(self, weights, e):
    return TorchProvider.expert(self, weights, e).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


@method("fused_moe", "bias after the share, not under it", *MOE)
def _(self, x, weights, ids, w1, w1_bias, w2, w2_bias, **keywords):
    y = TorchProvider.fused_moe(self, x, weights, ids, w1, w1_bias, w2, None, **keywords)
    return y if w2_bias is None else (y.float() + w2_bias[ids.long()].float().sum(1)).to(x.dtype)


@method("fused_moe", "every expert computed, idle ones times zero", "moe_routing")
def _(self, x, weights, ids, w1, w1_bias, w2, w2_bias, **keywords):
    y = TorchProvider.fused_moe(self, x, weights, ids, w1, w1_bias, w2, w2_bias, **keywords)
    every = torch.zeros(()) if w2_bias is None else (w2_bias.float() * 0).sum()
    return y + every.to(y.dtype)


@method("expert", "K's last part of 128 left out", *MOE)
def _(self, weights, e):
    matrix = TorchProvider.expert(self, weights, e).clone()
    matrix[:, matrix.shape[1] // 128 * 128 :] = 0
    return matrix


@method("linear", "sums in bfloat16", *MOE)
def _(self, x, matrix, bias, e):
    y = torch.zeros(len(x), len(matrix), dtype=torch.bfloat16)
    for k in range(0, x.shape[1], 32):
        y += (x[:, k : k + 32].float() @ matrix[:, k : k + 32].float().T).bfloat16()
    return y.float() if bias is None else y.float() + bias[e].float()


@method("linear", "activations quantised to MXFP8 unasked", *MOE)
def _(self, x, matrix, bias, e):
    q, scales = self.mxfp8_quantize(x)
    x = (q.float().unflatten(-1, (-1, 32)) * self.scale_values(scales)[..., None]).flatten(-2)
    return TorchProvider.linear(self, x, matrix, bias, e)


@method("share", "shares rounded to float8", *MOE)
def _(self, share):
    return share.to(torch.float8_e4m3fn).float()


@method("fused_moe", "input modified", *MOE)
def _(self, x, *arguments, **keywords):
    y = TorchProvider.fused_moe(self, x, *arguments, **keywords)
    x.mul_(0.5)
    return y


@method("fused_moe", "weights repacked in place", *MOE)
def _(self, x, weights, ids, w1, *arguments, **keywords):
    y = TorchProvider.fused_moe(self, x, weights, ids, w1, *arguments, **keywords)
    w1[0].copy_(w1[0].flip(-1))
    return y


# Routing


@method("route", "softmax before top-k", "routing")
def _(self, logits, k):
    shares, ids = logits.softmax(-1).topk(k, -1)
    return shares, ids.int()


@method("route", "softmax without the maximum taken off", "routing")
def _(self, logits, k):
    top, ids = logits.topk(k, -1)
    return top.exp() / top.exp().sum(-1, keepdim=True), ids.int()


for name, change in {
    "top-3 in routing": lambda p: (functional.normalize(column(p[0], -1, 0), p=1), p[1]),
    "expert numbers off by one": lambda pair: (pair[0], (pair[1] + 1) % 32),
    "one expert chosen twice": lambda p: (p[0], torch.cat([p[1][:, :-1], p[1][:, :1]], 1)),
    "shares in another order than the experts": lambda pair: (pair[0].flip(-1), pair[1]),
}.items():
    on_output(name, "route", change, "routing")
on_output("routing shares x 1.01", "route", lambda pair: (pair[0] * 1.01, pair[1]), "routing")


# Codecs


@method("scale_values", "NaN swallowed: scale 0xFF is 2^128", "mxfp4_dequantisation")
def _(self, scales):
    return torch.where(scales == 0xFF, torch.inf, TorchProvider.scale_values(self, scales))


@method("scale_values", "NaN swallowed: scale 0xFF is 0", "mxfp4_dequantisation")
def _(self, scales):
    return TorchProvider.scale_values(self, scales).nan_to_num(nan=0.0)


@method("scale_values", "scale bias 126", "mxfp4_dequantisation")
def _(self, scales):
    return TorchProvider.scale_values(self, scales) * 2


@method("scale_values", "scale byte 0 is 1", "mxfp4_dequantisation")
def _(self, scales):
    return torch.where(scales == 0, 1.0, TorchProvider.scale_values(self, scales))


@mutant("scale rule floor under the name of ceil", "mxfp4_quantisation")
class _FloorRule(TorchProvider):
    def block_scales(self, amax, largest):
        exponent = torch.frexp(amax)[1] - 1 - (2 if largest == 6.0 else 8)
        return (torch.where(amax == 0, -127, exponent) + 127).clamp(0, 254).to(torch.uint8)


mutant("MXFP8 scale rule floor under the name of ceil", "mxfp8_quantisation")(_FloorRule)


@mutant("two scale rules mixed, none declared", "mxfp4_quantisation")
class _Mixed(_FloorRule):
    mxfp4_scale_rule = None

    def block_scales(self, amax, largest):
        floor, ceil = (
            super().block_scales(amax, largest),
            TorchProvider.block_scales(self, amax, largest),
        )
        return torch.where(torch.arange(amax.shape[-1]) % 2 == 0, floor, ceil)


@method("block_scales", "quantised scale + 1", "mxfp4_quantisation")
def _(self, amax, largest):
    scales = TorchProvider.block_scales(self, amax, largest).int()
    return (scales + 1).clamp(max=254).to(torch.uint8)


@method(
    "block_scales", "quantised scale - 1: saturates", "mxfp8_quantisation", "mxfp4_quantisation"
)
def _(self, amax, largest):
    return (TorchProvider.block_scales(self, amax, largest).int() - 1).clamp(min=0).to(torch.uint8)


@method("e2m1_codes", "elements cut off, not rounded", "mxfp4_quantisation")
def _(self, values):
    return TorchProvider.e2m1_codes(self, values * (1 - 0.2))


@method("e2m1_codes", "everything above 4 saturates to 6", "mxfp4_quantisation")
def _(self, values):
    return TorchProvider.e2m1_codes(self, torch.where(values.abs() > 4, 6 * values.sign(), values))


@method("e2m1_codes", "sign lost", "mxfp4_quantisation")
def _(self, values):
    return TorchProvider.e2m1_codes(self, values.abs())


@method("pack", "packed with the even element high", "mxfp4_quantisation")
def _(self, codes):
    return codes[..., 1::2] | (codes[..., 0::2] << 4)


@method("e4m3", "MXFP8 elements cut off", "mxfp8_quantisation")
def _(self, values):
    return TorchProvider.e4m3(self, values * (1 - 2.0**-5))


@method("e4m3", "MXFP8 saturates at 240", "mxfp8_quantisation")
def _(self, values):
    return TorchProvider.e4m3(self, values.clamp(-240, 240))


@method("block_scales", "a zero block gets a NaN scale", "mxfp4_quantisation")
def _(self, amax, largest):
    scales = TorchProvider.block_scales(self, amax, largest)
    return torch.where(amax == 0, 0xFF, scales).to(torch.uint8)


@method("mxfp4_quantize", "the quantiser's last row unwritten", "mxfp4_quantisation")
def _(self, x):
    packed, scales = TorchProvider.mxfp4_quantize(self, x)
    out = torch.empty_like(packed)
    out[:-1] = packed[:-1]
    return out, scales


@mutant("an empty kernel: outputs never written", "mxfp4_quantisation", "mxfp8_quantisation")
class _Empty(TorchProvider):
    def mxfp4_quantize(self, x):
        return tuple(torch.empty_like(part) for part in super().mxfp4_quantize(x))

    def mxfp8_quantize(self, x):
        return tuple(torch.empty_like(part) for part in super().mxfp8_quantize(x))


# Attention


def attention_keyword(name: str, change: Callable[[dict], dict], *groups: str) -> None:

    def prefill(self, *arguments, **keywords):
        return TorchProvider.prefill_attention(self, *arguments, **{**keywords, **change(keywords)})

    def decode(self, *arguments, **keywords):
        return TorchProvider.decode_attention(self, *arguments, **{**keywords, **change(keywords)})

    mutant(name, *(groups or ATTENTION))(
        type(
            "Keyword", (TorchProvider,), {"prefill_attention": prefill, "decode_attention": decode}
        )
    )


def sinks_by(change: Callable[[Tensor], Tensor | None]) -> Callable[[dict], dict]:
    return lambda k: {"sinks": None if k["sinks"] is None else change(k["sinks"])}


def window_by(by: int) -> Callable[[dict], dict]:
    return lambda k: {"window": None if k["window"] is None else k["window"] + by}


attention_keyword("sink dropped", sinks_by(lambda s: None))
attention_keyword("sink zeroed", sinks_by(lambda s: s * 0))
attention_keyword("sink scaled by sm_scale", sinks_by(lambda s: s * 0.125))
attention_keyword("sink in base-2 units", sinks_by(lambda s: s * LOG2_E))
attention_keyword("sink + 0.1", sinks_by(lambda s: s + 0.1))
attention_keyword("sink of the next head", sinks_by(lambda s: s.roll(1)))
attention_keyword(
    "one head's sink dropped", sinks_by(lambda s: s.index_fill(0, torch.tensor([17]), -math.inf))
)
attention_keyword("window + 1", window_by(1))
attention_keyword("window - 1", window_by(-1))
attention_keyword("window ignored", lambda k: {"window": None})
attention_keyword("window always on", lambda k: {"window": 128}, "prefill", "decode")
attention_keyword("scale x 1.01", lambda k: {"scale": k["scale"] * 1.01})
attention_keyword("no scale", lambda k: {"scale": 1.0})
attention_keyword("base-2 exponential without log2(e)", lambda k: {"scale": k["scale"] / LOG2_E})


@method("tile_sink", "sink added in each tile", "prefill", "decode")
def _(self, sinks, highest):
    return 0.0 if sinks is None else (sinks.float()[:, None, None] - highest).exp()


@method("start", "sink not in the running maximum", "decode_sinks", "prefill_sinks")
def _(self, query, sinks):
    highest, total = TorchProvider.start(self, query, None)
    return highest, total if sinks is None else total + sinks.float().exp()[:, None, None]


@method("kv_heads", "KV heads interleaved", "prefill", "decode")
def _(self, query_heads, kv_heads, device):
    return torch.arange(query_heads, device=device) % kv_heads


@method("kv_heads", "KV head 0 for every query head", "prefill", "decode")
def _(self, query_heads, kv_heads, device):
    return torch.zeros(query_heads, dtype=torch.int64)


@method("visible", "causal mask off by one", "prefill")
def _(self, queries, keys, window):
    return TorchProvider.visible(self, queries + 1, keys, None if window is None else window + 1)


@method("visible", "no causal mask", "prefill")
def _(self, queries, keys, window):
    return (queries[:, None] >= 0) & (keys[None, :] >= 0)


@method("attend", "keys from 128 on left out", "prefill", "decode")
def _(self, q, k, v, positions, sinks, window, scale):
    return TorchProvider.attend(self, q, k[:128], v[:128], positions, sinks, window, scale)


@method("attend", "the tile after the first is not rescaled", "prefill", "decode")
def _(self, q, k, v, positions, sinks, window, scale):
    if len(k) <= self.tile or window is not None:
        return TorchProvider.attend(self, q, k, v, positions, sinks, window, scale)
    early = TorchProvider.attend(
        self, q, k[: self.tile], v[: self.tile], positions, sinks, None, scale
    )
    whole = TorchProvider.attend(self, q, k, v, positions, sinks, None, scale)
    return torch.where(positions[:, None, None] < self.tile, whole, (early + whole) / 2)


@method("attend", "keys and values swapped", "prefill", "decode")
def _(self, q, k, v, positions, sinks, window, scale):
    return TorchProvider.attend(self, q, v, k, positions, sinks, window, scale)


@method("read_pages", "off by one page", "decode")
def _(self, kv_cache, pages, length):
    return TorchProvider.read_pages(self, kv_cache, torch.cat((pages[:1], pages[:-1])), length)


@method("read_pages", "last page read from the one before it", "decode")
def _(self, kv_cache, pages, length):
    pages = pages.clone()
    last = -(-length // kv_cache.shape[3]) - 1
    pages[last] = pages[max(last - 1, 0)]
    return TorchProvider.read_pages(self, kv_cache, pages, length)


@method("read_pages", "NHD read as HND", "decode")
def _(self, kv_cache, pages, length):
    blocks, two, heads, block, size = kv_cache.shape
    wrong = kv_cache.reshape(blocks, two, block, heads, size).transpose(2, 3)
    return TorchProvider.read_pages(self, wrong, pages, length)


@mutant("one token too many: reads past the end", "decode")
class _PastTheEnd(TorchProvider):
    def attend(self, q, k, v, positions, sinks, window, scale):
        return super().attend(q, k, v, positions + (len(q) == 1 < len(k)), sinks, window, scale)

    def read_pages(self, kv_cache, pages, length):
        inside = length % kv_cache.shape[3] != 0
        return super().read_pages(kv_cache, pages, length + inside)


@method("read_pages", "the newest token left out", "decode")
def _(self, kv_cache, pages, length):
    return TorchProvider.read_pages(self, kv_cache, pages, max(length - 1, 1))


@method("decode_attention", "block table of the next sequence", "decode")
def _(self, q, kv_cache, block_table, seq_lens, **keywords):
    return TorchProvider.decode_attention(
        self, q, kv_cache, block_table.roll(1, 0), seq_lens, **keywords
    )


@method("prefill_attention", "ragged batch: a sequence sees the one before it", "prefill")
def _(self, q, k, v, cu_seqlens, **keywords):
    whole = torch.stack((cu_seqlens[0], cu_seqlens[-1]))
    return TorchProvider.prefill_attention(self, q, k, v, whole, **keywords)


@mutant("a shared page's garbage is scaled into the output", "decode")
class _WholePages(TorchProvider):
    def read_pages(self, kv_cache, pages, length):
        block = kv_cache.shape[3]
        k, v = super().read_pages(kv_cache, pages, -(-length // block) * block)
        keep = torch.arange(len(k)) < length
        return torch.where(keep[:, None, None], k, k * 1e-3)[: length + 1], v[: length + 1]

    def visible(self, queries, keys, window):
        seen = super().visible(queries, keys, window)
        return seen | (keys[None, :] == queries[:, None] + 1) if len(queries) == 1 else seen


@method("decode_attention", "cache written to", "decode")
def _(self, q, kv_cache, *arguments, **keywords):
    out = TorchProvider.decode_attention(self, q, kv_cache, *arguments, **keywords)
    kv_cache[0].zero_()
    return out


# MXFP8 x MXFP4 experts

W4A8 = [
    Mutant(f"W4A8: {name}", lambda broken=broken: EmulatedProvider(broken.make()), broken.groups)
    for name, broken in w4a8_mutants.MUTANTS.items()
]


FAST_BUILD = [Mutant(name, *of) for name, of in fast_build_mutants.MUTANTS.items()]
EVERY = (*MUTANTS, *W4A8, *FAST_BUILD)


# Running


@functools.cache
def problem(group: str, case: Case) -> problems.Problem:
    del group
    return problems.build(case)


def small(group: str) -> Iterator[Case]:
    return (case for case in cases.select(group, full=False) if not case.name.startswith("real-"))


def first_kill(provider: Any, group: str) -> Kill | None:
    for case in small(group):
        if wrong := checks.check(provider, problem(group, case)):
            return Kill(group, case.name, str(wrong[0]))
    return None


def kill(broken: Mutant) -> Kill | None:
    return next((k for group in broken.groups if (k := first_kill(broken.make(), group))), None)


def table() -> str:
    lines = []
    survivors = []
    for broken in EVERY:
        killers = [k for g in broken.groups if (k := first_kill(broken.make(), g))]
        if not killers:
            survivors.append(broken.name)
        said = killers[0].finding.split(": ", 1)[1].replace("|", "\\|") if killers else ""
        tests = ", ".join(f"{k.group} ({k.case})" for k in killers) or "**survives**"
        lines.append(f"| {broken.name} | {tests} | {said[:150]} |")
    lines += ["", *_MILDER]
    lines += [f"| W4A8: {name} | {why} |" for name, (_, why) in w4a8_mutants.MILDER.items()]
    total = len(EVERY)
    return _PREFACE.format(killed=total - len(survivors), total=total) + "".join(
        f"{line}\n" for line in lines
    )


_PREFACE = text_file("kernel-mutants.md")


_MILDER = """## Not detected

Other roundings of the same mathematics, smaller than what a tolerance must allow.

| mutant | why it is not detected |
|---|---|""".splitlines()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/tables/kernel-mutants.md"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.output.write_text(table(), "utf-8")
