"""Every trap that fools a client that people trust, and what the suite says of it.

The sample of `make test` runs the cell of some; ``--slow`` (`make catalogues`) runs all traps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from timed_server import TRAPS

from sm121.core.profile import Measuring
from sm121.core.server import Endpoint
from sm121.measure.cells import MeasuredCell, MeasuredServer
from sm121.measure.plan import Plan

#: Half of the real lengths, so that a sample of the traps fits into `make test`.
PLAN = Plan(
    512,
    (16, 64),
    (0,),
    Measuring(rounds=5, short_rounds=2, silent_within_s=2.0, request_within_s=20.0),
)


@dataclass(frozen=True)
class Expected:
    """What is required of a trap: reasons against the number, or the right number."""

    rate: float | None
    invalid: tuple[str, ...] = ()
    clock: str | None = "token_ids"
    unproven: tuple[str, ...] = ()
    rounds: int = 5


RIGHT = Expected(100.0)
EXPECTED = {
    "none": RIGHT,
    "three-tokens-a-chunk": RIGHT,
    "first-chunk-of-8": RIGHT,
    "early-role": RIGHT,
    "three-content-free": RIGHT,
    "three-content-free-hidden-ids": Expected(100.0, clock="usage"),
    "no-ids": Expected(100.0, clock="usage"),
    "no-ids-no-continuous": Expected(100.0, clock="usage"),
    "no-ids-bundled": Expected(None, ("chunk_clock",), "chunks"),
    "no-usage": Expected(100.0, unproven=("tokens against usage",)),
    "no-ids-no-usage": Expected(
        100.0, clock="chunks", unproven=("tokens: neither ids nor usage", "other clients")
    ),
    "lying-usage": Expected(None, ("token_accounting",)),
    "lying-usage-no-ids": Expected(
        None, ("token_accounting", "token_counters", "second_clock"), "usage"
    ),
    "empty-finish": RIGHT,
    "bursts": RIGHT,
    "all-at-the-end": Expected(None, ("second_clock",)),
    "slow-start": RIGHT,
    "one-in-100-slow": RIGHT,
    "short-answers": Expected(None, ("short_answer",)),
    "prefix-cache": Expected(None, ("prefix_cache_hit",)),
    "second-tenant": Expected(None, ("other_clients",)),
    "clock-step": RIGHT,
    "stalled": Expected(None, ("request_failed",)),
    "failing": Expected(None, ("request_failed",)),
    "drift": Expected(None, ("drift",), rounds=9),
    "no-metrics": Expected(100.0, unproven=("prefix-cache hits", "other clients")),
    "text-only": RIGHT,
    "text-only-no-tokenize": Expected(100.0, unproven=("prompt length",)),
    "preempting": Expected(None, ("preemption",)),
    "speculative": RIGHT,
    "counters-disagree": Expected(None, ("token_counters",)),
}
#: One of each kind: how tokens are counted, how they come, what the counters say.
SAMPLE = (
    "none",
    "first-chunk-of-8",
    "three-content-free-hidden-ids",
    "no-ids-bundled",
    "lying-usage",
    "all-at-the-end",
    "short-answers",
    "prefix-cache",
    "second-tenant",
    "stalled",
    "drift",
    "text-only",
)


def measure(url: str, directory: Path, *, rounds: int = 5, plan: Plan = PLAN) -> MeasuredCell:
    endpoint = Endpoint(url, "none", "gpt-oss-120b")
    with MeasuredServer.open(endpoint, plan, directory) as server:
        return MeasuredCell(server, 0).gather(rounds)


def _cases() -> list:
    slow = pytest.mark.slow("the rest of the catalogue")
    return [name if name in SAMPLE else pytest.param(name, marks=slow) for name in TRAPS]


def test_every_trap_has_an_expectation():
    assert set(EXPECTED) == set(TRAPS)


@pytest.mark.parametrize("name", _cases())
def test_trap(timed_server, tmp_path, name):
    """The right number, or the reason why there is none; what cannot be checked is said."""
    expected = EXPECTED[name]
    options = ["--drift-after-s", "3"] if name == "drift" else []
    server = timed_server("--rate", "100", "--trap", name, *options)
    cell = measure(server.base_url, tmp_path, rounds=expected.rounds)
    found = cell.decode(PLAN.longest)
    assert tuple(sorted({item.reason for item in found.invalid})) == tuple(
        sorted(expected.invalid)
    ), [str(item) for item in found.invalid]
    assert found.clock == expected.clock
    for text in expected.unproven:
        assert any(line.startswith(text) for line in found.unproven), found.unproven
    if expected.rate is not None:
        assert len(found.samples) >= expected.rounds
        for rate in found.samples:
            assert rate == pytest.approx(expected.rate, rel=0.02), found.samples


def test_the_first_token_is_what_ttft_waits_for(timed_server, tmp_path):
    """An early event without a token is not the first token."""
    server = timed_server("--rate", "100", "--trap", "early-role", "--fixed-ms", "150")
    cell = measure(server.base_url, tmp_path)
    (first, *_) = cell.times("ttft", 0.5).samples
    assert 201 <= first <= 210, "150 ms and 512 tokens at 10,000 a second are 201.2 ms"


def test_failed_requests_are_infinite_times(timed_server, tmp_path):
    """One of four fails: it is in the tail, and no rate of the others is believed."""
    server = timed_server("--rate", "200", "--trap", "failing")
    cell = measure(server.base_url, tmp_path)
    times = cell.times("e2e", 0.99)
    assert times.valid
    assert float("inf") in times.samples


def test_speculation_is_read_from_the_counters(timed_server, tmp_path):
    server = timed_server("--rate", "100", "--trap", "speculative")
    extra = measure(server.base_url, tmp_path).decode(64).extra
    assert extra["mean_accepted_length"] == pytest.approx(3.0, rel=0.05)
    assert extra["acceptance_rate"] == pytest.approx(0.5, rel=0.05)
