"""Whole sequences as pages, for kernels that read nothing but a paged cache."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Paging:
    """Where the tokens of sequences lie one after the other in pages of `page` tokens."""

    page: int
    edges: list[int]
    counts: list[int]
    """Pages of each sequence."""

    @classmethod
    def of(cls, cu_seqlens: Tensor, page: int) -> "Paging":
        """For sequences with these edges."""
        edges: list[int] = cu_seqlens.tolist()
        spans = itertools.pairwise(edges)
        return cls(page, edges, [-(-(end - start) // page) for start, end in spans])

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in itertools.pairwise(self.edges)]

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
        slots = torch.empty(self.edges[-1], dtype=torch.int64)
        first = 0
        for i, count in enumerate(self.counts):
            start, end = self.edges[i], self.edges[i + 1]
            slots[start:end] = torch.arange(first, first + end - start)
            first += count * self.page
        return slots

    def table(self) -> Tensor:
        """[n, most pages] int32; what a sequence does not have is page 0."""
        table = torch.zeros(len(self.counts), max(self.counts, default=1) or 1, dtype=torch.int32)
        first = 0
        for i, count in enumerate(self.counts):
            table[i, :count] = torch.arange(first, first + count)
            first += count
        return table
