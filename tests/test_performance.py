"""Performance: the rates and times of the profile's plan reach their gates.

The decode rate is the number of tokens after the first chunk over the time from that chunk to the
last. The prefill rate is the number of prompt tokens over the time to the first token. A number
that cannot be trusted is INVALID, with the reason.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.performance, pytest.mark.applies_to("cpu", "gpu")]


def test_prefill_rate(performance, depth):
    """pp2048 at every depth, cold: no token of the prompt comes from a cache."""
    performance.measure("pp", depth)


def test_decode_rate(performance, tokens, depth):
    """tg32 and tg128 at every depth. This is the number that the project is about."""
    performance.measure("tg", depth, tokens=tokens)


def test_chat_rate(performance, profile):
    """Streamed, sampled chats of hundreds of tokens are nearly as fast as the decode rate. A server
    that drafts reaches the gate in them."""
    performance.chat_rate(profile.performance.chats, profile.gate("tg32@d0"))


def test_sampled_rate(performance, tokens):
    """tg32 and tg128 at temperature 1.0 are measured beside greedy ones. They have no gate."""
    performance.sampled_rate(tokens)


@pytest.mark.parametrize("quantile", [0.5, 0.99], ids=["p50", "p99"])
def test_time_to_first_token(performance, quantile):
    """The time from the request to the first chunk that carries a generated token."""
    performance.measure("ttft", quantile=quantile)


def test_time_to_first_visible_text(performance, profile):
    """The time to the first text that a user sees. A reasoning model generates much before it."""
    questions = [chat.question for chat in profile.correctness.chats]
    performance.visible_time(questions, profile.correctness.max_answer_tokens)


@pytest.mark.parametrize("quantile", [0.5, 0.99], ids=["p50", "p99"])
def test_time_per_token(performance, quantile):
    """The time of each token after the first chunk, by request."""
    performance.measure("tpot", quantile=quantile)


@pytest.mark.parametrize("quantile", [0.5, 0.99], ids=["p50", "p99"])
def test_gap_between_chunks(performance, quantile):
    """The usual and the longest waits within an answer, over all gaps and not over means of
    requests."""
    performance.measure("itl", quantile=quantile)


@pytest.mark.parametrize("quantile", [0.5, 0.99], ids=["p50", "p99"])
def test_time_to_the_end(performance, quantile):
    """The time from the request to the end of its answer."""
    performance.measure("e2e", quantile=quantile)


def test_concurrent_rate(performance, streams):
    """The rate of all tokens of several streams together, while all of them decode."""
    performance.measure("streams", streams=streams)


def test_prefill_of_several(performance, streams):
    """The prompts of several requests at once: all their tokens, over the time until each has its
    first token."""
    performance.measure("pp", streams=streams)


def test_time_to_first_token_of_several(performance, streams):
    """The time to the first token of several requests at once, which wait for each other's
    prefill."""
    performance.measure("ttft", streams=streams)


def test_acceptance(speculation, performance, position):
    """Of the drafts for fixed texts, the share whose token at this place was accepted."""
    performance.acceptance(speculation.drafted, position)


def test_accepted_length(speculation, performance):
    """Tokens of a step on the same texts, the one that is always right included."""
    performance.accepted_length(speculation.drafted)


def test_rate_holds_to_the_end(last_look):
    """What passed is measured again at the end, and passes with all rounds together. A machine that
    slowed down while it was measured has no rate."""
    last_look()


def test_startup_time(startup_s, performance):
    """The time from the start of the process to the first token."""
    performance.once("startup_s", "s", startup_s)


def test_memory_peak(memory_peak_gib, performance):
    """The peak of the memory that all processes of the server hold, of the host and the GPU."""
    performance.once("memory_peak_gib", "GiB", memory_peak_gib)
