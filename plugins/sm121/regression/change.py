"""A change of one metric: B against A, this run against stored ones, or against a trusted one.
Speed that is bought with quality, by a price of rounding, is a regression, unless the profile
allows that."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sm121.core import templates
from sm121.core.level_settings import PRICES, Regression
from sm121.core.numbers import number
from sm121.core.unmet import Fact
from sm121.core.verdict import Verdict
from sm121.measure import statistics
from sm121.run.stored_run import StoredMetric
from sm121.run.verdict_file import ChangeReport


@dataclass(frozen=True)
class Change:
    """What a metric was, what it is, and what was decided about that. A verdict is about a
    regression: PASS, there is none; NOT_RUN, it was not judged."""

    metric: str
    unit: str
    higher_is_better: bool
    #: Before and now. None in a file where it was infinite, as where a request failed.
    a: float | None
    b: float | None
    #: B / A. None where a value is no positive number; the interval also where none can be had.
    ratio: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    #: So many runs, or pairs of starts, make A.
    pairs: int = 1
    #: How much worse B may be, as a fraction, or as `difference`; None where nothing says.
    allowed: float | None = None
    verdict: Verdict = Verdict.NOT_RUN
    text: str = ""
    #: What else a reader must know.
    note: str = ""
    #: How much worse B is in its own unit, of what has no ratio.
    difference: float | None = None

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against it: it was not judged, or is no regression."""
        return self.verdict in (Verdict.PASS, Verdict.NOT_RUN)

    @property
    def decided(self) -> bool:
        """Whether the change counts one way or the other."""
        return self.verdict in (Verdict.PASS, Verdict.FAIL)

    @property
    def worse(self) -> float | None:
        """How much worse B is, as a fraction of A: 0.1 for 10 %; below 0 where it is better."""
        return self._worse(self.ratio)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of how much better B is, as fractions of A, the worse end first."""
        low, high = self._worse(self.ci_low), self._worse(self.ci_high)
        return None if low is None or high is None else (-max(low, high), -min(low, high))

    @property
    def percent(self) -> str:
        """The change as the metric itself went: ``-9.7 %``."""
        return "not known" if self.ratio is None else f"{signed(self.ratio - 1)} %"

    @property
    def bounds(self) -> str:
        """The interval of the change in percent; empty where there is none."""
        if self.ci_low is None or self.ci_high is None:
            return ""
        return f"[{signed(self.ci_low - 1)}, {signed(self.ci_high - 1)}]"

    @property
    def shown_ratio(self) -> str:
        """The ratio with its interval, for people."""
        if self.ratio is None:
            return "not known"
        if self.ci_low is None or self.ci_high is None:
            return f"{self.ratio:.3f} (no interval: that needs two pairs)"
        return f"{self.ratio:.3f} [{self.ci_low:.3f}, {self.ci_high:.3f}]"

    @property
    def fact(self) -> Fact:
        """What does not hold of it."""
        value, times, unit = self.worse, 100, "%"
        if self.difference is not None:
            value, times, unit = self.difference, 1, self.unit
        return Fact(
            "worse than before by at most",
            about=self.metric,
            value=None if value is None else times * value,
            limit=times * (self.allowed or 0.0),
            unit=unit,
            evidence=self.text.removeprefix(f"{self.metric}: "),
        )

    def report(self, beside: str) -> ChangeReport:
        """As verdict.json has it, compared with ``beside``."""
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
        if ratio is None or not math.isfinite(ratio):
            return None
        return 1.0 - ratio if self.higher_is_better else ratio - 1.0


def signed(fraction: float, digits: int = 1) -> str:
    """A signed percentage; what rounds to nothing has no sign."""
    text = f"{100.0 * fraction:+.{digits}f}"
    return text[1:] if float(text) == 0.0 else text


Values = Mapping[str, float | None]


def is_price(metric: str) -> bool:
    """Whether a metric is one of `PRICES`, at any depth."""
    return metric.partition("@")[0] in PRICES


def compare_prices(
    now: StoredMetric, earlier: Sequence[StoredMetric], limits: Regression
) -> Change:
    """This run's price against the best of the stored runs, so that nothing gets worse step by
    step."""
    before = (max if now.higher_is_better else min)(metric.value for metric in earlier)
    return price_change(now.name, before, now.value, limits.of_price(now.name), len(earlier))


def price_change(metric: str, before: float, now: float, limit: float, runs: int = 1) -> Change:
    """A price that was and is so high. `limit`: how much worse it may be, in its unit; where it is
    infinite, a price beyond what the profile has for it fails by its own test. What is no number is
    worse than any."""
    unit, higher = PRICES[metric.partition("@")[0]]
    worse = before - now if higher else now - before
    how = f"{number(abs(worse))} {'worse' if worse > 0 else 'better'}; {number(limit)} allowed"
    return Change(
        metric, unit, higher, before, now, difference=worse, pairs=runs, allowed=limit,
        verdict=Verdict.PASS if math.isfinite(now) and worse <= limit else Verdict.FAIL,
        text=f"{metric}: {number(now)} {unit} against {number(before)}, {how}",
    )  # fmt: skip


def trade(before: Values, now: Values) -> str:
    """How much faster it is, and what that costs: ``1.6 times as fast (...), at a price: ...``;
    empty unless both have a rate and a price."""
    return templates.rendered("trade.j2", before=before, now=now, prices=PRICES, number=number)


@dataclass(frozen=True)
class Missing:
    """A metric that a baseline has and this run has not: no success."""

    metric: str
    baseline: str

    def __str__(self) -> str:
        return f"{self.metric} was measured in {self.baseline} and not in this run"
