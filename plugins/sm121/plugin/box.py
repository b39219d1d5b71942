"""The machine's state in a run: read before the measurements and after them."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from sm121.core import architecture
from sm121.core.errors import Sm121Error
from sm121.core.profile import Profile
from sm121.core.verdict import Inconclusive, NotRun, Verdict
from sm121.measure import box as measure
from sm121.measure import roofline
from sm121.measure.box import BoxState, Load, Reading
from sm121.measure.roofline import Ceiling
from sm121.measure.stream_bandwidth import read_bandwidth
from sm121.plugin.run import RUN, Run
from sm121.plugin.terminal import announce
from sm121.run.verdict_file import TestReport

_ATTEMPTS = 3
_SETTLED_WITHIN_S = 10.0
_CANARY = "canary:"
_LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass
class Box:
    """The machine that the numbers are of."""

    _run: Run
    before: Reading | None = None
    after: Reading | None = None
    #: Why this machine says nothing about the numbers; None if it does.
    elsewhere: str | None = None
    #: What others had used of the CPU when the measurements began, and after how many starts.
    _began: tuple[Load, int] | None = None
    _load_during: float | None = None
    #: GB/s of reading so many bytes on the CPU: small models live in its caches.
    _by_size: dict[int, float] = field(default_factory=dict)

    def read_before(self) -> None:
        """The first reading."""
        self.before = self._read("before")
        self._began = (Load.take(self._own), self._starts)
        self.conclude()

    def read_after(self) -> None:
        """The second one."""
        if self._began is not None and self._began[1] == self._starts:
            # Of a server that is gone, nobody can say what it used: then it is not known.
            self._load_during = round(Load.take(self._own).since(self._began[0])[0], 3)
        self.after = self._read("after")
        self.conclude()

    def conclude(self) -> None:
        """Write the state into the report."""
        report = self._run.file.box
        if self.elsewhere is not None:
            report.state, report.reason = BoxState.UNKNOWN.value, self.elsewhere
            return
        state, reason = measure.judge(
            self._run.profile.box, self.before, self.after, load_during=self._load_during
        )
        report.state, report.reason = state.value, self._run.redact(reason)
        report.before, report.after = self.before, self.after
        report.load_during = self._load_during

    def check(self) -> None:
        """Raise what the state of the machine means for a measurement.

        Raises:
            Inconclusive: it is DEGRADED.
            NotRun: it is not known.
        """
        report = self._run.file.box
        if report.state == BoxState.DEGRADED:
            raise Inconclusive(f"the box is DEGRADED: {report.reason}")
        if report.state == BoxState.UNKNOWN:
            raise NotRun(f"the box is UNKNOWN: {report.reason}")

    def bandwidth(self, needed_bytes: float) -> float | None:
        """GB/s at which so many bytes can be read over and over; None where it is not known."""
        if self.before is None or self.before.device is None:
            return None
        known = self.before.device
        best = known.bandwidth_best_gb_s
        if known.device != "cpu" or needed_bytes >= known.buffer_mib * 2**20:
            return best
        size = max(int(needed_bytes), 1 << 16)
        if size not in self._by_size:
            try:
                self._by_size[size] = read_bandwidth(size).best_gb_s
            except Sm121Error:
                return None
        return max(self._by_size[size], best)

    def _read(self, when: str) -> Reading | None:
        if self.elsewhere is not None:
            return None
        announce(self._run.config, "box", f"{when} the measurements: memory, matrices, who is here")
        device = "cpu" if self._run.target.arch == architecture.CPU else "cuda:0"
        for _ in range(_ATTEMPTS):  # what passes in seconds is no state of the machine
            measure.wait_until_idle(self._own, within_s=_SETTLED_WITHIN_S)
            reading = measure.read(device, own=self._own)
            earlier = self.before if when == "after" else None
            if measure.judge(self._run.profile.box, earlier, reading)[0] is not BoxState.DEGRADED:
                break
        if reading.device is not None:
            announce(
                self._run.config,
                "box",
                f"{reading.device.bandwidth_gb_s:.4g} GB/s, "
                f"{reading.device.matrix_tflop_s:.3g} TFLOP/s, "
                f"{reading.other_load:.0%} of the CPU taken by others",
            )
        return reading

    @property
    def _starts(self) -> int:
        return len(self._run.pool.starts) if self._run.pool is not None else 0

    def _own(self) -> list[psutil.Process]:
        return self._run.pool.processes() if self._run.pool is not None else []


BOX = pytest.StashKey[Box]()


def ceilings(run: Run, depth: int) -> tuple[Ceiling, Ceiling] | None:
    """The bound on a stream's rate in the checkpoint's own formats, and the one that nothing
    passes, whatever the engine quantised; None where model or machine are not known."""
    found = run.config.stash.get(BOX, None)
    config = _model_config(run)
    if found is None or config is None:
        return None
    tolerance = run.profile.box.roofline_tolerance if run.profile.box else 1.0
    bounds = []
    for formats in (roofline.formats(config, _dtype(run)), roofline.smallest(config)):
        try:
            cost = roofline.traffic(config, depth=depth, formats=formats)
        except Sm121Error:
            return None
        gb_s = found.bandwidth(cost.total)
        if gb_s is None:
            return None
        bounds.append(
            roofline.ceiling(config, gb_s, depth=depth, formats=formats, tolerance=tolerance)
        )
    return bounds[0], bounds[1]


def _model_config(run: Run) -> dict[str, Any] | None:
    """Of the model that is served, or that the profile says is served."""
    twin = run.profile.model.id.removeprefix(_CANARY)
    built = run.config.rootpath / ".cache" / "canary" / twin
    own = str(built) if run.profile.model.id.startswith(_CANARY) else run.profile.model.id
    return roofline.read_config(run.file.engine.model) or roofline.read_config(own)


def _dtype(run: Run) -> str | None:
    """``--dtype`` of the configuration under test."""
    found = run.configurations.get(run.profile.under_test)
    arguments = found.arguments if found is not None else ()
    return next(
        (value for name, value in itertools.pairwise(arguments) if name == "--dtype"),
        None,
    )


def _elsewhere(run: Run, profile: Profile) -> str | None:
    if run.attached is not None:
        host = urlsplit(run.attached.endpoint.base_url).hostname
        if host not in _LOCAL:
            return f"the server is attached at {host}: this machine says nothing about its numbers"
    here = architecture.detect().name
    if profile.arch != here:
        return (
            f"the target is {profile.arch}, this machine is {here}: it says nothing about the "
            "numbers"
        )
    return None


@pytest.fixture(scope="session")
def box(conformance: Run) -> Box:
    """The machine's state, read before the first measurement."""
    found = Box(conformance, elsewhere=_elsewhere(conformance, conformance.profile))
    conformance.config.stash[BOX] = found
    found.read_before()
    if found.before is None or found.before.device is None:
        reason = conformance.file.box.reason or "not measured"
        line = f"box and roofline: {reason}"
        if line not in conformance.file.unproven:
            conformance.file.unproven.append(line)
    return found


# Around the others and first: the server is still there, and pytest-benchmark has not saved yet.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """A machine that went bad in between makes what was measured INCONCLUSIVE."""
    _read_again(session)
    return (yield)


def _read_again(session: pytest.Session) -> None:
    run = session.config.stash.get(RUN, None)
    found = session.config.stash.get(BOX, None)
    if run is None or found is None or run.interrupted or found.before is None:
        return
    healthy = run.file.box.state != BoxState.DEGRADED
    found.read_after()
    if not healthy or run.file.box.state != BoxState.DEGRADED:
        return
    for metric in run.file.metrics.values():
        if metric.verdict in (Verdict.PASS, Verdict.FAIL):
            metric.verdict, metric.grade = Verdict.INCONCLUSIVE, None
    name = "end of the run::box"
    message = f"the box is DEGRADED: {run.file.box.reason}"
    for test in run.ledger:  # each of them was decided on a machine that was not fit
        decided = test.verdict in (Verdict.PASS, Verdict.FAIL) and not test.waived
        if test.level == "performance" and decided and not test.skipped:
            run.ledger.overrule(test.id, Verdict.INCONCLUSIVE, message)
    run.ledger.decide(
        TestReport(id=name, level="performance", verdict=Verdict.INCONCLUSIVE, message=message)
    )
