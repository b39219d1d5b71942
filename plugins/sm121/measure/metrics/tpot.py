"""The time of a token."""

from dataclasses import dataclass
from typing import ClassVar

from sm121.measure import timing
from sm121.measure.cells import MeasuredCell
from sm121.measure.metrics import TimeMetric


@dataclass(frozen=True, kw_only=True)
class TimePerToken(TimeMetric):
    """``tpot_pQ``: of each token after the first chunk, the mean of a request: 1000 / decode rate.

    Source: vLLM's ``bench serve``, but for tokens that come with the first chunk.
    """

    key: ClassVar[str] = "tpot"

    def samples(self, cell: MeasuredCell) -> list[float]:
        """One of each long answer."""
        clock = cell.counted_by
        rates = [timing.decode_rate(answer, clock) for answer in cell.answers]
        return [1e3 / rate if rate else timing.NEVER for rate in rates]
