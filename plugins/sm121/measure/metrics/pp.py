"""The prefill rate of one prompt, and of several at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from sm121.client.timed_answer import Clock, TimedAnswer
from sm121.core.verdict import Inapplicable
from sm121.measure import timing
from sm121.measure.cells import MeasuredCell
from sm121.measure.measurement import Measurement, Unit
from sm121.measure.metrics import Metric
from sm121.measure.statistics import median_or_none
from sm121.measure.validity import Findings


@dataclass(frozen=True)
class PrefillRate(Metric):
    """``ppN@dD``, ``ppN_cC@dD``: prefill rate with one prompt or C prompts, in tokens a second.

    The rate with one prompt is its length, including the uncached depth, divided by the time to the
    first token; nothing is subtracted. The rate with several prompts is their total length divided
    by the time until each request has its first token. Source: llama-bench's pp, at a client.
    """

    key: ClassVar[str] = "pp"
    unit: ClassVar[Unit] = "tok/s"
    higher_is_better: ClassVar[bool] = True
    of_first_token: ClassVar[bool] = True
    first_visit: ClassVar[bool] = True

    def name(self, cell: MeasuredCell) -> str:
        """Return ``pp2048@d0``."""
        return f"pp{cell.server.plan.prompt_tokens}{cell.shape.suffix}@d{cell.depth}"

    def samples(self, cell: MeasuredCell) -> list[float]:
        """Return one rate per request; for several streams, one per round.

        Raises:
            Inapplicable: The server runs fewer requests at a time, so that some prompts wait.
        """
        if cell.shape.queued:
            raise Inapplicable(
                f"{cell.concurrency} prompts are not computed at the same time: the server was "
                f"started to run {cell.server.slots} at once (--max-num-seqs), and the rest wait"
            )
        clock = cell.timed.counted_by
        if cell.concurrency > 1:
            return [common_prefill_rate(answers, clock) for answers in cell.timed.long]
        answers = sorted(cell.timed.all_answers, key=lambda answer: answer.sent_ns)
        return [prefill_rate(answer, clock) for answer in answers]

    def examine(self, cell: MeasuredCell, measurement: Measurement, findings: Findings) -> None:
        """Add TTFT, and for one stream the slope over the lengths of the measured prompts."""
        super().examine(cell, measurement, findings)
        clock = cell.timed.counted_by
        measurement.extra = {
            "prompt_tokens": cell.shape.prompt_tokens,
            "ttft_ms": median_or_none(
                timing.ttft_ms(answer, clock) for answer in cell.timed.all_answers
            ),
        }
        if cell.concurrency == 1:
            cells = cell.siblings.values()
            alone = [sibling for sibling in cells if sibling.concurrency == 1]
            measurement.extra["slope_tok_s"] = prefill_slope(alone)


def prefill_rate(answer: TimedAnswer, clock: Clock) -> float:
    """Return the prompt's tokens divided by TTFT, in tokens per second, with nothing subtracted.

    Args:
        answer: The answer; a failed one has the rate 0.
        clock: How its tokens are counted.
    """
    first_ms = timing.ttft_ms(answer, clock)
    if first_ms >= timing.NEVER:
        return 0.0
    tokens = answer.prompt_tokens or answer.asked_prompt
    return tokens / first_ms * 1e3


def common_prefill_rate(answers: Sequence[TimedAnswer], clock: Clock) -> float:
    """Return the prefill rate of concurrent streams.

    Args:
        answers: The answers of one round.
        clock: How their tokens are counted.

    Returns:
        All prompt tokens over the time until each stream has its first token, in tokens per second;
        0 if a request failed.
    """
    streams = [timing.arrivals(answer, clock) for answer in answers if answer.ok]
    if len(streams) < len(answers) or not all(streams):
        return 0.0
    began_ns = min(answer.sent_ns for answer in answers)
    ended_ns = max(chunks[0].at_ns for chunks in streams)
    tokens = sum(answer.prompt_tokens or answer.asked_prompt for answer in answers)
    return tokens / (ended_ns - began_ns) * 1e9


def prefill_slope(cells: Sequence[MeasuredCell]) -> float | None:
    """Return the prefill rate from the slope of TTFT over the prompt's length.

    The constant cost of a request is not part of it.

    Args:
        cells: Cells of one stream.

    Returns:
        Prompt tokens a second; None with fewer than two lengths.
    """
    points = []
    for cell in cells:
        clock = cell.timed.counted_by
        times = [timing.ttft_ms(answer, clock) for answer in cell.timed.all_answers]
        if times:
            points.append((cell.shape.prompt_tokens, median(times)))
    if len(points) < 2:
        return None
    fewest, early_ms = min(points)
    most, late_ms = max(points)
    if not early_ms < late_ms < timing.NEVER:
        return None
    return (most - fewest) / (late_ms - early_ms) * 1e3
