"""Stress: the server withstands what users do to it, and is the same afterwards.

Every answer is checked. Its tokens are those of the same prompt asked alone: equal where the
arithmetic promises that, else within the noise. Their number, the usage and the finish reason are
right. No request fails, the load never stalls, and the slowest request is no outlier. After each
load nothing runs, waits or holds the KV cache.
"""

from __future__ import annotations

import pytest

from sm121.stress.shapes import ARRIVALS

pytestmark = [pytest.mark.stress, pytest.mark.applies_to("cpu", "gpu")]


def test_sequential_requests(stress):
    """Requests one after the other are answered correctly."""
    stress.sequential()


def test_concurrent_requests(stress):
    """Requests at the same time are answered correctly."""
    stress.concurrent()


@pytest.mark.parametrize("times", [2, 10])
def test_crowd(stress, times):
    """With two and ten times as many requests at once as the server runs, of all kinds that users
    send, each answer is its own."""
    stress.crowd(times)


def test_sustained_load(stress):
    """Hundreds of requests, several at a time, are answered correctly."""
    stress.sustained()


def test_memory_does_not_grow(stress):
    """Memory and open handles do not grow with the requests, by a robust slope and its interval."""
    stress.afterwards.check_memory()


def test_long_generation(stress):
    """One answer of more than a thousand tokens is right, to its end."""
    stress.long_generation()


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_mixed_lengths(stress, arrival):
    """Prompts and answers of all lengths are right: in a closed loop, at random moments, in
    bursts."""
    stress.arriving(arrival)


def test_short_prompts_join_those_that_decode(stress):
    """A short prompt that joins n requests which decode is answered correctly, and so are they: for
    each n that the server runs, again and again. Its own counters show each number of them."""
    stress.joining()


def test_unruly_clients(stress):
    """Clients that cancel, disconnect or read slowly, and refused requests, do not affect the
    others."""
    stress.unruly()


def test_context_to_the_brim(stress):
    """Prompt and answer can fill the context to its last token. A longer prompt is refused."""
    stress.brim()


def test_preemption_under_kv_pressure(stress):
    """With more requests than the KV cache holds, some are preempted and have the same answers."""
    stress.pressed()


def test_nothing_is_kept_after_the_load(stress):
    """After the load there is no running or waiting request, no used KV block and no zombie."""
    stress.afterwards.check_idle()


@pytest.mark.asked_for("--soak")
@pytest.mark.timeout(0)
def test_soak(stress, soak_s):
    """With --soak DURATION, mixed load for hours passes the same checks."""
    stress.soak(soak_s)


def test_throughput_is_what_it_was_before(stress):
    """The server is as fast after the load as before it."""
    stress.afterwards.check_throughput()


def test_restart_under_load(stress):
    """A server that is stopped under load leaves nothing behind. Started again, it answers as
    before."""
    stress.restarted_under_load()
