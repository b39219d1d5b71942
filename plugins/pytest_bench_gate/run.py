"""The gates of a run: what was judged, what it was compared with, and what is missing."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_bench_gate import history
from pytest_bench_gate.history import History, StoredMetric

if TYPE_CHECKING:
    from pytest_bench_gate.judging import Judged, Samples


@dataclass
class GateRun:
    """The gates of a run.

    Args:
        config: The configuration of the run.
        stored: The runs that it is compared with; None if it is compared with none.
    """

    config: pytest.Config
    stored: History | None
    #: By the name of the metric.
    judged: "dict[str, Judged]" = field(default_factory=dict)
    #: What is stored of each metric.
    entries: list[dict[str, Any]] = field(default_factory=list)
    missing: Sequence[StoredMetric] = ()
    asked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.asked = history.asked(self.config)

    def compared(self, judged: "Judged", samples: "Samples", worse_by: float) -> "Judged":
        """Return a metric with its comparison, if the run is compared.

        Args:
            judged: The metric.
            samples: Its rounds.
            worse_by: How much worse it may be, as a fraction.
        """
        from pytest_bench_gate import judging  # numpy and scipy: other runs do without them

        if self.stored is None:
            return judged
        before = self.stored.find(judged.metric)
        if before is None:
            return replace(judged, is_new=True)
        if judging.too_few(judged.metric, samples) is not None:
            return judged
        return replace(judged, comparison=judging.compare(samples, judged, before, worse_by))

    def end(self, *, failed: bool) -> None:
        """Look for missing metrics, and note in what is stored whether the run passed.

        Args:
            failed: Whether a test failed.
        """
        if self.stored is not None:
            self.missing = self.stored.missing(self.config, self.judged)
        fell = any(judged.facts for judged in self.judged.values())  # its test may have caught it
        for entry in self.entries:
            entry["passed"] = not (failed or self.missing or fell)
