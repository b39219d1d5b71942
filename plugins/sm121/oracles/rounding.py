"""The roundings of a server, which the oracle applies to compute a correct server's results.

Each rounding is one function, written from the source that its docstring names. There are two kinds
of roundings:

- Formats: the server stores weights or caches, or rounds inputs, with fewer bits than the
  checkpoint has. This changes the model. A name such as ``qkv=mxfp4-ceil,kv=fp8`` lists the formats
  (`Rounding.parse`).
- The dtype of the arithmetic: matrix products accumulate in float32, and their inputs and outputs
  are rounded. This rounding is noise. Its effect on a correct server determines the tolerance.

MXFP4 weights are exact in BF16. Therefore, an engine with BF16 weights and an engine that keeps
MXFP4 weights (W4A16, such as Marlin) round in the same way.
"""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sm121.oracles import mxfp4, mxfp8
from sm121.oracles.formats import Rounding
from sm121.oracles.mxfp4 import BLOCK

_LARGEST_E2M1 = 6.0
_LARGEST_E4M3 = 448.0
_LEAST_NORMAL_E4M3 = 2.0**-6
#: The step of subnormal E4M3 values.
_SUBNORMAL_E4M3 = 2.0**-9

Function = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    """Return x unchanged.

    Args:
        x: Any shape and dtype.
    """
    return x


def to_bf16(x: Tensor) -> Tensor:
    """Return the nearest BF16 values (ties to even), in the dtype of x.

    Args:
        x: Any shape.
    """
    return x.to(torch.bfloat16).to(x.dtype)


def _to_float32(x: Tensor) -> Tensor:
    """Round to 20 significant bits, in the dtype of x.

    This is a conservative model of float32 arithmetic. A long sum in float32 is at least this
    precise, so this rounding changes the result of a later rounding to E4M3 at least as often as
    float32 does.
    """
    bits = x.to(torch.float32).view(torch.int32)
    return (((bits + 8) >> 4) << 4).view(torch.float32).to(x.dtype)


def to_mxfp8(x: Tensor, rule: mxfp8.ScaleRule = mxfp8.ScaleRule.CEIL) -> Tensor:
    """Round to MXFP8, as a quantiser does.

    Args:
        x: [..., K]; K is a multiple of 32.
        rule: The scale rule. FlashInfer's `cvt_warp_fp16_to_mxfp8` uses `CEIL`.

    Returns:
        The same shape and dtype.
    """
    blocks = x.unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax)
    if rule is mxfp8.ScaleRule.CEIL:  # 448 = 0.875 * 2^9
        exponent = torch.where(mantissa <= 0.875, exponent - 9, exponent - 8)
    else:
        exponent = exponent - 9
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    return (to_e4m3(blocks / scale) * scale).flatten(-2)


def to_mxfp4(x: Tensor, rule: mxfp4.ScaleRule) -> Tensor:
    """Round to MXFP4, as a quantiser does. `mxfp4` computes the same in NumPy.

    Args:
        x: [..., K]; K is a multiple of 32.
        rule: The scale rule.

    Returns:
        The same shape and dtype. Elements are rounded to nearest, ties to even.
    """
    blocks = x.unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    # amax = m * 2^e with m in [0.5, 1); 6 = 0.75 * 2^3. The scale 2^(e - 3) has amax in [4, 8).
    mantissa, exponent = torch.frexp(amax)
    if rule is mxfp4.ScaleRule.CEIL:
        goes_up = mantissa > 0.75
    elif rule is mxfp4.ScaleRule.VLLM_RNE:
        goes_up = mantissa >= 0.875
    else:
        goes_up = torch.zeros_like(mantissa, dtype=torch.bool)
    exponent = exponent - 3 + goes_up.int()
    exponent = exponent.clamp(-mxfp4.E8M0_BIAS, mxfp4.E8M0_BIAS)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    values = (blocks / scale).clamp(-_LARGEST_E2M1, _LARGEST_E2M1)
    # The step of E2M1 is 0.5 below 2, 1 below 4, and 2 above.
    magnitude = values.abs()
    step = torch.where(magnitude < 4, 1.0, 2.0)
    step = torch.where(magnitude < 2, 0.5, step).to(x.dtype)
    return ((values / step).round_() * step * scale).flatten(-2)


def to_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest E4M3 values (ties to even, saturating at +-448), in the dtype of x.

    This is `__nv_cvt_float_to_fp8` with `__NV_SATFINITE`, with which vLLM writes a KV cache without
    scales (csrc/quantization/fp8/nvidia/quant_utils.cuh, `scaled_vec_conversion`, scale 1).

    Args:
        x: Any shape.
    """
    return x.clamp(-_LARGEST_E4M3, _LARGEST_E4M3).float().to(torch.float8_e4m3fn).to(x.dtype)


def to_e4m3_cut(x: Tensor) -> Tensor:
    """Round towards zero to E4M3 values (saturating at +-448), in the dtype of x.

    vLLM's CPU backend writes its KV cache in this way (0.32, `cpu_attn_reshape_and_cache`). This
    was observed for 20 values in float32 and BF16.

    Args:
        x: Any shape.
    """
    magnitude = x.abs().clamp(max=_LARGEST_E4M3)
    exponent = torch.frexp(magnitude)[1] - 4
    step = torch.ldexp(torch.ones_like(x), exponent)
    step = torch.where(magnitude < _LEAST_NORMAL_E4M3, _SUBNORMAL_E4M3, step).to(x.dtype)
    return torch.copysign((magnitude / step).floor_() * step, x)


def to_fp8_rows(x: Tensor) -> Tensor:
    """Round to E4M3 with one float32 scale for each row, in the dtype of x.

    A scale is amax / 448, but at least 1 / (448 * 512). This is vLLM's ``fp8_per_channel``, with
    one scale per output channel of a weight and one per token of its inputs (0.32,
    quantization/online/fp8.py: `_fp8_channel_scale`, `_fp8_quant_per_channel`).

    Args:
        x: [..., K].
    """
    scale = (x.abs().amax(-1, keepdim=True).float() / _LARGEST_E4M3).to(x.dtype)
    scale = scale.clamp(min=1 / (_LARGEST_E4M3 * 512))
    return to_e4m3(x / scale) * scale


#: The rounding of a dense layer's weight [out, in] when it is loaded. Marlin's preparation only
#: changes the layout, and rounds nothing (marlin_utils_fp4.py, `prepare_fp4_layer_for_marlin`).
WEIGHTS: Mapping[str, Function] = {
    # FlashInfer's `mxfp4_quantize` (quantization_utils.cuh, `cvt_warp_fp16_to_fp4` with `UE8M0_SF`:
    # amax / 6 rounded up).
    "mxfp4-ceil": functools.partial(to_mxfp4, rule=mxfp4.ScaleRule.CEIL),
    # vLLM's `downcast_to_mxfp` (mxfp4_utils.py, 0.32).
    "mxfp4-even": functools.partial(to_mxfp4, rule=mxfp4.ScaleRule.VLLM_RNE),
    # OCP MX v1.0, section 6.3.
    "mxfp4-floor": functools.partial(to_mxfp4, rule=mxfp4.ScaleRule.OCP_FLOOR),
    "fp8-channel": to_fp8_rows,
}
#: The rounding of the layer's inputs [T, in], for the formats that round them.
INPUTS: Mapping[str, Function] = {"fp8-channel": to_fp8_rows}
#: The rounding of rotated keys and of values [T, Hkv, D] in the KV cache.
CACHES: Mapping[str, Function] = {"fp8": to_e4m3, "fp8-cut": to_e4m3_cut}
#: The rounding of the inputs of both products of an expert.
EXPERTS: Mapping[str, Function] = {
    # FlashInfer's `mxfp8_quantize`.
    "mxfp8": to_mxfp8,
    # E4M3 with all scales equal to one (0x7F).
    "mxfp8-identity": to_e4m3,
}
#: For each dtype of the arithmetic, the rounding of the result of an operation.
_ARITHMETIC: Mapping[str, Function] = {"exact": same, "float32": _to_float32, "bf16": to_bf16}


def activations(served: Rounding) -> Function:
    """Return the function that rounds the result of each operation.

    Args:
        served: The server's rounding. Its ``dtype`` decides.
    """
    return _ARITHMETIC[served.dtype]


def expert_inputs(served: Rounding) -> Function:
    """Return the function that rounds the inputs of the experts' matrices.

    Args:
        served: The server's rounding. Without a format of ``experts``, the function is `same`.
    """
    return EXPERTS.get(served.experts or "", same)


def cached(served: Rounding) -> Function:
    """Return the function that rounds rotated keys, and values, for the KV cache.

    Args:
        served: The server's rounding. Without a format of ``kv``, the function is `same`.
    """
    return CACHES.get(served.kv or "", same)


def weight(served: Rounding, layer: str) -> Function:
    """Return the function that rounds the weight of a layer.

    Args:
        served: The rounding of the server.
        layer: ``qkv``, ``o`` or ``lm_head``.
    """
    return WEIGHTS.get(getattr(served, layer) or "", same)


def inputs(served: Rounding, layer: str) -> Function:
    """Return the function that rounds the inputs of a layer.

    Args:
        served: The rounding of the server.
        layer: ``qkv``, ``o`` or ``lm_head``.
    """
    return INPUTS.get(getattr(served, layer) or "", same)
