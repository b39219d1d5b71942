"""What a timed answer says: by which clock its tokens are counted, when they came, how fast."""

import itertools
import math
from collections.abc import Sequence
from statistics import median

from sm121.client.timed_answer import Arrival, Clock, TimedAnswer
from sm121.measure import decoding

#: A failed request took for ever, and a failed stream had no rate.
NEVER = math.inf


def clock_of(answers: Sequence[TimedAnswer]) -> Clock | None:
    """The clock that all answers allow; the worst of theirs. Where a final usage is as many tokens
    as there were chunks, each chunk was one token, and it is the usage that says so."""
    clocks = set()
    for answer in (answer for answer in answers if answer.ok):
        by_chunks = answer.clock() == "chunks"
        confirmed = by_chunks and answer.completion_tokens == answer.tokens("chunks")
        clocks.add("usage" if confirmed else answer.clock())
    order: tuple[Clock, ...] = ("chunks", "usage", "token_ids")
    return next((clock for clock in order if clock in clocks), None)


def arrivals(answer: TimedAnswer, clock: Clock) -> list[Arrival]:
    """The chunks with a token, by the clock or what it stands for."""
    by_chunks = clock == "usage" and answer.clock() == "chunks"
    return answer.arrivals("chunks" if by_chunks else clock)


def ttft_ms(answer: TimedAnswer, clock: Clock) -> float:
    """Time to the first chunk that carries a generated token."""
    chunks = arrivals(answer, clock) if answer.ok else []
    return (chunks[0].at_ns - answer.sent_ns) / 1e6 if chunks else NEVER


def visible_ms(answer: TimedAnswer) -> float | None:
    """Time to the first text that a user sees; None when there was none."""
    at_ns = next((chunk.at_ns for chunk in answer.chunks if chunk.visible), None)
    return None if at_ns is None else (at_ns - answer.sent_ns) / 1e6


def e2e_ms(answer: TimedAnswer) -> float:
    """From the request to the end of its answer."""
    return (answer.ended_ns - answer.sent_ns) / 1e6 if answer.ok else NEVER


def gaps_ms(answer: TimedAnswer, clock: Clock) -> list[float]:
    """Times between chunks that carry tokens; those that came together are one. A failed request
    had one that did not end."""
    if not answer.ok:
        return [NEVER]
    stamps = [moment.at_ns for moment in decoding.moments(arrivals(answer, clock))]
    return [(b - a) / 1e6 for a, b in itertools.pairwise(stamps)]


def window(answer: TimedAnswer, clock: Clock, tokens: int | None = None) -> decoding.Window | None:
    """The part of an answer that its decode rate is taken from; None for one without a token, or
    one that failed. `tokens`: look at the answer only up to the chunk with its so many-th token."""
    chunks = arrivals(answer, clock) if answer.ok else []
    return decoding.window(chunks, tokens, drafts=bool(answer.text))


def decode_rate(answer: TimedAnswer, clock: Clock, tokens: int | None = None) -> float:
    """Tokens a second after what came with the first chunk, from there to the last one. `tokens`:
    look at the answer only up to the chunk with its so many-th token."""
    part = window(answer, clock, tokens)
    return part.rate if part is not None else 0.0


def bunched(answers: Sequence[TimedAnswer], clock: Clock) -> int:
    """Tokens of the chunks that came together, or too soon, at the start of answers, the median of
    them: an answer that is no longer is as late as its first chunk."""
    windows = [window(answer, clock) for answer in answers]
    starts = [w.start.tokens if w is not None and w.start.chunks > 1 else 0 for w in windows]
    return math.floor(median(starts)) if starts else 0
