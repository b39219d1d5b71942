"""Both sides of an A/B comparison started in turns, measured, and judged."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psutil

from sm121.answers import exam
from sm121.core import architecture, templates
from sm121.core.configuration import environment_items
from sm121.core.files import write_text
from sm121.core.level_settings import PRICES
from sm121.core.numbers import number
from sm121.core.server import Server
from sm121.core.unmet import Fact, Unmet, require, require_none
from sm121.core.verdict import Inconclusive, Invalid, NotRun, Undecided, Verdict, worst
from sm121.engines import requested
from sm121.engines.attached_life import AttachedLife
from sm121.engines.life import Dead
from sm121.engines.server_errors import ServerError
from sm121.engines.server_memory import ServerMemoryReader
from sm121.evidence.compile_watch import CompileWatch
from sm121.evidence.silent_errors import ErrorReader
from sm121.measure import metrics, statistics
from sm121.measure.box import BoxState
from sm121.measure.cells import MeasuredCell
from sm121.measure.measured_server import MeasuredServer
from sm121.measure.plan import Plan
from sm121.regression import ab, hypothesis, trend
from sm121.regression.ab import MetricOfStart, Side, Visit
from sm121.regression.change import Change
from sm121.regression.hypothesis import CriterionResult, Hypothesis
from sm121.run.harness import Harness
from sm121.run.verdict_file import BoxReport, MetricReport

#: How much worse B may be in what varies from start to start on any machine.
_ALLOWED = {"startup_s": 0.25, "memory_gib": 0.10, "device_memory_gib": 0.10}

#: What B is held against, in words.
_A = "A"


@dataclass
class AbRun:
    """The starts of both sides, made when they are first asked for: ``pairs`` of them at least,
    twice as many at most. ``plan``: what is measured of each, at its first depth; ``attach``: gives
    the server of a URL; ``look_at_box``: reads the machine's state after the last visit;
    ``hypothesis``: what the feature promised; ``obstacle``: why no server can be started."""

    harness: Harness
    sides: tuple[Side, Side]
    plan: Plan
    attach: Callable[[Side], Server]
    look_at_box: Callable[[], BoxReport] = BoxReport
    pairs: int = 3
    hypothesis: Hypothesis | None = None
    obstacle: str | None = None
    price: Callable[[Server], Mapping[str, MetricOfStart]] = lambda _server: {}
    visits: list[Visit] = field(default_factory=list)

    #: What came of it, good or bad: it is done once, whoever asks.
    _ended: list[Change] | Exception | None = None
    #: The machine while the pairs were measured, read after the last visit.
    _box: BoxReport = field(default_factory=BoxReport)
    #: Of the server at the URL of a side, since its first visit.
    _lives: dict[str, AttachedLife] = field(default_factory=dict)
    _errors: dict[str, ErrorReader] = field(default_factory=dict)
    _prices: dict[str, Mapping[str, MetricOfStart]] = field(default_factory=dict)
    #: Prompts of known answers that A knew at its first visit.
    _answered: frozenset[str] | None = None

    @property
    def outcomes(self) -> list[Change]:
        """B against A in every metric, after as many pairs of starts as it took to decide. Raises
        NotRun: A does not start, or an earlier call was broken off; Invalid: a visit does not
        count. A second call starts nothing and says the same."""
        if self._ended is None:
            self._ended = NotRun("the comparison was broken off; run it again")
            try:
                self._ended = self._compared()
            except Undecided as error:
                self._ended = error
                for name, metric in self.harness.file.metrics.items():
                    if name.startswith("ab:"):
                        metric.verdict = error.verdict
                self._write([], str(error))
        if isinstance(self._ended, Exception):
            raise self._ended
        return self._ended

    def _compared(self) -> list[Change]:
        least, most = self.pairs, 2 * self.pairs
        outcomes: list[Change] = []
        turns = ab.order(most)
        for pair in range(most):
            for side in turns[2 * pair : 2 * pair + 2]:
                self._visit(side, f"{pair + 1} of {least} to {most}")
                if self._broken:
                    self._write(outcomes)
                    return outcomes
            self._check_that_they_differ()
            if pair + 1 < least:
                continue
            limits = self.harness.profile.regression
            prices = {name: limits.of_price(name) for name in PRICES}
            allowed = {**_ALLOWED, **limits.metrics, **prices}
            outcomes = trend.compare_starts(
                self.visits, allowed, default=limits.threshold, looks=self._looks
            )
            measured = {name for visit in self.visits for name in visit.metrics}
            if lost := sorted(measured - {outcome.metric for outcome in outcomes}):
                self.harness.unproven(f"A/B: not known at every visit, and not compared: {lost}")
            self._write(outcomes)
            if not self._more_pairs_can_decide(outcomes):
                break
        self._box = self.look_at_box()
        return outcomes

    def _more_pairs_can_decide(self, outcomes: list[Change]) -> bool:
        """Whether the comparison or the hypothesis is open. A FAIL of one metric decides the
        comparison, whatever the other metrics come to."""
        verdicts = [change.verdict for change in outcomes]
        if Verdict.INCONCLUSIVE in verdicts and Verdict.FAIL not in verdicts:
            return True
        if (chosen := self.hypothesis) is None:
            return False
        gate = hypothesis.gate_behind(chosen.phase)[1] if chosen.phase else ()
        of_pairs = [each for each in (*chosen.criteria, *gate) if each.is_of_pairs]
        answers = hypothesis.evaluate(of_pairs, outcomes, self.visits, {}, self._looks)
        return any(answer.verdict is Verdict.INCONCLUSIVE for answer in answers)

    @property
    def _looks(self) -> int:
        """How often the pairs are judged at most: each look has its share of the error."""
        return self.pairs + 1

    def judge(self) -> None:
        """B is not worse than A. Raises AssertionError: it is, or it does not run; Invalid, NotRun:
        a visit does not count, or A does not run; Inconclusive: the starts differ too much among
        themselves, or the box is unfit."""
        outcomes = self.outcomes
        require(not self._broken, "B serves as A does", self._broken)
        if self._box.state == BoxState.DEGRADED:
            raise Inconclusive(f"the box is DEGRADED: {self._box.reason}")
        if not outcomes:
            raise Invalid("A and B have no metric in common")
        worse = [outcome for outcome in outcomes if outcome.verdict is Verdict.FAIL]
        requirement = "B is not worse than A"
        require_none([Fact(requirement, "it is", o.metric, evidence=o.text) for o in worse])
        open_ones = [o.text for o in outcomes if o.verdict is Verdict.INCONCLUSIVE]
        if open_ones:
            raise Inconclusive(f"undecided (--ab-pairs for more starts): {'; '.join(open_ones)}")

    def review(self) -> None:
        """What the feature promised holds; review.md is written either way. Raises NotRun: no
        hypothesis; AssertionError, Inconclusive: a criterion does not hold, or is open."""
        chosen = self.hypothesis
        if chosen is None:
            raise NotRun("no hypothesis: give --hypothesis FILE with --ab")
        outcomes, undecided = self._outcomes_or_why_none()
        self.harness.save()  # which judges the levels by the tests that have ended
        levels = {name: level.verdict for name, level in self.harness.file.levels.items()}
        gate_text, criteria = hypothesis.gate_behind(chosen.phase) if chosen.phase else ("", ())
        answers, gate = (
            hypothesis.evaluate(promises, outcomes, self.visits, levels, self._looks)
            if undecided is None
            else [CriterionResult(p, undecided.verdict, "", "", str(undecided)) for p in promises]
            for promises in (chosen.criteria, criteria)
        )
        every, file = [*answers, *gate], self.harness.directory / "review.md"
        verdict = worst(answer.verdict for answer in every)
        filled = templates.rendered(
            "review.md.j2",
            hypothesis.cell,
            hypothesis=chosen,
            answers=answers,
            gate_text=gate_text,
            gate=gate,
            verdict=verdict,
            sides=self.sides,
            outcomes=outcomes,
            number=number,
            run=self.harness.file,
        )
        write_text(filled, file)
        if undecided is not None:
            raise type(undecided)(f"{undecided}; the review is in {file}")
        lines = [
            f"{answer.criterion}: {answer.verdict.value}, A {answer.baseline or '-'}, "
            f"B {answer.actual or '-'} ({answer.note})"
            for answer in every
            if answer.verdict is not Verdict.PASS
        ]
        text = f"{'; '.join(lines)}; the review is in {file}"
        if verdict is Verdict.INCONCLUSIVE:
            raise Inconclusive(text)
        if verdict is Verdict.NOT_RUN:  # a promise that nobody looked at is not kept
            raise Inconclusive(f"not everything that was promised could be looked at: {text}")
        if verdict is not Verdict.PASS:
            broken = ", ".join(f"{a.criterion}" for a in every if a.verdict is verdict)
            raise Unmet(Fact("what was promised", f"not {broken}", evidence=text))

    def _outcomes_or_why_none(self) -> tuple[list[Change], Undecided | None]:
        try:
            outcomes = self.outcomes
        except Undecided as error:
            return [], error
        if self._box.state == BoxState.DEGRADED and not self._broken:
            return outcomes, Inconclusive(f"the box is DEGRADED: {self._box.reason}")
        return outcomes, None

    @property
    def _broken(self) -> str | None:
        return next((v.failure for v in self.visits if v.side == "B" and v.failure), None)

    def _visit(self, name: str, which: str) -> None:
        side = self.sides[0 if name == "A" else 1]
        self.harness.say("A/B", f"{name}, pair {which}: {side.text or '(as it is)'}")
        visit = Visit(name)
        try:
            server, memory = self._server(name, side)
            visit.log = server.log.name if server.log is not None else None
            self._check(visit, server, side)
            try:
                visit.metrics = self._measure(name, server)
                if name not in self._prices:  # of each start the same
                    self._prices[name] = self.price(server)
                visit.metrics.update(self._prices[name])
            finally:  # of a server that has died, its death is what is said
                self.harness.check_alive()
            if server.why_cold:
                self.harness.remark(f"A/B: startup_s is not compared: {name}: {server.why_cold}")
            elif server.startup_s is not None:
                visit.metrics["startup_s"] = MetricOfStart(server.startup_s, "s", False)
            visit.metrics.update(self._memory(memory))
            visit.failure = self._forgotten(name, server)
            self._check(visit, server, side)  # a fallback may come with the first request
        except Undecided:
            self.visits.append(visit)  # for the record
            raise
        except ServerError as error:
            visit.failure = self.harness.redact(str(error).splitlines()[0])
            if name == "A":
                raise NotRun(f"A does not serve, so there is nothing to compare with: "
                             f"{visit.failure}") from error  # fmt: skip
        self.visits.append(visit)

    def _forgotten(self, name: str, server: Server) -> str | None:
        """What A knew at its first visit and this one does not: a rate of noise is none. Raises
        Invalid: A itself does not know it any more."""
        questions = exam.load(self.harness.profile.correctness.exam).completions
        wrong = exam.unknown(server.endpoint, questions)
        if self._answered is None:
            self._answered = frozenset(fact.prompt for fact in questions) - wrong.keys()
            if not self._answered:
                self.harness.unproven(f"A/B: that a side answers sensibly: A says {wrong}")
        lost = [f"{prompt!r} with {wrong[prompt]}" for prompt in wrong if prompt in self._answered]
        if not lost:
            return None
        message = self.harness.redact(f"{name} answers {lost[0]}, which A knew at its first visit")
        if name == "A":
            raise Invalid(message)
        return message

    def _check(self, visit: Visit, server: Server, side: Side) -> None:
        """What runs is what the side was to be, and what it was at its first visit. Raises Invalid:
        it is not; names all of it and the evidence."""
        harness, name = self.harness, visit.side
        where = f"{name}, visit {1 + sum(earlier.side == name for earlier in self.visits)}"
        if side.url is not None:
            self._check_process(where, name, server, side.url)
            if server.log is not None:  # what it reports is never green, as of one server
                new = ErrorReader(server.reader or "", server.log.stat().st_size)
                errors = self._errors.setdefault(name, new).read(server.log)
                harness.decide_silent(errors, f"log of {name}")
        if server.log is None:
            how = f"give --ab '{side.url} --server-log PATH'" if side.log is None else None
            why = how or server.why_no_log
            self.harness.unproven(f"A/B: the kernel path of {name} is not known: {why}")
            return
        path = harness.kernel_path(server)
        visit.path = {name: getattr(path, name) for name in ab.EFFECTS}
        visit.requested = [f"{report.state}: {report.message}" for report in path.requested]
        under_test = harness.profile.under_test
        configuration = harness.managed_configuration(under_test) if side.url is None else None
        requests = requested.patterns(configuration) if configuration is not None else ()
        required = harness.profile.path_of(under_test, requests)
        wrong = ab.not_as_asked(required, server, path, configuration, under_test)
        wrong += ab.moved(visit, self.visits)
        if wrong:
            raise Invalid(f"{where}: {'; '.join(wrong)}. Evidence: {server.log}")

    def _check_process(self, where: str, name: str, server: Server, url: str) -> None:
        if name not in self._lives:
            self._lives[name] = AttachedLife(server)
            if (unwatched := self._lives[name].unwatched) is not None:
                self.harness.unproven(f"A/B: of {name}: {unwatched}")
        life = self._lives[name]
        if isinstance(state := life.state(), Dead):
            raise Invalid(f"{where}: another process answers at {url} than at the first visit: "
                          f"{state.detail}")  # fmt: skip
        if (other := self._lives.get("A")) is None or name == "A":
            return
        same = other.signs.is_one_with(life.signs)
        if same:
            urls = " and ".join(str(each.url) for each in self.sides)
            raise Invalid(f"{urls} are one server: of a comparison with itself nothing follows")
        if same is None:
            self.harness.unproven(
                "A/B: whether the URLs are of two servers is not known: neither the metric "
                "process_start_time_seconds nor their processes can be seen from here"
            )

    def _check_that_they_differ(self) -> None:
        a, b = (next(v for v in reversed(self.visits) if v.side == name) for name in ("A", "B"))
        if self.sides[0].url is not None:
            return
        configuration = self.harness.managed_configuration(self.harness.profile.under_test)
        why, silent = ab.the_same(self.sides, configuration.engine, a, b)
        if why is not None:
            raise Invalid(f"{why}. Evidence: {a.log}, {b.log}")
        if silent is not None:
            self.harness.unproven(silent)

    def _server(self, name: str, side: Side) -> tuple[Server, ServerMemoryReader | None]:
        if side.url is not None:
            return self.attach(side), None
        if self.harness.pool is None:
            raise NotRun(self.obstacle or "no server can be started here")
        self.harness.stop()
        memory = ServerMemoryReader(gpu=self.harness.arch != architecture.CPU)
        base = self.harness.managed_configuration(self.harness.profile.under_test)
        configuration = dataclasses.replace(
            base,
            name=name,
            python=side.python or base.python,
            arguments=(*base.arguments, *side.arguments),
            environment=environment_items(dict(base.environment), dict(side.environment)),
        )
        return self.harness.start(configuration), memory

    def _measure(self, name: str, server: Server) -> dict[str, MetricOfStart]:
        directory = self.harness.directory / "ab" / f"{len(self.visits):02}-{name}"
        with MeasuredServer.open(
            server.endpoint,
            self.plan,
            directory,
            compiled=CompileWatch(server.log, server.reader, self.harness.follow_log).new,
        ) as measured_server:
            cell = MeasuredCell(measured_server, self.plan.depths[0])
            cell.gather(self.plan.measuring.rounds)
            rates = [metrics.find("tg", tokens=tokens) for tokens in self.plan.generated_tokens]
            values: dict[str, MetricOfStart] = {}
            for metric in (metrics.find("pp"), *rates, metrics.find("ttft"), metrics.find("tpot")):
                measurement = metric.settle(cell)
                if measurement.invalid:
                    why = "; ".join(str(item) for item in measurement.invalid)
                    raise Invalid(f"{name}: {measurement.name}: {why}")
                value = statistics.estimate(measurement.samples).value
                values[measurement.name] = MetricOfStart(
                    value, measurement.unit, measurement.higher_is_better
                )
        return values

    def _memory(self, reader: ServerMemoryReader | None) -> dict[str, MetricOfStart]:
        pool = self.harness.pool
        if pool is None or reader is None:
            return {}
        pids, resident = set(), 0
        for process in pool.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                resident += process.memory_info().rss
                pids.add(process.pid)
        memory = reader.read(pids, resident)
        return {
            name: MetricOfStart(round(size / 2**30, 4), "GiB", False)
            for name, size in (("memory_gib", memory.total), ("device_memory_gib", memory.device))
            if size
        }

    def _write(self, outcomes: list[Change], why: str | None = None) -> None:
        for outcome in (each for each in outcomes if each.difference is None):
            rate, allowed = outcome.higher_is_better, outcome.allowed or 0.0
            self.harness.file.metrics[f"ab:{outcome.metric}"] = MetricReport(
                value=statistics.finite(outcome.ratio),
                ci_low=statistics.finite(outcome.ci_low),
                ci_high=statistics.finite(outcome.ci_high),
                confidence=statistics.CONFIDENCE,
                unit="B/A",
                rounds=outcome.pairs,
                starts=outcome.pairs if self.harness.pool is not None else 1,
                verdict=outcome.verdict,
                minimum=1.0 - allowed if rate else None,
                at_most=None if rate else 1.0 + allowed,
            )
        others = [change for change in self.harness.file.changes if change.beside != _A]
        worse = [o for o in outcomes if o.verdict is not Verdict.PASS]
        self.harness.file.changes = [*others, *(change.report(_A) for change in worse)]
        record = {
            "sides": [side.text for side in self.sides],
            "void": why,
            "visits": [dataclasses.asdict(visit) for visit in self.visits],
            "outcomes": [
                {
                    name: statistics.finite(value) if isinstance(value, float) else value
                    for name, value in dataclasses.asdict(outcome).items()
                    if value != ""
                }
                for outcome in outcomes
            ],
        }
        text = self.harness.redact(json.dumps(record, indent=2))
        write_text(text + "\n", self.harness.directory / ab.FILE)
        self.harness.save()
