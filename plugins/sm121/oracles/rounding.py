"""What a server rounds, so that the oracle computes what the server means to compute. Each rounding
is one function, written from the source that is named with it. They are of two kinds:

- Formats: what the server stores or feeds in fewer bits than the checkpoint has. They change the
  model. A name such as ``qkv=mxfp4-ceil,kv=fp8`` lists them (`Rounding.parse`).
- The dtype of the arithmetic: a matrix multiplication accumulates in float32, its inputs and
  outputs are rounded. That is noise, and how far it moves an honest server is the tolerance.

The values of MXFP4 weights are exact in BF16, so that an engine with BF16 weights and one that
keeps them packed (W4A16, as Marlin) round the same."""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sm121.oracles import mxfp4, mxfp8
from sm121.oracles.formats import Rounding
from sm121.oracles.mxfp4 import BLOCK

_LARGEST_E4M3 = 448.0
_LEAST_NORMAL_E4M3, _SUBNORMAL_E4M3 = 2.0**-6, 2.0**-9

Function = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    """Nothing is rounded."""
    return x


def to_bf16(x: Tensor) -> Tensor:
    """The nearest BF16 values, in the dtype of x."""
    return x.to(torch.bfloat16).to(x.dtype)


def to_float32(x: Tensor) -> Tensor:
    """Values of 20 significant bits, in the dtype of x: what float32 leaves of a long sum, or
    less. It decides which E4M3 value is the nearest no less often than float32."""
    bits = x.to(torch.float32).view(torch.int32)
    return (((bits + 8) >> 4) << 4).view(torch.float32).to(x.dtype)


def to_mxfp8(x: Tensor, rule: mxfp8.ScaleRule = mxfp8.ScaleRule.CEIL) -> Tensor:
    """The values of MXFP8 that a quantiser with that rule makes of x [..., K], in its dtype. K is a
    multiple of 32. The rule of FlashInfer's `cvt_warp_fp16_to_mxfp8` is `CEIL`."""
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
    """The values of MXFP4 that a quantiser with that rule makes of x [..., K], in its dtype. K is a
    multiple of 32; elements to the nearest, ties to even. `mxfp4` says the same in NumPy."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax)
    most = {mxfp4.ScaleRule.CEIL: 0.75, mxfp4.ScaleRule.VLLM_RNE: 0.875}.get(rule, 1.0)
    low = 3  # amax = m 2^e with m in [0.5, 1); 6 = 0.75 * 2^3, and 2^(e - 3) has amax in [4, 8)
    exponent = torch.where(mantissa <= most, exponent - low, exponent - low + 1)
    if rule is mxfp4.ScaleRule.VLLM_RNE:
        exponent = exponent + (mantissa == most).int()
    exponent = exponent.clamp(-mxfp4.E8M0_BIAS, mxfp4.E8M0_BIAS)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    values = (blocks / scale).clamp(-6.0, 6.0)
    # Steps of 0.5 below 2, of 1 below 4, of 2 above.
    step = torch.where(values.abs() < 2, 0.5, torch.where(values.abs() < 4, 1.0, 2.0)).to(x.dtype)
    return ((values / step).round_() * step * scale).flatten(-2)


def to_e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 values, ties to even, in the dtype of x; what is beyond +-448 becomes that.
    It is `__nv_cvt_float_to_fp8` with `__NV_SATFINITE`, as vLLM writes its KV cache without scales
    (csrc/quantization/fp8/nvidia/quant_utils.cuh, `scaled_vec_conversion`, scale 1)."""
    return x.clamp(-_LARGEST_E4M3, _LARGEST_E4M3).float().to(torch.float8_e4m3fn).to(x.dtype)


def to_e4m3_cut(x: Tensor) -> Tensor:
    """The E4M3 values next to x towards zero, in its dtype; what is beyond +-448 becomes that. So
    the attention of vLLM's CPU backend writes its KV cache (0.32, `cpu_attn_reshape_and_cache`):
    observed of 20 values in float32 and BF16."""
    magnitude = x.abs().clamp(max=_LARGEST_E4M3)
    exponent = torch.frexp(magnitude)[1] - 4
    step = torch.ldexp(torch.ones_like(x), exponent)
    step = torch.where(magnitude < _LEAST_NORMAL_E4M3, _SUBNORMAL_E4M3, step).to(x.dtype)
    return torch.copysign((magnitude / step).floor_() * step, x)


def to_fp8_rows(x: Tensor) -> Tensor:
    """The values of E4M3 with one float32 scale for each row of x [..., K], amax / 448 and at least
    1 / (448 * 512). It is vLLM's ``fp8_per_channel``: a weight by output channel, its inputs by
    token (0.32, quantization/online/fp8.py: `_fp8_channel_scale`, `_fp8_quant_per_channel`)."""
    scale = (x.abs().amax(-1, keepdim=True).float() / _LARGEST_E4M3).to(x.dtype)
    scale = scale.clamp(min=1 / (_LARGEST_E4M3 * 512))
    return to_e4m3(x / scale) * scale


#: What a dense layer's weight [out, in] becomes at load. ``mxfp4-ceil``: FlashInfer's
#: `mxfp4_quantize` (quantization_utils.cuh, `cvt_warp_fp16_to_fp4` with `UE8M0_SF`: amax / 6
#: rounded up). ``mxfp4-even``: vLLM's `downcast_to_mxfp` (mxfp4_utils.py, 0.32). ``mxfp4-floor``:
#: OCP MX v1.0, section 6.3. Marlin's preparation packs the same values anew and rounds nothing
#: (marlin_utils_fp4.py, `prepare_fp4_layer_for_marlin`).
WEIGHTS: Mapping[str, Function] = {
    "mxfp4-ceil": functools.partial(to_mxfp4, rule=mxfp4.ScaleRule.CEIL),
    "mxfp4-even": functools.partial(to_mxfp4, rule=mxfp4.ScaleRule.VLLM_RNE),
    "mxfp4-floor": functools.partial(to_mxfp4, rule=mxfp4.ScaleRule.OCP_FLOOR),
    "fp8-channel": to_fp8_rows,
}
#: What becomes of that layer's inputs [T, in], where anything does.
INPUTS: Mapping[str, Function] = {"fp8-channel": to_fp8_rows}
#: What becomes of rotated keys and of values [T, Hkv, D] when they are cached.
CACHES: Mapping[str, Function] = {"fp8": to_e4m3, "fp8-cut": to_e4m3_cut}
#: What becomes of the inputs of both products of an expert. ``mxfp8``: FlashInfer's
#: `mxfp8_quantize`. ``mxfp8-identity``: E4M3 with all scales one (0x7F).
EXPERTS: Mapping[str, Function] = {"mxfp8": to_mxfp8, "mxfp8-identity": to_e4m3}


def activations(way: Rounding) -> Function:
    """Of what every operation gives."""
    return {"exact": same, "float32": to_float32, "bf16": to_bf16}[way.dtype]


def expert_inputs(way: Rounding) -> Function:
    """Of the inputs of experts' matrices."""
    return EXPERTS.get(way.experts or "", same)


def cached(way: Rounding) -> Function:
    """Of rotated keys and values."""
    return CACHES.get(way.kv or "", same)


def weight(way: Rounding, layer: str) -> Function:
    """Of the weight of ``qkv``, ``o`` or ``lm_head``."""
    return WEIGHTS.get(getattr(way, layer) or "", same)


def inputs(way: Rounding, layer: str) -> Function:
    """Of the inputs of ``qkv``, ``o`` or ``lm_head``."""
    return INPUTS.get(getattr(way, layer) or "", same)
