"""Wrong kernels, and the table of the cases that detect them.

Each is the provider `torch` with one injected fault.

`python -m meta_tests.faults.kernel_mutants` runs every mutant against every group of cases of its
operations, and writes docs/tables/kernel-mutants.md.
"""

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meta_tests.fakes.flashinfer_emulation import EmulatedProvider
from meta_tests.faults import attention_mutants, catalogue_rows, fast_build_mutants, w4a8_mutants
from meta_tests.faults.mutants import After, Before, Catalogue, Mutant, broken
from sm121.kernels import cases, checks, problems
from sm121.kernels.cases import Case
from sm121.kernels.torch_codecs import TorchCodecs
from sm121.kernels.torch_experts import TorchExperts
from sm121.kernels.torch_provider import TorchProvider

MOE = ("moe_token_counts", "moe_routing", "moe_block_scales", "moe_activation")


@dataclass(frozen=True)
class Kill:
    """The first case of a group that detected a fault, and its message."""

    group: str
    case: str
    finding: str


#: `right` is used to call a method of the correct class with the faulty object as `self`.
right = TorchProvider
CATALOGUE = Catalogue(TorchProvider)
MUTANTS, mutant, method, add = (
    CATALOGUE.mutants, CATALOGUE.mutant, CATALOGUE.method, CATALOGUE.add
)  # fmt: skip


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

ANYWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    "scale x 1.01": lambda y: y * 1.01,
    "scale x 0.5": lambda y: y * 0.5,
    "scale x 6": lambda y: y * 6,
    "scale x 0.77": lambda y: y * 0.77,
    "last row zeroed": lambda y: where(y, slice(-1, None), 0.0),
    "all zeros": torch.zeros_like,
    "bias of 1 %": lambda y: y + 0.01 * y.float().square().mean().sqrt().to(y.dtype),
    "one element off": one_element,
    "last 32 columns unwritten": lambda y: unwritten(y, slice(None), slice(-32, None)),
    "last partial tile of 16 rows unwritten": lambda y: unwritten(
        y, slice(len(y) // 16 * 16, None), slice(None)
    ),
    "a tenth of the elements off by one bit, others each time": lambda y: (
        y * (1 + 0.004 * (torch.rand(y.shape) < 0.1))
    ).to(y.dtype),
    "float32 for bfloat16": lambda y: y.float(),
}
for operation, groups in (
    ("fused_moe", MOE),
    ("prefill_attention", ("prefill",)),
    ("decode_attention", ("decode",)),
):
    for fault, change in ANYWHERE.items():
        add(operation, f"{operation}: {fault}", After(change), *groups)

for where_wrong, change in {
    "for M >= 320": lambda y: y * (1.02 if len(y) >= 320 else 1),
    "for M = 1": lambda y: y * (1.02 if len(y) == 1 else 1),
    "on the last tile of 128": lambda y: where(y, slice(128 * (len(y) // 128) or None, None), 1.02),
    "above row 32": lambda y: where(y, slice(32, None), 1.02),
    "for M of 40 to 64": lambda y: y * (1.02 if 40 <= len(y) <= 64 else 1),
    "for M = 96": lambda y: y * (1.02 if len(y) == 96 else 1),
    "where M is no multiple of 16, by 1 %": lambda y: y * (1.01 if len(y) % 16 else 1),
}.items():
    add("fused_moe", f"fused_moe: wrong only {where_wrong}", After(change), *MOE)
for group, where_wrong, first in (("decode", "for B > 16", 16), ("prefill", "above row 128", 128)):
    beyond = After(lambda y, first=first: where(y, slice(first, None), 1.02))
    add(f"{group}_attention", f"{group}_attention: wrong only {where_wrong}", beyond, group)


class _Stale(TorchProvider):
    """A provider that stores an output for each shape, and returns the output of the call
    before."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[Any, Tensor] = {}

    def stale(self, y: Tensor) -> Tensor:
        before = self.outputs.get(tuple(y.shape), torch.zeros_like(y))
        self.outputs[tuple(y.shape)] = y.clone()
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

    def changed(*arguments: Any) -> tuple:
        by_name = dict(zip(names, arguments, strict=True))
        return tuple((by_name | change(by_name)).values())

    add("fused_moe", name, Before(changed), *(groups or MOE))


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


def as_contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.as_strided(x.shape, (x.shape[1], 1))


#: The changed arguments of `fused_moe`. The keys are the names of mutants.
OTHER_ARGUMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "swapped experts": lambda a: {"ids": swapped(a["ids"])},
    "expert 126 for 127": lambda a: {"ids": torch.where(a["ids"] == 127, 126, a["ids"])},
    "activations saturate at 20": lambda a: {"x": a["x"].clamp(-20, 20)},
    "dropped last expert of each token": lambda a: {"weights": column(a["weights"], -1, 0.0)},
    "doubled first weight": lambda a: {"weights": column(a["weights"], 0, 2.0)},
    "weights of the reversed order": lambda a: {"weights": a["weights"].flip(-1)},
    "uniform weights": lambda a: {
        "weights": torch.full_like(a["weights"], 1 / a["weights"].shape[1])
    },
    "top-3": lambda a: {"weights": functional.normalize(column(a["weights"], -1, 0.0), p=1)},
    "gate-up bias dropped": lambda a: {"w1_bias": None},
    "down bias dropped": lambda a: {"w2_bias": None},
    "gate-up bias of the next expert": lambda a: {
        "w1_bias": None if a["w1_bias"] is None else a["w1_bias"].roll(1, 0)
    },
    "scale + 1 everywhere in gate-up": lambda a: {"w1": off(a["w1"], 1)},
    "scale - 1 everywhere in down": lambda a: {"w2": off(a["w2"], -1)},
    "scales of the neighbouring block": lambda a: {"w1": (a["w1"][0], a["w1"][1].roll(1, -1))},
    "one expert's scales of another": lambda a: {
        "w2": (a["w2"][0], a["w2"][1].index_fill(0, torch.tensor([0]), 118))
    },
}
for name, change in OTHER_ARGUMENTS.items():
    moe_arguments(name, change)
for by in (1, -1):
    for part, matrix, at, groups in (
        ("gate-up (gate row)", "w1", (3, 100, 4), ()),
        ("gate-up (up row)", "w1", (5, 333, 8), ()),
        ("down", "w2", (2, 77, 5), MOE),
    ):
        moe_arguments(
            f"one block scale {by:+} in {part}",
            lambda a, by=by, matrix=matrix, at=at: {matrix: off(a[matrix], by, at)},
            *("moe_block_scales", *groups),
        )
moe_arguments(
    "reads strided rows as contiguous", lambda a: {"x": as_contiguous(a["x"])}, "moe_activation"
)


def keyword(name: str, key: str, value: float, *groups: str) -> None:
    def changed(self: TorchProvider, *arguments: Any, **keywords: Any) -> Tensor:
        return right.fused_moe(self, *arguments, **{**keywords, key: value})

    add("fused_moe", name, changed, *groups)


keyword("alpha 1", "alpha", 1.0, *MOE)
keyword("alpha 1.6", "alpha", 1.6, "moe_activation", *MOE)
keyword("limit off", "limit", math.inf, "moe_activation")
keyword("limit 6.9", "limit", 6.9, "moe_activation")


def both(t: Tensor, limit: float) -> Tensor:
    return t.clamp(-limit, limit)


def above(t: Tensor, limit: float) -> Tensor:
    return t.clamp(max=limit)


def below(t: Tensor, limit: float) -> Tensor:
    return t.clamp(min=-limit)


def as_it_is(t: Tensor, _limit: float) -> Tensor:
    return t


def swiglu(
    gate: Callable[..., Tensor] = above, up: Callable[..., Tensor] = both,
    inner: Callable[..., Tensor] = as_it_is, beta: float = 1.0,
) -> Callable[..., Tensor]:  # fmt: skip
    """Return a SwiGLU with other limits of the gate, the up projection, and the gate in the
    sigmoid."""

    def activation(_self: Any, t: Tensor, alpha: float, limit: float) -> Tensor:
        gated = gate(t[:, 0::2], limit)
        share = torch.sigmoid(alpha * inner(gated, limit))
        return gated * share * (up(t[:, 1::2], limit) + beta)

    return activation


def activation_of(change: Callable[[Tensor, float], Tensor]) -> Callable[..., Tensor]:
    return lambda self, t, alpha, limit: TorchExperts.activation(
        self, change(t, limit), alpha, limit
    )


def gate_at_zero(t: Tensor, limit: float) -> Tensor:
    low = (t[:, 0::2] < -limit)[..., None].repeat(1, 1, 2).flatten(-2)
    return t.masked_fill(low, 0.0)


def zero_from(matrix: Tensor, column: int) -> Tensor:
    return torch.where(torch.arange(matrix.shape[1]) < column, matrix, 0)


def routed(
    shares: Tensor, ids: Tensor, change: Callable[[Tensor], Tensor] = lambda shares: shares
) -> tuple[Tensor, Tensor]:
    return change(shares), ids.int()


#: The mutants of a method: their names and the functions that replace it. A key contains the
#: method's name, and then the groups of cases that must detect the mutants.
METHODS: dict[tuple[str, ...], dict[str, Callable[..., Any]]] = {
    ("activation", "moe_activation"): {
        "gate clamped at -limit too": swiglu(gate=both),
        "gate not clamped": swiglu(gate=as_it_is),
        "up clamped from above only": swiglu(up=above),
        "up clamped from below only": swiglu(up=below),
        "up not clamped": swiglu(up=as_it_is),
        "gate clamped from below too": activation_of(lambda t, limit: t.clamp(min=-limit / 4)),
        "gate at zero below -limit": activation_of(gate_at_zero),
        "sigmoid of the gate cut at -limit": swiglu(inner=below),
    },
    ("activation", *MOE): {
        "beta: + 1 dropped": swiglu(beta=0.0),
        "gate and up swapped": activation_of(
            lambda t, _: t.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        ),
        "gate and up as halves, not interleaved": activation_of(
            lambda t, _: torch.stack(t.chunk(2, -1), -1).flatten(-2)
        ),
    },
    ("order_nibbles", "mxfp4_dequantisation", *MOE): {"nibble order": lambda self, pairs: pairs},
    ("expert", *MOE): {
        "K's last part of 128 left out": After(
            lambda matrix: zero_from(matrix, matrix.shape[1] // 128 * 128)
        ),
        "nibble order in the experts only": After(
            lambda matrix: matrix.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        ),
    },
    ("share", *MOE): {
        "shares rounded to float8": lambda self, share: share.to(torch.float8_e4m3fn).float(),
    },
    ("scale_values", "mxfp4_dequantisation"): {
        "NaN swallowed: scale 0xFF is 2^128": lambda self, scales: torch.where(
            scales == 0xFF, torch.inf, TorchCodecs.scale_values(self, scales)
        ),
        "NaN swallowed: scale 0xFF is 0": After(lambda values: values.nan_to_num(nan=0.0)),
        "scale bias 126": After(lambda values: values * 2),
        "scale byte 0 is 1": lambda self, scales: torch.where(
            scales == 0, 1.0, TorchCodecs.scale_values(self, scales)
        ),
    },
    ("e2m1_codes", "mxfp4_quantisation"): {
        "elements cut off, not rounded": Before(lambda values: values * (1 - 0.2)),
        "everything above 4 saturates to 6": Before(
            lambda values: torch.where(values.abs() > 4, 6 * values.sign(), values)
        ),
        "sign lost": Before(torch.abs),
    },
    ("pack", "mxfp4_quantisation"): {
        "packed with the even element high": lambda self, codes: (
            codes[..., 1::2] | (codes[..., 0::2] << 4)
        ),
    },
    ("block_scales", "mxfp4_quantisation"): {
        "quantised scale + 1": After(lambda s: (s.int() + 1).clamp(max=254).byte()),
        "a zero block gets a NaN scale": lambda self, amax, largest: torch.where(
            amax == 0, 0xFF, TorchCodecs.block_scales(self, amax, largest)
        ).to(torch.uint8),
    },
    ("block_scales", "mxfp8_quantisation", "mxfp4_quantisation"): {
        "quantised scale - 1: saturates": After(lambda s: (s.int() - 1).clamp(min=0).byte()),
    },
    ("mxfp4_quantize", "mxfp4_quantisation"): {
        "the quantiser's last row unwritten": After(
            lambda pair: (unwritten(pair[0], slice(-1, None), slice(None)), pair[1])
        ),
    },
    ("route", "routing"): {
        "softmax before top-k": lambda self, logits, k: routed(*logits.softmax(-1).topk(k, -1)),
        "softmax without the maximum taken off": lambda self, logits, k: routed(
            *logits.topk(k, -1), lambda top: top.exp() / top.exp().sum(-1, keepdim=True)
        ),
        "top-3 in routing": After(lambda p: (functional.normalize(column(p[0], -1, 0), p=1), p[1])),
        "expert numbers off by one": After(lambda pair: (pair[0], (pair[1] + 1) % 32)),
        "one expert chosen twice": After(
            lambda p: (p[0], torch.cat([p[1][:, :-1], p[1][:, :1]], 1))
        ),
        "shares in another order than the experts": After(lambda p: (p[0].flip(-1), p[1])),
        "routing shares x 1.01": After(lambda pair: (pair[0] * 1.01, pair[1])),
    },
    ("e4m3", "mxfp8_quantisation"): {
        "MXFP8 elements cut off": Before(lambda values: values * (1 - 2.0**-5)),
        "MXFP8 saturates at 240": Before(lambda values: values.clamp(-240, 240)),
    },
}
CATALOGUE.add_all(METHODS)


@method("fused_moe", "bias after the share, not under it", *MOE)
def _(self, x, weights, ids, w1, w1_bias, w2, w2_bias, **keywords):
    y = right.fused_moe(self, x, weights, ids, w1, w1_bias, w2, None, **keywords)
    return y if w2_bias is None else (y.float() + w2_bias[ids.long()].float().sum(1)).to(x.dtype)


@method("fused_moe", "every expert computed, idle ones times zero", "moe_routing")
def _(self, *arguments, **keywords):
    y = right.fused_moe(self, *arguments, **keywords)
    bias = arguments[-1]
    return y if bias is None else y + (bias.float() * 0).sum().to(y.dtype)


@method("linear", "sums in bfloat16", *MOE)
def _(self, x, matrix, bias, e):
    y = torch.zeros(len(x), len(matrix), dtype=torch.bfloat16)
    for k in range(0, x.shape[1], 32):
        y += (x[:, k : k + 32].float() @ matrix[:, k : k + 32].float().T).bfloat16()
    return y.float() if bias is None else y.float() + bias[e].float()


@method("linear", "activations quantised to MXFP8 unasked", *MOE)
def _(self, x, matrix, bias, e):
    q, scales = self.codecs.mxfp8_quantize(x)
    values = TorchCodecs().scale_values(scales)
    x = (q.float().unflatten(-1, (-1, 32)) * values[..., None]).flatten(-2)
    return TorchExperts.linear(self, x, matrix, bias, e)


@method("fused_moe", "input modified", *MOE)
def _(self, x, *arguments, **keywords):
    y = right.fused_moe(self, x, *arguments, **keywords)
    x.mul_(0.5)
    return y


@method("fused_moe", "weights repacked in place", *MOE)
def _(self, x, weights, ids, w1, *arguments, **keywords):
    y = right.fused_moe(self, x, weights, ids, w1, *arguments, **keywords)
    w1[0].copy_(w1[0].flip(-1))
    return y


# Codecs


def floor_scales(_self, amax, largest):
    exponent = torch.frexp(amax)[1] - 1 - (2 if largest == 6.0 else 8)
    return (torch.where(amax == 0, -127, exponent) + 127).clamp(0, 254).to(torch.uint8)


def mixed_scales(self, amax, largest):
    floor = floor_scales(self, amax, largest)
    ceil = TorchCodecs.block_scales(self, amax, largest)
    return torch.where(torch.arange(amax.shape[-1]) % 2 == 0, floor, ceil)


FLOOR = broken(right, block_scales=floor_scales)
mutant("scale rule floor under the name of ceil", "mxfp4_quantisation")(FLOOR)
mutant("MXFP8 scale rule floor under the name of ceil", "mxfp8_quantisation")(FLOOR)


def never_written(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, parts))


mutant("an empty kernel: outputs never written", "mxfp4_quantisation", "mxfp8_quantisation")(
    broken(right, mxfp4_quantize=After(never_written), mxfp8_quantize=After(never_written))
)


mutant("two scale rules mixed, none declared", "mxfp4_quantisation")(
    broken(right, block_scales=mixed_scales, mxfp4_scale_rule=None)
)

# MXFP8 x MXFP4 experts

W4A8 = [
    Mutant(f"W4A8: {wrong.name}", lambda wrong=wrong: EmulatedProvider(wrong.make()), wrong.groups)
    for wrong in w4a8_mutants.CATALOGUE.mutants
]
FAST_BUILD = [Mutant(name, *of) for name, of in fast_build_mutants.MUTANTS.items()]
EVERY = (*MUTANTS, *attention_mutants.CATALOGUE.mutants, *W4A8, *FAST_BUILD)


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


def kill(wrong: Mutant) -> Kill | None:
    return next((k for group in wrong.groups if (k := first_kill(wrong.make(), group))), None)


def table() -> str:
    """Return the table of all mutants in Markdown."""
    killed = {
        wrong.name: [k for g in wrong.groups if (k := first_kill(wrong.make(), g))]
        for wrong in EVERY
    }
    milder = {name: why for name, (_, why) in w4a8_mutants.MILDER.items()}
    return catalogue_rows.page("kernel-mutants", killed=killed, milder=milder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/tables/kernel-mutants.md"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.output.write_text(table(), "utf-8")
