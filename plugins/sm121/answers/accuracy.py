"""The fraction of correct answers, with its confidence interval."""

from dataclasses import dataclass

from sm121.core.unmet import Fact, Unmet
from sm121.core.verdict import Inconclusive

#: The confidence of an interval.
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """The fraction of correct answers, with its 95 % confidence interval."""

    right: int
    total: int
    #: The bounds of the interval, as fractions.
    low: float
    high: float

    @property
    def share(self) -> float:
        """The fraction of correct answers."""
        return self.right / self.total

    def hold(self, at_least: float, fact: Fact) -> None:
        """Raise an error unless the whole interval is at or above a bound.

        Args:
            at_least: The bound.
            fact: The requirement that the error reports as failed.

        Raises:
            Unmet: The interval is below the bound.
            Inconclusive: The bound is inside the interval.
        """
        if self.high < at_least:
            raise Unmet(fact)
        if self.low < at_least:
            raise Inconclusive(fact)

    def __str__(self) -> str:
        return (
            f"{self.right} of {self.total} right: {self.share:.1%}, "
            f"95 % interval {self.low:.1%} to {self.high:.1%}"
        )


def interval_of(right: int, n: int) -> Interval:
    """Return the fraction of correct answers with its score interval (Wilson 1927).

    Args:
        right: The number of right answers.
        n: The number of all answers.

    Raises:
        ValueError: There are no answers.
    """
    from scipy import stats  # imported here, because importing SciPy takes 0.5 s

    bounds = stats.binomtest(right, n).proportion_ci(_CONFIDENCE, method="wilson")
    return Interval(right, n, float(bounds.low), float(bounds.high))
