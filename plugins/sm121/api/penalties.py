"""Compare penalised samples with the frequencies that a penalty should cause.

A bias on two tokens makes all other tokens impossible, and compensates for the penalty, except for
5 % of it. This remainder decides which of the two tokens is likelier, so that a penalty that is off
by a tenth is detected.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sm121.answers.expected_samples import Tally, Top, shares
from sm121.api.sample_source import COLD, FEW, FORCED, HIGH, LOW, RANGES, SampleSource
from sm121.client.completion_json import Position
from sm121.core.unmet import require
from sm121.core.verdict import NotRun

#: The fractions of a penalty for which the bias does not compensate.
_REMAINDERS = (-0.05, 0.05)
#: A penalty larger than any difference of log-probabilities, in nats.
_LARGEST = 100.0
#: The precision of the measured bias with which two tokens are equally likely, in nats.
_PRECISION = 0.1
#: By how much a token must be likelier before it is penalised than after, in nats.
_MARGIN = 1


class PenaltyComparison(NamedTuple):
    """How often the penalised token was drawn, with a bias that leaves a part of the penalty."""

    about: str
    tally: Tally


@dataclass(frozen=True)
class Pair:
    """A text, and two tokens. Each sample after the text is one of the two tokens."""

    text: str
    #: The penalised token.
    token: str
    other: str
    #: The likeliest tokens after the penalised token was generated.
    top: Top


@dataclass
class Penalties:
    """Comparisons of the penalties of one server.

    Args:
        source: The samples of the server.
    """

    source: SampleSource
    _pairs: dict[str, Pair] = field(default_factory=dict)

    def compare_subtracted(self, name: str, value: float) -> Iterator[PenaltyComparison]:
        """Compare a token that was generated twice with an unpenalised token of the prompt.

        Args:
            name: ``presence_penalty`` or ``frequency_penalty``.
            value: The penalty.

        Yields:
            The comparison of each remainder.

        Raises:
            NotRun: No text has two suitable tokens, or the log-probabilities are too noisy.
        """
        times = 2 if name == "frequency_penalty" else 1
        least = RANGES[name].low
        if name not in self._pairs:
            penalties = [0.0, least, times * least]
            pair = self._find_pair(penalties, token_in_prompt=False, other_in_prompt=True)
            self._pairs[name] = pair
        pair = self._pairs[name]
        penalty = times * value
        even = pair.top[pair.other] + penalty - pair.top[pair.token]
        sides = set()
        for remainder in _REMAINDERS:
            bias = {pair.token: LOW + even + remainder * penalty, pair.other: LOW}
            options = {"temperature": COLD, name: value, "logit_bias": bias, "max_tokens": 3}
            tally = Tally()
            for sample in self.source.ask([pair.text] * FEW, options):
                _count_subtracted(tally, sample, pair, bias, penalty)
            sides.add(2 * tally.expected > tally.samples)
            yield PenaltyComparison(f"after {pair.text!r}, {pair.token} twice", tally)
        if len(sides) < 2:
            raise NotRun(
                "the server's log-probabilities differ between requests by as much as "
                "the error that this check must detect (5 % of the penalty)"
            )

    def compare_divided(self, value: float, *, generated: bool) -> Iterator[PenaltyComparison]:
        """Compare a penalised token with a token that is neither in the prompt nor in the answer.

        A repetition penalty divides the logit, which servers do not return. Therefore the bias of
        the other token that compensates for the penalty is measured while the penalised token has
        the bias `LOW`. From this, the compensating bias is computed for the bias `HIGH`, with which
        the samples are drawn.

        Args:
            value: The repetition penalty.
            generated: Whether the penalised token was generated. If false, it is in the prompt.

        Yields:
            The comparison of each remainder.

        Raises:
            NotRun: No text has two suitable tokens.
        """
        penalties = [0.0, _LARGEST] if generated else [0.0]
        pair = self._find_pair(penalties, token_in_prompt=not generated, other_in_prompt=False)

        def draw(count: int, temperature: float, bias: float, other_bias: float) -> list[bool]:
            """Return, for each sample, whether it is the penalised token."""
            options = {
                "temperature": temperature,
                "repetition_penalty": value,
                "max_tokens": len(penalties),
                "logit_bias": {pair.token: bias, pair.other: other_bias},
            }
            samples = self.source.ask([pair.text] * count, options)
            return [_tokens(sample) == {pair.token} for sample in samples]

        low = 0.0
        high = 100.0
        while high - low > _PRECISION:
            half = (low + high) / 2
            if all(draw(1, 0.0, LOW, half)):
                low = half
            else:
                high = half
        for remainder in _REMAINDERS:
            even = low + (HIGH - LOW) / (1 + remainder) / value
            tally = Tally()
            for hit in draw(FEW, COLD, HIGH, even):
                tally.add(hit, float(remainder > 0))
            yield PenaltyComparison(f"after {pair.text!r}, {pair.token}", tally)

    def _find_pair(
        self, penalties: list[float], *, token_in_prompt: bool, other_in_prompt: bool
    ) -> Pair:
        """Find a text and two tokens for a comparison.

        With a bias on both tokens, the penalised token must be generated at every position except
        the last one, where both tokens are possible. `penalties` are the penalties of this token
        at the positions of an answer.
        """
        tops = self.source.tops
        prompts = self.source.prompts
        listed = Counter[str]()
        for top in tops.values():
            listed.update(top.keys())
        for token, _ in listed.most_common(FEW):
            texts = []
            for text, top in tops.items():
                if token in top and (token in prompts[text]) == token_in_prompt:
                    texts.append(text)
            bias = {token: FORCED}
            options = {"temperature": 0.0, "max_tokens": len(penalties), "logit_bias": bias}
            answers = self.source.ask(texts, options)
            for text, answer in zip(texts, answers, strict=True):
                observed = _tokens(answer)
                require(observed == {token}, token, observed, f"logit_bias of {FORCED:g}")
                last = answer[-1].top
                if token not in last:
                    continue
                for other in last.keys() - {token}:
                    fits = (other in prompts[text]) == other_in_prompt
                    if fits and _is_sure(answer, other, penalties):
                        return Pair(text, token, other, last)
        raise NotRun(
            "no prompt of the suite has two likely next tokens, which the check of a penalty needs"
        )


def _tokens(sample: tuple[Position, ...]) -> set[str]:
    return {position.token for position in sample}


def _is_sure(answer: tuple[Position, ...], other: str, penalties: list[float]) -> bool:
    """Return whether two tokens can compete at the last position without competing before it.

    This is true if a bias that makes both tokens equally likely at the last position leaves the
    answer's token much likelier at all earlier positions.
    """
    margins = []
    for position, penalty in zip(answer, penalties, strict=True):
        of_other = position.top.get(other, min(position.top.values()))
        margins.append(position.log_probability - of_other - penalty)
    return min(margins[:-1], default=math.inf) > margins[-1] + _MARGIN


def _count_subtracted(
    tally: Tally, sample: tuple[Position, ...], pair: Pair, bias: dict[str, float], penalty: float
) -> None:
    """Add the last token of a sample to a tally.

    A sample is left out if one of its earlier tokens is not the penalised token.
    """
    *before, last = sample
    reported = {**pair.top, **last.top, last.token: last.log_probability}
    logits = {token: reported[token] + bias[token] for token in bias}
    logits[pair.token] -= penalty
    if {position.token for position in before} == {pair.token}:
        tally.add(last.token == pair.token, shares(logits, COLD)[pair.token])
