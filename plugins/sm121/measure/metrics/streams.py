"""The decode rate of several streams together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, NoReturn

from sm121.client.timed_answer import Clock, TimedAnswer
from sm121.core import unmet, verdict
from sm121.measure import cells, decoding, timing, validity
from sm121.measure.measurement import Measurement, Unit
from sm121.measure.metrics import Metric
from sm121.measure.statistics import median_or_none

#: A rate is compared with the rate that is interpolated between the next smaller and the next
#: larger number of streams. Below this fraction of the interpolated rate, it is a dip. Between the
#: sizes of captured CUDA graphs, 17 to 25 % of the rate were lost (dendro-logic).
_DIP = 0.9


@dataclass(frozen=True)
class StreamsRate(Metric):
    """``tgN_cC@dD``, ``tgN_qC@dD``: decode rate of several streams together, in tokens per second.

    ``tgN_cC@dD`` is the rate of C streams while all of them decode, that is, from the first token
    of the last stream until one of the streams ends. ``tgN_qC@dD`` is for C streams of which some
    wait until others have ended: the number of all tokens after the first one, divided by the time
    to the last one. Source: the throughput in the project's own reports, without the prompts.
    """

    key: ClassVar[str] = "streams"
    unit: ClassVar[Unit] = "tok/s"
    higher_is_better: ClassVar[bool] = True

    def name(self, cell: cells.MeasuredCell) -> str:
        """Return the name in llama-bench's form.

        For example, ``tg32_c4@d0`` stands for 32 tokens, 4 streams and depth 0.
        """
        return f"tg{cell.shape.tokens_together}{cell.shape.suffix}@d{cell.depth}"

    def samples(self, cell: cells.MeasuredCell) -> list[float]:
        """Return one rate for each round, except rounds whose streams did not decode together."""
        clock = cell.timed.counted_by
        if cell.shape.queued:
            return [rate_in_turns(answers, clock) for answers in cell.timed.long]
        rates = []
        for answers in self._together(cell):
            windows = common_windows(answers, clock) or []
            rates.append(sum(window.rate for window in windows))
        return rates

    def examine(
        self, cell: cells.MeasuredCell, measurement: Measurement, findings: validity.Findings
    ) -> None:
        """Add the rate per stream, and a remark if the rate has a dip between numbers of streams.

        Args:
            cell: The cell.
            measurement: The cell's measurement; its `extra` and `remarks` are set.
            findings: Receives the reasons why the samples are invalid.

        Raises:
            NotRun: In at least half of the rounds, the streams did not decode together.
            Unmet: The server was started for running all streams at once, but ran at most half of
                them at a time.
        """
        apart = 0
        if not cell.shape.queued:
            apart = len(cell.timed.long) - len(self._together(cell))
        if apart and not findings.invalid and 2 * apart >= len(cell.timed.long):
            self._raise_apart(cell, measurement.name, apart)
        super().examine(cell, measurement, findings)
        clock = cell.timed.counted_by
        rates = [timing.decode_rate(answer, clock) for answer in cell.timed.answers]
        measurement.extra = {
            "per_stream_tok_s": median_or_none(rates),
            "rounds_apart": apart,
            **cell.drafts.speculation(),
        }
        if measurement.samples and not findings.invalid and not cell.shape.queued:
            rates_together = cell.server.rates_together
            rates_together[cell.concurrency] = median(measurement.samples)
            measurement.remarks += dips(rates_together)

    @staticmethod
    def _raise_apart(cell: cells.MeasuredCell, name: str, apart: int) -> NoReturn:
        """Raise NotRun or Unmet because the streams did not decode together in ``apart`` rounds."""
        tokens = cell.shape.tokens_together // 2
        rounds = len(cell.timed.long)
        why = (
            f"{name}: in {apart} of {rounds} rounds the {cell.concurrency} streams did not "
            f"decode {tokens} tokens at the same time: the server runs fewer at once, or one after "
            f"another. Let it run {cell.concurrency} (--max-num-seqs, --parallel), or remove "
            f"{cell.concurrency} from concurrency in the profile's [performance.measuring]"
        )
        most = max(_most_at_once(answers, cell.timed.counted_by) for answers in cell.timed.long)
        if cell.server.slots_sure and 2 * most <= cell.concurrency:
            side_by_side = f"{cell.concurrency} concurrent streams, as the server was configured"
            raise unmet.Unmet(unmet.Fact(side_by_side, f"{most} at most", evidence=why))
        raise verdict.NotRun(why)

    @staticmethod
    def _together(cell: cells.MeasuredCell) -> list[list[TimedAnswer]]:
        """Return the rounds that failed, or whose streams decoded half of their tokens together."""
        clock = cell.timed.counted_by
        together = []
        for answers in cell.timed.long:
            windows = common_windows(answers, clock) or []
            fewest = min((window.tokens for window in windows), default=0)
            complete = all(answer.ok for answer in answers)
            if not complete or 2 * fewest >= cell.shape.tokens_together:
                together.append(answers)
        return together


def common_windows(answers: Sequence[TimedAnswer], clock: Clock) -> list[decoding.Window] | None:
    """Return the part of each stream in which all streams decode.

    Args:
        answers: The answers of one round.
        clock: How the answers' tokens are counted.

    Returns:
        One window for each stream; None if the streams never decode together, or if a request
        failed.
    """
    if not answers or not all(answer.ok for answer in answers):
        return None
    streams = [timing.arrivals(answer, clock) for answer in answers]
    return decoding.common(streams, drafts=bool(answers[0].text))


def _most_at_once(answers: Sequence[TimedAnswer], clock: Clock) -> int:
    """Return the maximum number of streams of a round that decoded at the same time."""
    streams = [timing.arrivals(answer, clock) for answer in answers if answer.ok]
    spans = [(chunks[0].at_ns, chunks[-1].at_ns) for chunks in streams if chunks]
    most = 0
    for moment, _ in spans:
        decoding_then = sum(start <= moment < end for start, end in spans)
        most = max(most, decoding_then)
    return most


def rate_in_turns(answers: Sequence[TimedAnswer], clock: Clock) -> float:
    """Return the total rate of a round in which some streams wait until others have ended.

    Args:
        answers: The answers of one round.
        clock: How the answers' tokens are counted.

    Returns:
        All tokens after the first chunk, divided by the time from the first to the last chunk, in
        tokens per second; 0 if a request failed.
    """
    streams = [timing.arrivals(answer, clock) for answer in answers if answer.ok]
    if len(streams) < len(answers) or not all(streams):
        return 0.0
    first = min(chunks[0] for chunks in streams)
    ended_ns = max(chunks[-1].at_ns for chunks in streams)
    if ended_ns <= first.at_ns:
        return 0.0
    tokens = sum(chunks[-1].tokens for chunks in streams) - first.tokens
    return tokens / (ended_ns - first.at_ns) * 1e9


def dips(rates: Mapping[int, float]) -> list[str]:
    """Return a line if the rate of the second largest number of streams is a dip.

    The engine pads a batch whose size is between two captured graph sizes to the larger one.

    Args:
        rates: For each number of streams, the tokens per second of all streams together.
    """
    if len(rates) < 3:
        return []
    below, middle, above = sorted(rates)[-3:]
    per_stream = {streams: rates[streams] / streams for streams in (below, middle, above)}
    share = (middle - below) / (above - below)
    expected = 1 / ((1 - share) / per_stream[below] + share / per_stream[above])
    if per_stream[middle] >= _DIP * expected:
        return []
    return [
        f"{middle} streams decode {per_stream[middle]:.1f} tok/s each, {expected:.1f} expected "
        f"from the next smaller and larger numbers ({per_stream[below]:.1f} at {below}, "
        f"{per_stream[above]:.1f} at {above}): {100 * (1 - per_stream[middle] / expected):.0f} % "
        f"less, as if no CUDA graph for {middle} streams had been captured"
    ]
