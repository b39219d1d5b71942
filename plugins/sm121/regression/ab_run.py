"""Both sides of an A/B comparison started in turns, measured, and judged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sm121.core import architecture
from sm121.core.configuration import environment_items
from sm121.core.files import write_text
from sm121.core.server import Server
from sm121.core.verdict import Inconclusive, Invalid, NotRun, Verdict, worst
from sm121.engines.device_memory import ServerMemoryReader
from sm121.engines.managed import ServerError
from sm121.engines.pool import ServerPool
from sm121.measure import statistics
from sm121.measure.box import BoxState
from sm121.measure.cells import MeasuredCell, MeasuredServer
from sm121.measure.plan import Plan
from sm121.performance.recorder import speed_path
from sm121.regression import ab, hypothesis
from sm121.regression.ab import Comparison, MetricOfStart, Side, Visit
from sm121.regression.hypothesis import CriterionResult, Hypothesis
from sm121.run.harness import Harness
from sm121.run.verdict_file import MetricReport

#: How much worse B may be in what varies from start to start on any machine.
_ALLOWED = {"startup_s": 0.25, "memory_gib": 0.10, "device_memory_gib": 0.10}


@dataclass
class AbRun:
    """The starts of both sides, made when they are first asked for.

    Args:
        harness: of the run.
        sides: A and B.
        plan: what is measured of each start, at its first depth.
        attach: gives the server that listens at the URL of a side.
        pairs: so many pairs of starts at least, and twice as many at most.
        hypothesis: what the feature promised, if it was given.
        obstacle: why no server can be started here; None where one can.
    """

    harness: Harness
    sides: tuple[Side, Side]
    plan: Plan
    attach: Callable[[str], Server]
    pairs: int = 3
    hypothesis: Hypothesis | None = None
    obstacle: str | None = None
    visits: list[Visit] = field(default_factory=list)

    @functools.cached_property
    def outcomes(self) -> list[Comparison]:
        """B against A in every metric, after as many pairs of starts as it took to decide.

        Raises:
            NotRun: A does not start.
            Invalid: a number of either side does not count.
        """
        least, most = self.pairs, 2 * self.pairs
        looks = most - least + 1
        found: list[Comparison] = []
        turns = ab.order(most)
        for pair in range(most):
            for side in turns[2 * pair : 2 * pair + 2]:
                self._visit(side, f"{pair + 1} of {least} to {most}")
                if self._broken:
                    self._write(found)
                    return found
            if pair + 1 < least:
                continue
            limits = self.harness.profile.regression
            allowed = {**_ALLOWED, **limits.metrics}
            found = ab.compare(self.visits, allowed, default=limits.threshold, looks=looks)
            self._write(found)
            if all(outcome.verdict is not Verdict.INCONCLUSIVE for outcome in found):
                break
        return found

    def judge(self) -> None:
        """B is not worse than A.

        Raises:
            AssertionError: it is, or it does not run.
            Inconclusive: the starts differ too much among themselves, or the box is unfit.
        """
        outcomes = self.outcomes
        assert not self._broken, f"required: B serves, seen: {self._broken}"
        if self.harness.file.box.state == BoxState.DEGRADED:
            raise Inconclusive(f"the box is DEGRADED: {self.harness.file.box.reason}")
        if not outcomes:
            raise Invalid("A and B have no metric in common")
        worse = [str(outcome) for outcome in outcomes if outcome.verdict is Verdict.FAIL]
        assert not worse, f"B is worse than A: {'; '.join(worse)}"
        open_ones = [str(o) for o in outcomes if o.verdict is Verdict.INCONCLUSIVE]
        if open_ones:
            raise Inconclusive(f"undecided (--ab-pairs for more starts): {'; '.join(open_ones)}")

    def review(self) -> None:
        """What the feature promised holds; the filled-in review is written either way.

        Raises:
            NotRun: no hypothesis was given.
            AssertionError, Inconclusive: a criterion does not hold, or is open.
        """
        chosen = self.hypothesis
        if chosen is None:
            raise NotRun("no hypothesis: give --hypothesis FILE with --ab")
        outcomes = self.outcomes
        self.harness.save()  # which judges the levels by the tests that have ended
        levels = {name: level.verdict for name, level in self.harness.file.levels.items()}
        answers = hypothesis.evaluate(chosen.criteria, outcomes, self.visits, levels)
        text, criteria = hypothesis.gate_behind(chosen.phase) if chosen.phase else ("", ())
        gate = hypothesis.evaluate(criteria, outcomes, self.visits, levels)
        file = self.harness.directory / "review.md"
        engine = self.harness.file.engine
        write_text(
            hypothesis.review(
                chosen,
                answers,
                (text, gate),
                sides=(self.sides[0].text, self.sides[1].text),
                outcomes=outcomes,
                levels=levels,
                run={
                    "profile": self.harness.file.profile,
                    "engine": f"{engine.name} {engine.version or '(version unknown)'}",
                    "box": self.harness.file.box.state,
                },
            ),
            file,
        )
        _conclude([*answers, *gate], file)

    @property
    def _broken(self) -> str | None:
        return next((v.failure for v in self.visits if v.side == "B" and v.failure), None)

    def _visit(self, name: str, which: str) -> None:
        side = self.sides[0 if name == "A" else 1]
        self.harness.say("A/B", f"{name}, pair {which}: {side.text or '(as it is)'}")
        visit = Visit(name)
        try:
            server, memory = self._server(name, side)
            visit.metrics = self._measure(name, server)
            if server.startup_s is not None:
                visit.metrics["startup_s"] = MetricOfStart(server.startup_s, "s", False)
            visit.metrics.update(self._memory(memory))
            visit.path = speed_path(self.harness.kernel_path(server))
            if self.harness.pool is not None:
                self.harness.pool.check()
        except ServerError as error:
            visit.failure = self.harness.redact(str(error).splitlines()[0])
            if name == "A":
                raise NotRun(f"A does not serve, so there is nothing to compare with: "
                             f"{visit.failure}") from error  # fmt: skip
        self.visits.append(visit)

    def _server(self, name: str, side: Side) -> tuple[Server, ServerMemoryReader | None]:
        """A fresh start of a side, and what reads its memory; of a URL, the server there."""
        if side.url is not None:
            return self.attach(side.url), None
        pool = self.harness.pool
        if pool is None:
            raise NotRun(self.obstacle or "no server can be started here")
        pool.stop()
        memory = ServerMemoryReader(gpu=self.harness.arch != architecture.CPU)
        own = self.harness.managed_configuration(self.harness.profile.under_test)
        configuration = dataclasses.replace(
            own,
            name=name,
            python=side.python or own.python,
            arguments=(*own.arguments, *side.arguments),
            environment=environment_items(dict(own.environment), dict(side.environment)),
        )
        return self.harness.start(configuration), memory

    def _measure(self, name: str, server: Server) -> dict[str, MetricOfStart]:
        directory = self.harness.directory / "ab" / f"{len(self.visits):02}-{name}"
        with MeasuredServer.open(server.endpoint, self.plan, directory) as measured_server:
            cell = MeasuredCell(measured_server, self.plan.depths[0])
            cell.gather(self.plan.measuring.rounds)
        measured = [
            cell.prefill(),
            *(cell.decode(tokens) for tokens in self.plan.generated_tokens),
            cell.times("ttft", 0.5),
            cell.times("tpot", 0.5),
        ]
        values: dict[str, MetricOfStart] = {}
        for measurement in measured:
            if measurement.invalid:
                why = "; ".join(str(item) for item in measurement.invalid)
                raise Invalid(f"{name}: {measurement.name}: {why}")
            value = statistics.estimate(measurement.samples).value
            values[measurement.name] = MetricOfStart(
                value, measurement.unit, measurement.higher_is_better
            )
        return values

    def _memory(self, reader: ServerMemoryReader | None) -> dict[str, MetricOfStart]:
        """What the server holds: all of it, and of the GPU; without what is not known."""
        pool = self.harness.pool
        if pool is None or reader is None:
            return {}
        pids, resident = _resident(pool)
        held = reader.read(pids, resident)
        return {
            name: MetricOfStart(round(size / 2**30, 4), "GiB", False)
            for name, size in (("memory_gib", held.total), ("device_memory_gib", held.device))
            if size
        }

    def _write(self, outcomes: list[Comparison]) -> None:
        """What is known so far, in ab.json and among the metrics."""
        for outcome in outcomes:
            rate = outcome.higher_is_better
            self.harness.file.metrics[f"ab:{outcome.metric}"] = MetricReport(
                value=statistics.finite(outcome.ratio),
                unit="B/A",
                ci_low=statistics.finite(outcome.ci_low),
                ci_high=statistics.finite(outcome.ci_high),
                confidence=ab.CONFIDENCE,
                rounds=outcome.pairs,
                minimum=1.0 - outcome.allowed if rate else None,
                at_most=None if rate else 1.0 + outcome.allowed,
                verdict=outcome.verdict,
            )
        record = {
            "sides": [side.text for side in self.sides],
            "visits": [dataclasses.asdict(visit) for visit in self.visits],
            "outcomes": [
                {
                    name: statistics.finite(value) if isinstance(value, float) else value
                    for name, value in dataclasses.asdict(outcome).items()
                }
                for outcome in outcomes
            ],
        }
        text = self.harness.redact(json.dumps(record, indent=2))
        write_text(text + "\n", self.harness.directory / "ab.json")
        self.harness.save()


def _resident(pool: ServerPool) -> tuple[set[int], int]:
    """The server's processes, and the bytes of the host that they hold together."""
    pids, total = set(), 0
    for process in pool.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
            pids.add(process.pid)
    return pids, total


def _conclude(answers: list[CriterionResult], file: Path) -> None:
    verdict = worst(answer.verdict for answer in answers)
    lines = [
        f"{answer.criterion}: {answer.verdict.value}, A {answer.baseline or '-'}, "
        f"B {answer.actual or '-'} ({answer.note})"
        for answer in answers
        if answer.verdict is not Verdict.PASS
    ]
    text = f"{'; '.join(lines)}; the review is in {file}"
    if verdict is Verdict.INCONCLUSIVE:
        raise Inconclusive(text)
    if verdict is Verdict.NOT_RUN:  # a promise that nobody looked at is not kept
        raise Inconclusive(f"not everything that was promised could be looked at: {text}")
    assert verdict is Verdict.PASS, text
