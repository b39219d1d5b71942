"""Reasons why a number is invalid, and missing data of a server, with the text of each check."""

import dataclasses

import pytest

from meta_tests.unit.client.test_timed_answer import answer, event, of_ids, reasons
from sm121.client.timed_answer import TimedAnswer
from sm121.measure import counters, rate_checks, validity
from sm121.measure.validity import Findings


def bunched_at_start(count: int) -> TimedAnswer:
    """Return an answer of 32 tokens, of which this many arrive together with the first one."""
    made = of_ids(32)
    at_ns = made.chunks[count - 1].at_ns
    bunch = [dataclasses.replace(chunk, at_ns=at_ns) for chunk in made.chunks[:count]]
    made.chunks = [*bunch, *made.chunks[count:]]
    return made


@pytest.mark.parametrize(
    ("bunched", "reason"),
    [
        pytest.param(0, None, id="none"),
        pytest.param(2, None, id="a quarter of the rounds"),
        pytest.param(3, "bunched_start", id="more than a quarter of the rounds"),
    ],
)
def test_a_bunch_that_leaves_too_few_tokens_for_a_rate(bunched, reason):
    answers = [bunched_at_start(28)] * bunched + [of_ids(32)] * (8 - bunched)
    found = reasons(rate_checks.check_start, answers, "token_ids", 32)
    assert found == [reason] * bool(reason)


def test_a_prompt_of_another_length_than_was_sent():
    """A prompt whose length differs from the sent one is detected.

    The usage of a timed answer shows it, and so do the ids of the untimed repetition."""
    longer = dataclasses.replace(of_ids(8), prompt_tokens=5)
    assert reasons(validity.check_answers, [longer], "token_ids") == ["prompt_length"]
    twin = dataclasses.replace(of_ids(8), prompt_tokens=4, prompt_ids=3)
    assert reasons(validity.check_twin, twin) == ["prompt_length"]


@pytest.mark.parametrize(
    ("after", "no_number", "vanished"),
    [
        pytest.param({"generated": 9.0, "running": 0.0}, (), False, id="all are there"),
        pytest.param({"generated": 9.0}, (), True, id="one is not"),
        pytest.param({"generated": 9.0}, ("running",), False, id="one has no number"),
        pytest.param(None, (), True, id="no metrics"),
    ],
)
def test_a_counter_that_vanishes(after, no_number, vanished):
    before = counters.Counters({"generated": 2.0, "running": 0.0})
    if after is not None:
        after = counters.Counters(after, no_number=frozenset(no_number))
    found = reasons(validity.check_metrics_stay, before, after)
    assert found == ["counters_vanished"] * vanished
    assert reasons(validity.check_metrics_stay, None, after) == []


def unproven(check, *arguments) -> list[str]:
    """Return what a check reports as unproven; it must not make the number INVALID."""
    check(*arguments, findings=(findings := Findings()))
    assert not findings.invalid, findings.invalid
    return findings.unproven


def test_checks_without_data_from_the_server_are_unproven():
    whole = of_ids(8)
    silent = answer(*(event(ids=[i]) for i in range(8)))
    (line,) = unproven(validity.check_answers, [silent], "token_ids")
    assert line.startswith("comparison of the number of tokens with usage")
    chunks = answer(*(event() for _ in range(8)))
    lines = unproven(validity.check_answers, [chunks], "chunks")
    assert [line.partition(":")[0] for line in lines] == [
        "comparison of the number of tokens with usage",
        "number of tokens in each chunk",
    ]
    (line,) = unproven(rate_checks.check_server_clock, {}, [whole], "token_ids", 0.02)
    assert line.startswith("the server's own decode time")
    lines = unproven(validity.check_counters, None, [whole], "token_ids")
    checks = ["other clients", "prefix-cache hits", "preemptions", "tokens by counters"]
    assert [line.partition(":")[0] for line in lines] == checks
    lines = unproven(validity.check_counters, {}, [whole], "token_ids")
    assert sorted(line.partition(":")[0] for line in lines) == sorted(checks)
    joined = answer(*(event(ids=[i, i], counted=2 * i + 2) for i in range(4)))
    (line,) = unproven(validity.check_drafts, None, [joined], "token_ids")
    assert line.startswith("speculation: several tokens arrive at once")
    (line,) = unproven(validity.check_chat, whole, None, None)
    assert line.startswith("tokens of a chat by counters")
