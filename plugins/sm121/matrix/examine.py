"""Examine one cell, from the start of its server to its decode rate.

The checks run in this order until one fails:

1. The server starts.
2. It runs on the requested kernel path.
3. It answers the prompts of the exam correctly.
4. Its answers agree with the baseline's, one request at a time.
5. Its answers agree with the baseline's under concurrent requests.
6. Its answers agree with the oracle's, if a value of the cell requires that.
7. Some of its draft tokens are accepted, if it speculates.
8. It is still alive.
9. It is as fast as the profile requires.
"""

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from sm121.answers import golden
from sm121.answers.golden import GoldenFile
from sm121.answers.prompts import PromptSet, continuations
from sm121.client.completions import Asker, Refused
from sm121.core import errors, files, level_settings
from sm121.core.configuration import ServerConfiguration
from sm121.core.server import Server
from sm121.core.unmet import Fact, facts_text
from sm121.core.verdict import Invalid, NotRun, Undecided
from sm121.engines.server_errors import ServerError
from sm121.evidence.kernel_path import mistaken_environment
from sm121.matrix import cell_answers, covering, oracle, rates
from sm121.matrix.space import Space, identity
from sm121.measure import counters, measurement, statistics
from sm121.run.cell_record import (
    AnswerDifference,
    CellOutcome,
    CellRate,
    CellRecord,
    CellStep,
    StepName,
    worst,
)
from sm121.run.run import Run

#: Fields of the kernel path that the record of a cell contains.
_SHOWN = (
    "attention",
    "moe",
    "cuda_graphs",
    "kv_layout",
    "speculative",
    "dtype",
    "load_format",
    "prefix_caching",
)
#: The reason (`sm121.measure.validity`) for failed requests, which are a fault of the server and no
#: disturbance of the measurement.
_FAILED = "request_failed"
#: If starting a server took at most this many seconds, it was already running.
_AT_ONCE_S = 1.0
#: The maximum number of characters of a step's message.
_LONGEST_MESSAGE = 1500


@dataclass(frozen=True)
class Baseline:
    """The answers and the rate of the baseline, with which cells are compared."""

    golden: GoldenFile
    #: The rate; None if it was not measured yet, or is invalid.
    rate: CellRate | None


@dataclass(frozen=True)
class _Sample:
    """The name, the rounds and the validity of a measured rate."""

    rate: CellRate
    #: The reasons why the rate is invalid; empty if it is valid.
    invalid: str
    #: Whether requests failed.
    failed: bool


@dataclass(frozen=True)
class _Check:
    """One check of a started cell."""

    step: StepName
    #: Returns the fault, or None.
    run: Callable[[CellRecord, Server], str | None]
    #: The outcome of a cell with the fault.
    outcome: CellOutcome


@dataclass(frozen=True)
class _RateVerdict:
    """The outcome of a cell's rate, and its explanation."""

    outcome: CellOutcome
    message: str


@dataclass
class Examiner:
    """Runs cells one after another, and compares them with the baseline."""

    run: Run
    space: Space
    settings: level_settings.MatrixPlan
    #: The folder of the matrix level.
    directory: Path
    #: The baseline's results; None until it has answered.
    baseline: Baseline | None = None
    #: The folder for the oracle's results.
    oracles: Path = Path(".cache/oracle")
    _steps: list[CellStep] = field(default_factory=list)
    _step: StepName = "start"
    #: Logs whose crash already has a bundle. All cells of one start get the same error.
    _bundled: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.profile = self.run.profile
        shipped = continuations()
        prompts = []
        for prompt in shipped.prompts:
            if not self.settings.prompts or prompt.name in self.settings.prompts:
                tokens = min(prompt.tokens, self.settings.answer_tokens)
                prompts.append(prompt.model_copy(update={"tokens": tokens}))
        self.prompts = PromptSet(
            schema_version=1, name=f"{shipped.name} (matrix)", prompts=tuple(prompts)
        )

    def examine(
        self,
        planned: covering.Planned,
        configuration: ServerConfiguration | None,
        *,
        isolating: bool = False,
    ) -> CellRecord:
        """Run a cell to its end. A fault of the engine is an outcome, not an exception.

        Args:
            planned: The cell.
            configuration: The configuration of its server. None: the server is attached.
            isolating: Whether it runs to find a smallest failing set, not as part of the array.
        """
        began = time.monotonic()
        self._steps = []
        self._step = "start"
        start = configuration or ServerConfiguration(
            name="attached", engine="", python="", model="", served_name=""
        )
        record = CellRecord(
            id=identity(self.space, planned.cell),
            values=dict(planned.cell),
            why=list(planned.why),
            configuration=start.key,
            arguments=[self.run.record.redact(text) for text in start.arguments],
            environment={name: self.run.record.redact(text) for name, text in start.environment},
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
        """Return the server of a cell; start it unless it is running."""
        began = time.monotonic()
        if configuration is None:
            server = self.run.server()
        else:
            server = self.run.servers.start(configuration)
        took_s = time.monotonic() - began
        if took_s > _AT_ONCE_S or took_s >= (server.startup_s or 0.0):
            record.boot_s = server.startup_s
        record.log = server.log.name if server.log is not None else None
        self._done("start", began)
        return server

    def _after_start(self, record: CellRecord, server: Server) -> None:
        """Run the checks of a started cell, until one of them fails."""
        for check in self._checks(record):
            if not self._passes(check, record, server):
                self.run.servers.check_alive()
                return
        began = time.monotonic()
        self._step = "performance"
        judged = self._judge_rate(record, server)
        with contextlib.suppress(Undecided):  # reported by the step "path"
            fault = self._path(record, server)
            if fault is not None:
                judged = _RateVerdict(CellOutcome.FALLBACK, f"after the checks: {fault}")
        is_fault = judged.outcome in (CellOutcome.FAIL, CellOutcome.FALLBACK)
        evidence = record.log if is_fault else None
        self._done("performance", began, judged.outcome, judged.message, evidence)

    def _checks(self, record: CellRecord) -> list[_Check]:
        """Return the checks of a cell in the order in which they run."""
        checks = [
            _Check("path", self._path, CellOutcome.FALLBACK),
            _Check("answers", self._known_answers, CellOutcome.FAIL),
            _Check("equivalence", self._equivalence, CellOutcome.FAIL),
            _Check("stress", self._stress, CellOutcome.FAIL),
        ]
        if any(self.space.value(axis, record.values[axis]).oracle for axis in self.space.axes):
            checks.append(_Check("oracle", self._oracle, CellOutcome.FAIL))
        checks.append(_Check("drafts", self._drafts, CellOutcome.FAIL))
        checks.append(_Check("alive", self._alive, CellOutcome.CRASH))
        return checks

    def _passes(self, check: _Check, record: CellRecord, server: Server) -> bool:
        """Run one check and record its step.

        Returns:
            False if the check failed, so that the remaining checks of the cell are skipped.
        """
        began = time.monotonic()
        self._step = check.step
        try:
            fault = check.run(record, server)
        except (Refused, httpx.HTTPError, AssertionError, ValueError) as error:
            self.run.servers.check_alive(after_failure=True)
            fault = f"{type(error).__name__}: {error}"
        except Undecided as error:
            undecided = CellOutcome.INVALID if isinstance(error, Invalid) else CellOutcome.NOT_RUN
            self._done(check.step, began, undecided, _first_line(error))
            return True
        if fault is None:
            self._done(check.step, began)
            return True
        self._done(check.step, began, check.outcome, fault, record.log)
        return False

    def _alive(self, _record: CellRecord, server: Server) -> str | None:
        """Check that the server is alive, and that an attached one answers."""
        self.run.servers.check_alive()
        if server.managed or self.run.servers.life is None or self.run.servers.life.answers():
            return None
        return "the attached server no longer answers"

    def _path(self, record: CellRecord, server: Server) -> str | None:
        """Check the kernel path, and the evidence of the cell's values."""
        if not server.managed and server.log is None:
            raise NotRun(f"the kernel path is unknown: {server.why_no_log}")
        path = self.run.paths.of(server)
        for name in _SHOWN:
            record.path[name] = getattr(path, name)
        faults = list(path.differences)
        accepted = set(self.profile.kernel_path.accepted_fallbacks)
        log = server.log.read_text("utf-8", "replace") if server.log is not None else None
        for axis in self.space.axes:
            name = record.values[axis]
            value = self.space.value(axis, name)
            accepted.update(value.fallbacks)
            for expected in (value.expected, self.space.settings[axis][name].expected):
                faults += expected.unmet(f"{axis}={name}", path, log)
        for fallback in path.fallbacks:
            if fallback not in accepted:
                line = path.evidence.get(f"fallbacks.{fallback}", "no line")
                faults.append(f"fallback {fallback}: {line}")
        unknown = mistaken_environment(path)
        if unknown:
            faults.append(f"variables that the engine does not know: {', '.join(unknown)}")
        return "; ".join(faults) or None

    def _known_answers(self, _record: CellRecord, server: Server) -> str | None:
        """Check the answers to the exam's completions."""
        return cell_answers.find_wrong_answer(Asker(server), self.profile.correctness.exam)

    def _equivalence(self, record: CellRecord, server: Server) -> str | None:
        """Compare the answers with the baseline's, token by token. For the baseline, store them."""
        if self.baseline is None:
            if record.id != "baseline":
                raise NotRun("the baseline has no answers to compare with")
            recorded = cell_answers.record_baseline(
                server, self.prompts, self.profile, self.directory
            )
            self.baseline = Baseline(recorded, None)
            return None
        if record.id == "baseline" and not record.isolating:
            return None
        bound = self._bound(record.values)
        asker = Asker(server)
        change = golden.compare(
            self.baseline.golden, asker, self.prompts, bound, {}, "the baseline's answers"
        )
        record.agreement = AnswerDifference(
            worst_nats=statistics.finite(change.worst.error),
            mean_divergence=statistics.finite(change.mean_divergence),
            top1=change.top1,
        )
        beyond = change.beyond(bound)
        return facts_text(beyond) if beyond else None

    def _stress(self, record: CellRecord, server: Server) -> str | None:
        """Send concurrent requests, and compare each answer with the baseline's."""
        if self.baseline is None:
            raise NotRun("the baseline has no answers to compare with")
        bound = self._bound(record.values)
        return cell_answers.find_disagreement(
            Asker(server),
            self.baseline.golden,
            self.prompts,
            count=self.settings.stress_requests,
            bound=bound,
        )

    def _oracle(self, record: CellRecord, server: Server) -> str | None:
        record.path["oracle"] = oracle.agrees(self.run, server, self.oracles)
        return None

    def _drafts(self, record: CellRecord, server: Server) -> str | None:
        """Check that a server with speculative decoding makes drafts, and accepts some of them."""
        drafted = counters.drafted(server.endpoint)
        if drafted is None:
            return None
        if not drafted.drafts:
            return str(Fact("drafts for prompts that repeat themselves"))
        record.path["accepted"] = f"{drafted.accepted:.0f} of {drafted.tokens:.0f} drafted tokens"
        return None if drafted.accepted else str(Fact("an accepted token", f"{drafted}"))

    def _judge_rate(self, record: CellRecord, server: Server) -> _RateVerdict:
        """Measure the rate, and compare it with the baseline's.

        A disturbed or slow sample is measured once more, since the machine may have been busy for a
        moment.
        """
        sample = self._rate(server, record)
        if sample.invalid and not sample.failed:
            sample = self._rate(server, record)
        rate = sample.rate
        record.rate = rate
        if sample.failed:
            return _RateVerdict(CellOutcome.FAIL, sample.invalid)
        if sample.invalid:
            return _RateVerdict(CellOutcome.INVALID, sample.invalid)
        if record.id == "baseline" and self.baseline is not None and self.baseline.rate is None:
            self.baseline = Baseline(self.baseline.golden, rate)
            return _RateVerdict(CellOutcome.PASS, "")
        if self.baseline is None or self.baseline.rate is None:
            return _RateVerdict(CellOutcome.INVALID, "the baseline has no rate")
        baseline = self.baseline.rate
        allowed = self._may_be_slower(record.values)
        slower = rates.compare_rates(rate, baseline, allowed)
        if slower:
            again = self._rate(server, record)
            if again.failed:
                return _RateVerdict(CellOutcome.FAIL, again.invalid)
            if not again.invalid:
                slower = rates.compare_rates(again.rate, baseline, allowed)
                rate = max((rate, again.rate), key=lambda either: either.ratio or 0.0)
                record.rate = rate
        outcome = CellOutcome.SLOWER if slower else CellOutcome.PASS
        return _RateVerdict(outcome, rates.describe_ratio(rate, baseline))

    def _rate(self, server: Server, record: CellRecord) -> _Sample:
        """Measure the rate once. If the server died meanwhile, raise the cause."""
        try:
            metric, samples, against = self._measure(record, server)
        except errors.Sm121Error:
            self.run.servers.check_alive(after_failure=True)
            raise
        failed = any(item.reason == _FAILED for item in against)
        self.run.servers.check_alive(after_failure=failed)
        invalid = "; ".join(str(item) for item in against)
        if not against and len(samples) < 2:
            invalid = f"only {len(samples)} of {self.settings.rounds} rounds have a rate"
        value = statistics.estimate(samples).value if samples else None
        return _Sample(CellRate(metric=metric, samples=samples, value=value), invalid, failed)

    def _may_be_slower(self, values: Mapping[str, str]) -> float:
        """Return how much slower than the baseline a cell may be, as a fraction."""
        share = 1.0 - self.settings.may_be_slower.value
        for axis in self.space.axes:
            share *= 1.0 - (self.space.value(axis, values[axis]).may_be_slower or 0.0)
        return 1.0 - share

    def _measure(
        self, record: CellRecord, server: Server
    ) -> tuple[str, list[float], list[measurement.Invalidity]]:
        """Return the result of `rates.measure_rate` for a cell."""
        records = self.directory / "records" / record.id
        measuring = self.profile.performance.measuring
        return rates.measure_rate(server, self.settings, measuring, records)

    def _bound(self, values: Mapping[str, str]) -> level_settings.GoldenBound:
        """Return the widest bound of a cell's values, or the bound of the baseline's dtype."""
        bounds = []
        for axis in self.space.axes:
            bound = self.space.value(axis, values[axis]).bound
            if bound is not None:
                bounds.append(bound)
        if bounds:
            return max(bounds, key=lambda bound: bound.max_abs)
        assert self.baseline is not None
        dtype = self.baseline.golden.dtype
        for name, bound in self.profile.correctness.golden.items():
            if name == dtype:
                return bound
        raise NotRun(f"profile {self.profile.name} has no correctness.golden for {dtype}")

    def _done(
        self,
        name: StepName,
        began: float,
        outcome: CellOutcome = CellOutcome.PASS,
        message: str = "",
        evidence: str | None = None,
    ) -> None:
        self._steps.append(
            CellStep(
                name=name,
                outcome=outcome,
                message=self.run.record.redact(message)[:_LONGEST_MESSAGE],
                evidence=evidence,
                took_s=round(time.monotonic() - began, 2),
            )
        )

    def _died(self, record: CellRecord, error: ServerError, *, started: bool) -> None:
        """Record that a server died or did not start.

        The outcome is FAIL if the engine refused to start and gave a reason; otherwise it is CRASH.
        """
        record.log = error.log.name
        refused = not started and error.cause.kind == "config"
        cause = error.cause
        if not refused and error.log not in self._bundled:
            self._bundled.add(error.log)
            servers = self.run.servers
            cause = servers.crashes.after_crash(servers, error, self.run.record.test)
        record.kind = cause.kind
        outcome = CellOutcome.FAIL if refused else CellOutcome.CRASH
        if started:
            event = f"died (checking: {self._step})"
        elif refused:
            event = "refused"
        else:
            event = "did not start"
        safe = re.sub(r"[^A-Za-z0-9=,._+-]", "_", record.id)[:120]
        folder = self.directory / "bundles" / safe
        folder.mkdir(parents=True, exist_ok=True)
        if error.log.is_file():
            shutil.copy(error.log, folder / "server.log")
        redact = self.run.record.redact
        files.write_text(redact(record.model_dump_json(indent=2)) + "\n", folder / "cell.json")
        files.write_text(redact(cause.model_dump_json(indent=2)) + "\n", folder / "cause.json")
        record.bundle = str(folder.relative_to(self.directory.parent))
        message = f"{event}: {cause.kind}: {cause.summary}"
        step: StepName = "alive" if started else "start"
        self._done(step, time.monotonic(), outcome, message, record.bundle)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
