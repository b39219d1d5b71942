"""The fixed texts that the oracle scores, and the small mistakes whose effects it computes."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from sm121.core import digest
from sm121.core.data_file import DataTable

if TYPE_CHECKING:
    from sm121.oracles.gpt_oss import Layer, Weights

#: Number of tokens that the model generates after each prompt.
GENERATED = 12
#: The number of tokens of the long prompt. With the generated tokens, it exceeds YaRN's original
#: 4096 positions, and 32 blocks of 128 tokens.
LONG_PROMPT_TOKENS = 4090


class NamedPrompt(NamedTuple):
    """A fixed prompt."""

    name: str
    #: The token ids, from gpt-oss's own vocabulary.
    ids: list[int]


def prompts() -> list[NamedPrompt]:
    """Load the fixed prompts. Some are shorter and some are longer than the sliding window."""
    text = (files("sm121.fixtures") / "canary" / "prompts.json").read_text("utf-8")
    entries = json.loads(text)["prompts"]
    return [NamedPrompt(entry["name"], entry["token_ids"]) for entry in entries]


def long_prompt(tokens: int = LONG_PROMPT_TOKENS) -> NamedPrompt:
    """Return the longest fixed prompt, repeated up to a number of tokens.

    Args:
        tokens: The number of tokens of the result. The last repetition is cut.
    """
    longest = max(prompts(), key=lambda prompt: len(prompt.ids))
    repeated = longest.ids * (tokens // len(longest.ids) + 1)
    return NamedPrompt(f"{longest.name}, over and over", repeated[:tokens])


class ExamText(DataTable):
    """The section ``facts`` of an exam as one chat, with the correct answer after each question."""

    token_ids: tuple[int, ...]
    #: For each question, the index of the first token of its answer, and of the first token after
    #: the answer.
    answers: dict[str, tuple[int, int]]

    @property
    def name(self) -> str:
        """A name that contains a digest of the text."""
        return f"exam {digest.of_value([self.token_ids])[:12]}"


def exams() -> dict[str, ExamText]:
    """Load the text of each shipped exam; the keys are the exams' names."""
    text = (files("sm121.fixtures") / "answers" / "right-answers.json").read_text("utf-8")
    return {name: ExamText.model_validate(table) for name, table in json.loads(text).items()}


def with_window(weights: "Weights", shift: int) -> "Weights":
    """Return a model with another sliding window.

    Args:
        weights: The intact model.
        shift: The difference of the window in tokens.
    """
    config = dataclasses.replace(weights.config, window=weights.config.window + shift)
    return dataclasses.replace(weights, config=config)


def without_sink(weights: "Weights", layer: int, head: int) -> "Weights":
    """Return a model in which one head has no attention sink.

    Args:
        weights: The intact model.
        layer: The index of the layer.
        head: The index of the query head.
    """
    from sm121.oracles.gpt_oss import Latest

    def read(index: int) -> "Layer":
        intact = weights.layers[index]
        if index != layer:
            return intact
        sinks = intact.sinks.clone()
        sinks[head] = -math.inf
        return dataclasses.replace(intact, sinks=sinks)

    return dataclasses.replace(weights, layers=Latest(len(weights.layers), read))


class SmallMistake(NamedTuple):
    """A mistake whose effect is smaller than the tolerance of a coarse dtype."""

    #: Returns the model with the mistake.
    change: "Callable[[Weights], Weights]"
    #: The names of the prompts on which the mistake has the largest effect.
    prompts: tuple[str, ...]


#: Prompts from whose answers the rounding of each part can be determined.
ROUNDING_PROMPTS = ("tool call", "mixture of 300")
_PAST_THE_WINDOW = ("tool call", "mixture of 300", "mixture of 600")
SMALL_MISTAKES = {
    "a sliding window of 127": SmallMistake(
        functools.partial(with_window, shift=-1), _PAST_THE_WINDOW
    ),
    "a sliding window of 129": SmallMistake(
        functools.partial(with_window, shift=1), _PAST_THE_WINDOW
    ),
    "one head without its sink": SmallMistake(
        functools.partial(without_sink, layer=1, head=0),
        ("languages and code", "capitals", "prose of 127"),
    ),
}
