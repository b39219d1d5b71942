"""The time of a whole request."""

from dataclasses import dataclass
from typing import ClassVar

from sm121.measure import timing
from sm121.measure.cells import MeasuredCell
from sm121.measure.metrics import TimeMetric


@dataclass(frozen=True, kw_only=True)
class EndToEnd(TimeMetric):
    """``e2e_pQ``: from the request to the end of its answer.

    Source: vLLM's ``bench serve``.
    """

    key: ClassVar[str] = "e2e"

    def samples(self, cell: MeasuredCell) -> list[float]:
        """One of each long answer."""
        return [timing.e2e_ms(answer) for answer in cell.answers]
