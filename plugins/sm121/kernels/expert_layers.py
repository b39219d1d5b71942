"""Layers of experts for the kernel tests: random weights, and variants that expose a fault."""

import dataclasses
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sm121.kernels.cases import MoeCase
from sm121.oracles import moe, mxfp4

#: gpt-oss's SwiGLU constants (`swiglu_alpha` and `swiglu_limit` of its configuration).
ALPHA = 1.702
LIMIT = 7.0
#: The bias of every gate in cases with `below_limit`. For a gate of -8, the gate's factor in SwiGLU
#: is -1.0e-5, or -4.7e-5 if the gate is wrongly clamped. For lower gates, float32 may underflow.
BELOW_LIMIT = -(LIMIT + 1.0)
#: The root mean square of a random E2M1 value times a random scale of 1/2, 1 or 2.
_SPREAD = 3.87
#: The E2M1 code of the number 1.
_E2M1_ONE = 2


@dataclass(frozen=True)
class ExpertLayer:
    """The weights of a layer's experts, in the shapes of `sm121.kernels.protocol.FusedMoe`."""

    w1: moe.Packed
    w1_bias: Tensor
    w2: moe.Packed
    w2_bias: Tensor


@functools.lru_cache(maxsize=4)
def layer_of(hidden: int, intermediate: int, experts: int, seed: int) -> ExpertLayer:
    """Make a layer of random bytes.

    The scales are such that the hidden layer has values around the SwiGLU limit.

    Args:
        hidden: The size H.
        intermediate: The size I.
        experts: The number of experts.
        seed: The seed of the random bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    first = round(math.log2(3.5 / (_SPREAD * math.sqrt(hidden))))
    second = round(math.log2(0.5 / (_SPREAD * math.sqrt(intermediate))))

    def packed(rows: int, k: int, exponent: int) -> moe.Packed:
        codes = torch.randint(0, 256, (experts, rows, k // 2), generator=generator)
        jitter = torch.randint(-1, 2, (experts, rows, k // mxfp4.BLOCK), generator=generator)
        return codes.to(torch.uint8), (mxfp4.E8M0_BIAS + exponent + jitter).to(torch.uint8)

    # Keep the order of these calls, because it determines which random numbers each tensor gets.
    return ExpertLayer(
        w1=packed(2 * intermediate, hidden, first),
        w1_bias=torch.randn(experts, 2 * intermediate, generator=generator).bfloat16(),
        w2=packed(hidden, intermediate, second),
        w2_bias=torch.randn(experts, hidden, generator=generator).bfloat16(),
    )


def routing_of(case: MoeCase, generator: torch.Generator) -> Tensor:
    """Choose the experts of each token of a case.

    Args:
        case: The case, with its kind of routing.
        generator: The source of random numbers.

    Returns:
        [T, k] int32, different within a token.
    """
    if case.routing == "random":
        return _random_experts(case, case.experts, generator)
    if case.routing == "skewed":
        return _random_experts(case, case.experts // 2, generator)
    if case.routing == "one":
        first = torch.full((case.tokens,), 1)
    elif case.routing == "last":
        first = torch.full((case.tokens,), case.experts - 1)
    else:
        first = torch.arange(case.tokens) // (case.hidden // mxfp4.BLOCK)
    return ((first[:, None] + torch.arange(case.top_k)) % case.experts).int()


def _random_experts(case: MoeCase, experts: int, generator: torch.Generator) -> Tensor:
    """Return k of the first `experts` for each token, in random order."""
    order = torch.rand(case.tokens, experts, generator=generator).argsort(-1)
    return order[:, : case.top_k].int()


def reading_out(layer: ExpertLayer) -> ExpertLayer:
    """Return a layer that copies each hidden activation to one output.

    In the second matrix, column j has a one in row j mod H, and zeros elsewhere. The first biases
    shift gate and up to a range where SwiGLU is steep.

    Args:
        layer: The layer with the first matrix and its biases.
    """
    experts, hidden, _ = layer.w2[0].shape
    intermediate = layer.w1_bias.shape[1] // 2
    codes = torch.zeros(experts, hidden, intermediate, dtype=torch.uint8)
    at = torch.arange(intermediate)
    codes[:, at % hidden, at] = _E2M1_ONE
    packed = torch.from_numpy(mxfp4.pack(codes.numpy()))
    bias = layer.w1_bias * 0.25
    bias[:, 0::2] += 1.5
    bias[:, 1::2] += 1.0
    ones = torch.full_like(layer.w2[1], mxfp4.E8M0_BIAS)
    return ExpertLayer(layer.w1, bias, (packed, ones), torch.zeros_like(layer.w2_bias))


def with_gates(layer: ExpertLayer, bias: float) -> ExpertLayer:
    """Return a layer with one bias for every gate and without the second biases.

    With small activations, each gate is then approximately this bias.

    Args:
        layer: The layer.
        bias: The bias of every gate.
    """
    biases = layer.w1_bias.clone()
    biases[:, 0::2] = bias
    return ExpertLayer(layer.w1, biases, layer.w2, torch.zeros_like(layer.w2_bias))


def ranged(layer: ExpertLayer, x: Tensor, power: int) -> tuple[ExpertLayer, Tensor]:
    """Multiply the activations of the first block by 2^power, and divide its w1 scales by 2^power.

    Args:
        layer: The layer.
        x: Activations [T, H].
        power: The exponent.

    Returns:
        The new layer and the new activations, whose product is unchanged.
    """
    scales = layer.w1[1].clone()
    scales[..., 0] -= power
    x = x.clone()
    x[:, : mxfp4.BLOCK] *= 2.0**power
    return dataclasses.replace(layer, w1=(layer.w1[0], scales)), x


def cancelling(weight: moe.Packed, x: Tensor, factor: float) -> moe.Packed:
    """Enlarge the first block of a product, and make the last block cancel it.

    If the sum of the blocks between them loses digits, the result shows it.

    Args:
        weight: Packed elements and scales. The result has a copy of the first block as the last.
        x: Activations [T, K], which are modified in place: the first block is enlarged, and the
            last block becomes its negative.
        factor: The factor by which the first block is enlarged.

    Returns:
        The new weight.
    """
    codes = weight[0].clone()
    scales = weight[1].clone()
    codes[..., -mxfp4.BLOCK // 2 :] = codes[..., : mxfp4.BLOCK // 2]
    scales[..., -1] = scales[..., 0]
    x[:, : mxfp4.BLOCK] *= factor
    x[:, -mxfp4.BLOCK :] = -x[:, : mxfp4.BLOCK]
    return codes, scales


@functools.lru_cache(maxsize=2)
def dense(outputs: int, inputs: int) -> moe.Packed:
    """Make a random dense weight whose outputs have a magnitude around one.

    Args:
        outputs: The size N.
        inputs: The size K.

    Returns:
        packed [N, K/2], scales [N, K/32].
    """
    generator = torch.Generator().manual_seed(outputs + inputs)

    def random(low: int, high: int, columns: int) -> Tensor:
        shape = (outputs, columns)
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    middle = mxfp4.E8M0_BIAS + round(math.log2(1 / (_SPREAD * math.sqrt(inputs))))
    codes = random(0, 256, inputs // 2)
    scales = random(middle - 1, middle + 2, inputs // mxfp4.BLOCK)
    return codes, scales


def with_nan(layer: ExpertLayer, idle: Tensor) -> ExpertLayer:
    """Return a layer with NaN in every scale and bias of some experts.

    Args:
        layer: The layer.
        idle: The numbers of the experts.
    """
    w1_scales = layer.w1[1].clone()
    w2_scales = layer.w2[1].clone()
    w1_bias = layer.w1_bias.clone()
    w2_bias = layer.w2_bias.clone()
    w1_scales[idle] = mxfp4.E8M0_NAN
    w2_scales[idle] = mxfp4.E8M0_NAN
    w1_bias[idle] = torch.nan
    w2_bias[idle] = torch.nan
    return ExpertLayer(
        w1=(layer.w1[0], w1_scales),
        w1_bias=w1_bias,
        w2=(layer.w2[0], w2_scales),
        w2_bias=w2_bias,
    )
