"""A problem: arguments for an operation, and a judge that compares its output with the oracle."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sm121.core.unmet import Fact
from sm121.kernels import comparison
from sm121.kernels.protocol import Declaration, Operation

#: Takes an output and the provider's declaration; returns one fact for each fault of the output.
Judge = Callable[[Any, Declaration], list[Fact]]
#: The value of the padding in a widened tensor, which no operation may read.
_PADDING = 77.0


@dataclass(frozen=True)
class Problem:
    """Arguments for an operation, and the judge of its output.

    Attributes:
        operation: The operation.
        arguments: Tensors on the CPU, some in tuples.
        judge: The judge.
        keywords: The other arguments.
        strided: Whether some of the tensors are not contiguous.
        block: The page size in tokens; None if there are no pages.
        reference: The oracle's rows [rows, n] float64, for activations in bfloat16; None if the
            output is not judged by a tolerance.
    """

    operation: Operation
    arguments: tuple[Any, ...]
    judge: Judge
    keywords: dict[str, Any] = field(default_factory=dict)
    strided: bool = False
    block: int | None = None
    reference: Tensor | None = None


@dataclass(frozen=True)
class ToleranceJudge:
    """Compare the rows of an output with the oracle's rows, within a tolerance.

    Attributes:
        operation: The operation.
        shape: The shape of the output.
        reference: Returns the oracle's rows [rows, n] float64 for a declaration.
        definitions: The oracle's rows for other formats, by name. If an output fits one of them,
            the provider declares the wrong format.
        find_more: Returns further faults, given the output minus the reference [rows, n] float64.
        rounded: Returns the reference with the rounding of `rounds_each_expert`.
        below_limit: Whether every gate of the case is below -limit.
        readout: Whether the case copies each hidden activation to one output.
    """

    operation: Operation
    shape: tuple[int, ...]
    reference: Callable[[Declaration], Tensor]
    definitions: Mapping[str, Callable[[], Tensor]]
    find_more: Callable[[Tensor, Declaration], list[Fact]] | None = None
    rounded: Callable[[], Tensor] | None = None
    below_limit: bool = False
    readout: bool = False

    def __call__(self, output: Any, declared: Declaration) -> list[Fact]:
        """Return one fact for each fault of an output.

        Args:
            output: The result of the operation.
            declared: The provider's declaration.
        """
        if not isinstance(output, Tensor) or tuple(output.shape) != self.shape:
            return [Fact(f"a tensor of shape {self.shape}", comparison.describe(output))]
        limit = comparison.tolerance(
            self.operation,
            output.dtype,
            declared,
            below_limit=self.below_limit,
            readout=self.readout,
        )
        if limit is None:
            return [Fact("bfloat16 or float32", comparison.describe(output))]
        expected = self.reference(declared)
        rows = output.reshape(expected.shape)
        errors = comparison.measure(rows, expected, limit.floor)
        if self.rounded is not None and declared.rounds_each_expert and errors.max > limit.max:
            limit = comparison.widened(limit, self.rounded().bfloat16(), expected)
        facts = errors.beyond(limit)
        if facts:
            facts = facts + self._fitting_definitions(rows, limit)
        if self.find_more is not None:
            facts = facts + self.find_more(rows.double().cpu() - expected, declared)
        return facts

    def _fitting_definitions(self, rows: Tensor, limit: comparison.KernelTolerance) -> list[Fact]:
        """Return a fact for each rounding that is not declared, but whose output the rows match."""
        facts = []
        for name, rows_of_format in self.definitions.items():
            errors = comparison.measure(rows, rows_of_format(), limit.floor)
            if not errors.beyond(limit):
                facts.append(Fact("the roundings that are declared", f"those of {name}"))
        return facts


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Return normally distributed float32 values.

    Args:
        generator: The source of random numbers, on the CPU.
        *shape: The shape.
    """
    return torch.randn(shape, generator=generator)


def widened(tensor: Tensor, strided: bool) -> Tensor:
    """Return the same values as a slice of a tensor with twice the columns.

    Args:
        tensor: The values.
        strided: Whether to return the slice, which is not contiguous. If false, return `tensor`
            itself.
    """
    if not strided:
        return tensor
    wide = torch.cat((tensor, torch.full_like(tensor, _PADDING)), -1)
    return wide[..., : tensor.shape[-1]]


def off_edges(values: Tensor) -> Tensor:
    """Set the last bit of bfloat16 values, so that none is halfway between values of E4M3 or E2M1.

    Args:
        values: bfloat16 values of any shape.
    """
    return (values.view(torch.int16) | 1).view(torch.bfloat16)
