"""The pattern that a small mistake causes in the log-probabilities of fixed prompts."""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sm121.answers.oracle_file import OracleFile

#: The smallest effect of rounding on a log-probability, in nats, that changes the token's weight
#: much.
_NEGLIGIBLE = 0.01


@dataclass(frozen=True)
class Pattern:
    """The change of each token's log-probability that a small mistake causes.

    The share of the mistake in a server's log-probabilities is fitted by least squares. It is 0 for
    the intact model and 1 for the model with the mistake. Mistakes with an effect below that of
    rounding can be detected, because the two effects are hardly correlated. The weight of a token
    is the inverse of the squared effect of rounding on its log-probability.
    """

    #: The log-probabilities of the intact model.
    right: tuple[float, ...]
    #: The changes that the mistake causes.
    mistake: tuple[float, ...]
    #: The weighting of each token; empty if the engine does not round.
    weights: tuple[float, ...]

    @classmethod
    def of(cls, file: OracleFile, mistake: str, rounding: str | None) -> "Pattern":
        """Return how a mistake, or another rounding, changes the log-probabilities.

        Args:
            file: The oracle's file.
            mistake: The name in `OracleFile.mistakes` or `OracleFile.other_roundings`.
            rounding: The rounding of the engine; None if it does not round.
        """
        with_mistake = {**file.mistakes, **file.other_roundings}[mistake]
        right: list[float] = []
        for name in with_mistake:
            right += file.prompts[name].following

        def changes(values: Mapping[str, Sequence[float]]) -> tuple[float, ...]:
            other = itertools.chain.from_iterable(values[name] for name in with_mistake)
            return tuple(b - a for a, b in zip(right, other, strict=True))

        weights: list[float] = []
        if rounding is not None:
            roundings = [values for way, values in file.rounded.items() if way != "float32"]
            for errors in zip(*map(changes, roundings), strict=True):
                # The factor is 2 / n instead of 1 / n: with only one computed rounding, the noise
                # is less certain, and is therefore assumed to be twice as large as with two.
                noise = 2 / len(roundings) * sum(error * error for error in errors)
                weights.append(1 / (noise + _NEGLIGIBLE**2))
        return cls(tuple(right), changes(with_mistake), tuple(weights))

    def _product(self, values: Iterable[float]) -> float:
        """Return the weighted scalar product of some values with the mistake's changes."""
        weights = self.weights or itertools.repeat(1.0)
        return math.fsum(w * m * v for w, m, v in zip(weights, self.mistake, values, strict=False))

    @functools.cached_property
    def size(self) -> float:
        """The weighted sum of the squared changes."""
        return self._product(self.mistake)

    def share(self, observed: Sequence[float]) -> float:
        """Return the fitted share of the mistake in a server's log-probabilities.

        Args:
            observed: The log-probabilities of the pattern's tokens.

        Raises:
            ValueError: The mistake does not change any log-probability of these prompts.
        """
        if not self.size > 0.0:
            raise ValueError("this mistake changes nothing on these prompts")
        changes = [b - a for a, b in zip(self.right, observed, strict=True)]
        return self._product(changes) / self.size

    def noise(self) -> float:
        """Return the standard deviation of the fitted share if the only error is rounding.

        The result is infinite if the mistake changes nothing, and 0 if the engine does not round.
        """
        if not self.size > 0.0:
            return math.inf
        return 1 / math.sqrt(self.size) if self.weights else 0.0
