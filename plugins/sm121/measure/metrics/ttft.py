"""The time to the first token."""

from dataclasses import dataclass
from typing import ClassVar

from sm121.measure import timing
from sm121.measure.cells import MeasuredCell, median_or_none
from sm121.measure.measurement import Measurement
from sm121.measure.metrics import TimeMetric
from sm121.measure.validity import Findings


@dataclass(frozen=True, kw_only=True)
class TimeToFirstToken(TimeMetric):
    """``ttft_pQ``, ``ttft_cC_pQ``: from the request to the first chunk that carries a generated
    token. A role, an empty event or a usage event is not a token.

    Source: vLLM's ``bench serve``, but for what counts as a token.
    """

    key: ClassVar[str] = "ttft"
    of_first_token: ClassVar[bool] = True

    def samples(self, cell: MeasuredCell) -> list[float]:
        """One of each request, the short ones too."""
        clock = cell.counted_by
        return [timing.ttft_ms(answer, clock) for answer in cell.all_answers]

    def examine(self, cell: MeasuredCell, measurement: Measurement, findings: Findings) -> None:
        """Add the time to the first visible text."""
        super().examine(cell, measurement, findings)
        times = [timing.visible_ms(answer) for answer in cell.answers if answer.ok]
        measurement.extra["visible_ms"] = median_or_none(t for t in times if t is not None)
