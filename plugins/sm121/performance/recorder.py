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
from sm121.measure import conclusion, gate, machine, metrics, roofline, statistics
from sm121.measure.measurement import Invalidity, Measurement
from sm121.performance.box import RunBox
from sm121.performance.starts import EarlierStarts
from sm121.run import beside, verdict_file
from sm121.run.harness import Harness

#: The part of the kernel path that determines speed.
_SPEED_PATH = ("attention", "moe", "kv_layout", "cuda_graphs", "speculative", "native_fp4")


@dataclass(frozen=True)
class Recorded:
    """A measurement of this run with its verdict and the reason for it."""

    measurement: Measurement
    estimate: statistics.Estimate | None
    verdict: Verdict
    fact: Fact | None
    """What is required and was measured; None where nothing is required."""

    @property
    def reason(self) -> str:
        """The fact for people; empty where there is none."""
        return str(self.fact or "")

    @property
    def comparable(self) -> bool:
        """Whether another run may be compared with it."""
        return self.verdict is not Verdict.INVALID and self.measurement.valid


@dataclass
class Recorder:
    """Decides on the measurements of a run, and writes them into its verdict file. `harness`: the
    run's; `model`: its name from the user; None for the attached server's name, or the profile's;
    `box`: the machine, whose memory bounds a rate; None for no bound."""

    harness: Harness
    model: str | None = None
    box: RunBox | None = None
    #: Earlier starts of the build; None: no storage is known.
    starts: EarlierStarts | None = None
    #: Beside the profile's: of prices, which depend on how the server rounds.
    gates: dict[str, Gate] = field(default_factory=dict)
    recorded: list[Recorded] = field(default_factory=list)

    def record(
        self,
        measurement: Measurement,
        more: gate.More | None = None,
        *,
        maximum_rounds: int | None = None,
        store: Callable[[Recorded], None] = lambda _recorded: None,
    ) -> Recorded:
        """Decide on a measurement, with more rounds if the gate needs them. `measurement`: with its
        first rounds, or all; `more`: measures until there are so many rounds in all;
        `maximum_rounds`: the most; `store`: also called with the recorded measurement, whatever the
        verdict. Raises Invalid: the samples cannot be trusted; Inconclusive: the machine or the
        noise allows no decision; Unmet: the gate failed."""
        file = self.harness.file
        bound = maximum_rounds or measurement.rounds if more else measurement.rounds
        name = measurement.name
        threshold = self.gates.get(name) or self.harness.profile.gate(name)
        decision, second, measurement = self._decide(measurement, threshold, more, bound)
        estimate = decision.estimate if decision else conclusion.estimate_of(measurement)
        if self.harness.attached is not None:
            self.harness.look_at_the_server()
        if replaced := self.harness.replaced:
            invalidity = Invalidity(reason=beside.REPLACED, evidence=replaced)
            measurement.invalid = [*measurement.invalid, invalidity]
        memory, above_roofline = self._against_roofline(measurement, estimate, threshold)
        against = [*map(str, measurement.invalid), *([above_roofline] if above_roofline else [])]
        if not against and estimate is None:
            against.append("no_samples: nothing was measured")
        verdict, fact = self._conclude(measurement, decision, against, gated=threshold is not None)
        if fact and verdict is Verdict.FAIL and (why := memory.get("out_of_reach")):
            (fact,) = noted([fact], f"it reads {why}")
        recorded = Recorded(measurement, estimate, verdict, fact)
        report = file.metrics[name] = _report(recorded, threshold, decision, memory)
        own_gate = self._configuration_gate(name, threshold)
        if own_gate is not None and second is not None and verdict is Verdict.FAIL:
            other, _ = self._conclude(measurement, second, against, gated=True)
            report.configuration_gate = self._described_gate(own_gate, other)
        for line in measurement.unproven:
            self.harness.unproven(line)
        for line in measurement.remarks:
            self.harness.remark(line, at_once=False)
        store(recorded)
        # The last look decides again on what was decided before.
        self.recorded[:] = [r for r in self.recorded if r.measurement.name != measurement.name]
        self.recorded.append(recorded)
        self.harness.save()
        if verdict is Verdict.INVALID:
            raise Invalid(fact)
        if verdict is Verdict.INCONCLUSIVE:
            raise Inconclusive(fact)
        if fact and verdict is Verdict.FAIL:
            raise Unmet(fact)
        return recorded

    def _decide(
        self, measurement: Measurement, threshold: Gate | None, more: gate.More | None, bound: int
    ) -> tuple[gate.Decision | None, gate.Decision | None, Measurement]:
        """Decide by the gate in force, and by the configuration's own where that one fails.

        Returns:
            Both decisions, and the measurement with all rounds that they took.
        """
        if threshold is None or not measurement.valid or not measurement.samples:
            return None, None, measurement
        name = measurement.name
        second = None
        own_gate = self._configuration_gate(name, threshold)
        decision, measurement = gate.decide_measurement(measurement, threshold, more, bound)
        if own_gate is not None and decision.verdict is Verdict.FAIL:
            second, measurement = gate.decide_measurement(measurement, own_gate, more, bound)
            # On all rounds: the second gate may have needed more of them.
            every = measurement.rounds
            decision, _ = gate.decide_measurement(measurement, threshold, None, every)
            second = conclusion.over_starts(second, own_gate, measurement, self._earlier(name))
        decision = conclusion.over_starts(decision, threshold, measurement, self._earlier(name))
        return decision, second, measurement

    def _conclude(
        self,
        measurement: Measurement,
        decision: gate.Decision | None,
        against: list[str],
        *,
        gated: bool,
    ) -> tuple[Verdict, Fact | None]:
        return conclusion.conclude(
            measurement,
            decision,
            gated=gated,
            against=against,
            refuted=self.box.refuted if self.box is not None else (),
            box=self.harness.file.box.reason,
        )

    def _earlier(self, metric: str) -> list[float]:
        """The rates of earlier starts of this build on this machine."""
        if self.starts is None:
            return []
        engine = self.harness.file.engine
        context = self._stored_context()
        try:
            return self.starts.levels(metric, context, engine=engine.name, version=engine.version)
        except UsageError as error:
            self.harness.remark(f"gates: each is judged by one start: {error}", at_once=False)
            return []

    def _described_gate(self, own: Gate, verdict: Verdict) -> verdict_file.ConfigurationGate:
        return verdict_file.ConfigurationGate(
            configuration=self.harness.profile.under_test,
            minimum=own.minimum,
            at_most=own.at_most,
            verdict=verdict,
        )

    def _configuration_gate(self, metric: str, threshold: Gate | None) -> Gate | None:
        """The gate of the configuration under test, where another one is in force."""
        profile = self.harness.profile
        gates = profile.configurations[profile.under_test].gates
        own = next((each for each in gates if each.metric == metric), None)
        if own is None or threshold is None or own == threshold:
            return None
        return own

    def described(self, recorded: Recorded, *, reason: str = "") -> dict[str, Any]:
        """What is stored with a measurement, so that it can be compared and understood later."""
        file, measurement = self.harness.file, recorded.measurement
        finite = [sample for sample in measurement.samples if math.isfinite(sample)]
        metric = file.metrics[measurement.name]
        return {
            "sm121": 1,
            "metric": measurement.name,
            "unit": measurement.unit,
            "higher_is_better": measurement.higher_is_better,
            "quantile": measurement.quantile,
            "samples": finite,
            "failures": len(measurement.samples) - len(finite),
            "value": statistics.finite(recorded.estimate.value) if recorded.estimate else None,
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
        """What a stored run says of what was measured."""
        attached, path = self.harness.attached, self.harness.file.engine.path
        named = self.model or self.harness.profile.model.id
        return {
            # By name, not by path: another checkout measures the same model.
            "model": named if attached is None else attached.endpoint.served_name,
            "path": {name: getattr(path, name, None) for name in _SPEED_PATH},
            "path_requests": [r.by for r in path.requested if r.field in _SPEED_PATH],
            **self.context(),
        }

    def context(self) -> dict[str, Any]:
        """What two runs must share to be compared: machine, profile, configuration, plan."""
        server, file = self.harness.attached, self.harness.file
        attached = host_of(server.endpoint.base_url) if server is not None else None
        workload = file.environment.get("workload") or {}
        return {
            "machine": machine.identity(attached),
            # Not in its identity: machines of one kind may be held against each other.
            "gpu_units": [gpu.get("unit") for gpu in file.environment.get("gpus") or ()],
            "profile": file.profile,
            "configuration": file.engine.configuration if attached is None else None,
            "plan": {name: value for name, value in workload.items() if name != "rounds"},
            "definition": metrics.DEFINITION,
        }

    def _against_roofline(
        self, measurement: Measurement, estimate: statistics.Estimate | None, threshold: Gate | None
    ) -> tuple[dict[str, Any], str | None]:
        """What bounds a decode rate and how much of that was reached, as `MetricReport` has it;
        and what is wrong when it is too high."""
        depth, box = roofline.depth_of(measurement.name), self.box
        costs = box.costs(depth) if box is not None and depth is not None else None
        if box is None or costs is None or box.model is None:
            return {}, None
        ceiling, highest = (box.ceiling(cost) for cost in costs)
        profile, gb_s = self.harness.profile, ceiling.gb_s if ceiling is not None else None
        memory: dict[str, Any] = {
            "bytes_per_token": costs[0] and round(costs[0].total),
            "out_of_reach": threshold
            and roofline.out_of_reach(profile, threshold, costs[0], box.model, gb_s),
        }
        if estimate is None:
            return memory, None
        speculates = self.harness.file.engine.path.speculative not in (None, "none")
        above = highest.broken_by(estimate.value) if highest and not speculates else None
        if ceiling is None:
            return memory, above
        if (higher := ceiling.broken_by(estimate.value)) and not above:
            self.harness.remark(
                f"{measurement.name}: more than the bytes of this configuration allow, so the "
                f"engine quantises what nothing shows it to quantise ({higher})",
                at_once=False,
            )
        share = round(ceiling.share(estimate.value), 4)
        return memory | {"bound": round(ceiling.tok_s, 2), "roofline": share}, above


def _report(
    recorded: Recorded, gate_of: Gate | None, decision: gate.Decision | None, memory: dict[str, Any]
) -> verdict_file.MetricReport:
    measurement, estimate, verdict = recorded.measurement, recorded.estimate, recorded.verdict
    names = ("minimum", "target", "stretch", "at_most")
    thresholds = {name: getattr(gate_of, name, None) for name in names}
    return verdict_file.MetricReport(
        value=statistics.finite(estimate.value) if estimate else None,
        unit=measurement.unit,
        ci_low=statistics.finite(estimate.ci_low) if estimate else None,
        ci_high=statistics.finite(estimate.ci_high) if estimate else None,
        confidence=estimate.confidence if estimate else None,
        rounds=len(measurement.samples),
        starts=1,
        start_spread=decision.start_spread if decision else None,
        grade=decision.grade if decision and verdict is Verdict.PASS else None,
        clock=measurement.clock,
        case=measurement.case,
        accepted_length=measurement.extra.get("mean_accepted_length"),
        acceptance_rate=measurement.extra.get("acceptance_rate"),
        texts=measurement.extra.get("texts"),
        verdict=verdict,
        **thresholds,
        **memory,
    )


def host_of(url: str | None) -> str | None:
    """The machine of an attached server, without the port, which may change."""
    return urlsplit(url).hostname if url else None
