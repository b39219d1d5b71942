"""Why a number may count neither way. Each check is named, and says what it saw. What a server
gives no means to check is `unproven` and makes nothing INVALID."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, pstdev

import numpy as np
from scipy import special

from sm121.client.timed import TimedBatch
from sm121.client.timed_answer import Clock, TimedAnswer
from sm121.core.level_settings import Measuring
from sm121.measure import decoding, measurement
from sm121.measure.counters import Counters
from sm121.measure.timing import arrivals, ttft_ms, window

#: Between clocks that do not step, in seconds; NTP slews by 500 ppm at most.
_CLOCK_STEP_S = 0.005
_SLEW = 1e-3
#: What may lie between an engine's stamp of a token and ours, for each request, in seconds.
_DELIVERY_S = 0.002
#: Share of the rounds that may have too few tokens after a bunch.
_BUNCHED_SHARE = 0.25
#: A first chunk without text may be followed by a pause of so many gaps, and of this share of the
#: time that it took itself; in answers of so many chunks at least.
_PAUSE, _PAUSE_SHARE, _GAPS = 3.0, 0.1, 4
#: Share of prompts that a cache may have, by chance where pages have a token; no rate moves more.
_CACHED_SHARE = 0.005
#: Deviations of a median that are noise.
_NOISE = 3.0
#: Share of a chat's tokens that its usage may leave out: an end of turn, control tokens.
_CHAT_TOKENS = 0.02
#: Tokens of a draft that may lie beyond the end of an answer.
_LONGEST_DRAFT = 16
#: Chance of seeing a drift where there is none, over all places where one may begin.
_DRIFT_RISK = 1e-4


@dataclass
class Findings:
    """What speaks against the numbers of a cell, and what could not be looked at."""

    invalid: list[measurement.Invalidity] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    def against(self, reason: str, evidence: str) -> None:
        """Something speaks against them; the same reason counts once."""
        if all(item.reason != reason for item in self.invalid):
            self.invalid.append(measurement.Invalidity(reason=reason, evidence=evidence))

    def not_checked(self, what: str) -> None:
        """There was no means to look at it."""
        if what not in self.unproven:
            self.unproven.append(what)


def check_answers(answers: Sequence[TimedAnswer], clock: Clock | None, findings: Findings) -> None:
    """Failures, lengths and the account of tokens, request by request."""
    if failed := [answer for answer in answers if not answer.ok]:
        evidence = f"{len(failed)} of {len(answers)} requests: {failed[0].error}"
        findings.against("request_failed", evidence)
    good = [answer for answer in answers if answer.ok]
    if clock is None and good:
        findings.against("no_tokens", f"{len(good)} answers carry no token at all")
    if clock is None:
        return
    for answer in good:
        _check_count(answer, clock, findings)
        _check_prompt(answer, findings)
    _check_cached(
        sum(answer.cached_tokens or 0 for answer in good),
        sum(answer.prompt_tokens or answer.asked_prompt for answer in good),
        "usage",
        findings,
    )
    if any(answer.completion_tokens is None for answer in good):
        findings.not_checked("tokens against usage: the server sends no usage")
    if clock == "chunks":
        findings.not_checked("tokens: neither ids nor usage say how many a chunk has")


def _check_count(answer: TimedAnswer, clock: Clock, findings: Findings) -> None:
    tokens = tokens_of(answer, clock)
    usage, requested = answer.completion_tokens, answer.asked_tokens
    if clock == "chunks":
        if usage is not None and usage != tokens:
            findings.against(
                "chunk_clock",
                f"{tokens} chunks with text, usage says {usage} tokens: "
                "a chunk is not a token here",
            )
        return
    if usage is not None and usage != tokens:
        evidence = f"{tokens} tokens by {clock}, usage says {usage} (asked for {requested})"
        findings.against("token_accounting", evidence)
    elif tokens < requested:
        finish = next((chunk.finish for chunk in reversed(answer.chunks) if chunk.finish), None)
        findings.against(
            "short_answer",
            f"{tokens} tokens of {requested} with ignore_eos and min_tokens "
            f"(finish_reason {finish})",
        )
    elif tokens > requested:
        evidence = f"{tokens} tokens by {clock}, at most {requested} asked"
        findings.against("token_accounting", evidence)


def _check_prompt(answer: TimedAnswer, findings: Findings) -> None:
    for source, counted in (("usage", answer.prompt_tokens), ("its ids", answer.prompt_ids)):
        if counted is not None and answer.asked_prompt and counted != answer.asked_prompt:
            evidence = f"a prompt of {answer.asked_prompt} tokens, {source} say {counted}"
            findings.against("prompt_length", evidence)


def _check_cached(cached: float, prompted: int, source: str, findings: Findings) -> None:
    if cached > max(1.0, _CACHED_SHARE * prompted):
        evidence = f"{cached:.0f} of {prompted} tokens of fresh prompts were cached, by {source}"
        findings.against("prefix_cache_hit", evidence)


def tokens_of(answer: TimedAnswer, clock: Clock) -> int:
    """Tokens that arrived, by the clock or what it stands for."""
    counted = arrivals(answer, clock)
    return counted[-1].tokens if counted else 0


def check_warm_up(answers: Sequence[TimedAnswer], findings: Findings) -> None:
    """A request that failed before the first round failed all the same."""
    if failed := [answer for answer in answers if not answer.ok]:
        evidence = f"{len(failed)} of {len(answers)} requests of the warm-up: {failed[0].error}"
        findings.against("request_failed", evidence)


def check_compiled(lines: Sequence[str], findings: Findings) -> None:
    """Kernels that the engine compiled while timed requests ran, a line of its log each."""
    if lines:
        findings.against(
            "compiled_meanwhile",
            f"the engine compiled kernels while timed requests ran ({len(lines)} lines in its "
            f"log): {lines[0]}",
        )


def check_twin(twin: TimedAnswer, findings: Findings) -> None:
    """The ids of an untimed request, as long as the timed ones, against its own usage, chunk by
    chunk: what the timed ones, which ask for no ids, are counted by."""
    if not twin.ok and (twin.status is None or twin.status == 200 or twin.status >= 500):
        check_warm_up([twin], findings)
        return
    if not twin.ok:
        findings.not_checked(f"token ids against usage: asked for ids, it said {twin.error}")
        return
    _check_prompt(twin, findings)
    _check_cached(twin.cached_tokens or 0, twin.asked_prompt, "usage", findings)
    if twin.clock() != "token_ids":
        findings.not_checked("token ids against usage: the server sends no ids")
        return
    ids = 0
    for chunk in twin.chunks:
        ids += chunk.ids or 0
        if chunk.counted is not None and chunk.counted != ids:
            findings.against(
                "token_accounting",
                f"{ids} token ids so far, their usage says {chunk.counted} (an untimed "
                f"request of {twin.asked_tokens} tokens)",
            )
            return
    if ids < twin.asked_tokens:
        findings.against(
            "short_answer" if twin.completion_tokens == ids else "token_accounting",
            f"{ids} token ids of {twin.asked_tokens} came (an untimed request), usage says "
            f"{twin.completion_tokens}",
        )


def check_chat(
    answer: TimedAnswer, before: Counters | None, after: Counters | None, findings: Findings
) -> None:
    """A chat's failure, and its usage against what the server's counters say of it alone."""
    if not answer.ok:
        findings.against("request_failed", str(answer.error))
        return
    generated = after.since(before).get("generated") if before and after else None
    if generated is None:
        findings.not_checked("tokens of a chat by counters: /metrics has no number of them")
        return
    usage = answer.completion_tokens or 0
    if abs(generated - usage) > _CHAT_TOKENS * generated:
        reason = "token_accounting" if usage > generated else "other_clients"
        evidence = f"usage says that a chat has {usage} tokens, the counters {generated:.0f}"
        findings.against(reason, evidence)


def check_metrics_stay(before: Counters | None, after: Counters | None, findings: Findings) -> None:
    """What the server counted before the first request it counts after the last one."""
    if before is None:
        return
    remaining = after.values.keys() | after.no_number if after is not None else set()
    if vanished := sorted(before.values.keys() - remaining):
        names = ", ".join(vanished) if after is not None else "all of /metrics"
        evidence = f"there before the first request and not after the last: {names}"
        findings.against("counters_vanished", evidence)


def check_counters(
    delta: dict[str, float] | None, answers: Sequence[TimedAnswer], clock: Clock, findings: Findings
) -> None:
    """What the server's counters say of the same requests."""
    if delta is None:
        for check in ("other clients", "prefix-cache hits", "preemptions", "tokens by counters"):
            findings.not_checked(f"{check}: the server has no /metrics that can be read")
        return
    arrived = sum(tokens_of(answer, clock) for answer in answers)
    prompted = sum(answer.asked_prompt for answer in answers)
    whole = all(answer.ok for answer in answers)
    if missing := [name for name in ("running", "waiting") if name not in delta]:
        findings.not_checked(
            f"other clients: /metrics says no number of the requests that are {', '.join(missing)}"
        )
    busy = int(delta.get("running", 0) + delta.get("waiting", 0))
    if busy and whole:  # a request that we gave up may still run
        findings.against("other_clients", f"{busy} requests run or wait while none of ours does")
    if (generated := delta.get("generated")) is None:
        findings.not_checked("tokens by counters: /metrics says no number of generated tokens")
    elif generated > arrived and whole:
        evidence = f"{generated:.0f} tokens generated by the counters, {arrived} of them ours"
        findings.against("other_clients", evidence)
    elif generated < arrived:
        evidence = f"{arrived} tokens arrived, the counters say {generated:.0f} were generated"
        findings.against("token_counters", evidence)
    counted = delta.get("prompted")
    if counted is not None and counted > prompted and whole and prompted:
        evidence = f"{counted:.0f} prompt tokens by the counters, {prompted} of them ours"
        findings.against("other_clients", evidence)
    for name, check in (("cache_hits", "prefix-cache hits"), ("preemptions", "preemptions")):
        if name not in delta:
            findings.not_checked(f"{check}: the server does not count them")
    _check_cached(delta.get("cache_hits", 0.0), prompted, "the counters", findings)
    if times := int(delta.get("preemptions", 0.0)):
        findings.against("preemption", f"{times} preemptions: requests waited for the KV cache")


def check_drafts(
    delta: dict[str, float] | None, answers: Sequence[TimedAnswer], clock: Clock, findings: Findings
) -> None:
    """What the server's counters say of drafts against the prompts, and against the stream: a step
    sends one token and those that it accepted, and nothing after the end of an answer."""
    drafts, accepted = ((delta or {}).get(name, 0.0) for name in ("drafts", "accepted_tokens"))
    several = sum(tokens_of(a, clock) - len(decoding.moments(arrivals(a, clock))) for a in answers)
    if delta is None and several > len(answers):
        findings.not_checked(
            "speculation: several tokens come at once, and no counter says whether they are drafted"
        )
    if not delta or not drafts:
        return
    if not all(answer.text for answer in answers):
        findings.against(
            "drafted_random_tokens",
            f"{drafts:.0f} drafts, {accepted:.0f} of their tokens accepted, for random "
            "tokens: no text that anybody writes is drafted like those",
        )
    if clock == "chunks" or not all(answer.ok for answer in answers):
        return
    beyond = min(delta.get("draft_tokens", 0.0) / drafts, _LONGEST_DRAFT) * len(answers)
    if accepted > several + beyond:
        findings.against(
            "accepted_tokens",
            f"{accepted:.0f} accepted tokens by the counters; in the streams {several} came with "
            f"another one, and {beyond:.0f} at most were cut off",
        )


def check_server_clock(
    delta: dict[str, float] | None,
    answers: Sequence[TimedAnswer],
    clock: Clock,
    bound: float,
    findings: Findings,
) -> None:
    """The decode rate over all requests against the engine's own clock over the same ones. The
    stream may be slower than the engine, and is then what a user gets; it cannot be faster."""
    if (seconds := (delta or {}).get("decode_seconds")) is None:
        findings.not_checked("decode time by counters: the server does not count it")
        return
    totals = [tokens_of(answer, clock) for answer in answers]
    windows = [each for answer in answers if (each := window(answer, clock)) is not None]
    longest = max((each.end.tokens for each in windows), default=0)
    long = [each for each in windows if each.end.tokens == longest]
    long_ns, long_tokens = sum(each.ns for each in long), sum(each.tokens for each in long)
    if long_ns <= 0 or len(windows) < len(answers):
        return  # something failed, and that is said elsewhere
    if seconds <= 0:
        findings.against(
            "server_clock",
            f"{len(answers)} requests with {sum(totals)} tokens, and the server's own decode time "
            f"went on by {seconds:g} s",
        )
        return
    # How late a short answer's first chunk was cannot be told: without drafts it is no faster.
    token_ns = 0.0 if any(answer.text for answer in answers) else long_ns / long_tokens
    span_s = sum(max(each.ns, each.tokens * token_ns) for each in windows) / 1e9
    observed = sum(each.tokens for each in windows) / span_s
    engine = sum(total - 1 for total in totals) / seconds
    tolerated = bound + len(answers) * _DELIVERY_S / span_s
    if observed > engine * (1.0 + tolerated):
        findings.against(
            "server_clock",
            f"{observed:.4g} tok/s by the streams, {engine:.4g} by the server's own decode time of "
            f"the same {len(answers)} requests ({observed / engine - 1:+.1%}; {tolerated:.1%} is "
            "tolerated)",
        )


def check_first_chunk(answers: Sequence[TimedAnswer], clock: Clock, findings: Findings) -> None:
    """Whether what is counted as the first token came before there was one: it has no text, and
    what a prompt takes comes after it."""
    early = []
    for answer in answers:
        stamps = [arrival.at_ns for arrival in arrivals(answer, clock)]
        first = next((c for c in answer.chunks if stamps and c.at_ns == stamps[0]), None)
        if first is None or first.text or len(stamps) < _GAPS:
            continue
        gaps = np.diff(stamps)
        pause, typical = float(gaps[0]), float(np.median(gaps[1:]))
        if pause > typical * _PAUSE + _PAUSE_SHARE * (stamps[0] - answer.sent_ns):
            early.append((pause, stamps[0] - answer.sent_ns))
    if 2 * len(early) > len(answers):
        pause, waited = (median(times) / 1e6 for times in zip(*early, strict=True))
        findings.against(
            "early_first_chunk",
            f"{len(early)} of {len(answers)} first chunks are counted as a token and have no text; "
            f"they came after {waited:.4g} ms, and the next one {pause:.4g} ms later",
        )


def check_start(
    answers: Sequence[TimedAnswer], clock: Clock, tokens: int, findings: Findings
) -> None:
    """Whether enough of the first tokens came by themselves, and not with the first chunk."""
    windows = [w for answer in answers if (w := window(answer, clock, tokens)) is not None]
    bunched = [each for each in windows if not each.enough]
    if len(bunched) > _BUNCHED_SHARE * len(windows):
        findings.against(
            "bunched_start",
            f"{min(bunched[0].start.tokens, tokens)} of the first {tokens} tokens came together at "
            f"the start, in {len(bunched)} of {len(windows)} rounds: too few are left for a rate",
        )


def check_beginning(
    answers: Sequence[TimedAnswer], clock: Clock, tokens: int, bound: float, findings: Findings
) -> None:
    """The rate over the first tokens against that over those after them in the same answers. Tokens
    that were held back with the first chunk make it too high, and nothing else does: a context that
    grows by so little costs far less than the bound. Where drafts are accepted, one text may be
    easier at its beginning; that of each of them, in tokens and in steps, is not."""
    by_text: dict[str, list[float]] = {}
    for answer in answers:
        if (ratio_of_answer := beginning_to_rest(answer, clock, tokens)) is not None:
            by_text.setdefault(answer.text, []).append(ratio_of_answer)
    ratios = min(by_text.values(), key=median, default=[])
    if len(ratios) < 2:
        return
    ratio = median(ratios)
    noise = _NOISE * 1.4826 * median(abs(r - ratio) for r in ratios) / len(ratios) ** 0.5
    if ratio > 1.0 + bound + noise:
        findings.against(
            "rates_contradict",
            f"the first {tokens} tokens came {ratio - 1:.1%} faster than those after them in the "
            f"same answers ({len(ratios)} rounds; {bound + noise:.1%} is tolerated): they were "
            "held back with the first chunk",
        )


def beginning_to_rest(answer: TimedAnswer, clock: Clock, tokens: int) -> float | None:
    """The rate over the first so many tokens by the rate over those after them; where drafts are
    accepted, that of steps, if it is lower. None where either has too few."""
    beginning, whole = window(answer, clock, tokens), window(answer, clock)
    if beginning is None or whole is None or not beginning.rate:
        return None
    steps = whole.steps - beginning.steps
    rest = decoding.Window(beginning.end, whole.end, answer.asked_tokens - tokens, steps=steps)
    if not rest.enough or not rest.rate:
        return None
    of_steps = beginning.steps / beginning.ns * rest.ns / max(steps, 1)
    of_tokens = beginning.rate / rest.rate
    return min(of_tokens, of_steps) if answer.text else of_tokens


def check_second_clock(
    pairs: Sequence[tuple[float, float]], bound: float, findings: Findings, neighbours: bool = False
) -> None:
    """The decode rates of answers against what the wall times of whole requests say of the same
    answers: what moves from one answer to the next is in both. `neighbours`: no answer is in two
    pairs, so that their median may be wrong by three of its standard errors alone."""
    if not (ratios := [second / rate for rate, second in pairs if rate]):
        findings.not_checked("second clock: no requests of different length to compare")
        return
    ratio = median(ratios)
    # Pairs share requests: no more of their spread is taken off than one request in each allows.
    deviations = 3.0 * 1.2533 / len(ratios) ** 0.5 if neighbours else 2.0
    noise = deviations * 1.4826 * median(abs(each - ratio) for each in ratios)
    # Wall times that are steady contradict also a stream that is not in half of the answers.
    first, other = (median(rates) for rates in zip(*pairs, strict=True))
    spread = 2.0 * pstdev(second for _, second in pairs)
    if abs(ratio - 1.0) > bound + noise or abs(other - first) > bound * first + spread:
        findings.against(
            "second_clock",
            f"{first:.4g} tok/s by the stream, {other:.4g} tok/s by the times of requests of "
            f"different length ({len(pairs)} pairs); they may differ by {bound:.0%}",
        )


def check_client(batches: Sequence[TimedBatch], findings: Findings) -> None:
    """The client's own clocks."""
    for batch in batches:
        boot, raw = (batch.clock_steps.get(name, 0.0) for name in ("boot", "raw"))
        for step, evidence in (
            (boot, f"the machine slept for {boot:.3f} s, which the clock in use did not count"),
            (raw, f"the clock in use and the hardware's went {raw:.3f} s apart"),
        ):
            if abs(step) > _CLOCK_STEP_S + _SLEW * batch.wall_s:
                findings.against("clock_step", evidence)


def disturbed(answer: TimedAnswer, clock: Clock, measuring: Measuring) -> bool:
    """Whether a delay of the client itself could have moved this answer's numbers."""
    chunks = arrivals(answer, clock) if answer.ok else []
    if not chunks:
        return False
    sent, first, last = answer.lag_ns
    window = chunks[-1][0] - chunks[0][0]
    bound = measuring.client_lag_bound
    waited = ttft_ms(answer, clock) * 1e6
    late = len(chunks) > 1 and max(first, last) > bound * window
    return late or max(sent, first) > max(bound * waited, 3e6)


def check_lag(lost: int, kept: int, worst_ns: int, findings: Findings) -> None:
    """Rounds that the client disturbed are left out; too many of them are no measurement."""
    if lost > max(2, kept):
        findings.against(
            "client_lag",
            f"{lost} of {lost + kept} rounds were disturbed by the client's own delays "
            f"(up to {worst_ns / 1e6:.1f} ms): the machine that measures is too busy",
        )


def check_drift(rates: Sequence[float], bound: float, findings: Findings) -> None:
    """Whether the rate moved while it was measured."""
    if (levels := drift(rates)) is None:
        return
    at, before, after = levels
    if abs(after - before) > bound * before:
        findings.against(
            "drift",
            f"{before:.4g} tok/s in the first {at} rounds, {after:.4g} in the {len(rates) - at} "
            f"after them ({(after / before - 1):+.1%}); {bound:.0%} is tolerated",
        )


def drift(rates: Sequence[float]) -> tuple[int, float, float] | None:
    """Where a series goes from one level to another, and the levels; None where it does not. A t
    test at each place with two samples on either side, at a risk that covers all of them."""
    values = np.asarray(rates, dtype=np.float64)
    changes = range(2, len(values) - 1)
    best: tuple[float, int] | None = None
    for at in changes:
        before, after = values[:at], values[at:]
        within = ((before - before.mean()) ** 2).sum() + ((after - after.mean()) ** 2).sum()
        # A spread of nothing is the clock's resolution, not certainty.
        deviation = max(float(np.sqrt(within / (len(values) - 2))), 1e-4 * float(values.mean()))
        distance = abs(float(before.mean() - after.mean()))
        score = distance / (deviation * np.sqrt(1 / len(before) + 1 / len(after)))
        risk = 2.0 * float(special.stdtr(len(values) - 2, -score))
        if best is None or risk < best[0]:
            best = (risk, at)
    if best is None or best[0] > _DRIFT_RISK / len(changes):
        return None
    at = best[1]
    return at, float(np.median(values[:at])), float(np.median(values[at:]))
