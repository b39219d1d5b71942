"""The metrics of the performance level, each a subclass of `Metric` in a module of this package.

A test finds a metric by its key (`find`): ``performance.measure("tpot", quantile=0.99)``.
"""

import functools
import importlib
import inspect
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sm121.measure import rate_checks
from sm121.measure.cells import MeasuredCell
from sm121.measure.measurement import Measurement, Unit
from sm121.measure.validity import Findings

#: Version of the metrics' definitions. Numbers of different versions are not compared.
DEFINITION = 2

#: Reasons of invalidity for which extra rounds are measured, because the two ways to compute a rate
#: may have disagreed by chance.
_CLOCKS = frozenset({"second_clock", "rates_contradict"})


@dataclass(frozen=True, kw_only=True)
class Metric(ABC):
    """A quantity that is computed from the answers of a cell.

    The docstring of each subclass states the metric's definition and source.
    """

    key: ClassVar[str]
    unit: ClassVar[Unit]
    higher_is_better: ClassVar[bool]
    #: Whether the metric needs only the first token, so that short answers give samples, too.
    of_first_token: ClassVar[bool] = False
    #: Whether a few rounds are sufficient at first, because later metrics measure more rounds.
    first_visit: ClassVar[bool] = False

    #: The quantile of the samples that is the value; None for the median.
    quantile: float | None = None

    @property
    def is_tail(self) -> bool:
        """Whether the value is a quantile beyond the median."""
        return self.quantile is not None and self.quantile > 0.5

    def parts(self, _cell: MeasuredCell) -> Sequence["Metric"]:
        """Return metrics of subsets of the answers, which are recorded in addition to this one.

        Args:
            _cell: The cell with its answers.
        """
        return ()

    @abstractmethod
    def name(self, cell: MeasuredCell) -> str:
        """Return the metric's name in verdict.json.

        Args:
            cell: The cell, whose depth and number of streams are part of the name.
        """

    @abstractmethod
    def samples(self, cell: MeasuredCell) -> list[float]:
        """Return the values in `unit`, one per round or per request.

        Args:
            cell: The cell with its answers.

        Raises:
            NotRun: The metric has no values in this cell.
            Inapplicable: The metric is not defined for this cell.
        """

    def examine(self, cell: MeasuredCell, measurement: Measurement, findings: Findings) -> None:
        """Check the samples, and add related numbers to the measurement.

        Args:
            cell: The cell.
            measurement: The cell's measurement; its `extra` is set.
            findings: Receives the reasons why the samples are invalid.
        """
        # With several streams, a pause is normal, because a stream waits for the prompts of others.
        if self.of_first_token and cell.concurrency == 1:
            good = [answer for answer in cell.timed.all_answers if answer.ok]
            rate_checks.check_first_chunk(good, cell.timed.counted_by, findings)
        if self.higher_is_better:
            bound = cell.server.plan.measuring.drift_bound
            rate_checks.check_drift(measurement.samples, bound, findings)

    def of(self, cell: MeasuredCell) -> Measurement:
        """Compute the metric from all answers of a cell.

        Args:
            cell: The cell.

        Raises:
            NotRun: The metric has no values in this cell.
            Inapplicable: The metric is not defined for this cell.
        """
        measurement = Measurement(
            name=self.name(cell),
            unit=self.unit,
            samples=self.samples(cell),
            higher_is_better=self.higher_is_better,
            clock=cell.timed.clock,
            quantile=self.quantile,
            remarks=cell.remarks(self.name(cell)),
            records=cell.records,
        )
        # A failed request makes a time infinite, and a rate invalid.
        findings = cell.findings(failures=self.higher_is_better)
        self.examine(cell, measurement, findings)
        extra = measurement.extra | cell.timed.client_account()
        measurement.extra = {key: value for key, value in extra.items() if value is not None}
        measurement.invalid = findings.invalid
        measurement.unproven = findings.unproven
        return measurement

    def settle(self, cell: MeasuredCell) -> Measurement:
        """Compute the metric.

        If the two ways to compute its rate disagree, measure extra rounds first.

        Other work on the machine may have caused the difference, and may have ended by then.

        Args:
            cell: The cell.

        Raises:
            NotRun: The metric has no values in this cell.
            Inapplicable: The metric is not defined for this cell.
        """
        measurement = self.of(cell)
        reasons = {item.reason for item in measurement.invalid}
        if reasons and reasons <= _CLOCKS and cell.gather_again(str(measurement.invalid[0])):
            return self.of(cell)
        return measurement

    def gather(self, cell: MeasuredCell, samples: int) -> None:
        """Measure at least one more round, and continue until there are enough samples.

        Args:
            cell: The cell.
            samples: The total number of samples.
        """
        rounds = len(cell.timed.long)
        if self.of_first_token and cell.concurrency == 1:
            # For a percentile of the time to the first token, short requests are sufficient.
            cell.short_rounds = max(samples - rounds, len(cell.timed.short))
            cell.gather(rounds)
            return
        measurement = self.of(cell)
        # A round of several streams has several samples.
        per_round = max(1, len(measurement.samples) // max(1, rounds))
        missing = samples - measurement.rounds
        cell.gather(rounds + max(1, math.ceil(missing / per_round)))

    def gather_at_the_end(self, cell: MeasuredCell, rounds: int) -> None:
        """Measure the rounds that the last interim test of the metric's gate needs.

        Args:
            cell: The cell.
            rounds: The total number of rounds.
        """
        cell.gather(rounds)


@dataclass(frozen=True, kw_only=True)
class TimeMetric(Metric):
    """A quantile of a time, in milliseconds. For a failed request, the time is infinite."""

    unit: ClassVar[Unit] = "ms"
    higher_is_better: ClassVar[bool] = False

    quantile: float | None = 0.5

    def name(self, cell: MeasuredCell) -> str:
        """Return the name, for example ``ttft_p50``, or ``ttft_c4_p50`` for four streams."""
        percentile = round((self.quantile or 0.5) * 100)
        return f"{self.key}{cell.shape.suffix}_p{percentile}"

    def examine(self, cell: MeasuredCell, measurement: Measurement, findings: Findings) -> None:
        """Check the samples, and add the length of the prompt."""
        super().examine(cell, measurement, findings)
        measurement.extra["prompt_tokens"] = cell.shape.prompt_tokens


@functools.cache
def by_key() -> Mapping[str, type[Metric]]:
    """Return the metrics of this package; the keys are the metrics' keys, for example ``tg``."""
    metrics = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, member in inspect.getmembers(module, inspect.isclass):
            if issubclass(member, Metric) and member.__module__ == module.__name__:
                metrics[member.key] = member
    return metrics


def find(key: str, **parameters: Any) -> Metric:
    """Create the metric with a given key, for example ``find("tg", tokens=32)``.

    Args:
        key: The key of the metric.
        **parameters: The fields of the metric.

    Raises:
        ValueError: No metric has this key.
    """
    if key not in by_key():
        raise ValueError(f"no metric is named {key}: there are {', '.join(sorted(by_key()))}")
    return by_key()[key](**parameters)
