"""Stores measurements as benchmarks of pytest-benchmark.

pytest-benchmark stores durations. A rate of 52 tok/s is therefore replayed as rounds of 1/52 s, so
that ``--benchmark-compare-fail`` sees a slower engine as a longer duration. A duration is replayed
unchanged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_bench_gate import storing
from sm121.core.errors import Sm121Error
from sm121.core.metric_name import without_depth
from sm121.core.printable import printable
from sm121.core.verdict import worst
from sm121.kernels.cases import BenchmarkCase
from sm121.kernels.under_test import Kernels
from sm121.machine import this_machine
from sm121.measure import gate
from sm121.measure.measurement import Measurement
from sm121.performance.box import RunBox
from sm121.performance.recorder import Recorded, Recorder, host_of
from sm121.performance.starts import EarlierStarts
from sm121.plugin import selection
from sm121.plugin.stash import LEVEL
from sm121.regression import measured, metric_levels
from sm121.run.events import HistoryRead
from sm121.session.session import Session
from sm121.session.settings import Settings

#: The largest exponent for which `math.exp` does not overflow.
_LARGEST_EXPONENT = 700.0
HISTORY = pytest.StashKey[measured.MeasuredHistory]()


@dataclass
class ReplayClock:
    """A clock that stands still until a sample advances it."""

    now: float = 0.0


@dataclass
class MetricRecorder:
    """Records one measurement, and replays it as the benchmark of a test.

    Args:
        _recorder: Records measurements, and judges them.
        _benchmark: pytest-benchmark's fixture of the test.
        _clock: The clock of the benchmark.
    """

    _recorder: Recorder
    _benchmark: BenchmarkFixture
    _clock: ReplayClock

    def __call__(
        self,
        measurement: Measurement,
        more: gate.More | None = None,
        *,
        maximum_rounds: int | None = None,
        part: bool = False,
    ) -> None:
        """Record and judge a measurement: see `Recorder.record`.

        Args:
            measurement: The measurement.
            more: A function that measures more samples.
            maximum_rounds: The maximum number of samples.
            part: Whether this is a part of another measurement. A part is not a benchmark.

        Raises:
            Unmet: See `Recorder.record`.
            Undecided: See `Recorder.record`.
        """
        if part:
            self._recorder.record(measurement, more, maximum_rounds=maximum_rounds)
            return
        self._recorder.record(measurement, more, maximum_rounds=maximum_rounds, store=self._replay)

    def _replay(self, recorded: Recorded) -> None:
        """Replay the samples as a benchmark. An invalid measurement is not stored."""
        benchmark = self._benchmark
        measurement = recorded.measurement
        benchmark.group = without_depth(measurement.name)  # one group for all depths
        replay = []
        for sample in measurement.samples:
            seconds = _duration(measurement, sample)
            if math.isfinite(seconds) and seconds > 0.0:
                replay.append(seconds)
        benchmark.extra_info.update(self._recorder.described(recorded, reason=recorded.reason))
        benchmark.extra_info["test"] = benchmark.fullname
        rounds = iter(replay or [1.0])

        def stand() -> None:
            self._clock.now = 0.0

        def advance() -> None:
            self._clock.now = next(rounds)

        benchmark.pedantic(  # type: ignore[no-untyped-call]
            advance, setup=stand, rounds=max(len(replay), 1)
        )
        if not (recorded.comparable and replay):
            benchmark.has_error = True  # so that no later run is compared with it


def _duration(measurement: Measurement, sample: float) -> float:
    """Return the time in seconds that pytest-benchmark stores for a sample."""
    # The value is the logarithm of a perplexity; its exponential is a positive number.
    if measurement.unit == "nats":
        exponent = -sample if measurement.higher_is_better else sample
        return math.exp(min(_LARGEST_EXPONENT, exponent))
    return storing.duration(sample, measurement.unit, measurement.higher_is_better)


@pytest.fixture(scope="session")
def box(conformance: Session, pytestconfig: pytest.Config) -> RunBox:
    """The machine's state, read before the first measurement.

    Args:
        conformance: The run. Its recorder checks measurements against this machine from now on.
        pytestconfig: The configuration of pytest, which names the storage with earlier start times.
    """
    ab = conformance.settings.ab
    sides = ab.sides if ab is not None else ()
    urls = [side.url for side in sides if side.url is not None]
    machine = RunBox(conformance.run, also=urls)
    starts = EarlierStarts(
        pytestconfig.getoption("benchmark_storage"), pytestconfig.invocation_params.dir
    )
    conformance.recorder.measure_on(machine, starts)
    machine.read_before()
    return machine


@pytest.fixture
def metric_clock(request: pytest.FixtureRequest) -> ReplayClock:
    """The timer of this test's benchmark. It must exist before the ``benchmark`` fixture.

    Args:
        request: The test, which gets a mark that makes this clock its timer.
    """
    clock = ReplayClock()
    request.node.add_marker(pytest.mark.benchmark(timer=lambda: clock.now), append=False)
    return clock


@pytest.fixture
def record_metric(
    conformance: Session,
    box: RunBox,  # read before anything is measured
    metric_clock: ReplayClock,  # before `benchmark`, which reads its timer when it is created
    benchmark: BenchmarkFixture,
) -> MetricRecorder:
    """Records a measurement as benchmark and metric, and raises its verdict if it is not PASS.

    Args:
        conformance: The run, whose recorder judges measurements.
        box: The machine's state, which is read before anything is measured.
        metric_clock: The timer of the benchmark.
        benchmark: pytest-benchmark's fixture of the test.
    """
    box.begin()
    return MetricRecorder(conformance.recorder, benchmark, metric_clock)


@dataclass
class KernelTimer:
    """Times a case of the kernels under test, and records it as benchmark and metric.

    Args:
        _record: Records the measurement.
        _benchmark: pytest-benchmark's fixture of the test.
    """

    _record: MetricRecorder
    _benchmark: BenchmarkFixture

    def __call__(self, kernels: Kernels, case: BenchmarkCase) -> None:
        """Time a kernel case. With ``--benchmark-disable``, only check the kernel's output.

        Args:
            kernels: The kernels under test.
            case: The operation and its sizes.

        Raises:
            Invalid: The timed call did not compute the output.
        """
        timed = kernels.time(case, is_timed=not self._benchmark.disabled)
        self._benchmark.extra_info.update(timed.about)
        if timed.seconds:
            self._record(timed.measurement)


@pytest.fixture
def time_kernel(
    conformance: Session,
    metric_clock: ReplayClock,  # before `benchmark`, which reads its timer when it is created
    benchmark: BenchmarkFixture,
) -> KernelTimer:
    """Times kernels. Unlike `record_metric`, it does not read the state of the machine.

    Args:
        conformance: The run, whose recorder judges measurements.
        metric_clock: The timer of the benchmark.
        benchmark: pytest-benchmark's fixture of the test.
    """
    recorder = MetricRecorder(conformance.recorder, benchmark, metric_clock)
    return KernelTimer(recorder, benchmark)


def history_of(config: pytest.Config, session: Session) -> measured.MeasuredHistory:
    """Return the measurements so far, to compare them with pytest-benchmark's storage.

    Args:
        config: The configuration of pytest.
        session: The run.
    """
    compared = config.getoption("benchmark_compare")
    named: str | None = None
    if isinstance(compared, str) and compared:
        named = compared
    return measured.MeasuredHistory(
        session.recorder,
        config.getoption("benchmark_storage"),
        config.invocation_params.dir,
        named,
        is_stored=selection.stores(config),
    )


def describe_machine(settings: Settings, machine_info: dict[str, Any]) -> None:
    """Store the properties of the machine that must be equal in order to compare two runs.

    Args:
        settings: The settings of the run.
        machine_info: The description by pytest-benchmark. The clock frequency is removed, because
            it varies.
    """
    cpu = machine_info.get("cpu", {})
    for name in ("hz_actual", "hz_actual_friendly", "hz_advertised", "hz_advertised_friendly"):
        cpu.pop(name, None)
    machine_info["sm121"] = this_machine.identity(host_of(settings.base_url))


def describe_end(session: Session, output_json: dict[str, Any]) -> None:
    """Store the final verdicts of the run, which may have changed after the last measurement.

    The verdict of the run is also a key of the whole file, because a file may have only benchmarks
    outside the levels.

    Args:
        session: The run.
        output_json: The data that pytest-benchmark will store.
    """
    run = session.run
    recorder = session.recorder
    latest = {recorded.measurement.name: recorded for recorded in recorder.recorded}
    tests = [test for test in run.record.ledger if test.executed and not test.excused]
    # The comparison with the trusted run is made later, when the run is closed.
    if session.settings.judging.against is not None and run.target.obstacle is None:
        tests += session.compare_with_trusted().worse
    ended = worst(test.verdict for test in tests)
    output_json["sm121"] = {"run": ended.value}
    for benchmark in output_json["benchmarks"]:
        info = benchmark["extra_info"]
        if "sm121" not in info or info["metric"] not in run.record.file.metrics:
            continue
        recorded = latest.get(info["metric"])
        if recorded is not None:
            info.update(recorder.described(recorded, reason=recorded.reason))
        info["run"] = ended.value
        info["box"] = run.record.file.box.model_dump(mode="json")
        if run.record.file.fingerprint is not None:
            info["fingerprint"] = run.record.file.fingerprint.model_dump(mode="json")
        info["verdict"] = run.record.file.metrics[info["metric"]].verdict.value


def keep_quiet(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Hide pytest-benchmark's tables, because the report contains the numbers.

    The tables are shown with ``-v``, with a comparison, and if a test outside the levels is a
    benchmark.

    Args:
        config: The configuration of pytest.
        items: The selected tests.
    """
    benchmarks = getattr(config, "_benchmarksession", None)
    if benchmarks is None or config.option.verbose > 0:
        return
    if any(config.getoption(name, None) for name in ("benchmark_compare", "benchmark_verbose")):
        return
    for item in items:
        if LEVEL not in item.stash and "benchmark" in getattr(item, "fixturenames", ()):
            return
    benchmarks.quiet = True


def keep_history(config: pytest.Config, session: Session) -> None:
    """Add the history of each metric to the report, before this run is stored.

    Args:
        config: The configuration of pytest.
        session: The run.
    """
    if not session.recorder.recorded:
        return
    history = history_of(config, session)
    try:
        series = metric_levels.series_of(
            history.current, history.runs, session.run.record.file.started
        )
    except (Sm121Error, AssertionError):
        return  # no stored run; the regression level reports the reason
    findings: list[str] = []
    if HISTORY in config.stash:
        findings = [printable(line) for line in config.stash[HISTORY].findings]
    session.run.record.emit(HistoryRead(series, findings))
