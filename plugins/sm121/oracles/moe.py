"""The mixture of experts of gpt-oss in float64, on MXFP4 weights as the checkpoint has them.
Source: the gpt-oss model card (arXiv:2508.10925) and reference implementation (openai/gpt-oss,
gpt_oss/torch/model.py, `swiglu` and MLPBlock). T tokens, H hidden, I intermediate, E experts, k
experts a token. A path that serves MXFP8 activations computes another function: what it quantises
is part of its definition (`Roundings`). The rest stays exact."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sm121.oracles import mxfp4, mxfp8, rounding

Packed = tuple[Tensor, Tensor]
"""MXFP4 weights: packed [E, rows, K/2] u8, scales [E, rows, K/32] u8."""


@dataclass(frozen=True)
class Roundings:
    """What the definition of a path rounds, of float64 [n, ...] in the same shape."""

    x: rounding.Function = rounding.same
    """The activations, before the first product."""
    sums: rounding.Function = rounding.same
    """The first product's sums, before their bias."""
    gates: rounding.Function = rounding.same
    """Both parts of SwiGLU, with their bias."""
    hidden: rounding.Function = rounding.same
    """The hidden activations, before the second product."""
    outputs: rounding.Function = rounding.same
    """The shares, and what an expert gives: its product, that with its bias, that times its
    share."""


EXACT = Roundings()
EACH_EXPERT = Roundings(rounding.same, *[rounding.to_bf16] * 4)
"""Where vLLM's Marlin rounds to bfloat16 (the epilogue of csrc/moe/marlin_moe_wna16/
marlin_template.h; `swigluoai_and_mul` of csrc/activation_kernels.cu)."""

_ROWS = 4096
"""Of a dense matrix in float64 at a time: an lm_head as a whole has 4.6 GB."""

_CODES = mxfp4.CODE_VALUES[mxfp4.unpack(np.arange(256, dtype=np.uint8)[:, None])]
_PAIRS = torch.from_numpy(_CODES).bfloat16().view(torch.int32).flatten()
"""[256]: the two elements of each byte, exact in bfloat16, as one word: words are looked up faster
than pairs, and a layer of gpt-oss has three thousand million elements."""
_SCALES = torch.from_numpy(mxfp4.decode_scale(np.arange(256, dtype=np.uint8)))


@functools.cache
def mxfp8_activations(rule: mxfp8.ScaleRule) -> Roundings:
    """MXFP8 activations x MXFP4 weights, as FlashInfer's CUTLASS kernels define it. Source:
    FlashInfer 0.7.2, csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh. x comes
    quantised; the first product is written in bfloat16 (`UnfusedGemmOutputType`);
    `doActivationKernel` adds the bias and computes SwiGLU in float32; `quantizePackedFPXValue`
    rounds that to bfloat16 and then, in blocks of 32, to MXFP8."""
    return _eight_bits(functools.partial(rounding.to_mxfp8, rule=rule))


def _eight_bits(to_eight: rounding.Function) -> Roundings:
    near = rounding.to_bf16
    return Roundings(to_eight, sums=near, hidden=lambda values: to_eight(near(values)))


E4M3 = _eight_bits(rounding.to_e4m3)
"""The same with scales of one (identity)."""


def route(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each token and the softmax over those k alone. logits [T, E] ->
    shares [T, k] in the dtype of the logits (float64 in the oracle) that sum to one, experts [T, k]
    int64, largest first. Raises RuntimeError for k > E."""
    top, experts = logits.topk(k, -1)
    return top.softmax(-1), experts


def swiglu(gate: Tensor, up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """min(gate, limit) * sigmoid(alpha * that) * (clamp(up, -limit, limit) + 1). gate, up and the
    result have one shape. The gate is clamped from above only."""
    return of_gate(gate, alpha=alpha, limit=limit) * of_up(up, limit=limit)


def of_gate(gate: Tensor, *, alpha: float, limit: float) -> Tensor:
    """What SwiGLU has of the gate."""
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate)


def of_up(up: Tensor, *, limit: float) -> Tensor:
    """What SwiGLU multiplies it by."""
    return up.clamp(-limit, limit) + 1.0


def expert_matrix(weights: Packed, expert: int) -> Tensor:
    """The matrix [rows, K] of one expert, float64, exact. Raises ValueError when packed elements
    and scales do not belong together."""
    packed, scales = (part[expert].cpu().int() for part in weights)
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
    """One expert's hidden activations [n, I] of rows [n, H], all float64; w1 and its bias as of
    `fused_moe`."""
    t = roundings.sums(roundings.x(rows) @ expert_matrix(w1, expert).T)
    if w1_bias is not None:
        t = roundings.gates(t + w1_bias[expert].cpu().double())
    return roundings.hidden(swiglu(t[:, 0::2], t[:, 1::2], alpha=alpha, limit=limit))


def mxfp4_linear(x: Tensor, weight: Packed, roundings: rounding.Function = rounding.same) -> Tensor:
    """y [M, N] float64 of x [M, K] and a dense MXFP4 weight, packed [N, K/2] and scales [N, K/32];
    nothing but x is rounded. Raises ValueError when packed elements and scales do not fit."""
    x = roundings(x.cpu().double())
    parts = zip(*(part.split(_ROWS) for part in weight), strict=True)
    return torch.cat([x @ expert_matrix((p[None], s[None]), 0).T for p, s in parts], -1)


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
    """y [T, H] float64 of x [T, H]; nothing but `roundings` is rounded on the way. shares, chosen
    [T, k]; w1 [E, 2I, H] with rows interleaved gate, up, gate, ...; w1_bias [E, 2I]; w2 [E, H, I];
    w2_bias [E, H]. Experts that no token chose are not read. Raises ValueError when packed elements
    and scales do not belong together."""

    x, shares, chosen = x.cpu().double(), shares.cpu().double(), chosen.cpu().long()
    shares, out = roundings.outputs(shares), torch.zeros_like(x)
    for e in chosen.unique().tolist():
        tokens, rank = (chosen == e).nonzero(as_tuple=True)
        h = hidden(x[tokens], w1, w1_bias, e, alpha=alpha, limit=limit, roundings=roundings)
        y = roundings.outputs(h @ expert_matrix(w2, e).T)
        if w2_bias is not None:
            y = roundings.outputs(y + w2_bias[e].cpu().double())
        out.index_add_(0, tokens, roundings.outputs(y * shares[tokens, rank, None]))
    return out
