"""Compare sampled completions with the log-probabilities that the server reports.

Each parameter is checked with a middle value, and with a value that each run draws anew. For each
value, the samples follow the text for which the fewest samples are sufficient. Their number is
sufficient to detect a value that is off by a tenth.
"""

import functools
import math
import random
from dataclasses import dataclass, field
from typing import NamedTuple

from sm121.answers import expected_samples
from sm121.answers.expected_samples import CHANCE, Cut, Split, Top
from sm121.api import sample_source
from sm121.api.client import Api, Json
from sm121.api.cuts import CutCase, find_cuts
from sm121.api.penalties import Penalties
from sm121.api.sample_comparison import (
    PROMISED,
    Rule,
    SampleCase,
    allow_all,
    compare_repeated,
    compare_samples,
)
from sm121.api.sample_source import TEXTS, Samples, SampleSource, id_of
from sm121.api.sampled_chats import ChatSamples, Parameter
from sm121.client.completion_json import Position
from sm121.core.unmet import Fact, require_each
from sm121.core.verdict import NotRun
from sm121.engines.capabilities import Name

#: Number of samples per request of `Sampler.far`.
_FAR = 24
#: The number of texts after which samples with a seed are taken. They are the texts with the
#: flattest distributions.
_FLAT = 10
#: The ranges from which `Sampler.far` draws its values.
_FAR_TEMPERATURE = (0.35, 0.5)
_FAR_TOP_P = (0.4, 0.6)


class _TemperatureCase(NamedTuple):
    """The samples of one temperature after one text."""

    kind: str
    value: float
    text: str
    samples: Samples


@dataclass
class Sampler:
    """Checks one server's samples. Each check raises `Unmet` with all deviations.

    Args:
        api: The API of the server.
        seed: The seed of the drawn values.
    """

    api: Api
    seed: int
    source: SampleSource = field(init=False)
    _penalties: Penalties = field(init=False)
    _chats: ChatSamples = field(init=False)

    def __post_init__(self) -> None:
        self.source = SampleSource(self.api, self.seed)
        self._penalties = Penalties(self.source)
        self._chats = ChatSamples(self.api, self.seed)

    def follows_the_temperature(self) -> None:
        """Require that the samples follow two requested temperatures.

        Samples are requested until a sequential test decides whether both temperatures are off by a
        common factor. In addition, the frequency of each of the likeliest tokens is compared.

        Raises:
            Unmet: The samples follow another temperature.
            NotRun: The maximum number of samples is not sufficient for a decision.
        """
        cases = []
        tops = self.source.tops
        for kind, value in self.source.values("temperature"):
            text = max(tops, key=lambda text: expected_samples.evidence(tops[text], value))
            cases.append(_TemperatureCase(kind, value, text, []))
        ratios = self._sample_until_decided(cases)
        facts = []
        if max(ratios.values()) > 0:
            evidence = (
                f"log-likelihood ratios if both temperatures are wrong by the same factor: {ratios}"
            )
            facts.append(Fact("samples that follow both temperatures", "others", evidence=evidence))
        for kind, value, text, samples in cases:
            about = f"temperature, {kind}"
            evidence = f"{value:g} after {text!r}"
            facts += compare_samples(about, samples, allow_all, evidence, value)
        self.source.require_none(facts)

    def _sample_until_decided(self, cases: list[_TemperatureCase]) -> dict[float, float]:
        """Add samples to the cases until the temperatures are decided.

        Returns the log-likelihood ratio of all samples for each factor of the temperatures.
        """
        ratios = dict.fromkeys(expected_samples.OFF, 0.0)
        batch = sample_source.BATCH
        while expected_samples.RIGHT < max(ratios.values()) < expected_samples.WRONG:
            if 2 * len(cases[0].samples) >= sample_source.MOST:
                raise NotRun(
                    "no prompt of the suite can detect a temperature that is wrong by 10 %"
                )
            for case in cases:
                more = self.source.ask([case.text] * batch, {"temperature": case.value})
                case.samples.extend(more)
                for (position,) in more:
                    if position.token not in position.top:
                        continue
                    for factor in ratios:
                        ratios[factor] += expected_samples.log_ratio(
                            position.top, position.token, case.value, factor
                        )
        return ratios

    def keeps_the_cut(self, cut: Cut) -> None:
        """Require that removed tokens are never drawn, and others with their probabilities.

        Args:
            cut: ``top_p``, ``top_k`` or ``min_p``.

        Raises:
            Unmet: A removed token was drawn, or a kept token was drawn too often or too seldom.
            NotRun: The engine does not support the parameter, or no text is suitable for the check.
        """
        if cut != "top_p":
            self.api.capabilities.require(cut)
        facts = []
        for kind, case in self.find_cuts(cut).items():
            rule = functools.partial(expected_samples.remaining, cut=cut, value=case.value)
            samples = self.source.ask([case.text] * case.samples, {cut: case.value})
            evidence = f"{case.value:g} after {case.text!r}"
            facts += compare_samples(
                f"{cut}, {kind}", samples, rule, evidence, edge=case.edge, unlisted=False
            )
        self.source.require_none(facts)

    def find_cuts(self, cut: Cut) -> dict[str, CutCase]:
        """Return the cases of a truncation parameter; see `cuts.find_cuts`.

        Args:
            cut: ``top_p``, ``top_k`` or ``min_p``.

        Raises:
            NotRun: No text is suitable for the check.
        """
        return find_cuts(self.source.tops, cut, self.seed)

    def restricts(self, name: Name) -> None:
        """Require that samples contain no `bad_words`, or only `allowed_token_ids`.

        For `bad_words`, the likeliest word is banned. For `allowed_token_ids`, each of five allowed
        tokens must be drawn with its probability.

        Args:
            name: The parameter.

        Raises:
            Unmet: A forbidden token was drawn, or an allowed token was drawn too often or too
                seldom.
            NotRun: The engine does not support the parameter.
        """
        self.api.capabilities.require(name, "logprob_ids")
        words = {}
        for choice in self.api.complete(list(TEXTS), max_tokens=1)["choices"]:
            words[TEXTS[choice["index"]]] = choice["text"]
        text = max((text for text, word in words.items() if word.strip()), key=self._certainty)
        top = self.source.tops[text]
        ranked = sorted(top, key=lambda token: -top[token])
        allowed: set[str] = set()
        banned = {ranked[0]}
        option: list[str] | list[int] = [words[text]]
        if name == "allowed_token_ids":
            allowed = set(ranked[1:10:2])
            banned = top.keys() - allowed
            option = [id_of(token) for token in allowed]

        def rule(top: Top) -> Split:
            return Split(allowed & top.keys(), banned)

        count = math.ceil(sample_source.FEW / math.exp(top[ranked[0]]))
        samples = self.source.ask([text] * min(count, sample_source.MOST), {name: option})
        evidence = f"{option} after {text!r}"
        unlisted = name == "bad_words"
        facts = compare_samples(name, samples, rule, evidence, unlisted=unlisted)
        self.source.require_none(facts)

    def _certainty(self, text: str) -> float:
        """Return the log-probability of the likeliest token after a text."""
        top = self.source.tops[text]
        return top[expected_samples.likeliest(top)]

    def penalises(self, name: str) -> None:
        """Require that a penalty has the requested value. An error of a tenth is detected.

        Args:
            name: ``presence_penalty``, ``frequency_penalty`` or ``repetition_penalty``.

        Raises:
            Unmet: The penalty has another value.
            NotRun: The engine does not support the parameter, or no text is suitable for the check.
        """
        divides = name == "repetition_penalty"
        self.api.capabilities.require("divided_bias" if divides else "penalties")
        self.api.capabilities.require("logprob_ids", "logit_bias", "token_ids")

        def compare(kind: str, value: float) -> None:
            if divides:
                comparisons = self._penalties.compare_divided(value, generated=kind == "drawn")
            else:
                comparisons = self._penalties.compare_subtracted(name, value)
            facts = []
            try:
                for about, tally in comparisons:
                    if 2 * tally.samples < sample_source.FEW or tally.chance < CHANCE:
                        evidence = f"{value:g} {about}: {tally}"
                        fact = Fact(PROMISED, "others", f"{name}, {kind}", evidence=evidence)
                        facts.append(fact)
            except NotRun:
                if not facts:
                    raise
            self.source.require_none(facts)

        require_each(compare, *zip(*self.source.values(name), strict=True))

    def far(self) -> dict[str, SampleCase]:
        """Return requests whose samples show, even if they are few, that a parameter is ignored.

        The parameters are a temperature, a `top_p` and a seed. The temperature and the `top_p` are
        far from 1, and each is used with the text for which the fewest samples are sufficient. With
        the seed, most samples must be equal to earlier samples with the same seed. A case that
        already fails without other load is left out, because the check of its parameter reports the
        failure.

        Returns:
            The cases; the keys are the names of the parameters.
        """
        drawn = random.Random(f"{self.seed} far")
        temperature = round(drawn.uniform(*_FAR_TEMPERATURE), 3)
        top_p = round(drawn.uniform(*_FAR_TOP_P), 3)
        cases = {"temperature": self._far_temperature(temperature)}
        of_top_p = self._far_top_p(top_p)
        if of_top_p is not None:
            cases["top_p"] = of_top_p
        if self.api.capabilities.can("seed"):
            cases["seed"] = self._repeated_seed()
        right = {}
        for name, case in cases.items():
            samples = self.source.ask(case.texts * 2, case.options)
            if not case.judge(samples):
                right[name] = case
        return right

    def _far_temperature(self, temperature: float) -> SampleCase:
        tops = self.source.tops
        neutral = 1 / temperature
        text = max(
            tops, key=lambda text: expected_samples.evidence(tops[text], temperature, neutral)
        )
        compare = functools.partial(
            compare_samples,
            "temperature",
            rule=allow_all,
            evidence=f"{temperature:g} after {text!r}",
            temperature=temperature,
        )
        return SampleCase([text] * _FAR, {"temperature": temperature}, compare)

    def _far_top_p(self, top_p: float) -> SampleCase | None:
        """Return the case for ``top_p``, with the text after which it removes the most probability.

        Return None if ``top_p`` removes no token after any of the texts.
        """
        rule: Rule = functools.partial(expected_samples.remaining, cut="top_p", value=top_p)
        beyond = {}
        for text, top in self.source.tops.items():
            beyond[text] = sum(math.exp(top[token]) for token in rule(top).dropped)
        text = max(beyond, key=lambda text: beyond[text])
        if not beyond[text]:
            return None
        compare = functools.partial(
            compare_samples,
            "top_p",
            rule=rule,
            evidence=f"{top_p:g} after {text!r}",
            unlisted=False,
        )
        return SampleCase([text] * _FAR, {"top_p": top_p}, compare)

    def _repeated_seed(self) -> SampleCase:
        """Return the case for a seed, with the texts after which samples vary most."""
        alike = {}
        for text, top in self.source.tops.items():
            alike[text] = sum(math.exp(2 * log) for log in top.values())
        texts = sorted(alike, key=lambda text: alike[text])[:_FLAT]
        options = {"seed": self.seed}
        alone = self.source.ask(texts, options)
        return SampleCase(texts, options, functools.partial(compare_repeated, alone))

    def chats_obey(self, name: Parameter) -> None:
        """Require that sampled chats obey a parameter, as in `ChatSamples.obey`.

        Args:
            name: The parameter.

        Raises:
            Unmet: The samples contradict the parameter.
            NotRun: The chats are too few for a decision, or the engine lacks the parameter.
        """
        self._chats.obey(name)

    def body(self, options: Json) -> Json:
        """Return the body of a request, as in `SampleSource.body`.

        Args:
            options: Fields of the body. The keys of ``logit_bias`` are names of tokens.

        Raises:
            NotRun: The engine sends no log-probabilities, or accepts no lists of prompts.
        """
        return self.source.body(options)

    def sample(self, positions: tuple[Position, ...]) -> tuple[Position, ...]:
        """Return the tokens of a sample, as in `SampleSource.sample`.

        Args:
            positions: The tokens of a sample, with the likeliest tokens that the engine listed.
        """
        return self.source.sample(positions)
