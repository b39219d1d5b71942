"""Whole sequences as pages, for kernels that read nothing but a paged cache."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Paging:
    """Where the tokens of sequences with these edges lie one after the other in pages of `page`
    tokens."""

    edges: list[int]
    page: int

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in itertools.pairwise(self.edges)]

    @property
    def counts(self) -> list[int]:
        """Pages of each sequence."""
        return [-(-length // self.page) for length in self.lengths]

    @property
    def last(self) -> list[int]:
        """Tokens in the last page of each sequence."""
        return [
            length - max(count - 1, 0) * self.page
            for length, count in zip(self.lengths, self.counts, strict=True)
        ]

    @property
    def pages(self) -> int:
        return sum(self.counts)

    def slots(self) -> Tensor:
        """[T] int64: the place of each token in the cache, counted in tokens."""
        tables = zip(self.table(), self.lengths, strict=True)
        offsets = torch.arange(self.page)
        parts = [(pages[:, None] * self.page + offsets).flatten()[:size] for pages, size in tables]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts])

    def table(self) -> Tensor:
        """[n, most pages] int32; what a sequence does not have is page 0."""
        table = torch.zeros(len(self.counts), max(self.counts, default=1) or 1, dtype=torch.int32)
        firsts = itertools.accumulate(self.counts, initial=0)
        for row, first, count in zip(table, firsts, self.counts, strict=False):
            row[:count] = torch.arange(first, first + count)
        return table
