"""Is any block scale of an expert another one? By what it would do to the output. A scale of the
second matrix that is one exponent too high adds what its block gives to the output once more; one
too low takes half of it away. How much of a block's part is in the error is found by projecting one
on the other over all tokens of the expert (least squares): 1, -1/2, or near 0. Rounding is no part
of any block, so it averages out. A scale of the first matrix moves one hidden activation of every
token that lives in its block. What both wrong scales would do is computed, and the error projected
on each: 1 or near 0."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sm121.core.unmet import Fact
from sm121.oracles import moe, mxfp4

#: Half of what the least wrong scale of the second matrix shows.
LIMIT = 0.25

#: Of a hidden activation: what moves it by less is hidden by the output's own rounding.
_LEAST = 2.0**-9


@dataclass(frozen=True)
class Projection:
    """The largest share of a block's part in the error of an output, and whose it is."""

    matrix: str
    share: float = 0.0
    expert: int = -1
    row: int = -1
    block: int = -1

    def beyond(self) -> list[Fact]:
        """One fact where it is more than `LIMIT`; NaN always is."""
        if abs(self.share) <= LIMIT:
            return []
        return [
            Fact(
                "of a block's part in the error at most",
                about="block scale",
                value=self.share,
                limit=LIMIT,
                evidence=f"expert {self.expert}, row {self.row}, block {self.block} of "
                f"{self.matrix}",
            )
        ]


Shares = Iterator[tuple[int, Tensor]]
"""Of each expert that has tokens: its number, and the shares [rows, K / 32] of its blocks' parts in
the error."""


def worst(matrix: str, shares: Shares) -> Projection:
    """The block whose part the error has most of; NaN before any other."""
    largest = Projection(matrix)
    for expert, each in shares:
        at = int(each.abs().nan_to_num(nan=math.inf).argmax())
        share = float(each.flatten()[at])
        if math.isnan(share) or abs(share) > abs(largest.share):
            largest = Projection(matrix, share, expert, *divmod(at, each.shape[1]))
        if math.isnan(share):
            break
    return largest


def of_second_matrix(
    error: Tensor,
    arguments: tuple[Any, ...],
    *,
    roundings: moe.Roundings = moe.EXACT,
    **swiglu: float,
) -> Shares:
    """The shares of w2. error [T, H] float64: output minus oracle; arguments and keywords: those of
    `oracles.moe.fused_moe`. Blocks that give nothing to any token have none."""
    x, weights, ids, w1, b1, w2, _ = arguments
    for e, tokens, rank in _tokens(ids, weights):
        hidden = moe.hidden(x[tokens].double(), w1, b1, e, roundings=roundings, **swiglu)
        hidden = hidden * weights[tokens, rank, None].double()
        down = moe.expert_matrix(w2, e)
        along = _by_block(down * (error[tokens].T @ hidden)).sum(-1)
        blocks, activations = _by_block(down), _by_block(hidden)
        # The square of a block's part, summed over the tokens: w' (sum of h h') w.
        gram = torch.einsum("tbi,tbj->bij", activations, activations)
        size = (torch.einsum("rbi,bij->rbj", blocks, gram) * blocks).sum(-1)
        yield e, torch.where(size > 0, along / size.clamp(min=1e-300), 0.0)


def of_first_matrix(
    error: Tensor,
    arguments: tuple[Any, ...],
    *,
    roundings: moe.Roundings = moe.EXACT,
    **swiglu: float,
) -> Shares:
    """The shares of w1, where each token lives in one block and w2 reads each hidden activation out
    alone; the larger of both wrong scales. As of `of_second_matrix`. The gate row and the up row of
    an activation cannot always be told apart."""
    _, weights, ids, *_ = arguments
    for e, tokens, rank in _tokens(ids, weights):
        moved = Moved.of(arguments, e, tokens, roundings=roundings, **swiglu)
        # Where w2 has its one: the output that an activation is read out in.
        read_in = moe.expert_matrix(arguments[5], e).argmax(0)
        observed = error[tokens][:, read_in] / weights[tokens, rank, None].double()
        sides = torch.stack([moved.shares(observed, factor) for factor in WRONG])
        sides = sides.nan_to_num(nan=math.inf)
        yield e, sides.gather(0, sides.abs().argmax(0, keepdim=True))[0]


WRONG = (1.0, -0.5)
"""What a scale one too high and one too low adds of its block's part."""


@dataclass(frozen=True)
class Moved:
    """What wrong scales of an expert's first matrix do to its hidden activations, where each token
    lives in one block."""

    inside: Tensor
    """[n, 2I], the first product."""
    sums: Tensor
    """[n, 2I], as the path rounds them, with the bias."""
    block: Tensor
    """[n], where each token lives."""
    blocks: int
    swiglu: dict[str, float]

    @classmethod
    def of(
        cls,
        arguments: tuple[Any, ...],
        expert: int,
        tokens: Tensor,
        *,
        roundings: moe.Roundings = moe.EXACT,
        **swiglu: float,
    ) -> "Moved":
        """Of one expert's tokens."""
        x, _, _, w1, b1, *_ = arguments
        rows = _by_block(roundings.x(x[tokens].double()))
        matrix = _by_block(moe.expert_matrix(w1, expert))
        lives = rows.abs().amax(-1).argmax(-1)
        inside = rows.new_zeros(len(rows), len(matrix))
        for block in lives.unique().tolist():  # a token's other elements are zeros
            members = lives == block
            inside[members] = rows[members, block] @ matrix[:, block].T
        sums = roundings.sums(inside) + (0.0 if b1 is None else b1[expert].double())
        return cls(inside, sums, lives, rows.shape[1], swiglu)

    def factor(self, part: int, factor: float = 0.0) -> Tensor:
        """What SwiGLU has of the gate rows (part 0) or of the up rows (part 1), [n, I], with that
        much more of each block's part in them."""
        rows = self.sums[:, part::2] + factor * self.inside[:, part::2]
        return (
            moe.of_up(rows, limit=self.swiglu["limit"])
            if part
            else moe.of_gate(rows, **self.swiglu)
        )

    @functools.cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        return self.factor(0), self.factor(1)

    def hidden(self, factor: float, part: int) -> Tensor:
        """The hidden activations [n, I] with that much more in one of both."""
        return self.factor(part, factor) * self.factors[1 - part]

    @functools.cached_property
    def right(self) -> Tensor:
        """The hidden activations [n, I], not rounded."""
        return self.hidden(0.0, 0)

    @functools.cached_property
    def least(self) -> Tensor:
        """What an effect's square, summed by block, must be above to be seen: [blocks, I]."""
        return self._by_block((self.right * _LEAST).square_())

    def shares(self, error: Tensor, factor: float) -> Tensor:
        """How much of what `factor` does is in `error` [n, I]: [2I, blocks]."""
        return torch.stack([self.share(error, factor, part) for part in (0, 1)], 1).flatten(0, 1)

    def share(self, error: Tensor, factor: float, part: int) -> Tensor:
        """The same of the gate rows or of the up rows: [I, blocks]."""
        effect = self.hidden(factor, part) - self.right
        along, size = self._by_block(error * effect), self._by_block(effect.square_())
        return torch.where(size > self.least, along / size.clamp(min=1e-300), 0.0).T

    def _by_block(self, values: Tensor) -> Tensor:
        """Sums over the tokens that live in each block: [n, I] -> [blocks, I]."""
        sums = values.new_zeros(self.blocks, values.shape[1])
        return sums.index_add_(0, self.block, values)


def _tokens(ids: Tensor, weights: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each expert that has tokens with a share: its number, the tokens, its place in each."""
    for e in ids.unique().tolist():
        tokens, rank = ((ids == e) & (weights > 0)).nonzero(as_tuple=True)
        if len(tokens):
            yield e, tokens, rank


def _by_block(matrix: Tensor) -> Tensor:
    return matrix.unflatten(-1, (-1, mxfp4.BLOCK))
