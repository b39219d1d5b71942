"""The detectors see broken texts, and leave good ones alone."""

import math

import pytest
from data_rows import table

from sm121.answers import prompts, sanity

GOOD = table(__name__, "GOOD")


@pytest.mark.parametrize("text", GOOD)
def test_good_texts_trip_nothing(text):
    assert sanity.signs(text) == []
    assert sanity.signs(text, list(text.split()), [-0.1] * len(text.split())) == []


def test_counting_by_tokens_trips_nothing():
    """A comma, a space and a number, a hundred times: the same two tokens in every third place."""
    tokens = [token for n in range(100) for token in (",", " ", n)]
    assert sanity.signs("", tokens, [-1e-4] * len(tokens)) == []


@pytest.mark.parametrize("mark", ["!", "?"])
def test_junk_is_seen(mark):
    assert sanity.junk(mark * 8) and sanity.junk(f"Paris is{mark * 40}")
    assert not sanity.junk(mark * 7)


def test_a_loop_of_one_token_is_seen():
    assert sanity.single_token_loop([1, 2, *[7] * 12])
    assert not sanity.single_token_loop([1, 2, *[7] * 11])


@pytest.mark.parametrize("period", [2, 5, 16])
def test_a_cycle_is_seen(period):
    start, loop = [900, 901], list(range(period))
    assert sanity.cycle(start + loop * 6)
    assert not sanity.cycle(start + loop * 5)
    assert not sanity.cycle(start + loop * 6 + [902])


def test_a_collapse_is_seen():
    assert sanity.collapse([1, 2] * 20)
    assert not sanity.collapse([1, 2] * 10)  # too short to say
    assert not sanity.collapse(list(range(40)))


def test_noise_is_seen():
    assert sanity.noise([math.log(1e-5)] * 10)
    assert not sanity.noise([math.log(0.1)] * 10)
    assert not sanity.noise([math.log(1e-5)])


def test_the_shipped_prompts_cross_the_window():
    found = prompts.continuations()
    lengths = [len(prompt.text) for prompt in found.prompts]
    assert min(lengths) < 30 and max(lengths) > 400
    assert len(found.sha256) == 64 and found.sha256 == prompts.continuations().sha256
    assert len(prompts.questions().questions) >= 4
