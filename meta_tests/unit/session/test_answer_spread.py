"""`sm121 init-profile` computes the golden bound of a profile from answers alone and in a batch."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from sm121.answers.prompts import PromptSet
from sm121.client.completion_json import Position
from sm121.core.level_settings import GoldenBound
from sm121.session.answer_spread import bound_of, measure

PROMPTS = PromptSet(
    schema_version=1,
    name="two",
    prompts=[{"name": "one", "text": "a", "tokens": 4}, {"name": "two", "text": "b", "tokens": 4}],
)
#: The tolerance of the GB10's profile.
BASE = GoldenBound(
    max_abs=2.0, mean_abs=0.5, fork=0.75, mean_divergence=0.02, top1_at_least=0.9, source="GB10"
)
DAY = "2026-11-30"


def spread_of(error: float, *, other_tokens: bool = False) -> Any:
    """Measure a server whose answers in a batch differ from those alone by an error in nats."""
    calls = itertools.count()

    def ask(request: Any) -> Any:
        in_batch = next(calls) >= len(PROMPTS.prompts)
        log = math.log(0.6) + (error if in_batch else 0.0)
        token = "token_id:9" if in_batch and other_tokens else "token_id:1"
        return [Position(token, log, {token: log, "token_id:2": math.log(0.2)})] * request.tokens

    asker: Any = SimpleNamespace(ask=ask, positions=list)
    return measure(asker, PROMPTS, BASE.fork)


def test_the_bound_is_a_multiple_of_the_measured_spread():
    spread = spread_of(0.04)
    bound = bound_of(spread, BASE, DAY)
    assert bound is not None and bound.max_abs == bound.mean_abs == 0.1
    assert bound.mean_divergence == pytest.approx(6.25 * spread.mean_divergence, rel=0.05)
    assert (bound.fork, bound.top1_at_least) == (BASE.fork, BASE.top1_at_least)
    assert f"measured on {DAY}: 0.04 nats" in bound.source


@pytest.mark.parametrize(
    ("times", "passes"),
    [
        pytest.param(1.6, True, id="another kernel of the same precision"),
        pytest.param(3.4, False, id="a projection scaled by a tenth"),
    ],
)
def test_a_fault_is_apart_from_another_kernel(times, passes):
    bound = bound_of(spread_of(0.04), BASE, DAY)
    assert bound is not None
    assert (spread_of(0.04 * times).beyond(bound) == []) == passes


def test_the_bound_is_between_those_of_float32_and_of_the_shipped_profile():
    exact = bound_of(spread_of(1e-5), BASE, DAY)
    coarse = bound_of(spread_of(-1.5), BASE, DAY)
    assert exact is not None and coarse is not None
    assert (exact.max_abs, exact.mean_abs, exact.mean_divergence) == (1e-3, 1e-4, 1e-5)
    assert (coarse.max_abs, coarse.mean_abs) == (2.0, 0.5)


def test_equal_answers_and_other_answers_show_no_noise():
    for spread in (spread_of(0.0), spread_of(0.01, other_tokens=True)):
        assert bound_of(spread, BASE, DAY) is None
