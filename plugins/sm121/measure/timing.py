"""Compute times and rates of one timed answer. A `Clock` is a way to count the answer's tokens."""

import itertools
import math
from collections.abc import Sequence
from statistics import median

from sm121.client.timed_answer import Arrival, Clock, TimedAnswer
from sm121.measure import decoding, withheld

#: The time of a failed request. Its rate is 0.
NEVER = math.inf


def clock_of(answers: Sequence[TimedAnswer]) -> Clock | None:
    """Return how all answers' tokens are counted: in the least exact way that one of them needs.

    If an answer has usage only at its end, and `withheld` explains how many tokens each chunk has,
    the tokens of the answer count as counted by ``usage``.

    Args:
        answers: The answers; failed ones are ignored.

    Returns:
        The way to count; None if no answer has a token.
    """
    clocks = set()
    for answer in answers:
        if not answer.ok:
            continue
        clock = answer.clock()
        if clock == "chunks" and withheld.arrivals(answer) is not None:
            clock = "usage"
        clocks.add(clock)
    order: tuple[Clock, ...] = ("chunks", "usage", "token_ids")
    return next((clock for clock in order if clock in clocks), None)


def arrivals(answer: TimedAnswer, clock: Clock) -> list[Arrival]:
    """Return the chunks that have a token.

    Args:
        answer: The answer.
        clock: How the answer's tokens are counted. If this is ``usage``, but the answer has usage
            only at its end, each chunk counts as one token, and `withheld` adds tokens without a
            text of their own.
    """
    if clock == "usage" and answer.clock() == "chunks":
        return withheld.arrivals(answer) or answer.arrivals("chunks")
    return answer.arrivals(clock)


def ttft_ms(answer: TimedAnswer, clock: Clock) -> float:
    """Return the time to the first chunk with a generated token.

    Args:
        answer: The answer.
        clock: How the answer's tokens are counted.

    Returns:
        Milliseconds since the request was sent; infinite for a failed request.
    """
    chunks = arrivals(answer, clock) if answer.ok else []
    if not chunks:
        return NEVER
    return (chunks[0].at_ns - answer.sent_ns) / 1e6


def visible_ms(answer: TimedAnswer) -> float | None:
    """Return the time to the first visible text.

    Args:
        answer: The answer. Reasoning and tool calls are not visible text.

    Returns:
        Milliseconds since the request was sent; None if no chunk has visible text.
    """
    for chunk in answer.chunks:
        if chunk.visible:
            return (chunk.at_ns - answer.sent_ns) / 1e6
    return None


def e2e_ms(answer: TimedAnswer) -> float:
    """Return the time from a request to the end of its answer.

    Args:
        answer: The answer.

    Returns:
        Milliseconds; infinite for a failed request.
    """
    if not answer.ok:
        return NEVER
    return (answer.ended_ns - answer.sent_ns) / 1e6


def gaps_ms(answer: TimedAnswer, clock: Clock) -> list[float]:
    """Return the times between chunks that carry tokens.

    Args:
        answer: The answer.
        clock: How the answer's tokens are counted.

    Returns:
        The gaps in milliseconds. Chunks that arrived together count as one. A failed request has
        one infinite gap.
    """
    if not answer.ok:
        return [NEVER]
    stamps = [moment.at_ns for moment in decoding.moments(arrivals(answer, clock))]
    return [(after - before) / 1e6 for before, after in itertools.pairwise(stamps)]


def window(answer: TimedAnswer, clock: Clock, tokens: int | None = None) -> decoding.Window | None:
    """Return the part of an answer from which its decode rate is computed.

    Args:
        answer: The answer.
        clock: How the answer's tokens are counted.
        tokens: The number of tokens to use (up to the end of their chunk); None for the whole
            answer.

    Returns:
        The part; None if the answer has no token, or failed.
    """
    chunks = arrivals(answer, clock) if answer.ok else []
    return decoding.window(chunks, tokens, drafts=bool(answer.text))


def decode_rate(answer: TimedAnswer, clock: Clock, tokens: int | None = None) -> float:
    """Return the decode rate in tokens per second, without tokens that came with the first chunk.

    Args:
        answer: The answer; a failed one has the rate 0.
        clock: How the answer's tokens are counted.
        tokens: The number of tokens to use (up to the end of their chunk); None for the whole
            answer.
    """
    part = window(answer, clock, tokens)
    return part.rate if part is not None else 0.0


def bunched(answers: Sequence[TimedAnswer], clock: Clock) -> int:
    """Return how many tokens at the start of the answers arrived together or too soon.

    An answer that has no more tokens than this cannot be used for a rate.

    Args:
        answers: The answers.
        clock: How the answers' tokens are counted.

    Returns:
        The median over the answers, rounded down.
    """
    starts = []
    for answer in answers:
        part = window(answer, clock)
        if part is not None and part.start.chunks > 1:
            starts.append(part.start.tokens)
        else:
            starts.append(0)
    return math.floor(median(starts)) if starts else 0
