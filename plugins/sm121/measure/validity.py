"""Checks that can make a number invalid.

Each check has a name and records its evidence. If a check is not possible, because the server does
not provide the data, it is recorded as `unproven`, and does not make a number INVALID. The checks
of rates are in `rate_checks`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sm121.client.timed import TimedBatch
from sm121.client.timed_answer import Clock, TimedAnswer
from sm121.core.measuring_settings import MeasuringSettings
from sm121.measure import decoding, measurement
from sm121.measure.counters import Counters
from sm121.measure.timing import arrivals, ttft_ms

#: The maximum difference between two of this machine's clocks if neither was stepped, in seconds.
_CLOCK_STEP_S = 0.005
#: The maximum drift between the two clocks, as a fraction. It is twice NTP's maximum slew of 500
#: ppm.
_SLEW = 1e-3
#: The maximum fraction of cached tokens in new prompts. If a page of the cache has one token, some
#: tokens are cached by chance. Their effect on a rate is at most this fraction.
_CACHED_SHARE = 0.005
#: The maximum fraction of a chat's tokens that its usage may omit (end of turn, control tokens).
_CHAT_TOKENS = 0.02
#: The maximum number of draft tokens that are accepted beyond the end of an answer.
_LONGEST_DRAFT = 16
#: Delays of the client that are shorter than this, in nanoseconds, do not disturb a time to the
#: first token.
_LEAST_LAG_NS = 3e6


@dataclass
class Findings:
    """Reasons why the numbers of a cell are invalid, and checks that were not possible."""

    invalid: list[measurement.Invalidity] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    def against(self, reason: str, evidence: str) -> None:
        """Record a reason why the numbers are invalid, unless it is already recorded.

        Args:
            reason: The name of the check.
            evidence: What the check observed. Only the first evidence of a reason is kept.
        """
        if all(item.reason != reason for item in self.invalid):
            self.invalid.append(measurement.Invalidity(reason=reason, evidence=evidence))

    def not_checked(self, check: str) -> None:
        """Record a check that was not possible, unless it is already recorded.

        Args:
            check: A text with the check and why it was not possible.
        """
        if check not in self.unproven:
            self.unproven.append(check)


def check_answers(answers: Sequence[TimedAnswer], clock: Clock | None, findings: Findings) -> None:
    """Check each answer for failures, its length and its number of tokens.

    Args:
        answers: The answers.
        clock: How the tokens of all answers are counted; None if no answer has a token.
        findings: Receives the reasons if checks fail.
    """
    failed = [answer for answer in answers if not answer.ok]
    if failed:
        evidence = f"{len(failed)} of {len(answers)} requests: {failed[0].error}"
        findings.against("request_failed", evidence)
    good = [answer for answer in answers if answer.ok]
    if clock is None:
        if good:
            findings.against("no_tokens", f"{len(good)} answers contain no token")
        return
    for answer in good:
        _check_count(answer, clock, findings)
        _check_prompt(answer, findings)
    cached = sum(answer.cached_tokens or 0 for answer in good)
    prompted = sum(answer.prompt_tokens or answer.asked_prompt for answer in good)
    _check_cached(cached, prompted, "usage", findings)
    if any(answer.completion_tokens is None for answer in good):
        findings.not_checked(
            "comparison of the number of tokens with usage: the server sends no usage"
        )
    if clock == "chunks":
        findings.not_checked(
            "number of tokens in each chunk: the server sends neither token ids nor usage"
        )


def _check_count(answer: TimedAnswer, clock: Clock, findings: Findings) -> None:
    """Compare the number of tokens with the usage and with the requested length."""
    tokens = tokens_of(answer, clock)
    usage = answer.completion_tokens
    requested = answer.asked_tokens
    disagrees = usage is not None and usage != tokens
    if clock == "chunks":
        if disagrees:
            findings.against(
                "chunk_clock",
                f"{tokens} chunks with text, usage reports {usage} tokens: a chunk of this server "
                "is not one token",
            )
        return
    if disagrees:
        counted = f"tokens by {clock}"
        if clock == "usage" and answer.clock() == "chunks":
            counted = "chunks with text"
        evidence = f"{tokens} {counted}, usage reports {usage} tokens ({requested} requested)"
        findings.against("token_accounting", evidence)
    elif tokens < requested:
        reasons = [chunk.finish for chunk in answer.chunks if chunk.finish]
        finish = reasons[-1] if reasons else None
        findings.against(
            "short_answer",
            f"{tokens} of {requested} requested tokens, although the request had ignore_eos and "
            f"min_tokens (finish_reason {finish})",
        )
    elif tokens > requested:
        evidence = f"{tokens} tokens by {clock}, but at most {requested} requested"
        findings.against("token_accounting", evidence)


def _check_prompt(answer: TimedAnswer, findings: Findings) -> None:
    for source, counted in (("usage", answer.prompt_tokens), ("its ids", answer.prompt_ids)):
        if counted is not None and answer.asked_prompt and counted != answer.asked_prompt:
            evidence = f"a prompt of {answer.asked_prompt} tokens, but {counted} by {source}"
            findings.against("prompt_length", evidence)


def _check_cached(cached: float, prompted: int, source: str, findings: Findings) -> None:
    if cached > max(1.0, _CACHED_SHARE * prompted):
        evidence = (
            f"{cached:.0f} of {prompted} tokens of new prompts were cached, according to {source}"
        )
        findings.against("prefix_cache_hit", evidence)


def tokens_of(answer: TimedAnswer, clock: Clock) -> int:
    """Return the number of tokens that arrived.

    Args:
        answer: The answer.
        clock: How the answer's tokens are counted.
    """
    counted = arrivals(answer, clock)
    return counted[-1].tokens if counted else 0


def check_warm_up(answers: Sequence[TimedAnswer], findings: Findings) -> None:
    """Check that no request of the warm-up failed.

    Args:
        answers: The answers of the warm-up.
        findings: Receives the reason if the check fails.
    """
    failed = [answer for answer in answers if not answer.ok]
    if failed:
        evidence = f"{len(failed)} of {len(answers)} requests of the warm-up: {failed[0].error}"
        findings.against("request_failed", evidence)


def check_compiled(lines: Sequence[str], findings: Findings) -> None:
    """Check that the engine compiled no kernel during timed requests.

    Args:
        lines: The lines of the engine's log about compilations.
        findings: Receives the reason if the check fails.
    """
    if lines:
        findings.against(
            "compiled_meanwhile",
            f"the engine compiled kernels while timed requests ran ({len(lines)} lines in its "
            f"log): {lines[0]}",
        )


def check_twin(twin: TimedAnswer, findings: Findings) -> None:
    """Compare the token ids of an untimed request with its usage, chunk by chunk ("twin").

    The timed requests have the same length, but do not request ids, so that their tokens are
    counted by usage. This check shows whether that count is right.

    Args:
        twin: The answer to the untimed request.
        findings: Receives the reasons if checks fail.
    """
    if not twin.ok:
        is_failure = twin.status is None or twin.status == 200 or twin.status >= 500
        if is_failure:
            check_warm_up([twin], findings)
        else:
            findings.not_checked(
                f"comparison of the token ids with usage: the request for ids failed: {twin.error}"
            )
        return
    _check_prompt(twin, findings)
    _check_cached(twin.cached_tokens or 0, twin.asked_prompt, "usage", findings)
    if twin.clock() != "token_ids":
        findings.not_checked("comparison of the token ids with usage: the server sends no ids")
        return
    ids = 0
    for chunk in twin.chunks:
        ids += chunk.ids or 0
        if chunk.counted is not None and chunk.counted != ids:
            findings.against(
                "token_accounting",
                f"after {ids} token ids, usage reports {chunk.counted} (in an untimed request of "
                f"{twin.asked_tokens} tokens)",
            )
            return
    if ids < twin.asked_tokens:
        reason = "short_answer" if twin.completion_tokens == ids else "token_accounting"
        findings.against(
            reason,
            f"{ids} of {twin.asked_tokens} token ids came in an untimed request, usage reports "
            f"{twin.completion_tokens}",
        )


def check_chat(
    answer: TimedAnswer, before: Counters | None, after: Counters | None, findings: Findings
) -> None:
    """Check that a chat did not fail, and compare its usage with the server's counters.

    Args:
        answer: The answer of the chat.
        before: The counters before the chat; None if the server has none.
        after: The counters after the chat; None if the server has none.
        findings: Receives the reasons if checks fail.
    """
    if not answer.ok:
        findings.against("request_failed", str(answer.error))
        return
    generated = None
    if before is not None and after is not None:
        generated = after.since(before).get("generated")
    if generated is None:
        findings.not_checked(
            "tokens of a chat by counters: /metrics does not count generated tokens"
        )
        return
    usage = answer.completion_tokens or 0
    if abs(generated - usage) > _CHAT_TOKENS * generated:
        reason = "token_accounting" if usage > generated else "other_clients"
        evidence = f"usage reports that a chat has {usage} tokens, the counters {generated:.0f}"
        findings.against(reason, evidence)


def check_metrics_stay(before: Counters | None, after: Counters | None, findings: Findings) -> None:
    """Check that every counter that existed before the first request exists after the last one.

    Args:
        before: The counters before the first request; None if the server had none.
        after: The counters after the last request; None if the server has none.
        findings: Receives the reason if the check fails.
    """
    if before is None:
        return
    vanished: list[str] = sorted(before.values)
    if after is not None:
        vanished = sorted(before.values.keys() - after.values.keys() - after.no_number)
    if vanished:
        names = ", ".join(vanished) if after is not None else "all"
        evidence = f"/metrics had these before the first request and not after the last: {names}"
        findings.against("counters_vanished", evidence)


def check_counters(
    delta: dict[str, float] | None, answers: Sequence[TimedAnswer], clock: Clock, findings: Findings
) -> None:
    """Compare the server's counters with the requests of the client.

    Args:
        delta: The changes of the counters; None if the server has none.
        answers: All answers between the two readings of the counters.
        clock: How the answers' tokens are counted.
        findings: Receives the reasons if checks fail.
    """
    if delta is None:
        for check in ("other clients", "prefix-cache hits", "preemptions", "tokens by counters"):
            findings.not_checked(f"{check}: the server has no /metrics that can be read")
        return
    prompted = sum(answer.asked_prompt for answer in answers)
    whole = all(answer.ok for answer in answers)
    missing = [name for name in ("running", "waiting") if name not in delta]
    if missing:
        findings.not_checked(
            f"other clients: /metrics does not count {' and '.join(missing)} requests"
        )
    busy = int(delta.get("running", 0) + delta.get("waiting", 0))
    if busy and whole:  # an abandoned request may still run
        findings.against(
            "other_clients",
            f"{busy} requests run or wait while no request of the suite is in progress",
        )
    _check_generated(delta, answers, clock, findings)
    counted = delta.get("prompted")
    if counted is not None and counted > prompted and whole and prompted:
        evidence = (
            f"{counted:.0f} prompt tokens by the counters, {prompted} of them for the suite's "
            "requests"
        )
        findings.against("other_clients", evidence)
    for name, check in (("cache_hits", "prefix-cache hits"), ("preemptions", "preemptions")):
        if name not in delta:
            findings.not_checked(f"{check}: the server does not count them")
    _check_cached(delta.get("cache_hits", 0.0), prompted, "the counters", findings)
    preemptions = int(delta.get("preemptions", 0.0))
    if preemptions:
        evidence = f"{preemptions} preemptions: requests waited for the KV cache"
        findings.against("preemption", evidence)


def _check_generated(
    delta: dict[str, float], answers: Sequence[TimedAnswer], clock: Clock, findings: Findings
) -> None:
    """Compare the counter of generated tokens with the tokens that arrived."""
    generated = delta.get("generated")
    if generated is None:
        findings.not_checked("tokens by counters: /metrics does not count generated tokens")
        return
    arrived = sum(tokens_of(answer, clock) for answer in answers)
    if generated > arrived and all(answer.ok for answer in answers):
        evidence = (
            f"{generated:.0f} tokens generated by the counters, {arrived} of them for the "
            "suite's requests"
        )
        findings.against("other_clients", evidence)
    elif generated < arrived:
        evidence = f"{arrived} tokens arrived, the counters report {generated:.0f} were generated"
        findings.against("token_counters", evidence)


def check_drafts(
    delta: dict[str, float] | None, answers: Sequence[TimedAnswer], clock: Clock, findings: Findings
) -> None:
    """Compare the counters of drafts with the prompts and the streams.

    A step sends one token and the accepted draft tokens. It sends no tokens beyond the end of an
    answer.

    Args:
        delta: The changes of the counters; None if the server has none.
        answers: All answers between the two readings of the counters.
        clock: How the answers' tokens are counted.
        findings: Receives the reasons if checks fail.
    """
    # The number of tokens that arrived together with another token.
    joined = 0
    for answer in answers:
        joined += tokens_of(answer, clock) - len(decoding.moments(arrivals(answer, clock)))
    if delta is None and joined > len(answers):
        findings.not_checked(
            "speculation: several tokens arrive at once, and no counter shows whether they are "
            "draft tokens"
        )
    delta = delta or {}
    drafts = delta.get("drafts", 0.0)
    accepted = delta.get("accepted_tokens", 0.0)
    if not drafts:
        return
    if not all(answer.text for answer in answers):
        findings.against(
            "drafted_random_tokens",
            f"{drafts:.0f} drafts, {accepted:.0f} of their tokens accepted, after prompts of "
            "random tokens, where the acceptance rate differs from that of real texts",
        )
    if clock == "chunks" or not all(answer.ok for answer in answers):
        return
    longest = min(delta.get("draft_tokens", 0.0) / drafts, _LONGEST_DRAFT)
    beyond = longest * len(answers)
    if accepted > joined + beyond:
        findings.against(
            "accepted_tokens",
            f"the server's counters report {accepted:.0f} accepted tokens; in the streams, only "
            f"{joined} tokens came together with another token, and at most {beyond:.0f} were "
            "discarded after the end of an answer",
        )


def check_client(batches: Sequence[TimedBatch], findings: Findings) -> None:
    """Check that the clocks of the client's machine agree.

    Args:
        batches: The batches, with the differences between the clocks.
        findings: Receives the reason if the check fails.
    """
    for batch in batches:
        boot = batch.clock_steps.get("boot", 0.0)
        raw = batch.clock_steps.get("raw", 0.0)
        bound = _CLOCK_STEP_S + _SLEW * batch.wall_s
        if abs(boot) > bound:
            evidence = f"the machine slept for {boot:.3f} s, which the timestamps do not include"
            findings.against("clock_step", evidence)
        if abs(raw) > bound:
            evidence = f"the timestamps and the hardware clock drifted {raw:.3f} s apart"
            findings.against("clock_step", evidence)


def disturbed(answer: TimedAnswer, clock: Clock, measuring: MeasuringSettings) -> bool:
    """Return whether a delay of the client may have changed an answer's numbers.

    Args:
        answer: The answer with its delays. For a failed answer, the result is False.
        clock: How the answer's tokens are counted.
        measuring: The bounds of the profile.
    """
    chunks = arrivals(answer, clock) if answer.ok else []
    if not chunks:
        return False
    sent, first, last = answer.lag_ns
    bound = measuring.client_lag_bound
    window_ns = chunks[-1].at_ns - chunks[0].at_ns
    is_rate_late = len(chunks) > 1 and max(first, last) > bound * window_ns
    waited_ns = ttft_ms(answer, clock) * 1e6
    is_start_late = max(sent, first) > max(bound * waited_ns, _LEAST_LAG_NS)
    return is_rate_late or is_start_late


def check_lag(lost: int, kept: int, worst_ns: int, findings: Findings) -> None:
    """Check that few rounds were excluded because the client's own delays disturbed them.

    Args:
        lost: The number of excluded rounds.
        kept: The number of remaining rounds.
        worst_ns: The longest delay of the client.
        findings: Receives the reason if the check fails.
    """
    if lost > max(2, kept):
        findings.against(
            "client_lag",
            f"{lost} of {lost + kept} rounds were disturbed by the client's own delays (up to "
            f"{worst_ns / 1e6:.1f} ms): the measuring machine is too busy",
        )
