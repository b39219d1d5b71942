"""The rates and times of the measuring plan, each measured on first use."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sm121.answers import exam
from sm121.answers.oracle_tolerance import bound_for
from sm121.client import completions, timed, timed_answer
from sm121.core.engine_arguments import at_once
from sm121.core.level_settings import TimedChats
from sm121.core.profile_fields import Gate
from sm121.core.server import Server
from sm121.core.unmet import Fact, Unmet, facts_of, of
from sm121.core.verdict import Inapplicable, Inconclusive, NotRun, Severity, Undecided, Verdict
from sm121.engines import requested
from sm121.evidence.compile_watch import CompileWatch
from sm121.measure import counters, gate, metrics, timing, validity
from sm121.measure.cells import Cells, MeasuredCell
from sm121.measure.measured_server import MeasuredServer, Show
from sm121.measure.measurement import Invalidity, Measurement, Unit
from sm121.measure.metrics import Metric
from sm121.measure.plan import Plan
from sm121.performance.recorder import Recorder
from sm121.performance.timed_texts import TimedTexts
from sm121.run.harness import Harness
from sm121.run.record import ProgressLine

#: Rounds of a cell at its first visit. The others follow later.
_FIRST_VISIT = 2
#: Extra rounds of a cell in the last look.
_LAST_LOOK = 3


@dataclass
class Bench:
    """The cells of one server, each measured once. `Bench.open` makes one."""

    server: MeasuredServer
    plan: Plan
    #: Whether tails are measured with as many requests as their gates need.
    tails: bool = False
    #: Returns why the numbers are off the required kernel path, by the log of now.
    off_path: Callable[[], list[Invalidity]] = list
    #: The recorded rates by name: the metric and its cell.
    recorded: dict[str, tuple[Metric, MeasuredCell]] = field(default_factory=dict)
    #: Compares the texts of timed answers with untimed ones; None: nothing does.
    texts: TimedTexts | None = None
    #: Returns the known answers of the profile that the server no longer gives, with its own.
    forgotten: Callable[[], dict[str, str]] = dict
    _latest: MeasuredCell | None = None
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._cells = Cells(self.server)

    @classmethod
    @contextmanager
    def open(
        cls, harness: Harness, plan: Plan, *, tails: bool = False, show: Show | None = None
    ) -> "Iterator[Bench]":
        """Open the server under test for measuring, and start it if it does not run.

        Args:
            harness: The run.
            plan: Lengths, depths and bounds.
            tails: Measure tails with as many requests as their gates need.
            show: Called with lines of progress; None: they are the run's.

        Yields:
            The bench.

        Raises:
            NotRun: There is no server to measure.
            StartError: The server did not start.
            Sm121Error: The server accepts neither token ids nor text.
        """
        server = harness.server()
        invalid, unproven = _against_the_path(harness, server)
        with MeasuredServer.open(
            server.endpoint,
            plan,
            harness.directory / "records",
            show=show or (lambda line: harness.say("measuring", line, ProgressLine.PASSING)),
            invalid=invalid,
            unproven=unproven,
            natural=drafts(harness, server),
            compiled=CompileWatch(server.log, server.reader, harness.follow_log).new,
        ) as measured:
            if measured.prompts.natural:  # another plan than one of random tokens
                workload = harness.file.environment.setdefault("workload", {})
                workload["texts"] = [*measured.prompts.texts]
            measured.slots = slots(harness, server)
            measured.slots_sure = server.managed or requested_slots(harness, server) is not None
            measured.context = server.context_tokens()
            facts = exam.load(harness.profile.correctness.exam).completions
            unknown_before = exam.unknown(server.endpoint, facts)

            def off_path() -> list[Invalidity]:
                if invalid:  # counted against every number already
                    return []
                return _against_the_path(harness, server)[0]

            def forgotten() -> dict[str, str]:
                unknown = exam.unknown(server.endpoint, facts)
                return {name: got for name, got in unknown.items() if name not in unknown_before}

            yield cls(
                server=measured,
                plan=plan,
                tails=tails,
                off_path=off_path,
                texts=texts_of(server, harness, plan),
                forgotten=forgotten,
            )

    def cell(
        self, depth: int = 0, concurrency: int = 1, *, first_visit: bool = False
    ) -> MeasuredCell:
        """Return a cell with at least the plan's rounds.

        Args:
            depth: Tokens in front of the plan's prompt.
            concurrency: Streams at the same time.
            first_visit: A few rounds are enough for now.
        """
        measuring = self.plan.measuring
        rounds = measuring.rounds if concurrency == 1 else measuring.concurrency_rounds
        if first_visit:
            rounds = min(rounds, _FIRST_VISIT)
        self._latest = self._cells.cell(depth, concurrency)
        return self._latest.gather(rounds)

    def read(self, metric: Metric, cell: MeasuredCell) -> Measurement:
        """Return a metric of a cell, checked against the kernel path of now.

        Args:
            metric: The metric.
            cell: The cell.
        """
        metric.settle(cell)
        if self.texts is not None:
            self.texts.hold(cell)
        measurement = metric.of(cell)
        measurement.invalid = [*measurement.invalid, *self.off_path()]
        return measurement

    def last_look(self, recorder: Recorder, *, unless_latest: bool = False) -> None:
        """Measure again what passed, and the first depth, and decide with all rounds together.

        A server that became slower meanwhile then has no rate that passes. Metrics that did not
        pass are not measured again, nor is anything at a second call.

        Args:
            recorder: Has the decisions, and decides again.
            unless_latest: The cell that was measured last gets no further long rounds.

        Raises:
            Unmet: A metric fails now.
            Undecided: A metric is undecided or invalid now, and none fails.
            NotRun: No rate was measured before.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if not self.recorded:
            raise NotRun("no rate was measured that a last look could be compared with")
        profile = recorder.harness.profile
        first = self._cells.cell(self.plan.depths[0])
        passed = {r.measurement.name for r in recorder.recorded if r.verdict is Verdict.PASS}
        gated = {name for name in self.recorded if profile.gate(name) is not None}
        by_cell: dict[int, list[str]] = {}
        for name, (_, cell) in self.recorded.items():
            if name in passed:
                by_cell.setdefault(id(cell), []).append(name)
        failures: list[Unmet | Undecided] = []
        lost = self.forgotten()
        if lost:
            failures.append(Unmet(Fact("what it knew before it was measured", f"{lost}")))
        for names in by_cell.values():
            cell = self.recorded[names[0]][1]
            if cell is not first and gated.isdisjoint(names):
                continue
            rounds = len(cell.long)
            if not (unless_latest and cell is self._latest):
                rounds += _LAST_LOOK
            for name in names:
                if name in gated:
                    self.recorded[name][0].gather_at_the_end(cell, rounds)
                else:
                    cell.gather(rounds)
            for name in names:
                self._decide_again(recorder, name, failures)
        if failures:
            worst = min(failures, key=lambda failure: isinstance(failure, Undecided))
            raise type(worst)(*(fact for failure in failures for fact in facts_of(failure)))

    def _decide_again(
        self, recorder: Recorder, name: str, failures: list[Unmet | Undecided]
    ) -> None:
        metric, cell = self.recorded[name]

        def more(samples: int) -> Measurement:
            metric.gather(cell, samples)
            return self.read(metric, cell)

        try:
            measurement = self.read(metric, cell)
            bound = gate.next_look(measurement.rounds + 1, 2 * measurement.rounds)
            recorder.record(measurement, more, maximum_rounds=bound)
        except (Unmet, Undecided) as failure:
            about = f"the last look: {name} passed before, and does not now"
            failures.append(type(failure)(*of(about, facts_of(failure))))


def texts_of(server: Server, harness: Harness, plan: Plan) -> TimedTexts:
    """Return what compares the texts of timed answers with untimed ones."""
    profile = harness.profile
    measuring = plan.measuring
    try:
        bound = bound_for(profile.correctness.agreement, server, profile, "agreement")
    except NotRun:
        bound = None
    asker = completions.Asker(server, timeout_s=measuring.request_within_s)
    return TimedTexts(asker, bound, measuring.vocabulary)


def drafts(harness: Harness, server: Server) -> bool:
    """Return whether a server drafts, by its kernel path or its arguments."""
    arguments = server.configuration.arguments if server.configuration is not None else ()
    shows = harness.kernel_path(server).speculative not in (None, "none")
    return shows or any("--speculative" in argument for argument in arguments)


def requested_slots(harness: Harness, server: Server) -> int | None:
    """Return the concurrent requests that a server was started with.

    They are in its arguments, or in the log of an attached server; None if neither has them.
    """
    if server.configuration is not None:
        return at_once(server.configuration.arguments)
    logged = requested.in_log(harness.kernel_path(server), "max_num_seqs")
    return int(logged) if logged is not None and logged.isdecimal() else None


def slots(harness: Harness, server: Server) -> int | None:
    """Return `requested_slots`; for an attached server without them, those of the profile."""
    requested_number = requested_slots(harness, server)
    if requested_number is not None or server.configuration is not None:
        return requested_number
    return at_once(harness.profile.arguments_of(None))


@dataclass(frozen=True)
class PerformanceChecks:
    """Measures metrics, and records each measurement with its verdict.

    Attributes:
        bench: The cells of the server under test.
        record: Decides on a measurement and raises its verdict, like `Recorder.record`.
    """

    bench: Bench
    record: Callable[..., object]

    def measure(
        self, key: str, depth: int | None = None, *, streams: int = 1, **parameters: Any
    ) -> None:
        """Measure a metric and record it.

        Args:
            key: The key of the metric (`metrics.find`).
            depth: The depth; None: the plan's first.
            streams: Streams at the same time.
            **parameters: Fields of the metric: ``tokens``, ``quantile``.
        """
        self.judge(metrics.find(key, **parameters), depth, streams)

    def judge(self, metric: Metric, depth: int | None = None, streams: int = 1) -> None:
        """Measure any metric and record it.

        Args:
            metric: The metric.
            depth: The depth; None: the plan's first.
            streams: Streams at the same time.
        """
        bench = self.bench
        plan = bench.plan
        depth = plan.depths[0] if depth is None else depth
        cell = bench.cell(depth, streams, first_visit=metric.first_visit and streams == 1)

        def more(samples: int) -> Measurement:
            metric.gather(cell, samples)
            return bench.read(metric, cell)

        for part in metric.parts(cell) if streams == 1 else ():
            measurement = bench.read(part, cell)
            bench.recorded[measurement.name] = part, cell
            self.record(measurement, part=True)
        measurement = bench.read(metric, cell)
        if metric.unit == "tok/s":
            bench.recorded[measurement.name] = metric, cell
        measuring = plan.measuring
        self.record(
            measurement,
            more if bench.tails or not metric.is_tail else None,
            maximum_rounds=(
                measuring.tail_requests if metric.is_tail else measuring.maximum_rounds
            ),
        )

    def visible_time(self, questions: Sequence[str], tokens: int) -> None:
        """Record ttft_visible_p50: the time to the first text of the answer proper (ms).

        The questions are real ones, since a model does not answer random tokens. Their prefix may
        come from a cache; the saved time is small beside the reasoning.

        Args:
            questions: The questions, asked in turns.
            tokens: Most tokens of an answer.
        """
        server, rounds = self.bench.server, self.bench.plan.measuring.concurrency_rounds
        findings = validity.Findings(list(server.invalid), list(server.unproven))
        samples = []
        reasoning = []
        retries = 0
        for number in range(rounds):
            question = questions[number % len(questions)]
            request = timed.chat(server.endpoint.served_name, question, tokens)
            server.show(f"time to the first visible text: {number + 1}/{rounds}")
            answer = server.sender.run([request], patience=server.patience).answers[0]
            visible_ms = timing.visible_ms(answer)
            retries += answer.retries
            if not answer.ok:
                findings.against("request_failed", str(answer.error))
            elif visible_ms is None:
                events = f"{len(answer.chunks)} events within {tokens} tokens"
                findings.against("no_visible_text", f"{events}, none with content")
            samples.append(visible_ms if answer.ok and visible_ms is not None else timing.NEVER)
            reasoning.append(sum(chunk.text and not chunk.visible for chunk in answer.chunks))
        self.record(
            Measurement(
                name="ttft_visible_p50",
                unit="ms",
                samples=samples,
                higher_is_better=False,
                quantile=0.5,
                invalid=[*findings.invalid, *self.bench.off_path()],
                unproven=findings.unproven,
                extra={"reasoning_chunks": reasoning, "cold": False, "retries": retries},
            )
        )

    def chat_rate(self, chats: TimedChats | None, required: Gate | None) -> None:
        """Record tg_chat: tokens a second of chats, from the request to its end, by usage.

        A server can be fast only for greedy completions of fixed length, or only for streams. A
        round of the plan's first cell goes before each chat, since the machine may have changed.
        For a server that drafts, the rate on random ids is no reference.

        Args:
            chats: The profile's chats; None: it has none.
            required: The gate of the decode rate, which chats of a server that drafts have to
                reach.

        Raises:
            Unmet: Chats, or the best of those that are streamed or not, are slower than their share
                of the decode rate beside them, or than that gate.
            NotRun: The profile has no chats to time.
            Inconclusive: Too few answers are long enough, or have a usage.
        """
        if chats is None:
            raise NotRun("the profile has no [performance.chats] to time")
        plan = self.bench.plan
        cell = self.bench.cell(plan.depths[0], first_visit=True)
        findings = cell.findings(failures=True)
        answers = self._timed_chats(chats, cell, findings)
        samples = [1e3 * (a.completion_tokens or 0) / timing.e2e_ms(a) for a in answers]
        last = cell.answers[-len(answers) :]
        beside = [timing.decode_rate(answer, cell.counted_by) for answer in last]
        self.record(
            Measurement(
                name="tg_chat",
                unit="tok/s",
                samples=samples,
                higher_is_better=True,
                invalid=[*findings.invalid, *self.bench.off_path()],
                unproven=findings.unproven,
                extra={"tokens": [a.completion_tokens for a in answers], "beside": beside},
            )
        )
        if findings.invalid:
            return  # measured on a busy machine: it holds for nothing
        rate = min(median(samples), max(samples[::2]), max(samples[1::2]))
        decoding = median(beside)
        text = f"tg{plan.longest}@d{cell.depth} is {decoding:.4g} tok/s between these chats"
        if cell.server.prompts.natural:
            words = "chats of a server that drafts are as fast as decoding has to be:"
            limit = required.minimum if required is not None else None
        else:
            words = f"chats are at least {chats.share or 0:.0%} as fast as decoding at that time:"
            limit = chats.share * decoding if chats.share is not None else None
        if limit is not None and rate < limit:
            fact = Fact(words, value=rate, limit=limit, unit="tok/s", evidence=text)
            raise Unmet(fact, severity=Severity.BLOCKER)

    def _timed_chats(
        self, chats: TimedChats, cell: MeasuredCell, findings: validity.Findings
    ) -> list[timed_answer.TimedAnswer]:
        """Return the long chats, every second one streamed, each after a round of the cell."""
        server, rounds = self.bench.server, self.bench.plan.measuring.concurrency_rounds + 1
        answers: list[timed_answer.TimedAnswer] = []
        for number in range(2 * rounds):
            question = chats.questions[number % len(chats.questions)]
            name, stream = server.endpoint.served_name, len(answers) % 2 == 0
            request = timed.chat(name, question, chats.at_most, greedy=False, stream=stream)
            cell.gather(len(cell.long) + 1)
            server.show(f"chats as users have them: {len(answers) + 1}/{rounds}")
            server.compiled()
            before = counters.fetch_quiet(server.endpoint)
            answer = server.sender.run([request], patience=server.patience).answers[0]
            tokens = answer.completion_tokens or 0
            after = counters.fetch_settled(server.endpoint, before, tokens)
            if answers or number > 1:  # the first two chats are the first of their shape
                validity.check_compiled(server.compiled(), findings)
            validity.check_chat(answer, before, after, findings)
            if answer.ok and tokens >= chats.at_least:
                answers.append(answer)
            if findings.invalid or len(answers) == rounds:
                return answers
        length = f"with {chats.at_least} tokens or more by usage"
        raise Inconclusive(f"{len(answers)} of {2 * rounds} chats ended {length}")

    def acceptance(self, drafted: counters.Drafted, position: int) -> None:
        """Record acceptance@P: accepted tokens at a position, in percent of the drafts.

        Args:
            drafted: The counters of drafts.
            position: The position in the draft, from 1.

        Raises:
            Inapplicable: Drafts are shorter, or the engine does not count positions.
            NotRun: No token was accepted at the position.
        """
        accepted = drafted.by_position
        if not accepted:
            raise Inapplicable(
                "the engine does not count accepted tokens by their place in the draft"
            )
        if position > len(accepted):
            raise Inapplicable(f"a draft has {len(accepted)} places")
        if not accepted[position - 1]:
            raise NotRun(f"of {drafted.drafts:.0f} drafts none was accepted at place {position}")
        share = 100.0 * accepted[position - 1] / drafted.drafts
        self.once(f"acceptance@{position}", "%", share, higher_is_better=True)

    def accepted_length(self, drafted: counters.Drafted) -> None:
        """Record accepted_length, in tokens a step."""
        length = drafted.accepted_length or 1.0
        self.once("accepted_length", "tokens", length, higher_is_better=True)

    def once(self, name: str, unit: Unit, value: float, *, higher_is_better: bool = False) -> None:
        """Record a value that exists once in a run: a start, a peak.

        Args:
            name: The name in verdict.json.
            unit: Its unit.
            value: The value.
            higher_is_better: Whether higher values are better.
        """
        self.record(
            Measurement(name=name, unit=unit, samples=[value], higher_is_better=higher_is_better)
        )


def _against_the_path(harness: Harness, server: Server) -> tuple[list[Invalidity], list[str]]:
    """Why the numbers of a server that is not on its required kernel path are invalid, and which
    parts of the path cannot be checked."""
    if server.log is None:
        return [], [f"kernel path: {server.why_no_log}"]
    if not (contradictions := harness.contradictions(server)):
        return [], []
    evidence = "; ".join(map(str, contradictions))[:500]
    return [Invalidity(reason="kernel_path", evidence=evidence)], []
