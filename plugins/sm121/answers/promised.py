"""What log-probabilities promise of samples, and how far the samples of a right server may be off.

The log-probabilities of an answer are the model's (vLLM: ``raw_logprobs``). What the parameters of
a request make of them is computed here, among the tokens that are listed at a position.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

#: The chance that a right server is called wrong in a run: half by the temperature, which takes the
#: most samples, the rest shared by so many other comparisons.
FALSE_ALARMS, COMPARISONS = 1e-3, 64
TEMPERATURE_CHANCE = FALSE_ALARMS / 2
CHANCE = TEMPERATURE_CHANCE / COMPARISONS
#: The relative error of a parameter that 99 of 100 runs notice, and so many deviations of chance.
ERROR, _QUANTILE = 0.1, 2.7
#: What two evaluations of one softmax in float32 may differ by, in nats or relatively.
_ROUNDING = 2e-3

Cut = Literal["top_p", "top_k", "min_p"]
#: The listed tokens of a place with their log-probabilities in nats.
Top = Mapping[str, float]


def shares(top: Top, temperature: float = 1.0) -> dict[str, float]:
    """How probable each of some tokens is among them."""
    most = max(top.values(), default=0.0)
    weights = {token: math.exp((log - most) / temperature) for token, log in top.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def scores(top: Top, temperature: float) -> dict[str, tuple[float, float]]:
    """How probable each token is, and its log-probability over the temperature less their mean."""
    probable = shares(top, temperature)
    mean = sum(share * top[token] for token, share in probable.items())
    return {token: (share, (top[token] - mean) / temperature) for token, share in probable.items()}


def information(top: Top, temperature: float) -> float:
    """What one sample tells of the temperature: the variance of its score."""
    return sum(share * score**2 for share, score in scores(top, temperature).values())


def information_needed(step: float) -> float:
    """Of all samples, so that a temperature off by `ERROR` is noticed; step: the largest score."""
    total, effect = 100.0, 1 - 1 / (1 + ERROR)
    while effect * total < allowed(total, step, TEMPERATURE_CHANCE) + _QUANTILE * math.sqrt(total):
        total *= 1.02
    return total


def remaining(top: Top, cut: Cut, value: float) -> tuple[set[str], set[str]]:
    """The listed tokens that remain at temperature 1, and those that are cut off. Of others a tie
    decides, which engines break as they like, or rounding."""
    best = max(top, key=lambda token: top[token])
    remaining, dropped = {best}, set()
    for token, log in top.items():
        before = [other for other in top.values() if other > log + _ROUNDING]
        tied = sum(abs(other - log) <= _ROUNDING for other in top.values()) - 1
        if cut == "min_p":
            least = most = value * math.exp(top[best] - log)
        elif cut == "top_k":
            least, most = (len(before) + 0.5) / value, (len(before) + tied + 0.5) / value
        else:
            mass = sum(map(math.exp, before))
            least, most = mass / value, (mass + tied * math.exp(log)) / value
        if most < 1 - _ROUNDING:
            remaining.add(token)
        elif least > 1 + _ROUNDING and token != best:
            dropped.add(token)
    return remaining, dropped


def allowed(variance: float, step: float, chance: float) -> float:
    """How far a sum over samples may be from what is expected but for a chance (Freedman 1975: the
    differences are a martingale's, of that variance in all, and none is above the step)."""
    bits = math.log(2.0 / chance)
    return bits * step / 3 + math.sqrt((bits * step / 3) ** 2 + 2 * bits * variance)


def chance_of(hits: float, expected: float, samples: int) -> float:
    """A bound of twice the chance of so many hits and further ones (Hoeffding 1963, theorem 1)."""
    share, mean = hits / samples, min(max(expected / samples, 1e-12), 1 - 1e-12)
    pairs = ((share, mean), (1 - share, 1 - mean))
    divergence = sum(part * math.log(part / other) for part, other in pairs if part)
    return min(1.0, 2 * math.exp(-samples * divergence))


@dataclass
class Tally:
    """The sum of a quantity over samples, such as 1 for a hit, and what is promised of it."""

    sum: float = 0.0
    expected: float = 0.0
    variance: float = 0.0
    samples: int = 0

    def add(self, value: float, options: Collection[tuple[float, float]]) -> None:
        """One sample, with the probability and the value of each that could come."""
        mean = sum(share * each for share, each in options)
        self.sum += value
        self.expected += mean
        self.variance += sum(share * (each - mean) ** 2 for share, each in options)
        self.samples += 1

    def add_hit(self, hit: bool, share: float) -> None:
        """One sample that is a hit with that probability."""
        self.add(float(hit), ((share, 1.0), (1 - share, 0.0)))

    @property
    def chance(self) -> float:
        """Of hits: `chance_of`."""
        return chance_of(self.sum, self.expected, self.samples) if self.samples else 1.0

    def __str__(self) -> str:
        return f"{self.sum:g} in {self.samples}, {self.expected:.1f} expected"
