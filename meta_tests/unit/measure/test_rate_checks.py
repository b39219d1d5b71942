"""Checks that compare the first tokens of an answer with the later ones."""

import json

import numpy as np
import pytest

from sm121.client.timed_answer import TimedAnswer, read_answer
from sm121.measure import rate_checks, timing
from sm121.measure.validity import Findings


def answer(first_ms: float, *, varies_ms: float = 1.5) -> TimedAnswer:
    """Return 128 tokens: 31 gaps of `first_ms`, then gaps of 10 ms; gaps vary by `varies_ms`."""
    gaps = [first_ms] * 31 + [10.0] * 96
    stamps = np.cumsum([100.0, *(gap + varies_ms * (-1) ** i for i, gap in enumerate(gaps))])
    events = []
    for token, at_ms in enumerate(stamps):
        choice = {"index": 0, "text": "a", "token_ids": [token], "finish_reason": None}
        usage = {"prompt_tokens": 4, "completion_tokens": token + 1}
        data = json.dumps({"choices": [choice], "usage": usage})
        events.append((int(at_ms * 1e6), f"data: {data}\n\n".encode()))
    made = TimedAnswer(0, status=200, asked_tokens=128, asked_prompt=4)
    read_answer(made, events)
    return made


@pytest.mark.parametrize("first_ms", [10.0, 9.9, 9.5, 12.0])
def test_the_first_tokens_may_not_be_faster_than_those_after_them(first_ms):
    """The first tokens must not be faster than the later ones if gaps vary so much that no start is
    certainly late.

    Otherwise, the measured time begins later."""
    findings = Findings()
    rate_checks.check_beginning([answer(first_ms)] * 5, "token_ids", 32, 0.02, findings)
    contradicts = ["rates_contradict"] * (first_ms == 9.5)
    assert [item.reason for item in findings.invalid] == contradicts
    if contradicts:
        rate = timing.decode_rate(answer(first_ms, varies_ms=0.0), "token_ids", 32)
        assert rate == pytest.approx(100, rel=0.001)


def test_noisy_rounds_that_hide_faster_first_tokens_are_named():
    """If only the noise of the rounds allows faster first tokens, the check is not possible."""
    noisy = [answer(first_ms) for first_ms in (8.8, 9.0, 9.3, 9.8, 10.3)]
    rate_checks.check_beginning(noisy, "token_ids", 32, 0.02, findings := Findings())
    assert not findings.invalid
    assert len(findings.unproven) == 1
    assert "the rounds differ too much" in findings.unproven[0]
