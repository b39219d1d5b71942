"""Layers of experts for the kernel tests: random weights, and forms in which a fault shows."""

import dataclasses
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sm121.kernels.cases import MoeCase
from sm121.oracles import moe, mxfp4

ALPHA, LIMIT = 1.702, 7.0
"""gpt-oss's SwiGLU constants."""


@dataclass(frozen=True)
class Layer:
    w1: moe.Packed
    w1_bias: Tensor
    w2: moe.Packed
    w2_bias: Tensor


@functools.lru_cache(maxsize=4)
def layer_of(hidden: int, intermediate: int, experts: int, seed: int) -> Layer:
    """Random bytes with scales that give the hidden layer values around the SwiGLU limit."""
    generator = torch.Generator().manual_seed(seed)
    # Root mean square of a random E2M1 code times a scale of 1/2, 1 or 2.
    spread = 3.87
    first = round(math.log2(3.5 / (spread * math.sqrt(hidden))))
    second = round(math.log2(0.5 / (spread * math.sqrt(intermediate))))

    def packed(rows: int, k: int, exponent: int) -> moe.Packed:
        codes = torch.randint(0, 256, (experts, rows, k // 2), generator=generator)
        jitter = torch.randint(-1, 2, (experts, rows, k // mxfp4.BLOCK), generator=generator)
        return codes.to(torch.uint8), (mxfp4.E8M0_BIAS + exponent + jitter).to(torch.uint8)

    return Layer(
        packed(2 * intermediate, hidden, first),
        torch.randn(experts, 2 * intermediate, generator=generator).bfloat16(),
        packed(hidden, intermediate, second),
        torch.randn(experts, hidden, generator=generator).bfloat16(),
    )


def routing_of(case: MoeCase, generator: torch.Generator) -> Tensor:
    """[T, k] int32, different within a token."""
    if case.routing == "random":
        order = torch.rand(case.tokens, case.experts, generator=generator).argsort(-1)
        return order[:, : case.top_k].int()
    if case.routing == "skewed":
        order = torch.rand(case.tokens, case.experts // 2, generator=generator).argsort(-1)
        return order[:, : case.top_k].int()
    if case.routing in ("one", "last"):
        number = 1 if case.routing == "one" else case.experts - 1
        first = torch.full((case.tokens,), number)
    else:
        first = torch.arange(case.tokens) // (case.hidden // mxfp4.BLOCK)
    return ((first[:, None] + torch.arange(case.top_k)) % case.experts).int()


def reading_out(layer: Layer) -> Layer:
    """The layer with a second matrix of ones at j mod H, and biases at which SwiGLU is steep in the
    gate and in the up part."""
    experts, hidden, _ = layer.w2[0].shape
    intermediate = layer.w1_bias.shape[1] // 2
    codes = torch.zeros(experts, hidden, intermediate, dtype=torch.uint8)
    at = torch.arange(intermediate)
    codes[:, at % hidden, at] = 2  # E2M1 of 1
    packed = torch.from_numpy(mxfp4.pack(codes.numpy()))
    bias = layer.w1_bias * 0.25
    bias[:, 0::2] += 1.5
    bias[:, 1::2] += 1.0
    ones = torch.full_like(layer.w2[1], mxfp4.E8M0_BIAS)
    return Layer(layer.w1, bias, (packed, ones), torch.zeros_like(layer.w2_bias))


BELOW_LIMIT = -(LIMIT + 1.0)
"""A gate of -8 gives -1.0e-5, clamped -4.7e-5. Further below float32 may have nothing left."""


def with_gates(layer: Layer, bias: float) -> Layer:
    """The layer with this bias of every gate, for small activations, and nothing beside what the
    hidden ones give."""
    biases = layer.w1_bias.clone()
    biases[:, 0::2] = bias
    return Layer(layer.w1, biases, layer.w2, torch.zeros_like(layer.w2_bias))


def ranged(layer: Layer, x: Tensor, power: int) -> tuple[Layer, Tensor]:
    """The layer and x [T, H] with the first block's activations 2^power times as large, and its
    scales in the first matrix as much lower."""
    scales = layer.w1[1].clone()
    scales[..., 0] -= power
    x = x.clone()
    x[:, : mxfp4.BLOCK] *= 2.0**power
    return dataclasses.replace(layer, w1=(layer.w1[0], scales)), x


def cancelling(weight: moe.Packed, x: Tensor, factor: float) -> moe.Packed:
    """The weight with its first block as the last, too. In x [T, K] the first is made larger, and
    the last takes it away: what a sum loses in between is lost."""
    codes, scales = (part.clone() for part in weight)
    codes[..., -mxfp4.BLOCK // 2 :] = codes[..., : mxfp4.BLOCK // 2]
    scales[..., -1] = scales[..., 0]
    x[:, : mxfp4.BLOCK] *= factor
    x[:, -mxfp4.BLOCK :] = -x[:, : mxfp4.BLOCK]
    return codes, scales


@functools.lru_cache(maxsize=2)
def dense(outputs: int, inputs: int) -> moe.Packed:
    """A dense weight that gives outputs around one: packed [N, K/2], scales [N, K/32]."""
    generator = torch.Generator().manual_seed(outputs + inputs)

    def random(low: int, high: int, columns: int) -> Tensor:
        shape = (outputs, columns)
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    middle = mxfp4.E8M0_BIAS + round(math.log2(1 / (3.87 * math.sqrt(inputs))))
    codes = random(0, 256, inputs // 2)
    return codes, random(middle - 1, middle + 2, inputs // mxfp4.BLOCK)


def with_nan(layer: Layer, idle: Tensor) -> Layer:
    """The experts `idle` made NaN, in every scale and bias."""
    parts = [part.clone() for part in (layer.w1[1], layer.w1_bias, layer.w2[1], layer.w2_bias)]
    for part in parts:
        part[idle] = mxfp4.E8M0_NAN if part.dtype == torch.uint8 else torch.nan
    return Layer((layer.w1[0], parts[0]), parts[1], (layer.w2[0], parts[2]), parts[3])
