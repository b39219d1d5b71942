"""Stress: the server withstands the load of its users, and works as before afterwards.

The suite compares each answer with the answer to the same prompt sent alone: the tokens are equal
if the arithmetic guarantees equal tokens; otherwise the log-probabilities agree within the noise.
The number of tokens, the usage and the finish reason are right. No request fails, the load never
stalls, and the slowest request is not far slower than the others. After each load, no request runs
or waits, and no KV block is used.
"""

from __future__ import annotations

import pytest

from sm121.stress.shapes import ARRIVALS

pytestmark = [pytest.mark.stress, pytest.mark.applies_to("cpu", "gpu")]


def test_sequential_requests(stress):
    """Requests that are sent one after the other are answered correctly."""
    stress.sequential()


def test_concurrent_requests(stress):
    """Concurrent requests are answered correctly."""
    stress.concurrent()


@pytest.mark.parametrize("times", [2, 10])
def test_crowd(stress, times):
    """With two and ten times as many requests of all kinds as the server runs at once, each request
    gets its own answer."""
    stress.crowd(times)


def test_sustained_load(stress):
    """Hundreds of requests, of which several run at the same time, are answered correctly."""
    stress.sustained()


def test_memory_does_not_grow(stress):
    """Memory and open handles do not grow with the number of requests. The test computes a robust
    slope and its interval."""
    stress.afterwards.check_memory()


def test_long_generation(stress):
    """An answer of more than a thousand tokens is right to its end."""
    stress.long_generation()


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_mixed_lengths(stress, arrival):
    """Prompts and answers of all lengths are right: in a closed loop, at random times, and in
    bursts."""
    stress.arriving(arrival)


def test_short_prompts_join_those_that_decode(stress):
    """If a short prompt arrives while n requests decode, the server answers the prompt and the n
    requests correctly, for each n up to the server's limit. The server's counters show that each n
    occurred."""
    stress.joining()


def test_unruly_clients(stress):
    """Clients that cancel, disconnect or read slowly, and refused requests, do not affect other
    requests."""
    stress.unruly()


def test_context_to_the_brim(stress):
    """Prompt and answer can fill the context to its last token. A longer prompt is refused."""
    stress.brim()


def test_preemption_under_kv_pressure(stress):
    """If the requests need more KV cache than exists, the server preempts some of them, and all
    answers are the same as without preemption.
    """
    stress.pressed()


def test_nothing_is_kept_after_the_load(stress):
    """After the load there is no running or waiting request, no used KV block and no zombie
    process."""
    stress.afterwards.check_idle()


@pytest.mark.asked_for("--soak")
@pytest.mark.timeout(0)
def test_soak(stress, soak_s):
    """With --soak DURATION, a mixed load of this duration passes the same checks as the other
    loads."""
    stress.soak(soak_s)


def test_throughput_is_what_it_was_before(stress):
    """The server is as fast after the loads as before them."""
    stress.afterwards.check_throughput()


def test_restart_under_load(stress):
    """A server that is stopped under load leaves nothing behind. After its next start, it gives the
    same answers."""
    stress.restarted_under_load()
