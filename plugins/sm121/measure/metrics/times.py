"""The times of a request: to its first token, per token, between chunks, and to its end."""

from dataclasses import dataclass
from typing import ClassVar

from sm121.measure import timing
from sm121.measure.cells import MeasuredCell
from sm121.measure.measurement import Measurement
from sm121.measure.metrics import TimeMetric
from sm121.measure.statistics import median_or_none
from sm121.measure.validity import Findings


@dataclass(frozen=True, kw_only=True)
class TimeToFirstToken(TimeMetric):
    """``ttft_pQ``, ``ttft_cC_pQ``: time to the first chunk with a generated token.

    An event with only a role, an empty event and a usage event do not count as tokens.
    Source: vLLM's ``bench serve``, which counts tokens in another way.
    """

    key: ClassVar[str] = "ttft"
    of_first_token: ClassVar[bool] = True

    def samples(self, cell: MeasuredCell) -> list[float]:
        """Return the time of each request, including the short ones."""
        clock = cell.timed.counted_by
        return [timing.ttft_ms(answer, clock) for answer in cell.timed.all_answers]

    def examine(self, cell: MeasuredCell, measurement: Measurement, findings: Findings) -> None:
        """Add the time to the first visible text."""
        super().examine(cell, measurement, findings)
        times = [timing.visible_ms(answer) for answer in cell.timed.answers if answer.ok]
        measurement.extra["visible_ms"] = median_or_none(time for time in times if time is not None)


@dataclass(frozen=True, kw_only=True)
class TimePerToken(TimeMetric):
    """``tpot_pQ``: mean time per token after the first chunk of a request (1000 / decode rate).

    Source: vLLM's ``bench serve``, except that tokens which arrive with the first chunk do not
    count.
    """

    key: ClassVar[str] = "tpot"

    def samples(self, cell: MeasuredCell) -> list[float]:
        """Return the mean time per token of each long answer."""
        clock = cell.timed.counted_by
        rates = [timing.decode_rate(answer, clock) for answer in cell.timed.answers]
        return [1e3 / rate if rate else timing.NEVER for rate in rates]


@dataclass(frozen=True, kw_only=True)
class InterTokenLatency(TimeMetric):
    """``itl_pQ``: time between consecutive chunks with tokens, pooled over all requests.

    Chunks that arrived together count as one. A gap is not divided by the number of tokens after
    it.
    Source: vLLM's ``bench serve``.
    """

    key: ClassVar[str] = "itl"

    def samples(self, cell: MeasuredCell) -> list[float]:
        """Return all gaps of the long answers."""
        gaps = []
        for answer in cell.timed.answers:
            gaps += timing.gaps_ms(answer, cell.timed.counted_by)
        return gaps


@dataclass(frozen=True, kw_only=True)
class EndToEnd(TimeMetric):
    """``e2e_pQ``: time from the request to its answer's end. Source: vLLM's ``bench serve``."""

    key: ClassVar[str] = "e2e"

    def samples(self, cell: MeasuredCell) -> list[float]:
        """Return the time of each long answer."""
        return [timing.e2e_ms(answer) for answer in cell.timed.answers]
