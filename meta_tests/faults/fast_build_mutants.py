"""Wrong kernels of builds that round more than the checkpoint. `kernel_mutants` registers them.

They are dense MXFP4 layers, attention of an FP8 cache, and experts with E4M3 activations and scales
of one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meta_tests.fakes.flashinfer_emulation import (
    BLOCK,
    EmulatedProvider,
    Emulation,
    Identity,
    IdentityProvider,
)
from meta_tests.faults.mutants import After, Before, broken
from meta_tests.two_steps import in_two_steps
from sm121.kernels.flashinfer_experts import IdentityExperts
from sm121.kernels.torch_experts import TorchExperts
from sm121.kernels.torch_provider import TorchProvider

DENSE = ("mxfp4_linear",)
FP8 = ("prefill_fp8", "decode_fp8")
RANGES = ("moe_ranges", "moe_activation")

#: For each mutant, the function that creates the provider, and the groups of which one must detect
#: it.
MUTANTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {}


class W4a4Experts(TorchExperts):
    def linear_input(self, x: Tensor) -> Tensor:
        return self.codecs.mxfp4_dequantize(*self.codecs.mxfp4_quantize(x))


class W4a4(TorchProvider):
    """The provider `torch` with MXFP4 activations in dense layers."""

    linear_activations = "mxfp4"
    experts_class = W4a4Experts


def wrong(name: str, of: type, groups: tuple[str, ...], **methods: Any) -> None:
    MUTANTS[name] = broken(of, **methods), groups


def emulated(name: str, of: type, provider: type, groups: tuple[str, ...], **methods: Any) -> None:
    emulation = broken(of, **methods)
    MUTANTS[name] = (lambda: provider(emulation())), groups


# Dense layers


def on_weight(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Before:
    return Before(lambda x, weight: (x, change(*weight)))


def one_scale(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    scales = scales.clone()
    scales[-1, 3] += 1
    return codes, scales


def partial_tile(y: Tensor) -> Tensor:
    y[:, y.shape[1] // 128 * 128 :] = 0
    return y


def tile_column(y: Tensor) -> Tensor:
    y[:, 127::128] = y[:, 126::128][:, : y[:, 127::128].shape[1]]
    return y


def for_rows(count: int) -> After:
    return After(lambda y: y * 1.01 if len(y) == count else y)


@in_two_steps
def in_bfloat16(_self: Any, x: Tensor, matrix: Tensor, step: int) -> Tensor:
    sums = torch.zeros(len(x), len(matrix))
    for k in range(0, x.shape[1], step):
        sums = (sums + x[:, k : k + step] @ matrix[:, k : k + step].T).bfloat16().float()
    return sums


@in_two_steps
def scales_by(
    _self: Any, amax: Tensor, _largest: float, largest_exponent: Callable[[Tensor], Tensor]
) -> Tensor:
    exponent = largest_exponent(amax) + 127 - 2
    return torch.where(amax == 0, 0, exponent).clamp(0, 254).to(torch.uint8)


FLOOR = scales_by(lambda amax: torch.frexp(amax)[1] - 1)
EVEN = scales_by(lambda amax: torch.frexp(amax * 8 / 7)[1] - 1)

for form, of in (("bfloat16", TorchProvider), ("MXFP4", W4a4)):
    for fault, methods in {
        "scales one block off": {"mxfp4_linear": on_weight(lambda c, s: (c, s.roll(1, -1)))},
        "one block's scale + 1": {"mxfp4_linear": on_weight(one_scale)},
        "last half block of 2880 dropped": {
            "dense": Before(lambda x, matrix: (x, partial_tile(matrix.clone())))
        },
        "each tile's last column of its neighbour": {"dense": After(tile_column)},
        "the last partial tile's columns zero": {"dense": After(partial_tile)},
        "M = 1 wrong alone": {"dense": for_rows(1)},
        "M = 2 wrong alone": {"dense": for_rows(2)},
        "M = 16 wrong alone": {"dense": for_rows(16)},
        "sums in bfloat16, of 32": {"dense": in_bfloat16(32)},
        "sums in bfloat16, of 128": {"dense": in_bfloat16(128)},
        "sums in bfloat16, of 1024": {"dense": in_bfloat16(1024)},
    }.items():
        wrong(f"MXFP4 linear, {form} activations: {fault}", of, DENSE, **methods)
for fault, rule in (("floor", FLOOR), ("even", EVEN)):
    wrong(f"MXFP4 linear: scales by {fault} for ceil", W4a4, DENSE, block_scales=rule)
    other = {"floor": "vllm-rne", "even": "ocp-floor"}[fault]
    methods = {"block_scales": rule, "mxfp4_scale_rule": other}
    wrong(f"MXFP4 linear: scales by {fault} for {other}", W4a4, DENSE, **methods)
for fault, of, other in (
    ("bfloat16 where MXFP4 is promised", W4a4, TorchProvider),
    ("MXFP4 where bfloat16 is promised", TorchProvider, W4a4),
):
    name = f"MXFP4 linear: activations in {fault}"
    wrong(name, of, DENSE, experts_class=other.experts_class)


def not_in_tiles(self: Emulation, a: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    codes, tiles = Emulation.mxfp4_quantize(self, a, backend)
    scales = self.quantiser.mxfp4_quantize(a)[1].flatten()
    return codes, torch.cat((scales, tiles[len(scales) :]))


for fault, methods in {
    "scales of x not in tiles": {"mxfp4_quantize": not_in_tiles},
    "sums in bfloat16": {"sums": in_bfloat16(128)},
}.items():
    emulated(f"mm_fp4: {fault}", Emulation, EmulatedProvider, DENSE, **methods)

# An FP8 cache


def on_cache(change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Apply `change` to values in float32, and then round them to E4M3."""
    return {"cached": lambda _self, values: change(values.float()).to(values.dtype)}


def near(values: Tensor, most: float = 448.0) -> Tensor:
    return values.clamp(-most, most).to(torch.float8_e4m3fn).float()


def cut(values: Tensor) -> Tensor:
    return near((values.view(torch.int32) & ~0xFFFFF).view(torch.float32))


#: Changes of float32 values that should be rounded to the nearest value of E4M3.
ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "flushed below E4M3's normals": lambda v: near(v) * (near(v).abs() >= 2.0**-6),
    "saturates to NaN": lambda v: near(v).masked_fill(v.abs() > 464, torch.nan),
    "saturates at 240": lambda v: near(v, 240.0),
    "cut off, not rounded": cut,
}


Call = tuple[str, tuple, dict]


def changed_calls(change: Callable[[str, tuple, dict], Call]) -> dict[str, Any]:
    """Replace both attention operations, or their arguments and keyword arguments."""

    def operation(name: str) -> Callable[..., Tensor]:
        def operate(self: Any, *arguments: Any, **keywords: Any) -> Tensor:
            called, arguments, keywords = change(name, arguments, keywords)
            return getattr(TorchProvider, called)(self, *arguments, **keywords)

        return operate

    return {name: operation(name) for name in ("prefill_attention_fp8", "decode_attention_fp8")}


def one_part(part: int, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Apply `change` only to keys (0) or only to values (1), before they are cached."""

    def changed(name: str, arguments: tuple, keywords: dict) -> Call:
        q, *inputs = arguments
        if inputs[0].dim() == 5:
            inputs[0] = inputs[0].clone()
            inputs[0][:, part] = change(inputs[0][:, part])
        else:
            inputs[part] = change(inputs[part])
        return name, (q, *inputs), keywords

    return changed_calls(changed)


def by_window(windowed: bool) -> dict[str, Any]:
    """Use a bfloat16 cache for the layers with a window, or for the layers without one."""

    def changed(name: str, arguments: tuple, keywords: dict) -> Call:
        plain = (keywords["window"] is not None) is windowed
        return name.removesuffix("_fp8") if plain else name, arguments, keywords

    return changed_calls(changed)


def with_keywords(change: Callable[[dict], dict]) -> dict[str, Any]:
    return changed_calls(lambda name, arguments, k: (name, arguments, k | change(k)))


for fault, methods in {
    "scale 0.9": on_cache(lambda v: near(v) * 0.9),
    "scale 0.9 of keys": one_part(0, lambda k: k * 0.9),
    "scale 0.9 of values": one_part(1, lambda v: v * 0.9),
    **{fault: on_cache(change) for fault, change in ROUNDED.items()},
    "E5M2 for E4M3": on_cache(lambda v: v.to(torch.float8_e5m2).float()),
    "bfloat16 where FP8 is promised": on_cache(lambda v: v),
    "bfloat16 of layers without a window": by_window(False),
    "bfloat16 of layers with a window": by_window(True),
    "sinks dropped": with_keywords(lambda _: {"sinks": None}),
    "sinks in the scale of scores": with_keywords(
        lambda k: {"sinks": None if k["sinks"] is None else k["sinks"] * k["scale"]}
    ),
    "window + 1": with_keywords(lambda k: {"window": k["window"] and k["window"] + 1}),
    "window - 1": with_keywords(lambda k: {"window": k["window"] and k["window"] - 1}),
}.items():
    wrong(f"FP8 cache: {fault}", TorchProvider, FP8, **methods)

# Experts with E4M3 activations under scales of one


def hidden(change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {"e4m3": lambda _self, values: change(values).to(torch.float8_e4m3fn)}


def of_x(change: Callable[[Tensor], Tensor]) -> type:
    def quantised(_self: Any, _q: Tensor, scales: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return change(x.float()).to(torch.float8_e4m3fn), torch.full_like(scales, 0x7F)

    experts = type("ExpertsOfX", (IdentityExperts,), {"quantised": quantised})
    return type("OfX", (IdentityProvider,), {"experts_class": experts})


for fault, change in ROUNDED.items():
    emulated(f"identity: x {fault}", Identity, of_x(change), RANGES)
    if not fault.startswith("saturates"):
        emulated(f"identity: hidden {fault}", Identity, IdentityProvider, RANGES, **hidden(change))


class ComputedX(IdentityProvider):
    experts_class = EmulatedProvider.experts_class


class IdentityX(EmulatedProvider):
    experts_class = IdentityProvider.experts_class


#: Changes of both x and the hidden activations, of x alone, and of the hidden activations alone.
AS_IDENTITY = (Identity, IdentityX), (Emulation, IdentityX), (Identity, EmulatedProvider)
AS_COMPUTED = (Emulation, ComputedX), (Identity, ComputedX), (Emulation, IdentityProvider)
for form, promised, rows in (
    ("identity", "computed scales are", AS_IDENTITY),
    ("computed scales", "identity is", AS_COMPUTED),
):
    for part, (of, provider) in zip(("", " of x", " of the hidden activations"), rows, strict=True):
        emulated(f"{form}{part} where {promised} promised", of, provider, RANGES)


def low_sums(_self: Any, values: Tensor, scales: Tensor, matrix: Tensor) -> Tensor:
    wide = values.float().unflatten(-1, (-1, BLOCK)) * torch.exp2(scales.float() - 127)[..., None]
    return in_bfloat16(BLOCK)(None, wide.flatten(-2), matrix)


def with_alpha(alpha: float) -> Callable[..., tuple[Tensor, ...]]:
    return lambda _self, _alpha, beta, limit, e: (torch.tensor(alpha), beta[e], limit[e])


for name, of, provider in (
    ("computed", Emulation, EmulatedProvider),
    ("identity", Identity, IdentityProvider),
):
    emulated(f"{name}: sums in bfloat16", of, provider, ("moe_ranges",), product=low_sums)
    for alpha in (1.6875, 1.71875):
        constants = with_alpha(alpha)
        emulated(f"{name}: alpha {alpha}", of, provider, ("moe_ranges",), constants=constants)
