"""One cell, from its start to its rate: what is checked, in this order, until something is wrong.
It starts, or says why not; it runs what was asked for; it knows its answers; they are the
baseline's, one by one and several at the same time; drafts are accepted where it speculates; it
still lives; it is as fast as it should be."""

import contextlib
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from sm121.answers import agreement, exam, golden, oracle_tolerance, sanity
from sm121.answers.golden import GoldenFile
from sm121.answers.prompts import PromptSet, continuations
from sm121.checkpoint.identity import is_here
from sm121.client.completions import Asker, Refused, Request
from sm121.core import engine_arguments, errors, files, level_settings, numbers
from sm121.core.configuration import ServerConfiguration
from sm121.core.server import Server
from sm121.core.unmet import Fact, text
from sm121.core.verdict import Invalid, NotRun, Undecided
from sm121.engines.server_errors import ServerError
from sm121.evidence.compile_watch import CompileWatch
from sm121.evidence.kernel_path import mistaken_environment
from sm121.matrix import axes, covering, oracle
from sm121.matrix.outcome import (
    AnswerDifference,
    CellOutcome,
    CellRate,
    CellRecord,
    Step,
    StepName,
    worst,
)
from sm121.measure import counters, measurement, statistics
from sm121.measure.cells import MeasuredCell
from sm121.measure.measured_server import MeasuredServer
from sm121.measure.metrics.tg import DecodeRate
from sm121.measure.plan import Plan
from sm121.run.harness import Harness

#: Fields of the path that a report of a cell shows.
_SHOWN = ("attention", "moe", "cuda_graphs", "kv_layout", "speculative", "dtype", "load_format",
          "prefix_caching")  # fmt: skip
#: A check gives what is wrong, None where nothing is.
Check = Callable[[CellRecord, Server], str | None]
#: The reason (`sm121.measure.validity`) that is no disturbance: the server did not answer.
_FAILED = "request_failed"


@dataclass(frozen=True)
class Baseline:
    """What cells are compared with: the baseline's answers and its rate."""

    golden: GoldenFile
    rate: CellRate | None


@dataclass(frozen=True)
class _Sample:
    """A rate, what speaks against it (else empty), and whether that is requests that failed."""

    rate: CellRate
    invalid: str
    failed: bool


def missing_drafter(configuration: ServerConfiguration) -> str | None:
    """The drafter of a configuration that its engine would download; None where it has all."""
    drafter = engine_arguments.read(configuration.given).get("speculative_config.model")
    environment = {**os.environ, **dict(configuration.environment)}
    return drafter if drafter and not is_here(drafter, environment) else None


@dataclass
class Examiner:
    """Runs cells, one after the other, and compares them with the baseline."""

    harness: Harness
    space: axes.Space
    settings: level_settings.MatrixPlan
    directory: Path
    baseline: Baseline | None = None
    oracles: Path = Path(".cache/oracle")
    _steps: list[Step] = field(default_factory=list)
    _step: StepName = "start"
    #: Logs of the ends that a bundle was made of: each cell of a start-up gets the same error.
    _bundled: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.profile = self.harness.profile
        every = continuations()
        names, most = self.settings.prompts, self.settings.answer_tokens
        self.prompts = PromptSet(
            schema_version=1,
            name=f"{every.name} (matrix)",
            prompts=tuple(
                prompt.model_copy(update={"tokens": min(prompt.tokens, most)})
                for prompt in every.prompts
                if not names or prompt.name in names
            ),
        )

    def examine(
        self,
        planned: covering.Planned,
        configuration: ServerConfiguration | None,
        *,
        isolating: bool = False,
    ) -> CellRecord:
        """Run a cell to its end; nothing that an engine does wrong raises. `configuration`: what is
        started; None: attached. `isolating`: to find a smallest set, not as part of the array."""
        began = time.monotonic()
        self._steps, self._step = [], "start"
        start = configuration or ServerConfiguration("attached", "", "", "", "")
        record = CellRecord(
            id=axes.identity(self.space, planned.cell),
            values=dict(planned.cell),
            why=list(planned.why),
            configuration=start.key,
            arguments=list(start.arguments),
            environment={k: self.harness.redact(v) for k, v in start.environment},
            outcome=CellOutcome.NOT_RUN,
            isolating=isolating,
        )
        server: Server | None = None
        try:
            server = self._start(record, configuration)
            self._after_start(record, server)
        except ServerError as error:
            self._died(record, error, started=server is not None)
        except errors.Sm121Error as error:
            outcome = CellOutcome.NOT_RUN if isinstance(error, NotRun) else CellOutcome.INVALID
            self._done(self._step, time.monotonic(), outcome, _first_line(error))
        record.steps = self._steps
        decisive = worst(self._steps)
        record.outcome = decisive.outcome if decisive else CellOutcome.PASS
        record.reason = f"{decisive.name}: {decisive.message}" if decisive else ""
        record.took_s = round(time.monotonic() - began, 2)
        return record

    def _start(self, record: CellRecord, configuration: ServerConfiguration | None) -> Server:
        began = time.monotonic()
        harness = self.harness
        if configuration is not None and (drafter := missing_drafter(configuration)):
            raise NotRun(
                f"the drafter {drafter} is not in the hub's cache, and a start's limit is not for "
                f"downloads: `hf download {drafter}` first"
            )
        server = harness.start(configuration) if configuration else harness.server()
        took = time.monotonic() - began
        # A server that ran already answers at once.
        if took > 1.0 or took >= (server.startup_s or 0.0):
            record.boot_s = server.startup_s
        record.log = server.log.name if server.log is not None else None
        self._done("start", began)
        return server

    def _after_start(self, record: CellRecord, server: Server) -> None:
        checks: list[tuple[StepName, Check, CellOutcome]] = [
            ("path", self._path, CellOutcome.FALLBACK),
            ("answers", self._known_answers, CellOutcome.FAIL),
            ("equivalence", self._equivalence, CellOutcome.FAIL),
            ("stress", self._stress, CellOutcome.FAIL),
            ("drafts", self._drafts, CellOutcome.FAIL),
            ("alive", self._alive, CellOutcome.CRASH),
        ]
        if any(self.space.value(axis, record.values[axis]).oracle for axis in self.space.axes):
            checks.insert(-2, ("oracle", self._oracle, CellOutcome.FAIL))
        for name, check, outcome in checks:
            began, self._step = time.monotonic(), name
            try:
                wrong = check(record, server)
            except (Refused, httpx.HTTPError, AssertionError, ValueError) as error:
                self.harness.check_alive(after_failure=True)
                wrong = f"{type(error).__name__}: {error}"
            except Undecided as error:
                kind = CellOutcome.INVALID if isinstance(error, Invalid) else CellOutcome.NOT_RUN
                self._done(name, began, kind, _first_line(error))
                continue
            if wrong is None:
                self._done(name, began)
                continue
            # The rest of the checks says nothing of a cell with this wrong in it.
            self._done(name, began, outcome, wrong, record.log)
            self.harness.check_alive()
            return
        began, self._step = time.monotonic(), "performance"
        outcome, message = self._judge_rate(record, server)
        with contextlib.suppress(Undecided):  # the step "path" has said so
            if wrong := self._path(record, server):
                outcome, message = CellOutcome.FALLBACK, f"after the checks: {wrong}"
        evidence = record.log if outcome in (CellOutcome.FAIL, CellOutcome.FALLBACK) else None
        self._done("performance", began, outcome, message, evidence)

    def _alive(self, _record: CellRecord, server: Server) -> str | None:
        """The server outlived the checks; an attached one still says which model it serves."""
        self.harness.check_alive()
        if server.managed or self.harness.life is None or self.harness.life.answers():
            return None
        return "the attached server answers no more"

    def _path(self, record: CellRecord, server: Server) -> str | None:
        if not server.managed and server.log is None:
            raise NotRun(f"nothing shows which path it took: {server.why_no_log}")
        path = self.harness.kernel_path(server)
        record.path |= {name: getattr(path, name) for name in _SHOWN}
        wrong = list(path.differences)
        accepted = {*self.profile.kernel_path.accepted_fallbacks}
        text = server.log.read_text("utf-8", "replace") if server.log is not None else ""
        for axis in self.space.axes:
            value = self.space.value(axis, record.values[axis])
            accepted.update(value.fallbacks)
            setting = self.space.settings[axis][record.values[axis]]
            where = f"{axis}={record.values[axis]}"
            for expected in (value.expected, setting.expected):
                wrong += expected.unmet(where, path, text if server.log is not None else None)
        for name in path.fallbacks:
            if name not in accepted:
                wrong.append(
                    f"fallback {name}: {path.evidence.get(f'fallbacks.{name}', 'no line')}"
                )
        if unknown := mistaken_environment(path):
            wrong.append(f"variables that the engine does not know: {', '.join(unknown)}")
        return "; ".join(wrong) or None

    def _known_answers(self, _record: CellRecord, server: Server) -> str | None:
        asker = Asker(server)
        for case in exam.load(self.profile.correctness.exam).completions:
            answer = asker.ask(Request(case.prompt, max(4, len(case.begins)), top=0))
            if not answer.text.startswith(case.begins):
                return f"{case.prompt!r}: required {case.begins!r} first, seen {answer.text!r}"
            if signs := sanity.signs(answer.text, answer.ids):
                return f"{case.prompt!r}: {signs[0]}"
        return None

    def _equivalence(self, record: CellRecord, server: Server) -> str | None:
        """Answers against the baseline's, token by token; the baseline's own become those."""
        asker = Asker(server)
        if self.baseline is None:
            if record.id != "baseline":
                raise NotRun("the baseline has no answers to compare with")
            recorded = golden.record(
                asker,
                self.prompts,
                model=golden.Identity(served_name=server.endpoint.served_name),
                dtype=oracle_tolerance.dtype_of(server, self.profile),
                engine=server.engine,
                engine_version=server.version,
                configuration="baseline",
                environment={},
            )
            self.directory.mkdir(parents=True, exist_ok=True)
            golden.save(recorded, self.directory / "baseline.golden.json")
            self.baseline = Baseline(recorded, None)
            return None
        if record.id == "baseline" and not record.isolating:
            return None
        bound = self._bound(record.values)
        change = golden.compare(
            self.baseline.golden, asker, self.prompts, bound, {}, "the baseline's answers"
        )
        record.agreement = AnswerDifference(
            worst_nats=change.worst[2], mean_divergence=change.mean_divergence, top1=change.top1
        )
        beyond = change.beyond(bound)
        return text(beyond) if beyond else None

    def _stress(self, record: CellRecord, server: Server) -> str | None:
        """Several requests at the same time, each answer checked against the baseline's. One small
        function, so that a stress of another make can take its place."""
        if self.baseline is None:
            raise NotRun("the baseline has no answers to compare with")
        bound = self._bound(record.values)
        expected = {answer.name: answer for answer in self.baseline.golden.answers}
        prompts = [self.prompts.prompts[n % len(self.prompts.prompts)]
                  for n in range(self.settings.stress_requests)]  # fmt: skip
        asker = Asker(server)
        answers = asker.ask_together(
            [Request(p.text, p.tokens, salt=f"stress-{n}") for n, p in enumerate(prompts)]
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            judged = agreement.judge(
                expected[prompt.name].positions, asker.positions(answer), bound,
                golden.continuation(asker, answer.prompt_ids, prompt.tokens),
            )  # fmt: skip
            if judged.disagreement is not None:
                return f"{len(prompts)} at the same time: {prompt.name!r}: {judged.disagreement}"
        return None

    def _oracle(self, record: CellRecord, server: Server) -> str | None:
        record.path["oracle"] = oracle.agrees(self.harness, server, self.oracles)
        return None

    def _drafts(self, record: CellRecord, server: Server) -> str | None:
        drafted = counters.drafted(server.endpoint)
        if drafted is None:
            return None
        if not drafted.drafts:
            return str(Fact("drafts for prompts that repeat themselves"))
        record.path["accepted"] = f"{drafted.accepted:.0f} of {drafted.tokens:.0f} drafted tokens"
        return None if drafted.accepted else str(Fact("an accepted token", f"{drafted}"))

    def _judge_rate(self, record: CellRecord, server: Server) -> tuple[CellOutcome, str]:
        sample = self._rate(server, record)
        if sample.invalid and not sample.failed:
            # Once more: a disturbed sample says nothing of the values.
            sample = self._rate(server, record)
        record.rate = rate = sample.rate
        if sample.failed:
            return CellOutcome.FAIL, sample.invalid
        if sample.invalid:
            return CellOutcome.INVALID, sample.invalid
        if record.id == "baseline" and self.baseline is not None and self.baseline.rate is None:
            self.baseline = Baseline(self.baseline.golden, rate)
            return CellOutcome.PASS, ""
        if self.baseline is None or self.baseline.rate is None:
            return CellOutcome.INVALID, "the baseline has no rate"
        slower = self._compare(rate, self.baseline.rate, record.values)
        if slower:  # a busy moment is no property of the values: it must be seen twice
            again = self._rate(server, record)
            if again.failed:
                return CellOutcome.FAIL, again.invalid
            if not again.invalid:
                slower = self._compare(again.rate, self.baseline.rate, record.values)
                record.rate = rate = max((rate, again.rate), key=lambda one: one.ratio or 0.0)
        return CellOutcome.SLOWER if slower else CellOutcome.PASS, (
            f"{rate.metric} {numbers.number(rate.value)} tok/s, the baseline has "
            f"{numbers.number(self.baseline.rate.value)}: {rate.ratio:.3f} of it "
            f"[{rate.ci_low:.3f}, {rate.ci_high:.3f}]; {rate.allowed:.0%} less allowed"
        )

    def _rate(self, server: Server, record: CellRecord) -> _Sample:
        """A sample of the cell's rate, and what speaks against it. The server outlives it, else
        what it died of is raised: a dead server has no disturbed rate."""
        try:
            metric, samples, against = self._measure(record, server)
        except errors.Sm121Error:
            self.harness.check_alive(after_failure=True)
            raise
        failed = any(item.reason == _FAILED for item in against)
        self.harness.check_alive(after_failure=failed)
        invalid = "; ".join(str(item) for item in against)
        if not against and len(samples) < 2:
            invalid = f"{len(samples)} rounds of {self.settings.rounds} have a rate"
        value = statistics.estimate(samples).value if samples else None
        return _Sample(CellRate(metric=metric, samples=samples, value=value), invalid, failed)

    def _compare(self, rate: CellRate, baseline: CellRate, values: Mapping[str, str]) -> bool:
        rate.ratio, rate.ci_low, rate.ci_high = (
            round(v, 4) for v in statistics.ratio_interval(rate.samples, baseline.samples)
        )
        share = 1.0 - self.settings.may_be_slower.value
        for axis in self.space.axes:
            share *= 1.0 - (self.space.value(axis, values[axis]).may_be_slower or 0.0)
        rate.allowed = round(1.0 - share, 4)
        return rate.ci_high < 1.0 - rate.allowed

    def _measure(
        self, record: CellRecord, server: Server
    ) -> tuple[str, list[float], list[measurement.Invalidity]]:
        settings = self.settings
        names = ("rounds", "short_rounds", "warm_up_requests", "drift_bound", "second_clock_bound")
        changed = {name: getattr(settings, name) for name in names}
        measuring = self.profile.performance.measuring.model_copy(
            update={**changed, "maximum_rounds": settings.rounds}
        )
        plan = Plan(settings.prompt_tokens, (settings.generated_tokens,), (0,), measuring)
        name = f"tg{settings.generated_tokens}@d0"
        records = self.directory / "records" / record.id
        with MeasuredServer.open(
            server.endpoint,
            plan,
            records,
            compiled=CompileWatch(server.log, server.reader).new,
        ) as measured_server:
            cell = MeasuredCell(measured_server, 0).gather(settings.rounds)
            measured = DecodeRate(settings.generated_tokens).settle(cell)
        good = [s for s in measured.samples if math.isfinite(s) and s > 0]
        return name, good, measured.invalid

    def _bound(self, values: Mapping[str, str]) -> level_settings.GoldenBound:
        bounds = [
            bound
            for axis in self.space.axes
            if (bound := self.space.value(axis, values[axis]).bound) is not None
        ]
        if bounds:
            return max(bounds, key=lambda bound: bound.max_abs)
        assert self.baseline is not None
        by_dtype = {str(k): v for k, v in self.profile.correctness.golden.items()}
        dtype = self.baseline.golden.dtype
        if dtype not in by_dtype:
            raise NotRun(f"profile {self.profile.name} has no correctness.golden for {dtype}")
        return by_dtype[dtype]

    def _done(
        self,
        name: StepName,
        began: float,
        outcome: CellOutcome = CellOutcome.PASS,
        message: str = "",
        evidence: str | None = None,
    ) -> None:
        self._steps.append(
            Step(
                name=name,
                outcome=outcome,
                message=self.harness.redact(message)[:1500],
                evidence=evidence,
                took_s=round(time.monotonic() - began, 2),
            )
        )

    def _died(self, record: CellRecord, error: ServerError, *, started: bool) -> None:
        """A start that fails with a reason of the engine's own is FAIL; everything else CRASH."""
        record.log = error.log.name
        refused = not started and error.cause.kind == "config"
        cause = error.cause
        # What the run finds out while something of the server is left; once for each end.
        if not refused and error.log not in self._bundled:
            self._bundled.add(error.log)
            # A cell that is run to find a set is no test's.
            tests = [t.id for t in self.harness.ledger if t.id.endswith(f"[{record.id}]")]
            cause = self.harness.crashed(error, tests[-1] if tests else None)
        record.kind = cause.kind
        outcome = CellOutcome.FAIL if refused else CellOutcome.CRASH
        event = "refused" if refused else "did not start"
        if started:
            event = f"died (checking: {self._step})"
        safe = re.sub(r"[^A-Za-z0-9=,._+-]", "_", record.id)[:120]
        folder = self.directory / "bundles" / safe
        folder.mkdir(parents=True, exist_ok=True)
        if error.log.is_file():
            shutil.copy(error.log, folder / "server.log")
        for name, content in (("cell.json", record), ("cause.json", cause)):
            text = self.harness.redact(content.model_dump_json(indent=2))
            files.write_text(f"{text}\n", folder / name)
        record.bundle = str(folder.relative_to(self.directory.parent))
        message = f"{event}: {cause.kind}: {cause.summary}"
        step: StepName = "alive" if started else "start"
        self._done(step, time.monotonic(), outcome, message, record.bundle)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
