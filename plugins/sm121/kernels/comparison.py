"""How far a kernel's output is from the oracle, and how far it may be. Four measures, because each
is blind to something: the largest error sees one wrong element, the row's RMS one wrong row, the
slope <a, r>/<r, r> a scale error (all of them sum over the whole output, so noise averages out),
the mean error a bias. The measures of `peer-survey.md` §3.2."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from sm121.core import data_file, unmet
from sm121.kernels.protocol import Declaration

Measure = Literal["max", "rms", "slope", "bias"]
MEASURES: tuple[Measure, ...] = ("max", "rms", "slope", "bias")


class KernelTolerance(data_file.DataTable):
    """What an operation's output may be away from the oracle."""

    operation: str
    #: The dtype of the output.
    dtype: str
    #: Largest |a - r| / max(|r|, RMS of the row).
    max: PositiveFloat
    #: Largest over the rows: RMS of a - r / RMS of r.
    rms: PositiveFloat
    #: |<a, r> / <r, r> - 1|.
    slope: PositiveFloat
    #: |mean(a - r)| / RMS of r.
    bias: PositiveFloat
    #: A row's RMS counts as at least this: the size below which an output is as good as zero.
    floor: PositiveFloat
    #: For providers that declare these activations alone.
    activations: Literal["mxfp8", "e4m3"] | None = None
    #: For providers that declare `rounds_each_expert` alone.
    each_expert_rounded: bool = False
    #: For the cases in which every gate is below -limit alone.
    below_limit: bool = False
    #: For the cases that read hidden activations out one by one alone.
    readout: bool = False
    source: str


def tolerances() -> tuple[KernelTolerance, ...]:
    """All tolerances of `fixtures/kernels/tolerances.toml`. Raises DataFileError when the file does
    not say what it has to."""
    return data_file.load_key("kernels/tolerances.toml", "tolerance", tuple[KernelTolerance, ...])


def tolerance(
    operation: str,
    dtype: torch.dtype,
    declared: Declaration = Declaration(),  # noqa: B008 - frozen
    *,
    below_limit: bool = False,
    readout: bool = False,
) -> KernelTolerance | None:
    """The tolerance of an operation with outputs of a dtype: the one that is for the least else;
    None where there is none."""
    # An FP8 cache's values are exact in bfloat16, and what writing it rounds is in the oracle.
    operation = operation.removesuffix("_fp8")
    key = (operation, str(dtype).removeprefix("torch."), below_limit)
    fitting = [
        t
        for t in tolerances()
        if (t.operation, t.dtype, t.below_limit) == key
        and t.activations in (None, declared.activations)
        and t.each_expert_rounded <= declared.rounds_each_expert
        and t.readout <= readout
    ]
    return max(
        fitting,
        key=lambda t: (t.activations is not None, t.readout, t.each_expert_rounded),
        default=None,
    )


@dataclass(frozen=True)
class Errors:
    """The four measures of one output, and the row and element of the largest error."""

    max: float
    rms: float
    slope: float
    bias: float
    where: tuple[int, int]

    def beyond(self, limit: KernelTolerance) -> list[unmet.Fact]:
        """One fact for each measure that is beyond its tolerance; NaN always is."""
        return [
            unmet.Fact(
                f"{measure} of the error at most",
                value=getattr(self, measure),
                limit=getattr(limit, measure),
                evidence=f"worst at row {self.where[0]}, element {self.where[1]}",
            )
            for measure in MEASURES
            if not getattr(self, measure) <= getattr(limit, measure)
        ]


def describe(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"{str(output.dtype).removeprefix('torch.')} {tuple(output.shape)}"
    return type(output).__name__


def widened(limit: KernelTolerance, rounded: Tensor, reference: Tensor) -> KernelTolerance:
    """The tolerance with a quarter more than the largest error of `rounded` [rows, n], the oracle's
    own rounding, where that is more: it grows with the rows, and `max` is of some hundred."""
    largest = 1.25 * measure(rounded, reference, limit.floor).max
    return limit.model_copy(update={"max": max(limit.max, largest)})


def measure(actual: Tensor, reference: Tensor, floor: float) -> Errors:
    """Compare actual [rows, n] of any dtype with reference [rows, n] float64, which is finite. No
    rows at all have no errors. Raises ValueError for different shapes."""
    if actual.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(reference.shape)}")
    if not reference.numel():
        return Errors(0.0, 0.0, 0.0, 0.0, (0, 0))
    error = actual.double().cpu() - reference
    size = reference.square().mean(-1, keepdim=True).sqrt().clamp(min=floor)
    relative = (error / torch.maximum(reference.abs(), size)).abs()
    worst = int(relative.nan_to_num(nan=math.inf).argmax())
    whole = max(float(reference.square().mean().sqrt()), floor)
    slope = float((error * reference).mean() / whole**2)
    return Errors(
        max=float(relative.max()),
        rms=float((error.square().mean(-1, keepdim=True).sqrt() / size).max()),
        slope=abs(slope),
        bias=abs(float(error.mean())) / whole,
        where=(worst // reference.shape[-1], worst % reference.shape[-1]),
    )
