"""Check rates with the server's own timestamps, with wall times, and with parts of the answers."""

from collections.abc import Sequence
from statistics import median, pstdev
from typing import NamedTuple

import numpy as np

from sm121.client.timed_answer import Clock, TimedAnswer
from sm121.measure import decoding
from sm121.measure.distributions import student_cdf
from sm121.measure.timing import arrivals, window
from sm121.measure.validity import Findings, tokens_of

#: The tolerated difference between the engine's and the client's timestamp of a token, in seconds
#: per request.
_DELIVERY_S = 0.002
#: The maximum fraction of rounds that have too few tokens after those that arrived together.
_BUNCHED_SHARE = 0.25
#: A pause after a first chunk without text is suspicious if it is longer than this many gaps plus
#: `_PAUSE_SHARE` of the time to the first chunk.
_PAUSE = 3.0
#: See `_PAUSE`: the fraction of the time to the first chunk.
_PAUSE_SHARE = 0.1
#: A pause after a first chunk without text is judged only in answers of at least this many chunks.
_GAPS = 4
#: Differences of up to this many standard errors of a median count as noise.
_NOISE = 3.0
#: Standard deviation of a normal distribution divided by its median absolute deviation.
_DEVIATION = 1.4826
#: The probability of reporting a drift although there is none, over all rounds at which it may
#: begin.
_DRIFT_RISK = 1e-4


class RatePair(NamedTuple):
    """The decode rate of the same tokens, computed in two ways, in tokens per second."""

    by_stream: float
    by_wall_time: float


def check_server_clock(
    delta: dict[str, float] | None,
    answers: Sequence[TimedAnswer],
    clock: Clock,
    bound: float,
    findings: Findings,
) -> None:
    """Compare the decode rate of all requests with the engine's own measurement.

    A stream may be slower than the engine, because its time includes the delivery. It cannot be
    faster.

    Args:
        delta: The changes of the server's counters; None if it has none.
        answers: All answers between the two readings of the counters.
        clock: How the answers' tokens are counted.
        bound: The tolerated relative difference.
        findings: Receives the reason if the check fails.
    """
    seconds = (delta or {}).get("decode_seconds")
    if seconds is None:
        findings.not_checked("the server's own decode time: /metrics does not contain it")
        return
    tokens = sum(tokens_of(answer, clock) for answer in answers)
    windows = []
    for answer in answers:
        part = window(answer, clock)
        if part is not None:
            windows.append(part)
    longest = max((part.end.tokens for part in windows), default=0)
    long = [part for part in windows if part.end.tokens == longest]
    long_ns = sum(part.ns for part in long)
    if long_ns <= 0 or len(windows) < len(answers):
        return  # a request failed, which another check reports
    if seconds <= 0:
        findings.against(
            "server_clock",
            f"the server's own decode time grew by {seconds:g} s during {len(answers)} requests "
            f"with {tokens} tokens",
        )
        return
    # A short answer does not show whether its first chunk was late. Without speculative decoding, a
    # short answer is not faster than a long one. Its time is therefore at least the number of its
    # tokens times the long answers' time per token.
    token_ns = 0.0
    if not any(answer.text for answer in answers):
        token_ns = long_ns / sum(part.tokens for part in long)
    span_s = sum(max(part.ns, part.tokens * token_ns) for part in windows) / 1e9
    observed = sum(part.tokens for part in windows) / span_s
    engine = (tokens - len(answers)) / seconds
    tolerated = bound + len(answers) * _DELIVERY_S / span_s
    if observed > engine * (1.0 + tolerated):
        findings.against(
            "server_clock",
            f"{observed:.4g} tok/s by the streams, {engine:.4g} by the server's own decode time of "
            f"the same {len(answers)} requests ({observed / engine - 1:+.1%}; {tolerated:.1%} is "
            "tolerated)",
        )


def check_first_chunk(answers: Sequence[TimedAnswer], clock: Clock, findings: Findings) -> None:
    """Check that the chunk that counts as the first token did not arrive before that token.

    Such a chunk has no text, and the time for processing the prompt follows the chunk.

    Args:
        answers: The answers.
        clock: How the answers' tokens are counted.
        findings: Receives the reason if the check fails.
    """
    pauses_ns = []
    waits_ns = []
    for answer in answers:
        stamps = [arrival.at_ns for arrival in arrivals(answer, clock)]
        if len(stamps) < _GAPS:
            continue
        first = next((chunk for chunk in answer.chunks if chunk.at_ns == stamps[0]), None)
        if first is None or first.text:
            continue
        gaps = np.diff(stamps)
        pause_ns = float(gaps[0])
        wait_ns = stamps[0] - answer.sent_ns
        if pause_ns > float(np.median(gaps[1:])) * _PAUSE + _PAUSE_SHARE * wait_ns:
            pauses_ns.append(pause_ns)
            waits_ns.append(wait_ns)
    if 2 * len(pauses_ns) > len(answers):
        findings.against(
            "early_first_chunk",
            f"{len(pauses_ns)} of {len(answers)} first chunks are counted as a token and have no "
            f"text; they came after {median(waits_ns) / 1e6:.4g} ms, and the next chunk "
            f"{median(pauses_ns) / 1e6:.4g} ms later",
        )


def check_start(
    answers: Sequence[TimedAnswer], clock: Clock, tokens: int, findings: Findings
) -> None:
    """Check that enough of the first tokens did not arrive together with the first chunk.

    Args:
        answers: The answers.
        clock: How the answers' tokens are counted.
        tokens: The number of first tokens.
        findings: Receives the reason if the check fails.
    """
    windows = []
    for answer in answers:
        part = window(answer, clock, tokens)
        if part is not None:
            windows.append(part)
    bunched = [part for part in windows if not part.enough]
    if len(bunched) > _BUNCHED_SHARE * len(windows):
        findings.against(
            "bunched_start",
            f"{min(bunched[0].start.tokens, tokens)} of the first {tokens} tokens came together at "
            f"the start, in {len(bunched)} of {len(windows)} rounds: too few are left for a rate",
        )


def check_beginning(
    answers: Sequence[TimedAnswer], clock: Clock, tokens: int, bound: float, findings: Findings
) -> None:
    """Compare the rate of the first tokens with the rate of the rest of the same answers.

    If the first tokens have a higher rate, the server held them back and sent them with the first
    chunk. A growing context also makes later tokens slower, but by far less than the bound. With
    speculative decoding, the first tokens of a text may be easier to draft than the others. The
    check therefore uses only the text whose ratio of the two rates is lowest. The ratio of an
    answer is that of its token rates or that of its rates of decoding steps, whichever is lower.

    Args:
        answers: The answers.
        clock: How the answers' tokens are counted.
        tokens: The number of first tokens.
        bound: The tolerated relative difference.
        findings: Receives the reason if the check fails.
    """
    by_text: dict[str, list[float]] = {}
    for answer in answers:
        ratio_of_answer = beginning_to_rest(answer, clock, tokens)
        if ratio_of_answer is not None:
            by_text.setdefault(answer.text, []).append(ratio_of_answer)
    ratios = min(by_text.values(), key=median, default=[])
    if len(ratios) < 2:
        return
    ratio = median(ratios)
    deviation = _DEVIATION * median(abs(each - ratio) for each in ratios)
    noise = _NOISE * deviation / len(ratios) ** 0.5
    if ratio > 1.0 + bound + noise:
        findings.against(
            "rates_contradict",
            f"the first {tokens} tokens came {ratio - 1:.1%} faster than those after them in the "
            f"same answers ({len(ratios)} rounds; {bound + noise:.1%} is tolerated): they were "
            "held back with the first chunk",
        )
    elif ratio > 1.0 + bound:
        findings.not_checked(
            f"rates_contradict: the first {tokens} tokens came {ratio - 1:.1%} faster than those "
            f"after them, but the rounds differ too much to judge it: up to {bound + noise:.1%} is "
            "tolerated, so the rate may be too high"
        )


def beginning_to_rest(answer: TimedAnswer, clock: Clock, tokens: int) -> float | None:
    """Return the rate of the first tokens divided by the rate of the rest.

    Args:
        answer: The answer.
        clock: How the answer's tokens are counted.
        tokens: The number of first tokens.

    Returns:
        The ratio of the token rates. With a fixed text (speculative decoding), the ratio of token
        rates or of decoding-step rates, whichever is lower. None if a part has too few tokens.
    """
    beginning = window(answer, clock, tokens)
    whole = window(answer, clock)
    if beginning is None or whole is None or not beginning.rate:
        return None
    steps = whole.steps - beginning.steps
    rest = decoding.Window(beginning.end, whole.end, answer.asked_tokens - tokens, steps=steps)
    if not rest.enough or not rest.rate:
        return None
    by_tokens = beginning.rate / rest.rate
    if not answer.text:
        return by_tokens
    by_steps = beginning.steps / beginning.ns * rest.ns / max(steps, 1)
    return min(by_tokens, by_steps)


def check_second_clock(
    pairs: Sequence[tuple[float, float]], bound: float, findings: Findings, neighbours: bool = False
) -> None:
    """Compare decode rates from the stream with rates from the wall times of whole requests.

    A change of the server's speed from one answer to the next affects both rates.

    Args:
        pairs: The rates, each computed in both ways.
        bound: The tolerated relative difference.
        findings: Receives the reason if the check fails.
        neighbours: Whether each answer is in one pair only. If so, a difference of three standard
            errors of the median is tolerated. If pairs share answers, two standard deviations are
            tolerated.
    """
    rates = [RatePair(*pair) for pair in pairs]
    ratios = [pair.by_wall_time / pair.by_stream for pair in rates if pair.by_stream]
    if not ratios:
        findings.not_checked(
            "second_clock: all requests have the same length, so the rate cannot be checked by the "
            "difference between long and short requests"
        )
        return
    ratio = median(ratios)
    # The standard error of a median is 1.2533 times that of a mean.
    deviations = _NOISE * 1.2533 / len(ratios) ** 0.5 if neighbours else 2.0
    noise = deviations * _DEVIATION * median(abs(each - ratio) for each in ratios)
    # If the wall times vary little, this detects wrong timestamps even in half of the answers.
    by_stream = median(pair.by_stream for pair in rates)
    by_wall_time = median(pair.by_wall_time for pair in rates)
    spread = 2.0 * pstdev(pair.by_wall_time for pair in rates)
    difference = abs(by_wall_time - by_stream)
    if abs(ratio - 1.0) > bound + noise or difference > bound * by_stream + spread:
        findings.against(
            "second_clock",
            f"{by_stream:.4g} tok/s by the stream, {by_wall_time:.4g} tok/s by the "
            f"difference between the times of long and short requests ({len(rates)} pairs); they "
            f"may differ by {bound:.0%}",
        )


def check_drift(rates: Sequence[float], bound: float, findings: Findings) -> None:
    """Check that a rate did not change while it was measured.

    Args:
        rates: The rates of the rounds, in their order.
        bound: The tolerated relative change.
        findings: Receives the reason if the check fails.
    """
    change = drift(rates)
    if change is None:
        return
    before = change.before
    after = change.after
    if abs(after - before) > bound * before:
        findings.against(
            "drift",
            f"{before:.4g} tok/s in the first {change.at} rounds, {after:.4g} in the "
            f"{len(rates) - change.at} after them ({(after / before - 1):+.1%}); {bound:.0%} is "
            "tolerated",
        )


class Drift(NamedTuple):
    """A change of level within a series.

    Attributes:
        at: The index of the first value after the change.
        before: The median of the values before the change.
        after: The median of the values after the change.
    """

    at: int
    before: float
    after: float


def drift(rates: Sequence[float]) -> Drift | None:
    """Return where the level of a series changes; None if it does not change.

    The function runs a t test at each index that has at least two values on either side, with a
    Bonferroni correction.

    Args:
        rates: The series.
    """
    values = np.asarray(rates, dtype=np.float64)
    changes = range(2, len(values) - 1)
    least_risk = 1.0
    best = 0
    for at in changes:
        before = values[:at]
        after = values[at:]
        within = ((before - before.mean()) ** 2).sum() + ((after - after.mean()) ** 2).sum()
        # A spread of 0 only shows the clock's resolution.
        deviation = max(float(np.sqrt(within / (len(values) - 2))), 1e-4 * float(values.mean()))
        distance = abs(float(before.mean() - after.mean()))
        score = distance / (deviation * np.sqrt(1 / len(before) + 1 / len(after)))
        risk = 2.0 * student_cdf(len(values) - 2, -float(score))
        if risk < least_risk:
            least_risk = risk
            best = at
    if not best or least_risk > _DRIFT_RISK / len(changes):
        return None
    return Drift(best, float(np.median(values[:best])), float(np.median(values[best:])))
