"""Request sampled completions, and choose the texts and parameter values of the checks."""

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sm121.answers import expected_samples
from sm121.answers.expected_samples import Top
from sm121.api.client import Api, Json
from sm121.client import completion_json
from sm121.client.completion_json import Position, name_of, parse
from sm121.core.unmet import Fact, Unmet, require, require_none
from sm121.core.verdict import NotRun
from sm121.engines.capabilities import Name

#: Texts with many plausible continuations, for small and large models.
TEXTS = (
    "The capital",
    "The capital of France is Paris. The",
    "1 + 1 = 2. The capital",
    "In the",
    "What is",
    "The",
    "She said that",
    "1, 2, 3, 4, 5,",
    "The weather in",
    "I",
    "Q:",
    "and",
    "A",
)
#: Maximum number of samples in a comparison.
MOST = 4096
#: Maximum number of texts in a request.
BATCH = 32
#: The number of samples in a comparison if the result is nearly deterministic.
FEW = 8
#: A temperature so low that a small difference of logits decides.
COLD = 0.01
#: A bias that forces a token.
FORCED = 100.0
#: A bias that, given to two tokens, excludes all other tokens.
HIGH = 90.0
LOW = 50.0


class Range(NamedTuple):
    """The values of a parameter that may be checked with samples."""

    middle: float
    #: The bounds of the value that each run draws.
    low: float
    high: float


RANGES = {
    "temperature": Range(0.8, 0.7, 1.4),
    "presence_penalty": Range(1.2, 0.9, 1.9),
    "frequency_penalty": Range(1.2, 0.9, 1.9),
    "repetition_penalty": Range(1.3, 1.2, 1.5),
}
#: Parameters that are sent with a neutral value, so that the model's default settings have no
#: effect. The values are the capability that the parameter needs, and the neutral value.
NEUTRAL: dict[str, tuple[Name, float]] = {
    "top_k": ("top_k", -1),
    "repetition_penalty": ("repetition_penalty", 1.0),
    "min_p": ("min_p", 0.0),
    "return_tokens_as_token_ids": ("logprob_ids", True),
    "ignore_eos": ("ignore_eos", True),
}
#: The tokens of each sample.
Samples = list[tuple[Position, ...]]


class ParameterValue(NamedTuple):
    """A value of a parameter that is checked with samples."""

    #: Whether the value is in the ``middle`` of its bounds, or was ``drawn`` at random.
    kind: str
    value: float


@dataclass
class SampleSource:
    """Requests samples from one server.

    Args:
        api: The API of the server.
        seed: The seed of the drawn values.
    """

    api: Api
    seed: int
    #: Whether the greedy samples of `tops` had all requested log-probabilities.
    _greedy_were_whole: bool = field(default=False, init=False)

    @functools.cached_property
    def tops(self) -> dict[str, Top]:
        """The likeliest tokens after each of `TEXTS`, with their log-probabilities."""
        samples = self.ask(list(TEXTS), {"temperature": 0.0})
        self._greedy_were_whole = True
        return {text: position.top for text, (position,) in zip(TEXTS, samples, strict=True)}

    @functools.cached_property
    def prompts(self) -> dict[str, set[str]]:
        """The names of the tokens of each of `TEXTS`."""
        answer = self.api.complete(list(TEXTS), max_tokens=1, return_token_ids=True)
        prompts = {}
        for choice in answer["choices"]:
            prompts[TEXTS[choice["index"]]] = set(map(name_of, choice["prompt_token_ids"]))
        return prompts

    def values(self, name: str) -> list[ParameterValue]:
        """Return the middle value and the drawn value of a parameter.

        Args:
            name: A parameter of `RANGES`. The second value is drawn from its range with the seed.
        """
        bounds = RANGES[name]
        drawn = random.Random(f"{self.seed} {name}").uniform(bounds.low, bounds.high)
        return [ParameterValue("middle", bounds.middle), ParameterValue("drawn", round(drawn, 3))]

    def ask(self, texts: Sequence[str], options: Json) -> Samples:
        """Send the texts, and return one sample per text.

        Args:
            texts: The prompts.
            options: Fields of the body, as in `body`.

        Raises:
            Unmet: Log-probabilities or alternatives are missing.
            NotRun: The engine lacks a capability, or sends no log-probabilities at all.
        """
        body = self.body(options)
        samples: Samples = []
        for start in range(0, len(texts), BATCH):
            answer = self.api.complete(list(texts[start : start + BATCH]), **body)
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
                samples.append(self.sample(parse({"choices": [choice]}).positions or ()))
        missing = sum(len(sample) != body["max_tokens"] for sample in samples)
        if missing:
            observed = f"{missing} of {len(samples)} lack them"
            fact = Fact("log-probabilities with each sample", observed)
            if self._greedy_were_whole:
                raise Unmet(fact)
            raise NotRun(fact)
        positions = itertools.chain.from_iterable(samples)
        bare = sum(not position.top for position in positions)
        require(not bare, "alternatives listed with each token", f"{bare} tokens have none")
        return samples

    def body(self, options: Json) -> Json:
        """Return the body of a request without its prompt.

        Args:
            options: Fields of the body. The keys of ``logit_bias`` are names of tokens.

        Raises:
            NotRun: The engine sends no log-probabilities, or accepts no lists of prompts.
        """
        capabilities = self.api.capabilities
        capabilities.require("logprobs", "prompt_lists")
        body: Json = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 1, "logprobs": self._listed}
        for option, (name, value) in NEUTRAL.items():
            if capabilities.can(name):
                body[option] = value
        body |= options
        if body.get("logit_bias"):
            biases = body["logit_bias"].items()
            body["logit_bias"] = {str(id_of(token)): bias for token, bias in biases}
        return body

    def sample(self, positions: tuple[Position, ...]) -> tuple[Position, ...]:
        """Remove tokens that an engine lists only because they were drawn.

        Engines list the drawn token in addition to the likeliest ones. Without it, the list is the
        same in all samples.

        Args:
            positions: The tokens of a sample.
        """
        cleaned = []
        for position in positions:
            top = position.top
            if len(top) > self._listed:
                top = {token: log for token, log in top.items() if token != position.token}
            cleaned.append(replace(position, top=top))
        return tuple(cleaned)

    @property
    def _listed(self) -> int:
        """The number of likeliest tokens that are requested."""
        return 20 if self.api.capabilities.can("top_logprobs_20") else 5

    def require_none(self, facts: list[Fact]) -> None:
        """Check that no requirement failed.

        Args:
            facts: The failed requirements. The seed is added to their evidence.

        Raises:
            Unmet: A requirement failed.
        """
        risk = f"{expected_samples.FALSE_ALARMS:g} is the probability of a false alarm in a run"
        require_none(facts, f"seed {self.seed}; {risk}")


def id_of(token: str) -> int:
    """Return the id in a token's name, for example 17 for ``token_id:17``.

    Args:
        token: The name of a token in log-probabilities.

    Raises:
        Unmet: The server named the token by its text, although ids were requested.
    """
    token_id = completion_json.id_of(token)
    if token_id is None:
        raise Unmet(Fact("tokens of log-probabilities named by their ids (token_id:N)", token))
    return token_id
