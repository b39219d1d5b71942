"""Measurements as benchmarks of pytest-benchmark, and the verdict on each.

The benchmark's clock is advanced by the measurement: a rate of 52 tok/s is replayed as rounds of
1/52 s, so that OPS is tok/s and a slower engine is a longer time, which is what
``--benchmark-compare-fail`` compares. A time is replayed as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from sm121.core.profile import Gate
from sm121.core.verdict import Inconclusive, Invalid, Verdict
from sm121.evidence.kernel_path import KernelPath
from sm121.measure import gate, machine, statistics
from sm121.measure.box import BoxState
from sm121.measure.gate import Decision
from sm121.measure.measurement import Measurement
from sm121.measure.statistics import Estimate
from sm121.plugin.box import Box, ceilings
from sm121.plugin.run import RUN, Run
from sm121.plugin.selection import LEVEL
from sm121.run.verdict_file import MetricReport, TestReport

#: Gathers until there are so many rounds (or requests) in all, and gives the whole measurement.
More = Callable[[int], Measurement]

_SECONDS = {"s": 1.0, "ms": 1e-3}
#: Units of what exists once in a run (a start, a peak): one sample is all of it.
_ONCE = ("s", "GiB")


@dataclass(frozen=True)
class Recorded:
    """A measurement of this run with its verdict, as the regression level and the history see
    it."""

    measurement: Measurement
    estimate: Estimate | None
    verdict: Verdict
    benchmark: str


_DECODE_RATE = re.compile(r"tg\d+(@d(?P<depth>\d+))?")

#: Every measurement of this run, in order.
RECORDED = pytest.StashKey[list[Recorded]]()


@dataclass
class ReplayClock:
    """A clock that stands until a sample moves it."""

    now: float = 0.0

    def read(self) -> float:
        """What pytest-benchmark takes for the time."""
        return self.now


@dataclass
class MetricRecorder:
    """Records one measurement: gate, verdict.json, benchmark."""

    _run: Run
    _benchmark: BenchmarkFixture
    _clock: ReplayClock
    _recorded: list[Recorded]

    def __call__(
        self,
        measurement: Measurement,
        more: More | None = None,
        *,
        maximum_rounds: int | None = None,
    ) -> None:
        """Decide on a measurement, with more rounds as the gate needs them.

        Args:
            measurement: its first rounds, or all there are.
            more: gathers up to a number of rounds in all.
            maximum_rounds: the bound; without ``more``, what is there.

        Raises:
            Invalid: something speaks against the samples.
            Inconclusive: the machine or the noise allows no decision.
            AssertionError: the gate failed.
        """
        bound = maximum_rounds or len(measurement.samples) if more else len(measurement.samples)
        threshold = self._run.profile.gate(measurement.name)
        decision = None
        if threshold is not None and measurement.valid and measurement.samples:
            decision, measurement = _gathered(measurement, threshold, more, bound)
        estimate = decision.estimate if decision else _estimate(measurement)
        roofline, above = _against_roofline(self._run, measurement, estimate)
        verdict, reason = self._judge(measurement, decision, estimate, above)
        self._run.file.metrics[measurement.name] = _report(
            measurement, threshold, estimate, decision, verdict, roofline
        )
        for item in measurement.unproven:
            if item not in self._run.file.unproven:
                self._run.file.unproven.append(item)
        self._store(measurement, estimate, verdict, reason)
        self._run.save()
        _raise(verdict, reason)

    def _judge(
        self,
        measurement: Measurement,
        decision: Decision | None,
        estimate: Estimate | None,
        above_roofline: str | None,
    ) -> tuple[Verdict, str]:
        name = measurement.name
        against = [str(item) for item in measurement.invalid]
        if above_roofline:
            against.append(above_roofline)
        if against:
            return Verdict.INVALID, f"{name}: {'; '.join(against)}"
        if estimate is None:
            return Verdict.INVALID, f"{name}: no_samples: nothing was measured"
        if self._run.file.box.state == BoxState.DEGRADED:
            return Verdict.INCONCLUSIVE, f"{name}: the box is DEGRADED: {self._run.file.box.reason}"
        if decision is None:
            return Verdict.PASS, ""
        if measurement.clock == "chunks" and measurement.unit == "tok/s":
            return Verdict.INCONCLUSIVE, (
                f"{name}: tokens were counted by chunks, since the server sends neither token ids "
                f"nor usage; no gate decides on that alone ({decision.reason})"
            )
        return decision.verdict, decision.reason

    def _store(
        self, measurement: Measurement, estimate: Estimate | None, verdict: Verdict, reason: str
    ) -> None:
        """Replay the samples as a benchmark; one that is not valid is left out of the storage."""
        benchmark = self._benchmark
        benchmark.group = measurement.name.partition("@")[0]  # depths beside each other
        seconds = [_duration(measurement, sample) for sample in measurement.samples]
        replay = [value for value in seconds if math.isfinite(value) and value > 0.0]
        benchmark.extra_info.update(
            extra_info(self._run, measurement, estimate, verdict, reason, len(seconds))
        )
        rounds = iter(replay or [1.0])

        def stand() -> None:
            self._clock.now = 0.0

        def advance() -> None:
            self._clock.now = next(rounds)

        benchmark.pedantic(  # type: ignore[no-untyped-call]
            advance, setup=stand, rounds=max(len(replay), 1)
        )
        if verdict is Verdict.INVALID or not replay:
            benchmark.has_error = True  # never the baseline of anything
        self._recorded.append(Recorded(measurement, estimate, verdict, benchmark.fullname))


def _gathered(
    measurement: Measurement, threshold: Gate, more: More | None, bound: int
) -> tuple[Decision, Measurement]:
    while True:
        decision, wanted = _look(measurement, threshold, more is not None, bound)
        if decision is not None:
            return decision, measurement
        if more is None:
            return _too_few(measurement, threshold), measurement
        before = len(measurement.samples)
        measurement = more(wanted)
        if not measurement.valid or len(measurement.samples) <= before:
            more = None  # there will be no more that count
            bound = len(measurement.samples)


def _look(
    measurement: Measurement, threshold: Gate, growing: bool, bound: int
) -> tuple[Decision | None, int]:
    """The decision on what is there, and how many rounds there should be for the next one."""
    samples = measurement.samples
    if measurement.quantile is not None and measurement.quantile > 0.5:
        decision = gate.decide_tail(
            samples,
            threshold,
            fraction=measurement.quantile,
            maximum_requests=bound if growing else None,
        )
        needed = gate.requests_needed(measurement.quantile)
        return decision, min(bound, needed if len(samples) < needed else bound)
    if measurement.unit not in _ONCE:
        bound = max(bound, gate.FIRST_LOOK)
    decision = gate.decide(samples, threshold, maximum_rounds=bound)
    return decision, gate.next_look(len(samples), bound)


def _too_few(measurement: Measurement, threshold: Gate) -> Decision:
    return Decision(
        Verdict.INCONCLUSIVE,
        None,
        statistics.estimate(measurement.samples),
        f"{threshold.metric}: {len(measurement.samples)} rounds decide nothing; a gate needs at "
        f"least {gate.FIRST_LOOK} (--rounds)",
    )


def _estimate(measurement: Measurement) -> Estimate | None:
    if not measurement.samples or any(math.isnan(sample) for sample in measurement.samples):
        return None
    if measurement.quantile is None or measurement.quantile == 0.5:
        return statistics.estimate(measurement.samples)
    return statistics.estimate_quantile(measurement.samples, measurement.quantile)


def _duration(measurement: Measurement, sample: float) -> float:
    if measurement.unit in _SECONDS:
        return sample * _SECONDS[measurement.unit]
    if measurement.higher_is_better:
        return 1.0 / sample if sample else math.inf
    return sample


def _report(
    measurement: Measurement,
    threshold: Gate | None,
    estimate: Estimate | None,
    decision: Decision | None,
    verdict: Verdict,
    roofline: float | None,
) -> MetricReport:
    return MetricReport(
        value=_finite(estimate.value) if estimate else None,
        unit=measurement.unit,
        ci_low=_finite(estimate.ci_low) if estimate else None,
        ci_high=_finite(estimate.ci_high) if estimate else None,
        confidence=estimate.confidence if estimate else None,
        rounds=len(measurement.samples),
        minimum=threshold.minimum if threshold else None,
        target=threshold.target if threshold else None,
        stretch=threshold.stretch if threshold else None,
        at_most=threshold.at_most if threshold else None,
        grade=decision.grade if decision and verdict is Verdict.PASS else None,
        clock=measurement.clock,
        roofline=roofline,
        verdict=verdict,
    )


def _against_roofline(
    run: Run, measurement: Measurement, estimate: Estimate | None
) -> tuple[float | None, str | None]:
    """Share of the memory-bound rate that was reached, and what is wrong when it is too high."""
    if estimate is None or (named := _DECODE_RATE.fullmatch(measurement.name)) is None:
        return None, None
    bounds = ceilings(run, int(named["depth"] or 0))
    if bounds is None or run.file.engine.path.speculative not in (None, "none"):
        return None, None  # one reading of the weights gives several tokens then
    own, highest = bounds
    if (higher := own.broken_by(estimate.value)) and not highest.broken_by(estimate.value):
        run.remark(
            f"{measurement.name}: more than the checkpoint's own formats allow, so the engine "
            f"quantises what they leave in BF16 ({higher})",
            at_once=False,
        )
    return round(own.share(estimate.value), 4), highest.broken_by(estimate.value)


def _finite(value: float | None) -> float | None:
    """JSON has no infinity; the failures that it stands for are counted in ``extra_info``."""
    return value if value is not None and math.isfinite(value) else None


def _raise(verdict: Verdict, reason: str) -> None:
    if verdict is Verdict.INVALID:
        raise Invalid(reason)
    if verdict is Verdict.INCONCLUSIVE:
        raise Inconclusive(reason)
    assert verdict is Verdict.PASS, reason


def extra_info(
    run: Run,
    measurement: Measurement,
    estimate: Estimate | None,
    verdict: Verdict,
    reason: str,
    count: int,
) -> dict[str, Any]:
    """What a stored benchmark must say of itself to be compared and to be understood later."""
    path = run.file.engine.path
    finite = [sample for sample in measurement.samples if math.isfinite(sample)]
    return {
        "sm121": 1,
        "metric": measurement.name,
        "unit": measurement.unit,
        "higher_is_better": measurement.higher_is_better,
        "quantile": measurement.quantile,
        "samples": finite,
        "failures": count - len(finite),
        "value": _finite(estimate.value) if estimate else None,
        "clock": measurement.clock,
        "verdict": verdict.value,
        "reason": reason,
        "invalid": [str(item) for item in measurement.invalid],
        "unproven": list(measurement.unproven),
        "engine": {"name": run.file.engine.name, "version": run.file.engine.version},
        # As it is known, not where it lies: a checkout elsewhere measures the same model.
        "model": _model(run),
        "path": kernel_path(path),
        "box": run.file.box.model_dump(mode="json"),
        **context(run),
        "extra": measurement.extra,
    }


def kernel_path(path: KernelPath) -> dict[str, Any]:
    """The part of the kernel path that decides speed."""
    names = ("attention", "moe", "kv_layout", "cuda_graphs", "speculative", "native_fp4")
    return {name: getattr(path, name, None) for name in names}


def _model(run: Run) -> str:
    if run.attached is not None:
        return run.attached.endpoint.served_name
    return run.settings.model or run.profile.model.id


def attached_host(url: str | None) -> str | None:
    """The machine of an attached server. Its port may be another one each day."""
    return urlsplit(url).hostname if url else None


def context(run: Run) -> dict[str, Any]:
    """What two runs must have in common to be compared: machine, profile, configuration, plan."""
    attached = attached_host(run.attached.endpoint.base_url) if run.attached is not None else None
    workload = run.file.environment.get("workload") or {}
    return {
        "machine": machine.identity(attached),
        "profile": run.file.profile,
        "configuration": run.file.engine.configuration if attached is None else None,
        "plan": {name: value for name, value in workload.items() if name != "rounds"},
    }


@pytest.fixture
def metric_clock(request: pytest.FixtureRequest) -> ReplayClock:
    """The clock of this test's benchmark; it must be there before the ``benchmark`` fixture."""
    clock = ReplayClock()
    request.node.add_marker(pytest.mark.benchmark(timer=clock.read), append=False)
    return clock


@pytest.fixture
def record_metric(
    conformance: Run,
    box: Box,  # noqa: ARG001  # read before anything is measured
    metric_clock: ReplayClock,  # before `benchmark`, which reads its timer when it is made
    benchmark: BenchmarkFixture,
) -> MetricRecorder:
    """Records a measurement as benchmark and metric, and raises its verdict."""
    recorded = conformance.config.stash.setdefault(RECORDED, [])
    return MetricRecorder(conformance, benchmark, metric_clock, recorded)


def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    # The clock at this moment is no property of the machine, and would make each run another one.
    cpu = machine_info.get("cpu", {})
    for name in ("hz_actual", "hz_actual_friendly", "hz_advertised", "hz_advertised_friendly"):
        cpu.pop(name, None)
    machine_info["sm121"] = machine.identity(attached_host(config.getoption("--base-url")))


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
