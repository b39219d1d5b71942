"""Decides whether a server's rounding costs too much accuracy, by the gates of the profile."""

import math
from dataclasses import dataclass
from statistics import fmean

from sm121.core import verdict
from sm121.core.level_settings import PRICES
from sm121.core.metric_name import without_depth
from sm121.core.unmet import Fact, Unmet
from sm121.measure.measurement import Measurement
from sm121.oracles.formats import EXACT, Rounding
from sm121.plugin.benchmarks import MetricRecorder
from sm121.run.events import Measured
from sm121.run.verdict_file import MetricReport
from sm121.session.session import Session


@dataclass(frozen=True)
class Priced:
    """The measured accuracy cost of a server's rounding.

    Attributes:
        rounding: The rounding; None if it is not known.
        samples: The samples of each metric.
        reasons: For each metric without samples: the reason.
    """

    rounding: Rounding | None
    samples: dict[str, list[float]]
    reasons: dict[str, str]


class PriceDecision:
    """Judges the metrics of an accuracy cost.

    Args:
        conformance: The run. Its recorder contains the gates.
        priced: The measured accuracy cost.
        record: A function that records a metric, and raises its verdict if it is not PASS.
    """

    def __init__(self, conformance: Session, priced: Priced, record: MetricRecorder) -> None:
        self._conformance = conformance
        self._gates = conformance.recorder.gates
        self._priced = priced
        self._record = record

    def decide(self, metric: str) -> None:
        """Record a metric at each depth, and raise its verdict if it is not PASS.

        Args:
            metric: The name of the metric, without a depth.

        Raises:
            Unmet: The metric misses its gate at a depth, or a gate is missing that the profile
                requires.
            NotRun: A gate has no number, or the profile has no row for the server's rounding.
            Inapplicable: This server does not report what the metric needs.
        """
        samples = self._priced.samples
        reasons = self._priced.reasons
        failed: list[Fact] = []
        for name in {**reasons, **samples}:
            if without_depth(name) != metric:
                continue
            if name in reasons:
                self._note_unmeasured(name, metric)
            else:
                failed += self._failures_of(name, metric)
        if failed:
            raise Unmet(*failed)
        unmeasured = []
        for name in self._gates:
            if without_depth(name) == metric and name not in samples:
                unmeasured.append(f"{name}: {reasons.get(name, 'no such depth')}")
        if unmeasured:
            raise verdict.NotRun("; ".join(unmeasured))
        if metric in reasons:
            raise verdict.Inapplicable(reasons[metric])
        self._require_a_row()

    def _note_unmeasured(self, name: str, metric: str) -> None:
        unit, _ = PRICES[metric]
        self._conformance.run.record.emit(Measured(name, MetricReport(value=None, unit=unit)))
        why = self._priced.reasons[name]
        self._conformance.run.record.remark(f"{name} was not measured: {why}", at_once=False)

    def _failures_of(self, name: str, metric: str) -> list[Fact]:
        """Record a metric at one depth, and return the unmet requirements."""
        unit, higher_is_better = PRICES[metric]
        samples = self._priced.samples[name]
        measurement = Measurement(
            name=name, unit=unit, samples=samples, higher_is_better=higher_is_better, is_mean=True
        )
        failed: list[Fact] = []
        try:
            self._record(measurement, part=name != metric)
        except Unmet as unmet:
            failed += unmet.facts
        if name in self._gates:
            return failed
        is_limited = self._conformance.run.profile.regression.price_allowed
        if is_limited and self._priced.rounding != EXACT:
            rounding = self._conformance.run.record.file.engine.rounding
            failed.append(Fact(f"{name} in correctness.prices", f"none for {rounding}"))
        if not math.isfinite(fmean(samples)):
            failed.append(Fact("log-probabilities that are numbers", "others", name))
        return failed

    def _require_a_row(self) -> None:
        """Raise NotRun if the profile's table of accuracy costs has no row for this rounding."""
        if self._gates or not self._conformance.run.profile.correctness.prices:
            return
        rounding = self._conformance.run.record.file.engine.rounding
        rounds = f"rounding {rounding}" if rounding else "unknown rounding"
        raise verdict.NotRun(
            f"measured, but not judged: correctness.prices has no row for {rounds}"
        )
