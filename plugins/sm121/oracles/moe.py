"""The mixture of experts of gpt-oss in float64, on MXFP4 weights as the checkpoint has them.

Source: the gpt-oss model card (arXiv:2508.10925) and reference implementation (openai/gpt-oss,
gpt_oss/torch/model.py, `swiglu` and MLPBlock). T tokens, H hidden, I intermediate, E experts, k
experts a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sm121.oracles import mxfp4

Packed = tuple[Tensor, Tensor]
"""MXFP4 weights: packed [E, rows, K/2] u8, scales [E, rows, K/32] u8."""


def swiglu(gate: Tensor, up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """min(gate, limit) * sigmoid(alpha * that) * (clamp(up, -limit, limit) + 1).

    gate, up and the result have one shape. The gate is clamped from above only.
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1.0)


def mixture(
    x: Tensor, shares: Tensor, chosen: Tensor, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Sum over a token's experts of share times what the expert makes of the token.

    x [T, H], shares and chosen [T, k] -> [T, H] in the dtype of x. `expert(e, x[n, H])` -> [n, H]
    is called only for experts that some token chose.
    """
    out = torch.zeros_like(x)
    for e in chosen.unique().tolist():
        tokens, place = (chosen == e).nonzero(as_tuple=True)
        out.index_add_(0, tokens, expert(e, x[tokens]) * shares[tokens, place, None])
    return out


def expert_matrix(weights: Packed, expert: int) -> Tensor:
    """The matrix [rows, K] of one expert, float64, exact."""
    packed, scales = (part[expert].cpu().numpy() for part in weights)
    return torch.from_numpy(mxfp4.dequantise(packed, scales))


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
) -> Tensor:
    """y [T, H] float64 of x [T, H]; nothing is rounded on the way.

    shares, chosen [T, k]; w1 [E, 2I, H] with rows interleaved gate, up, gate, ...; w1_bias [E, 2I];
    w2 [E, H, I]; w2_bias [E, H]. Experts that no token chose are not read. Raises ValueError when
    packed elements and scales do not belong together.
    """

    def expert(e: int, rows: Tensor) -> Tensor:
        t = rows @ expert_matrix(w1, e).T
        if w1_bias is not None:
            t = t + w1_bias[e].cpu().double()
        t = swiglu(t[:, 0::2], t[:, 1::2], alpha=alpha, limit=limit)
        y = t @ expert_matrix(w2, e).T
        return y if w2_bias is None else y + w2_bias[e].cpu().double()

    return mixture(x.cpu().double(), shares.cpu().double(), chosen.cpu().long(), expert)
