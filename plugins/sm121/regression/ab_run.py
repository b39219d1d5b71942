"""An A/B comparison: both sides are started in turns, measured, and judged."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from sm121.core import architecture, metric_name
from sm121.core.configuration import environment_items
from sm121.core.level_settings import PRICES
from sm121.core.server import Server
from sm121.core.unmet import Fact, Unmet, require, require_none
from sm121.core.verdict import Inconclusive, Invalid, NotRun, Undecided, Verdict, worst
from sm121.engines import requested
from sm121.engines.server_errors import ServerError
from sm121.engines.server_memory import ServerMemoryReader
from sm121.evidence import kernel_path
from sm121.evidence.compile_watch import CompileWatch
from sm121.machine.box import BoxState
from sm121.measure import metrics, statistics
from sm121.measure.cells import MeasuredCell
from sm121.measure.measured_server import MeasuredServer
from sm121.measure.plan import Plan
from sm121.regression import ab, ab_report, hypothesis, start_pairs, visit_checks
from sm121.regression.ab import MetricOfStart, Side, Visit
from sm121.regression.change import Change
from sm121.regression.hypothesis import Criterion, CriterionResult, Hypothesis
from sm121.regression.side_watch import SideWatch
from sm121.run.machine_report import BoxReport
from sm121.run.run import Run

#: How much worse B may be, as a fraction, in metrics that vary from start to start on any machine.
_ALLOWED = {
    "startup_s": 0.25,
    "memory_gib": 0.10,
    "device_memory_gib": 0.10,
}


def _no_prices(_server: Server) -> Mapping[str, MetricOfStart]:
    return {}


@dataclass
class AbRun:
    """The starts of both sides, which are made and measured on first use.

    There are at least ``pairs`` pairs of starts, and at most twice as many.
    """

    run: Run
    sides: tuple[Side, Side]
    #: What is measured at each start; only the first depth is used.
    plan: Plan
    #: Returns the server of a side that has a URL.
    attach: Callable[[Side], Server]
    #: Reads the machine's state after the last visit (a visit is one start and measurement of a
    #: side).
    look_at_box: Callable[[], BoxReport] = BoxReport
    pairs: int = 3
    #: The hypothesis on the feature that B adds.
    hypothesis: Hypothesis | None = None
    #: Why no server can be started.
    obstacle: str | None = None
    #: Measures the accuracy cost of a server's rounding.
    price: Callable[[Server], Mapping[str, MetricOfStart]] = _no_prices
    visits: list[Visit] = field(default_factory=list)

    #: The result of the comparison, which runs only once; None before it.
    _ended: list[Change] | Exception | None = None
    #: The state of the machine while the pairs were measured, read after the last visit.
    _box: BoxReport = field(default_factory=BoxReport)
    #: The accuracy costs of each side, which are the same for each of its starts.
    _prices: dict[str, Mapping[str, MetricOfStart]] = field(default_factory=dict)
    #: Compares each side's server with the server of the side's first visit.
    watch: SideWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = SideWatch(self.run, self.sides)

    @property
    def outcomes(self) -> list[Change]:
        """The change of B against A in each metric, after as many pairs as a decision needs.

        A second call starts no server and returns the same result.

        Raises:
            NotRun: A does not start, or an earlier call was interrupted.
            Invalid: The measurement or the server of a side cannot be used for the comparison.
        """
        if self._ended is None:
            self._ended = NotRun("the comparison was interrupted; run it again")
            try:
                self._ended = self._compared()
            except Undecided as error:
                self._ended = error
                for name, metric in self.run.record.file.metrics.items():
                    if metric_name.is_of_ab(name):
                        metric.verdict = error.verdict
                self._write([], str(error))
        if isinstance(self._ended, Exception):
            raise self._ended
        return self._ended

    def _compared(self) -> list[Change]:
        """Start pairs until the comparison and the hypothesis are decided."""
        most = 2 * self.pairs
        turns = ab.order(most)
        outcomes: list[Change] = []
        for pair in range(most):
            for side in turns[2 * pair : 2 * pair + 2]:
                self._visit(side, f"{pair + 1} of {self.pairs} to {most}")
                if self._broken:
                    self._write(outcomes)
                    return outcomes
            self._check_that_they_differ()
            if pair + 1 < self.pairs:
                continue
            outcomes = self._compare_starts()
            self._write(outcomes)
            if not self._more_pairs_can_decide(outcomes):
                break
        self._box = self.look_at_box()
        return outcomes

    def _compare_starts(self) -> list[Change]:
        limits = self.run.profile.regression
        prices = {name: limits.of_price(name) for name in PRICES}
        allowed = {**_ALLOWED, **limits.metrics, **prices}
        outcomes = start_pairs.compare_starts(
            self.visits, allowed, default=limits.threshold, looks=self._looks
        )
        lost: set[str] = set()
        for visit in self.visits:
            lost.update(visit.metrics)
        for outcome in outcomes:
            lost.discard(outcome.metric)
        if lost:
            names = sorted(lost)
            self.run.record.unproven(f"A/B: not measured at every start, so not compared: {names}")
        return outcomes

    def _more_pairs_can_decide(self, outcomes: list[Change]) -> bool:
        """Return whether the comparison or the hypothesis is undecided.

        A FAIL of one metric decides the comparison, whatever the verdicts of the other metrics.
        """
        verdicts = {change.verdict for change in outcomes}
        if Verdict.INCONCLUSIVE in verdicts and Verdict.FAIL not in verdicts:
            return True
        if self.hypothesis is None:
            return False
        criteria = [*self.hypothesis.criteria, *_gate_criteria(self.hypothesis)]
        of_pairs = [criterion for criterion in criteria if criterion.is_of_pairs]
        results = hypothesis.evaluate(of_pairs, outcomes, self.visits, {}, self._looks)
        return any(result.verdict is Verdict.INCONCLUSIVE for result in results)

    @property
    def _looks(self) -> int:
        """The maximum number of interim tests, which share the error probability equally."""
        return self.pairs + 1

    def judge(self) -> None:
        """Require that B is not worse than A.

        Raises:
            AssertionError: B is worse, or does not serve.
            Invalid: The measurement or the server of a side cannot be used for the comparison, or A
                and B have no metric in common.
            NotRun: A does not serve.
            Inconclusive: The starts differ too much among themselves, or the machine is DEGRADED.
        """
        outcomes = self.outcomes
        require(not self._broken, "the server of B to behave like that of A", self._broken)
        if self._box.state == BoxState.DEGRADED:
            raise Inconclusive(f"the machine is DEGRADED: {self._box.reason}")
        if not outcomes:
            raise Invalid("A and B have no metric in common")
        facts = []
        undecided = []
        for outcome in outcomes:
            if outcome.verdict is Verdict.FAIL:
                requirement = "B to be not worse than A"
                facts.append(Fact(requirement, "a worse B", outcome.metric, evidence=outcome.text))
            elif outcome.verdict is Verdict.INCONCLUSIVE:
                undecided.append(outcome.text)
        require_none(facts)
        if undecided:
            raise Inconclusive(f"undecided; --ab-pairs N makes more starts: {'; '.join(undecided)}")

    def review(self) -> None:
        """Require that the hypothesis holds. review.md is written even if it does not.

        Raises:
            NotRun: There is no hypothesis.
            AssertionError: A criterion does not hold.
            Inconclusive: A criterion is undecided, or was not evaluated.
        """
        chosen = self.hypothesis
        if chosen is None:
            raise NotRun("no hypothesis: give --hypothesis FILE with --ab")
        outcomes, undecided = self._outcomes_or_why_none()
        # Compute the verdicts of the levels from the tests that have ended.
        self.run.record.file.judge()
        answers = self._evaluate(chosen.criteria, outcomes, undecided)
        gate = self._evaluate(_gate_criteria(chosen), outcomes, undecided)
        results = [*answers, *gate]
        verdict = worst(result.verdict for result in results)
        file = ab_report.write_review(
            self.run, self.sides, chosen, answers, gate, verdict, outcomes
        )
        if undecided is not None:
            raise type(undecided)(f"{undecided}; the review is in {file}")
        lines = [_line_of(result) for result in results if result.verdict is not Verdict.PASS]
        text = f"{'; '.join(lines)}; the review is in {file}"
        if verdict is Verdict.INCONCLUSIVE:
            raise Inconclusive(text)
        if verdict is Verdict.NOT_RUN:  # a criterion that was not evaluated does not hold
            raise Inconclusive(f"not every expected effect could be checked: {text}")
        if verdict is not Verdict.PASS:
            broken = [f"{result.criterion}" for result in results if result.verdict is verdict]
            raise Unmet(
                Fact("every criterion to hold", f"unmet: {', '.join(broken)}", evidence=text)
            )

    def _evaluate(
        self, criteria: Sequence[Criterion], outcomes: list[Change], undecided: Undecided | None
    ) -> list[CriterionResult]:
        """Evaluate criteria; ``undecided`` is the reason why there are no outcomes."""
        if undecided is not None:
            return [
                CriterionResult(criterion, undecided.verdict, note=str(undecided))
                for criterion in criteria
            ]
        file = self.run.record.file
        levels = {name: level.verdict for name, level in file.levels.items()}
        return hypothesis.evaluate(criteria, outcomes, self.visits, levels, self._looks, file.tests)

    def _outcomes_or_why_none(self) -> tuple[list[Change], Undecided | None]:
        try:
            outcomes = self.outcomes
        except Undecided as error:
            return [], error
        if self._box.state == BoxState.DEGRADED and not self._broken:
            return outcomes, Inconclusive(f"the machine is DEGRADED: {self._box.reason}")
        return outcomes, None

    @property
    def _broken(self) -> str | None:
        """The first failure of B; None if every start of B served."""
        for visit in self.visits:
            if visit.side == "B" and visit.failure:
                return visit.failure
        return None

    def _visit(self, name: str, which: str) -> None:
        """Start the server of a side, measure it, check it, and store the results in `visits`."""
        side = self.sides[0] if name == "A" else self.sides[1]
        self.run.record.say(
            "A/B", f"{name}, pair {which}: {side.text or '(configuration under test)'}"
        )
        visit = Visit(name)
        try:
            self._measure_visit(visit, side)
        except Undecided:
            self.visits.append(visit)  # the record contains this visit, too
            raise
        except ServerError as error:
            visit.failure = self.run.record.redact(str(error).splitlines()[0])
            if name == "A":
                raise NotRun(
                    f"the server of A failed, so there is nothing to compare with: {visit.failure}"
                ) from error
        self.visits.append(visit)

    def _measure_visit(self, visit: Visit, side: Side) -> None:
        name = visit.side
        server, memory = self._server(name, side)
        visit.log = server.log.name if server.log is not None else None
        self._check(visit, server, side)
        try:
            visit.metrics = self._measure(name, server)
            if name not in self._prices:
                self._prices[name] = self.price(server)
            visit.metrics.update(self._prices[name])
        finally:  # if the server died, report that instead of the errors that it caused
            self.run.servers.check_alive()
        if server.why_cold:
            self.run.record.remark(f"A/B: startup_s is not compared: {name}: {server.why_cold}")
        elif server.startup_s is not None:
            visit.metrics["startup_s"] = MetricOfStart(server.startup_s, "s", False)
        visit.metrics.update(self._memory(memory))
        visit.failure = self.watch.forgotten(name, server)
        self._check(visit, server, side)  # a log may show a fallback only after the first request

    def _check(self, visit: Visit, server: Server, side: Side) -> None:
        """Raise Invalid if a server does not have the configuration of its side.

        Also raise Invalid if the server differs from the first one of its side.

        The message names all deviations and the evidence.
        """
        name = visit.side
        number = 1 + sum(earlier.side == name for earlier in self.visits)
        where = f"{name}, turn {number}"
        if side.url is not None:
            self.watch.check_process(where, name, server, side.url)
            self.watch.decide_silent(name, server)
        if server.log is None:
            why = server.why_no_log
            if side.log is None:
                why = f"give --ab '{side.url} --server-log PATH'"
            self.run.record.unproven(f"A/B: the kernel path of {name} is not known: {why}")
            return
        deviations = self._path_deviations(visit, server, side)
        if deviations:
            raise Invalid(f"{where}: {'; '.join(deviations)}. Evidence: {server.log}")

    def _path_deviations(self, visit: Visit, server: Server, side: Side) -> list[str]:
        """Store the kernel path of a measured server, and return a line per deviation.

        A deviation is a difference from the required path, or from that of the side's first server.
        """
        path = self.run.paths.of(server)
        visit.path = {name: kernel_path.shown(path, name) for name in visit_checks.EFFECTS}
        visit.requested = [f"{report.state}: {report.message}" for report in path.requested]
        under_test = self.run.profile.under_test
        configuration = None
        if side.url is None:
            configuration = self.run.configurations.managed(under_test)
        requests = requested.patterns(configuration) if configuration is not None else ()
        required = self.run.profile.path_of(under_test, requests)
        deviations = visit_checks.path_deviations(required, server, path, configuration, under_test)
        return deviations + visit_checks.changes_since_first(visit, self.visits)

    def _check_that_they_differ(self) -> None:
        """Raise Invalid if both sides' configurations result in the same server."""
        if self.sides[0].url is not None:
            return
        last = {visit.side: visit for visit in self.visits}
        a = last["A"]
        b = last["B"]
        configuration = self.run.configurations.managed(self.run.profile.under_test)
        comparison = visit_checks.compare_sides(self.sides, configuration.engine, a, b)
        if comparison.void is not None:
            raise Invalid(f"{comparison.void}. Evidence: {a.log}, {b.log}")
        if comparison.unproven is not None:
            self.run.record.unproven(comparison.unproven)

    def _server(self, name: str, side: Side) -> tuple[Server, ServerMemoryReader | None]:
        """Start or attach the server of a side; a server at a URL has no memory reader."""
        if side.url is not None:
            return self.attach(side), None
        if self.run.servers.pool is None:
            raise NotRun(self.obstacle or "no server can be started here")
        self.run.servers.stop()
        memory = ServerMemoryReader(gpu=self.run.target.arch != architecture.CPU)
        base = self.run.configurations.managed(self.run.profile.under_test)
        configuration = dataclasses.replace(
            base,
            name=name,
            python=side.python or base.python,
            arguments=(*base.arguments, *side.arguments),
            environment=environment_items(dict(base.environment), dict(side.environment)),
        )
        return self.run.servers.start(configuration), memory

    def _measure(self, name: str, server: Server) -> dict[str, MetricOfStart]:
        """Measure the plan's first depth. Raises Invalid if a measurement is INVALID."""
        directory = self.run.record.directory / "ab" / f"{len(self.visits):02}-{name}"
        values: dict[str, MetricOfStart] = {}
        with MeasuredServer.open(
            server.endpoint,
            self.plan,
            directory,
            may_draft=self.run.paths.of(server).speculative != "none",
            compiled=CompileWatch(server.log, server.reader, self.run.servers.follow_log).new,
        ) as measured_server:
            cell = MeasuredCell(measured_server, self.plan.depths[0])
            cell.gather(self.plan.measuring.rounds)
            rates = [metrics.find("tg", tokens=tokens) for tokens in self.plan.generated_tokens]
            for metric in (metrics.find("pp"), *rates, metrics.find("ttft"), metrics.find("tpot")):
                measurement = metric.settle(cell)
                visit_checks.require_valid(name, measurement)
                value = statistics.estimate(measurement.samples).value
                values[measurement.name] = MetricOfStart(
                    value, measurement.unit, measurement.higher_is_better
                )
        return values

    def _memory(self, reader: ServerMemoryReader | None) -> dict[str, MetricOfStart]:
        """Return the memory metrics of the running server in GiB; empty for a server at a URL."""
        pool = self.run.servers.pool
        if pool is None or reader is None:
            return {}
        pids = set()
        resident = 0
        for process in pool.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                resident += process.memory_info().rss
                pids.add(process.pid)
        memory = reader.read(pids, resident)
        sizes = {"memory_gib": memory.total, "device_memory_gib": memory.device}
        return {
            name: MetricOfStart(round(size / 2**30, 4), "GiB", False)
            for name, size in sizes.items()
            if size
        }

    def _write(self, outcomes: list[Change], void: str | None = None) -> None:
        """Write the record; ``void`` is the reason why the comparison does not count."""
        ab_report.note_outcomes(self.run, outcomes)
        ab_report.write_record(self.run, self.sides, self.visits, outcomes, void)


def _gate_criteria(chosen: Hypothesis) -> Sequence[Criterion]:
    """Return the criteria of the gate that ends the phase of a hypothesis."""
    gate = hypothesis.gate_behind(chosen.phase)
    return gate.criteria if gate is not None else ()


def _line_of(result: CriterionResult) -> str:
    return (
        f"{result.criterion}: {result.verdict.value}, A {result.baseline or '-'}, "
        f"B {result.actual or '-'} ({result.note})"
    )
