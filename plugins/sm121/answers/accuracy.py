"""The share of answers that are right, and where it lies with 95 % confidence."""

from dataclasses import dataclass

from sm121.core.unmet import Fact, Unmet
from sm121.core.verdict import Inconclusive


@dataclass(frozen=True)
class Interval:
    """A share and where it lies with 95 % confidence."""

    right: int
    total: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Right of all."""
        return self.right / self.total

    def hold(self, at_least: float, fact: Fact) -> None:
        """Go on only if the whole interval is at or above. Raises Unmet: it is below; Inconclusive:
        the bound is in it."""
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
    """Wilson's score interval (Wilson 1927) of the share that is right. Raises ValueError: there
    are no answers."""
    from scipy import stats  # half a second, which a run without questions need not spend

    bounds = stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
    return Interval(right, n, float(bounds.low), float(bounds.high))
