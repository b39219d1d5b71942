"""The gaps between chunks."""

from dataclasses import dataclass
from typing import ClassVar

from sm121.measure import timing
from sm121.measure.cells import MeasuredCell
from sm121.measure.measurement import Measurement
from sm121.measure.metrics import TimeMetric
from sm121.measure.validity import Findings


@dataclass(frozen=True, kw_only=True)
class InterTokenLatency(TimeMetric):
    """``itl_pQ``: all gaps between chunks that carry tokens, pooled; chunks that came together are
    one.

    Source: vLLM's ``bench serve``.
    """

    key: ClassVar[str] = "itl"

    def samples(self, cell: MeasuredCell) -> list[float]:
        """One of each gap of the long answers."""
        clock = cell.counted_by
        return [gap for answer in cell.answers for gap in timing.gaps_ms(answer, clock)]

    def examine(self, cell: MeasuredCell, measurement: Measurement, findings: Findings) -> None:
        """A gap is that of an arrival, whatever tokens it has."""
        super().examine(cell, measurement, findings)
        measurement.extra["per"] = "arrival"
