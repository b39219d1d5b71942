"""Stress: the server stands what users do to it, and is afterwards as it was before.

Every answer is checked: its tokens are those that the prompt has when it is asked alone (equal
where the arithmetic promises that, else within the noise), as many as were asked for, with the
right usage and finish reason. No request fails, progress is made at all times, the slowest is no
outlier, and after each load nothing runs, waits or holds the KV cache.
"""

from __future__ import annotations

import pytest

from sm121.stress.shapes import ARRIVALS

pytestmark = [pytest.mark.stress, pytest.mark.applies_to("cpu", "gpu")]


def test_sequential_requests(stress):
    """One after the other."""
    stress.sequential()


def test_concurrent_requests(stress):
    """All at the same time."""
    stress.concurrent()


def test_sustained_load(stress):
    """Hundreds of requests, several at a time."""
    stress.sustained()


def test_memory_does_not_grow(stress):
    """Neither memory nor open handles grow with the requests: a robust slope, with its interval."""
    stress.memory_holds()


def test_long_generation(stress):
    """One answer of more than a thousand tokens."""
    stress.long_generation()


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_mixed_lengths(stress, arrival):
    """Prompts and answers of all lengths, in a closed loop, at random moments, and in bursts."""
    stress.arriving(arrival)


def test_unruly_clients(stress):
    """Clients that cancel, disconnect or read slowly, and requests that must be refused, do nothing
    to the others."""
    stress.unruly()


def test_context_to_the_brim(stress):
    """Prompt and answer fill the context to its last token; a longer prompt is refused."""
    stress.brim()


def test_preemption_under_kv_pressure(stress):
    """More requests than the KV cache holds: some are preempted, and their answers are the same."""
    stress.pressed()


def test_nothing_is_kept_after_the_load(stress):
    """No running or waiting request, no KV block, no zombie."""
    stress.nothing_kept()


@pytest.mark.asked_for("--soak")
@pytest.mark.timeout(0)
def test_soak(stress, soak_s):
    """--soak DURATION: mixed load for hours, with the same checks."""
    stress.soak(soak_s)


def test_throughput_is_what_it_was_before(stress):
    """A server that has stood a load is as fast as before it."""
    stress.throughput_holds()


def test_restart_under_load(stress):
    """Stopped in the middle of a load, nothing is left; started again, it answers as before."""
    stress.restarted_under_load()
