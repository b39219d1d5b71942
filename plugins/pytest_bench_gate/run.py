"""The gates of a run: judged metrics, the stored runs for comparison, and missing metrics."""

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
        stored: The stored runs for comparison; None if the run is not compared.
    """

    config: pytest.Config
    stored: History | None
    #: The judged metrics; the keys are their names.
    judged: "dict[str, Judged]" = field(default_factory=dict)
    #: The entries of the metrics in pytest-benchmark's storage.
    entries: list[dict[str, Any]] = field(default_factory=list)
    missing: Sequence[StoredMetric] = ()
    asked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.asked = history.asked(self.config)

    def compared(self, judged: "Judged", samples: "Samples", worse_by: float) -> "Judged":
        """Compare a metric with the stored runs, if the run is compared.

        Args:
            judged: The metric.
            samples: The metric's samples.
            worse_by: The tolerance for a regression, as a fraction.
        """
        from pytest_bench_gate import judging  # imports numpy and scipy, needed only here

        if self.stored is None:
            return judged
        before = self.stored.find(judged.metric)
        if before is None:
            return replace(judged, is_new=True)
        if judging.too_few(judged.metric, samples) is not None:
            return judged
        return replace(judged, comparison=judging.compare(samples, judged, before, worse_by))

    def end(self, *, failed: bool) -> None:
        """Find the missing metrics, and mark in the stored entries whether the run passed.

        Args:
            failed: Whether a test failed.
        """
        if self.stored is not None:
            self.missing = self.stored.missing(self.config, self.judged)
        fell = any(judged.facts for judged in self.judged.values())  # even if the test caught it
        for entry in self.entries:
            entry["passed"] = not (failed or self.missing or fell)
