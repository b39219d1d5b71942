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

#: Version of the metrics here. Numbers of different versions are not compared.
DEFINITION = 2

#: Reasons of checks that compare answers of different times, or parts of a few answers.
_CLOCKS = frozenset({"second_clock", "rates_contradict"})


@dataclass(frozen=True, kw_only=True)
class Metric(ABC):
    """A quantity that is computed from the answers of a cell.

    The docstring of a metric has its definition and its source.
    """

    key: ClassVar[str]
    unit: ClassVar[Unit]
    higher_is_better: ClassVar[bool]
    #: Whether the first token is enough, so that short answers give samples too.
    of_first_token: ClassVar[bool] = False
    #: Whether a few rounds are enough at first, since other metrics need more of the cell later.
    first_visit: ClassVar[bool] = False

    #: The quantile of the samples that is the value; None for the median.
    quantile: float | None = None

    @property
    def is_tail(self) -> bool:
        """Whether it is a quantile beyond the median."""
        return self.quantile is not None and self.quantile > 0.5

    def parts(self, _cell: MeasuredCell) -> Sequence["Metric"]:
        """Return metrics of parts of this one, which are recorded beside it."""
        return ()

    @abstractmethod
    def name(self, cell: MeasuredCell) -> str:
        """Return the name in verdict.json."""

    @abstractmethod
    def samples(self, cell: MeasuredCell) -> list[float]:
        """Return the values in `unit`, one a round or a request.

        Raises:
            NotRun: The cell gives no values.
            Inapplicable: The metric does not exist for the cell.
        """

    def examine(self, cell: MeasuredCell, measurement: Measurement, findings: Findings) -> None:
        """Check the samples, and add what belongs beside the value.

        Args:
            cell: The cell.
            measurement: Its measurement, which gets `extra`.
            findings: Gets the reasons against its samples.
        """
        # Several streams wait for the prompts of the other streams.
        if self.of_first_token and cell.concurrency == 1:
            good = [answer for answer in cell.timed.all_answers if answer.ok]
            rate_checks.check_first_chunk(good, cell.timed.counted_by, findings)
        if self.higher_is_better:
            bound = cell.server.plan.measuring.drift_bound
            rate_checks.check_drift(measurement.samples, bound, findings)

    def of(self, cell: MeasuredCell) -> Measurement:
        """Compute the metric of all answers of a cell.

        Args:
            cell: The cell.

        Raises:
            NotRun: The cell gives no values.
            Inapplicable: The metric does not exist for the cell.
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
        # A failed request is an infinite time. A rate beside one is not believed.
        findings = cell.findings(failures=self.higher_is_better)
        self.examine(cell, measurement, findings)
        extra = measurement.extra | cell.timed.client_account()
        measurement.extra = {key: value for key, value in extra.items() if value is not None}
        measurement.invalid = findings.invalid
        measurement.unproven = findings.unproven
        return measurement

    def settle(self, cell: MeasuredCell) -> Measurement:
        """Compute the metric, after extra rounds if only disagreeing clocks make it invalid.

        Other work on the machine may be over by then.

        Args:
            cell: The cell.

        Raises:
            NotRun: The cell gives no values.
            Inapplicable: The metric does not exist for the cell.
        """
        measurement = self.of(cell)
        reasons = {item.reason for item in measurement.invalid}
        if reasons and reasons <= _CLOCKS and cell.gather_again(str(measurement.invalid[0])):
            return self.of(cell)
        return measurement

    def gather(self, cell: MeasuredCell, samples: int) -> None:
        """Measure at least one more round, until there are enough samples.

        Args:
            cell: The cell.
            samples: Samples in all.
        """
        rounds = len(cell.timed.long)
        if self.of_first_token and cell.concurrency == 1:
            # For percentiles of what happens before the first token the new requests are short.
            cell.short_rounds = max(samples - rounds, len(cell.timed.short))
            cell.gather(rounds)
            return
        measurement = self.of(cell)
        # A round of several streams has several samples.
        per_round = max(1, len(measurement.samples) // max(1, rounds))
        missing = samples - measurement.rounds
        cell.gather(rounds + max(1, math.ceil(missing / per_round)))

    def gather_at_the_end(self, cell: MeasuredCell, rounds: int) -> None:
        """Measure what the last look of the metric's gate needs.

        Args:
            cell: The cell.
            rounds: Rounds in all.
        """
        cell.gather(rounds)


@dataclass(frozen=True, kw_only=True)
class TimeMetric(Metric):
    """A quantile of a time in milliseconds. The time of a failed request is infinite."""

    unit: ClassVar[Unit] = "ms"
    higher_is_better: ClassVar[bool] = False

    quantile: float | None = 0.5

    def name(self, cell: MeasuredCell) -> str:
        """Return ``ttft_p50``, or ``ttft_c4_p50`` for four streams."""
        percentile = round((self.quantile or 0.5) * 100)
        return f"{self.key}{cell.shape.suffix}_p{percentile}"

    def examine(self, cell: MeasuredCell, measurement: Measurement, findings: Findings) -> None:
        """Check the samples, and add the length of the prompt."""
        super().examine(cell, measurement, findings)
        measurement.extra["prompt_tokens"] = cell.shape.prompt_tokens


@functools.cache
def by_key() -> Mapping[str, type[Metric]]:
    """Return the metrics of this package by their keys."""
    metrics = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, member in inspect.getmembers(module, inspect.isclass):
            if issubclass(member, Metric) and member.__module__ == module.__name__:
                metrics[member.key] = member
    return metrics


def find(key: str, **parameters: Any) -> Metric:
    """Return the metric of a key: ``find("tg", tokens=32)``.

    Args:
        key: The key of the metric.
        **parameters: Its fields.

    Raises:
        ValueError: No metric has this key.
    """
    if key not in by_key():
        raise ValueError(f"no metric is named {key}: there are {', '.join(sorted(by_key()))}")
    return by_key()[key](**parameters)
