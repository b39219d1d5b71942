"""Wrong MXFP8 x MXFP4 experts: the emulation of FlashInfer's kernels with one thing broken.
`MILDER` are other roundings of the same mathematics that no tolerance tells apart: they are named,
with the reason, and not dropped."""

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


def method(
    operation: str, name: str, groups: tuple[str, ...] = ANY
) -> Callable[[Callable[..., object]], None]:

    def register(function: Callable[..., object]) -> None:
        mutant(name, groups)(type("OtherMethod", (Emulation,), {operation: function}))

    return register


def floor_bytes(amax: Tensor) -> Tensor:
    exponent = torch.frexp(amax)[1] - 1 - 8 + 127
    return torch.where(amax == 0, 0, exponent).clamp(0, 254).to(torch.uint8)


def shifted(pair: tuple[Tensor, Tensor], by: int) -> tuple[Tensor, Tensor]:
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

    class OnlyX(Emulation):
        def quantise_x(self, x):
            return cls().to_mxfp8(x)

    return OnlyX


def only_hidden(cls: type[Emulation]) -> type[Emulation]:

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


@method("quantise_x", "x: stored scale one too high")
def _(self, x):
    return shifted(Emulation.quantise_x(self, x), 1)


@method("quantise_hidden", "hidden: stored scale one too low")
def _(self, h):
    return shifted(Emulation.quantise_hidden(self, h), -1)


@method("quantise_x", "x: one scale for 64 elements")
def _(self, x):
    q, scales = Emulation.quantise_x(self, x)
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


@method("quantise_hidden", "hidden quantised from float32, not from bfloat16")
def _(self, h):
    return self.to_mxfp8(h)


@method("quantise_hidden", "hidden: scales of the neighbouring block")
def _(self, h):
    q, scales = Emulation.quantise_hidden(self, h)
    return q, scales.roll(1, -1)


@method("written", "the first product kept in float32")
def _(self, t):
    return t


@method("written", "the first product written in float16")
def _(self, t):
    return t.half().float()


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


@method("block_scale_interleave", "weights: scales not in tiles")
def _(self, unswizzled_sf):
    return unswizzled_sf.flatten()


@method("source_scales", "x: scales read in tiles of 8 by 4")
def _(self, input_sf, rows, blocks):
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
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
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    within = self.offsets(rows, blocks) % (TILE * 4)
    tiles = -(-rows // TILE)
    return input_sf[(block // 4 * tiles + row // TILE) * (TILE * 4) + within]


@method("source_scales", "x: from row 256 on, scales of the tile before")
def _(self, input_sf, rows, blocks):
    scales = Emulation.source_scales(self, input_sf, rows, blocks)
    scales[256:] = scales[128 : max(rows - 128, 128)]
    return scales


@method("source_scales", "x: wrong only for M >= 320: scales of neighbouring blocks")
def _(self, input_sf, rows, blocks):
    scales = Emulation.source_scales(self, input_sf, rows, blocks)
    return scales.roll(1, -1) if rows >= 320 else scales


@method("finalize", "wrong only for M >= 320: 2 % too large")
def _(self, results, *rest):
    return Emulation.finalize(self, results * (1.02 if len(results) >= 320 else 1.0), *rest)


@mutant("wrong only for M >= 320: hidden not quantised")
class _LargeMHidden(_HiddenPlain):
    def cutlass_fused_moe(self, x, *arguments, **keywords):
        self.large = len(x) >= 320
        return super().cutlass_fused_moe(x, *arguments, **keywords)

    def quantise_hidden(self, h):
        return super().quantise_hidden(h) if self.large else Emulation.quantise_hidden(self, h)


# Rows


@method("source_scales", "x: each row's scales are those of the row after it")
def _(self, input_sf, rows, blocks):
    return Emulation.source_scales(self, input_sf, rows, blocks).roll(-1, 0)


@method("source_scales", "x: the last row's scales are those of the padding")
def _(self, input_sf, rows, blocks):
    at = self.offsets(rows, blocks)
    if rows % TILE:
        at[-1] = self.offsets(rows + 1, blocks)[-1]
    return input_sf[at]


@method("expanded", "x: scales by the place in the expert, not by the token")
def _(self, q, scales, tokens):
    place = torch.arange(len(tokens))
    return q[tokens], scales[place]


@method("source_scales", "x: the scale of one token of another")
def _(self, input_sf, rows, blocks):
    scales = Emulation.source_scales(self, input_sf, rows, blocks)
    scales[rows // 2] = scales[0] if rows > 1 else scales[0].flip(0)
    return scales


@method("expanded", "hidden: an expert's last row read from the padding")
def _(self, q, scales, tokens):
    values, own = Emulation.expanded(self, q, scales, tokens)
    if len(tokens) % TILE:
        values = values.clone().view(torch.uint8)
        values[-1] = GARBAGE
        values = values.view(q.dtype)
    return values, own


@method("product", "padding rows added to the expert's last token")
def _(self, values, scales, matrix):
    y = Emulation.product(self, values, scales, matrix)
    if len(y) % TILE:
        padding = torch.full((1, matrix.shape[1]), 2.0**-9)
        y[-1:] += padding @ matrix.T
    return y


@method("expanded", "an expert's scales begin at the end of the one before, not at a tile")
def _(self, q, scales, tokens):
    values, own = Emulation.expanded(self, q, scales, tokens)
    return values, own.roll(len(tokens) % 32, 0)


# The constants


@method("constants", "alpha ignored", ACTIVATION)
def _(self, alpha, beta, limit, e):
    return torch.ones(()), beta[e], limit[e]


@method("constants", "alpha of one expert 1.5", ACTIVATION)
def _(self, alpha, beta, limit, e):
    return torch.tensor(1.5) if e == 3 else alpha[e], beta[e], limit[e]


@method("constants", "beta ignored")
def _(self, alpha, beta, limit, e):
    return alpha[e], torch.zeros(()), limit[e]


@method("constants", "limit ignored", ACTIVATION)
def _(self, alpha, beta, limit, e):
    return alpha[e], beta[e], torch.tensor(torch.inf)


@method("constants", "limit of one expert 6", ACTIVATION)
def _(self, alpha, beta, limit, e):
    return alpha[e], beta[e], torch.tensor(6.0) if e == 5 else limit[e]


@method("activation", "gate clamped from below too", ACTIVATION)
def _(self, gate, up, alpha, beta, limit):
    return Emulation.activation(self, gate.maximum(-limit / 4), up, alpha, beta, limit)


@method("activation", "gate and up in the other order")
def _(self, gate, up, alpha, beta, limit):
    return Emulation.activation(self, up, gate, alpha, beta, limit)


# Biases, weights, products


@method("with_bias", "gate-up bias of the next expert")
def _(self, t, biases, e):
    return Emulation.with_bias(self, t, None if biases is None else biases.roll(1, 0), e)


@method("with_bias", "gate-up bias of one expert dropped")
def _(self, t, biases, e):
    return t if e == 2 else Emulation.with_bias(self, t, biases, e)


@method("finalize", "down bias of the next expert")
def _(self, results, shares, ids, biases):
    rolled = None if biases is None else biases.roll(1, 0)
    return Emulation.finalize(self, results, shares, ids, rolled)


@method("finalize", "down bias not under the share")
def _(self, results, shares, ids, biases):
    y = Emulation.finalize(self, results, shares, ids, None)
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


@method("block_scale_interleave", "down: scales of the neighbouring block")
def _(self, unswizzled_sf):
    wide = unswizzled_sf.shape[1] > unswizzled_sf.shape[2] * BLOCK
    return Emulation.block_scale_interleave(
        self, unswizzled_sf if wide else unswizzled_sf.roll(1, -1).contiguous()
    )


@method("matrix", "nibble order")
def _(self, packed, scales, rows, columns):
    swapped = packed.contiguous().view(torch.uint8)
    swapped = ((swapped >> 4) | (swapped << 4)).view(torch.long)
    return Emulation.matrix(self, swapped, scales, rows, columns)


@method("product", "K's last part of 128 left out")
def _(self, values, scales, matrix):
    kept = matrix.clone()
    kept[:, -128:] = 0
    return Emulation.product(self, values, scales, kept)


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


@mutant("accumulators of bfloat16", ("moe_ranges", *ANY))
class _LowSums(_Accumulators):
    def low(self, sums):
        return sums.bfloat16().float()


@mutant("accumulators of 13 bits, as Ada and Hopper have them for FP8", ("moe_ranges", *ANY))
class _ShortSums(_Accumulators):
    def low(self, sums):
        return (sums.view(torch.int32) & ~0x3FF).view(torch.float32)


# Experts and outputs


@method("matrix", "swapped experts")
def _(self, packed, scales, rows, columns):
    return Emulation.matrix(self, packed, scales, rows, columns).roll(1, 0)


@method("finalize", "shares rounded to float8")
def _(self, results, shares, ids, biases):
    return Emulation.finalize(self, results, shares.to(torch.float8_e4m3fn).float(), ids, biases)


@method("finalize", "the last expert of each token left out")
def _(self, results, shares, ids, biases):
    shares = shares.clone()
    shares[:, -1] = 0
    return Emulation.finalize(self, results, shares, ids, biases)


@method("finalize", "the last row unwritten")
def _(self, results, shares, ids, biases):
    out = torch.empty(len(results), results.shape[2], dtype=torch.bfloat16)
    out[:-1] = Emulation.finalize(self, results, shares, ids, biases)[:-1]
    return out
