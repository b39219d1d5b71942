"""The prefill rate of one prompt, or of several prompts at once."""

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
    """``ppN@dD``, ``ppN_cC@dD``: prefill rate of one prompt or of C prompts, in tokens per second.

    The rate of one prompt is its length, including the depth (which is not cached), divided by the
    time to the first token. No overhead is subtracted from this time. The rate of several prompts
    is their total length divided by the time until each request has its first token.
    Source: llama-bench's pp, measured here by a client.
    """

    key: ClassVar[str] = "pp"
    unit: ClassVar[Unit] = "tok/s"
    higher_is_better: ClassVar[bool] = True
    of_first_token: ClassVar[bool] = True
    first_visit: ClassVar[bool] = True

    def name(self, cell: MeasuredCell) -> str:
        """Return the metric's name, for example ``pp2048@d0`` (2048 tokens, depth 0)."""
        return f"pp{cell.server.plan.prompt_tokens}{cell.shape.suffix}@d{cell.depth}"

    def samples(self, cell: MeasuredCell) -> list[float]:
        """Return one rate for each request. With several streams, return one for each round.

        Raises:
            Inapplicable: The server runs fewer requests at a time than there are prompts.
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
        """Add the TTFT.

        For one stream, also add the rate from the slope over the prompts' lengths.
        """
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
    """Return the number of prompt tokens divided by the TTFT, in tokens per second.

    Args:
        answer: The answer; a failed one has the rate 0.
        clock: How the answer's tokens are counted.
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
        clock: How the answers' tokens are counted.

    Returns:
        All prompt tokens, divided by the time until each stream has its first token, in tokens per
        second; 0 if a request failed.
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

    The constant cost of a request does not affect this rate.

    Args:
        cells: Cells of one stream.

    Returns:
        Prompt tokens per second; None if the cells have fewer than two lengths.
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
