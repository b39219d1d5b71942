"""Find wrong block scales of an expert by their effect on the output.

If the exponent of a scale of the second matrix is too high by one, the block's contribution to the
output is added twice; if it is too low by one, half of the contribution is missing. The module
computes which share of the error a block's contribution explains: it projects the error on the
contribution, over all tokens of the expert (least squares). The share is 1 or -1/2 for a wrong
scale. It is near 0 for a correct scale, because rounding errors do not correlate with a block, and
average out.

A wrong scale of the first matrix changes one hidden activation of each token whose nonzero elements
are in its block. The effects of both wrong exponents are computed, and the error is projected on
each of them: the share is 1 for a wrong scale, and near 0 for a correct one.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sm121.core.unmet import Fact
from sm121.oracles import moe, mxfp4

#: The largest accepted share (see `Shares`). It is half of the smallest share that a wrong scale of
#: the second matrix causes.
LIMIT = 0.25

#: The multiple of a block's contribution that the output gains if the block's exponent is too high
#: by one, and if it is too low by one.
WRONG = (1.0, -0.5)

#: The smallest relative change of a hidden activation that is larger than the output's rounding.
_LEAST = 2.0**-9
#: A divisor for contributions of size zero, whose quotient is not used.
_TINY = 1e-300

#: For each expert that has tokens: its number, and the shares [rows, K / 32]. A share is the
#: part of the output's error that the contribution of one block explains (a regression).
Shares = Iterator[tuple[int, Tensor]]


@dataclass(frozen=True)
class Projection:
    """The block whose contribution explains the largest share of an output's error.

    Attributes:
        matrix: "w1" or "w2".
        share: The share; NaN if the share of any block is NaN.
        expert: The number of the expert; -1 if all shares are zero.
        row: The row of the matrix.
        block: The block of 32 elements in the row.
    """

    matrix: str
    share: float = 0.0
    expert: int = -1
    row: int = -1
    block: int = -1

    def beyond(self) -> list[Fact]:
        """Return a `Fact` about the block if its share exceeds `LIMIT` or is NaN."""
        if abs(self.share) <= LIMIT:
            return []
        return [
            Fact(
                "one wrong block scale to explain a share of the error of at most",
                about="block scale",
                value=self.share,
                limit=LIMIT,
                evidence=f"expert {self.expert}, row {self.row}, block {self.block} of "
                f"{self.matrix}",
            )
        ]


def worst(matrix: str, shares: Shares) -> Projection:
    """Return the block whose contribution explains the largest share of the error.

    Args:
        matrix: "w1" or "w2".
        shares: The shares of each expert.

    Returns:
        The projection of that block, or of the first block whose share is NaN.
    """
    largest = Projection(matrix)
    for expert, expert_shares in shares:
        at = int(expert_shares.abs().nan_to_num(nan=math.inf).argmax())
        share = float(expert_shares.flatten()[at])
        row, block = divmod(at, expert_shares.shape[1])
        found = Projection(matrix, share, expert, row, block)
        if math.isnan(share):
            return found
        if abs(share) > abs(largest.share):
            largest = found
    return largest


def of_second_matrix(
    error: Tensor,
    arguments: tuple[Any, ...],
    *,
    roundings: moe.Roundings = moe.EXACT,
    **swiglu: float,
) -> Shares:
    """Yield the shares of the blocks of w2.

    Args:
        error: [T, H] float64, output minus oracle.
        arguments: The positional arguments of `oracles.moe.fused_moe`.
        roundings: The roundings of the provider's kernel.
        **swiglu: The keywords alpha and limit of `oracles.moe.fused_moe`.

    Yields:
        The number of each expert that has tokens, and its shares [H, I/32]. A block that
        contributes nothing to any token has the share 0.
    """
    x, weights, ids, w1, b1, w2, _ = arguments
    for group in _token_groups(ids, weights):
        tokens = group.tokens
        hidden = moe.hidden(x[tokens].double(), w1, b1, group.expert, roundings=roundings, **swiglu)
        hidden = hidden * weights[tokens, group.rank, None].double()
        down = moe.expert_matrix(w2, group.expert)
        along = _in_blocks(down * (error[tokens].T @ hidden)).sum(-1)
        blocks = _in_blocks(down)
        activations = _in_blocks(hidden)
        # The square of a block's contribution, summed over the tokens: w' (sum of h h') w.
        gram = torch.einsum("tbi,tbj->bij", activations, activations)
        size = (torch.einsum("rbi,bij->rbj", blocks, gram) * blocks).sum(-1)
        yield group.expert, torch.where(size > 0, along / size.clamp(min=_TINY), 0.0)


def of_first_matrix(
    error: Tensor,
    arguments: tuple[Any, ...],
    *,
    roundings: moe.Roundings = moe.EXACT,
    **swiglu: float,
) -> Shares:
    """Yield the shares of the blocks of w1.

    The nonzero elements of each token must be in one block, and w2 must copy each hidden activation
    to one output (`expert_layers.reading_out`). An error in the gate row of an activation cannot
    always be distinguished from one in its up row.

    Args:
        error: [T, H] float64, output minus oracle.
        arguments: The positional arguments of `oracles.moe.fused_moe`.
        roundings: The roundings of the provider's kernel.
        **swiglu: The keywords alpha and limit of `oracles.moe.fused_moe`.

    Yields:
        The number of each expert that has tokens, and its shares [2I, H/32]: for each block,
        the larger of the shares for the two wrong exponents.
    """
    _, weights, ids, _, _, w2, _ = arguments
    for group in _token_groups(ids, weights):
        tokens = group.tokens
        moved = Moved.of(arguments, group.expert, tokens, roundings=roundings, **swiglu)
        # The row of w2 that contains the 1 is the output to which the activation is copied.
        read_in = moe.expert_matrix(w2, group.expert).argmax(0)
        observed = error[tokens][:, read_in] / weights[tokens, group.rank, None].double()
        sides = torch.stack([moved.shares(observed, factor) for factor in WRONG])
        sides = sides.nan_to_num(nan=math.inf)
        larger = sides.abs().argmax(0, keepdim=True)
        yield group.expert, sides.gather(0, larger)[0]


@dataclass(frozen=True)
class Moved:
    """The effects of wrong scales of an expert's first matrix on its hidden activations.

    The nonzero elements of each token are in one block. The matrix has gate rows (part 0) and up
    rows (part 1), which alternate.

    Attributes:
        inside: [n, 2I], the first matrix product.
        sums: [n, 2I], the product as the kernel rounds it, plus the bias.
        block: [n], the block with each token's nonzero elements.
        blocks: The number of blocks.
        swiglu: The keywords alpha and limit of `oracles.moe.fused_moe`.
    """

    inside: Tensor
    sums: Tensor
    block: Tensor
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
        """Compute the first matrix product for the tokens of one expert.

        Args:
            arguments: The positional arguments of `oracles.moe.fused_moe`.
            expert: The number of the expert.
            tokens: [n], the numbers of its tokens.
            roundings: The roundings of the provider's kernel.
            **swiglu: The keywords alpha and limit of `oracles.moe.fused_moe`.
        """
        x, _, _, w1, b1, _, _ = arguments
        rows = _in_blocks(roundings.x(x[tokens].double()))
        matrix = _in_blocks(moe.expert_matrix(w1, expert))
        lives = rows.abs().amax(-1).argmax(-1)
        inside = rows.new_zeros(len(rows), len(matrix))
        # A token has elements other than zero in one block only.
        for block in lives.unique().tolist():
            members = lives == block
            inside[members] = rows[members, block] @ matrix[:, block].T
        sums = roundings.sums(inside)
        if b1 is not None:
            sums = sums + b1[expert].double()
        return cls(inside, sums, lives, rows.shape[1], swiglu)

    def factor(self, part: int, factor: float = 0.0) -> Tensor:
        """Return one of SwiGLU's two factors, that of the gate rows or that of the up rows.

        Args:
            part: 0 for the gate rows, 1 for the up rows.
            factor: The multiple of each block's contribution that is added to the rows.

        Returns:
            [n, I].
        """
        rows = self.sums[:, part::2] + factor * self.inside[:, part::2]
        if part:
            return moe.of_up(rows, limit=self.swiglu["limit"])
        return moe.of_gate(rows, **self.swiglu)

    @functools.cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """SwiGLU's factors of the gate rows and the up rows, [n, I] each, with correct scales."""
        return self.factor(0), self.factor(1)

    def hidden(self, factor: float, part: int) -> Tensor:
        """Return the hidden activations [n, I] with a wrong scale in one part.

        Args:
            factor: The multiple of each block's contribution that is added.
            part: 0 for the gate rows, 1 for the up rows.
        """
        return self.factor(part, factor) * self.factors[1 - part]

    @functools.cached_property
    def right(self) -> Tensor:
        """The hidden activations [n, I] with the correct scales, not rounded."""
        return self.hidden(0.0, 0)

    @functools.cached_property
    def least(self) -> Tensor:
        """For each block, the smallest squared effect that exceeds the rounding: [blocks, I]."""
        return self._by_block((self.right * _LEAST).square_())

    def shares(self, error: Tensor, factor: float) -> Tensor:
        """Return how much of an error a wrong scale would explain, for each row and block.

        Args:
            error: [n, I].
            factor: A wrong scale adds this multiple of the block's contribution.

        Returns:
            The shares [2I, blocks].
        """
        gate = self.share(error, factor, 0)
        up = self.share(error, factor, 1)
        return torch.stack([gate, up], 1).flatten(0, 1)

    def share(self, error: Tensor, factor: float, part: int) -> Tensor:
        """Return the shares of one part; see `shares`.

        Args:
            error: [n, I].
            factor: A wrong scale adds this multiple of the block's contribution.
            part: 0 for the gate rows, 1 for the up rows.

        Returns:
            The shares [I, blocks].
        """
        effect = self.hidden(factor, part) - self.right
        along = self._by_block(error * effect)
        size = self._by_block(effect.square_())
        return torch.where(size > self.least, along / size.clamp(min=_TINY), 0.0).T

    def _by_block(self, values: Tensor) -> Tensor:
        """Sum over the tokens of each block: [n, I] -> [blocks, I]."""
        sums = values.new_zeros(self.blocks, values.shape[1])
        return sums.index_add_(0, self.block, values)


@dataclass(frozen=True)
class _TokenGroup:
    """The tokens of one expert, and the position of the expert in each token's list."""

    expert: int
    tokens: Tensor
    rank: Tensor


def _token_groups(ids: Tensor, weights: Tensor) -> Iterator[_TokenGroup]:
    """Yield the tokens of each expert whose routing weight is above zero for at least one token."""
    for expert in ids.unique().tolist():
        tokens, rank = ((ids == expert) & (weights > 0)).nonzero(as_tuple=True)
        if len(tokens):
            yield _TokenGroup(expert, tokens, rank)


def _in_blocks(matrix: Tensor) -> Tensor:
    return matrix.unflatten(-1, (-1, mxfp4.BLOCK))
