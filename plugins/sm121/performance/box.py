"""The machine's state in a run: read before the first measurement and after the last one."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from sm121.checkpoint import canary
from sm121.core import architecture, errors
from sm121.core.verdict import Verdict
from sm121.engines.attached_processes import AttachedProcesses
from sm121.measure import box, measurement, roofline, stream_bandwidth
from sm121.measure.box import BoxState, Reading
from sm121.measure.cpu_use import CpuUse
from sm121.measure.roofline import Ceiling, Traffic
from sm121.run.harness import Harness
from sm121.run.verdict_file import BESIDE, BoxReport, TestReport

_ATTEMPTS = 3
_SETTLED_WITHIN_S = 10.0
_CANARY = "canary:"


@dataclass
class RunBox:
    """The machine that a run measures on: its readings, and what follows for the numbers."""

    harness: Harness
    #: URLs of servers that are measured beside the attached one: the sides of ``--ab``.
    also: Sequence[str] = ()
    before: Reading | None = None
    after: Reading | None = None
    #: Verdicts on what is timed that do not stand on the machine as it was read last.
    refuted: frozenset[Verdict] = frozenset()
    #: CPU use when the measurements began, and the number of server starts before that.
    _began: tuple[CpuUse, int] | None = None
    _load_during: float | None = None
    _reported: bool = False
    #: Whether something was measured since the machine was read.
    unread: bool = False
    #: Whether the readings that the numbers stand on are complete.
    _concluded: bool = False
    #: Whether a server crashed since the machine was read.
    _doubted: bool = False
    #: GB/s of reading a number of bytes on the CPU. Small models are in its caches.
    _by_size: dict[int, float] = field(default_factory=dict)

    @functools.cached_property
    def elsewhere(self) -> str | None:
        """Why the readings of this machine do not apply to the numbers; None when they do."""
        for server in self._attached:
            if not server.here:
                return (
                    f"the server is attached at {server.host}: this machine says nothing about its "
                    "numbers"
                )
        target, arch = self.harness.profile.arch, architecture.detect().name
        if target == arch:
            return None
        return f"the target is {target}, this machine is {arch}: it says nothing about the numbers"

    def read_before(self) -> None:
        """Read the box before anything is measured."""
        self.before = self._read("before")
        self._began = (CpuUse.take(self._own), self._starts)
        self._conclude()
        if self.before is None or self.before.device is None:
            reason = self.harness.file.box.reason or "not measured"
            self.harness.unproven(f"box and roofline: {reason}")

    def begin(self) -> None:
        """Note that a measurement begins. After a crash the box is read before it."""
        self.unread = True
        if self._doubted:
            self._read_again(self.before)
            self._conclude()

    def doubt(self) -> None:
        """Note that a server crashed: the machine may be left unfit for what is measured later."""
        self._doubted = True

    def read_beside(self) -> BoxReport:
        """Read the box after a comparison that began at the last reading, as ``--ab`` does. The
        box of the run is only changed if nothing else was measured in the run."""
        if not self._concluded:
            self._read_again(self.before)
            self._conclude()
            return self.harness.file.box
        report, since = BoxReport(), self.after
        self._read_again(since)
        self._report_on(report, since)
        return report

    def read_at_the_end(self) -> None:
        """Read the box again when the last measuring level has ended. If it has become DEGRADED,
        what was timed and is compared with a gate is INCONCLUSIVE, but for a PASS on a machine that
        only became faster. A metric without a gate has then no verdict."""
        file, ledger = self.harness.file, self.harness.ledger
        self.unread = False
        if self.before is None:
            return
        healthy = file.box.state != BoxState.DEGRADED
        self._read_again(self.before)
        self._conclude()
        self._concluded = True
        self._began = (CpuUse.take(self._own), self._starts)
        if not healthy or file.box.state != BoxState.DEGRADED:
            return
        message = f"the box is DEGRADED: {file.box.reason}"
        timed = {name: m for name, m in file.metrics.items() if m.unit not in measurement.COUNTED}
        gated = {name: metric for name, metric in timed.items() if metric.gated}
        for name in timed.keys() - gated.keys():
            if timed[name].verdict is Verdict.PASS:
                timed[name].verdict = Verdict.NOT_RUN
        refuted = self.refuted & {Verdict.PASS, Verdict.FAIL}
        all_pass = all(metric.verdict is Verdict.PASS for metric in gated.values())
        if all_pass and (not gated or Verdict.PASS not in refuted):
            self.harness.remark(f"rates and times were measured although {message}", at_once=False)
            return
        for metric in gated.values():
            if metric.verdict in refuted:
                metric.verdict, metric.grade = Verdict.INCONCLUSIVE, None
        for test in ledger:  # each was decided while the machine may have been unfit
            decided = test.verdict in refuted and not test.excused and not test.skipped
            holds = not test.metrics or not gated.keys().isdisjoint(test.metrics)
            if test.level == "performance" and decided and holds:
                ledger.overrule(test.id, Verdict.INCONCLUSIVE, message)
        verdict, level = Verdict.INCONCLUSIVE, "performance"
        ledger.decide(TestReport(id=f"{BESIDE}box", level=level, verdict=verdict, message=message))

    def bandwidth(self, needed_bytes: float) -> float | None:
        """GB/s at which that many bytes can be read repeatedly; None when it is not known."""
        if self.before is None or self.before.device is None:
            return None
        device = self.before.device
        best = device.bandwidth_best_gb_s
        if device.device != "cpu" or needed_bytes >= device.buffer_mib * 2**20:
            return best
        size = max(int(needed_bytes), 1 << 16)
        if size not in self._by_size:
            try:
                self._by_size[size] = stream_bandwidth.read_bandwidth(size).best_gb_s
            except errors.Sm121Error:
                return None
        return max(self._by_size[size], best)

    @functools.cached_property
    def model(self) -> dict[str, Any] | None:
        """config.json of the served model's file, else of the profile's model; None: neither."""
        model = self.harness.profile.model.id
        if model.startswith(_CANARY):
            model = str(canary.folder() / model.removeprefix(_CANARY))
        return roofline.read_config(self.harness.file.engine.model) or roofline.read_config(model)

    def costs(self, depth: int) -> tuple[Traffic | None, Traffic] | None:
        """Bytes of a token: those of the server under test, None where its formats are not known,
        and the least, whatever the engine quantised; None when the model is not known."""
        profile, path = self.harness.profile, self.harness.file.engine.path
        started = self.harness.configurations.get(profile.under_test)
        more = started.arguments if started is not None else ()
        if self.model is None:
            return None
        try:
            least = roofline.traffic(self.model, depth=depth, formats=roofline.SMALLEST)
            least = roofline.spread(least, profile.nodes, self.model)
            if started is None and path.moe is None:
                return None, least
            cost = roofline.cost(profile, profile.under_test, depth, self.model, more, path)
            return cost, least
        except errors.Sm121Error:
            return None

    def ceiling(self, cost: Traffic | None) -> Ceiling | None:
        """The bound of so many bytes; None when they or the machine are not known."""
        gb_s = self.bandwidth(cost.total) if cost is not None else None
        if cost is None or gb_s is None:
            return None
        reference = self.harness.profile.box
        return Ceiling(cost, gb_s, reference.roofline_tolerance if reference else 1.0)

    def _read_again(self, since: Reading | None) -> None:
        """Read the machine, and how much of the CPU others took since the window began. `since`:
        the reading that the new one is compared with."""
        self._doubted = False
        self._load_during = None
        if self._began is not None and self._began[1] == self._starts and not self._strangers:
            # Only if no server was started since: the CPU use of a stopped server is not known.
            self._load_during = round(CpuUse.take(self._own).since(self._began[0])[0], 3)
        self.after = self._read("after", since)

    def _conclude(self) -> None:
        report = self.harness.file.box
        found, reason = report.state, report.reason
        refuted = self._report_on(report, self.before)
        if found == BoxState.DEGRADED and report.state != BoxState.DEGRADED:
            # It recovered, but was unfit while something was measured.
            report.state, report.reason = found, reason
        else:
            self.refuted = refuted

    def _report_on(self, report: BoxReport, before: Reading | None) -> frozenset[Verdict]:
        """Fill a report from two readings. Returns the verdicts on what was timed between them that
        do not stand."""
        if (elsewhere := self.elsewhere) is not None:
            report.state, report.reason = BoxState.UNKNOWN.value, elsewhere
            return frozenset()
        judgement = box.judge(
            self.harness.profile.box, before, self.after, load_during=self._load_during
        )
        report.state, report.reason = judgement.state.value, self.harness.redact(judgement.reason)
        report.before, report.after = before, self.after
        report.load_during = self._load_during
        return judgement.refuted

    def _read(self, when: str, earlier: Reading | None = None) -> Reading | None:
        if self.elsewhere is not None:
            return None
        harness = self.harness
        harness.say("box", f"{when} the measurements: memory, matrices, who is here")
        device = "cpu" if harness.arch == architecture.CPU else "cuda:0"
        reference = harness.profile.box
        # A state that passes within seconds does not count. What was unfit before stays so.
        unfit = box.judge(reference, earlier).state is BoxState.DEGRADED
        for _ in range(1 if unfit else _ATTEMPTS):
            box.wait_until_idle(self._own, within_s=_SETTLED_WITHIN_S)
            serving = bool(self._attached or self._own())
            reading = box.read(device, own=self._own, serving=serving)
            if box.judge(reference, earlier, reading).state is not BoxState.DEGRADED:
                reading = self._faster(reading, device, earlier)
                break
        self._say_what_is_not_known(reading)
        if (line := box.capped(reference, reading)) is not None:
            harness.remark(f"box: {line}")
        if reading.device is not None:
            harness.say(
                "box",
                f"{reading.device.bandwidth_gb_s:.4g} GB/s, "
                f"{reading.device.matrix_tflop_s:.3g} TFLOP/s, "
                f"{reading.other_load:.0%} of the CPU taken by others",
            )
        return reading

    def _faster(self, reading: Reading, device: str, earlier: Reading | None) -> Reading:
        """Read a busy CPU once more; return the reading with the higher bandwidth: it is what the
        memory can do."""
        if not reading.is_of_busy_cpu:
            return reading
        again = box.read(device, own=self._own, serving=bool(self._attached or self._own()))
        judged = box.judge(self.harness.profile.box, earlier, again)
        if judged.state is BoxState.DEGRADED or again.device is None or reading.device is None:
            return reading
        is_faster = again.device.bandwidth_best_gb_s > reading.device.bandwidth_best_gb_s
        return again if is_faster else reading

    @property
    def _starts(self) -> int:
        return len(self.harness.pool.starts) if self.harness.pool is not None else 0

    @functools.cached_property
    def _attached(self) -> list[AttachedProcesses]:
        if (attached := self.harness.attached) is None:
            return []
        life, also = self.harness.attached_life, dict.fromkeys(self.also)
        also.pop(attached.endpoint.base_url, None)
        first = life.processes if life else AttachedProcesses(attached.endpoint.base_url)
        return [first, *map(AttachedProcesses, also)]

    @property
    def _strangers(self) -> list[AttachedProcesses]:
        """Attached servers whose processes cannot be told from other people's."""
        return [server for server in self._attached if not server.find()]

    def _own(self) -> list[psutil.Process]:
        if self.harness.pool is not None:
            return self.harness.pool.processes()
        return [process for server in self._attached for process in server.find()]

    def _say_what_is_not_known(self, reading: Reading) -> None:
        """Once: it holds for the whole run."""
        for server in self._strangers:
            self.harness.unproven(
                f"box: nobody who listens at {server.host}:{server.port} is seen from here (the "
                "server is another user's, in a container, or behind a proxy): what it takes of "
                "the machine cannot be told from what others take; run the suite where the server "
                "runs, as its user"
            )
        if reading.cannot_tell is None or self._reported:
            return
        self._reported = True
        if self._attached:
            self.harness.unproven(
                f"box: {reading.cannot_tell}; others may work there, or the server may stand "
                "behind a proxy: attach to its own port, on its machine and as its user"
            )
        else:
            self.harness.remark(
                f"box: {reading.cannot_tell}: the process ids of a container are its own"
            )
