"""Records measurements: the gate's decision, and the metric in verdict.json."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sm121.core.errors import UsageError
from sm121.core.profile_fields import Gate
from sm121.core.unmet import Fact, Unmet, noted
from sm121.core.verdict import Inconclusive, Invalid, Verdict
from sm121.machine import roofline, this_machine
from sm121.measure import conclusion, gate, metrics, statistics
from sm121.measure.measurement import Invalidity, Measurement
from sm121.performance.box import RunBox
from sm121.performance.starts import EarlierStarts
from sm121.run import details, server_decisions, verdict_file
from sm121.run.events import Measured, Sampled
from sm121.run.run import Run

#: The entries of the workload in which runs that are compared must not differ.
_SIZES = ("prompt_tokens", "generated_tokens", "depths", "plan", "texts")
#: The fields of the kernel path that determine speed.
_SPEED_PATH = ("attention", "moe", "kv_layout", "cuda_graphs", "speculative", "native_fp4")


@dataclass(frozen=True)
class Recorded:
    """A measurement of this run with its verdict and the reason for it."""

    measurement: Measurement
    #: The estimate; None without samples.
    estimate: statistics.Estimate | None
    verdict: Verdict
    #: The requirement and the measured value; None if nothing is required.
    fact: Fact | None

    @property
    def reason(self) -> str:
        """The fact as a text; empty if there is none."""
        return str(self.fact or "")

    @property
    def comparable(self) -> bool:
        """Whether another run may be compared with this measurement."""
        return self.verdict is not Verdict.INVALID and self.measurement.valid


@dataclass(frozen=True)
class _Decisions:
    """The decisions of the gates on a measurement."""

    #: The measurement with all rounds that the decisions took.
    measurement: Measurement
    #: The decision of the gate in force; None if there is none.
    in_force: gate.Decision | None = None
    #: The decision of the configuration's own gate; None unless the gate in force fails.
    own: gate.Decision | None = None


@dataclass(frozen=True)
class _Roofline:
    """The bound of a decode rate by the memory's bandwidth."""

    #: The fields of `MetricReport` that describe the bound.
    fields: dict[str, Any] = field(default_factory=dict)
    #: Why the rate is impossible; None if it is not.
    broken: str | None = None


def _no_store(_recorded: Recorded) -> None:
    """Store nothing."""


@dataclass
class Recorder:
    """Decides on the measurements of a run, and writes them into its verdict file."""

    run: Run
    #: The model's name from the user; None for the attached server's name, or the profile's.
    model: str | None = None
    #: The machine, whose memory bounds a rate; None for no bound.
    box: RunBox | None = None
    #: The earlier starts of the build; None without a storage.
    starts: EarlierStarts | None = field(default=None, init=False)
    #: Gates on the accuracy cost of the server's rounding, besides the profile's gates.
    gates: dict[str, Gate] = field(default_factory=dict)
    recorded: list[Recorded] = field(default_factory=list)

    def measure_on(self, box: RunBox, starts: EarlierStarts) -> None:
        """Use the state of the machine and the build's earlier starts for all following decisions.

        Args:
            box: The state of the machine.
            starts: The stored starts.
        """
        self.box = box
        self.starts = starts

    def record(
        self,
        measurement: Measurement,
        more: gate.More | None = None,
        *,
        maximum_rounds: int | None = None,
        store: Callable[[Recorded], None] = _no_store,
    ) -> Recorded:
        """Decide on a measurement, with more rounds if the gate needs them.

        Args:
            measurement: The measurement with its first rounds, or with all.
            more: Measures until the given number of rounds is reached. None: no further rounds can
                be measured.
            maximum_rounds: The largest number of rounds; None: those of the measurement.
            store: Called with the recorded measurement, whatever the verdict.

        Raises:
            Invalid: The samples cannot be trusted.
            Inconclusive: The machine or the noise allows no decision.
            Unmet: The gate failed.
        """
        name = measurement.name
        threshold = self.gates.get(name) or self.run.profile.gate(name)
        rounds = measurement.rounds
        if more is not None and maximum_rounds:
            rounds = maximum_rounds
        decisions = self._decide(measurement, threshold, more, rounds)
        measurement = decisions.measurement
        estimate = conclusion.estimate_of(measurement)
        if decisions.in_force is not None:
            estimate = decisions.in_force.estimate
        self._check_replaced(measurement)
        memory = self._against_roofline(measurement, estimate, threshold)
        against = [str(invalidity) for invalidity in measurement.invalid]
        if memory.broken is not None:
            against.append(memory.broken)
        if not against and estimate is None:
            against.append("no_samples: nothing was measured")
        verdict, fact = self._conclude(
            measurement, decisions.in_force, against, gated=threshold is not None
        )
        out_of_reach = memory.fields.get("out_of_reach")
        if fact is not None and verdict is Verdict.FAIL and out_of_reach:
            (fact,) = noted([fact], f"it reads {out_of_reach}")
        recorded = Recorded(measurement, estimate, verdict, fact)
        report = _report(recorded, threshold, decisions.in_force, memory.fields)
        own_gate = self._configuration_gate(name, threshold)
        if own_gate is not None and decisions.own is not None and verdict is Verdict.FAIL:
            own_verdict, _ = self._conclude(measurement, decisions.own, against, gated=True)
            report.configuration_gate = self._described_gate(own_gate, own_verdict)
        self.run.record.emit(Measured(name, report))
        self.run.record.emit(Sampled(name, _samples(recorded)))
        self._note_lines(measurement)
        store(recorded)
        # The last look decides again on metrics that were decided before.
        others = [earlier for earlier in self.recorded if earlier.measurement.name != name]
        self.recorded[:] = [*others, recorded]
        _raise_unless_holding(recorded)
        return recorded

    def _note_lines(self, measurement: Measurement) -> None:
        """Store the remarks on a measurement, and the properties that could not be checked."""
        for line in measurement.unproven:
            self.run.record.unproven(line)
        for line in measurement.remarks:
            self.run.record.remark(line, at_once=False)

    def _check_replaced(self, measurement: Measurement) -> None:
        """Make a measurement invalid if another process has taken the attached server's place."""
        if self.run.servers.attached is not None:
            self.run.servers.look()
        if self.run.servers.replaced:
            invalidity = Invalidity(
                reason=server_decisions.REPLACED, evidence=self.run.servers.replaced
            )
            measurement.invalid = [*measurement.invalid, invalidity]

    def _decide(
        self, measurement: Measurement, threshold: Gate | None, more: gate.More | None, bound: int
    ) -> _Decisions:
        """Judge by the gate in force; if it fails, judge by the configuration's own gate, too."""
        if threshold is None or not measurement.valid or not measurement.samples:
            return _Decisions(measurement)
        own_gate = self._configuration_gate(measurement.name, threshold)
        own = None
        decision, measurement = gate.decide_measurement(measurement, threshold, more, bound)
        if own_gate is not None and decision.verdict is Verdict.FAIL:
            own, measurement = gate.decide_measurement(measurement, own_gate, more, bound)
            # Use all rounds, because the second gate may have needed more rounds than the first.
            rounds = measurement.rounds
            decision, _ = gate.decide_measurement(measurement, threshold, None, rounds)
        earlier = self._earlier(measurement.name)
        if own_gate is not None and own is not None:
            own = conclusion.over_starts(own, own_gate, measurement, earlier)
        decision = conclusion.over_starts(decision, threshold, measurement, earlier)
        return _Decisions(measurement, decision, own)

    def _conclude(
        self,
        measurement: Measurement,
        decision: gate.Decision | None,
        against: list[str],
        *,
        gated: bool,
    ) -> tuple[Verdict, Fact | None]:
        """Return the verdict on a measurement, and the fact that explains the verdict.

        ``against`` has the reasons why the measurement is INVALID.
        """
        return conclusion.conclude(
            measurement,
            decision,
            gated=gated,
            against=against,
            refuted=self.box.refuted if self.box is not None else (),
            box=self.run.record.file.box.reason,
        )

    def _earlier(self, metric: str) -> list[float]:
        """Return the rates of earlier starts of this build on this machine."""
        if self.starts is None:
            return []
        engine = self.run.record.file.engine
        context = self._stored_context()
        try:
            return self.starts.levels(metric, context, engine=engine.name, version=engine.version)
        except UsageError as error:
            self.run.record.remark(
                f"gates: judged without earlier starts, which cannot be read: {error}",
                at_once=False,
            )
            return []

    def _described_gate(self, own: Gate, verdict: Verdict) -> verdict_file.ConfigurationGate:
        return verdict_file.ConfigurationGate(
            configuration=self.run.profile.under_test,
            minimum=own.minimum,
            at_most=own.at_most,
            verdict=verdict,
        )

    def _configuration_gate(self, metric: str, threshold: Gate | None) -> Gate | None:
        """Return the configuration's own gate of a metric if another gate applies to the metric."""
        profile = self.run.profile
        gates = profile.configurations[profile.under_test].gates
        for own in gates:
            if own.metric == metric and threshold is not None and own != threshold:
                return own
        return None

    def described(self, recorded: Recorded, *, reason: str = "") -> dict[str, Any]:
        """Return what is stored with a measurement, to compare and understand it later.

        Args:
            recorded: The measurement.
            reason: The reason for its verdict.

        Returns:
            The ``extra_info`` of a benchmark of pytest-benchmark.
        """
        file = self.run.record.file
        measurement = recorded.measurement
        finite = [sample for sample in measurement.samples if math.isfinite(sample)]
        metric = file.metrics[measurement.name]
        value = recorded.estimate.value if recorded.estimate is not None else None
        return {
            "sm121": 1,
            "metric": measurement.name,
            "unit": measurement.unit,
            "higher_is_better": measurement.higher_is_better,
            "quantile": measurement.quantile,
            "samples": finite,
            "failures": len(measurement.samples) - len(finite),
            "value": statistics.finite(value),
            "clock": measurement.clock,
            "case": measurement.case,
            "verdict": recorded.verdict.value,
            "reason": reason,
            "invalid": [str(item) for item in measurement.invalid],
            "unproven": list(measurement.unproven),
            "engine": {"name": file.engine.name, "version": file.engine.version},
            "box": file.box.model_dump(mode="json"),
            **self._stored_context(),
            "roofline": metric.roofline,
            "bytes_per_token": metric.bytes_per_token,
            "extra": measurement.extra,
        }

    def _stored_context(self) -> dict[str, Any]:
        """Return the part of a stored run that describes the server."""
        path = self.run.record.file.engine.path
        # Compare the names of models and not their paths, because another checkout measures the
        # same model.
        model = self.model or self.run.profile.model.id
        if self.run.servers.attached is not None:
            model = self.run.servers.attached.endpoint.served_name
        requests = [request.by for request in path.requested if request.field in _SPEED_PATH]
        return {
            "model": model,
            "path": {name: getattr(path, name, None) for name in _SPEED_PATH},
            "path_requests": requests,
            **self.context(),
        }

    def context(self) -> dict[str, Any]:
        """Return what two runs must share to be compared: machine, profile, configuration, plan."""
        file = self.run.record.file
        host = None
        configuration = file.engine.configuration
        if self.run.servers.attached is not None:
            host = host_of(self.run.servers.attached.endpoint.base_url)
            configuration = None
        workload = file.environment.get("workload") or {}
        return {
            "machine": this_machine.identity(host),
            # The units are not part of the machine's identity, because machines of one kind are
            # comparable.
            "gpu_units": [gpu.get("unit") for gpu in file.environment.get("gpus") or ()],
            "profile": file.profile,
            "configuration": configuration,
            "plan": {name: workload[name] for name in _SIZES if name in workload},
            "definition": metrics.DEFINITION,
        }

    def _against_roofline(
        self, measurement: Measurement, estimate: statistics.Estimate | None, threshold: Gate | None
    ) -> _Roofline:
        """Return the highest possible value of a measurement, and whether it is exceeded."""
        share = measurement.extra.get("roofline_share")
        if share is not None and estimate is not None:
            return _Roofline({"roofline": share, "bound": round(share * estimate.value, 2)})
        box = self.box
        name = measurement.name
        depth = roofline.depth_of(name)
        if box is None or depth is None:
            return _Roofline()
        bounds = box.bounds
        model = bounds.model
        if model is None:
            return _Roofline()
        costs = bounds.costs(depth)
        if costs is None:
            return _Roofline()
        ceiling = bounds.ceiling(costs.served)
        highest = bounds.ceiling(costs.least)
        fields: dict[str, Any] = {
            "bytes_per_token": round(costs.served.total) if costs.served is not None else None,
            "out_of_reach": None,
        }
        if threshold is not None:
            gb_s = ceiling.gb_s if ceiling is not None else None
            fields["out_of_reach"] = roofline.out_of_reach(
                self.run.profile, threshold, costs.served, model, gb_s
            )
        if estimate is None:
            return _Roofline(fields)
        rate = roofline.converted(name, estimate.value)
        broken = None
        speculates = self.run.record.file.engine.path.speculative not in (None, "none")
        if highest is not None and not speculates:
            broken = highest.broken_by(rate)
        if ceiling is None:
            return _Roofline(fields, broken)
        above_served = ceiling.broken_by(rate)
        if above_served and not broken:
            self.run.record.remark(
                f"{name}: more than the bytes of this configuration allow, so the "
                f"engine quantises layers without evidence of it ({above_served})",
                at_once=False,
            )
        fields["bound"] = round(roofline.converted(name, ceiling.tok_s), 2)
        fields["roofline"] = round(ceiling.share(rate), 4)
        return _Roofline(fields, broken)


def _samples(recorded: Recorded) -> details.Samples:
    """Return the raw samples of a measurement, for the report."""
    measurement = recorded.measurement
    finite = [sample for sample in measurement.samples if math.isfinite(sample)]
    return details.samples_of(
        {
            "unit": measurement.unit,
            "higher_is_better": measurement.higher_is_better,
            "quantile": measurement.quantile,
            "samples": finite,
            "failures": len(measurement.samples) - len(finite),
            "verdict": recorded.verdict.value,
        }
    )


def _raise_unless_holding(recorded: Recorded) -> None:
    """Raise the error for the verdicts INVALID, INCONCLUSIVE and FAIL."""
    fact = recorded.fact
    if recorded.verdict is Verdict.INVALID:
        raise Invalid(fact)
    if recorded.verdict is Verdict.INCONCLUSIVE:
        raise Inconclusive(fact)
    if fact is not None and recorded.verdict is Verdict.FAIL:
        raise Unmet(fact)


def _report(
    recorded: Recorded, gate_of: Gate | None, decision: gate.Decision | None, memory: dict[str, Any]
) -> verdict_file.MetricReport:
    """Return a measurement in the form of verdict.json."""
    measurement = recorded.measurement
    report = verdict_file.MetricReport(
        value=None,
        unit=measurement.unit,
        rounds=len(measurement.samples),
        starts=1,
        clock=measurement.clock,
        case=measurement.case,
        accepted_length=measurement.extra.get("mean_accepted_length"),
        acceptance_rate=measurement.extra.get("acceptance_rate"),
        texts=measurement.extra.get("texts"),
        verdict=recorded.verdict,
        **memory,
    )
    if recorded.estimate is not None:
        report.value = statistics.finite(recorded.estimate.value)
        report.ci_low = statistics.finite(recorded.estimate.ci_low)
        report.ci_high = statistics.finite(recorded.estimate.ci_high)
        report.confidence = recorded.estimate.confidence
    if decision is not None:
        report.start_spread = decision.start_spread
        if recorded.verdict is Verdict.PASS:
            report.grade = decision.grade
    if gate_of is not None:
        report.minimum = gate_of.minimum
        report.target = gate_of.target
        report.stretch = gate_of.stretch
        report.at_most = gate_of.at_most
    return report


def host_of(url: str | None) -> str | None:
    """Return the name of an attached server's machine: its URL's host, without the changing port.

    Args:
        url: The server's URL; None if there is none.
    """
    return urlsplit(url).hostname if url else None
