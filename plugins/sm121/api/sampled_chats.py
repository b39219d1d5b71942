"""Check the sampling parameters of chats.

Servers parse the sampling parameters of chats and of completions with different code. Each token of
a chat serves as one sample.
"""

import functools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter
from typing import Literal, NamedTuple

from sm121.answers import expected_samples
from sm121.answers.expected_samples import Cut, Top
from sm121.api.client import Api, Json, together
from sm121.api.sample_source import NEUTRAL, TEXTS
from sm121.client.completion_json import parse
from sm121.core.unmet import require
from sm121.core.verdict import NotRun

#: Maximum number of tokens of a chat's answer.
_TOKENS = 12
#: Number of likeliest tokens requested per position.
_LISTED = 20
#: Number of chats that are sampled between two decisions.
_BATCH = 12
#: Maximum number of sampled chats.
MOST_CHATS = 480
#: Number of concurrent chats.
_CONCURRENCY = 8
#: The factors of a temperature that is half too high or too low.
_OFF = (1.5, 1 / 1.5)
#: If the log-likelihood ratio is above this value, the parameter counts as disobeyed. The
#: probability of a false alarm is 1 in 20,000.
_WRONG = expected_samples.WRONG + math.log(10.0)
#: The values from which each run draws one. Temperatures are low, so that harmony's format stays
#: intact.
_VALUES: dict[str, tuple[float, ...]] = {
    "temperature": (0.6, 0.62, 0.65, 0.67, 0.7),
    "top_p": (0.4, 0.45, 0.5, 0.55, 0.6),
    "top_k": (1, 2),
    "min_p": (0.3, 0.4, 0.5, 0.6),
}
#: The minimum probability of the kept tokens, so that the logarithm of it is finite.
_LEAST_REST = 0.01

Parameter = Cut | Literal["temperature"]


class ChatToken(NamedTuple):
    """A token of a chat's answer."""

    token: str
    #: The likeliest tokens at its position.
    top: Top


@dataclass
class ChatSamples:
    """Samples chats of one server, and checks them.

    Args:
        api: The API of the server.
        seed: The seed of the drawn values.
    """

    api: Api
    seed: int

    @functools.cached_property
    def _greedy(self) -> list[list[ChatToken]]:
        """The tokens of the greedy answer to a chat with each of `TEXTS`."""
        return together(lambda text: self._ask(text, {}), TEXTS, at_once=_CONCURRENCY)

    def obey(self, name: Parameter) -> None:
        """Require that sampled chats obey a parameter, with a value that the run draws.

        For a temperature, the alternative hypotheses are a temperature that is half too high and
        one that is half too low. For a truncation, the alternative is no truncation. The text is
        the one whose greedy chat best distinguishes the hypotheses.

        Args:
            name: The parameter.

        Raises:
            Unmet: An alternative is significantly likelier, or a removed token was drawn.
            NotRun: `MOST_CHATS` chats are not sufficient, or the engine lacks the parameter.
        """
        if name in ("top_k", "min_p"):
            self.api.capabilities.require(name)
        value = random.Random(f"{self.seed} {name} of chats").choice(_VALUES[name])
        ratios = []
        for chat in self._greedy:
            ratios.append(sum(_log_odds(name, value, place)[0] for place in chat))
        text = TEXTS[ratios.index(min(ratios))]
        sums = [0.0, 0.0]
        for place in self._sampled(text, {"temperature": 1.0, name: value}):
            for index, odds in enumerate(_log_odds(name, value, place)):
                sums[index] += odds
            required = "samples that follow the log-probabilities of chats"
            evidence = (
                f"{value:g}, {place.token}; log-likelihood ratios of other values: {sums}; seed "
                f"{self.seed}; {expected_samples.FALSE_ALARMS:g} is the probability of a false "
                "alarm in a run"
            )
            right = max(sums) < _WRONG
            require(right, required, "others", f"{name} of chats", evidence=evidence)
            if max(sums) <= expected_samples.RIGHT:
                return
        raise NotRun(f"{MOST_CHATS} chats are too few to decide whether {name} is obeyed")

    def _sampled(self, text: str, options: Json) -> Iterator[ChatToken]:
        """Yield the tokens of sampled chats, which are requested in batches."""
        for _ in range(0, MOST_CHATS, _BATCH):
            repeated = [text] * _BATCH
            chats = together(lambda text: self._ask(text, options), repeated, at_once=_CONCURRENCY)
            for places in chats:
                yield from places

    def _ask(self, text: str, options: Json) -> list[ChatToken]:
        """Send a chat, and return the tokens of its answer."""
        capabilities = self.api.capabilities
        capabilities.require("chat_logprobs", "chat_token_ids", "top_logprobs_20")
        body: Json = {}
        for option, (ability, neutral) in NEUTRAL.items():
            if capabilities.can(ability):
                body[option] = neutral
        body |= {"max_tokens": _TOKENS, "logprobs": True, "top_logprobs": _LISTED, "top_p": 1.0}
        body["ignore_eos"] = False  # vLLM answers chats with an error if this is true (vllm#50690)
        positions = parse(self.api.send_chat(text, **body | options)).positions or ()
        require(positions, "log-probabilities of a chat")
        bare = sum(not position.top for position in positions)
        require(not bare, "alternatives listed with each token of a chat", f"{bare} have none")
        places = []
        for position in positions:
            # The drawn token is always listed, perhaps in place of the last one of the likeliest
            # tokens.
            top = nlargest(_LISTED - 1, position.top.items(), itemgetter(1))
            places.append(ChatToken(position.token, dict(top)))
        return places


def _log_odds(name: Parameter, value: float, place: ChatToken) -> list[float]:
    """Return the log-likelihood ratio of a token for each alternative hypothesis."""
    token, top = place
    if name == "temperature":
        if token not in top:
            return [0.0, 0.0]
        return [expected_samples.log_ratio(top, token, value, factor) for factor in _OFF]
    dropped = expected_samples.remaining(top, name, value).dropped
    if token in dropped:
        return [math.inf, math.inf]
    cut_off = sum(math.exp(top[other]) for other in dropped)
    rest = math.log(max(1.0 - cut_off, _LEAST_REST))
    return [rest, rest]
