"""Measure the error of a kernel's output against the oracle, and load the tolerances.

There are four measures, because each one alone misses some faults. The largest error shows one
wrong element, the RMS error of a row shows one wrong row, the slope <a, r>/<r, r> shows a scale
error, and the mean error shows a bias. The last two are sums over the whole output, so that noise
averages out.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from sm121.core import data_file, unmet
from sm121.kernels.protocol import PLAIN, Declaration, Operation

Measure = Literal["max", "rms", "slope", "bias"]
MEASURES: tuple[Measure, ...] = ("max", "rms", "slope", "bias")
#: The factor by which `widened` multiplies the largest error of the oracle's own rounding.
_ROUNDING_MARGIN = 1.25


class KernelTolerance(data_file.DataTable):
    """The largest accepted errors of an operation's output against the oracle."""

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
    #: These quotients divide at least by this value, so that a row of tiny outputs counts as zero.
    floor: PositiveFloat
    #: If set, the row applies only to providers that declare these activations.
    activations: Literal["mxfp8", "e4m3"] | None = None
    #: Whether the row applies only to providers that declare `rounds_each_expert`.
    each_expert_rounded: bool = False
    #: Whether the row applies only to cases in which every gate is below -limit.
    below_limit: bool = False
    #: Whether the row applies only to cases that copy each hidden activation to one output.
    readout: bool = False
    source: str


def tolerances() -> tuple[KernelTolerance, ...]:
    """Return all tolerances of `fixtures/kernels/tolerances.toml`.

    Raises:
        DataFileError: The file is malformed.
    """
    return data_file.load_key("kernels/tolerances.toml", "tolerance", tuple[KernelTolerance, ...])


def tolerance(
    operation: Operation,
    dtype: torch.dtype,
    declared: Declaration = Declaration(),  # noqa: B008 - Declaration is frozen
    *,
    below_limit: bool = False,
    readout: bool = False,
) -> KernelTolerance | None:
    """Return the most specific tolerance of an operation.

    Args:
        operation: The operation. With an FP8 cache, the tolerance is the same as with bfloat16.
        dtype: The dtype of its output.
        declared: The provider's declaration.
        below_limit: Whether every gate of the case is below -limit.
        readout: Whether the case copies each hidden activation to one output.

    Returns:
        The tolerance, or None if there is none for this dtype.
    """
    # The values of an FP8 cache are exact in bfloat16, and the oracle rounds to FP8 as the cache
    # does.
    operation = PLAIN.get(operation, operation)
    dtype_name = str(dtype).removeprefix("torch.")
    fitting = []
    for row in tolerances():
        if (row.operation, row.dtype, row.below_limit) != (operation, dtype_name, below_limit):
            continue
        if row.activations not in (None, declared.activations):
            continue
        if row.each_expert_rounded and not declared.rounds_each_expert:
            continue
        if row.readout and not readout:
            continue
        fitting.append(row)
    return max(fitting, key=_specificity, default=None)


def _specificity(row: KernelTolerance) -> tuple[bool, bool, bool]:
    """Return a sort key for tolerances that apply to a case; the most specific one is last."""
    return row.activations is not None, row.readout, row.each_expert_rounded


@dataclass(frozen=True)
class Errors:
    """The four measures of one output; see `KernelTolerance`."""

    max: float
    rms: float
    slope: float
    bias: float
    #: The row and the element of the largest error.
    where: tuple[int, int]

    def beyond(self, limit: KernelTolerance) -> list[unmet.Fact]:
        """Return one fact for each measure that exceeds its tolerance or is NaN.

        Args:
            limit: The tolerance.
        """
        row, element = self.where
        facts = []
        for measure in MEASURES:
            value = getattr(self, measure)
            most = getattr(limit, measure)
            if value <= most:
                continue
            facts.append(
                unmet.Fact(
                    f"{measure} of the error at most",
                    value=value,
                    limit=most,
                    evidence=f"worst at row {row}, element {element}",
                )
            )
        return facts


def describe(output: Any) -> str:
    """Return the dtype and the shape of a tensor, or the type of another object.

    Args:
        output: The result of an operation.
    """
    if isinstance(output, Tensor):
        return f"{str(output.dtype).removeprefix('torch.')} {tuple(output.shape)}"
    return type(output).__name__


def widened(limit: KernelTolerance, rounded: Tensor, reference: Tensor) -> KernelTolerance:
    """Widen a tolerance so that it accepts 1.25 times the error of the oracle's own rounding.

    The largest rounding error grows with the number of rows, and the `max` in the file was chosen
    for a few hundred rows.

    Args:
        limit: The tolerance.
        rounded: The rounded reference [rows, n].
        reference: The reference [rows, n] float64.

    Returns:
        The tolerance, whose `max` is at least 1.25 times the largest error of `rounded`.
    """
    largest = _ROUNDING_MARGIN * measure(rounded, reference, limit.floor).max
    return limit.model_copy(update={"max": max(limit.max, largest)})


def measure(actual: Tensor, reference: Tensor, floor: float) -> Errors:
    """Compare an output with the oracle.

    Args:
        actual: [rows, n] of any dtype.
        reference: [rows, n] float64, finite.
        floor: The smallest divisor of the errors; see `KernelTolerance`.

    Returns:
        The errors; zeros if there are no rows.

    Raises:
        ValueError: The shapes differ.
    """
    if actual.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(reference.shape)}")
    if not reference.numel():
        return Errors(max=0.0, rms=0.0, slope=0.0, bias=0.0, where=(0, 0))
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
        where=divmod(worst, reference.shape[-1]),
    )
