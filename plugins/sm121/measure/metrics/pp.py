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
    """``ppN@dD``: prompt tokens, depth included and all of them cold, over the time to the first
    token, with nothing subtracted. ``ppN_cC@dD``: the prompts of C requests at once, over the time
    until each has its first token. Source: llama-bench's pp, as a client sees it."""

    key: ClassVar[str] = "pp"
    unit: ClassVar[Unit] = "tok/s"
    higher_is_better: ClassVar[bool] = True
    of_first_token: ClassVar[bool] = True
    first_visit: ClassVar[bool] = True

    def name(self, cell: MeasuredCell) -> str:
        """``pp2048@d0``."""
        return f"pp{cell.server.plan.prompt_tokens}{cell.suffix}@d{cell.depth}"

    def samples(self, cell: MeasuredCell) -> list[float]:
        """One of each request; of several streams, one a round. Raises Inapplicable: some wait
        until others have decoded."""
        if cell.queued:
            raise Inapplicable(
                f"{cell.concurrency} prompts are not computed at the same time: the server was "
                f"asked to run {cell.server.slots} at once (--max-num-seqs), and the rest wait"
            )
        clock = cell.counted_by
        if cell.concurrency > 1:
            return [common_prefill_rate(answers, clock) for answers in cell.long]
        answers = sorted(cell.all_answers, key=lambda answer: answer.sent_ns)
        return [prefill_rate(answer, clock) for answer in answers]

    def examine(self, cell: MeasuredCell, measurement: Measurement, findings: Findings) -> None:
        """Add TTFT, and the slope over the prompts of one stream that were measured so far."""
        super().examine(cell, measurement, findings)
        clock = cell.counted_by
        measurement.extra = {
            "prompt_tokens": cell.prompt_tokens,
            "ttft_ms": median_or_none(timing.ttft_ms(a, clock) for a in cell.all_answers),
        }
        if cell.concurrency == 1:
            alone = [one for one in cell.server.cells.values() if one.concurrency == 1]
            measurement.extra["slope_tok_s"] = prefill_slope(alone)


def prefill_rate(answer: TimedAnswer, clock: Clock) -> float:
    """Prompt tokens a second over TTFT, with nothing subtracted."""
    first_ms = timing.ttft_ms(answer, clock)
    tokens = answer.prompt_tokens or answer.asked_prompt
    return tokens / first_ms * 1e3 if first_ms < timing.NEVER else 0.0


def common_prefill_rate(answers: Sequence[TimedAnswer], clock: Clock) -> float:
    """Prompt tokens of streams side by side over the time until all of them have a first token. A
    failed one makes it nothing."""
    streams = [timing.arrivals(answer, clock) for answer in answers if answer.ok]
    if len(streams) < len(answers) or not all(streams):
        return 0.0
    began_ns = min(answer.sent_ns for answer in answers)
    tokens = sum(answer.prompt_tokens or answer.asked_prompt for answer in answers)
    return tokens / (max(chunks[0].at_ns for chunks in streams) - began_ns) * 1e9


def prefill_slope(cells: Sequence[MeasuredCell]) -> float | None:
    """Prompt tokens a second by the slope of TTFT over the length of the prompt, which what every
    request costs has no part in. None with fewer than two lengths."""
    points = []
    for cell in cells:
        clock = cell.counted_by
        if times := [timing.ttft_ms(answer, clock) for answer in cell.all_answers]:
            points.append((cell.prompt_tokens, median(times)))
    if len(points) < 2:
        return None
    (fewest, early), (most, late) = min(points), max(points)
    return (most - fewest) / (late - early) * 1e3 if early < late < timing.NEVER else None
