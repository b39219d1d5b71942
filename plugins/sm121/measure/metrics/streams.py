"""The decode rate of several streams together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from sm121.client.timed_answer import Clock, TimedAnswer
from sm121.core import unmet, verdict
from sm121.measure import cells, decoding, timing, validity
from sm121.measure.measurement import Measurement, Unit
from sm121.measure.metrics import Metric
from sm121.measure.statistics import median_or_none

#: A rate of several streams below this share of what its neighbours make expect is a dip; between
#: captured sizes 17 to 25 % were lost (dendro-logic).
_DIP = 0.9


@dataclass(frozen=True)
class StreamsRate(Metric):
    """``tgN_cC@dD``: tokens a second of C streams while all of them decode: from the last stream's
    first token to the first stream's last. ``tgN_qC@dD``: of C streams that are served in turns,
    all tokens after the first one, over the time to the last one. Source: the throughput of the
    effort's own reports, without the prompts."""

    key: ClassVar[str] = "streams"
    unit: ClassVar[Unit] = "tok/s"
    higher_is_better: ClassVar[bool] = True

    def name(self, cell: cells.MeasuredCell) -> str:
        """``tg32_c4@d0``."""
        return f"tg{cell.tokens_together}{cell.suffix}@d{cell.depth}"

    def samples(self, cell: cells.MeasuredCell) -> list[float]:
        """One of each round whose streams decoded at the same time."""
        clock = cell.counted_by
        if cell.queued:
            return [rate_in_turns(answers, clock) for answers in cell.long]
        windows = [common_windows(answers, clock) or [] for answers in self._together(cell)]
        return [sum(window.rate for window in each) for each in windows]

    def examine(
        self, cell: cells.MeasuredCell, measurement: Measurement, findings: validity.Findings
    ) -> None:
        """Add the rate of each stream, and tell a dip between the numbers of streams measured so
        far. Raises NotRun: the streams decoded together in fewer than half of the rounds; Unmet:
        the server was asked to run them together, and never ran more than half of them."""
        apart = 0 if cell.queued else len(cell.long) - len(self._together(cell))
        if apart and not findings.invalid and 2 * apart >= len(cell.long):
            why = (
                f"{measurement.name}: in {apart} of {len(cell.long)} rounds the "
                f"{cell.concurrency} streams did not decode {cell.tokens_together // 2} tokens at "
                "the same time: the server runs fewer at once, or one after another. Let it run as "
                "many (--max-num-seqs, --parallel), or take them off [performance.measuring] "
                "concurrency"
            )
            most = max(_most_at_once(answers, cell.counted_by) for answers in cell.long)
            if cell.server.slots_sure and 2 * most <= cell.concurrency:
                side_by_side = f"{cell.concurrency} streams side by side, as the server was asked"
                raise unmet.Unmet(unmet.Fact(side_by_side, f"{most} at most", evidence=why))
            raise verdict.NotRun(why)
        super().examine(cell, measurement, findings)
        clock = cell.counted_by
        measurement.extra = {
            "per_stream_tok_s": median_or_none(timing.decode_rate(a, clock) for a in cell.answers),
            "rounds_apart": apart,
            **cell.speculation(),
        }
        if measurement.samples and not findings.invalid and not cell.queued:
            rates = cell.server.rates_together
            rates[cell.concurrency] = median(measurement.samples)
            measurement.remarks += dips(rates)

    @staticmethod
    def _together(cell: cells.MeasuredCell) -> list[list[TimedAnswer]]:
        """The rounds in which all streams decode half of their tokens together, or one failed."""
        clock, together = cell.counted_by, []
        for answers in cell.long:
            tokens = [window.tokens for window in common_windows(answers, clock) or ()]
            complete = all(answer.ok for answer in answers)
            if not complete or 2 * min(tokens, default=0) >= cell.tokens_together:
                together.append(answers)
        return together


def common_windows(answers: Sequence[TimedAnswer], clock: Clock) -> list[decoding.Window] | None:
    """Of streams side by side, the part in which all of them decode; None where there is none."""
    if not answers or not all(answer.ok for answer in answers):
        return None
    streams = [timing.arrivals(answer, clock) for answer in answers]
    return decoding.common(streams, drafts=bool(answers[0].text))


def _most_at_once(answers: Sequence[TimedAnswer], clock: Clock) -> int:
    streams = [timing.arrivals(answer, clock) for answer in answers if answer.ok]
    spans = [(chunks[0].at_ns, chunks[-1].at_ns) for chunks in streams if chunks]
    return max((sum(a <= start < b for a, b in spans) for start, _ in spans), default=0)


def rate_in_turns(answers: Sequence[TimedAnswer], clock: Clock) -> float:
    """Tokens a second of requests of which some wait until others have ended: all tokens after the
    first chunk, over the time from it to the last one. A failed one makes it nothing."""
    streams = [timing.arrivals(answer, clock) for answer in answers if answer.ok]
    if len(streams) < len(answers) or not all(streams):
        return 0.0
    first = min(chunks[0] for chunks in streams)
    ended_ns = max(chunks[-1].at_ns for chunks in streams)
    tokens = sum(chunks[-1].tokens for chunks in streams) - first.tokens
    return tokens / (ended_ns - first.at_ns) * 1e9 if ended_ns > first.at_ns else 0.0


def dips(rates: Mapping[int, float]) -> list[str]:
    """Where the last but one number of streams is slower than its neighbours make expect: a batch
    between two captured graph sizes is padded to the larger one. `rates`: tokens a second of all
    streams together, by their number."""
    if len(rates) < 3:
        return []
    below, middle, above = sorted(rates)[-3:]
    each = {streams: rates[streams] / streams for streams in (below, middle, above)}
    share = (middle - below) / (above - below)
    expected = 1 / ((1 - share) / each[below] + share / each[above])
    if each[middle] >= _DIP * expected:
        return []
    return [
        f"{middle} streams decode {each[middle]:.1f} tok/s each, {expected:.1f} by their "
        f"neighbours ({each[below]:.1f} at {below}, {each[above]:.1f} at {above}): "
        f"{100 * (1 - each[middle] / expected):.0f} % less, as where no graph of that size is "
        "captured"
    ]
