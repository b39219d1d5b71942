"""The metrics of the performance level: each is measured, recorded and judged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sm121.client import timed, timed_answer
from sm121.core.level_settings import TimedChats
from sm121.core.profile_fields import Gate
from sm121.core.unmet import Fact, Unmet
from sm121.core.verdict import Inapplicable, Inconclusive, NotRun, Severity
from sm121.measure import cell_records, counters, metrics, timing, validity
from sm121.measure.cells import MeasuredCell
from sm121.measure.measurement import Measurement, Unit
from sm121.measure.metrics import Metric
from sm121.performance.bench import Bench

#: The sampling parameters of `PerformanceChecks.sampled_rate`: the plan's workload.
SAMPLED = {"temperature": 1.0, "top_p": 1.0}


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
        if depth is None:
            depth = plan.depths[0]
        cell = bench.cell(depth, streams, first_visit=metric.first_visit and streams == 1)

        def more(samples: int) -> Measurement:
            metric.gather(cell, samples)
            return bench.read(metric, cell)

        if streams == 1:
            for part in metric.parts(cell):
                measurement = bench.read(part, cell)
                bench.recorded[measurement.name] = (part, cell)
                self.record(measurement, part=True)
        measurement = bench.read(metric, cell)
        if metric.unit == "tok/s":
            bench.recorded[measurement.name] = (metric, cell)
        if not metric.is_tail:
            self.record(measurement, more, maximum_rounds=plan.measuring.maximum_rounds)
            return
        self.record(
            measurement,
            more if bench.tails else None,
            maximum_rounds=plan.measuring.tail_requests,
        )

    def visible_time(self, questions: Sequence[str], tokens: int) -> None:
        """Record ttft_visible_p50: the time to the first text after the reasoning, in ms.

        The prompts are real questions, since a model does not answer random tokens. Their prefix
        may come from a cache; the saved time is small compared with the time for the reasoning.

        Args:
            questions: The questions, which are sent in turn.
            tokens: The maximum number of tokens of an answer.
        """
        server = self.bench.server
        rounds = self.bench.plan.measuring.concurrency_rounds
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
            sample = timing.NEVER
            if not answer.ok:
                findings.against("request_failed", str(answer.error))
            elif visible_ms is None:
                events = f"{len(answer.chunks)} events within {tokens} tokens"
                findings.against("no_visible_text", f"{events}, none with content")
            else:
                sample = visible_ms
            samples.append(sample)
            hidden = [chunk for chunk in answer.chunks if chunk.text and not chunk.visible]
            reasoning.append(len(hidden))
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
        """Record tg_chat: the tokens of a chat (its usage) divided by its duration.

        The check detects a server that is fast only for greedy completions of fixed length, or only
        for streams. Before each chat, a round of the plan's first cell is measured, since the
        machine may have changed. For a server that drafts, the rate on random ids is no reference.

        Args:
            chats: The profile's chats; None: it has none.
            required: The gate of the decode rate, which chats of a server that drafts have to
                reach.

        Raises:
            Unmet: The median chat, the fastest streamed chat or the fastest other chat is slower
                than the required share of the decode rate measured between the chats, or than that
                gate.
            NotRun: The profile has no chats to time.
            Inconclusive: Too few answers are long enough, or have a usage.
        """
        if chats is None:
            raise NotRun("the profile has no [performance.chats] to time")
        plan = self.bench.plan
        cell = self.bench.cell(plan.depths[0], first_visit=True)
        findings = cell.findings(failures=True)
        answers = self._timed_chats(chats, cell, findings)
        tokens = [answer.completion_tokens for answer in answers]
        samples = []
        for answer in answers:
            samples.append(1e3 * (answer.completion_tokens or 0) / timing.e2e_ms(answer))
        last = cell.timed.answers[-len(answers) :]
        beside = [timing.decode_rate(answer, cell.timed.counted_by) for answer in last]
        self.record(
            Measurement(
                name="tg_chat",
                unit="tok/s",
                samples=samples,
                higher_is_better=True,
                invalid=[*findings.invalid, *self.bench.off_path()],
                unproven=findings.unproven,
                extra={"tokens": tokens, "beside": beside},
            )
        )
        if findings.invalid:
            return  # The number was measured on a busy machine, so the rate is not judged.
        rate = min(median(samples), max(samples[::2]), max(samples[1::2]))
        decoding = median(beside)
        text = f"tg{plan.longest}@d{cell.depth} is {decoding:.4g} tok/s between these chats"
        limit = None
        if cell.server.prompts.natural:
            words = "chats with speculation, at least as fast as the gate of the decode rate:"
            if required is not None:
                limit = required.minimum
        else:
            words = f"chats are at least {chats.share or 0:.0%} as fast as decoding at that time:"
            if chats.share is not None:
                limit = chats.share * decoding
        if limit is not None and rate < limit:
            fact = Fact(words, value=rate, limit=limit, unit="tok/s", evidence=text)
            raise Unmet(fact, severity=Severity.BLOCKER)

    def _timed_chats(
        self, chats: TimedChats, cell: MeasuredCell, findings: validity.Findings
    ) -> list[timed_answer.TimedAnswer]:
        """Return the long chats, every second one streamed, each after a round of the cell."""
        server = self.bench.server
        rounds = self.bench.plan.measuring.concurrency_rounds + 1
        answers: list[timed_answer.TimedAnswer] = []
        for number in range(2 * rounds):
            question = chats.questions[number % len(chats.questions)]
            is_streamed = len(answers) % 2 == 0
            request = timed.chat(
                server.endpoint.served_name,
                question,
                chats.at_most,
                greedy=False,
                stream=is_streamed,
            )
            cell.gather(len(cell.timed.long) + 1)
            server.show(f"chats as users have them: {len(answers) + 1}/{rounds}")
            server.compiled()
            before = counters.fetch_quiet(server.endpoint)
            answer = server.sender.run([request], patience=server.patience).answers[0]
            tokens = answer.completion_tokens or 0
            after = counters.fetch_settled(server.endpoint, before, tokens)
            # The first two chats are not checked, because the server may compile kernels for their
            # shape.
            if answers or number > 1:
                validity.check_compiled(server.compiled(), findings)
            validity.check_chat(answer, before, after, findings)
            if answer.ok and tokens >= chats.at_least:
                answers.append(answer)
            if findings.invalid or len(answers) == rounds:
                return answers
        length = f"with {chats.at_least} tokens or more by usage"
        raise Inconclusive(f"{len(answers)} of {2 * rounds} chats ended {length}")

    def sampled_rate(self, tokens: int) -> None:
        """Record tgN_sampled@dD: the decode rate at temperature 1.0, in tokens a second.

        It is the plan's workload: each request has a prompt of the cell's length, generates a fixed
        number of tokens, and follows a greedy round of the cell. The rate has no gate. `chat_rate`
        finds a server that samples slowly.

        Args:
            tokens: Tokens of the answer.
        """
        cell = self.bench.cell(self.bench.plan.depths[0], first_visit=True)
        findings = cell.findings(failures=True)
        answers = self._sampled_answers(tokens, cell, findings)
        known_clock = timing.clock_of([*cell.timed.all_answers, *answers])
        validity.check_answers(answers, known_clock, findings)
        clock = known_clock or "chunks"
        samples = [timing.decode_rate(answer, clock, tokens) for answer in answers]
        greedy = cell.timed.answers_of(tokens)[-len(answers) :]
        beside = [timing.decode_rate(answer, clock, tokens) for answer in greedy]
        self.record(
            Measurement(
                name=f"tg{tokens}_sampled@d{cell.depth}",
                unit="tok/s",
                samples=samples,
                higher_is_better=True,
                invalid=[*findings.invalid, *self.bench.off_path()],
                unproven=findings.unproven,
                extra={**SAMPLED, "beside": beside},
            )
        )

    def _sampled_answers(
        self, tokens: int, cell: MeasuredCell, findings: validity.Findings
    ) -> list[timed_answer.TimedAnswer]:
        """Return the sampled answers except the first; a greedy round of the cell precedes each.

        All of them are written to a file of the raw records.
        """
        server = self.bench.server
        first: list[timed_answer.TimedAnswer] = []
        rounds = self.bench.plan.measuring.concurrency_rounds + 1
        texts = server.prompts.texts
        answers: list[timed_answer.TimedAnswer] = []
        for number in range(rounds + 1):
            cell.gather(len(cell.timed.long) + 1)
            request = server.request(
                cell.shape.prompt_tokens,
                tokens,
                text=texts[number % len(texts)],
                temperature=SAMPLED["temperature"],
            )
            server.show(f"tg{tokens} sampled: {number}/{rounds}")
            server.compiled()
            answer = server.sender.run([request], patience=server.patience).answers[0]
            if number == 0 and answer.ok:  # the first chat of its shape
                first.append(answer)
                continue
            validity.check_compiled(server.compiled(), findings)
            answers.append(answer)
            if findings.invalid or not answer.ok:
                break
        records = cell_records.fresh_file(server.directory, f"sampled-tg{tokens}-d{cell.depth}")
        cell_records.write(records, {"left_out": first, "sampled": answers})
        return answers

    def acceptance(self, drafted: counters.Drafted, position: int) -> None:
        """Record acceptance@P: the percentage of drafts whose token at position P is accepted.

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
                "the engine does not count accepted tokens by their position in the draft"
            )
        if position > len(accepted):
            raise Inapplicable(f"a draft has {len(accepted)} positions")
        if not accepted[position - 1]:
            raise NotRun(f"none of {drafted.drafts:.0f} drafts was accepted at position {position}")
        share = 100.0 * accepted[position - 1] / drafted.drafts
        self.once(f"acceptance@{position}", "%", share, higher_is_better=True)

    def accepted_length(self, drafted: counters.Drafted) -> None:
        """Record accepted_length, in tokens per step.

        Args:
            drafted: The counters of drafts.
        """
        length = drafted.accepted_length or 1.0
        self.once("accepted_length", "tokens", length, higher_is_better=True)

    def once(self, name: str, unit: Unit, value: float, *, higher_is_better: bool = False) -> None:
        """Record a value that exists once in a run, such as a startup time or a peak of memory.

        Args:
            name: The name in verdict.json.
            unit: Its unit.
            value: The value.
            higher_is_better: Whether higher values are better.
        """
        self.record(
            Measurement(name=name, unit=unit, samples=[value], higher_is_better=higher_is_better)
        )
