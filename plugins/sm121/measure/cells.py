"""Cells of the measuring plan: requests of one shape, from which the metrics are computed."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from sm121.client import connection, timed_process
from sm121.client.timed import TimedBatch, TimedRequest, completion
from sm121.client.timed_answer import Clock, TimedAnswer
from sm121.core.errors import Sm121Error
from sm121.core.server import Endpoint, require_context
from sm121.measure import counters, measurement, timing, validity
from sm121.measure.plan import Plan
from sm121.measure.prompts import Prompts

#: Is given a line for people: what is measured, how far it is, how long it will take.
Show = Callable[[str], None]

#: After so many failed requests in a cell no more are sent: each may take minutes to fail.
_FAILURES = 2
#: Tokens of the answer that shows how a server counts.
_PROBE_TOKENS = 2
#: Answers of several streams are longer than what is measured of them by this factor: some tokens
#: come before all streams decode.
_STREAMS_FACTOR = 2
#: Rounds that a cell whose clocks disagree gets more.
_AGAIN = 8


@dataclass
class MeasuredServer:
    """A server, the client that measures it, and the plan. `MeasuredServer.open` makes one."""

    endpoint: Endpoint
    sender: timed_process.TimedProcess
    prompts: Prompts
    plan: Plan
    directory: Path
    show: Show = lambda _line: None
    #: What speaks against every number of this server: its kernel path is not the required one.
    invalid: list[measurement.Invalidity] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    #: Lines that its log got since the last call, of kernels that it compiled for a request.
    compiled: Callable[[], list[str]] = list
    #: Requests that it was asked to run at the same time; None: it chooses itself.
    slots: int | None = None
    #: Whether that is how it was started, and not what its profile would ask.
    slots_sure: bool = False
    #: Most tokens of a prompt and its answer; None: not known.
    context: int | None = None
    #: Timed requests ask for token ids: without them nothing says how many tokens a chunk has.
    needs_ids: bool = False
    #: By depth and number of streams.
    cells: "dict[tuple[int, int], MeasuredCell]" = field(default_factory=dict)
    #: Tokens a second of all streams, by how many decode at the same time.
    rates_together: dict[int, float] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def open(
        cls, endpoint: Endpoint, plan: Plan, directory: Path, *, show: Show = lambda _line: None,
        invalid: Iterable[measurement.Invalidity] = (), unproven: Iterable[str] = (),
        natural: bool = False, compiled: Callable[[], list[str]] = list,
    ) -> "Iterator[MeasuredServer]":  # fmt: skip
        """Start a client for the server at `endpoint`, and find out what kind of prompts it takes.
        `plan`: lengths, depths and bounds; `directory`: of raw records; `show`: is given lines of
        progress; `invalid`: what speaks against every number of this server; `unproven`: what of it
        cannot be checked; `natural`: ask for what follows fixed natural texts, as of each server
        that drafts; `compiled`: new lines of its log on kernels that a request waited for. Raises
        Sm121Error: it takes neither token ids nor text."""
        with timed_process.TimedProcess(endpoint.base_url, endpoint.api_key) as sender:
            now = counters.fetch(endpoint)
            natural = natural or (now is not None and "drafts" in now.values)
            prompts = Prompts(endpoint, plan.measuring.vocabulary, natural)
            findings = [*invalid], [*unproven]
            server = cls(endpoint, sender, prompts, plan, directory, show, *findings, compiled)
            server._probe()
            yield server

    @property
    def patience(self) -> connection.Patience:
        """How long a request may take, and how long it may be silent."""
        measuring = self.plan.measuring
        return connection.Patience(measuring.request_within_s, measuring.silent_within_s)

    def cell(self, depth: int, concurrency: int = 1) -> "MeasuredCell":
        """The cell of a depth and a number of streams. It is measured once, with all its rounds."""
        key = depth, concurrency
        return self.cells.setdefault(key, MeasuredCell(self, depth, concurrency))

    def request(
        self, prompt_tokens: int, tokens: int, *, text: str = "", ids: bool = False
    ) -> TimedRequest:
        """A request with a fresh prompt. `text`: the name of the fixed text that it ends with.
        `ids`: ask for the token ids whether they are needed or not; not for what is timed."""
        exact = not self.prompts.as_text or self.prompts.exact
        return completion(
            self.endpoint.served_name, self.prompts.make(prompt_tokens, text),
            prompt_tokens=prompt_tokens if exact else 0, tokens=tokens, ids=ids or self.needs_ids,
            text=text,
        )  # fmt: skip

    def _probe(self) -> None:
        """Find out whether the server takes token ids, how long texts are if it does not, and what
        its chunks say of the number of tokens."""
        request = self.request(8, _PROBE_TOKENS)
        answer = self.sender.run([request], patience=self.patience).answers[0]
        if answer.ok or answer.status not in (400, 422):
            self.needs_ids = answer.ok and answer.clock() != "usage"
            if not (answer.ok and self.prompts.natural) or self.prompts.can_tokenize():
                return
        refusal = answer.error or "of a text, which its /tokenize does not tell"
        self.prompts.as_text = True
        self.prompts.exact = self.prompts.can_tokenize()
        words = 32
        request = completion(
            self.endpoint.served_name, self.prompts.words(words), prompt_tokens=0,
            tokens=_PROBE_TOKENS,
        )  # fmt: skip
        answer = self.sender.run([request], patience=self.patience).answers[0]
        if not answer.ok:
            raise Sm121Error(
                f"/v1/completions takes neither ids ({refusal}) nor text ({answer.error})"
            )
        if not self.prompts.exact:
            self.unproven.append("prompt length: the server refuses ids and has no /tokenize")
            self.prompts.tokens_per_word = max((answer.prompt_tokens or words) / words, 0.1)
        self.needs_ids = answer.clock() != "usage"


@dataclass
class MeasuredCell:
    """Requests of one shape: a prompt at a depth, answers of fixed lengths, so many streams. The
    long answers give the rates of all lengths of the plan, each up to its own token; the short ones
    are there for the second clock."""

    server: MeasuredServer
    depth: int
    concurrency: int = 1
    #: Short answers for the second clock; None: the plan's.
    short_rounds: int | None = None
    warm: bool = False
    long: list[list[TimedAnswer]] = field(default_factory=list)
    short: list[TimedAnswer] = field(default_factory=list)
    #: Answers of the rounds that the client was late for, and how many rounds these are.
    left_out: list[TimedAnswer] = field(default_factory=list)
    rounds_left_out: int = 0
    #: Drafts and their tokens, by the server's counters: of all requests by "", and by text.
    drafted: dict[str, dict[str, float]] = field(default_factory=dict)
    records: Path | None = None
    #: What was asked and answered since somebody looked at what was said.
    unread: list[tuple[TimedRequest, TimedAnswer]] = field(default_factory=list)
    #: What speaks against each of its numbers.
    doubts: validity.Findings = field(default_factory=validity.Findings)
    #: Why it was measured once more, and when the last answer before that was sent.
    again: tuple[str, int] = ("", 0)
    _batches: list[TimedBatch] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Depth and prompt, all of it cold."""
        return self.depth + self.server.plan.prompt_tokens

    @property
    def tokens(self) -> int:
        """Length of the long answers."""
        if self.concurrency == 1:
            return self.server.plan.longest
        return _STREAMS_FACTOR * self.tokens_together

    @property
    def tokens_together(self) -> int:
        """Tokens that a rate of several streams is named after: the fewest of the plan."""
        return min(self.server.plan.generated_tokens)

    @property
    def answers(self) -> list[TimedAnswer]:
        """The long answers of all rounds."""
        return [answer for batch in self.long for answer in batch]

    @property
    def all_answers(self) -> list[TimedAnswer]:
        """The long answers of all rounds, then the short ones."""
        return [*self.answers, *self.short]

    @property
    def clock(self) -> Clock | None:
        """The clock that all of its answers allow."""
        return timing.clock_of(self.all_answers)

    @property
    def counted_by(self) -> Clock:
        """The clock; chunks where no answer carries a token."""
        return self.clock or "chunks"

    @property
    def queued(self) -> bool:
        """Whether some of its streams wait for others' end, as the server was asked."""
        return self.server.slots is not None and self.concurrency > self.server.slots

    @property
    def suffix(self) -> str:
        """What the streams add to a metric's name: ``_c4`` for four at the same time, ``_q10`` for
        ten that are served in turns."""
        return "" if self.concurrency == 1 else f"_{'q' if self.queued else 'c'}{self.concurrency}"

    @property
    def title(self) -> str:
        """A short name: ``pp2048 tg128 @ d0``."""
        streams = "" if self.concurrency == 1 else f", {self.concurrency} streams"
        plan = self.server.plan
        return f"pp{plan.prompt_tokens} tg{self.tokens} @ d{self.depth}{streams}"

    def speculation(self, text: str = "") -> dict[str, float]:
        """Acceptance rate of a text, or of all, and mean accepted length (the token that is always
        right included); empty without drafts."""
        delta = self.drafted.get(text, {})
        drafts, accepted = delta.get("drafts", 0.0), delta.get("accepted_tokens", 0.0)
        if not drafts or not (proposed := delta.get("draft_tokens", 0.0)):
            return {}
        length = 1.0 + accepted / drafts
        return {"acceptance_rate": accepted / proposed, "mean_accepted_length": length}

    def rounds_of(
        self, tokens: int, answers: Sequence[TimedAnswer] | None = None
    ) -> list[list[TimedAnswer]]:
        """The answers that have so many tokens, by round: one, or one of each fixed text."""
        each = len(self.server.prompts.texts)
        answers = self.answers_of(tokens) if answers is None else answers
        return [[*answers[i : i + each]] for i in range(0, len(answers), each)]

    def answers_of(self, tokens: int) -> list[TimedAnswer]:
        """The answers that have so many tokens, in the order of their sending."""
        answers = [answer for answer in self.all_answers if answer.asked_tokens >= tokens]
        return sorted(answers, key=lambda answer: answer.sent_ns)

    def gather(self, rounds: int, *, readings: int = 0, tokens: int = 0) -> "MeasuredCell":
        """Measure until there are so many rounds that count, unless the server fails. `rounds`: of
        long answers; `readings`: answers of ``tokens`` tokens or more; new ones have no more than
        these; `tokens`: that a rate is read over."""
        if tokens == self.tokens:
            rounds, readings = max(rounds, readings), 0

        def missing() -> tuple[int, int, int]:
            return (
                max(rounds - len(self.long), 0),
                max(self._short_rounds - len(self.short), self._missing_witnesses()),
                max(readings - len(self.rounds_of(tokens)), 0) if readings else 0,
            )

        if not any(missing()) or self._has_failed:
            return self
        require_context(self.server.context, self.prompt_tokens, self.tokens)
        self.server.compiled()  # what was compiled before is no matter of these requests
        before = counters.fetch_quiet(self.server.endpoint)
        now = before.values if before is not None else {}
        if busy := int(now.get("running", 0) + now.get("waiting", 0)):
            evidence = f"{busy} requests run or wait before the first of ours"
            self.doubts.against("other_clients", evidence)
        sent = [] if self.warm else self._warm_up()
        attempts = 2 * sum(missing()) + 2
        began_s, earlier = time.monotonic(), len(self.long) + len(self.short)
        while attempts > 0 and any(remaining := missing()) and not self._has_failed:
            for count, length, streams, keep in (
                (remaining[0], self.tokens, self.concurrency, self.long.append),
                (remaining[1], self._short_tokens(), 1, self.short.extend),
                (remaining[2], tokens, 1, self.short.extend),
            ):
                if not count or self._has_failed:
                    continue
                attempts -= 1
                batch = self._send(length, streams)
                sent += batch.answers
                if self._is_disturbed(batch):
                    self.rounds_left_out += 1
                    self.left_out += batch.answers
                else:
                    keep(batch.answers)
            done = len(self.long) + len(self.short) - earlier
            each_s = (time.monotonic() - began_s) / done if done else 0.0
            self._show_rounds(sum(missing()), each_s)
        self._account(before, sent)
        self._write()
        return self

    def gather_again(self, why: str) -> bool:
        """Measure more long rounds, a short one before or after each, the first time that this is
        called. `why`: for people. Says whether it did."""
        if any(self.again):
            return False
        self.again = why, max(answer.sent_ns for answer in self.all_answers)
        self.short_rounds = len(self.short) + _AGAIN * len(self.server.prompts.texts)
        self.gather(len(self.long) + _AGAIN)
        return True

    def findings(self, *, failures: bool) -> validity.Findings:
        """What speaks against any number of this cell. `failures`: so does a failed request."""
        findings = validity.Findings(
            [*self.doubts.invalid, *self.server.invalid],
            [*self.doubts.unproven, *self.server.unproven],
        )
        answers = [answer for answer in self.all_answers if failures or answer.ok]
        validity.check_answers(answers, self.clock, findings)
        validity.check_client(self._batches, findings)
        validity.check_lag(self.rounds_left_out, len(self.long), self._worst_lag_ns, findings)
        return findings

    def client_account(self) -> dict[str, Any]:
        """What the client itself needed, for `Measurement.extra`."""
        wall_s = sum(batch.wall_s for batch in self._batches)
        cpu_s = sum(batch.cpu_s for batch in self._batches)
        return {
            "client_cpu": round(cpu_s / wall_s, 4) if wall_s else 0.0,
            "client_worst_lag_ms": round(self._worst_lag_ns / 1e6, 3),
            "rounds_left_out": self.rounds_left_out,
            "retries": self._retries or None,
        }

    def remarks(self, name: str) -> list[str]:
        """What a reader of a metric should know of its requests."""
        remarks = []
        if self.queued:
            remarks.append(
                f"{name}: {self.concurrency} requests, {self.server.slots} at once "
                "(--max-num-seqs): most of their time to the first token is waiting for a place"
            )
        if self.again[0]:
            remarks.append(f"{self.title}: measured once more, since {self.again[0]}")
        if self._retries:
            remarks.append(
                f"{self.title}: {self._retries} requests were sent twice, since the server had "
                "ended the idle connection; their clock is that of the first sending"
            )
        return remarks

    @property
    def _retries(self) -> int:
        return sum(answer.retries for batch in self._batches for answer in batch.answers)

    @property
    def _worst_lag_ns(self) -> int:
        return max((batch.worst_lag_ns for batch in self._batches), default=0)

    def _warm_up(self) -> list[TimedAnswer]:
        """Requests of the shape that will be measured, until they take as long as each other. The
        last two of those, which are as warm as any, are the first short ones."""
        measuring = self.server.plan.measuring
        times: list[float] = []
        sent: list[TimedBatch] = []
        compiled: list[list[str]] = []
        if self.concurrency == 1 and not self.server.needs_ids:
            self.server.show(f"{self.title}: token ids against usage")
            sent.append(self._send(self.tokens, 1, keep=False, ids=True))
            for answer in sent[0].answers:
                validity.check_twin(answer, self.doubts)
        while len(times) < measuring.warm_up_requests and not is_flat(times, measuring.warm_bound):
            self.server.show(f"{self.title}: warm-up {len(times) + 1}")
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
                if not self._is_disturbed(batch) and not lines:
                    self.short += batch.answers
                    self._batches.append(batch)
        return [answer for batch in sent for answer in batch.answers]

    def _send(
        self, tokens: int, streams: int, *, keep: bool = True, ids: bool = False
    ) -> TimedBatch:
        texts = self.server.prompts.texts
        names = texts if streams == 1 else (texts * streams)[:streams]
        requests = [
            self.server.request(self.prompt_tokens, tokens, text=name, ids=ids) for name in names
        ]
        endpoint, sender = self.server.endpoint, self.server.sender
        before = counters.fetch(endpoint) if self.server.prompts.natural else None
        batches: list[TimedBatch] = []
        for each in [[request] for request in requests] if streams == 1 else [requests]:
            batch = sender.run(each, concurrency=streams, patience=self.server.patience)
            batches.append(batch)
            self.unread += zip(each, batch.answers, strict=True) if keep else ()
            if before is not None and streams == 1:
                counted = batch.answers[0].completion_tokens or 0
                after = counters.fetch_settled(endpoint, before, counted)
                self._count_drafts(each[0].text, after.since(before) if after is not None else {})
                before = after
        if keep:
            self._batches += batches
            validity.check_compiled(self.server.compiled(), self.doubts)
        return replace(batches[-1], answers=[a for batch in batches for a in batch.answers])

    def _account(self, before: counters.Counters | None, sent: list[TimedAnswer]) -> None:
        clock = timing.clock_of(sent) or "chunks"
        tokens = sum(validity.tokens_of(answer, clock) for answer in sent)
        after = counters.fetch_settled(self.server.endpoint, before, tokens)
        validity.check_compiled(self.server.compiled(), self.doubts)
        delta = after.since(before) if before is not None and after is not None else None
        validity.check_metrics_stay(before, after, self.doubts)
        if delta is None or clock != "chunks":
            validity.check_counters(delta, sent, clock, self.doubts)
            bound = self.server.plan.measuring.second_clock_bound
            validity.check_server_clock(delta, sent, clock, bound, self.doubts)
            validity.check_drafts(delta, sent, clock, self.doubts)
        self._count_drafts("", delta or {})

    def _count_drafts(self, text: str, delta: Mapping[str, float]) -> None:
        total = self.drafted.setdefault(text, {})
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            total[name] = total.get(name, 0.0) + delta.get(name, 0.0)

    def _is_disturbed(self, batch: TimedBatch) -> bool:
        """Whether the client was late for a batch; one with a failure is never left out."""
        measuring = self.server.plan.measuring
        return all(answer.ok for answer in batch.answers) and any(
            validity.disturbed(answer, answer.clock() or "chunks", measuring)
            for answer in batch.answers
        )

    @property
    def _short_rounds(self) -> int:
        if self.concurrency > 1:
            return 0
        planned = self.server.plan.measuring.short_rounds
        return planned if self.short_rounds is None else self.short_rounds

    def _bunched(self) -> int:
        """Tokens that the long answers' clocks leave off at their start; no shorter answer is a
        witness of them."""
        if self.concurrency > 1 or not self.long or self.clock is None:
            return 0
        return timing.bunched(self.answers, self.clock)

    def _short_tokens(self) -> int:
        """Length of a short answer: beyond what is left off, where that is more than usual."""
        plan = self.server.plan
        bunched = self._bunched()
        return plan.shortest if bunched < plan.shortest else bunched + self.tokens_together // 4

    def _missing_witnesses(self) -> int:
        """Short answers that are still missing where none of those that are here is a witness."""
        bunched = self._bunched()
        witnesses = sum(answer.asked_tokens > bunched for answer in self.short)
        return max(self.server.plan.measuring.short_rounds - witnesses, 0) if bunched else 0

    @property
    def _has_failed(self) -> bool:
        return sum(not answer.ok for answer in self.all_answers) >= _FAILURES

    def _show_rounds(self, remaining: int, each_s: float) -> None:
        clock = self.counted_by
        done = len(self.long) + len(self.short)
        rates = [timing.decode_rate(answer, clock) for answer in self.answers]
        text = f"{self.title}: {done}/{done + remaining} rounds"
        if rates:
            text += f", {median(rates):.4g} tok/s a stream [{min(rates):.4g}, {max(rates):.4g}]"
        self.server.show(f"{text}, about {remaining * each_s:.0f} s left")

    def _write(self) -> None:
        """Keep the raw answers, in a file of this cell's own: d0-c1.jsonl, then d0-c1-2.jsonl."""
        if self.records is None:
            stem, number = f"d{self.depth}-c{self.concurrency}", 1
            self.server.directory.mkdir(parents=True, exist_ok=True)
            self.records = self.server.directory / f"{stem}.jsonl"
            while self.records.exists():
                number += 1
                self.records = self.server.directory / f"{stem}-{number}.jsonl"
        with self.records.open("w", encoding="utf-8") as stream:
            kinds = {"long": self.answers, "short": self.short, "left_out": self.left_out}
            for kind, answers in kinds.items():
                for answer in answers:
                    stream.write(json.dumps({"kind": kind, **asdict(answer)}) + "\n")


def is_flat(times: Sequence[float], bound: float) -> bool:
    """Whether a shape is warm: its last two times agree within the bound, and are no more than it
    from the best."""
    if len(times) < 2:
        return False
    before, last = times[-2:]
    return abs(last - before) <= bound * before and last <= min(times) * (1.0 + bound)
