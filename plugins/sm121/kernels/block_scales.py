"""Is any block scale of an expert's second matrix another one? By what it would do to the output.

A scale that is one exponent too high adds what its block gives to the output once more, to the same
output of every token of the expert; one too low takes half of it away. How much of a block's part
is in the error is found by projecting one on the other over all tokens of the expert (least
squares): 1, -1/2, or near 0. Rounding is no part of any block, so it averages out, and a kernel
that rounds often is judged as sharply as one that does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sm121.oracles import moe, mxfp4

#: Half of what the least wrong scale shows.
LIMIT = 0.25


@dataclass(frozen=True)
class Projection:
    """The largest share of a block's part in the error of an output, and whose it is."""

    share: float
    expert: int
    row: int
    block: int

    def beyond(self) -> list[str]:
        """One line where it is more than `LIMIT`; NaN always is."""
        if abs(self.share) <= LIMIT:
            return []
        return [
            f"block scale: required at most {LIMIT} of a block's part in the error, seen "
            f"{self.share:.3g} (expert {self.expert}, row {self.row}, block {self.block} of w2)"
        ]


def of_second_matrix(
    error: Tensor, arguments: tuple[Any, ...], *, alpha: float, limit: float
) -> Projection:
    """The block of w2 whose part the error has most of.

    error [T, H] float64: output minus oracle; arguments: those of `oracles.moe.fused_moe`. Blocks
    that give nothing to any token are passed over.
    """
    found = Projection(0.0, -1, -1, -1)
    for expert, shares in each_share(error, arguments, alpha=alpha, limit=limit):
        worst = int(shares.abs().nan_to_num(nan=math.inf).argmax())
        share = float(shares.flatten()[worst])
        if math.isnan(share) or abs(share) > abs(found.share):
            found = Projection(share, expert, *divmod(worst, shares.shape[1]))
        if math.isnan(share):
            break
    return found


def each_share(
    error: Tensor, arguments: tuple[Any, ...], *, alpha: float, limit: float
) -> list[tuple[int, Tensor]]:
    """Of each expert that has tokens: the shares [H, I / 32] of its blocks' parts in the error."""
    x, weights, ids, w1, b1, w2, _ = arguments
    found = []
    for e in ids.unique().tolist():
        tokens, place = ((ids == e) & (weights > 0)).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        hidden = x[tokens].double() @ moe.expert_matrix(w1, e).T
        if b1 is not None:
            hidden = hidden + b1[e].double()
        hidden = moe.swiglu(hidden[:, 0::2], hidden[:, 1::2], alpha=alpha, limit=limit)
        hidden = hidden * weights[tokens, place, None].double()
        down = moe.expert_matrix(w2, e)
        along = _by_block(down * (error[tokens].T @ hidden)).sum(-1)
        blocks, own = _by_block(down), _by_block(hidden)
        # The square of a block's part, summed over the tokens: w' (sum of h h') w.
        gram = torch.einsum("tbi,tbj->bij", own, own)
        size = (torch.einsum("rbi,bij->rbj", blocks, gram) * blocks).sum(-1)
        found.append((e, torch.where(size > 0, along / size.clamp(min=1e-300), 0.0)))
    return found


def _by_block(matrix: Tensor) -> Tensor:
    return matrix.unflatten(-1, (-1, mxfp4.BLOCK))
