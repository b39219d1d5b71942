"""What log-probabilities promise of samples, and how far the samples of a right server may be off.
The log-probabilities of an answer are the model's (vLLM: ``raw_logprobs``). What the parameters of
a request make of them is computed here, among the tokens that are listed at a position."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sm121.core.unmet import require

#: The chance that a right server is called wrong in a run: half by the temperature, the rest
#: shared by so many other comparisons.
FALSE_ALARMS, COMPARISONS = 1e-3, 64
TEMPERATURE_CHANCE = FALSE_ALARMS / 2
CHANCE = TEMPERATURE_CHANCE / COMPARISONS
#: The relative error of a parameter that is noticed, but for one run of 100; and temperatures that
#: are off by it. How much likelier one makes the samples, as a logarithm, decides beyond these
#: bounds. Each chance is bounded at any time (Ville 1939), so samples are taken until it does.
ERROR, MISSED = 0.1, 0.01
OFF = (1 + ERROR, 1 / (1 + ERROR))
RIGHT, WRONG = math.log(MISSED), math.log(2 / TEMPERATURE_CHANCE)
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


def likeliest(top: Top) -> str:
    """The likeliest listed token. Raises Unmet where the answer lists none."""
    require(top, "alternatives listed at each place", "none")
    return max(top, key=lambda token: top[token])


def log_ratio(top: Top, token: str, temperature: float, factor: float) -> float:
    """The logarithm of how much likelier a token is at that temperature times a factor."""
    most = top[likeliest(top)]
    total, wrong = (
        sum(math.exp((log - most) / each) for log in top.values())
        for each in (temperature, temperature * factor)
    )
    return (top[token] - most) * (1 / factor - 1) / temperature + math.log(total / wrong)


def evidence(top: Top, temperature: float, factor: float = OFF[0]) -> float:
    """What a right sample tells against a temperature that is off, in nats: a divergence."""
    probable = shares(top, temperature).items()
    return -sum(share * log_ratio(top, token, temperature, factor) for token, share in probable)


def remaining(top: Top, cut: Cut, value: float) -> tuple[set[str], set[str]]:
    """The listed tokens that remain at temperature 1, and those that are cut off. Of others a tie
    decides, which engines break as they like, or rounding. Raises Unmet where none is listed."""
    best = likeliest(top)
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


def allowed(variance: float, chance: float) -> float:
    """How far a number of hits may be from what is expected but for a chance (Freedman 1975: the
    differences are a martingale's, of that variance in all, and none is above 1)."""
    bits = math.log(2.0 / chance)
    return bits / 3 + math.sqrt((bits / 3) ** 2 + 2 * bits * variance)


def chance_of(hits: float, expected: float, samples: int) -> float:
    """A bound of twice the chance of so many hits and further ones (Hoeffding 1963, theorem 1)."""
    share, mean = hits / samples, min(max(expected / samples, 1e-12), 1 - 1e-12)
    pairs = ((share, mean), (1 - share, 1 - mean))
    divergence = sum(part * math.log(part / other) for part, other in pairs if part)
    return min(1.0, 2 * math.exp(-samples * divergence))


@dataclass
class Tally:
    """The hits among samples, and how many are promised."""

    hits: int = 0
    expected: float = 0.0
    variance: float = 0.0
    samples: int = 0

    def add(self, hit: bool, share: float) -> None:
        """One sample that is a hit with that probability."""
        self.hits += hit
        self.expected += share
        self.variance += share * (1 - share)
        self.samples += 1

    @property
    def chance(self) -> float:
        """See `chance_of`."""
        return chance_of(self.hits, self.expected, self.samples) if self.samples else 1.0

    def __str__(self) -> str:
        return f"{self.hits} in {self.samples}, {self.expected:.1f} expected"
