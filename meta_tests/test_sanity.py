"""The detectors see broken texts, and leave good ones alone."""

import pytest
from data_rows import from_data, table

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


@from_data
def test_a_broken_text_is_seen(sign, broken, harmless):
    assert all(map(sign, broken)) and not any(map(sign, harmless))


def test_the_shipped_prompts_cross_the_window():
    texts = prompts.continuations()
    lengths = [len(prompt.text) for prompt in texts.prompts]
    assert min(lengths) < 30 and max(lengths) > 400
    assert len(texts.sha256) == 64 and texts.sha256 == prompts.continuations().sha256
    assert len(prompts.questions().questions) >= 4
