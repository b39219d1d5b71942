"""This run's measurements and the stored ones, for the regression level."""

from __future__ import annotations

import pytest

from sm121.plugin.benchmarks import recorder_of
from sm121.plugin.run import Run
from sm121.regression.measured import MeasuredHistory

HISTORY = pytest.StashKey[MeasuredHistory]()


def history_of(run: Run) -> MeasuredHistory:
    """What has been measured so far, to be held against pytest-benchmark's storage."""
    config = run.config
    asked = config.getoption("benchmark_compare")
    return MeasuredHistory(
        recorder_of(run),
        config.getoption("benchmark_storage"),
        config.invocation_params.dir,
        asked if isinstance(asked, str) and asked else None,
    )


@pytest.fixture(scope="session")
def measured_history(conformance: Run) -> MeasuredHistory:
    """This run's measurements and the stored ones that they can be compared with."""
    return conformance.config.stash.setdefault(HISTORY, history_of(conformance))
