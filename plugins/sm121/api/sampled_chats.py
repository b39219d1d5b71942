"""Samples of chats against what their own log-probabilities promise: a server reads the parameters
of a chat and of a completion in two places. Each token of a chat is a sample of its place."""

import math
import random
from collections.abc import Callable, Iterator

from sm121.answers import promised
from sm121.answers.promised import Cut, Top
from sm121.api.client import Api, together
from sm121.api.sampled import NEUTRAL, TEXTS
from sm121.client.completions import parse
from sm121.core.unmet import require
from sm121.core.verdict import NotRun

#: Tokens of a chat, no hot ones, since a form that they break is an error; and those listed.
_TOKENS, _LISTED = 12, 20
#: Chats that are asked for at a time, and at most.
_CHATS, _MOST = 12, 480
#: Temperatures that are off by half; and the chance of calling a right server wrong is 1 in 20,000.
_OFF, _WRONG = (1.5, 1 / 1.5), promised.WRONG + math.log(10.0)
#: Of each parameter what its value is drawn from.
_COLD = (0.6, 0.7)
_CUTS: dict[Cut, tuple[float, ...]] = {
    "top_p": (0.4, 0.45, 0.5, 0.55, 0.6), "top_k": (1, 2), "min_p": (0.3, 0.4, 0.5, 0.6),
}  # fmt: skip
_PROMISED = "samples as the log-probabilities of chats promise"
_OPEN = f"{_MOST} chats do not tell whether it is obeyed"


def follow_the_temperature(api: Api, seed: int) -> None:
    """Tokens are likelier than at temperatures that are off by half. Raises NotRun: after so
    many chats that is not decided."""
    value = round(random.Random(f"{seed} chat").uniform(*_COLD), 3)
    ratios, of = dict.fromkeys(_OFF, 0.0), f"seed {seed}; {promised.FALSE_ALARMS:g} false alarms"
    tells = lambda top: promised.evidence(top, value)  # noqa: E731
    for token, top in _places(api, tells, temperature=value):
        for factor in ratios if token in top else ():
            ratios[factor] += promised.log_ratio(top, token, value, factor)
        most, about = max(ratios.values()), "temperature of chats"
        evidence = f"{value:g}; logarithms of how much likelier, by a factor: {ratios}; {of} a run"
        require(most < _WRONG, _PROMISED, "others", about, evidence=evidence)
        if most <= promised.RIGHT:
            return
    raise NotRun(_OPEN)


def keep_the_cut(api: Api, seed: int, cut: Cut) -> None:
    """No token comes that `top_p`, `top_k` or `min_p` cuts off, in as many chats as one would come
    in if it were ignored. Raises NotRun: those are too many, or the engine does not know it."""
    if cut != "top_p":
        api.capabilities.require(cut)
    value, unseen = random.Random(f"{seed} {cut} chat").choice(_CUTS[cut]), 0.0

    def dropped(top: Top) -> dict[str, float]:
        return {token: math.exp(top[token]) for token in promised.remaining(top, cut, value)[1]}

    for token, top in _places(api, lambda top: sum(dropped(top).values()), **{cut: value}):
        banned, of = dropped(top), f"seed {seed}; {promised.FALSE_ALARMS:g} false alarms a run"
        evidence = f"{value:g}: {token} among {top}; {of}"
        require(token not in banned, _PROMISED, "others", f"{cut} of chats", evidence=evidence)
        unseen += math.log1p(-min(sum(banned.values()), 0.99))
        if unseen <= promised.RIGHT:
            return
    raise NotRun(_OPEN)


def _places(api: Api, tells: Callable[[Top], float], **sent: float) -> Iterator[tuple[str, Top]]:
    """The tokens of chats with what is listed at their places, of the chat that tells most."""
    can = api.capabilities.can
    api.capabilities.require("chat_logprobs", "chat_token_ids", "top_logprobs_20")
    body = {name: value for name, (ability, value) in NEUTRAL.items() if can(ability)}
    body |= {"max_tokens": _TOKENS, "logprobs": True, "top_logprobs": _LISTED, "top_p": 1.0}
    body["ignore_eos"] = False  # true is an error of chats in vLLM (vllm#50690)

    def asked(text: str, **how: float) -> list[tuple[str, Top]]:
        positions = parse(api.send_chat(text, **body | how)).positions
        require(positions, "log-probabilities of a chat")
        # Whichever token was drawn is listed, and may stand in the place of the last one.
        ranked = [sorted(p.top, key=lambda t: -p.top[t])[: _LISTED - 1] for p in positions or ()]
        pairs = zip(positions or (), ranked, strict=True)
        return [(p.token, {token: p.top[token] for token in first}) for p, first in pairs]

    sums = [sum(tells(top) for _, top in answer) for answer in together(asked, TEXTS)]
    text = TEXTS[sums.index(max(sums))]
    sampling = {"temperature": 1.0, **sent}
    for _ in range(0, _MOST, _CHATS):
        for answer in together(lambda text: asked(text, **sampling), [text] * _CHATS):
            yield from answer
