"""Performance: the rates and times of the profile's plan reach their gates.

The decode rate is the number of tokens after the first chunk, divided by the time from that chunk
to the last one. The prefill rate is the number of prompt tokens, divided by the time to the first
token. A number that cannot be trusted is INVALID, with the reason.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.performance, pytest.mark.applies_to("cpu", "gpu")]


def test_prefill_rate(performance, depth):
    """The prefill rate pp2048 at each depth reaches its gate; no token of the prompt comes from a
    cache."""
    performance.measure("pp", depth)


def test_decode_rate(performance, tokens, depth):
    """The decode rates tg32 and tg128 at each depth reach their gates. The gate of tg32 is 52 tok/s
    on a GB10."""
    performance.measure("tg", depth, tokens=tokens)


@pytest.mark.ability("chats")
def test_chat_rate(performance, profile):
    """Streamed, sampled chats of hundreds of tokens are nearly as fast as the decode rate.

    With speculative decoding, they reach the gate of the decode rate.
    """
    performance.chat_rate(profile.performance.chats, profile.gate("tg32@d0"))


def test_sampled_rate(performance, tokens):
    """Measure tg32 and tg128 at temperature 1.0, alternating with greedy rounds. They have no
    gate."""
    performance.sampled_rate(tokens)


@pytest.mark.parametrize("quantile", [0.5, 0.99], ids=["p50", "p99"])
def test_time_to_first_token(performance, quantile):
    """The time from the request to the first chunk with a generated token is within its gate."""
    performance.measure("ttft", quantile=quantile)


@pytest.mark.ability("chats")
def test_time_to_first_visible_text(performance, profile):
    """Measure the time to the first text that a user sees. A reasoning model generates its
    reasoning before this text."""
    questions = [chat.question for chat in profile.correctness.chats]
    performance.visible_time(questions, profile.correctness.max_answer_tokens)


@pytest.mark.parametrize("quantile", [0.5, 0.99], ids=["p50", "p99"])
def test_time_per_token(performance, quantile):
    """The time per token of a request after its first chunk is within its gate."""
    performance.measure("tpot", quantile=quantile)


@pytest.mark.parametrize("quantile", [0.5, 0.99], ids=["p50", "p99"])
def test_gap_between_chunks(performance, quantile):
    """The median and the longest gaps between chunks are within their gates, over all gaps of all
    requests."""
    performance.measure("itl", quantile=quantile)


@pytest.mark.parametrize("quantile", [0.5, 0.99], ids=["p50", "p99"])
def test_time_to_the_end(performance, quantile):
    """The time from the request to the end of its answer is within its gate."""
    performance.measure("e2e", quantile=quantile)


def test_concurrent_rate(performance, streams):
    """The total rate of several streams, while all of them decode, reaches its gate."""
    performance.measure("streams", streams=streams)


def test_prefill_of_several(performance, streams):
    """Measure the prefill rate of concurrent requests: all prompt tokens, divided by the time until
    each request has its first token."""
    performance.measure("pp", streams=streams)


def test_time_to_first_token_of_several(performance, streams):
    """The time to the first token of concurrent requests, which wait for each other's prefill, is
    within its gate."""
    performance.measure("ttft", streams=streams)


def test_acceptance(speculation, performance, position):
    """Measure the acceptance rate of each draft position, on fixed texts."""
    performance.acceptance(speculation.drafted, position)


def test_accepted_length(speculation, performance):
    """Measure the mean number of tokens per decode step on the same texts, including the target
    model's own token."""
    performance.accepted_length(speculation.drafted)


def test_rate_holds_to_the_end(last_look):
    """Each rate that passed is measured again at the end, and must pass with the rounds of both
    measurements. If the machine slowed down, the rate is not valid.
    """
    last_look()


def test_startup_time(startup_s, performance):
    """The time from the start of the process to the first token is within its gate."""
    performance.once("startup_s", "s", startup_s)


def test_memory_peak(memory_peak_gib, performance):
    """The peak memory of all processes of the server, on host and GPU, is within its gate."""
    performance.once("memory_peak_gib", "GiB", memory_peak_gib)
