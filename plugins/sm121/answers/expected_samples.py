"""Compute which samples to expect from log-probabilities, and how much they may deviate.

The log-probabilities in an answer are the model's (vLLM: ``raw_logprobs``). This module computes
the distribution that results from a request's sampling parameters, among the tokens that are listed
at a position.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sm121.core.unmet import require

#: The probability of a false alarm in a run, over all comparisons of samples. Half of it is spent
#: on the comparison of the temperature.
FALSE_ALARMS = 1e-3
TEMPERATURE_CHANCE = FALSE_ALARMS / 2
#: The number of comparisons other than that of the temperature. Each gets an equal part of the
#: other half of `FALSE_ALARMS`.
COMPARISONS = 64
CHANCE = TEMPERATURE_CHANCE / COMPARISONS
#: A relative error of the temperature of this size must be detected.
ERROR = 0.1
#: The probability that a temperature which is wrong by `ERROR` is not detected.
MISSED = 0.01
#: The factors by which a temperature with this error is too high or too low.
OFF = (1 + ERROR, 1 / (1 + ERROR))
#: The bounds for the log-likelihood ratio of a wrong temperature to the requested one. If the ratio
#: is below `RIGHT`, the temperature counts as correct; above `WRONG`, it counts as wrong. The error
#: probabilities are valid for any number of samples (Ville 1939), so sampling may continue until a
#: bound is reached.
RIGHT = math.log(MISSED)
WRONG = math.log(2 / TEMPERATURE_CHANCE)
#: Two computations of the same softmax in float32 differ by less than this: in nats for a
#: log-probability, or as a fraction of a probability.
_ROUNDING = 2e-3
#: The minimum expected fraction in `chance_of`, so that logarithms are finite.
_TINY = 1e-12

Cut = Literal["top_p", "top_k", "min_p"]
#: The listed tokens of a position with their log-probabilities in nats.
Top = Mapping[str, float]


class Split(NamedTuple):
    """The listed tokens that a truncation (top_p, top_k, min_p) keeps, and those it removes."""

    remaining: set[str]
    dropped: set[str]


def shares(top: Top, temperature: float = 1.0) -> dict[str, float]:
    """Return the probabilities of some tokens, normalised to a sum of 1.

    Args:
        top: The tokens' log-probabilities.
        temperature: The temperature.
    """
    highest = max(top.values(), default=0.0)
    weights = {token: math.exp((log - highest) / temperature) for token, log in top.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def likeliest(top: Top) -> str:
    """Return the likeliest listed token.

    Args:
        top: The listed tokens.

    Raises:
        Unmet: No token is listed.
    """
    require(top, "alternatives listed at each place", "none")
    return max(top, key=lambda token: top[token])


def log_ratio(top: Top, token: str, temperature: float, factor: float) -> float:
    """Return log(p / q): p is a token's probability at another temperature, q at the requested one.

    Args:
        top: The listed tokens.
        token: One of them.
        temperature: The temperature that was sent.
        factor: The other temperature divided by the sent one.
    """
    highest = top[likeliest(top)]
    total = sum(math.exp((log - highest) / temperature) for log in top.values())
    other = sum(math.exp((log - highest) / (temperature * factor)) for log in top.values())
    return (top[token] - highest) * (1 / factor - 1) / temperature + math.log(total / other)


def evidence(top: Top, temperature: float, factor: float = OFF[0]) -> float:
    """Return how much evidence a sample gives, on average, against another temperature.

    Args:
        top: The listed tokens.
        temperature: The temperature that was sent.
        factor: The other temperature divided by the sent one.

    Returns:
        The divergence in nats.
    """
    total = 0.0
    for token, share in shares(top, temperature).items():
        total -= share * log_ratio(top, token, temperature, factor)
    return total


def remaining(top: Top, cut: Cut, value: float) -> Split:
    """Apply a truncation to the listed tokens at temperature 1.

    A token is in neither set if only rounding decides whether it is kept, or if its probability
    equals that of a token on the other side of the cut (engines break such ties differently).

    Args:
        top: The listed tokens.
        cut: The name of the sampling parameter.
        value: The value of the parameter.

    Returns:
        The kept and the removed tokens.

    Raises:
        Unmet: No token is listed.
    """
    best = likeliest(top)
    kept = {best}
    dropped = set()
    for token, log in top.items():
        low, high = _cut_ratios(top, log, top[best], cut, value)
        if high < 1 - _ROUNDING:
            kept.add(token)
        elif low > 1 + _ROUNDING and token != best:
            dropped.add(token)
    return Split(kept, dropped)


class _Bounds(NamedTuple):
    low: float
    high: float


def _cut_ratios(top: Top, log: float, highest: float, cut: Cut, value: float) -> _Bounds:
    """Return bounds of a ratio that is below 1 if the truncation keeps a token.

    For ``top_k``, the ratio is the rank of the token divided by the parameter's value. For
    ``top_p``, it is the probability of all likelier tokens divided by the value. For ``min_p``, it
    is the threshold divided by the token's probability. The order of equally likely tokens is
    unknown: the high bound assumes that all of them rank before the token, and the low bound that
    none does.
    """
    if cut == "min_p":
        ratio = value * math.exp(highest - log)
        return _Bounds(ratio, ratio)
    before = [other for other in top.values() if other > log + _ROUNDING]
    tied = sum(abs(other - log) <= _ROUNDING for other in top.values()) - 1
    if cut == "top_k":
        return _Bounds((len(before) + 0.5) / value, (len(before) + tied + 0.5) / value)
    mass = sum(map(math.exp, before))
    return _Bounds(mass / value, (mass + tied * math.exp(log)) / value)


def allowed(variance: float, chance: float) -> float:
    """Return how far the number of hits (samples that are a given token) may be off.

    The bound is that for a martingale with steps of at most 1 (Freedman 1975).

    Args:
        variance: The sum of the samples' variances.
        chance: The probability that a correct server exceeds the bound.
    """
    bits = math.log(2.0 / chance)
    return bits / 3 + math.sqrt((bits / 3) ** 2 + 2 * bits * variance)


def chance_of(hits: float, expected: float, samples: int) -> float:
    """Return an upper bound of the probability of this number of hits or a more extreme one.

    This is twice the bound of Hoeffding 1963, theorem 1, because deviations in both directions
    count.

    Args:
        hits: The number of hits.
        expected: The expected number of hits.
        samples: The number of samples, at least 1.
    """
    share = hits / samples
    mean = min(max(expected / samples, _TINY), 1 - _TINY)
    divergence = 0.0
    for part, other in ((share, mean), (1 - share, 1 - mean)):
        if part:
            divergence += part * math.log(part / other)
    return min(1.0, 2 * math.exp(-samples * divergence))


@dataclass
class Tally:
    """How many samples are a given token (hits), and how many are expected to be."""

    hits: int = 0
    expected: float = 0.0
    #: The sum of the variances of the hits.
    variance: float = 0.0
    samples: int = 0

    def add(self, hit: bool, share: float) -> None:
        """Add one sample.

        Args:
            hit: Whether the sample is a hit.
            share: The probability of a hit.
        """
        self.hits += hit
        self.expected += share
        self.variance += share * (1 - share)
        self.samples += 1

    @property
    def chance(self) -> float:
        """The result of `chance_of`; 1 if there are no samples."""
        if not self.samples:
            return 1.0
        return chance_of(self.hits, self.expected, self.samples)

    def __str__(self) -> str:
        return f"{self.hits} of {self.samples}, {self.expected:.1f} expected"
