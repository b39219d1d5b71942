"""Convert metrics to the format of pytest-benchmark's storage."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from pytest_benchmark.stats import Metadata

from pytest_bench_gate.history import KEY, VERSION
from pytest_bench_gate.judging import Judged
from sm121.measure import statistics

#: The units of time, in seconds.
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


@dataclass
class _Benchmark:
    """The attributes of a ``benchmark`` fixture that pytest-benchmark reads."""

    name: str
    fullname: str
    extra_info: dict[str, Any]
    group: str = "gates"
    param: None = None
    params: None = None
    cprofile_stats: None = None
    has_error: bool = False


class _Stored(Metadata):
    """A benchmark that pytest-benchmark stores, but does not show or compare."""

    def __bool__(self) -> bool:
        return False


def described(judged: Judged, asked: Sequence[str]) -> dict[str, Any]:
    """Return the entry to store for a metric. The field ``passed`` is set when the run ends.

    Args:
        judged: The metric.
        asked: The selection of the run: its paths, ``-k`` and ``-m``.
    """
    limit = judged.limit
    return {
        "version": VERSION,
        "metric": judged.metric,
        "unit": judged.unit,
        "higher_is_better": judged.higher_is_better,
        "value": statistics.finite(judged.estimate.value),
        "ci_low": statistics.finite(judged.estimate.ci_low),
        "ci_high": statistics.finite(judged.estimate.ci_high),
        "rounds": judged.estimate.rounds,
        "minimum": None if limit is None else limit.minimum,
        "maximum": None if limit is None else limit.at_most,
        "verdict": None if judged.verdict is None else judged.verdict.value,
        "test": judged.test,
        "asked": list(asked),
        "passed": False,
    }


def store(config: pytest.Config, entry: dict[str, Any], samples: Sequence[float]) -> None:
    """Add a metric to the run's benchmarks.

    This is for a metric whose samples the test itself has passed to `gate`.

    Args:
        config: The configuration of the run.
        entry: The stored entry of the metric.
        samples: The metric's samples.
    """
    name = entry["metric"]
    benchmark = _Benchmark(name, f"{entry['test']}::{name}", {KEY: entry})
    stored = _Stored(benchmark, iterations=1, options={})  # type: ignore[no-untyped-call]
    for sample in samples:
        seconds = duration(sample, entry["unit"], entry["higher_is_better"])
        if math.isfinite(seconds):
            stored.stats.update(seconds)  # type: ignore[no-untyped-call]
    benchmark.has_error = not stored.stats.data
    config._benchmarksession.benchmarks.append(stored)  # type: ignore[attr-defined]


def duration(sample: float, unit: str, higher_is_better: bool) -> float:
    """Convert a sample to the duration in seconds that pytest-benchmark stores for it.

    A rate is stored as its inverse in seconds, so that ``pytest-benchmark compare`` shows the rate
    as OPS.

    Args:
        sample: The sample.
        unit: Its unit.
        higher_is_better: Whether the sample is a rate.
    """
    if higher_is_better:
        return 1.0 / sample if sample else math.inf
    return sample * SECONDS.get(unit, 1.0)
