"""Texts have the requested number of tokens by the /tokenize of each engine, and new beginnings."""

import itertools
import random

import pytest

from sm121.core.server import NO_KEY, Endpoint
from sm121.measure.prompts import Prompts


@pytest.mark.parametrize("field", ["prompt", "content"], ids=["vllm", "llama-server"])
def test_a_text_has_the_requested_length(timed_server, field):
    """A text has exactly 64 tokens, whichever field of /tokenize the server reads."""
    prompts = _prompts(timed_server("--text-field", field))
    assert prompts.can_tokenize()
    assert len(prompts.make(64).split()) == 64


def test_a_text_gets_its_length_although_its_tokens_change(timed_server, monkeypatch):
    """The tokens of a shortened text often differ from the tokens that were kept."""
    prompts = _prompts(timed_server())
    calls = itertools.count()
    tokenize = Prompts._tokenize

    def unstable(self, http, text):
        ids = tokenize(self, http, text)
        return [*ids, ids[-1]] if next(calls) < 10 else ids

    monkeypatch.setattr(Prompts, "_tokenize", unstable)
    assert len(prompts.make(64).split()) == 64


def test_no_text_begins_with_the_tokens_of_an_earlier_one(timed_server):
    """A small vocabulary needs four tokens for one word, and the words are few."""
    prompts = _prompts(timed_server())
    prompts._words = ["one", "two"]
    prompts._random = random.Random(1)
    beginnings = {tuple(prompts.make(64).split()[:4]) for _ in range(10)}
    assert len(beginnings) == 10


def _prompts(server):
    return Prompts(Endpoint(server.base_url, NO_KEY, "gpt-oss-120b"), 100, as_text=True)
