"""The metrics of the performance level: one subclass of `Metric` each, in a file of its own here,
found by its key (`find`). A test asks for it: ``performance.measure("tpot", quantile=0.99)``."""

import functools
import importlib
import inspect
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sm121.measure import validity
from sm121.measure.cells import MeasuredCell
from sm121.measure.measurement import Measurement, Unit
from sm121.measure.validity import Findings

#: Of the metrics here. Where one changes, numbers of before and after are not compared.
DEFINITION = 2

#: Reasons that compare answers of different times, or parts of a few.
_CLOCKS = frozenset({"second_clock", "rates_contradict"})


@dataclass(frozen=True, kw_only=True)
class Metric(ABC):
    """What is computed from the answers of a cell. The docstring of a metric has its definition and
    where it is from. `quantile`: of its samples, that is asked for; None for the median."""

    key: ClassVar[str]
    unit: ClassVar[Unit]
    higher_is_better: ClassVar[bool]
    #: Whether the first token is enough, so that short answers have it as well.
    of_first_token: ClassVar[bool] = False
    #: Whether a few rounds do at first, since others ask for more of the same cell later.
    first_visit: ClassVar[bool] = False

    quantile: float | None = None

    @property
    def is_tail(self) -> bool:
        """Whether it is a quantile beyond the median."""
        return self.quantile is not None and self.quantile > 0.5

    def parts(self, _cell: MeasuredCell) -> Sequence["Metric"]:
        """Metrics of its parts, which are recorded beside it."""
        return ()

    @abstractmethod
    def name(self, cell: MeasuredCell) -> str:
        """Its name in verdict.json."""

    @abstractmethod
    def samples(self, cell: MeasuredCell) -> list[float]:
        """Its values, in `unit`: one a round, or a request. Raises NotRun, Inapplicable: none."""

    def examine(self, cell: MeasuredCell, measurement: Measurement, findings: Findings) -> None:
        """Note what speaks against its samples, and what belongs beside its value."""
        if self.of_first_token and cell.concurrency == 1:  # others wait for others' prompts
            good = [answer for answer in cell.all_answers if answer.ok]
            validity.check_first_chunk(good, cell.counted_by, findings)
        if self.higher_is_better:
            bound = cell.server.plan.measuring.drift_bound
            validity.check_drift(measurement.samples, bound, findings)

    def of(self, cell: MeasuredCell) -> Measurement:
        """The metric of all that the cell has measured. Raises NotRun, Inapplicable: none."""
        measurement = Measurement(
            name=self.name(cell),
            unit=self.unit,
            samples=self.samples(cell),
            higher_is_better=self.higher_is_better,
            clock=cell.clock,
            quantile=self.quantile,
            remarks=cell.remarks(self.name(cell)),
            records=cell.records,
        )
        # A failed request is an infinite time. A rate beside one is not believed.
        findings = cell.findings(failures=self.higher_is_better)
        self.examine(cell, measurement, findings)
        extra = measurement.extra | cell.client_account()
        measurement.extra = {key: value for key, value in extra.items() if value is not None}
        measurement.invalid, measurement.unproven = findings.invalid, findings.unproven
        return measurement

    def settle(self, cell: MeasuredCell) -> Measurement:
        """As `of`; where nothing but clocks that disagree speaks against it, the cell is measured
        once more: other work may be over by then. Raises NotRun, Inapplicable: none."""
        measurement = self.of(cell)
        reasons = {item.reason for item in measurement.invalid}
        again = reasons and reasons <= _CLOCKS and cell.gather_again(str(measurement.invalid[0]))
        return self.of(cell) if again else measurement

    def gather(self, cell: MeasuredCell, samples: int) -> None:
        """Measure until there are so many samples in all, one round more at least."""
        if self.of_first_token and cell.concurrency == 1:
            # For percentiles of what happens before the first token the new requests are short.
            cell.short_rounds = max(samples - len(cell.long), len(cell.short))
            cell.gather(len(cell.long))
            return
        measurement, rounds = self.of(cell), len(cell.long)
        # A round of several streams has several samples.
        each = max(1, len(measurement.samples) // max(1, rounds))
        cell.gather(rounds + max(1, math.ceil((samples - measurement.rounds) / each)))

    def gather_at_the_end(self, cell: MeasuredCell, rounds: int) -> None:
        """Measure what the last look of its gate needs: so many rounds in all."""
        cell.gather(rounds)


@dataclass(frozen=True, kw_only=True)
class TimeMetric(Metric):
    """A time in milliseconds, of which a quantile counts. A failed request is an infinite one."""

    unit: ClassVar[Unit] = "ms"
    higher_is_better: ClassVar[bool] = False

    quantile: float | None = 0.5

    def name(self, cell: MeasuredCell) -> str:
        """``ttft_p50``; of several streams ``ttft_c4_p50``."""
        return f"{self.key}{cell.suffix}_p{round((self.quantile or 0.5) * 100)}"

    def examine(self, cell: MeasuredCell, measurement: Measurement, findings: Findings) -> None:
        """Add the length of the prompt."""
        super().examine(cell, measurement, findings)
        measurement.extra["prompt_tokens"] = cell.prompt_tokens


@functools.cache
def by_key() -> Mapping[str, type[Metric]]:
    """The metrics of this package."""
    modules = [
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    ]
    return {
        metric.key: metric
        for module in modules
        for _, metric in inspect.getmembers(module, inspect.isclass)
        if issubclass(metric, Metric) and metric.__module__ == module.__name__
    }


def find(key: str, **parameters: Any) -> Metric:
    """The metric of a key: ``find("tg", tokens=32)``. Raises ValueError: there is none."""
    if key not in by_key():
        raise ValueError(f"no metric is named {key}: there are {', '.join(sorted(by_key()))}")
    return by_key()[key](**parameters)
