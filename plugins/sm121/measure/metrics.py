"""From answers to samples: the definitions of what is measured (docs/measurement.md)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import median

from sm121.client.timed_answer import Arrival, Clock, TimedAnswer
from sm121.measure import decoding
from sm121.measure.decoding import Window

#: Of the metrics here. Where one changes, numbers of before and after are not compared.
DEFINITION = 2
#: A failed request took for ever, and a failed stream had no rate.
NEVER = math.inf
#: A rate of several streams below this share of what its neighbours make expect is a dip; between
#: captured sizes 17 to 25 % were lost (dendro-logic).
_DIP = 0.9


def clock_of(answers: Sequence[TimedAnswer]) -> Clock | None:
    """The clock that all answers allow; the worst of theirs."""
    order: tuple[Clock, ...] = ("chunks", "usage", "token_ids")
    found = {_confirmed(answer) for answer in answers if answer.ok}
    return next((clock for clock in order if clock in found), None)


def _confirmed(answer: TimedAnswer) -> Clock | None:
    """An answer's clock. Where its final usage is as many tokens as it had chunks, each chunk was
    one token, and it is the usage that says so."""
    clock = answer.clock()
    if clock == "chunks" and answer.completion_tokens == answer.tokens("chunks"):
        return "usage"
    return clock


def arrivals(answer: TimedAnswer, clock: Clock) -> list[Arrival]:
    """The chunks with a token, by the clock or what it stands for."""
    own = answer.clock()
    return answer.arrivals("chunks" if clock == "usage" and own == "chunks" else clock)


def ttft_ms(answer: TimedAnswer, clock: Clock) -> float:
    """Time to the first chunk that carries a generated token."""
    found = arrivals(answer, clock) if answer.ok else []
    return (found[0][0] - answer.sent_ns) / 1e6 if found else NEVER


def visible_ms(answer: TimedAnswer) -> float | None:
    """Time to the first text that a user sees; None when there was none."""
    at = next((chunk.at_ns for chunk in answer.chunks if chunk.visible), None)
    return None if at is None else (at - answer.sent_ns) / 1e6


def window(answer: TimedAnswer, clock: Clock, tokens: int | None = None) -> Window | None:
    """The part of an answer that its decode rate is taken from; None for one without a token, or
    one that failed.

    Args:
        tokens: look at the answer only up to the chunk with its so many-th token.
    """
    return decoding.window(arrivals(answer, clock), tokens) if answer.ok else None


def decode_rate(answer: TimedAnswer, clock: Clock, tokens: int | None = None) -> float:
    """Tokens after what came with the first chunk over the time from there to the last one.

    Args:
        tokens: look at the answer only up to the chunk with its so many-th token.
    """
    found = window(answer, clock, tokens)
    return found.rate if found is not None else 0.0


def possible(rate: float, tokens: int, lag_ns: Sequence[int]) -> tuple[float, float]:
    """Between what a decode rate was whose first and last stamp may be late by ``lag_ns[1]`` and
    ``lag_ns[2]``: the longer the client was late, the less it says."""
    if rate <= 0.0:
        return rate, rate
    window = tokens / rate * 1e9
    left = window - lag_ns[2]
    return rate * window / (window + lag_ns[1]), rate * window / left if left > 0 else math.inf


def textbook_rate(answer: TimedAnswer, clock: Clock) -> float:
    """(n - 1) / (last - first): the same where the first chunk has one token, else too much."""
    found = arrivals(answer, clock) if answer.ok else []
    if len(found) < 2 or found[-1][0] <= found[0][0]:
        return 0.0
    return (found[-1][1] - 1) / (found[-1][0] - found[0][0]) * 1e9


def first_chunk_tokens(answer: TimedAnswer, clock: Clock) -> int:
    """k1: tokens in the first chunk that has any."""
    found = arrivals(answer, clock)
    return found[0][1] if found else 0


def prefill_rate(answer: TimedAnswer, clock: Clock) -> float:
    """Prompt tokens over TTFT, with nothing subtracted."""
    first = ttft_ms(answer, clock)
    return (answer.prompt_tokens or answer.asked_prompt) / first * 1e3 if first < NEVER else 0.0


def tpot_ms(answer: TimedAnswer, clock: Clock) -> float:
    """Time for each token after the first chunk."""
    rate = decode_rate(answer, clock)
    return 1e3 / rate if rate else NEVER


def gaps_ms(answer: TimedAnswer, clock: Clock) -> list[float]:
    """Times between chunks that carry tokens; those that came together are one. A failed request
    had one that did not end."""
    if not answer.ok:
        return [NEVER]
    stamps = [moment.at_ns for moment in decoding.moments(arrivals(answer, clock))]
    return [(b - a) / 1e6 for a, b in itertools.pairwise(stamps)]


def e2e_ms(answer: TimedAnswer) -> float:
    """From the request to the end of its answer."""
    return (answer.ended_ns - answer.sent_ns) / 1e6 if answer.ok else NEVER


def common_windows(answers: Sequence[TimedAnswer], clock: Clock) -> list[Window] | None:
    """Of streams side by side, the part in which all of them decode; None where there is none."""
    if not answers or not all(answer.ok for answer in answers):
        return None
    return decoding.common([arrivals(answer, clock) for answer in answers])


def rate_in_turns(answers: Sequence[TimedAnswer], clock: Clock) -> float:
    """Tokens a second of requests of which some wait until others have ended: all tokens after the
    first chunk, over the time from it to the last one. A failed one makes it nothing."""
    found = [arrivals(answer, clock) for answer in answers if answer.ok]
    if len(found) < len(answers) or not all(found):
        return 0.0
    first, ended = min(f[0] for f in found), max(f[-1].at_ns for f in found)
    tokens = sum(f[-1].tokens for f in found) - first.tokens
    return tokens / (ended - first.at_ns) * 1e9 if ended > first.at_ns else 0.0


def dips(rates: Mapping[int, float]) -> list[str]:
    """Where the last but one number of streams is slower than its neighbours make expect: a batch
    between two captured graph sizes is padded to the larger one.

    Args:
        rates: tokens a second of all streams together, by their number.
    """
    if len(rates) < 3:
        return []
    below, here, above = sorted(rates)[-3:]
    each = {streams: rates[streams] / streams for streams in (below, here, above)}
    share = (here - below) / (above - below)
    expected = 1 / ((1 - share) / each[below] + share / each[above])
    if each[here] >= _DIP * expected:
        return []
    return [
        f"{here} streams decode {each[here]:.1f} tok/s each, {expected:.1f} by their neighbours "
        f"({each[below]:.1f} at {below}, {each[above]:.1f} at {above}): "
        f"{100 * (1 - each[here] / expected):.0f} % less, as where no graph of that size is "
        "captured"
    ]


def common_prefill_rate(answers: Sequence[TimedAnswer], clock: Clock) -> float:
    """Prompt tokens of streams side by side over the time until all of them have a first token. A
    failed one makes it nothing."""
    found = [arrivals(answer, clock) for answer in answers if answer.ok]
    if len(found) < len(answers) or not all(found):
        return 0.0
    began = min(answer.sent_ns for answer in answers)
    prompts = sum(answer.prompt_tokens or answer.asked_prompt for answer in answers)
    return prompts / (max(f[0].at_ns for f in found) - began) * 1e9


def second_clock(
    long: Sequence[TimedAnswer], short: Sequence[TimedAnswer], clock: Clock, tokens: int
) -> list[tuple[float, float]]:
    """For every pair of answers of different length, the decode rate of the long one and the one
    that no first chunk has a part in: from the times since their sending.

    Args:
        tokens: up to this token of the long ones; where that is their last, the wall time of the
            whole request counts, and no chunk has a part in it.
    """
    whole = all(tokens >= answer.asked_tokens for answer in long)
    together = bunched(long, clock)
    ends = [
        (decode_rate(answer, clock, tokens), *_reached(answer, clock, tokens, whole))
        for answer in long
        if answer.ok
    ]
    begins = [
        _reached(answer, clock, answer.asked_tokens, whole)
        for answer in short
        if answer.ok and answer.asked_tokens > together
    ]
    return [
        (rate, (many - few) / (late - early) * 1e3)
        for rate, many, late in ends
        for few, early in begins
        if many > few and late > early
    ]


def _reached(answer: TimedAnswer, clock: Clock, tokens: int, whole: bool) -> tuple[int, float]:
    """A number of tokens and the time that it took; of a whole request, its wall time."""
    if whole:
        return answer.asked_tokens, e2e_ms(answer)
    found = window(answer, clock, tokens)
    if found is None:
        return 0, NEVER
    return found.end.tokens, (found.end.at_ns - answer.sent_ns) / 1e6


def bunched(answers: Sequence[TimedAnswer], clock: Clock) -> int:
    """Tokens of the chunks that came together, or too soon, at the start of answers, the median of
    them: an answer that is no longer is as late as its first chunk."""
    found = [window(answer, clock) for answer in answers]
    starts = [w.start.tokens if w is not None and w.start.chunks > 1 else 0 for w in found]
    return math.floor(median(starts)) if starts else 0


def beginning_to_rest(answer: TimedAnswer, clock: Clock, tokens: int) -> float | None:
    """The rate over the first so many tokens by the rate over those after them; None where either
    has too few."""
    found = window(answer, clock, tokens)
    whole = window(answer, clock)
    if found is None or whole is None or not found.rate:
        return None
    rest = Window(found.end, whole.end, answer.asked_tokens - tokens)
    return found.rate / rest.rate if rest.enough and rest.rate else None
