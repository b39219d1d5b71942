"""The seed and the temperature of chats, without an engine."""

import random
from collections.abc import Callable

import pytest
from openai.types.chat import ChatCompletion

from sm121.api import sampling
from sm121.core import profile
from sm121.core.unmet import Unmet

#: The number of chats without a text, of a server that samples at temperature 2.
EMPTY = 0.5
CORRECTNESS = profile.load("cpu-tiny-gpt-oss").correctness


class Chats:
    """A server of chats: a random number generator with the seed gives their texts."""

    def __init__(self, generator: Callable[[int], random.Random]) -> None:
        self.generator = generator

    def chat(self, _question: str, _max_tokens: int, *, temperature: float, seed: int):
        assert temperature == 2.0
        generator = self.generator(seed)
        text = "" if generator.random() < EMPTY else f"word {generator.randrange(10**9)}"
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "length", "message": message}
        fields = {"id": "a", "created": 1, "model": "m", "object": "chat.completion"}
        return ChatCompletion.model_validate({"choices": [choice], **fields})


def judge(chats: Chats) -> None:
    sampling.chat_obeys_temperature_and_seed(chats, CORRECTNESS, attempts=3)


@pytest.mark.parametrize("run", range(50))
def test_a_seed_that_is_ignored_is_noticed_though_half_of_the_chats_are_empty(run):
    one = random.Random(run)
    with pytest.raises(Unmet):
        judge(Chats(lambda _seed: one))


def test_a_seed_that_gives_its_text_again_is_right():
    judge(Chats(random.Random))


def test_a_temperature_that_is_ignored_is_noticed():
    with pytest.raises(Unmet, match="different texts for different seeds at temperature 2"):
        judge(Chats(lambda _seed: random.Random(1)))


def test_a_seed_that_gives_its_text_in_the_third_attempt_is_right():
    asked = []

    def generator(seed: int) -> random.Random:
        asked.append(seed)
        return random.Random(seed if len(asked) in (*range(7), 9) else 100 + len(asked))

    judge(Chats(generator))
    assert len(asked) == 9
