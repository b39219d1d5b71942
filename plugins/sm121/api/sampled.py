"""Samples of a server against what its own log-probabilities promise of them. Each parameter is
sent with a middle value and with one drawn anew in each run, as many times as it takes to notice a
value that is off by a tenth, after the text where that takes the fewest."""

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from heapq import nlargest
from operator import itemgetter
from typing import Literal

from sm121.answers import promised
from sm121.answers.promised import CHANCE, Cut, Tally, Top, shares
from sm121.api.client import Api, Json, together
from sm121.client.completions import Position, name_of, parse
from sm121.core.unmet import Fact, Unmet, require, require_each, require_none
from sm121.core.verdict import NotRun
from sm121.engines.capabilities import Name

#: Texts that can go on in many ways, by a small model as by a large one.
TEXTS = (
    *("The capital", "The capital of France is Paris. The", "1 + 1 = 2. The capital", "In the"),
    *("What is", "The", "She said that", "1, 2, 3, 4, 5,", "The weather in", "I", "Q:", "and", "A"),
)
#: Samples of a comparison, and of a request, at most.
_MOST, _BATCH = 4096, 32
#: Samples where nothing asks for more, and how cold they are where a penalty decides alone.
_FEW, _COLD = 8, 0.01
#: Samples of a request after one text, and texts that a seed is sampled after.
_FAR, _FLAT = 24, 10
#: Of each parameter a middle value, and those, or the range, that another one is drawn from.
_RANGES = {
    "temperature": (0.8, 0.7, 1.4),
    "presence_penalty": (1.2, 0.9, 1.9),
    "frequency_penalty": (1.2, 0.9, 1.9),
    "repetition_penalty": (1.3, 1.2, 1.5),
}
_CUTS: dict[Cut, tuple[float, list[float]]] = {
    "top_p": (0.5, [n / 100 for n in range(20, 91)]),
    "top_k": (5, [*range(2, 16)]),
    "min_p": (0.2, [n / 200 for n in range(4, 121)]),
}
#: What is sent where the engine can: parameters that do nothing, whatever the model's default is.
NEUTRAL: dict[str, tuple[Name, float]] = {
    "top_k": ("top_k", -1), "repetition_penalty": ("repetition_penalty", 1.0),
    "min_p": ("min_p", 0.0), "return_tokens_as_token_ids": ("logprob_ids", True),
    "ignore_eos": ("ignore_eos", True),
}  # fmt: skip
#: A bias that forces a token; and two which leave no other token than those that have them.
_FORCED, _HIGH, _LOW = 100.0, 90.0, 50.0
_PROMISED = "samples as the reported log-probabilities promise"
#: The tokens of each answer.
Samples = list[tuple[Position, ...]]
#: A token of a chat, and what is listed at its place.
Place = tuple[str, Top]
#: Texts, options, and what is wrong with samples of one token with them.
Case = tuple[list[str], Json, Callable[[Samples], list[Fact]]]


@dataclass
class Sampler:
    """One server, asked for samples. Each check raises `Unmet` with all that is wrong. `api`: of
    the server; `seed`: of the values that are drawn."""

    api: Api
    seed: int
    _pairs: dict[str, tuple[str, str, str, Top]] = field(default_factory=dict)

    def follows_the_temperature(self) -> None:
        """Samples are as likely as the temperature makes them: each of the likeliest tokens, and
        all on the whole, at both temperatures together. Asked for until that is decided."""
        ratios, cases, facts = dict.fromkeys(promised.OFF, 0.0), [], []
        for kind, value in self._values("temperature"):
            text = max(self._tops, key=lambda text: promised.evidence(self._tops[text], value))
            cases.append((kind, value, text, Samples()))
        while promised.RIGHT < max(ratios.values()) < promised.WRONG:
            if 2 * len(cases[0][3]) >= _MOST:
                raise NotRun("after no text of the suite it is detected to be off by a tenth")
            for _, value, text, samples in cases:
                more = self._ask([text] * _BATCH, {"temperature": value})
                samples += more
                for (position,) in more:
                    top, token = position.top, position.token
                    for factor in ratios if token in top else ():
                        ratios[factor] += promised.log_ratio(top, token, value, factor)
        if max(ratios.values()) > 0:
            evidence = f"logarithms of how much likelier, by a factor of both: {ratios}"
            facts.append(Fact("samples as both temperatures promise", "others", evidence=evidence))
        for kind, value, text, samples in cases:
            about, label = f"temperature, {kind}", f"{value:g} after {text!r}"
            facts += _compared(about, samples, lambda top: (top, ()), label, value)
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

    def restricts(self, name: Name) -> None:
        """`bad_words` bans the likeliest word; of five `allowed_token_ids` each comes as often as
        its probability says, and no other token."""
        self.api.capabilities.require(name, "logprob_ids")
        answers = self.api.complete(list(TEXTS), max_tokens=1)["choices"]
        words = {TEXTS[choice["index"]]: choice["text"] for choice in answers}
        text = max((text for text, word in words.items() if word.strip()),
                   key=lambda text: self._tops[text][promised.likeliest(self._tops[text])],
        )  # fmt: skip
        top = self._tops[text]
        ranked = sorted(top, key=lambda token: -top[token])
        allowed, banned, option = set[str](), {ranked[0]}, [words[text]]
        if name == "allowed_token_ids":
            allowed = {*ranked[1:10:2]}
            banned, option = top.keys() - allowed, [*map(_id, allowed)]
        count = math.ceil(_FEW / math.exp(top[ranked[0]]))
        samples = self._ask([text] * min(count, _MOST), {name: option})
        self._hold(_compared(
            name, samples, lambda top: (allowed & top.keys(), banned), f"{option} after {text!r}",
            unlisted=name == "bad_words",
        ))  # fmt: skip

    def penalises(self, name: str) -> None:
        """Where a bias makes up for a penalty but for 5 % of it, the token comes that the rest
        makes likelier: so a penalty that is off by a tenth is detected."""
        divides = name == "repetition_penalty"
        self.api.capabilities.require("divided_bias" if divides else "penalties")
        self.api.capabilities.require("logprob_ids", "logit_bias", "token_ids")

        def hold(kind: str, value: float) -> None:
            comparisons = self._divided(value, kind) if divides else self._subtracted(name, value)
            facts = []
            try:
                for about, tally in comparisons:
                    if 2 * tally.samples < _FEW or tally.chance < CHANCE:
                        case, evidence = f"{name}, {kind}", f"{value:g} {about}: {tally}"
                        facts.append(Fact(_PROMISED, "others", case, evidence=evidence))
            except NotRun:
                if not facts:
                    raise
            self._hold(facts)

        require_each(hold, *zip(*self._values(name), strict=True))

    def far(self) -> dict[str, Case]:
        """A temperature and a `top_p` that are far from 1, each after the text where few samples
        tell it from 1; and a seed, whose samples are mostly the same again. Those that do not hold
        now are left out: the checks of each say so."""
        drawn = random.Random(f"{self.seed} far")
        cold, cut = (round(drawn.uniform(*ends), 3) for ends in ((0.35, 0.5), (0.4, 0.6)))
        rule = functools.partial(promised.remaining, cut="top_p", value=cut)
        tops, cases = self._tops, dict[str, Case]()
        text = max(tops, key=lambda text: promised.evidence(tops[text], cold, 1 / cold))
        cases["temperature"] = [text] * _FAR, {"temperature": cold}, functools.partial(
            _compared, "temperature", rule=lambda top: (top, ()),
            evidence=f"{cold:g} after {text!r}", temperature=cold,
        )  # fmt: skip
        beyond = {
            text: sum(math.exp(top[one]) for one in rule(top)[1]) for text, top in tops.items()
        }
        if beyond[wide := max(beyond, key=lambda text: beyond[text])]:
            cases["top_p"] = [wide] * _FAR, {"top_p": cut}, functools.partial(
                _compared, "top_p", rule=rule, evidence=f"{cut:g} after {wide!r}", unlisted=False
            )  # fmt: skip
        same = {text: sum(math.exp(2 * log) for log in top.values()) for text, top in tops.items()}
        flattest, options = sorted(same, key=lambda text: same[text])[:_FLAT], {"seed": self.seed}
        if self.api.capabilities.can("seed"):
            repeated = functools.partial(_repeated, self._ask(flattest, options))
            cases["seed"] = flattest, options, repeated
        return {name: c for name, c in cases.items() if not c[2](self._ask(c[0] * 2, c[1]))}

    def _subtracted(self, name: str, value: float) -> Iterator[tuple[str, Tally]]:
        """A token that came twice, and one of the prompt, which is not counted."""
        count, least = 2 if name == "frequency_penalty" else 1, _RANGES[name][1]
        if name not in self._pairs:
            self._pairs[name] = self._pair([0.0, least, count * least], (False, True))
        text, token, other, top = self._pairs[name]
        sides, penalty = set(), count * value
        for rest in (-0.05, 0.05):
            even = top[other] + penalty - top[token]
            bias, tally = {token: _LOW + even + rest * penalty, other: _LOW}, Tally()
            options = {"temperature": _COLD, name: value, "logit_bias": bias, "max_tokens": 3}
            for *before, last in self._ask([text] * _FEW, options):
                reported = {**top, **last.top, last.token: last.log_probability}
                logits = {one: reported[one] + bias[one] for one in bias}
                logits[token] -= penalty
                if {position.token for position in before} == {token}:
                    tally.add(last.token == token, shares(logits, _COLD)[token])
            sides.add(2 * tally.expected > tally.samples)
            yield f"after {text!r}, {token} twice", tally
        if len(sides) < 2:
            raise NotRun("log-probabilities differ by 5 % of a penalty from request to request")

    def _divided(self, value: float, kind: str) -> Iterator[tuple[str, Tally]]:
        """A token of the prompt, or one that came, and one that did not. No server tells the logit
        that is divided: so the bias that makes up for it is measured, and another one computed."""
        times = int(kind == "drawn")
        text, token, other, _ = self._pair([0.0, 100.0][: times + 1], (not times, False))

        def hits(count: int, cold: float, high: float, low: float) -> list[bool]:
            samples = self._ask([text] * count, {
                "temperature": cold, "repetition_penalty": value, "max_tokens": times + 1,
                "logit_bias": {token: high, other: low},
            })  # fmt: skip
            return [{position.token for position in sample} == {token} for sample in samples]

        low, high = 0.0, 100.0
        while high - low > 0.1:
            half = (low + high) / 2
            low, high = (half, high) if all(hits(1, 0.0, _LOW, half)) else (low, half)
        for rest in (-0.05, 0.05):
            tally = Tally()
            for hit in hits(_FEW, _COLD, _HIGH, low + (_HIGH - _LOW) / (1 + rest) / value):
                tally.add(hit, float(rest > 0))
            yield f"after {text!r}, {token}", tally

    def _pair(
        self, penalties: list[float], of_prompt: tuple[bool, bool]
    ) -> tuple[str, str, str, Top]:
        """A text, two tokens of its prompt or not, and the likeliest tokens when the first one came
        already, one time less than there are penalties. With both biased it surely comes first."""
        options = {"temperature": 0.0, "max_tokens": len(penalties)}
        listed = Counter(token for top in self._tops.values() for token in top)
        for token, _ in listed.most_common(_FEW):
            texts = [
                text for text, top in self._tops.items()
                if token in top and (token in self._prompts[text]) == of_prompt[0]
            ]  # fmt: skip
            answers = self._ask(texts, options | {"logit_bias": {token: _FORCED}})
            for text, answer in zip(texts, answers, strict=True):
                tokens, last = {position.token for position in answer}, answer[-1].top
                require(tokens == {token}, token, tokens, f"logit_bias of {_FORCED:g}")
                for other in last.keys() - {token} if token in last else ():
                    *before, even = (
                        p.log_probability - p.top.get(other, min(p.top.values())) - penalty
                        for p, penalty in zip(answer, penalties, strict=True)
                    )
                    sure = min(before, default=math.inf) > even + 1
                    if sure and (other in self._prompts[text]) == of_prompt[1]:
                        return text, token, other, last
        raise NotRun("after no text of the suite two tokens are likely, as a penalty needs them")

    @functools.cached_property
    def greedy_chats(self) -> list[list[Place]]:
        """The places of a greedy chat about each text."""
        ask = functools.partial(_places_of, self.api, options={})
        return together(ask, TEXTS, at_once=_CHATS_AT_ONCE)

    @functools.cached_property
    def _prompts(self) -> dict[str, set[str]]:
        choices = self.api.complete(list(TEXTS), max_tokens=1, return_token_ids=True)["choices"]
        return {TEXTS[one["index"]]: {*map(name_of, one["prompt_token_ids"])} for one in choices}

    def _values(self, name: str) -> list[tuple[str, float]]:
        middle, low, high = _RANGES[name]
        drawn = random.Random(f"{self.seed} {name}").uniform(low, high)
        return [("middle", middle), ("drawn", round(drawn, 3))]

    @functools.cached_property
    def _tops(self) -> dict[str, Top]:
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
            raise NotRun(f"after no text of the suite {cut} is detected that is off by a tenth")
        cases = [case for case in cases if case[0] <= max(fewest, 200)]
        drawn = random.Random(f"{self.seed} {cut}").choice(cases)
        return [("middle", min(cases, key=lambda case: abs(case[1] - middle))), ("drawn", drawn)]

    def _ask(self, texts: list[str], options: Json) -> Samples:
        body = self.body(options)
        samples: Samples = []
        for start in range(0, len(texts), _BATCH):
            answer = self.api.complete(texts[start : start + _BATCH], **body)
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
                samples.append(self.sample(parse({"choices": [choice]}).positions or ()))
        if missing := sum(len(sample) != body["max_tokens"] for sample in samples):
            lacking = f"{missing} of {len(samples)} lack them"
            fact = Fact("log-probabilities with each sample", lacking)
            raise Unmet(fact) if "_tops" in vars(self) else NotRun(fact)  # greedily it had them
        bare = sum(not position.top for sample in samples for position in sample)
        require(not bare, "alternatives listed with each token", f"{bare} tokens have none")
        return samples

    def body(self, options: Json) -> Json:
        """What is sent beside the texts; ``logit_bias`` is by the names of tokens. Raises NotRun:
        the engine cannot do it."""
        can = self.api.capabilities.can
        self.api.capabilities.require("logprobs", "prompt_lists")
        body: Json = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 1, "logprobs": self._listed}
        body |= {option: value for option, (name, value) in NEUTRAL.items() if can(name)} | options
        if bias := body.get("logit_bias"):
            body["logit_bias"] = {f"{_id(token)}": each for token, each in bias.items()}
        return body

    def sample(self, positions: tuple[Position, ...]) -> tuple[Position, ...]:
        """Without what is listed only where it was drawn: so the list is always the same."""
        return tuple(
            replace(p, top={t: v for t, v in p.top.items() if t != p.token or n <= self._listed})
            for p in positions for n in [len(p.top)]
        )  # fmt: skip

    @property
    def _listed(self) -> int:
        return 20 if self.api.capabilities.can("top_logprobs_20") else 5

    def _hold(self, facts: list[Fact]) -> None:
        require_none(facts, f"seed {self.seed}; {promised.FALSE_ALARMS:g} false alarms a run")


def _compared(
    about: str, samples: Samples, rule: Callable[[Top], tuple[Collection[str], Collection[str]]],
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
                tally.add(position.token == token, probable[token])
            share = sum(probable.get(token, 0.0) for token in edge)
            tallies["edge"].add(position.token in edge, share)
        elif position.token in banned or (position.token not in position.top and not unlisted):
            wrong["others"] = position.token
    wrong |= {name: f"{tally}" for name, tally in tallies.items() if tally.chance < CHANCE}
    return [
        Fact(_PROMISED, "others", f"{about}, {name}", evidence=f"{evidence}: {which}")
        for name, which in wrong.items()
    ]


def _repeated(alone: Samples, samples: Samples) -> list[Fact]:
    """What is wrong where more than half of the samples of a seed are not those it gave alone."""
    pairs = [(a.token, b.token) for (a,), (b,) in zip(samples, alone * len(samples), strict=False)]
    others = [f"{a} in place of {b}" for a, b in pairs if a != b]
    if 2 * len(others) <= len(pairs):
        return []
    evidence = f"{len(others)} of {len(pairs)}, {others[0]}"
    return [Fact("the samples that the seed gave alone", "others", "seed", evidence=evidence)]


def _id(token: str) -> int:
    return int(token.rpartition(":")[2])


# Chats: a server reads their parameters in another place. Each token is a sample of its place.

#: Tokens of a chat, and how many are listed at each place. Low temperatures keep harmony's form.
_TOKENS, _LISTED = 12, 20
#: Chats that are asked for at a time, and at most.
_CHATS, _MOST_CHATS = 12, 480
#: Of these, so many are under way at once.
_CHATS_AT_ONCE = 8
#: Temperatures that are off by half; and the chance of calling a right server wrong is 1 in 20,000.
_OFF, _WRONG = (1.5, 1 / 1.5), promised.WRONG + math.log(10.0)
#: Of each parameter what its value is drawn from.
_VALUES: dict[str, tuple[float, ...]] = {
    "temperature": (0.6, 0.62, 0.65, 0.67, 0.7), "top_p": (0.4, 0.45, 0.5, 0.55, 0.6),
    "top_k": (1, 2), "min_p": (0.3, 0.4, 0.5, 0.6),
}  # fmt: skip


def chats_obey(sampler: Sampler, name: Cut | Literal["temperature"]) -> None:
    """Compare tokens of chats, sampled with a drawn value, with what the value promises.

    Args:
        sampler: Draws the value; its greedy chats choose the text that tells most.
        name: The parameter. Its alternative is a temperature that is off by half, or no cut at all.

    Raises:
        Unmet: The alternative is likelier.
        NotRun: Not decided after `_MOST_CHATS` chats, or the engine does not know the parameter.
    """
    if name in ("top_k", "min_p"):
        sampler.api.capabilities.require(name)
    drawn = random.Random(f"{sampler.seed} {name} of chats")
    value, sums = drawn.choice(_VALUES[name]), [0.0, 0.0]

    def odds(token: str, top: Top) -> list[float]:
        """Logarithms of how much likelier other values make a token."""
        if name == "temperature":
            return [promised.log_ratio(top, token, value, f) if token in top else 0.0 for f in _OFF]
        dropped = promised.remaining(top, name, value)[1]
        remaining = 1.0 - min(sum(math.exp(top[other]) for other in dropped), 0.99)
        return [math.inf if token in dropped else math.log(remaining)] * 2

    ratios = [sum(odds(*place)[0] for place in chat) for chat in sampler.greedy_chats]
    text = TEXTS[ratios.index(min(ratios))]
    for token, top in _sampled_places(sampler.api, text, {"temperature": 1.0, name: value}):
        sums = [a + b for a, b in zip(sums, odds(token, top), strict=True)]
        evidence = f"{value:g}, {token}; logarithms of how much likelier by others: {sums}"
        evidence += f"; seed {sampler.seed}; {promised.FALSE_ALARMS:g} false alarms a run"
        required = "samples as the log-probabilities of chats promise"
        require(max(sums) < _WRONG, required, "others", f"{name} of chats", evidence=evidence)
        if max(sums) <= promised.RIGHT:
            return
    raise NotRun(f"{_MOST_CHATS} chats do not tell whether {name} is obeyed")


def _sampled_places(api: Api, text: str, options: Json) -> Iterator[Place]:
    """The places of sampled chats, a batch after the other."""
    for _ in range(0, _MOST_CHATS, _CHATS):
        batch = [options] * _CHATS
        ask = functools.partial(_places_of, api, text)
        for places in together(ask, batch, at_once=_CHATS_AT_ONCE):
            yield from places


def _places_of(api: Api, text: str, options: Json) -> list[Place]:
    """The places of a chat."""
    can = api.capabilities.can
    api.capabilities.require("chat_logprobs", "chat_token_ids", "top_logprobs_20")
    body = {name: value for name, (ability, value) in NEUTRAL.items() if can(ability)}
    body |= {"max_tokens": _TOKENS, "logprobs": True, "top_logprobs": _LISTED, "top_p": 1.0}
    body["ignore_eos"] = False  # true is an error of chats in vLLM (vllm#50690)
    positions = parse(api.send_chat(text, **body | options)).positions
    require(positions, "log-probabilities of a chat")
    bare = sum(not position.top for position in positions or ())
    require(not bare, "alternatives listed with each token of a chat", f"{bare} have none")
    # Whichever token was drawn is listed, and may stand in the place of the last one.
    tops = [nlargest(_LISTED - 1, p.top.items(), itemgetter(1)) for p in positions or ()]
    return [(p.token, dict(top)) for p, top in zip(positions or (), tops, strict=True)]
