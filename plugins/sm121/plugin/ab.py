"""``--ab A B``: both sides started in turns and measured, for the regression level to judge."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from sm121.client.timed_process import TimedProcess
from sm121.core import architecture
from sm121.core.configuration import ServerConfiguration, environment_items
from sm121.core.files import write_text
from sm121.core.server import Server
from sm121.core.verdict import Inconclusive, Invalid, NotRun, Verdict
from sm121.engines.attached import attach
from sm121.engines.managed import ServerError
from sm121.engines.pool import ServerPool
from sm121.measure import statistics
from sm121.measure.box import BoxState
from sm121.measure.cells import Cell, Target
from sm121.measure.prompts import Prompts
from sm121.plugin.benchmarks import kernel_path
from sm121.plugin.box import Box
from sm121.plugin.options import SETTINGS
from sm121.plugin.performance import plan_of
from sm121.plugin.run import Run
from sm121.plugin.terminal import announce
from sm121.regression import ab, hypothesis
from sm121.regression.ab import Outcome, Side, Value, Visit
from sm121.regression.hypothesis import Answer
from sm121.run import verdict_file
from sm121.run.verdict_file import MetricReport

#: How much worse B may be in what varies from start to start on any machine.
_ALLOWED = {"startup_s": 0.25, "memory_gib": 0.10}


@dataclass
class AbRun:
    """The starts of both sides, made when the first test asks for them."""

    _run: Run
    _sides: tuple[Side, Side]
    visits: list[Visit] = field(default_factory=list)

    @functools.cached_property
    def outcomes(self) -> list[Outcome]:
        """B against A in every metric, after as many pairs of starts as it took to decide.

        Raises:
            NotRun: A does not start.
            Invalid: a number of either side does not count.
        """
        least = self._run.settings.ab_pairs
        most = 2 * least
        looks = most - least + 1
        found: list[Outcome] = []
        turns = ab.order(most)
        for pair in range(most):
            for side in turns[2 * pair : 2 * pair + 2]:
                self._visit(side, f"{pair + 1} of {least} to {most}")
                if self._broken:
                    self._write(found)
                    return found
            if pair + 1 < least:
                continue
            limits = self._run.profile.regression
            allowed = {**_ALLOWED, **limits.metrics}
            found = ab.outcomes(self.visits, allowed, default=limits.threshold, looks=looks)
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
        if self._run.file.box.state == BoxState.DEGRADED:
            raise Inconclusive(f"the box is DEGRADED: {self._run.file.box.reason}")
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
        chosen = self._run.settings.hypothesis
        if chosen is None:
            raise NotRun("no hypothesis: give --hypothesis FILE with --ab")
        outcomes = self.outcomes
        levels = {name: level.verdict for name, level in self._levels().items()}
        answers = hypothesis.evaluate(chosen.criteria, outcomes, self.visits, levels)
        text, criteria = hypothesis.gate_behind(chosen.phase) if chosen.phase else ("", ())
        gate = hypothesis.evaluate(criteria, outcomes, self.visits, levels)
        file = self._run.directory / "review.md"
        engine = self._run.file.engine
        write_text(
            hypothesis.review(
                chosen,
                answers,
                (text, gate),
                sides=(self._sides[0].text, self._sides[1].text),
                outcomes=outcomes,
                levels=levels,
                run={
                    "profile": self._run.file.profile,
                    "engine": f"{engine.name} {engine.version or '(version unknown)'}",
                    "box": self._run.file.box.state,
                },
            ),
            file,
        )
        _conclude([*answers, *gate], file)

    def _levels(self) -> Mapping[str, verdict_file.LevelReport]:
        self._run.save()  # which judges the levels by the tests that have ended
        return self._run.file.levels

    @property
    def _broken(self) -> str | None:
        return next((v.failure for v in self.visits if v.side == "B" and v.failure), None)

    def _visit(self, name: str, which: str) -> None:
        side = self._sides[0 if name == "A" else 1]
        announce(self._run.config, "A/B", f"{name}, pair {which}: {side.text or '(as it is)'}")
        visit = Visit(name)
        try:
            server, available = self._server(name, side)
            visit.metrics = self._measure(name, server)
            if server.startup_s is not None:
                visit.metrics["startup_s"] = Value(server.startup_s, "s", False)
            memory = self._memory_gib(available)
            if memory:
                visit.metrics["memory_gib"] = Value(memory, "GiB", False)
            visit.path = kernel_path(self._run.kernel_path(server))
            if self._run.pool is not None:
                self._run.pool.check()
        except ServerError as error:
            visit.failure = self._run.redact(str(error).splitlines()[0])
            if name == "A":
                raise NotRun(f"A does not serve, so there is nothing to compare with: "
                             f"{visit.failure}") from error  # fmt: skip
        self.visits.append(visit)

    def _server(self, name: str, side: Side) -> tuple[Server, int]:
        """A fresh start of a side; of a URL, the server there. And the memory free before it."""
        if side.url is not None:
            settings, profile = self._run.settings, self._run.profile
            server = attach(
                side.url,
                api_key=settings.api_key,
                served_name=settings.served_name,
                default_name=profile.model.served_name,
                log=None,
            )
            return server, psutil.virtual_memory().available
        pool = self._run.pool
        if pool is None:
            raise NotRun(self._run.target.obstacle or "no server can be started here")
        pool.stop()
        available = psutil.virtual_memory().available
        return self._run.start(self._configuration(name, side)), available

    def _configuration(self, name: str, side: Side) -> ServerConfiguration:
        own = self._run.managed_configuration(self._run.profile.under_test)
        return dataclasses.replace(
            own,
            name=name,
            python=side.python or own.python,
            arguments=(*own.arguments, *side.arguments),
            environment=environment_items(dict(own.environment), dict(side.environment)),
        )

    def _measure(self, name: str, server: Server) -> dict[str, Value]:
        plan = plan_of(self._run.settings, self._run.profile)
        depth = plan.depths[0]
        directory = self._run.directory / "ab" / f"{len(self.visits):02}-{name}"
        with TimedProcess(server.endpoint.base_url, server.endpoint.api_key) as sender:
            target = Target(
                endpoint=server.endpoint,
                sender=sender,
                prompts=Prompts(server.endpoint, plan.measuring.vocabulary),
                plan=plan,
                directory=directory,
            )
            target.probe()
            cell = Cell(target, depth).gather(plan.measuring.rounds)
            measured = [
                cell.prefill(),
                *(cell.decode(tokens) for tokens in plan.generated_tokens),
                cell.times("ttft", 0.5),
                cell.times("tpot", 0.5),
            ]
        values: dict[str, Value] = {}
        for measurement in measured:
            if measurement.invalid:
                why = "; ".join(str(item) for item in measurement.invalid)
                raise Invalid(f"{name}: {measurement.name}: {why}")
            value = statistics.estimate(measurement.samples).value
            values[measurement.name] = Value(value, measurement.unit, measurement.higher_is_better)
        return values

    def _memory_gib(self, available_before: int) -> float | None:
        pool = self._run.pool
        if pool is None:
            return None
        if self._run.target.arch == architecture.CPU:
            return round(_resident(pool) / 2**30, 4)
        # What a GPU that shares the host's memory takes is in no process's resident set.
        return round((available_before - psutil.virtual_memory().available) / 2**30, 4)

    def _write(self, outcomes: list[Outcome]) -> None:
        """What is known so far, in ab.json and among the metrics."""
        for outcome in outcomes:
            rate = outcome.higher_is_better
            self._run.file.metrics[f"ab:{outcome.metric}"] = MetricReport(
                value=_finite(outcome.ratio),
                unit="B/A",
                ci_low=_finite(outcome.ci_low),
                ci_high=_finite(outcome.ci_high),
                confidence=ab.CONFIDENCE,
                rounds=outcome.pairs,
                minimum=1.0 - outcome.allowed if rate else None,
                at_most=None if rate else 1.0 + outcome.allowed,
                verdict=outcome.verdict,
            )
        record = {
            "sides": [side.text for side in self._sides],
            "visits": [dataclasses.asdict(visit) for visit in self.visits],
            "outcomes": [
                {
                    name: _finite(value) if isinstance(value, float) else value
                    for name, value in dataclasses.asdict(outcome).items()
                }
                for outcome in outcomes
            ],
        }
        text = self._run.redact(json.dumps(record, indent=2))
        write_text(text + "\n", self._run.directory / "ab.json")
        self._run.save()


def _finite(value: float) -> float | None:
    """JSON has no infinity: one pair has no interval."""
    return value if math.isfinite(value) else None


def _resident(pool: ServerPool) -> int:
    total = 0
    for process in pool.processes():
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def _conclude(answers: list[Answer], file: Path) -> None:
    verdict = hypothesis.conclude(answers)
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


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ab_run: is there only with --ab A B")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --ab there is no such comparison: its tests are no gap in a certificate."""
    if config.stash[SETTINGS].ab is None:
        items[:] = [item for item in items if item.get_closest_marker("ab_run") is None]


@pytest.fixture(scope="session")
def ab_run(conformance: Run, box: Box) -> AbRun:
    """A against B, started in turns."""
    assert box is not None  # read before the first start
    sides = conformance.settings.ab
    if sides is None:
        raise NotRun("nothing to compare: give --ab A B")
    return AbRun(conformance, sides)
