"""Wrong MXFP8 x MXFP4 experts: the emulation of FlashInfer's kernels with one thing broken.

`MILDER` are other roundings of the same mathematics that no tolerance tells apart: they are named,
with the reason, and not dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from flashinfer_emulation import BLOCK, GARBAGE, TILE, Emulation, times_scales
from torch import Tensor

ANY = ("moe_token_counts", "moe_routing", "moe_block_scales", "moe_activation")
SCALES = ("moe_block_scales", *ANY)
ACTIVATION = ("moe_activation", *ANY)


@dataclass(frozen=True)
class Broken:
    """A wrong emulation, and the groups of cases of which one has to notice."""

    make: Callable[[], Emulation]
    groups: tuple[str, ...] = ANY


MUTANTS: dict[str, Broken] = {}
MILDER: dict[str, tuple[Broken, str]] = {}


def mutant(
    name: str, groups: tuple[str, ...] = ANY
) -> Callable[[type[Emulation]], type[Emulation]]:
    def register(cls: type[Emulation]) -> type[Emulation]:
        MUTANTS[name] = Broken(cls, groups)
        return cls

    return register


def milder(name: str, why: str) -> Callable[[type[Emulation]], type[Emulation]]:
    def register(cls: type[Emulation]) -> type[Emulation]:
        MILDER[name] = Broken(cls), why
        return cls

    return register


def floor_bytes(amax: Tensor) -> Tensor:
    """The rule of the OCP specification: magnitudes above 448 saturate."""
    exponent = torch.frexp(amax)[1] - 1 - 8 + 127
    return torch.where(amax == 0, 0, exponent).clamp(0, 254).to(torch.uint8)


def shifted(pair: tuple[Tensor, Tensor], by: int) -> tuple[Tensor, Tensor]:
    """The same elements under scales of another exponent."""
    return pair[0], (pair[1].int() + by).clamp(0, 254).to(torch.uint8)


class _Floor(Emulation):
    def scale_bytes(self, amax):
        return floor_bytes(amax)


class _Coarser(Emulation):
    """Scales one exponent higher, and the elements half as large."""

    def scale_bytes(self, amax):
        return shifted((amax, super().scale_bytes(amax)), 1)[1]


class _Finer(Emulation):
    def scale_bytes(self, amax):
        return shifted((amax, super().scale_bytes(amax)), -1)[1]


class _Cut(Emulation):
    """Elements cut off, not rounded: half a step smaller."""

    def to_mxfp8(self, x):
        return super().to_mxfp8((x.float() * (1 - 2.0**-5)).bfloat16())


def only_x(cls: type[Emulation]) -> type[Emulation]:
    """Broken in the first quantisation, right in the second."""

    class OnlyX(Emulation):
        def quantise_x(self, x):
            return cls().to_mxfp8(x)

    return OnlyX


def only_hidden(cls: type[Emulation]) -> type[Emulation]:
    """The other way round."""

    class OnlyHidden(Emulation):
        def quantise_hidden(self, h):
            return cls().to_mxfp8(h.bfloat16())

    return OnlyHidden


# The quantisations

for place, only in (("x", only_x), ("hidden", only_hidden)):
    mutant(f"{place} quantised by the floor rule", ACTIVATION)(only(_Floor))
    mutant(f"{place} quantised one exponent too fine: saturates")(only(_Finer))
    mutant(f"{place} cut off, not rounded")(only(_Cut))
    milder(
        f"{place} quantised one exponent too coarse",
        "E4M3 is a floating-point format: all but a block's smallest elements stay the same. "
        "`mxfp8_quantize` on its own is held to the rule",
    )(only(_Coarser))


@mutant("x: stored scale one too high")
class _StoredHigh(Emulation):
    def quantise_x(self, x):
        return shifted(super().quantise_x(x), 1)


@mutant("hidden: stored scale one too low")
class _StoredLow(Emulation):
    def quantise_hidden(self, h):
        return shifted(super().quantise_hidden(h), -1)


@mutant("x: one scale for 64 elements")
class _Blocks64(Emulation):
    def quantise_x(self, x):
        q, scales = super().quantise_x(x)
        pairs = scales.unflatten(-1, (-1, 2)).amax(-1, keepdim=True)
        return q, pairs.expand(-1, -1, 2).flatten(-2)


class _Plain(Emulation):
    """Values that are not quantised, under scales of 1."""

    def plain(self, values):
        return values, torch.full((len(values), values.shape[1] // BLOCK), 127, dtype=torch.uint8)

    def expanded(self, q, scales, tokens):
        return q[tokens], scales[tokens]


@mutant("hidden not quantised: the second quantisation skipped")
class _HiddenPlain(_Plain):
    def quantise_hidden(self, h):
        return self.plain(h.bfloat16())


@mutant("hidden quantised from float32, not from bfloat16")
class _HiddenFloat(Emulation):
    def quantise_hidden(self, h):
        return self.to_mxfp8(h)


@mutant("hidden: scales of the neighbouring block")
class _HiddenNextBlock(Emulation):
    def quantise_hidden(self, h):
        q, scales = super().quantise_hidden(h)
        return q, scales.roll(1, -1)


@mutant("the first product kept in float32")
class _FloatSums(Emulation):
    def written(self, t):
        return t


@mutant("the first product written in float16")
class _HalfSums(Emulation):
    def written(self, t):
        return t.half().float()


@mutant("the first product's bias added before it is rounded")
class _BiasFirst(Emulation):
    def written(self, t):
        return t

    def with_bias(self, t, biases, e):
        return super().with_bias(t, biases, e).bfloat16().float()


# Scales in tiles


@mutant("x: scales not in tiles")
class _Linear(Emulation):
    def mxfp8_quantize(self, x, **keywords):
        flat = super().mxfp8_quantize(x, **keywords)[1]
        q, scales = self.quantise_x(x)
        flat[: scales.numel()] = scales.flatten()
        return q, flat


@mutant("weights: scales not in tiles")
class _LinearWeights(Emulation):
    def block_scale_interleave(self, unswizzled_sf):
        return unswizzled_sf.flatten()


@mutant("x: scales read in tiles of 8 by 4")
class _Tiles8(Emulation):
    def source_scales(self, input_sf, rows, blocks):
        row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
        at = (row // 8 * (blocks // 4) + block // 4) * 32 + row % 8 * 4 + block % 4
        return input_sf[at]


@mutant("x: the last partial tile's scales read as if not in tiles")
class _LastRows(Emulation):
    def source_scales(self, input_sf, rows, blocks):
        at = self.offsets(rows, blocks)
        last = rows // TILE * TILE
        rest = torch.arange((rows - last) * blocks).view(-1, blocks)
        at[last:] = last * blocks + rest
        return input_sf[at]


@mutant("x: tiles of scales in the other order")
class _TilesAcross(Emulation):
    def source_scales(self, input_sf, rows, blocks):
        row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
        within = self.offsets(rows, blocks) % (TILE * 4)
        tiles = -(-rows // TILE)
        return input_sf[(block // 4 * tiles + row // TILE) * (TILE * 4) + within]


@mutant("x: from row 256 on, scales of the tile before")
class _TileBefore(Emulation):
    def source_scales(self, input_sf, rows, blocks):
        scales = super().source_scales(input_sf, rows, blocks)
        scales[256:] = scales[128 : max(rows - 128, 128)]
        return scales


@mutant("x: wrong only for M >= 320: scales of neighbouring blocks")
class _LargeM(Emulation):
    def source_scales(self, input_sf, rows, blocks):
        scales = super().source_scales(input_sf, rows, blocks)
        return scales.roll(1, -1) if rows >= 320 else scales


@mutant("wrong only for M >= 320: 2 % too large")
class _LargeMOutput(Emulation):
    def finalize(self, results, *rest):
        return super().finalize(results * (1.02 if len(results) >= 320 else 1.0), *rest)


@mutant("wrong only for M >= 320: hidden not quantised")
class _LargeMHidden(_HiddenPlain):
    def cutlass_fused_moe(self, x, *arguments, **keywords):
        self.large = len(x) >= 320
        return super().cutlass_fused_moe(x, *arguments, **keywords)

    def quantise_hidden(self, h):
        return super().quantise_hidden(h) if self.large else Emulation.quantise_hidden(self, h)


# Rows


@mutant("x: each row's scales are those of the row after it")
class _NextRow(Emulation):
    def source_scales(self, input_sf, rows, blocks):
        return super().source_scales(input_sf, rows, blocks).roll(-1, 0)


@mutant("x: the last row's scales are those of the padding")
class _PaddingScale(Emulation):
    def source_scales(self, input_sf, rows, blocks):
        at = self.offsets(rows, blocks)
        if rows % TILE:
            at[-1] = self.offsets(rows + 1, blocks)[-1]
        return input_sf[at]


@mutant("x: scales by the place in the expert, not by the token")
class _UnsortedScales(Emulation):
    def expanded(self, q, scales, tokens):
        place = torch.arange(len(tokens))
        return q[tokens], scales[place]


@mutant("x: the scale of one token of another")
class _OneToken(Emulation):
    def source_scales(self, input_sf, rows, blocks):
        scales = super().source_scales(input_sf, rows, blocks)
        scales[rows // 2] = scales[0] if rows > 1 else scales[0].flip(0)
        return scales


@mutant("hidden: an expert's last row read from the padding")
class _PaddingRow(Emulation):
    def expanded(self, q, scales, tokens):
        values, own = super().expanded(q, scales, tokens)
        if len(tokens) % TILE:
            values = values.clone().view(torch.uint8)
            values[-1] = GARBAGE
            values = values.view(q.dtype)
        return values, own


@mutant("padding rows added to the expert's last token")
class _PaddingAdded(Emulation):
    def product(self, values, scales, matrix):
        y = super().product(values, scales, matrix)
        if len(y) % TILE:
            padding = torch.full((1, matrix.shape[1]), 2.0**-9)
            y[-1:] += padding @ matrix.T
        return y


@mutant("an expert's scales begin at the end of the one before, not at a tile")
class _Unaligned(Emulation):
    def expanded(self, q, scales, tokens):
        values, own = super().expanded(q, scales, tokens)
        return values, own.roll(len(tokens) % 32, 0)


# The constants


@mutant("alpha ignored", ACTIVATION)
class _Alpha1(Emulation):
    def constants(self, alpha, beta, limit, e):
        return torch.ones(()), beta[e], limit[e]


@mutant("alpha of one expert 1.5", ACTIVATION)
class _OneAlpha(Emulation):
    def constants(self, alpha, beta, limit, e):
        return torch.tensor(1.5) if e == 3 else alpha[e], beta[e], limit[e]


@mutant("beta ignored")
class _Beta0(Emulation):
    def constants(self, alpha, beta, limit, e):
        return alpha[e], torch.zeros(()), limit[e]


@mutant("limit ignored", ACTIVATION)
class _NoLimit(Emulation):
    def constants(self, alpha, beta, limit, e):
        return alpha[e], beta[e], torch.tensor(torch.inf)


@mutant("limit of one expert 6", ACTIVATION)
class _OneLimit(Emulation):
    def constants(self, alpha, beta, limit, e):
        return alpha[e], beta[e], torch.tensor(6.0) if e == 5 else limit[e]


@mutant("gate clamped from below too", ACTIVATION)
class _GateBothWays(Emulation):
    def activation(self, gate, up, alpha, beta, limit):
        return super().activation(gate.maximum(-limit / 4), up, alpha, beta, limit)


@mutant("gate and up in the other order")
class _OtherOrder(Emulation):
    def activation(self, gate, up, alpha, beta, limit):
        return super().activation(up, gate, alpha, beta, limit)


# Biases, weights, products


@mutant("gate-up bias of the next expert")
class _NextBias(Emulation):
    def with_bias(self, t, biases, e):
        return super().with_bias(t, None if biases is None else biases.roll(1, 0), e)


@mutant("gate-up bias of one expert dropped")
class _OneBias(Emulation):
    def with_bias(self, t, biases, e):
        return t if e == 2 else super().with_bias(t, biases, e)


@mutant("down bias of the next expert")
class _NextDownBias(Emulation):
    def finalize(self, results, shares, ids, biases):
        rolled = None if biases is None else biases.roll(1, 0)
        return super().finalize(results, shares, ids, rolled)


@mutant("down bias not under the share")
class _BareBias(Emulation):
    def finalize(self, results, shares, ids, biases):
        y = super().finalize(results, shares, ids, None)
        return y if biases is None else (y.float() + biases[ids.long()].float().sum(1)).bfloat16()


class _WrongScale(Emulation):
    """One block's scale of a matrix, wrong by so much."""

    first = False
    by = 1

    def block_scale_interleave(self, unswizzled_sf):
        scales = unswizzled_sf.clone()
        if (scales.shape[1] > scales.shape[2] * BLOCK) == self.first:
            scales[1 % len(scales), 7, 2] += self.by
        return super().block_scale_interleave(scales)


for first, by in ((True, 1), (True, -1), (False, 1), (False, -1)):
    name = f"one block's scale {by:+} in {'gate-up' if first else 'down'}"
    mutant(name, SCALES)(type("OneScale", (_WrongScale,), {"first": first, "by": by}))


@mutant("down: scales of the neighbouring block")
class _NextBlock(Emulation):
    def block_scale_interleave(self, unswizzled_sf):
        wide = unswizzled_sf.shape[1] > unswizzled_sf.shape[2] * BLOCK
        return super().block_scale_interleave(
            unswizzled_sf if wide else unswizzled_sf.roll(1, -1).contiguous()
        )


@mutant("nibble order")
class _Nibbles(Emulation):
    def matrix(self, packed, scales, rows, columns):
        swapped = packed.contiguous().view(torch.uint8)
        swapped = ((swapped >> 4) | (swapped << 4)).view(torch.long)
        return super().matrix(swapped, scales, rows, columns)


@mutant("K's last part of 128 left out")
class _Tail(Emulation):
    def product(self, values, scales, matrix):
        kept = matrix.clone()
        kept[:, -128:] = 0
        return super().product(values, scales, kept)


class _Accumulators(Emulation):
    """Sums of 32 products at a time, rounded after each step."""

    def low(self, sums):
        raise NotImplementedError

    def product(self, values, scales, matrix):
        wide = times_scales(values.float(), scales)
        sums = torch.zeros(len(wide), len(matrix))
        for k in range(0, wide.shape[1], BLOCK):
            sums = self.low(sums + wide[:, k : k + BLOCK] @ matrix[:, k : k + BLOCK].T)
        return sums


@mutant("accumulators of bfloat16")
class _LowSums(_Accumulators):
    def low(self, sums):
        return sums.bfloat16().float()


@mutant("accumulators of 13 bits, as Ada and Hopper have them for FP8")
class _ShortSums(_Accumulators):
    def low(self, sums):
        return (sums.view(torch.int32) & ~0x3FF).view(torch.float32)


# Experts and outputs


@mutant("swapped experts")
class _Swapped(Emulation):
    def matrix(self, packed, scales, rows, columns):
        return super().matrix(packed, scales, rows, columns).roll(1, 0)


@mutant("shares rounded to float8")
class _CoarseShares(Emulation):
    def finalize(self, results, shares, ids, biases):
        return super().finalize(results, shares.to(torch.float8_e4m3fn).float(), ids, biases)


@mutant("the last expert of each token left out")
class _LastExpert(Emulation):
    def finalize(self, results, shares, ids, biases):
        shares = shares.clone()
        shares[:, -1] = 0
        return super().finalize(results, shares, ids, biases)


@mutant("the last row unwritten")
class _Unwritten(Emulation):
    def finalize(self, results, shares, ids, biases):
        out = torch.empty(len(results), results.shape[2], dtype=torch.bfloat16)
        out[:-1] = super().finalize(results, shares, ids, biases)[:-1]
        return out
