"""Measurements as benchmarks of pytest-benchmark. A rate of 52 tok/s is replayed as rounds of 1/52
s, so that a slower engine is a longer time for ``--benchmark-compare-fail``; a time as it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from sm121.core.errors import Sm121Error
from sm121.core.metric_name import without_depth
from sm121.core.printable import printable
from sm121.core.verdict import worst
from sm121.kernels.cases import BenchmarkCase
from sm121.kernels.under_test import Kernels
from sm121.measure import gate, machine
from sm121.measure.measurement import Measurement
from sm121.performance.box import RunBox
from sm121.performance.recorder import Recorded, Recorder, host_of
from sm121.performance.starts import EarlierStarts
from sm121.plugin import selection
from sm121.plugin.stash import LEVEL
from sm121.regression import measured, metric_levels
from sm121.run import details
from sm121.session.session import Session
from sm121.session.settings import Settings

_SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
HISTORY = pytest.StashKey[measured.MeasuredHistory]()


@dataclass
class ReplayClock:
    """A clock that moves only when a sample advances it."""

    now: float = 0.0


@dataclass
class MetricRecorder:
    """Records one measurement, and replays it as the benchmark of a test."""

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
        """Decide: see `Recorder.record`. A `part` of another measurement is no benchmark."""
        stored = {} if part else {"store": self._replay}
        self._recorder.record(measurement, more, maximum_rounds=maximum_rounds, **stored)

    def _replay(self, recorded: Recorded) -> None:
        """Replay the samples as a benchmark. An invalid measurement is not stored."""
        benchmark = self._benchmark
        measurement = recorded.measurement
        benchmark.group = without_depth(measurement.name)  # depths beside each other
        seconds = [_duration(measurement, sample) for sample in measurement.samples]
        replay = [value for value in seconds if math.isfinite(value) and value > 0.0]
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
            benchmark.has_error = True  # so that nothing is ever compared with it


def _duration(measurement: Measurement, sample: float) -> float:
    if measurement.unit == "nats":  # a perplexity, which is positive
        return math.exp(min(700.0, -sample if measurement.higher_is_better else sample))
    if measurement.unit in _SECONDS:
        return sample * _SECONDS[measurement.unit]
    if measurement.higher_is_better:
        if sample:
            return 1.0 / sample
        return math.inf
    return sample


@pytest.fixture(scope="session")
def box(conformance: Session) -> RunBox:
    """The machine's state, read before the first measurement."""
    settings = conformance.settings
    conformance.box = RunBox(
        conformance,
        also=[side.url for side in settings.ab or () if side.url is not None],
    )
    conformance.box.read_before()
    return conformance.box


@pytest.fixture
def metric_clock(request: pytest.FixtureRequest) -> ReplayClock:
    """The clock of this test's benchmark; it must be there before the ``benchmark`` fixture."""
    clock = ReplayClock()
    request.node.add_marker(pytest.mark.benchmark(timer=lambda: clock.now), append=False)
    return clock


@pytest.fixture
def record_metric(
    pytestconfig: pytest.Config,
    conformance: Session,
    box: RunBox,  # read before anything is measured
    metric_clock: ReplayClock,  # before `benchmark`, which reads its timer when it is made
    benchmark: BenchmarkFixture,
) -> MetricRecorder:
    """Records a measurement as benchmark and metric, and raises its verdict."""
    conformance.recorder.box = box
    conformance.recorder.starts = EarlierStarts(
        pytestconfig.getoption("benchmark_storage"), pytestconfig.invocation_params.dir
    )
    box.begin()
    return MetricRecorder(conformance.recorder, benchmark, metric_clock)


@dataclass
class KernelTimer:
    """Times a case of the kernels under test, and records it as benchmark and metric."""

    _record: MetricRecorder
    _benchmark: BenchmarkFixture

    def __call__(self, kernels: Kernels, case: BenchmarkCase) -> None:
        """Time a case. With ``--benchmark-disable`` its output is judged, and nothing is recorded.

        Args:
            kernels: The kernels under test.
            case: The operation and its sizes.

        Raises:
            Invalid: The number is of a call that did not do its work.
        """
        timed = kernels.time(case, is_timed=not self._benchmark.disabled)
        self._benchmark.extra_info.update(timed.about)
        if timed.seconds:
            self._record(timed.measurement)


@pytest.fixture
def time_kernel(
    conformance: Session,
    metric_clock: ReplayClock,  # before `benchmark`, as above
    benchmark: BenchmarkFixture,
) -> KernelTimer:
    """Times kernels. The state of the machine is read later, by what measures a server."""
    recorder = MetricRecorder(conformance.recorder, benchmark, metric_clock)
    return KernelTimer(recorder, benchmark)


def history_of(config: pytest.Config, session: Session) -> measured.MeasuredHistory:
    """What has been measured so far, to be compared with pytest-benchmark's storage."""
    compared = config.getoption("benchmark_compare")
    return measured.MeasuredHistory(
        session.recorder,
        config.getoption("benchmark_storage"),
        config.invocation_params.dir,
        compared if isinstance(compared, str) and compared else None,
        is_stored=any(config.getoption(name, None) for name in selection.STORING),
    )


def describe_machine(settings: Settings, machine_info: dict[str, Any]) -> None:
    """What two stored runs must have in common. The current clock frequency is left out."""
    cpu = machine_info.get("cpu", {})
    for name in ("hz_actual", "hz_actual_friendly", "hz_advertised", "hz_advertised_friendly"):
        cpu.pop(name, None)
    machine_info["sm121"] = machine.identity(host_of(settings.base_url))


def describe_end(session: Session, output_json: dict[str, Any]) -> None:
    """Write into what is stored how the run ended: the last look may have decided again."""
    recorder = session.recorder
    latest = {recorded.measurement.name: recorded for recorded in recorder.recorded}
    tests = [test for test in session.ledger if test.executed and not test.excused]
    # The comparison is decided when the run closes, after this.
    if session.settings.against is not None and session.target.obstacle is None:
        tests += session.worse_than_trusted(session.file.model_copy(deep=True))
    ended = worst(test.verdict for test in tests)
    for benchmark in output_json["benchmarks"]:
        info = benchmark["extra_info"]
        if "sm121" in info and info["metric"] in session.file.metrics:
            recorded = latest.get(info["metric"])
            if recorded is not None:
                info.update(recorder.described(recorded, reason=recorded.reason))
            info["run"] = ended.value
            info["box"] = session.file.box.model_dump(mode="json")
            if session.file.fingerprint is not None:
                info["fingerprint"] = session.file.fingerprint.model_dump(mode="json")
            info["verdict"] = session.file.metrics[info["metric"]].verdict.value


def keep_quiet(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Hide pytest-benchmark's tables without ``-v`` and without a comparison. The report has the
    numbers. Tables of other benchmarks in the same run stay."""
    benchmarks = getattr(config, "_benchmarksession", None)
    if benchmarks is None or config.option.verbose > 0:
        return
    wishes = [config.getoption(f"benchmark_{name}", None) for name in ("compare", "verbose")]
    foreign = [item for item in items if LEVEL not in item.stash]
    uses = [item for item in foreign if "benchmark" in getattr(item, "fixturenames", ())]
    if not any(wishes) and not uses:
        benchmarks.quiet = True


def keep_history(config: pytest.Config, session: Session, known: details.Details) -> None:
    """Put the history of each metric into the report, before this run is added to it."""
    if not session.recorder.recorded:
        return
    history = history_of(config, session)
    try:
        known.history = metric_levels.series_of(history.current, history.runs, session.file.started)
    except (Sm121Error, AssertionError):
        return  # nothing to compare with; the regression level says why
    if HISTORY in config.stash:
        known.findings = [printable(line) for line in config.stash[HISTORY].findings]


def samples(session: Session) -> dict[str, details.Samples]:
    """The raw samples of each metric, for the report."""
    recorder = session.recorder
    return {
        recorded.measurement.name: details.samples_of(recorder.described(recorded))
        for recorded in recorder.recorded
    }
