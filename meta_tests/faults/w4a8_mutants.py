"""Wrong MXFP8 x MXFP4 experts: the emulation of FlashInfer's kernels with one injected fault.

`MILDER` contains other roundings of the same mathematics that no tolerance distinguishes. They are
listed with the reason, and not dropped."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meta_tests.fakes.flashinfer_emulation import BLOCK, GARBAGE, TILE, Emulation, times_scales
from meta_tests.faults.mutants import After, Before, Catalogue

ANY = ("moe_token_counts", "moe_routing", "moe_block_scales", "moe_activation")
SCALES = ("moe_block_scales", *ANY)
ACTIVATION = ("moe_activation", *ANY)


right = Emulation
CATALOGUE = Catalogue(Emulation, *ANY)
mutant = CATALOGUE.mutant
method = CATALOGUE.method
#: Mutants that no tolerance distinguishes, with the reasons. The keys are their names.
MILDER: dict[str, tuple[type[Emulation], str]] = {}


def floor_bytes(amax: Tensor) -> Tensor:
    exponent = torch.frexp(amax)[1] - 1 - 8 + 127
    return torch.where(amax == 0, 0, exponent).clamp(0, 254).to(torch.uint8)


def shifted(pair: tuple[Tensor, Tensor], by: int) -> tuple[Tensor, Tensor]:
    return pair[0], (pair[1].int() + by).clamp(0, 254).to(torch.uint8)


class _Floor(Emulation):
    def scale_bytes(self, amax):
        return floor_bytes(amax)


class _Coarser(Emulation):
    """Quantise with scales that are one exponent higher, so that elements are half as large."""

    def scale_bytes(self, amax):
        return shifted((amax, super().scale_bytes(amax)), 1)[1]


class _Finer(Emulation):
    def scale_bytes(self, amax):
        return shifted((amax, super().scale_bytes(amax)), -1)[1]


class _Cut(Emulation):
    """Truncate elements instead of rounding them, so that they are half a step smaller on
    average."""

    def to_mxfp8(self, x):
        return super().to_mxfp8((x.float() * (1 - 2.0**-5)).bfloat16())


def only(operand: str, cls: type[Emulation]) -> type[Emulation]:
    """Apply the fault of `cls` only to one operand."""
    quantise = {f"quantise_{operand}": lambda _self, t: cls().to_mxfp8(t.bfloat16())}
    return type("Only", (Emulation,), quantise)


# The quantisations

for operand in ("x", "hidden"):
    mutant(f"{operand} quantised by the floor rule", *ACTIVATION)(only(operand, _Floor))
    mutant(f"{operand} quantised one exponent too fine: saturates")(only(operand, _Finer))
    mutant(f"{operand} cut off, not rounded")(only(operand, _Cut))
    MILDER[f"{operand} quantised one exponent too coarse"] = (
        only(operand, _Coarser),
        "E4M3 is a floating-point format: all but a block's smallest elements stay the same. "
        "`mxfp8_quantize` on its own is held to the rule",
    )


@method("quantise_x", "x: one scale for 64 elements")
def _(self, x):
    q, scales = Emulation.quantise_x(self, x)
    pairs = scales.unflatten(-1, (-1, 2)).amax(-1, keepdim=True)
    return q, pairs.expand(-1, -1, 2).flatten(-2)


class _Plain(Emulation):
    """Do not quantise values; all scales are 1."""

    def plain(self, values):
        return values, torch.full((len(values), values.shape[1] // BLOCK), 127, dtype=torch.uint8)

    def expanded(self, q, scales, tokens):
        return q[tokens], scales[tokens]


@mutant("hidden not quantised: the second quantisation skipped")
class _HiddenPlain(_Plain):
    def quantise_hidden(self, h):
        return self.plain(h.bfloat16())


@mutant("the first product's bias added before it is rounded")
class _BiasFirst(Emulation):
    def written(self, t):
        return t

    def with_bias(self, t, biases, e):
        return super().with_bias(t, biases, e).bfloat16().float()


# Scales in tiles


@method("mxfp8_quantize", "x: scales not in tiles")
def _(self, x, **keywords):
    flat = Emulation.mxfp8_quantize(self, x, **keywords)[1]
    q, scales = self.quantise_x(x)
    flat[: scales.numel()] = scales.flatten()
    return q, flat


@method("source_scales", "x: scales read in tiles of 8 by 4")
def _(self, input_sf, rows, blocks):
    row = torch.arange(rows)[:, None]
    block = torch.arange(blocks)[None, :]
    at = (row // 8 * (blocks // 4) + block // 4) * 32 + row % 8 * 4 + block % 4
    return input_sf[at]


@method("source_scales", "x: the last partial tile's scales read as if not in tiles")
def _(self, input_sf, rows, blocks):
    at = self.offsets(rows, blocks)
    last = rows // TILE * TILE
    rest = torch.arange((rows - last) * blocks).view(-1, blocks)
    at[last:] = last * blocks + rest
    return input_sf[at]


@method("source_scales", "x: tiles of scales in the other order")
def _(self, input_sf, rows, blocks):
    row = torch.arange(rows)[:, None]
    block = torch.arange(blocks)[None, :]
    within = self.offsets(rows, blocks) % (TILE * 4)
    tiles = -(-rows // TILE)
    return input_sf[(block // 4 * tiles + row // TILE) * (TILE * 4) + within]


@method("source_scales", "x: from row 256 on, scales of the tile before")
def _(self, input_sf, rows, blocks):
    scales = Emulation.source_scales(self, input_sf, rows, blocks)
    scales[256:] = scales[128 : max(rows - 128, 128)]
    return scales


@mutant("wrong only for M >= 320: hidden not quantised")
class _LargeMHidden(_HiddenPlain):
    def cutlass_fused_moe(self, x, *arguments, **keywords):
        self.large = len(x) >= 320
        return super().cutlass_fused_moe(x, *arguments, **keywords)

    def quantise_hidden(self, h):
        return super().quantise_hidden(h) if self.large else Emulation.quantise_hidden(self, h)


# Rows


@method("source_scales", "x: the last row's scales are those of the padding")
def _(self, input_sf, rows, blocks):
    at = self.offsets(rows, blocks)
    if rows % TILE:
        at[-1] = self.offsets(rows + 1, blocks)[-1]
    return input_sf[at]


@method("source_scales", "x: the scale of one token of another")
def _(self, input_sf, rows, blocks):
    scales = Emulation.source_scales(self, input_sf, rows, blocks)
    scales[rows // 2] = scales[0] if rows > 1 else scales[0].flip(0)
    return scales


@method("expanded", "hidden: an expert's last row read from the padding")
def _(self, q, scales, tokens):
    values, rows = Emulation.expanded(self, q, scales, tokens)
    if len(tokens) % TILE:
        values = values.clone().view(torch.uint8)
        values[-1] = GARBAGE
        values = values.view(q.dtype)
    return values, rows


@method("product", "padding rows added to the expert's last token")
def _(self, values, scales, matrix):
    y = Emulation.product(self, values, scales, matrix)
    if len(y) % TILE:
        padding = torch.full((1, matrix.shape[1]), 2.0**-9)
        y[-1:] += padding @ matrix.T
    return y


# Biases and weights


@method("finalize", "down bias not under the share")
def _(self, results, shares, ids, biases):
    y = Emulation.finalize(self, results, shares, ids, None)
    return y if biases is None else (y.float() + biases[ids.long()].float().sum(1)).bfloat16()


class _WrongScale(Emulation):
    """Multiply one block scale of a matrix by a wrong factor."""

    first = False
    by = 1

    def block_scale_interleave(self, unswizzled_sf):
        scales = unswizzled_sf.clone()
        if (scales.shape[1] > scales.shape[2] * BLOCK) == self.first:
            scales[1 % len(scales), 7, 2] += self.by
        return super().block_scale_interleave(scales)


for first, by in ((True, 1), (True, -1), (False, 1), (False, -1)):
    name = f"one block's scale {by:+} in {'gate-up' if first else 'down'}"
    mutant(name, *SCALES)(type("OneScale", (_WrongScale,), {"first": first, "by": by}))


@method("matrix", "nibble order")
def _(self, packed, scales, rows, columns):
    swapped = packed.contiguous().view(torch.uint8)
    swapped = ((swapped >> 4) | (swapped << 4)).view(torch.long)
    return Emulation.matrix(self, swapped, scales, rows, columns)


# Experts and outputs


@method("finalize", "the last row unwritten")
def _(self, results, shares, ids, biases):
    out = torch.empty(len(results), results.shape[2], dtype=torch.bfloat16)
    out[:-1] = Emulation.finalize(self, results, shares, ids, biases)[:-1]
    return out


# Faults that are a single expression


def accumulated(low: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a product that adds 32 terms at a time, and rounds the sum after each addition."""

    def product(_self: Emulation, values: Tensor, scales: Tensor, matrix: Tensor) -> Tensor:
        wide = times_scales(values.float(), scales)
        sums = torch.zeros(len(wide), len(matrix))
        for k in range(0, wide.shape[1], BLOCK):
            sums = low(sums + wide[:, k : k + BLOCK] @ matrix[:, k : k + BLOCK].T)
        return sums

    return product


def next_block(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0], pair[1].roll(1, -1)


def next_expert(biases: Tensor | None) -> Tensor | None:
    return None if biases is None else biases.roll(1, 0)


def down_rolled(scales: Tensor) -> Tensor:
    is_down = scales.shape[1] <= scales.shape[2] * BLOCK
    return scales.roll(1, -1).contiguous() if is_down else scales


def without_last(t: Tensor, columns: int) -> Tensor:
    t = t.clone()
    t[:, -columns:] = 0
    return t


RANGES = ("moe_ranges", *ANY)
#: The mutants of a method: their names and the functions that replace it. A key contains the
#: method's name, and then the groups of cases that must detect the mutants, if not `ANY`.
METHODS: dict[tuple[str, ...], dict[str, Any]] = {
    ("quantise_x",): {"x: stored scale one too high": After(lambda pair: shifted(pair, 1))},
    ("quantise_hidden",): {
        "hidden: stored scale one too low": After(lambda pair: shifted(pair, -1)),
        "hidden quantised from float32, not from bfloat16": lambda self, h: self.to_mxfp8(h),
        "hidden: scales of the neighbouring block": After(next_block),
    },
    ("written",): {
        "the first product kept in float32": lambda self, t: t,
        "the first product written in float16": lambda self, t: t.half().float(),
    },
    ("block_scale_interleave",): {
        "weights: scales not in tiles": lambda self, unswizzled_sf: unswizzled_sf.flatten(),
        "down: scales of the neighbouring block": Before(down_rolled),
    },
    ("source_scales",): {
        "x: wrong only for M >= 320: scales of neighbouring blocks": lambda self, sf, rows, *of: (
            right.source_scales(self, sf, rows, *of).roll(int(rows >= 320), -1)
        ),
        "x: each row's scales are those of the row after it": After(lambda s: s.roll(-1, 0)),
    },
    ("expanded",): {
        "x: scales by the place in the expert, not by the token": lambda self, q, scales, tokens: (
            (q[tokens], scales[torch.arange(len(tokens))])
        ),
        "an expert's scales begin at the end of the one before, not at a tile": (
            lambda self, q, scales, tokens: (q[tokens], scales[tokens].roll(len(tokens) % 32, 0))
        ),
    },
    ("constants", *ACTIVATION): {
        "alpha ignored": lambda self, alpha, beta, limit, e: (torch.ones(()), beta[e], limit[e]),
        "alpha of one expert 1.5": lambda self, alpha, beta, limit, e: (
            (torch.tensor(1.5) if e == 3 else alpha[e], beta[e], limit[e])
        ),
        "limit ignored": lambda self, alpha, beta, limit, e: (
            (alpha[e], beta[e], torch.tensor(torch.inf))
        ),
        "limit of one expert 6": lambda self, alpha, beta, limit, e: (
            (alpha[e], beta[e], torch.tensor(6.0) if e == 5 else limit[e])
        ),
    },
    ("constants",): {
        "beta ignored": lambda self, alpha, beta, limit, e: (alpha[e], torch.zeros(()), limit[e])
    },
    ("activation", *ACTIVATION): {
        "gate clamped from below too": Before(
            lambda gate, *rest: (gate.maximum(-rest[-1] / 4), *rest)  # a quarter of the limit
        )
    },
    ("activation",): {
        "gate and up in the other order": Before(lambda gate, up, *rest: (up, gate, *rest))
    },
    ("with_bias",): {
        "gate-up bias of the next expert": Before(lambda t, biases, e: (t, next_expert(biases), e)),
        "gate-up bias of one expert dropped": lambda self, t, biases, e: (
            t if e == 2 else right.with_bias(self, t, biases, e)
        ),
    },
    ("finalize",): {
        "wrong only for M >= 320: 2 % too large": Before(
            lambda results, *rest: (results * (1.02 if len(results) >= 320 else 1.0), *rest)
        ),
        "down bias of the next expert": Before(
            lambda results, shares, ids, biases: (results, shares, ids, next_expert(biases))
        ),
        "shares rounded to float8": Before(
            lambda results, shares, *rest: (results, shares.to(torch.float8_e4m3fn).float(), *rest)
        ),
        "the last expert of each token left out": Before(
            lambda results, shares, *rest: (results, without_last(shares, 1), *rest)
        ),
    },
    ("matrix",): {"swapped experts": After(lambda matrix: matrix.roll(1, 0))},
    ("product",): {
        "K's last part of 128 left out": Before(
            lambda values, scales, matrix: (values, scales, without_last(matrix, 128))
        )
    },
    ("product", *RANGES): {
        "accumulators of bfloat16": accumulated(lambda sums: sums.bfloat16().float()),
        "accumulators of 13 bits, as Ada and Hopper have them for FP8": accumulated(
            lambda sums: (sums.view(torch.int32) & ~0x3FF).view(torch.float32)
        ),
    },
}
CATALOGUE.add_all(METHODS)
