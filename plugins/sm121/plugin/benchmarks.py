"""Measurements as benchmarks of pytest-benchmark, beside their verdict.

The benchmark's clock is advanced by the measurement: a rate of 52 tok/s is replayed as rounds of
1/52 s, so that OPS is tok/s and a slower engine is a longer time, which is what
``--benchmark-compare-fail`` compares. A time is replayed as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from sm121.core.verdict import Verdict
from sm121.measure import machine
from sm121.measure.measurement import Measurement
from sm121.performance.box import RunBox
from sm121.performance.recorder import More, Recorded, Recorder, host_of
from sm121.plugin.run import RUN, Run
from sm121.plugin.selection import LEVEL
from sm121.run.verdict_file import TestReport

_SECONDS = {"s": 1.0, "ms": 1e-3}
_RECORDER = pytest.StashKey[Recorder]()


def recorder_of(run: Run) -> Recorder:
    """The recorder of a run, with every measurement of it."""
    return run.config.stash.setdefault(_RECORDER, Recorder(run, run.settings.model))


@dataclass
class ReplayClock:
    """A clock that stands until a sample moves it."""

    now: float = 0.0

    def read(self) -> float:
        """What pytest-benchmark takes for the time."""
        return self.now


@dataclass
class MetricRecorder:
    """Records one measurement, and replays it as the benchmark of a test."""

    _recorder: Recorder
    _benchmark: BenchmarkFixture
    _clock: ReplayClock

    def __call__(
        self,
        measurement: Measurement,
        more: More | None = None,
        *,
        maximum_rounds: int | None = None,
    ) -> None:
        """Decide on a measurement: see `Recorder.record`."""
        self._recorder.record(measurement, more, maximum_rounds=maximum_rounds, store=self._replay)

    def _replay(self, recorded: Recorded) -> None:
        """Replay the samples as a benchmark; one that is not valid is left out of the storage."""
        benchmark, measurement = self._benchmark, recorded.measurement
        benchmark.group = measurement.name.partition("@")[0]  # depths beside each other
        seconds = [_duration(measurement, sample) for sample in measurement.samples]
        replay = [value for value in seconds if math.isfinite(value) and value > 0.0]
        benchmark.extra_info.update(self._recorder.described(recorded, reason=recorded.reason))
        rounds = iter(replay or [1.0])

        def stand() -> None:
            self._clock.now = 0.0

        def advance() -> None:
            self._clock.now = next(rounds)

        benchmark.pedantic(  # type: ignore[no-untyped-call]
            advance, setup=stand, rounds=max(len(replay), 1)
        )
        if recorded.verdict is Verdict.INVALID or not replay:
            benchmark.has_error = True  # never the baseline of anything


def _duration(measurement: Measurement, sample: float) -> float:
    if measurement.unit in _SECONDS:
        return sample * _SECONDS[measurement.unit]
    if measurement.higher_is_better:
        return 1.0 / sample if sample else math.inf
    return sample


@pytest.fixture
def metric_clock(request: pytest.FixtureRequest) -> ReplayClock:
    """The clock of this test's benchmark; it must be there before the ``benchmark`` fixture."""
    clock = ReplayClock()
    request.node.add_marker(pytest.mark.benchmark(timer=clock.read), append=False)
    return clock


@pytest.fixture
def record_metric(
    conformance: Run,
    box: RunBox,  # read before anything is measured
    metric_clock: ReplayClock,  # before `benchmark`, which reads its timer when it is made
    benchmark: BenchmarkFixture,
) -> MetricRecorder:
    """Records a measurement as benchmark and metric, and raises its verdict."""
    recorder = recorder_of(conformance)
    recorder.box = box
    return MetricRecorder(recorder, benchmark, metric_clock)


def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    # The clock at this moment is no property of the machine, and would make each run another one.
    cpu = machine_info.get("cpu", {})
    for name in ("hz_actual", "hz_actual_friendly", "hz_advertised", "hz_advertised_friendly"):
        cpu.pop(name, None)
    machine_info["sm121"] = machine.identity(host_of(config.getoption("--base-url")))


def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict[str, Any]) -> None:
    run = config.stash.get(RUN, None)
    if run is not None:
        commit_info["git_shas"] = run.file.environment.get("git_shas")


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """What is stored says how the run ended: the machine may have gone bad after a measurement."""
    run = config.stash.get(RUN, None)
    if run is None:
        return
    for benchmark in output_json["benchmarks"]:
        info = benchmark["extra_info"]
        if "sm121" in info and info["metric"] in run.file.metrics:
            info["box"] = run.file.box.model_dump(mode="json")
            info["verdict"] = run.file.metrics[info["metric"]].verdict.value


@pytest.hookimpl(trylast=True)  # after the run was opened
def pytest_collection_finish(session: pytest.Session) -> None:
    """pytest-benchmark's tables are for ``-v`` and for comparing: the report has the numbers.

    Those of somebody else's benchmarks, in the same run, stay.
    """
    config = session.config
    benchmarks = getattr(config, "_benchmarksession", None)
    if benchmarks is None or RUN not in config.stash or config.option.verbose > 0:
        return
    asked = config.getoption("benchmark_compare", None), config.getoption("benchmark_verbose", None)
    theirs = [item for item in session.items if LEVEL not in item.stash]
    if not any(asked) and not any("benchmark" in _fixtures(item) for item in theirs):
        benchmarks.quiet = True


def _fixtures(item: pytest.Item) -> list[str]:
    return list(getattr(item, "fixturenames", ()))


@pytest.hookimpl(tryfirst=True)  # before the run is closed and its file written
def pytest_sessionfinish(session: pytest.Session) -> None:
    """What ``--benchmark-compare-fail`` found is a failure in verdict.json too, and so is a run in
    which there was nothing to compare."""
    config = session.config
    run = config.stash.get(RUN, None)
    checks = config.getoption("benchmark_compare_fail", None)
    if run is None or not checks or config.option.collectonly:
        return
    benchmarks = getattr(config, "_benchmarksession", None)
    lines = [f"{name}: {what}" for name, what in getattr(benchmarks, "performance_regressions", [])]
    if not getattr(benchmarks, "benchmarks", []):
        lines = ["--benchmark-compare-fail was given and no benchmark ran: that is no success"]
    for line in lines:
        name = f"--benchmark-compare-fail::{line.split(':')[0][:80]}"
        report = TestReport(id=name, level="regression", verdict=Verdict.FAIL, message=line)
        run.ledger.decide(report)
