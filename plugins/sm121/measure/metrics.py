"""From answers to samples: the definitions of what is measured (docs/measurement.md)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from sm121.client.timed_answer import Clock, TimedAnswer

#: A failed request took for ever, and a failed stream had no rate.
NEVER = math.inf


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


def arrivals(answer: TimedAnswer, clock: Clock) -> list[tuple[int, int]]:
    """(time, tokens so far) of each chunk with a token, by the clock or what it stands for."""
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


def decode_rate(answer: TimedAnswer, clock: Clock, tokens: int | None = None) -> float:
    """Tokens after the first chunk over the time from it to the last one.

    Args:
        tokens: look at the answer only up to the chunk with its so many-th token.
    """
    found = arrivals(answer, clock) if answer.ok else []
    if tokens is not None:
        end = next((i for i, (_, total) in enumerate(found) if total >= tokens), len(found) - 1)
        found = found[: end + 1]
    if len(found) < 2 or found[-1][0] <= found[0][0]:
        return 0.0
    return (found[-1][1] - found[0][1]) / (found[-1][0] - found[0][0]) * 1e9


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
    """Times between chunks that carry tokens. A failed request had one that did not end."""
    if not answer.ok:
        return [NEVER]
    stamps = [at for at, _ in arrivals(answer, clock)]
    return [(b - a) / 1e6 for a, b in itertools.pairwise(stamps)]


def e2e_ms(answer: TimedAnswer) -> float:
    """From the request to the end of its answer."""
    return (answer.ended_ns - answer.sent_ns) / 1e6 if answer.ok else NEVER


def total_rate(answers: Sequence[TimedAnswer], clock: Clock) -> float:
    """Tokens a second of streams that ran side by side: what came after the first token of any of
    them until the last of all. A failed stream makes it nothing."""
    found = [arrivals(answer, clock) for answer in answers if answer.ok]
    if len(found) < len(answers) or not all(found):
        return 0.0
    first, last = min(f[0][0] for f in found), max(f[-1][0] for f in found)
    after = sum(f[-1][1] - f[0][1] for f in found)
    return after / (last - first) * 1e9 if last > first else 0.0


def second_clock(long: Sequence[TimedAnswer], short: Sequence[TimedAnswer]) -> list[float]:
    """Decode rates that no chunk has a part in: from the wall times of whole requests of
    different length, for every pair of them."""
    return [
        (a.asked_tokens - b.asked_tokens) / (e2e_ms(a) - e2e_ms(b)) * 1e3
        for a in long
        for b in short
        if a.ok and b.ok and a.asked_tokens > b.asked_tokens and e2e_ms(a) > e2e_ms(b)
    ]
