"""The mixture of experts of gpt-oss in float64, with the checkpoint's MXFP4 weights.

Source: the gpt-oss model card (arXiv:2508.10925) and reference implementation (openai/gpt-oss,
gpt_oss/torch/model.py, `swiglu` and MLPBlock). If a kernel path quantises activations to MXFP8, the
quantisation is part of the function (`Roundings`). Everything else is exact.

Shapes: T tokens, H hidden size, I intermediate size, E experts, k experts per token.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sm121.oracles import mxfp4, mxfp8, rounding

#: MXFP4 weights: packed [E, rows, K/2] u8, scales [E, rows, K/32] u8.
Packed = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Roundings:
    """The roundings of a kernel path.

    Each is a function of float64 tensors that keeps the shape.
    """

    #: Applied to the activations, before the first matrix product.
    x: rounding.Function = rounding.same
    #: Applied to the first product, before the bias is added.
    sums: rounding.Function = rounding.same
    #: Applied to gate and up, after the bias was added.
    gates: rounding.Function = rounding.same
    #: Applied to the hidden activations, before the second product.
    hidden: rounding.Function = rounding.same
    #: Applied to the routing weights, and three times to an expert's output: to the second product,
    #: after the bias was added, and after the multiplication by the routing weight.
    outputs: rounding.Function = rounding.same


#: A path without roundings.
EXACT = Roundings()
#: vLLM's Marlin, which rounds to bfloat16 (the epilogue of csrc/moe/marlin_moe_wna16/
#: marlin_template.h; `swigluoai_and_mul` of csrc/activation_kernels.cu).
EACH_EXPERT = Roundings(
    sums=rounding.to_bf16,
    gates=rounding.to_bf16,
    hidden=rounding.to_bf16,
    outputs=rounding.to_bf16,
)

#: The number of rows of a dense matrix that are in float64 at a time. A whole lm_head has 4.6 GB.
_ROWS = 4096

_CODES = mxfp4.CODE_VALUES[mxfp4.unpack(np.arange(256, dtype=np.uint8)[:, None])]
#: The two elements of each byte, exact in bfloat16, as one 32-bit word, [256]. Words are used
#: because looking them up is faster than looking up pairs, and a layer of gpt-oss has three billion
#: elements.
_PAIRS = torch.from_numpy(_CODES).bfloat16().view(torch.int32).flatten()
#: The value of each scale, [256].
_SCALES = torch.from_numpy(mxfp4.decode_scale(np.arange(256, dtype=np.uint8)))


@functools.cache
def mxfp8_activations(rule: mxfp8.ScaleRule) -> Roundings:
    """Return the roundings of FlashInfer's CUTLASS kernels with MXFP8 activations.

    x is quantised to MXFP8. The first product is written in bfloat16 (`UnfusedGemmOutputType`).
    `doActivationKernel` adds the bias and computes SwiGLU in float32. `quantizePackedFPXValue`
    rounds the result to bfloat16 and then, in blocks of 32, to MXFP8. Source: FlashInfer 0.7.2,
    csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh.

    Args:
        rule: The scale rule.
    """
    return _eight_bits(functools.partial(rounding.to_mxfp8, rule=rule))


def _eight_bits(to_eight: rounding.Function) -> Roundings:
    def round_hidden(values: Tensor) -> Tensor:
        return to_eight(rounding.to_bf16(values))

    return Roundings(x=to_eight, sums=rounding.to_bf16, hidden=round_hidden)


#: The roundings of FlashInfer's CUTLASS kernels with E4M3 activations and scales of one (identity).
E4M3 = _eight_bits(rounding.to_e4m3)


def route(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the experts with the k largest logits, and the softmax over only these k logits.

    Args:
        logits: [T, E].
        k: The number of experts per token.

    Returns:
        The routing weights [T, k] in the dtype of the logits, which sum to one, and the experts [T,
        k] int64. Both are in descending order of the weights.

    Raises:
        RuntimeError: k is larger than E.
    """
    top, experts = logits.topk(k, -1)
    return top.softmax(-1), experts


def swiglu(gate: Tensor, up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Compute the clamped SwiGLU: g * sigmoid(alpha * g) * (clamp(up, -limit, limit) + 1).

    Here, g = min(gate, limit).

    Args:
        gate: Any shape; clamped only from above.
        up: The same shape.
        alpha: The factor of the gate within the sigmoid.
        limit: The bound of both clamps.

    Returns:
        The same shape.
    """
    return of_gate(gate, alpha=alpha, limit=limit) * of_up(up, limit=limit)


def of_gate(gate: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Return the factor of SwiGLU that depends on the gate.

    Args:
        gate: As in `swiglu`.
        alpha: As in `swiglu`.
        limit: As in `swiglu`.
    """
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate)


def of_up(up: Tensor, *, limit: float) -> Tensor:
    """Return the factor of SwiGLU that depends on up.

    Args:
        up: As in `swiglu`.
        limit: As in `swiglu`.
    """
    return up.clamp(-limit, limit) + 1.0


def expert_matrix(weights: Packed, expert: int) -> Tensor:
    """Dequantise the matrix of one expert.

    Args:
        weights: The matrices of all experts.
        expert: The index of the expert.

    Returns:
        [rows, K] float64, exact.

    Raises:
        ValueError: The shapes of packed elements and scales do not match.
    """
    packed = weights[0][expert].cpu().int()
    scales = weights[1][expert].cpu().int()
    if (*scales.shape[:-1], scales.shape[-1] * mxfp4.BLOCK // 2) != packed.shape:
        raise ValueError(f"scales {scales.shape} do not belong to packed elements {packed.shape}")
    elements = _PAIRS.index_select(0, packed.flatten()).view(torch.bfloat16).double()
    blocks = elements.view(*scales.shape, mxfp4.BLOCK)
    return blocks.mul_(_SCALES[scales][..., None]).flatten(-2)


def hidden(
    rows: Tensor,
    w1: Packed,
    w1_bias: Tensor | None,
    expert: int,
    *,
    alpha: float,
    limit: float,
    roundings: Roundings = EXACT,
) -> Tensor:
    """Compute one expert's hidden activations.

    Args:
        rows: [n, H] float64.
        w1: As in `fused_moe`.
        w1_bias: As in `fused_moe`.
        expert: The index of the expert.
        alpha: As in `swiglu`.
        limit: As in `swiglu`.
        roundings: The roundings of the kernel path.

    Returns:
        [n, I] float64.
    """
    sums = roundings.sums(roundings.x(rows) @ expert_matrix(w1, expert).T)
    if w1_bias is not None:
        sums = roundings.gates(sums + w1_bias[expert].cpu().double())
    gate = sums[:, 0::2]
    up = sums[:, 1::2]
    return roundings.hidden(swiglu(gate, up, alpha=alpha, limit=limit))


def mxfp4_linear(x: Tensor, weight: Packed, roundings: rounding.Function = rounding.same) -> Tensor:
    """Multiply by a dense MXFP4 weight.

    Args:
        x: [M, K].
        weight: Packed [N, K/2] and scales [N, K/32].
        roundings: The rounding of x. Nothing else is rounded.

    Returns:
        [M, N] float64.

    Raises:
        ValueError: The shapes of packed elements and scales do not match.
    """
    x = roundings(x.cpu().double())
    packed, scales = weight
    parts = []
    for rows, row_scales in zip(packed.split(_ROWS), scales.split(_ROWS), strict=True):
        parts.append(x @ expert_matrix((rows[None], row_scales[None]), 0).T)
    return torch.cat(parts, -1)


def fused_moe(
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    w1: Packed,
    w1_bias: Tensor | None,
    w2: Packed,
    w2_bias: Tensor | None,
    *,
    alpha: float,
    limit: float,
    roundings: Roundings = EXACT,
) -> Tensor:
    """Compute the mixture of experts. Experts that no token chose are not read.

    Args:
        x: [T, H].
        shares: [T, k], from `route`.
        chosen: [T, k], from `route`.
        w1: [E, 2I, H], with alternating gate and up rows.
        w1_bias: [E, 2I]; None for no bias.
        w2: [E, H, I].
        w2_bias: [E, H]; None for no bias.
        alpha: As in `swiglu`.
        limit: As in `swiglu`.
        roundings: The roundings of the kernel path. Nothing else is rounded.

    Returns:
        [T, H] float64.

    Raises:
        ValueError: The shapes of packed elements and scales do not match.
    """
    x = x.cpu().double()
    shares = roundings.outputs(shares.cpu().double())
    chosen = chosen.cpu().long()
    out = torch.zeros_like(x)
    for e in chosen.unique().tolist():
        tokens, rank = (chosen == e).nonzero(as_tuple=True)
        h = hidden(x[tokens], w1, w1_bias, e, alpha=alpha, limit=limit, roundings=roundings)
        y = roundings.outputs(h @ expert_matrix(w2, e).T)
        if w2_bias is not None:
            y = roundings.outputs(y + w2_bias[e].cpu().double())
        out.index_add_(0, tokens, roundings.outputs(y * shares[tokens, rank, None]))
    return out
