"""What the performance tests are given: cells of the plan, measured when first asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from rich.console import Console
from rich.status import Status

from sm121.client.timed_process import TimedProcess
from sm121.core import architecture, profile
from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.core.verdict import Invalid, NotRun
from sm121.evidence.requirement import contradictions
from sm121.measure import metrics, validity, visible
from sm121.measure.cells import Cell, Target, prefill_slope
from sm121.measure.measurement import Invalidity, Measurement
from sm121.measure.plan import Plan
from sm121.measure.prompts import Prompts
from sm121.measure.validity import Findings
from sm121.plugin.benchmarks import MetricRecorder
from sm121.plugin.options import SETTINGS, Settings
from sm121.plugin.run import Run
from sm121.plugin.terminal import announce

#: Requests of the last look at the rate, when everything else has been measured.
_LAST_LOOK = 3
_LINE_EVERY_S = 10.0


def plan_of(settings: Settings, chosen: Profile) -> Plan:
    """The profile's measuring plan with the user's depths and rounds."""
    performance = chosen.performance
    return Plan.of(
        performance.prompt_tokens,
        performance.generated_tokens,
        settings.depths or performance.depths,
        performance.measuring,
        rounds=settings.rounds,
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with `depth`, `tokens` or `streams` runs for each of the plan's."""
    if "performance" not in metafunc.fixturenames:
        return
    plan = _expected_plan(metafunc.config.stash[SETTINGS])
    values: dict[str, tuple[int, ...]] = {
        "depth": plan.depths,
        "tokens": plan.generated_tokens,
        "streams": plan.measuring.concurrency,
    }
    for name, choices in values.items():
        if name in metafunc.fixturenames:
            letter = {"depth": "d", "tokens": "tg", "streams": "c"}[name]
            ids = [f"{letter}{value}" for value in choices]
            metafunc.parametrize(name, choices, ids=ids)


def _expected_plan(settings: Settings) -> Plan:
    """The plan of the profile that will be chosen; while tests are collected none is yet."""
    if settings.profile is not None:
        return plan_of(settings, settings.profile)
    arch = settings.arch or architecture.detect().name or architecture.CPU
    try:
        name = profile.for_architecture(arch, settings.engine)
    except UsageError:  # said again, to the user, when the target is resolved
        name = profile.for_architecture(architecture.CPU)
    return plan_of(settings, profile.load(name))


class Display:
    """Progress: one line that changes on a terminal, now and then a line of its own elsewhere."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        self._file = reporter._tw._file if reporter is not None else None
        self._status: Status | None = None
        self._next = 0.0

    def __call__(self, line: str) -> None:
        if self._file is not None and self._file.isatty():
            if self._status is None:
                self._status = Status(line, console=Console(file=self._file))
                self._status.start()
            self._status.update(line)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_EVERY_S
            announce(self._config, "measuring", line)

    def stop(self) -> None:
        """Take the line off the terminal."""
        if self._status is not None:
            self._status.stop()
            self._status = None


@dataclass
class Bench:
    """The cells of one server, each measured once."""

    target: Target
    plan: Plan
    tails: bool
    _cells: dict[tuple[int, int], Cell] = field(default_factory=dict)

    def cell(self, depth: int = 0, concurrency: int = 1) -> Cell:
        """A cell, with the plan's rounds at least."""
        measuring = self.plan.measuring
        cell = self._cells.setdefault(
            (depth, concurrency), Cell(self.target, depth, concurrency=concurrency)
        )
        wanted = measuring.rounds if concurrency == 1 else measuring.concurrency_rounds
        return cell.gather(wanted)

    def measured(self) -> list[Cell]:
        """The cells with one stream, by depth."""
        return [cell for (_, streams), cell in sorted(self._cells.items()) if streams == 1]


@dataclass(frozen=True)
class Performance:
    """Measures, and records what was measured with its verdict."""

    bench: Bench
    _record: MetricRecorder
    _display: Display

    def decode_rate(self, tokens: int, depth: int) -> None:
        """tgN@dD, in tokens a second."""
        self._judge(lambda: self.bench.cell(depth), lambda cell: cell.decode(tokens))

    def prefill_rate(self, depth: int) -> None:
        """ppN@dD, in tokens a second; beside it the slope over the prompts measured so far."""

        def read(cell: Cell) -> Measurement:
            measurement = cell.prefill()
            slope = prefill_slope(self.bench.measured())
            if slope is not None:
                measurement.extra["slope_tok_s"] = slope
            return measurement

        self._judge(lambda: self.bench.cell(depth), read)

    def concurrent_rate(self, streams: int) -> None:
        """tgN_cC@dD of so many streams together, in tokens a second."""
        depth = self.bench.plan.depths[0]
        self._judge(lambda: self.bench.cell(depth, streams), lambda cell: cell.decode(cell.tokens))

    def time(self, name: str, quantile: float, *, streams: int = 1) -> None:
        """ttft, tpot, itl or e2e at the first depth, in milliseconds."""
        depth = self.bench.plan.depths[0]
        suffix = "" if streams == 1 else f"_c{streams}"
        tail = quantile > 0.5
        self._judge(
            lambda: self.bench.cell(depth, streams),
            lambda cell: cell.times(name, quantile, suffix=suffix),
            bound=self.bench.plan.measuring.tail_requests if tail else None,
            growing=not tail or self.bench.tails,
            short=name == "ttft" and streams == 1,
        )

    def visible_time(self, questions: Sequence[str], tokens: int) -> None:
        """ttft_visible_p50: the first text of the answer proper, in milliseconds."""
        rounds = self.bench.plan.measuring.concurrency_rounds
        try:
            self._record(
                visible.measure(self.bench.target, questions, rounds=rounds, tokens=tokens)
            )
        finally:
            self._display.stop()

    def once(self, name: str, unit: str, value: float) -> None:
        """What exists once in a run: a start, a peak."""
        self._record(
            Measurement.model_validate(
                {"name": name, "unit": unit, "samples": [value], "higher_is_better": False}
            )
        )

    def _judge(
        self,
        get: Callable[[], Cell],
        read: Callable[[Cell], Measurement],
        *,
        bound: int | None = None,
        growing: bool = True,
        short: bool = False,
    ) -> None:
        try:
            cell = get()

            def more(samples: int) -> Measurement:
                if short:
                    return read(cell.gather_short(samples))
                now, rounds = len(read(cell).samples), len(cell.long)
                each = max(1, now // max(1, rounds))  # a round of several streams has several
                return read(cell.gather(rounds + max(1, math.ceil((samples - now) / each))))

            self._record(
                read(cell),
                more if growing else None,
                maximum_rounds=bound or self.bench.plan.measuring.maximum_rounds,
            )
        finally:
            self._display.stop()


@pytest.fixture(scope="session")
def bench(conformance: Run) -> Iterator[Bench]:
    """The measuring client, and the plan in force."""
    run = conformance
    server = run.server()
    plan = plan_of(run.settings, run.profile)
    display = Display(run.config)
    invalid, unproven = _standing(run, server)
    with TimedProcess(server.endpoint.base_url, server.endpoint.api_key) as sender:
        target = Target(
            endpoint=server.endpoint,
            sender=sender,
            prompts=Prompts(server.endpoint, plan.measuring.vocabulary),
            plan=plan,
            directory=run.directory / "records",
            show=display,
            invalid=invalid,
            unproven=unproven,
        )
        target.probe()
        run.config.stash[_DISPLAY] = display
        yield Bench(target, plan, run.settings.tails)
        display.stop()


_DISPLAY = pytest.StashKey[Display]()


@pytest.fixture
def performance(bench: Bench, record_metric: MetricRecorder, server: Server) -> Performance:
    """Measures the server under test and records what was measured."""
    assert server.endpoint == bench.target.endpoint
    return Performance(bench, record_metric, record_metric._run.config.stash[_DISPLAY])


def _standing(run: Run, server: Server) -> tuple[list[Invalidity], list[str]]:
    """What speaks against every number of this server: it is not on the path it should be on."""
    if server.log is None:
        return [], ["kernel path: the attached server's log is not known; give --server-log"]
    found = contradictions(
        run.profile.kernel_path, run.kernel_path(server), server.log, run.profile.under_test
    )
    if not found:
        return [], []
    evidence = "; ".join(found)[:500]
    return [Invalidity(reason="kernel_path", evidence=evidence)], []


@dataclass(frozen=True)
class LastLook:
    """Whether the server is still as fast as in the beginning."""

    _bench: Bench

    def check(self) -> None:
        """Measure the first cell again.

        Raises:
            Invalid: it is not.
            NotRun: nothing was measured before.
        """
        first = next((c for c in self._bench.measured() if c.depth == self._bench.plan.depths[0]),
                     None)  # fmt: skip
        if first is None or first.clock is None:
            raise NotRun("nothing was measured at the first depth of the plan")
        before = [metrics.decode_rate(answer, first.clock) for answer in first.answers]
        again = Cell(self._bench.target, first.depth, short_rounds=0, warm=True)
        again.gather(_LAST_LOOK)
        clock = again.clock or first.clock
        after = [metrics.decode_rate(answer, clock) for answer in again.answers]
        findings = Findings()
        validity.check_drift([*before, *after], self._bench.plan.measuring.drift_bound, findings)
        if findings.invalid:
            raise Invalid(f"{first.what}: {findings.invalid[0]}")


@pytest.fixture
def last_look(bench: Bench) -> LastLook:
    """Measures the first cell once more."""
    return LastLook(bench)


@pytest.fixture
def startup_s(server: Server) -> float:
    """How long the server under test took to be ready."""
    if server.startup_s is None:
        raise NotRun("the attached server was started by somebody else; run without --base-url")
    return server.startup_s


@pytest.fixture
def memory_peak_gib(conformance: Run) -> float:
    """The most memory that the server's processes held so far."""
    if conformance.sampler is None:
        raise NotRun("the attached server's processes are not ours to look at")
    conformance.sampler.sample()
    peak = conformance.sampler.resources.tree_rss_peak_bytes
    if peak is None:
        raise NotRun("no process of the server could be looked at")
    return peak / 2**30
