"""Earlier starts of the build under test, from pytest-benchmark's storage."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm121.core.verdict import Verdict
from sm121.run import stored_benchmarks
from sm121.run.stored_run import StoredRun

#: The verdicts of a valid number. A start that was too slow is a start, too.
_MEASURED = (Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE)


@dataclass
class EarlierStarts:
    """The stored runs of this machine.

    Attributes:
        storage: The storage of pytest-benchmark, as `--benchmark-storage` names it.
        root: The folder that it is relative to.
    """

    storage: str
    root: Path

    def levels(
        self, metric: str, context: Mapping[str, Any], *, engine: str, version: str | None
    ) -> list[float]:
        """Return the values of earlier starts of one build, oldest first.

        Args:
            metric: The name of the metric.
            context: The context that a stored run must share: machine, profile, configuration,
                plan, path.
            engine: The name of the engine.
            version: Its version. None: not known, so no stored run is of the same build.

        Returns:
            One value per stored run, in the metric's unit.

        Raises:
            UsageError: The storage cannot be read.
        """
        if version is None:
            return []
        levels = []
        for run in self._runs:
            same_build = (run.file.engine.name, run.file.engine.version) == (engine, version)
            # A run whose verdict excludes it as a baseline still counts as a start.
            if not same_build or replace(run, unfit=()).unlike(context):
                continue
            report = run.file.metrics.get(metric)
            stored = run.metrics.get(metric)
            if report is None or stored is None or report.verdict not in _MEASURED:
                continue
            if stored.value > 0.0:
                levels.append(stored.value)
        return levels

    @functools.cached_property
    def _runs(self) -> list[StoredRun]:
        return stored_benchmarks.load_benchmarks(
            stored_benchmarks.storage_folder(self.storage, self.root)
        )
