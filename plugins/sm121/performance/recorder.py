"""Records measurements: the gate's decision, and the metric in verdict.json."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sm121.core.profile import Gate
from sm121.core.verdict import Inconclusive, Invalid, Verdict
from sm121.evidence.kernel_path import KernelPath
from sm121.measure import gate, machine, metrics, statistics
from sm121.measure.box import BoxState
from sm121.measure.gate import Decision
from sm121.measure.measurement import COUNTED, Measurement
from sm121.measure.roofline import Ceiling
from sm121.measure.statistics import Estimate
from sm121.performance.box import RunBox
from sm121.run.harness import Harness
from sm121.run.verdict_file import MetricReport

#: Measures until there are that many rounds (or requests) in all; returns the whole measurement.
More = Callable[[int], Measurement]

#: Units of values that exist once in a run (a start, a peak, what was accepted of all drafts). They
#: have one sample.
_ONCE = ("s", "GiB", "%", "tokens")
_DECODE_RATE = re.compile(r"tg\d+(@d(?P<depth>\d+))?")


@dataclass(frozen=True)
class Recorded:
    """A measurement of this run with its verdict and the reason for it."""

    measurement: Measurement
    estimate: Estimate | None
    verdict: Verdict
    reason: str


@dataclass
class Recorder:
    """Decides on the measurements of a run, and writes them into its verdict file.

    Args:
        harness: the run's.
        model: its name from the user; None for the attached server's name, or the profile's.
        box: the machine, whose memory bounds a rate; None for no bound.
    """

    harness: Harness
    model: str | None = None
    box: RunBox | None = None
    #: The recorded measurements so far, in order.
    recorded: list[Recorded] = field(default_factory=list)

    def record(
        self,
        measurement: Measurement,
        more: More | None = None,
        *,
        maximum_rounds: int | None = None,
        store: Callable[[Recorded], None] = lambda _recorded: None,
    ) -> Recorded:
        """Decide on a measurement, with more rounds if the gate needs them.

        Args:
            measurement: with its first rounds, or with all.
            more: measures until there is a given number of rounds in all.
            maximum_rounds: the most rounds; without ``more``, those of the measurement.
            store: also called with the recorded measurement, whatever the verdict.

        Raises:
            Invalid: the samples cannot be trusted.
            Inconclusive: the machine or the noise allows no decision.
            AssertionError: the gate failed.
        """
        file = self.harness.file
        bound = maximum_rounds or measurement.rounds if more else measurement.rounds
        threshold = self.harness.profile.gate(measurement.name)
        decision = None
        if threshold is not None and measurement.valid and measurement.samples:
            decision, measurement = _gathered(measurement, threshold, more, bound)
        estimate = decision.estimate if decision else _estimate(measurement)
        roofline, above = self._against_roofline(measurement, estimate)
        verdict, reason = self._judge(measurement, decision, estimate, above)
        if verdict is Verdict.FAIL and threshold is not None:
            reason += self._out_of_reach(threshold)
        file.metrics[measurement.name] = _report(
            measurement, threshold, estimate, decision, verdict, roofline
        )
        for item in measurement.unproven:
            if item not in file.unproven:
                file.unproven.append(item)
        for line in measurement.remarks:
            self.harness.remark(line, at_once=False)
        found = Recorded(measurement, estimate, verdict, reason)
        store(found)
        # The last look decides again on what was decided before.
        self.recorded[:] = [r for r in self.recorded if r.measurement.name != measurement.name]
        self.recorded.append(found)
        self.harness.save()
        if verdict is Verdict.INVALID:
            raise Invalid(reason)
        if verdict is Verdict.INCONCLUSIVE:
            raise Inconclusive(reason)
        assert verdict is Verdict.PASS, reason
        return found

    def described(self, recorded: Recorded, *, reason: str = "") -> dict[str, Any]:
        """What is stored with a measurement, so that it can be compared and understood later."""
        file, measurement = self.harness.file, recorded.measurement
        finite = [sample for sample in measurement.samples if math.isfinite(sample)]
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
            "verdict": recorded.verdict.value,
            "reason": reason,
            "invalid": [str(item) for item in measurement.invalid],
            "unproven": list(measurement.unproven),
            "engine": {"name": file.engine.name, "version": file.engine.version},
            # By name, not by path: another checkout measures the same model.
            "model": self._model,
            "path": speed_path(file.engine.path),
            "box": file.box.model_dump(mode="json"),
            **self.context(),
            "extra": measurement.extra,
        }

    def context(self) -> dict[str, Any]:
        """What two runs must have in common to be compared: machine, profile, configuration,
        plan."""
        server, file = self.harness.attached, self.harness.file
        attached = host_of(server.endpoint.base_url) if server is not None else None
        workload = file.environment.get("workload") or {}
        return {
            "machine": machine.identity(attached),
            "profile": file.profile,
            "configuration": file.engine.configuration if attached is None else None,
            "plan": {name: value for name, value in workload.items() if name != "rounds"},
            "definition": metrics.DEFINITION,
        }

    @property
    def _model(self) -> str:
        if self.harness.attached is not None:
            return self.harness.attached.endpoint.served_name
        return self.model or self.harness.profile.model.id

    def _judge(
        self,
        measurement: Measurement,
        decision: Decision | None,
        estimate: Estimate | None,
        above_roofline: str | None,
    ) -> tuple[Verdict, str]:
        name, box = measurement.name, self.harness.file.box
        against = [str(item) for item in measurement.invalid]
        if above_roofline:
            against.append(above_roofline)
        if against:
            return Verdict.INVALID, f"{name}: {'; '.join(against)}"
        if estimate is None:
            return Verdict.INVALID, f"{name}: no_samples: nothing was measured"
        if box.state == BoxState.DEGRADED and measurement.unit not in COUNTED:
            return Verdict.INCONCLUSIVE, f"{name}: the box is DEGRADED: {box.reason}"
        if decision is None:
            return Verdict.PASS, ""
        if measurement.clock == "chunks" and measurement.unit == "tok/s":
            return Verdict.INCONCLUSIVE, (
                f"{name}: tokens were counted by chunks, since the server sends neither token ids "
                f"nor usage; no gate decides on that alone ({decision.reason})"
            )
        return decision.verdict, decision.reason

    def _out_of_reach(self, threshold: Gate) -> str:
        """Why no engine that reads the checkpoint as it is can reach a gate; empty where one
        could."""
        bounds = self._ceilings(threshold.metric)
        if bounds is None or threshold.minimum is None or bounds[0].tok_s >= threshold.minimum:
            return ""
        own = bounds[0]
        return (
            f". {threshold.minimum:g} tok/s cannot be reached with these bytes: a token reads "
            f"{own.traffic.total / 1e9:.3f} GB in the checkpoint's own formats ({own.traffic}), "
            f"and {own.gb_s:.0f} GB/s were measured, so that {own.tok_s:.1f} tok/s are the most; "
            "it needs dense layers in fewer bits, or speculation"
        )

    def _ceilings(self, metric: str) -> tuple[Ceiling, Ceiling] | None:
        """The bounds on a decode rate; None where there are none: with speculation one read of the
        weights gives several tokens."""
        named = _DECODE_RATE.fullmatch(metric)
        if named is None or self.box is None:
            return None
        if self.harness.file.engine.path.speculative not in (None, "none"):
            return None
        return self.box.ceilings(int(named["depth"] or 0))

    def _against_roofline(
        self, measurement: Measurement, estimate: Estimate | None
    ) -> tuple[float | None, str | None]:
        """Share of the memory-bound rate that was reached, and what is wrong when it is too
        high."""
        bounds = self._ceilings(measurement.name)
        if estimate is None or bounds is None:
            return None, None
        own, highest = bounds
        above = highest.broken_by(estimate.value)
        if (higher := own.broken_by(estimate.value)) and not above:
            self.harness.remark(
                f"{measurement.name}: more than the checkpoint's own formats allow, so the engine "
                f"quantises what they leave in BF16 ({higher})",
                at_once=False,
            )
        return round(own.share(estimate.value), 4), above


def _gathered(
    measurement: Measurement, threshold: Gate, more: More | None, bound: int
) -> tuple[Decision, Measurement]:
    while True:
        decision, wanted = _look(measurement, threshold, more is not None, bound)
        if decision is not None:
            return decision, measurement
        before = measurement.rounds
        if more is None:
            why = (
                f"{threshold.metric}: {before} rounds decide nothing; a gate needs at least "
                f"{gate.FIRST_LOOK} (--rounds)"
            )
            estimate = statistics.estimate(measurement.samples)
            return Decision(Verdict.INCONCLUSIVE, None, estimate, why), measurement
        measurement = more(wanted)
        if not measurement.valid or measurement.rounds <= before:
            more = None  # no more valid rounds will come
            bound = measurement.rounds


def _look(
    measurement: Measurement, threshold: Gate, growing: bool, bound: int
) -> tuple[Decision | None, int]:
    """The decision on the rounds so far, and the number of rounds for the next decision."""
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
    decision = gate.decide(
        samples,
        threshold,
        maximum_rounds=bound,
        track=measurement.track,
        left_out=measurement.left_out,
    )
    return decision, gate.next_look(measurement.rounds, bound)


def _estimate(measurement: Measurement) -> Estimate | None:
    if not measurement.samples or any(math.isnan(sample) for sample in measurement.samples):
        return None
    if measurement.quantile is None or measurement.quantile == 0.5:
        return statistics.estimate(measurement.samples)
    return statistics.estimate_quantile(measurement.samples, measurement.quantile)


def _report(
    measurement: Measurement,
    threshold: Gate | None,
    estimate: Estimate | None,
    decision: Decision | None,
    verdict: Verdict,
    roofline: float | None,
) -> MetricReport:
    bounds = {
        name: getattr(threshold, name, None) for name in ("minimum", "target", "stretch", "at_most")
    }
    return MetricReport(
        value=statistics.finite(estimate.value) if estimate else None,
        unit=measurement.unit,
        ci_low=statistics.finite(estimate.ci_low) if estimate else None,
        ci_high=statistics.finite(estimate.ci_high) if estimate else None,
        confidence=estimate.confidence if estimate else None,
        rounds=len(measurement.samples),
        grade=decision.grade if decision and verdict is Verdict.PASS else None,
        clock=measurement.clock,
        roofline=roofline,
        accepted_length=measurement.extra.get("mean_accepted_length"),
        verdict=verdict,
        **bounds,
    )


def speed_path(path: KernelPath) -> dict[str, Any]:
    """The part of the kernel path that determines speed."""
    names = ("attention", "moe", "kv_layout", "cuda_graphs", "speculative", "native_fp4")
    return {name: getattr(path, name, None) for name in names}


def host_of(url: str | None) -> str | None:
    """The machine of an attached server, without the port, which may change."""
    return urlsplit(url).hostname if url else None
