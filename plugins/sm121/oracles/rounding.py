"""What an engine rounds on the way, so that the oracle can say how far an honest one may be off.
Each of an engine's matrix multiplications accumulates in float32; its inputs and outputs are
rounded. The values of MXFP4 weights are exact in BF16, so that an engine with BF16 experts and one
that keeps them packed (W4A16, as Marlin) round the same. With W4A8 the inputs of the experts'
matrices are MXFP8 besides: 32 E4M3 elements with one E8M0 scale, the least power of two that is >=
amax / 448 (FlashInfer, `cvt_warp_fp16_to_mxfp8`; `sm121.oracles.mxfp8`, rule `ceil`)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sm121.oracles.mxfp4 import BLOCK
from sm121.oracles.mxfp8 import ScaleRule

_LARGEST_E4M3, _EMAX_E4M3 = 448.0, 8


@dataclass(frozen=True)
class Rounding:
    """A way to compute: what becomes of activations, and of the inputs of experts' matrices."""

    name: str
    activations: Callable[[Tensor], Tensor]
    expert_inputs: Callable[[Tensor], Tensor]


def to_bf16(x: Tensor) -> Tensor:
    """The nearest BF16 values, in the dtype of x."""
    return x.to(torch.bfloat16).to(x.dtype)


def to_mxfp8(x: Tensor, rule: ScaleRule = ScaleRule.CEIL) -> Tensor:
    """The values of MXFP8 that a quantiser with that rule makes of x [..., K], in its dtype. K is a
    multiple of 32."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    if rule is ScaleRule.CEIL:
        mantissa, exponent = torch.frexp(amax / _LARGEST_E4M3)
        # amax / 448 = m * 2^e with m in [0.5, 1): the next power of two is 2^e, or amax / 448.
        exponent = exponent - (mantissa == 0.5).int()
    else:
        exponent = torch.frexp(amax)[1] - 1 - _EMAX_E4M3
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    clamped = (blocks / scale).clamp(-_LARGEST_E4M3, _LARGEST_E4M3)
    near = clamped.float().to(torch.float8_e4m3fn).to(x.dtype)
    return (near * scale).flatten(-2)


def _same(x: Tensor) -> Tensor:
    return x


EXACT = Rounding("exact", _same, _same)
BF16 = Rounding("bf16", to_bf16, _same)
W4A8 = Rounding("w4a8", to_bf16, to_mxfp8)

#: By what the experts' inputs are.
PATHS: dict[str, Rounding] = {rounding.name: rounding for rounding in (BF16, W4A8)}
