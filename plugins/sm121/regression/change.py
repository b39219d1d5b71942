"""The change of one metric: from A to B, or from stored or trusted runs to this run.

A higher price of rounding (loss of accuracy by lower precision) is a regression even if the server
got faster, unless the profile allows it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sm121.core.level_settings import PRICES, Regression
from sm121.core.metric_name import without_depth
from sm121.core.numbers import number
from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.measure import statistics
from sm121.run.stored_run import StoredMetric
from sm121.run.verdict_file import ChangeReport


@dataclass(frozen=True)
class Change:
    """A metric before (A) and now (B), and the verdict on the change.

    The verdict is PASS if the change is no regression, and NOT_RUN if it was not judged.
    """

    metric: str
    unit: str
    higher_is_better: bool
    #: The value before. None in a file means infinite, for example after a failed request.
    a: float | None
    #: The value now. None in a file means infinite.
    b: float | None
    #: B / A; None if a value is not a positive number.
    ratio: float | None = None
    #: The bounds of the ratio's 95 % interval; None without an interval.
    ci_low: float | None = None
    ci_high: float | None = None
    #: The number of runs, or of pairs of starts, from which A was computed.
    pairs: int = 1
    #: How much worse B may be: as a fraction, or in ``unit`` if `difference` is set. None if there
    #: is no limit.
    allowed: float | None = None
    verdict: Verdict = Verdict.NOT_RUN
    #: The comparison in words, without the name of the metric.
    words: str = ""
    #: A remark for the reader of the report.
    note: str = ""
    #: How much worse B is, in ``unit``, for a metric that is not judged by its ratio.
    difference: float | None = None
    #: Whether an INCONCLUSIVE loss may be noise: the samples do not show it, or it is within the
    #: scatter of the stored runs.
    may_be_noise: bool = False

    @property
    def text(self) -> str:
        """The comparison in words."""
        return f"{self.metric}: {self.words}"

    @property
    def holds(self) -> bool:
        """Whether the change is no regression, or was not judged."""
        return self.verdict in (Verdict.PASS, Verdict.NOT_RUN)

    @property
    def is_measured_loss(self) -> bool:
        """Whether B is worse by more than the noise, even if one slow start may explain it."""
        return not self.holds and not self.may_be_noise

    @property
    def decided(self) -> bool:
        """Whether the verdict is PASS or FAIL."""
        return self.verdict in (Verdict.PASS, Verdict.FAIL)

    @property
    def worse(self) -> float | None:
        """How much worse B is, as a fraction of A: 0.1 for 10 %; negative if it is better."""
        return self._worse(self.ratio)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of B's improvement as fractions of A, the worse bound first."""
        low = self._worse(self.ci_low)
        high = self._worse(self.ci_high)
        if low is None or high is None:
            return None
        return -max(low, high), -min(low, high)

    @property
    def percent(self) -> str:
        """The change of the metric's value in percent: ``-9.7 %``."""
        if self.ratio is None:
            return "not known"
        return f"{signed(self.ratio - 1)} %"

    @property
    def bounds(self) -> str:
        """The interval of the change in percent; empty without an interval."""
        if self.ci_low is None or self.ci_high is None:
            return ""
        return f"[{signed(self.ci_low - 1)}, {signed(self.ci_high - 1)}]"

    @property
    def shown_ratio(self) -> str:
        """The ratio with its interval, as text."""
        if self.ratio is None:
            return "not known"
        if self.ci_low is None or self.ci_high is None:
            return f"{self.ratio:.3f} (no interval, which needs two pairs)"
        return f"{self.ratio:.3f} [{self.ci_low:.3f}, {self.ci_high:.3f}]"

    @property
    def fact(self) -> Fact:
        """The failed requirement that B is not worse than allowed."""
        limit = self.allowed or 0.0
        value = self.difference
        unit = self.unit
        if self.difference is None:
            limit *= 100
            unit = "%"
            if self.worse is not None:
                value = 100 * self.worse
        return Fact(
            "a loss against the earlier run of at most",
            about=self.metric,
            value=value,
            limit=limit,
            unit=unit,
            evidence=self.words,
        )

    def report(self, beside: str) -> ChangeReport:
        """Return the change in the format of verdict.json.

        Args:
            beside: A description of the run or runs with which this run was compared.
        """
        return ChangeReport(
            metric=self.metric,
            unit=self.unit,
            here=statistics.finite(self.b),
            before=statistics.finite(self.a),
            worse=self.worse,
            allowed=self.allowed or 0.0,
            beside=beside,
            verdict=self.verdict,
        )

    def _worse(self, ratio: float | None) -> float | None:
        """Convert a ratio B / A to how much worse B is, as a fraction."""
        if ratio is None or not math.isfinite(ratio):
            return None
        return statistics.relative_loss(ratio, 1.0, self.higher_is_better)


def signed(fraction: float, digits: int = 1) -> str:
    """Return a fraction as a signed percentage without the percent sign.

    Args:
        fraction: The fraction, 0.1 for 10 %.
        digits: The number of decimal digits.

    Returns:
        The text; without a sign if it is rounded to zero.
    """
    text = f"{100.0 * fraction:+.{digits}f}"
    return text[1:] if float(text) == 0.0 else text


def is_price(metric: str) -> bool:
    """Return whether a metric is one of `PRICES`, at any depth.

    Args:
        metric: Its name, such as ``price_kl@d8192``.
    """
    return without_depth(metric) in PRICES


def compare_prices(
    now: StoredMetric, earlier: Sequence[StoredMetric], limits: Regression
) -> Change:
    """Return the change of a price against the best of the stored runs.

    The best run is the reference, so that a price cannot get worse in small steps.

    Args:
        now: The price of this run.
        earlier: The same price of the stored runs, at least one.
        limits: The profile's limits.
    """
    best = max if now.higher_is_better else min
    before = best(metric.value for metric in earlier)
    return price_change(now.name, before, now.value, limits.of_price(now.name), len(earlier))


def price_change(metric: str, before: float, now: float, limit: float, runs: int = 1) -> Change:
    """Return the change of a price of rounding.

    Args:
        metric: The name of the price, at any depth.
        before: The price before, in the unit of `PRICES`.
        now: The price now. NaN and infinity always fail.
        limit: How much worse the price may be, in its unit; infinite if the profile allows trading
            accuracy for speed. A price beyond the profile's gate still fails in another test.
        runs: The number of runs from which ``before`` was computed.
    """
    unit, higher_is_better = PRICES[without_depth(metric)]
    worse = before - now if higher_is_better else now - before
    direction = "worse" if worse > 0 else "better"
    is_allowed = math.isfinite(now) and worse <= limit
    return Change(
        metric=metric,
        unit=unit,
        higher_is_better=higher_is_better,
        a=before,
        b=now,
        difference=worse,
        pairs=runs,
        allowed=limit,
        verdict=Verdict.PASS if is_allowed else Verdict.FAIL,
        words=(
            f"{number(now)} {unit} instead of {number(before)}, {number(abs(worse))} "
            f"{direction}; {number(limit)} allowed"
        ),
    )


@dataclass(frozen=True)
class Missing:
    """A metric that the baseline has and this run lacks. Such a metric must be reported."""

    metric: str
    #: The name of the baseline.
    baseline: str

    def __str__(self) -> str:
        return f"{self.metric} was measured in {self.baseline} and not in this run"
