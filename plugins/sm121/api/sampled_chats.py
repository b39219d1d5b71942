"""Samples of chats against what their own log-probabilities promise: a server reads the parameters
of a chat and of a completion in two places. Each token of a chat is a sample of its place."""

import math
import random
from collections.abc import Callable, Iterator
from heapq import nlargest
from operator import itemgetter
from typing import Literal

from sm121.answers import promised
from sm121.answers.promised import Cut, Top
from sm121.api.client import Api, Json, together
from sm121.api.sampled import NEUTRAL, TEXTS
from sm121.client.completions import parse
from sm121.core.unmet import require
from sm121.core.verdict import NotRun

#: Tokens of a chat, and how many are listed at each place. Low temperatures keep harmony's form.
_TOKENS, _LISTED = 12, 20
#: Chats that are asked for at a time, and at most.
_CHATS, _MOST = 12, 480
#: Temperatures that are off by half; and the chance of calling a right server wrong is 1 in 20,000.
_OFF, _WRONG = (1.5, 1 / 1.5), promised.WRONG + math.log(10.0)
#: Of each parameter what its value is drawn from.
_VALUES: dict[str, tuple[float, ...]] = {
    "temperature": (0.6, 0.62, 0.65, 0.67, 0.7), "top_p": (0.4, 0.45, 0.5, 0.55, 0.6),
    "top_k": (1, 2), "min_p": (0.3, 0.4, 0.5, 0.6),
}  # fmt: skip
_PROMISED = "samples as the log-probabilities of chats promise"


def obey(api: Api, seed: int, name: Cut | Literal["temperature"]) -> None:
    """Tokens come as a value that is drawn promises, and not as a temperature that is off by half,
    or a cut that is ignored, would have it. Raises NotRun: after so many chats that is not decided,
    or the engine does not know the parameter."""
    if name in ("top_k", "min_p"):
        api.capabilities.require(name)
    value, sums = random.Random(f"{seed} {name} of chats").choice(_VALUES[name]), [0.0, 0.0]

    def odds(token: str, top: Top) -> list[float]:
        """Logarithms of how much likelier other values make a token."""
        if name == "temperature":
            return [promised.log_ratio(top, token, value, f) if token in top else 0.0 for f in _OFF]
        dropped = promised.remaining(top, name, value)[1]
        remaining = 1.0 - min(sum(math.exp(top[other]) for other in dropped), 0.99)
        return [math.inf if token in dropped else math.log(remaining)] * 2

    for token, top in _places(api, odds, {name: value}):
        sums = [a + b for a, b in zip(sums, odds(token, top), strict=True)]
        evidence = f"{value:g}, {token}; logarithms of how much likelier by others: {sums}"
        evidence += f"; seed {seed}; {promised.FALSE_ALARMS:g} false alarms a run"
        require(max(sums) < _WRONG, _PROMISED, "others", f"{name} of chats", evidence=evidence)
        if max(sums) <= promised.RIGHT:
            return
    raise NotRun(f"{_MOST} chats do not tell whether {name} is obeyed")


def _places(
    api: Api, odds: Callable[[str, Top], list[float]], sent: Json
) -> Iterator[tuple[str, Top]]:
    """The tokens of chats with what is listed at their places, of the chat that tells most."""
    can = api.capabilities.can
    api.capabilities.require("chat_logprobs", "chat_token_ids", "top_logprobs_20")
    body = {name: value for name, (ability, value) in NEUTRAL.items() if can(ability)}
    body |= {"max_tokens": _TOKENS, "logprobs": True, "top_logprobs": _LISTED, "top_p": 1.0}
    body["ignore_eos"] = False  # true is an error of chats in vLLM (vllm#50690)

    def places_of(text: str, options: Json) -> list[tuple[str, Top]]:
        positions = parse(api.send_chat(text, **body | options)).positions
        require(positions, "log-probabilities of a chat")
        # Whichever token was drawn is listed, and may stand in the place of the last one.
        tops = [nlargest(_LISTED - 1, p.top.items(), itemgetter(1)) for p in positions or ()]
        return [(p.token, dict(top)) for p, top in zip(positions or (), tops, strict=True)]

    greedy = together(lambda text: places_of(text, {}), TEXTS)
    ratios = [sum(odds(*place)[0] for place in answer) for answer in greedy]
    text, sampling = TEXTS[ratios.index(min(ratios))], {"temperature": 1.0, **sent}
    for _ in range(0, _MOST, _CHATS):
        for answer in together(lambda each: places_of(text, each), [sampling] * _CHATS):
            yield from answer
