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


@pytest.mark.parametrize(
    ("sign", "broken", "harmless"),
    [
        *((sanity.junk, [mark * 8, f"Paris is{mark * 40}"], [mark * 7]) for mark in "!?"),
        (sanity.single_token_loop, [[1, 2, *[7] * 12]], [[1, 2, *[7] * 11]]),
        *(
            (
                sanity.cycle,
                [[900, 901, *loop * 6]],
                [[900, 901, *loop * 5], [900, 901, *loop * 6, 902]],
            )
            for loop in ([0, 1], [*range(5)], [*range(16)])
        ),
        (sanity.collapse, [[1, 2] * 20], [[1, 2] * 10, [*range(40)]]),  # twenty say nothing
        (sanity.noise, [[math.log(1e-5)] * 10], [[math.log(0.1)] * 10, [math.log(1e-5)]]),
    ],
)
def test_a_broken_text_is_seen(sign, broken, harmless):
    assert all(map(sign, broken)) and not any(map(sign, harmless))


def test_the_shipped_prompts_cross_the_window():
    found = prompts.continuations()
    lengths = [len(prompt.text) for prompt in found.prompts]
    assert min(lengths) < 30 and max(lengths) > 400
    assert len(found.sha256) == 64 and found.sha256 == prompts.continuations().sha256
    assert len(prompts.questions().questions) >= 4
