"""The seed and the temperature of chats, without an engine."""

import math
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from openai.types.chat import ChatCompletion

from sm121.api import sampling
from sm121.core import profile
from sm121.core.unmet import Unmet
from sm121.core.verdict import NotRun

#: The share of chats without a text if a server samples at temperature 2.
EMPTY = 0.5
CORRECTNESS = profile.load("cpu-tiny-gpt-oss").correctness


class Chats:
    """A server of chats whose texts come from a random number generator with the request's seed."""

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


class Forms:
    """A server that gives one text with a given probability, and many others, in the form of
    `Api`."""

    def __init__(self, likelihood: float, *, ignores_temperature: bool) -> None:
        self.likelihood = likelihood
        self.ignores_temperature = ignores_temperature
        self.random = random.Random(1)
        self.capabilities = SimpleNamespace(can=lambda _name: True)

    def text(self, temperature: float, top_p: float = 1.0) -> str:
        cold = temperature == 0 or top_p < 0.1 or self.ignores_temperature
        if cold or self.random.random() < self.likelihood:
            return "The user asks."
        return f"other {self.random.random()}"

    def send_chat(self, _messages, *, max_tokens: int, temperature: float, logprobs: bool):
        assert logprobs and temperature == 1.0 and max_tokens
        text = self.text(temperature)
        entry = {"token": text, "logprob": math.log(self.likelihood), "top_logprobs": []}
        choice = {"message": {"content": text}, "logprobs": {"content": [entry]}}
        return {"choices": [choice]}

    def send_response(self, _content, *, max_output_tokens: int, **options: float):
        assert max_output_tokens
        content = [{"type": "output_text", "text": self.text(**options)}]
        return {"output": [{"type": "message", "content": content}], "status": "completed"}


@pytest.mark.parametrize("ignores_temperature", [False, True])
def test_equal_answers_of_a_near_certain_text_show_nothing(ignores_temperature):
    """If a text is almost certain, equal answers show nothing.

    A thinking model always begins in the same way."""
    api = Forms(0.9999, ignores_temperature=ignores_temperature)
    with pytest.raises(NotRun, match="with probability 1"):
        sampling.form_obeys_temperature_and_top_p(api, "response")


@pytest.mark.parametrize("likelihood", [0.01, 0.5, 0.8])
def test_equal_answers_of_a_text_that_is_not_certain_are_wrong(likelihood):
    sampling.form_obeys_temperature_and_top_p(
        Forms(likelihood, ignores_temperature=False), "response"
    )
    with pytest.raises(Unmet, match="different texts at temperature 1"):
        sampling.form_obeys_temperature_and_top_p(
            Forms(likelihood, ignores_temperature=True), "response"
        )


@pytest.mark.parametrize("sent", [None, 0.0, -9999.0], ids=["null", "after-sampling", "clamped"])
def test_a_server_without_usable_log_probabilities_has_no_excuse(sent):
    """Log-probabilities that are 0 for each token do not excuse equal answers of a server.

    Some engines report log-probabilities after sampling.
    """
    api = Forms(0.5, ignores_temperature=True)
    send = api.send_chat

    def send_chat(*arguments, **options):
        answer = send(*arguments, **options)
        answer["choices"][0]["logprobs"]["content"][0]["logprob"] = sent
        return answer

    api.send_chat = send_chat
    with pytest.raises(Unmet, match="different texts at temperature 1"):
        sampling.form_obeys_temperature_and_top_p(api, "response")
