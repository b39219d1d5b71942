"""The decode rate of one stream."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import ClassVar

from sm121.client.timed_answer import Clock, TimedAnswer
from sm121.measure import gate, timing, validity
from sm121.measure.cells import MeasuredCell
from sm121.measure.measurement import Measurement, Unit
from sm121.measure.metrics import Metric
from sm121.measure.statistics import median_or_none
from sm121.measure.validity import Findings

#: A short answer with fewer gaps than these says nothing of the rate.
_GAPS = 3


@dataclass(frozen=True)
class DecodeRate(Metric):
    """``tgN@dD``: tokens after the first chunk, over the time from it to the one with the Nth
    token. What came together with the first chunk counts as part of it (`decoding`). Of a server
    that drafts, the slowest of the fixed texts in each round; ``tgN_TEXT@dD`` is one of them.
    Source: llama-bench's tg, and the effort's own gate, 52 tok/s of tg32."""

    key: ClassVar[str] = "tg"
    unit: ClassVar[Unit] = "tok/s"
    higher_is_better: ClassVar[bool] = True

    tokens: int
    #: Of this fixed text alone.
    text: str = ""

    def name(self, cell: MeasuredCell) -> str:
        """``tg32@d0``; of one text ``tg32_code@d0``."""
        return f"tg{self.tokens}{'_' * bool(self.text)}{self.text}@d{cell.depth}"

    def parts(self, cell: MeasuredCell) -> list[Metric]:
        """That of each fixed text."""
        texts = [] if self.text else [text for text in cell.server.prompts.texts if text]
        return [DecodeRate(self.tokens, text) for text in texts]

    def samples(self, cell: MeasuredCell) -> list[float]:
        """One of each round: of its only answer with so many tokens, or of its slowest text."""
        clock, rounds = cell.counted_by, cell.rounds_of(self.tokens)
        return [
            min(timing.decode_rate(answer, clock, self.tokens) for answer in self._of(answers))
            for answers in rounds
        ]

    def _of(self, answers: Sequence[TimedAnswer]) -> list[TimedAnswer]:
        return [answer for answer in answers if self.text in ("", answer.text)]

    def examine(self, cell: MeasuredCell, measurement: Measurement, findings: Findings) -> None:
        """Hold the rates against each other, the wall times, and the rest of the same answers."""
        super().examine(cell, measurement, findings)
        tokens, clock = self.tokens, cell.counted_by
        answers = self._of(cell.answers_of(tokens))
        good = [answer for answer in answers if answer.ok]
        pairs = second_clock(self._of(cell.answers), cell.short, clock, tokens)
        bound = cell.server.plan.measuring.second_clock_bound
        reasons = {item.reason for item in findings.invalid}
        if not reasons & {"drift", "short_answer"}:
            # Of a rate that moves, requests of different times say different things, and so do
            # wall times of answers that are not as long as they should be.
            validity.check_second_clock(pairs, bound, findings)
            if len(neighbours := self._neighbours(cell)) > 3:
                validity.check_second_clock(neighbours, bound, findings, neighbours=True)
        validity.check_start(good, clock, tokens, findings)
        if cell.server.prompts.natural:  # no part of the second clock's window
            validity.check_first_chunk(good, clock, findings)
        if all(item.reason != "second_clock" for item in findings.invalid):
            # The parts of a stream that is not the generation say nothing more.
            validity.check_beginning(good, clock, min(tokens, cell.tokens // 2), bound, findings)
        windows = [timing.window(answer, clock, tokens) for answer in good]
        late_ns = [window.late_ns for window in windows if window is not None]
        measurement.extra = {
            "first_chunk_tokens": max(
                (first_chunk_tokens(a, clock) for a in answers), default=None
            ),
            "late_start_ms": round(median(late_ns) / 1e6, 3) if any(late_ns) else None,
            "textbook_tok_s": median_or_none(textbook_rate(a, clock) for a in answers),
            "second_clock_tok_s": median_or_none(rate for _, rate in pairs),
            "per_stream_tok_s": median_or_none(timing.decode_rate(a, clock) for a in answers),
            "texts": sorted({answer.text for answer in answers} - {""}) or None,
            **cell.speculation(self.text),
        }
        measurement.track = self._track(cell, measurement.samples)
        late = [answer for answer in cell.left_out if answer.asked_tokens >= tokens]
        bounds = [
            [
                rate_bounds(timing.decode_rate(answer, clock, tokens), tokens, answer.lag_ns)
                for answer in self._of(each)
            ]
            for each in cell.rounds_of(tokens, late)
        ]
        measurement.left_out = [
            (min(b[0] for b in each), min(b[1] for b in each)) for each in bounds
        ]

    def _neighbours(self, cell: MeasuredCell) -> list[tuple[float, float]]:
        """As `second_clock`, of a long answer and the short one beside it, since they disagreed."""
        long, short = (
            [a for a in self._of(answers) if 0 < cell.again[1] < a.sent_ns and a.ok]
            for answers in (cell.answers, cell.short)
        )
        pairs = (
            second_clock([a], [b], cell.counted_by, self.tokens)
            for a, b in zip(long, short, strict=False)
        )
        return [pair for each in pairs for pair in each]

    def gather(self, cell: MeasuredCell, samples: int) -> None:
        """No answers longer than what is asked: they tell as much in less time."""
        cell.gather(0, readings=samples, tokens=self.tokens)

    def gather_at_the_end(self, cell: MeasuredCell, rounds: int) -> None:
        """Where a gate looked at as many answers of all lengths, those of this length may be the
        slow ones."""
        readings = gate.STEADY_LOOK if self.of(cell).rounds >= gate.STEADY_LOOK else 0
        cell.gather(rounds, readings=readings, tokens=self.tokens)

    def _track(self, cell: MeasuredCell, rates: Sequence[float]) -> list[float]:
        """The rates, with those of the shorter answers between them in the order of sending. A
        short answer's is by its mean gap, as a share of that of all short ones; where one gap is
        most of the answer, by its median gap. Nothing of several texts, which are not alike."""
        if cell.server.prompts.natural:
            return []
        clock = cell.counted_by
        gaps = {
            answer.sent_ns: min(fmean(each), median(each))
            for answer in cell.short
            if answer.asked_tokens < self.tokens
            and answer.ok
            and len(each := timing.gaps_ms(answer, clock)) >= _GAPS
        }
        usual, level = median(gaps.values() or (0.0,)), median(rates or (0.0,))
        stamps = (answer.sent_ns for answer in cell.answers_of(self.tokens))
        series = dict(zip(stamps, rates, strict=True))
        series |= {sent_ns: level * usual / gap for sent_ns, gap in gaps.items() if gap > 0.0}
        return [series[sent_ns] for sent_ns in sorted(series)]


def rate_bounds(rate: float, tokens: int, lag_ns: Sequence[int]) -> tuple[float, float]:
    """Between what a decode rate was whose first and last stamp may be late by ``lag_ns[1]`` and
    ``lag_ns[2]``: the longer the client was late, the less it says."""
    if rate <= 0.0:
        return rate, rate
    window_ns = tokens / rate * 1e9
    shortest_ns = window_ns - lag_ns[2]
    highest = rate * window_ns / shortest_ns if shortest_ns > 0 else math.inf
    return rate * window_ns / (window_ns + lag_ns[1]), highest


def textbook_rate(answer: TimedAnswer, clock: Clock) -> float:
    """(n - 1) / (last - first): the same where the first chunk has one token, else too much."""
    chunks = timing.arrivals(answer, clock) if answer.ok else []
    if len(chunks) < 2 or chunks[-1].at_ns <= chunks[0].at_ns:
        return 0.0
    return (chunks[-1].tokens - 1) / (chunks[-1].at_ns - chunks[0].at_ns) * 1e9


def first_chunk_tokens(answer: TimedAnswer, clock: Clock) -> int:
    """k1: tokens in the first chunk that has any."""
    chunks = timing.arrivals(answer, clock)
    return chunks[0].tokens if chunks else 0


def second_clock(
    long: Sequence[TimedAnswer], short: Sequence[TimedAnswer], clock: Clock, tokens: int
) -> list[tuple[float, float]]:
    """For every pair of answers of different length, the decode rate of the long one and the one
    that no first chunk has a part in: from the times since their sending. Where drafts are
    accepted, both are of the same tokens of the same text. `tokens`: up to this token of the long
    ones; where that is their last, the wall time of the whole request counts."""
    whole = all(tokens >= answer.asked_tokens for answer in long)
    bunched = timing.bunched(long, clock)
    ends = [(answer, *_reached(answer, clock, tokens, whole)) for answer in long if answer.ok]
    begins = [
        (answer.text, *_reached(answer, clock, answer.asked_tokens, whole))
        for answer in short
        if answer.ok and answer.asked_tokens > bunched
    ]
    pairs = []
    for answer, many, late in ends:
        rate = timing.decode_rate(answer, clock, tokens)
        for text, few, early in begins:
            if many > few and late > early and text == answer.text:
                second = (many - few) / (late - early) * 1e3
                between = _rates_between(answer, clock, few, many) if text else [rate]
                pairs.append((min(between, key=lambda each: abs(each - second)), second))
    return pairs


def _rates_between(answer: TimedAnswer, clock: Clock, few: int, many: int) -> list[float]:
    """Tokens a second of a stream from the chunk with one token to that with another: from the
    token, as a request of ``few`` tokens ends with the step that has its last; and from the end of
    the chunk, which may be no step."""
    chunks = timing.arrivals(answer, clock)
    begin, end = (next((c for c in chunks if c.tokens >= n), chunks[-1]) for n in (few, many))
    ns = end.at_ns - begin.at_ns
    return [(many - n) / ns * 1e9 if ns > 0 else 0.0 for n in (few, begin.tokens)]


def _reached(answer: TimedAnswer, clock: Clock, tokens: int, whole: bool) -> tuple[int, float]:
    """A number of tokens and the time in ms that it took; of a whole request, its wall time."""
    if whole:
        return answer.asked_tokens, timing.e2e_ms(answer)
    if (window := timing.window(answer, clock, tokens)) is None:
        return 0, timing.NEVER
    return window.end.tokens, (window.end.at_ns - answer.sent_ns) / 1e6
