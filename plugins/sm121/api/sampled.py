"""Samples of a server against what its own log-probabilities promise of them.

Each parameter is sent with a middle value and with one drawn anew in each run, as many times as it
takes to notice a value that is off by a tenth, after the text where that takes the fewest.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from sm121.answers import promised
from sm121.answers.promised import CHANCE, Cut, Tally, Top, shares
from sm121.api.client import Api, Json
from sm121.client.completions import Position, parse
from sm121.core.unmet import Fact, require_none
from sm121.core.verdict import NotRun
from sm121.engines.capabilities import Name

#: Texts that can go on in many ways, by a small model as by a large one.
TEXTS = (
    *("The capital", "The capital of France is Paris. The", "1 + 1 = 2. The capital", "In the"),
    *("What is", "The", "She said that", "1, 2, 3, 4, 5,", "The weather in", "I", "Q:", "and", "A"),
)
#: Samples of a comparison, and of a request, at most.
_MOST, _BATCH = 4096, 64
#: Of each parameter a middle value, and those that another one is drawn from.
_CUTS: dict[Cut, tuple[float, list[float]]] = {
    "top_p": (0.5, [n / 100 for n in range(20, 91)]),
    "top_k": (5, [*range(2, 16)]),
    "min_p": (0.2, [n / 200 for n in range(4, 121)]),
}
#: What is sent where the engine can: parameters that do nothing, whatever the model's default is.
_NEUTRAL: dict[str, tuple[Name, float]] = {
    "top_k": ("top_k", -1), "repetition_penalty": ("repetition_penalty", 1.0),
    "min_p": ("min_p", 0.0), "return_tokens_as_token_ids": ("logprob_ids", True),
}  # fmt: skip
_Samples = list[tuple[Position, ...]]


@dataclass
class Sampler:
    """One server, asked for samples. Each check raises `Unmet` with all that is wrong.

    Args:
        api: of the server.
        seed: of the values that are drawn.
    """

    api: Api
    seed: int

    def follows_the_temperature(self) -> None:
        """Samples are as likely as the temperature makes them: each of the likeliest tokens, and
        their log-probabilities on the whole, at both temperatures together."""
        facts, tally, step, information = [], Tally(), 1.0, promised.information
        drawn = random.Random(f"{self.seed} temperature").uniform(0.7, 1.4)
        for kind, value in (("middle", 0.8), ("drawn", drawn)):
            text, top = max(self._tops.items(), key=lambda item: information(item[1], value))
            step = max(step, *(abs(score) for _, score in promised.scores(top, value).values()))
            count = promised.information_needed(step) / information(top, value) / 2
            if count > _MOST:
                raise NotRun(
                    "after no text of the suite a temperature is noticed that is off by a tenth"
                )
            samples = self._ask([text] * math.ceil(count), {"temperature": value})
            for (position,) in samples:
                if position.token in position.top:
                    scores = promised.scores(position.top, value)
                    tally.add(scores[position.token][1], scores.values())
            about, evidence = f"temperature, {kind}", f"{value:g} after {text!r}"
            facts += _compared(about, samples, lambda top: (top, ()), evidence, value)
        off = abs(tally.sum - tally.expected)
        limit = promised.allowed(tally.variance, step, promised.TEMPERATURE_CHANCE)
        if off > limit:
            required = "samples as both temperatures promise: a sum of scores off by at most"
            facts.append(Fact(required, value=off, limit=limit, evidence=f"{tally}"))
        self._hold(facts)

    def keeps_the_cut(self, cut: Cut) -> None:
        """Samples with `top_p`, `top_k` or `min_p` are tokens that it leaves, as often as their
        probabilities say."""
        if cut != "top_p":
            self.api.capabilities.require(cut)
        facts = []
        for kind, (count, value, text, edge) in self._cuts(cut):
            rule = functools.partial(promised.remaining, cut=cut, value=value)
            samples = self._ask([text] * count, {cut: value})
            about, evidence = f"{cut}, {kind}", f"{value:g} after {text!r}"
            facts += _compared(about, samples, rule, evidence, edge=edge, unlisted=False)
        self._hold(facts)

    @functools.cached_property
    def _tops(self) -> dict[str, Top]:
        """The likeliest tokens after each text."""
        answers = self._ask(list(TEXTS), {"temperature": 0.0})
        return {text: position.top for text, (position,) in zip(TEXTS, answers, strict=True)}

    def _cuts(self, cut: Cut) -> list[tuple[str, tuple[int, float, str, list[str]]]]:
        """A middle and a drawn value: so many samples notice a value that is off, the value, the
        text, and the tokens that a tighter value leaves out."""
        middle, values = _CUTS[cut]
        cases = []
        for value in values:
            error = 1.0 if cut == "top_k" else promised.ERROR * value
            for text, top in self._tops.items():
                remaining, dropped = promised.remaining(top, cut, value)
                low, high = (promised.remaining(top, cut, value + e) for e in (-error, error))
                edge, beyond = remaining & (low[1] | high[1]), dropped & (low[0] | high[0])
                whole, tight, loose = (sum(math.exp(top[token]) for token in tokens)
                                       for tokens in (remaining, edge, beyond))  # fmt: skip
                if len(remaining | dropped) == len(top) and tight and loose:
                    count = max(math.log(4 / CHANCE) * whole / tight, 5 * (whole + loose) / loose)
                    cases.append((math.ceil(count), value, text, sorted(edge)))
        fewest = min(cases, default=(_MOST + 1,))[0]
        if fewest > _MOST:
            raise NotRun(f"after no text of the suite {cut} is noticed that is off by a tenth")
        cases = [case for case in cases if case[0] <= max(fewest, 200)]
        drawn = random.Random(f"{self.seed} {cut}").choice(cases)
        return [("middle", min(cases, key=lambda case: abs(case[1] - middle))), ("drawn", drawn)]

    def _ask(self, texts: list[str], options: Json) -> _Samples:
        """The tokens after each text. A token below the likeliest ones is listed only where it was
        drawn, and is taken out: the list is the same whatever is drawn."""
        can = self.api.capabilities.can
        self.api.capabilities.require("logprobs", "prompt_lists")
        listed = 20 if can("top_logprobs_20") else 5
        body: Json = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 1, "logprobs": listed}
        body |= {option: value for option, (name, value) in _NEUTRAL.items() if can(name)} | options
        samples: _Samples = []
        for start in range(0, len(texts), _BATCH):
            answer = self.api.complete(texts[start : start + _BATCH], **body)
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
                samples.append(tuple(
                    replace(p, top={t: v for t, v in p.top.items() if t != p.token or n <= listed})
                    for p in parse({"choices": [choice]}).positions or () for n in [len(p.top)]
                ))  # fmt: skip
        if missing := sum(len(sample) != 1 for sample in samples):
            raise NotRun(
                f"{missing} of {len(samples)} samples have no log-probability of their token"
            )
        return samples

    def _hold(self, facts: list[Fact]) -> None:
        require_none(facts, f"seed {self.seed}; {promised.FALSE_ALARMS:g} false alarms a run")


def _compared(
    about: str, samples: _Samples, rule: Callable[[Top], tuple[Collection[str], Collection[str]]],
    evidence: str, temperature: float = 1.0, *, edge: Collection[str] = (), unlisted: bool = True,
) -> list[Fact]:  # fmt: skip
    """What is wrong with one-token samples: tokens that must not come, and how often the likeliest
    and those of the edge came. ``rule``: of the listed tokens those that may come, and those that
    must not; ``unlisted``: others may come."""
    tallies = {name: Tally() for name in ("rank 1", "rank 2", "rank 3", "rank 4", "edge")}
    wrong = {}
    for (position,) in samples:
        remaining, banned = rule(position.top)
        if position.token in remaining:
            probable = shares({token: position.top[token] for token in remaining}, temperature)
            ordered = sorted(probable, key=lambda token: -probable[token])
            for tally, token in zip(tallies.values(), ordered[:4], strict=False):
                tally.add_hit(position.token == token, probable[token])
            share = sum(probable.get(token, 0.0) for token in edge)
            tallies["edge"].add_hit(position.token in edge, share)
        elif position.token in banned or (position.token not in position.top and not unlisted):
            wrong["others"] = position.token
    wrong |= {name: f"{tally}" for name, tally in tallies.items() if tally.chance < CHANCE}
    return [
        Fact("samples as the reported log-probabilities promise", "others", f"{about}, {name}",
             evidence=f"{evidence}: {which}")
        for name, which in wrong.items()
    ]  # fmt: skip
