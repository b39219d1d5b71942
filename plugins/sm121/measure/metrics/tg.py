"""The decode rate of one stream."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, ClassVar

from sm121.client.timed_answer import Clock, TimedAnswer
from sm121.measure import gate, rate_checks, timing
from sm121.measure.cells import MeasuredCell
from sm121.measure.measurement import Measurement, Unit
from sm121.measure.metrics import Metric
from sm121.measure.rate_checks import RatePair
from sm121.measure.statistics import median_or_none
from sm121.measure.validity import Findings

#: Minimum number of gaps in a short answer for computing its rate.
_GAPS = 3


@dataclass(frozen=True)
class DecodeRate(Metric):
    """``tgN@dD``, ``tgN_TEXT@dD``: decode rate of one stream, in tokens per second.

    The rate is the number of tokens after the first chunk, divided by the time from the first chunk
    to the chunk with the Nth token. Tokens that arrived together with the first chunk count as part
    of it (`decoding`). With speculative decoding, a round has one answer for each fixed text, and
    the slowest one counts; with TEXT, only the answers of that text count. Source: llama-bench's
    tg, and the project's own gate, 52 tok/s of tg32.
    """

    key: ClassVar[str] = "tg"
    unit: ClassVar[Unit] = "tok/s"
    higher_is_better: ClassVar[bool] = True

    #: The number of tokens, N.
    tokens: int
    #: The name of the fixed text whose answers count; empty for all texts.
    text: str = ""

    def name(self, cell: MeasuredCell) -> str:
        """Return the name, for example ``tg32@d0``, or ``tg32_code@d0`` for one text."""
        suffix = f"_{self.text}" if self.text else ""
        return f"tg{self.tokens}{suffix}@d{cell.depth}"

    def parts(self, cell: MeasuredCell) -> list[Metric]:
        """Return the metric of each fixed text."""
        if self.text:
            return []
        return [DecodeRate(self.tokens, text) for text in cell.server.prompts.texts if text]

    def samples(self, cell: MeasuredCell) -> list[float]:
        """Return one rate for each round: that of its only answer, or of its slowest text."""
        clock = cell.timed.counted_by
        samples = []
        for answers in cell.rounds_of(self.tokens):
            rates = [timing.decode_rate(answer, clock, self.tokens) for answer in self._of(answers)]
            samples.append(min(rates))
        return samples

    def _of(self, answers: Sequence[TimedAnswer]) -> list[TimedAnswer]:
        """Return the answers that continue this metric's text; all of them if it has no text."""
        return [answer for answer in answers if self.text in ("", answer.text)]

    def examine(self, cell: MeasuredCell, measurement: Measurement, findings: Findings) -> None:
        """Compare the rates with each other, with wall times and with the rest of the answers.

        Args:
            cell: The cell.
            measurement: The cell's measurement; its `extra`, `track` and `left_out` are set.
            findings: Receives the reasons why the samples are invalid.
        """
        super().examine(cell, measurement, findings)
        clock = cell.timed.counted_by
        answers = self._of(cell.timed.answers_of(self.tokens))
        good = [answer for answer in answers if answer.ok]
        pairs = second_clock(self._of(cell.timed.answers), cell.timed.short, clock, self.tokens)
        self._check_clocks(cell, good, pairs, findings)
        measurement.extra = self._extra(cell, answers, pairs)
        measurement.track = self._track(cell, measurement.samples)
        measurement.left_out = self._bounds_left_out(cell)

    def _check_clocks(
        self,
        cell: MeasuredCell,
        good: Sequence[TimedAnswer],
        pairs: Sequence[RatePair],
        findings: Findings,
    ) -> None:
        """Compare rates with those from wall times, and the first tokens with the others."""
        tokens = self.tokens
        clock = cell.timed.counted_by
        bound = cell.server.plan.measuring.second_clock_bound
        reasons = {item.reason for item in findings.invalid}
        # If the rate drifts, earlier and later requests differ anyway. If an answer has too few
        # tokens, its wall time is too short.
        if not reasons & {"drift", "short_answer"}:
            rate_checks.check_second_clock(pairs, bound, findings)
            neighbours = self._neighbours(cell)
            if len(neighbours) > 3:
                rate_checks.check_second_clock(neighbours, bound, findings, neighbours=True)
        rate_checks.check_start(good, clock, tokens, findings)
        # With fixed texts, the comparison with wall times does not cover the first tokens.
        if cell.server.prompts.natural:
            rate_checks.check_first_chunk(good, clock, findings)
        # If the wall times already contradict the rates, comparing parts of the answers adds
        # nothing.
        if all(item.reason != "second_clock" for item in findings.invalid):
            beginning = min(tokens, cell.shape.tokens // 2)
            rate_checks.check_beginning(good, clock, beginning, bound, findings)

    def _extra(
        self, cell: MeasuredCell, answers: Sequence[TimedAnswer], pairs: Sequence[RatePair]
    ) -> dict[str, Any]:
        """Return the rate by other definitions, and numbers that explain the rate."""
        clock = cell.timed.counted_by
        late_ns = []
        for answer in answers:
            window = timing.window(answer, clock, self.tokens)
            if answer.ok and window is not None:
                late_ns.append(window.late_ns)
        first_chunks = [first_chunk_tokens(answer, clock) for answer in answers]
        return {
            "first_chunk_tokens": max(first_chunks, default=None),
            "late_start_ms": round(median(late_ns) / 1e6, 3) if any(late_ns) else None,
            "textbook_tok_s": median_or_none(textbook_rate(answer, clock) for answer in answers),
            "second_clock_tok_s": median_or_none(pair.by_wall_time for pair in pairs),
            "per_stream_tok_s": median_or_none(
                timing.decode_rate(answer, clock) for answer in answers
            ),
            "texts": sorted({answer.text for answer in answers} - {""}) or None,
            **cell.drafts.speculation(self.text),
        }

    def _bounds_left_out(self, cell: MeasuredCell) -> list[tuple[float, float]]:
        """Return the lowest and highest possible rate of each excluded round."""
        clock = cell.timed.counted_by
        left_out = [answer for answer in cell.timed.left_out if answer.asked_tokens >= self.tokens]
        bounds = []
        for answers in cell.rounds_of(self.tokens, left_out):
            lowest = []
            highest = []
            for answer in self._of(answers):
                rate = timing.decode_rate(answer, clock, self.tokens)
                low, high = rate_bounds(rate, self.tokens, answer.lag_ns)
                lowest.append(low)
                highest.append(high)
            bounds.append((min(lowest), min(highest)))
        return bounds

    def _neighbours(self, cell: MeasuredCell) -> list[RatePair]:
        """Return a rate pair for each extra long answer and the short answer next to it."""
        if cell.repetition is None:
            return []
        after_ns = cell.repetition.after_ns
        long = [
            each for each in self._of(cell.timed.answers) if each.sent_ns > after_ns and each.ok
        ]
        short = [each for each in self._of(cell.timed.short) if each.sent_ns > after_ns and each.ok]
        pairs = []
        for long_answer, short_answer in zip(long, short, strict=False):
            pairs += second_clock([long_answer], [short_answer], cell.timed.counted_by, self.tokens)
        return pairs

    def gather(self, cell: MeasuredCell, samples: int) -> None:
        """Measure rounds of exactly this length; longer answers would only take more time."""
        cell.gather(0, readings=samples, tokens=self.tokens)

    def gather_at_the_end(self, cell: MeasuredCell, rounds: int) -> None:
        """Measure the rounds that the last interim test of the metric's gate needs.

        After many rounds of all lengths, also measure rounds of exactly this length, because only
        these may be slow.
        """
        readings = 0
        if self.of(cell).rounds >= gate.STEADY_LOOK:
            readings = gate.STEADY_LOOK
        cell.gather(rounds, readings=readings, tokens=self.tokens)

    def _track(self, cell: MeasuredCell, rates: Sequence[float]) -> list[float]:
        """Return the rates of this metric and of shorter answers, in the order of sending.

        The rate of a short answer is scaled, so that short and long answers have the same median:
        it is the median rate of the long answers, multiplied by the median interval between tokens
        of all short answers, divided by the interval of this answer. The interval of an answer is
        the mean or the median of its intervals, whichever is smaller, because one long interval may
        take most of a short answer. With fixed texts, the result is empty, because their rates are
        not comparable.
        """
        if cell.server.prompts.natural:
            return []
        clock = cell.timed.counted_by
        typical_gaps = {}
        for answer in cell.timed.short:
            if answer.asked_tokens >= self.tokens or not answer.ok:
                continue
            gaps = timing.gaps_ms(answer, clock)
            if len(gaps) >= _GAPS:
                typical_gaps[answer.sent_ns] = min(fmean(gaps), median(gaps))
        usual = median(typical_gaps.values() or (0.0,))
        level = median(rates or (0.0,))
        stamps = [answer.sent_ns for answer in cell.timed.answers_of(self.tokens)]
        series = dict(zip(stamps, rates, strict=True))
        for sent_ns, gap in typical_gaps.items():
            if gap > 0.0:
                series[sent_ns] = level * usual / gap
        return [series[sent_ns] for sent_ns in sorted(series)]


def rate_bounds(rate: float, tokens: int, lag_ns: Sequence[int]) -> tuple[float, float]:
    """Return bounds for a decode rate whose timestamps may be late.

    Args:
        rate: The rate computed from the timestamps, in tokens per second.
        tokens: The number of tokens of the answer.
        lag_ns: By how many nanoseconds the timestamps of the request, of the first chunk and of the
            last chunk may be late.

    Returns:
        The lowest and the highest possible rate.
    """
    if rate <= 0.0:
        return rate, rate
    window_ns = tokens / rate * 1e9
    lowest = rate * window_ns / (window_ns + lag_ns[1])
    shortest_ns = window_ns - lag_ns[2]
    highest = rate * window_ns / shortest_ns if shortest_ns > 0 else math.inf
    return lowest, highest


def textbook_rate(answer: TimedAnswer, clock: Clock) -> float:
    """Return the decode rate by the usual formula, from the first and the last chunk.

    The formula is (n - 1) / (last - first): the number of tokens after the first one, divided by
    the time from the first chunk to the last one, in tokens per second. If the first chunk has more
    than one token, this rate is too high.

    Args:
        answer: The answer; a failed one has the rate 0.
        clock: How the answer's tokens are counted.
    """
    chunks = timing.arrivals(answer, clock) if answer.ok else []
    if len(chunks) < 2 or chunks[-1].at_ns <= chunks[0].at_ns:
        return 0.0
    return (chunks[-1].tokens - 1) / (chunks[-1].at_ns - chunks[0].at_ns) * 1e9


def first_chunk_tokens(answer: TimedAnswer, clock: Clock) -> int:
    """Return the number of tokens in the first chunk that has tokens.

    Args:
        answer: The answer. Without any token, the result is 0.
        clock: How the answer's tokens are counted.
    """
    chunks = timing.arrivals(answer, clock)
    return chunks[0].tokens if chunks else 0


def second_clock(
    long: Sequence[TimedAnswer], short: Sequence[TimedAnswer], clock: Clock, tokens: int
) -> list[RatePair]:
    """Compute the decode rate in two ways, for every pair of a long and a short answer.

    The first rate is from the timestamps of the long answer's stream. The second one ("second
    clock") is from the difference between both answers' wall times. With fixed texts, both rates
    cover the same tokens of the same text, because drafts make rates vary within an answer.

    Args:
        long: The long answers.
        short: The short answers.
        clock: How the answers' tokens are counted.
        tokens: The number of tokens of the long answers that are used. If this is their whole
            length, the second rate uses the wall times of whole requests.
    """
    whole = all(tokens >= answer.asked_tokens for answer in long)
    bunched = timing.bunched(long, clock)
    begins = [
        (answer.text, *_reached(answer, clock, answer.asked_tokens, whole))
        for answer in short
        if answer.ok and answer.asked_tokens > bunched
    ]
    pairs = []
    for answer in long:
        if not answer.ok:
            continue
        many, late_ms = _reached(answer, clock, tokens, whole)
        rate = timing.decode_rate(answer, clock, tokens)
        for text, few, early_ms in begins:
            if many <= few or late_ms <= early_ms or text != answer.text:
                continue
            by_wall_time = (many - few) / (late_ms - early_ms) * 1e3
            rates = _rates_between(answer, clock, few, many) if text else [rate]
            pairs.append(RatePair(_nearest(rates, by_wall_time), by_wall_time))
    return pairs


def _nearest(rates: Sequence[float], target: float) -> float:
    return min(rates, key=lambda rate: abs(rate - target))


def _rates_between(answer: TimedAnswer, clock: Clock, few: int, many: int) -> list[float]:
    """Return two rates of a stream between token ``few`` and token ``many``.

    The first rate counts the tokens after token ``few``, because a request for ``few`` tokens ends
    with the step that generates the last of them. The second rate counts the tokens after the chunk
    that contains token ``few``, because a chunk may be more than one step.
    """
    chunks = timing.arrivals(answer, clock)
    begin = next((chunk for chunk in chunks if chunk.tokens >= few), chunks[-1])
    end = next((chunk for chunk in chunks if chunk.tokens >= many), chunks[-1])
    ns = end.at_ns - begin.at_ns
    if ns <= 0:
        return [0.0, 0.0]
    return [(many - few) / ns * 1e9, (many - begin.tokens) / ns * 1e9]


def _reached(answer: TimedAnswer, clock: Clock, tokens: int, whole: bool) -> tuple[int, float]:
    """Return how many tokens had arrived at the end of a window, and after how many milliseconds.

    If ``whole`` is true, the result is for the whole request, with its wall time.
    """
    if whole:
        return answer.asked_tokens, timing.e2e_ms(answer)
    window = timing.window(answer, clock, tokens)
    if window is None:
        return 0, timing.NEVER
    return window.end.tokens, (window.end.at_ns - answer.sent_ns) / 1e6
