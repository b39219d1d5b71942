"""Cells of the measuring plan: requests of one shape, from which the metrics are computed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from sm121.client.timed import TimedBatch, TimedRequest
from sm121.client.timed_answer import TimedAnswer
from sm121.core.measuring_settings import MeasuringSettings
from sm121.core.server import require_context
from sm121.measure import cell_records, counters, rate_checks, timing, validity
from sm121.measure.cell_answers import CellAnswers
from sm121.measure.cell_shape import CellShape
from sm121.measure.draft_counts import DraftCounts
from sm121.measure.measured_server import MeasuredServer

#: The number of extra rounds if the two ways to compute the rate disagree.
_EXTRA_ROUNDS = 8


@dataclass(frozen=True)
class TimedExchange:
    """A timed request and its answer."""

    request: TimedRequest
    answer: TimedAnswer


@dataclass(frozen=True)
class Repetition:
    """The extra rounds of a cell in which the two ways to compute the rate disagreed.

    Attributes:
        why: The reason, as text for the report.
        after_ns: When the last request before the extra rounds was sent.
    """

    why: str
    after_ns: int


@dataclass(frozen=True)
class _Missing:
    """How many rounds of each kind a cell still needs."""

    long: int
    short: int
    #: The number of rounds whose answers have exactly the length of the metric, if the long answers
    #: are longer.
    readings: int

    @property
    def total(self) -> int:
        return self.long + self.short + self.readings


@dataclass
class MeasuredCell:
    """Requests of one shape: a prompt at a depth, answers of fixed lengths, a number of streams.

    The long answers give the rates for all lengths of the plan, because ``tgN`` uses their first N
    tokens. The short answers serve to check the rates: the difference between the wall times of
    long and short requests gives the rate in a second way ("second clock").
    """

    server: MeasuredServer
    depth: int
    concurrency: int = 1
    #: The number of short answers, with which the rate is computed a second time; None for the
    #: plan's number.
    short_rounds: int | None = None
    #: Whether the warm-up is over.
    warm: bool = False
    timed: CellAnswers = field(default_factory=CellAnswers)
    drafts: DraftCounts = field(default_factory=DraftCounts)
    #: The file of the raw answers; None before the first ones are written.
    records: Path | None = None
    #: The requests and answers whose texts have not been judged yet.
    unread: list[TimedExchange] = field(default_factory=list)
    #: Reasons why all numbers of the cell are invalid or unproven.
    doubts: validity.Findings = field(default_factory=validity.Findings)
    #: All cells of the server; the keys are (depth, number of streams). Empty for a single cell.
    siblings: "dict[tuple[int, int], MeasuredCell]" = field(default_factory=dict, repr=False)
    #: The extra rounds; None if none were measured.
    repetition: Repetition | None = None

    @property
    def shape(self) -> CellShape:
        """The lengths and names of the cell's requests."""
        return CellShape(self.server.plan, self.depth, self.concurrency, self.server.slots)

    def rounds_of(
        self, tokens: int, answers: Sequence[TimedAnswer] | None = None
    ) -> list[list[TimedAnswer]]:
        """Divide answers into rounds. A round has one answer, or one per fixed text.

        Args:
            tokens: The minimum requested length of the answers.
            answers: The answers to divide; None: all answers of this minimum length.
        """
        if answers is None:
            answers = self.timed.answers_of(tokens)
        per_round = len(self.server.prompts.texts)
        starts = range(0, len(answers), per_round)
        return [[*answers[start : start + per_round]] for start in starts]

    def gather(self, rounds: int, *, readings: int = 0, tokens: int = 0) -> "MeasuredCell":
        """Measure until there are enough valid rounds, or too many requests have failed.

        Args:
            rounds: The total number of rounds of long answers.
            readings: The total number of rounds of answers of at least ``tokens`` tokens. New
                answers have exactly this length.
            tokens: The number of tokens over which a rate is computed.

        Returns:
            The cell itself.
        """
        if tokens == self.shape.tokens:
            rounds = max(rounds, readings)
            readings = 0
        missing = self._missing(rounds, readings, tokens)
        if not missing.total or self.timed.has_failed:
            return self
        require_context(self.server.context, self.shape.prompt_tokens, self.shape.tokens)
        self.server.compiled()  # drop lines about earlier compilations
        before = counters.fetch_quiet(self.server.endpoint)
        _check_idle(before, self.doubts)
        sent = [] if self.warm else self._warm_up()
        # Count again, because the warm-up may have added short answers.
        attempts = 2 * self._missing(rounds, readings, tokens).total + 2
        began_s = time.monotonic()
        rounds_before = len(self.timed.long) + len(self.timed.short)
        while attempts > 0 and not self.timed.has_failed:
            missing = self._missing(rounds, readings, tokens)
            if not missing.total:
                break
            batches = self._send_round(missing, tokens)
            attempts -= len(batches)
            for batch in batches:
                sent += batch.answers
            done = len(self.timed.long) + len(self.timed.short) - rounds_before
            round_s = (time.monotonic() - began_s) / done if done else 0.0
            self._show_rounds(self._missing(rounds, readings, tokens).total, round_s)
        self._account(before, sent)
        self._write()
        return self

    def gather_again(self, why: str) -> bool:
        """At the first call, measure extra long and short rounds. Later calls do nothing.

        Args:
            why: The reason, as text for the report.

        Returns:
            Whether rounds were measured.
        """
        if self.repetition is not None:
            return False
        last_sent_ns = max(answer.sent_ns for answer in self.timed.all_answers)
        self.repetition = Repetition(why, last_sent_ns)
        self.short_rounds = len(self.timed.short) + _EXTRA_ROUNDS * len(self.server.prompts.texts)
        self.gather(len(self.timed.long) + _EXTRA_ROUNDS)
        return True

    def findings(self, *, failures: bool) -> validity.Findings:
        """Return the reasons why the numbers of this cell are invalid or unproven.

        Args:
            failures: Whether failed requests make the numbers invalid.
        """
        findings = validity.Findings(
            [*self.doubts.invalid, *self.server.invalid],
            [*self.doubts.unproven, *self.server.unproven],
        )
        answers = [answer for answer in self.timed.all_answers if failures or answer.ok]
        validity.check_answers(answers, self.timed.clock, findings)
        validity.check_client(self.timed.batches, findings)
        validity.check_lag(
            self.timed.rounds_left_out, len(self.timed.long), self.timed.worst_lag_ns, findings
        )
        return findings

    def remarks(self, name: str) -> list[str]:
        """Return remarks on the requests of a metric, for the report.

        Args:
            name: The name of the metric.
        """
        remarks = []
        title = self.shape.title
        if self.shape.queued:
            remarks.append(
                f"{name}: the server runs {self.server.slots} of {self.concurrency} requests at "
                "the same time (--max-num-seqs): the others wait for a free slot for most of their "
                "time to the first token"
            )
        if self.repetition is not None and self.repetition.why:
            remarks.append(f"{title}: measured once more, because {self.repetition.why}")
        if self.timed.retries:
            remarks.append(
                f"{title}: {self.timed.retries} requests were sent twice, because the server had "
                "closed the idle connection; their time counts from the first attempt"
            )
        return remarks

    def _warm_up(self) -> list[TimedAnswer]:
        """Send requests of the measured shape until their times agree, and return the answers.

        The server was warm in the last two batches, so their answers also count as short answers.
        """
        measuring = self.server.plan.measuring
        title = self.shape.title
        times: list[float] = []
        sent: list[TimedBatch] = []
        compiled: list[list[str]] = []
        if self.concurrency == 1 and not self.server.needs_ids:
            self.server.show(f"{title}: comparing the token ids with usage")
            sent.append(self._send(self.shape.tokens, 1, keep=False, ids=True))
            for answer in sent[0].answers:
                validity.check_twin(answer, self.doubts)
        while len(times) < measuring.warm_up_requests and not is_flat(times, measuring.warm_bound):
            self.server.show(f"{title}: warm-up {len(times) + 1}")
            batch = self._send(self.server.plan.shortest, self.concurrency, keep=False)
            sent.append(batch)
            compiled.append(self.server.compiled())
            validity.check_warm_up(batch.answers, self.doubts)
            if not all(answer.ok for answer in batch.answers):
                break
            times.append(max(timing.e2e_ms(answer) for answer in batch.answers))
        self.warm = True
        if self._short_rounds and is_flat(times, measuring.warm_bound):
            for batch, lines in zip(sent[-2:], compiled[-2:], strict=True):
                if not _is_disturbed(batch, self.server.plan.measuring) and not lines:
                    self.timed.short += batch.answers
                    self.timed.batches.append(batch)
        return [answer for batch in sent for answer in batch.answers]

    def _missing(self, rounds: int, readings: int, tokens: int) -> _Missing:
        """Return how many rounds are missing; the arguments are those of `gather`."""
        missing_readings = 0
        if readings:
            missing_readings = max(readings - len(self.rounds_of(tokens)), 0)
        return _Missing(
            long=max(rounds - len(self.timed.long), 0),
            short=max(self._short_rounds - len(self.timed.short), self._missing_witnesses()),
            readings=missing_readings,
        )

    def _send_round(self, missing: _Missing, tokens: int) -> list[TimedBatch]:
        """Measure one round of each missing kind: long, short, and of ``tokens`` tokens."""
        batches: list[TimedBatch] = []
        short_tokens = self._short_tokens()
        if missing.long:
            batch = self._send(self.shape.tokens, self.concurrency)
            batches.append(batch)
            if not self._left_out(batch):
                self.timed.long.append(batch.answers)
        if missing.short and not self.timed.has_failed:
            batches.append(self._send_short(short_tokens))
        if missing.readings and not self.timed.has_failed:
            batches.append(self._send_short(tokens))
        return batches

    def _send_short(self, tokens: int) -> TimedBatch:
        """Send requests of one stream, and add their answers to the short answers."""
        batch = self._send(tokens, 1)
        if not self._left_out(batch):
            self.timed.short += batch.answers
        return batch

    def _left_out(self, batch: TimedBatch) -> bool:
        """Exclude a batch that a delay of the client disturbed; return whether it was excluded."""
        if not _is_disturbed(batch, self.server.plan.measuring):
            return False
        self.timed.rounds_left_out += 1
        self.timed.left_out += batch.answers
        return True

    def _send(
        self, tokens: int, streams: int, *, keep: bool = True, ids: bool = False
    ) -> TimedBatch:
        """Send the requests of one round. A single stream sends one request per fixed text.

        `keep` means that the round is measured, and not a warm-up. `ids` means to request token
        ids.
        """
        texts = self.server.prompts.texts
        names = texts if streams == 1 else (texts * streams)[:streams]
        requests = [
            self.server.request(self.shape.prompt_tokens, tokens, text=name, ids=ids)
            for name in names
        ]
        # With a single stream, send one request at a time, so that the drafts of each request are
        # counted.
        groups = [[request] for request in requests] if streams == 1 else [requests]
        endpoint = self.server.endpoint
        before = counters.fetch(endpoint) if self.server.prompts.natural else None
        batches: list[TimedBatch] = []
        for group in groups:
            batch = self.server.sender.run(
                group, concurrency=streams, patience=self.server.patience
            )
            batches.append(batch)
            if keep:
                for request, answer in zip(group, batch.answers, strict=True):
                    self.unread.append(TimedExchange(request, answer))
            if before is not None and streams == 1:
                generated = batch.answers[0].completion_tokens or 0
                after = counters.fetch_settled(endpoint, before, generated)
                delta = after.since(before) if after is not None else {}
                self.drafts.add(group[0].text, delta)
                before = after
        if keep:
            self.timed.batches += batches
            validity.check_compiled(self.server.compiled(), self.doubts)
        answers = [answer for batch in batches for answer in batch.answers]
        return replace(batches[-1], answers=answers)

    def _account(self, before: counters.Counters | None, sent: list[TimedAnswer]) -> None:
        """Compare all answers with the change of the server's counters since ``before``."""
        clock = timing.clock_of(sent) or "chunks"
        tokens = sum(validity.tokens_of(answer, clock) for answer in sent)
        after = counters.fetch_settled(self.server.endpoint, before, tokens)
        validity.check_compiled(self.server.compiled(), self.doubts)
        validity.check_metrics_stay(before, after, self.doubts)
        delta = None
        if before is not None and after is not None:
            delta = after.since(before)
        if delta is None or clock != "chunks":
            validity.check_counters(delta, sent, clock, self.doubts)
            bound = self.server.plan.measuring.second_clock_bound
            rate_checks.check_server_clock(delta, sent, clock, bound, self.doubts)
            validity.check_drafts(delta, sent, clock, self.doubts)
        self.drafts.add("", delta or {})

    @property
    def _short_rounds(self) -> int:
        if self.concurrency > 1:
            return 0
        if self.short_rounds is not None:
            return self.short_rounds
        return self.server.plan.measuring.short_rounds

    def _bunched(self) -> int:
        """Return how many tokens at the start of the long answers are excluded from the rate.

        A short answer can serve to check the rate only if it has more tokens than this.
        """
        if self.concurrency > 1 or not self.timed.long or self.timed.clock is None:
            return 0
        return timing.bunched(self.timed.answers, self.timed.clock)

    def _short_tokens(self) -> int:
        """Return the length of short answers: more tokens than are excluded from the rate."""
        plan = self.server.plan
        bunched = self._bunched()
        if bunched < plan.shortest:
            return plan.shortest
        return bunched + self.shape.tokens_together // 4

    def _missing_witnesses(self) -> int:
        """Return how many more short answers are needed that are long enough to check the rate."""
        bunched = self._bunched()
        if not bunched:
            return 0
        witnesses = sum(answer.asked_tokens > bunched for answer in self.timed.short)
        return max(self.server.plan.measuring.short_rounds - witnesses, 0)

    def _show_rounds(self, remaining: int, round_s: float) -> None:
        """Show the progress. `remaining` rounds are missing; a round takes `round_s` seconds."""
        clock = self.timed.counted_by
        done = len(self.timed.long) + len(self.timed.short)
        rates = [timing.decode_rate(answer, clock) for answer in self.timed.answers]
        text = f"{self.shape.title}: {done}/{done + remaining} rounds"
        if rates:
            text += f", {median(rates):.4g} tok/s a stream [{min(rates):.4g}, {max(rates):.4g}]"
        self.server.show(f"{text}, about {remaining * round_s:.0f} s left")

    def _write(self) -> None:
        """Write the raw answers to a file of this cell."""
        if self.records is None:
            stem = f"d{self.depth}-c{self.concurrency}"
            self.records = cell_records.fresh_file(self.server.directory, stem)
        kinds = {
            "long": self.timed.answers,
            "short": self.timed.short,
            "left_out": self.timed.left_out,
        }
        cell_records.write(self.records, kinds)


def _check_idle(before: counters.Counters | None, doubts: validity.Findings) -> None:
    """Record a doubt if the server runs requests of other clients before the first request."""
    if before is None:
        return
    running = before.values.get("running", 0)
    waiting = before.values.get("waiting", 0)
    busy = int(running + waiting)
    if busy:
        evidence = f"{busy} requests run or wait before the first request of the suite"
        doubts.against("other_clients", evidence)


def _is_disturbed(batch: TimedBatch, measuring: MeasuringSettings) -> bool:
    """Whether a delay of the client disturbed a batch. False if a request of the batch failed."""
    if not all(answer.ok for answer in batch.answers):
        return False
    return any(
        validity.disturbed(answer, answer.clock() or "chunks", measuring)
        for answer in batch.answers
    )


@dataclass(frozen=True)
class Cells:
    """The cells of one server."""

    server: MeasuredServer
    #: The cells; the keys are (depth, number of streams).
    by_shape: dict[tuple[int, int], MeasuredCell] = field(default_factory=dict)

    def cell(self, depth: int, concurrency: int = 1) -> MeasuredCell:
        """Return the cell of a depth and a number of streams. Later calls return the same object.

        Args:
            depth: The number of tokens in front of the plan's prompt.
            concurrency: The number of concurrent streams.
        """
        key = (depth, concurrency)
        if key not in self.by_shape:
            cell = MeasuredCell(self.server, depth, concurrency, siblings=self.by_shape)
            self.by_shape[key] = cell
        return self.by_shape[key]


def is_flat(times: Sequence[float], bound: float) -> bool:
    """Return whether requests of a shape have warmed up, because their times no longer change.

    Args:
        times: The times of the requests, in the order of sending.
        bound: The relative difference that is tolerated.

    Returns:
        Whether the last time differs by at most the bound from the previous and from the shortest
        time.
    """
    if len(times) < 2:
        return False
    before, last = times[-2:]
    return abs(last - before) <= bound * before and last <= min(times) * (1.0 + bound)
