"""The machine's state in a run: read before the first measurement and after the last one."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

from sm121.core import architecture
from sm121.core.verdict import Verdict
from sm121.engines.attached_processes import AttachedProcesses
from sm121.machine import box, box_judgement
from sm121.machine.box import BoxState, Reading
from sm121.machine.cpu_use import CpuUse
from sm121.measure import measurement
from sm121.performance.rate_bounds import RateBounds
from sm121.run.events import BoxRead, Decided, Measured, Overruled
from sm121.run.machine_report import BoxReport
from sm121.run.run import Run
from sm121.run.verdict_file import BESIDE, MetricReport, TestReport

#: The machine is read up to this many times until a reading is healthy, because a bad state that
#: passes within seconds does not count.
_ATTEMPTS = 3
#: How long a reading waits for an idle machine, in seconds.
_SETTLED_WITHIN_S = 10.0


class _WindowStart(NamedTuple):
    """The CPU use when the measurements began, and the number of server starts before that."""

    cpu: CpuUse
    starts: int


@dataclass
class RunBox:
    """The machine of a run: its readings, and the judgement of the numbers by these readings."""

    run: Run
    #: URLs of servers that are measured in addition to the attached one: the sides of ``--ab``.
    also: Sequence[str] = ()
    before: Reading | None = None
    after: Reading | None = None
    #: The verdicts on timed metrics that the last reading of the machine contradicts.
    refuted: frozenset[Verdict] = frozenset()
    _began: _WindowStart | None = None
    #: The share of the CPU that other processes took during the measurements; None if not known.
    _load_during: float | None = None
    #: Whether the run has reported that a part of the machine's state could not be read.
    _reported: bool = False
    #: Whether something was measured since the machine was read.
    unread: bool = False
    #: Whether the readings around the measurements are complete.
    _concluded: bool = False
    #: How many servers had crashed when the machine was read.
    _crashed: int = 0
    #: The bounds of the rates, computed from the reading before the measurements.
    bounds: RateBounds = field(init=False)

    def __post_init__(self) -> None:
        self.bounds = RateBounds(self.run)

    @functools.cached_property
    def elsewhere(self) -> str | None:
        """Why the readings of this machine do not apply to the numbers; None if they do."""
        for server in self._attached:
            if not server.here:
                return f"the server runs on {server.host}, not on this machine"
        target = self.run.profile.arch
        arch = architecture.detect().name
        if target == arch:
            return None
        return f"the target is {target}, but this machine is {arch}"

    def read_before(self) -> None:
        """Read the machine's state before anything is measured."""
        self.before = self._read("before")
        self.bounds.device = self.before.device if self.before is not None else None
        self._began = _WindowStart(CpuUse.take(self._own), self._starts)
        self._conclude()
        if self.bounds.device is None:
            reason = self.run.record.file.box.reason or "not measured"
            self.run.record.unproven(f"box and roofline: {reason}")

    def begin(self) -> None:
        """Record that a measurement begins.

        After a crash, the machine may be unfit for later measurements, so it is read again first.
        """
        self.unread = True
        if self.run.servers.crashed > self._crashed:
            self._read_again(self.before)
            self._conclude()

    def read_beside(self) -> BoxReport:
        """Read the machine's state after an A/B comparison, which began at the last reading.

        Returns:
            The report on the comparison. It is the run's own if nothing else was measured in the
            run.
        """
        if not self._concluded:
            self._read_again(self.before)
            self._conclude()
            return self.run.record.file.box
        report = BoxReport()
        since = self.after
        self._read_again(since)
        self._report_on(report, since)
        return report

    def read_at_the_end(self) -> None:
        """Read the machine's state again when the last measuring level has ended.

        If it has become DEGRADED, gated times and rates are INCONCLUSIVE, except a PASS on a
        machine that only became faster. A metric without a gate then has no verdict.
        """
        file = self.run.record.file
        self.unread = False
        if self.before is None:
            return
        was_healthy = file.box.state != BoxState.DEGRADED
        self._read_again(self.before)
        self._conclude()
        self._concluded = True
        self._began = _WindowStart(CpuUse.take(self._own), self._starts)
        if was_healthy and file.box.state == BoxState.DEGRADED:
            self._withdraw_verdicts(f"the machine is DEGRADED: {file.box.reason}")

    def _withdraw_verdicts(self, message: str) -> None:
        """Withdraw the verdicts on timed metrics; the message says why."""
        gated: dict[str, MetricReport] = {}
        for name, metric in list(self.run.record.file.metrics.items()):
            if metric.unit in measurement.COUNTED:
                continue
            if metric.gated:
                gated[name] = metric
            elif metric.verdict is Verdict.PASS:
                without = metric.model_copy(update={"verdict": Verdict.NOT_RUN})
                self.run.record.emit(Measured(name, without))
        refuted = self.refuted & {Verdict.PASS, Verdict.FAIL}
        all_pass = all(metric.verdict is Verdict.PASS for metric in gated.values())
        if all_pass and (not gated or Verdict.PASS not in refuted):
            self.run.record.remark(
                f"rates and times were measured although {message}", at_once=False
            )
            return
        for name, metric in gated.items():
            if metric.verdict in refuted:
                update = {"verdict": Verdict.INCONCLUSIVE, "grade": None}
                self.run.record.emit(Measured(name, metric.model_copy(update=update)))
        # Each test was decided while the machine may have been unfit.
        for test in list(self.run.record.ledger):
            is_decided = test.verdict in refuted and not test.excused and not test.skipped
            is_timed = not test.metrics or not gated.keys().isdisjoint(test.metrics)
            if test.level == "performance" and is_decided and is_timed:
                self.run.record.emit(Overruled(test.id, Verdict.INCONCLUSIVE, message))
        decision = TestReport(
            id=f"{BESIDE}box",
            level="performance",
            verdict=Verdict.INCONCLUSIVE,
            message=message,
        )
        self.run.record.emit(Decided(decision))

    def _read_again(self, since: Reading | None) -> None:
        """Read the machine, and the CPU use of others since the window began.

        ``since`` is the reading that the new one is compared with.
        """
        self._load_during = None
        began = self._began
        if began is not None and began.starts == self._starts and not self._strangers:
            # Compute the load only if no server was started in the meantime, because the CPU use of
            # a stopped server is not known.
            share, *_ = CpuUse.take(self._own).since(began.cpu)
            self._load_during = round(share, 3)
        self.after = self._read("after", since)

    def _conclude(self) -> None:
        """Judge the machine by both readings. Once it was DEGRADED, it stays so."""
        earlier = self.run.record.file.box
        report = earlier.model_copy()
        refuted = self._report_on(report, self.before)
        if earlier.state == BoxState.DEGRADED and report.state != BoxState.DEGRADED:
            # The machine recovered, but was unfit during a part of the measurements.
            report.state = earlier.state
            report.reason = earlier.reason
            report.remedy = earlier.remedy
        else:
            self.refuted = refuted
        self.run.record.emit(BoxRead(report))

    def _report_on(self, report: BoxReport, before: Reading | None) -> frozenset[Verdict]:
        """Fill a report from two readings, and return the verdicts that they contradict."""
        if self.elsewhere is not None:
            report.state = BoxState.UNKNOWN.value
            report.reason = self.elsewhere
            report.remedy = None
            return frozenset()
        judgement = box_judgement.judge_machine(
            self.run.profile.box, before, self.after, load_during=self._load_during
        )
        report.state = judgement.state.value
        report.reason = self.run.record.redact(judgement.reason)
        report.remedy = judgement.remedy
        report.before = before
        report.after = self.after
        report.load_during = self._load_during
        return judgement.refuted

    def _read(self, when: str, earlier: Reading | None = None) -> Reading | None:
        """Read the machine; None if its readings do not apply to the numbers."""
        self._crashed = self.run.servers.crashed
        if self.elsewhere is not None:
            return None
        run = self.run
        run.record.say(
            "box", f"{when} the measurements: memory bandwidth, matrix rate, other processes"
        )
        device = "cpu" if run.target.arch == architecture.CPU else "cuda:0"
        reference = run.profile.box
        # If the machine was unfit before, it stays DEGRADED, so one reading is enough.
        was_unfit = box_judgement.judge_machine(reference, earlier).state is BoxState.DEGRADED
        attempts = 1 if was_unfit else _ATTEMPTS
        for _ in range(attempts):
            box.wait_until_idle(self._own, within_s=_SETTLED_WITHIN_S)
            serving = bool(self._attached or self._own())
            reading = box.read_machine(device, own=self._own, serving=serving)
            if (
                box_judgement.judge_machine(reference, earlier, reading).state
                is not BoxState.DEGRADED
            ):
                reading = self._faster(reading, device, earlier)
                break
        self._report_blind_spots(reading)
        line = box_judgement.capped(reference, reading)
        if line is not None:
            run.record.remark(f"box: {line}")
        if reading.device is not None:
            run.record.say(
                "box",
                f"{reading.device.bandwidth_gb_s:.4g} GB/s, {reading.device.matrix_tflop_s:.3g} "
                f"TFLOP/s, {reading.other_load:.0%} of the CPU used by other processes",
            )
        return reading

    def _faster(self, reading: Reading, device: str, earlier: Reading | None) -> Reading:
        """Read a CPU once more if it was busy, and return the reading with the higher bandwidth."""
        if not reading.is_of_busy_cpu:
            return reading
        again = box.read_machine(device, own=self._own, serving=bool(self._attached or self._own()))
        judged = box_judgement.judge_machine(self.run.profile.box, earlier, again)
        if judged.state is BoxState.DEGRADED or again.device is None or reading.device is None:
            return reading
        if again.device.bandwidth_best_gb_s > reading.device.bandwidth_best_gb_s:
            return again
        return reading

    @property
    def _starts(self) -> int:
        """The number of servers that the suite has started."""
        if self.run.servers.pool is None:
            return 0
        return len(self.run.servers.pool.starts)

    @functools.cached_property
    def _attached(self) -> list[AttachedProcesses]:
        """The processes of the attached server, and of the other servers that the run measures."""
        if self.run.servers.attached is None:
            return []
        url = self.run.servers.attached.endpoint.base_url
        life = self.run.servers.attached_life
        first = life.processes if life is not None else AttachedProcesses(url)
        others = [other for other in dict.fromkeys(self.also) if other != url]
        return [first, *map(AttachedProcesses, others)]

    @property
    def _strangers(self) -> list[AttachedProcesses]:
        """The attached servers whose processes cannot be distinguished from other processes."""
        return [server for server in self._attached if not server.find()]

    def _own(self) -> list[psutil.Process]:
        """Return the processes of all measured servers."""
        if self.run.servers.pool is not None:
            return self.run.servers.pool.processes()
        processes = []
        for server in self._attached:
            processes += server.find()
        return processes

    def _report_blind_spots(self, reading: Reading) -> None:
        """Report once per run which processes cannot be told apart."""
        for server in self._strangers:
            self.run.record.unproven(
                "box: this process cannot see which process listens at "
                f"{server.host}:{server.port} (the server is another user's, in a container, or "
                "behind a proxy), so the load of the server and the load of other processes "
                "cannot be distinguished. Run the suite on the server's machine, as the "
                "server's user"
            )
        if reading.cannot_tell is None or self._reported:
            return
        self._reported = True
        if self._attached:
            self.run.record.unproven(
                f"box: {reading.cannot_tell}; other processes may use the machine, or the server "
                "may be behind a proxy. Attach to the server's own port, on its machine and as "
                "its user"
            )
        else:
            self.run.record.remark(
                f"box: {reading.cannot_tell}: a container has process ids of its own"
            )
