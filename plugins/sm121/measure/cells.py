"""Cells of the measuring plan: requests of one shape, from which several metrics are read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from sm121.client.connection import Patience
from sm121.client.timed import TimedBatch, TimedRequest, completion
from sm121.client.timed_answer import Clock, TimedAnswer
from sm121.client.timed_process import TimedProcess
from sm121.core.errors import Sm121Error
from sm121.core.server import Endpoint
from sm121.core.verdict import Inapplicable, NotRun
from sm121.measure import counters, metrics, validity
from sm121.measure.counters import Counters
from sm121.measure.measurement import Invalidity, Measurement
from sm121.measure.plan import Plan
from sm121.measure.prompts import Prompts
from sm121.measure.validity import Findings

#: Is given a line for people: what is measured, how far it is, how long it will take.
Show = Callable[[str], None]

#: After so many failed requests in a cell no more are sent: each may take minutes to fail.
_FAILURES = 2
#: Tokens of the answer that shows how a server counts.
_PROBE_TOKENS = 2
#: Answers of several streams are longer than what is measured of them by this factor: some tokens
#: come before all streams decode.
_STREAMS_FACTOR = 2
#: A short answer with fewer gaps than these says nothing of the rate.
_GAPS = 3


@dataclass
class MeasuredServer:
    """A server, the client that measures it, and the plan. `MeasuredServer.open` makes one."""

    endpoint: Endpoint
    sender: TimedProcess
    prompts: Prompts
    plan: Plan
    #: Raw records are written below it.
    directory: Path
    show: Show = lambda _line: None
    #: What speaks against every number of this server: its kernel path is not the required one.
    invalid: list[Invalidity] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    #: Requests that it was asked to run at the same time; None: it chooses itself.
    places: int | None = None
    #: Timed requests ask for token ids: without them nothing says how many tokens a chunk has.
    needs_ids: bool = False

    @classmethod
    @contextmanager
    def open(
        cls,
        endpoint: Endpoint,
        plan: Plan,
        directory: Path,
        *,
        show: Show = lambda _line: None,
        invalid: Iterable[Invalidity] = (),
        unproven: Iterable[str] = (),
    ) -> Iterator[MeasuredServer]:
        """Start a client for the server, and find out what kind of prompts it takes.

        Args:
            endpoint: the server.
            plan: lengths, depths and bounds.
            directory: raw records are written below it.
            show: is given a line whenever there is progress.
            invalid: what speaks against every number of this server.
            unproven: what of this server cannot be checked.

        Raises:
            Sm121Error: it takes neither token ids nor text.
        """
        with TimedProcess(endpoint.base_url, endpoint.api_key) as sender:
            prompts = Prompts(endpoint, plan.measuring.vocabulary)
            server = cls(endpoint, sender, prompts, plan, directory, show)
            server.invalid += invalid
            server.unproven += unproven
            server._probe()
            yield server

    @property
    def patience(self) -> Patience:
        """How long a request may take, and how long it may be silent."""
        measuring = self.plan.measuring
        return Patience(measuring.request_within_s, measuring.silent_within_s)

    def request(self, prompt_tokens: int, tokens: int, *, ids: bool = False) -> TimedRequest:
        """A request with a fresh prompt.

        Args:
            ids: ask for the token ids whether they are needed or not; not for what is timed.
        """
        exact = not self.prompts.as_text or self.prompts.exact
        return completion(
            self.endpoint.served_name,
            self.prompts.make(prompt_tokens),
            prompt_tokens=prompt_tokens if exact else 0,
            tokens=tokens,
            ids=ids or self.needs_ids,
        )

    def _probe(self) -> None:
        """Find out whether the server takes token ids, how long texts are if it does not, and what
        its chunks say of the number of tokens."""
        request = self.request(8, _PROBE_TOKENS)
        answer = self.sender.run([request], patience=self.patience).answers[0]
        if answer.ok or answer.status not in (400, 422):
            self.needs_ids = answer.ok and answer.clock() != "usage"
            return
        refusal = answer.error
        self.prompts.as_text = True
        self.prompts.exact = self.prompts.can_tokenize()
        words = 32
        request = completion(
            self.endpoint.served_name,
            self.prompts.words(words),
            prompt_tokens=0,
            tokens=_PROBE_TOKENS,
        )
        answer = self.sender.run([request], patience=self.patience).answers[0]
        if not answer.ok:
            raise Sm121Error(
                f"/v1/completions takes neither ids ({refusal}) nor text ({answer.error})"
            )
        if not self.prompts.exact:
            self.unproven.append("prompt length: the server refuses ids and has no /tokenize")
            self.prompts.learn(words, answer.prompt_tokens or words)
        self.needs_ids = answer.clock() != "usage"


@dataclass
class MeasuredCell:
    """Requests of one shape: a prompt at a depth, answers of fixed lengths, so many streams.

    The long answers give the rates of all lengths of the plan, each up to its own token; the short
    ones are there for the second clock.
    """

    server: MeasuredServer
    depth: int
    concurrency: int = 1
    #: Short answers for the second clock; None: the plan's.
    short_rounds: int | None = None
    warm: bool = False
    long: list[list[TimedAnswer]] = field(default_factory=list)
    short: list[TimedAnswer] = field(default_factory=list)
    lost: int = 0
    #: Answers that the client was late for.
    left_out: list[TimedAnswer] = field(default_factory=list)
    _batches: list[TimedBatch] = field(default_factory=list)
    _findings: Findings = field(default_factory=Findings)
    _spoken: dict[str, float] = field(default_factory=dict)
    _records: Path | None = None

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
    def clock(self) -> Clock | None:
        """The clock that all of its answers allow."""
        return metrics.clock_of([*self.answers, *self.short])

    @property
    def queued(self) -> bool:
        """Whether some of its streams wait for a place, as the server was asked."""
        return self.server.places is not None and self.concurrency > self.server.places

    @property
    def suffix(self) -> str:
        """What the streams add to a metric's name: ``_c4`` for four at the same time, ``_q10`` for
        ten that are served in turns."""
        return "" if self.concurrency == 1 else f"_{'q' if self.queued else 'c'}{self.concurrency}"

    @property
    def what(self) -> str:
        """A short name: ``pp2048 tg128 @ d0``."""
        streams = "" if self.concurrency == 1 else f", {self.concurrency} streams"
        plan = self.server.plan
        return f"pp{plan.prompt_tokens} tg{self.tokens} @ d{self.depth}{streams}"

    def rounds_of(self, tokens: int) -> list[TimedAnswer]:
        """The answers of one stream that have so many tokens, in the order of their sending."""
        found = [a for a in [*self.answers, *self.short] if a.asked_tokens >= tokens]
        return sorted(found, key=lambda answer: answer.sent_ns)

    def gather(self, rounds: int, *, own: int = 0, of: int = 0) -> MeasuredCell:
        """Measure until there are so many rounds that count, unless the server fails.

        Args:
            rounds: of long answers.
            own: rounds of the rate over ``of`` tokens. An answer that has no more than these is
                one, too.
        """
        if of == self.tokens:
            rounds, own = max(rounds, own), 0

        def missing() -> tuple[int, int, int]:
            return (
                max(rounds - len(self.long), 0),
                max(self._short_wanted() - len(self.short), self._witnesses_wanted()),
                max(own - len(self.rounds_of(of)), 0) if own else 0,
            )

        if not any(missing()) or self._failed():
            return self
        before = counters.fetch_quiet(self.server.endpoint)
        if before is not None:
            busy = int(before.values.get("running", 0) + before.values.get("waiting", 0))
            if busy:
                self._findings.against(
                    "other_clients", f"{busy} requests run or wait before the first of ours"
                )
        sent = [] if self.warm else self._warm_up()
        attempts = 2 * sum(missing()) + 2
        began, earlier = time.monotonic(), len(self.long) + len(self.short)
        while attempts > 0 and any(left := missing()) and not self._failed():
            for wanted, tokens, streams, keep in (
                (left[0], self.tokens, self.concurrency, self.long.append),
                (left[1], self._short_tokens(), 1, self.short.extend),
                (left[2], of, 1, self.short.extend),
            ):
                if not wanted or self._failed():
                    continue
                attempts -= 1
                batch = self._send(tokens, streams)
                sent += batch.answers
                if self._disturbed(batch):
                    self.lost += 1
                    self.left_out += batch.answers
                else:
                    keep(batch.answers)
            done = len(self.long) + len(self.short) - earlier
            each_s = (time.monotonic() - began) / done if done else 0.0
            self._show_rounds(sum(missing()), each_s)
        self._account(before, sent)
        self._write()
        return self

    def gather_short(self, requests: int) -> MeasuredCell:
        """Measure until there are so many requests in all, the new ones short: for percentiles of
        what happens before the first token."""
        self.short_rounds = max(requests - len(self.long), len(self.short))
        return self.gather(len(self.long))

    def decode(self, tokens: int) -> Measurement:
        """Tokens a second after the first chunk, over the first so many tokens."""
        clock = self.clock or "chunks"
        answers = self.rounds_of(tokens)
        rates = [metrics.decode_rate(answer, clock, tokens) for answer in answers]
        findings = self._judged()
        measuring = self.server.plan.measuring
        validity.check_drift(rates, measuring.drift_bound, findings)
        second = metrics.second_clock(self.answers, self.short, clock, tokens)
        known = {item.reason for item in findings.invalid}
        good = [answer for answer in answers if answer.ok]
        if not known & {"drift", "short_answer"}:
            # Of a rate that moves, requests of different times say different things, and so do
            # wall times of answers that are not as long as they should be.
            lengths = [answer.asked_tokens for answer in self.short if answer.ok]
            slack = validity.cut_step(self._spoken, tokens, lengths)
            validity.check_second_clock(second, measuring.second_clock_bound + slack, findings)
        validity.check_start(good, clock, tokens, findings)
        if all(item.reason != "second_clock" for item in findings.invalid):
            # The parts of a stream that is not the generation say nothing more.
            bound = measuring.second_clock_bound
            validity.check_beginning(good, clock, min(tokens, self.tokens // 2), bound, findings)
        late = [w.late_ns for a in good if (w := metrics.window(a, clock, tokens)) is not None]
        extra: dict[str, Any] = {
            "first_chunk_tokens": max(
                (metrics.first_chunk_tokens(a, clock) for a in answers), default=None
            ),
            "late_start_ms": round(median(late) / 1e6, 3) if any(late) else None,
            "textbook_tok_s": _median(metrics.textbook_rate(a, clock) for a in answers),
            "second_clock_tok_s": _median(rate for _, rate in second),
            "per_stream_tok_s": _median(metrics.decode_rate(a, clock) for a in answers),
            **self._spoken,
        }
        found = self._measurement(f"tg{tokens}@d{self.depth}", "tok/s", rates, findings, extra)
        found.track = self._track(tokens, rates, clock)
        found.left_out = [
            metrics.possible(metrics.decode_rate(answer, clock, tokens), tokens, answer.lag_ns)
            for answer in self.left_out
            if answer.ok and answer.asked_tokens >= tokens
        ]
        return found

    def decode_together(self) -> Measurement:
        """Tokens a second of all streams, while all of them decode; of those that are served in
        turns, from the first token to the last.

        Raises:
            NotRun: they never did.
        """
        clock = self.clock or "chunks"
        name = f"tg{self.tokens_together}{self.suffix}@d{self.depth}"
        rates, apart = [], 0
        for answers in self.long:
            if self.queued:
                rates.append(metrics.rate_in_turns(answers, clock))
                continue
            found = metrics.common_windows(answers, clock)
            each = [] if found is None else [window.tokens for window in found]
            if all(answer.ok for answer in answers) and 2 * min(each, default=0) < (
                self.tokens_together
            ):
                apart += 1
            else:
                rates.append(sum(window.rate for window in found or ()))
        findings = self._judged()
        if apart and not findings.invalid and 2 * apart >= len(self.long):
            raise NotRun(
                f"{name}: in {apart} of {len(self.long)} rounds the {self.concurrency} streams did "
                f"not decode {self.tokens_together // 2} tokens at the same time: the server runs "
                "fewer at once, or one after another. Let it run as many (--max-num-seqs, "
                "--parallel), or take them off [performance.measuring] concurrency"
            )
        validity.check_drift(rates, self.server.plan.measuring.drift_bound, findings)
        extra: dict[str, Any] = {
            "per_stream_tok_s": _median(metrics.decode_rate(a, clock) for a in self.answers),
            "rounds_apart": apart,
            **self._spoken,
        }
        return self._measurement(name, "tok/s", rates, findings, extra)

    def prefill(self) -> Measurement:
        """Prompt tokens (depth included, all of them cold) over the time to the first token; of
        several streams, over the time until all of them have one.

        Raises:
            Inapplicable: some wait until others have decoded.
        """
        if self.queued:
            raise Inapplicable(
                f"{self.concurrency} prompts are not computed at the same time: the server was "
                f"asked to run {self.server.places} at once (--max-num-seqs), and the rest wait"
            )
        clock = self.clock or "chunks"
        if self.concurrency > 1:
            rates = [metrics.common_prefill_rate(answers, clock) for answers in self.long]
        else:
            answers = sorted(self.answers + self.short, key=lambda answer: answer.sent_ns)
            rates = [metrics.prefill_rate(answer, clock) for answer in answers]
        findings = self._judged()
        self._check_first_chunks(findings)
        validity.check_drift(rates, self.server.plan.measuring.drift_bound, findings)
        everyone = [*self.answers, *self.short]
        extra = {
            "prompt_tokens": self.prompt_tokens,
            "ttft_ms": _median(metrics.ttft_ms(a, clock) for a in everyone),
        }
        name = f"pp{self.server.plan.prompt_tokens}{self.suffix}@d{self.depth}"
        return self._measurement(name, "tok/s", rates, findings, extra)

    def times(self, name: str, quantile: float) -> Measurement:
        """TTFT, TPOT, ITL or E2E over all requests, failed ones being infinite."""
        clock = self.clock or "chunks"
        answers = self.answers
        samples = {
            "ttft": lambda: [metrics.ttft_ms(answer, clock) for answer in answers + self.short],
            "tpot": lambda: [metrics.tpot_ms(answer, clock) for answer in answers],
            "itl": lambda: [gap for answer in answers for gap in metrics.gaps_ms(answer, clock)],
            "e2e": lambda: [metrics.e2e_ms(answer) for answer in answers],
        }[name]()
        findings = self._judged(tail=True)
        if name == "ttft":
            self._check_first_chunks(findings)
        visible = [v for a in answers if a.ok and (v := metrics.visible_ms(a)) is not None]
        extra: dict[str, Any] = {"visible_ms": _median(visible)} if name == "ttft" else {}
        extra["prompt_tokens"] = self.prompt_tokens
        if name == "itl":
            extra["per"] = "arrival"
        return self._measurement(
            f"{name}{self.suffix}_p{round(quantile * 100)}",
            "ms",
            samples,
            findings,
            extra,
            higher_is_better=False,
            quantile=quantile,
        )

    def _track(self, tokens: int, rates: Sequence[float], clock: Clock) -> list[float]:
        """The rates over so many tokens, with those of the shorter answers between them in the
        order of sending. A short answer's is by its mean gap, as a share of that of all short ones;
        where one gap is most of the answer, by its median gap."""
        gaps = {
            answer.sent_ns: min(fmean(found), median(found))
            for answer in self.short
            if answer.asked_tokens < tokens
            and answer.ok
            and len(found := metrics.gaps_ms(answer, clock)) >= _GAPS
        }
        usual, level = median(gaps.values() or (0.0,)), median(rates or (0.0,))
        series = dict(zip((a.sent_ns for a in self.rounds_of(tokens)), rates, strict=True))
        series |= {at: level * usual / gap for at, gap in gaps.items() if gap > 0.0}
        return [series[at] for at in sorted(series)]

    def _measurement(
        self,
        name: str,
        unit: Any,
        samples: list[float],
        findings: Findings,
        extra: dict[str, Any],
        *,
        higher_is_better: bool = True,
        quantile: float | None = None,
    ) -> Measurement:
        wall = sum(batch.wall_s for batch in self._batches)
        cpu = sum(batch.cpu_s for batch in self._batches)
        extra["client_cpu"] = round(cpu / wall, 4) if wall else 0.0
        extra["client_worst_lag_ms"] = round(self._worst_lag_ns / 1e6, 3)
        extra["rounds_left_out"] = self.lost
        retries = sum(answer.retries for batch in self._batches for answer in batch.answers)
        remarks = []
        if self.queued:
            remarks.append(
                f"{name}: {self.concurrency} requests, {self.server.places} at once "
                "(--max-num-seqs): most of their time to the first token is waiting for a place"
            )
        if retries:
            extra["retries"] = retries
            remarks.append(
                f"{self.what}: {retries} requests were sent twice, since the server had ended the "
                "idle connection; their clock is that of the first sending"
            )
        return Measurement(
            name=name,
            unit=unit,
            samples=samples,
            higher_is_better=higher_is_better,
            clock=self.clock,
            quantile=quantile,
            invalid=findings.invalid,
            unproven=findings.unproven,
            remarks=remarks,
            extra={key: value for key, value in extra.items() if value is not None},
            records=self._records,
        )

    def _judged(self, *, tail: bool = False) -> Findings:
        """What speaks against any number of this cell. A failed request is no reason against a
        tail, in which it is an infinite time."""
        findings = Findings(list(self._findings.invalid), list(self._findings.unproven))
        findings.invalid += self.server.invalid
        findings.unproven += self.server.unproven
        answers = [*self.answers, *self.short]
        looked_at = [answer for answer in answers if answer.ok] if tail else answers
        validity.check_answers(looked_at, self.clock, findings)
        validity.check_client(self._batches, findings)
        validity.check_lag(self.lost, len(self.long), self._worst_lag_ns, findings)
        return findings

    def _check_first_chunks(self, findings: Findings) -> None:
        if self.concurrency == 1:  # beside others a stream waits for their prompts
            good = [answer for answer in [*self.answers, *self.short] if answer.ok]
            validity.check_first_chunk(good, self.clock or "chunks", findings)

    @property
    def _worst_lag_ns(self) -> int:
        return max((batch.worst_lag_ns for batch in self._batches), default=0)

    def _warm_up(self) -> list[TimedAnswer]:
        """Requests of the shape that will be measured, until they take as long as each other. The
        last two of those, which are as warm as any, are the first short ones."""
        measuring = self.server.plan.measuring
        times: list[float] = []
        sent: list[TimedBatch] = []
        if self.concurrency == 1 and not self.server.needs_ids:
            self.server.show(f"{self.what}: token ids against usage")
            sent.append(self._send(self.tokens, 1, keep=False, ids=True))
            validity.check_twin(sent[0].answers[0], self._findings)
        while len(times) < measuring.warm_up_requests and not is_flat(times, measuring.warm_bound):
            self.server.show(f"{self.what}: warm-up {len(times) + 1}")
            batch = self._send(self.server.plan.shortest, self.concurrency, keep=False)
            sent.append(batch)
            validity.check_warm_up(batch.answers, self._findings)
            if not all(answer.ok for answer in batch.answers):
                break
            times.append(max(metrics.e2e_ms(answer) for answer in batch.answers))
        self.warm = True
        if self._short_wanted() and is_flat(times, measuring.warm_bound):
            for batch in sent[-2:]:
                if not self._disturbed(batch):
                    self.short += batch.answers
                    self._batches.append(batch)
        return [answer for batch in sent for answer in batch.answers]

    def _send(
        self, tokens: int, streams: int, *, keep: bool = True, ids: bool = False
    ) -> TimedBatch:
        requests = [
            self.server.request(self.prompt_tokens, tokens, ids=ids) for _ in range(streams)
        ]
        batch = self.server.sender.run(requests, concurrency=streams, patience=self.server.patience)
        if keep:
            self._batches.append(batch)
        return batch

    def _account(self, before: Counters | None, sent: list[TimedAnswer]) -> None:
        clock = metrics.clock_of(sent) or "chunks"
        ours = sum(found[-1][1] for answer in sent if (found := metrics.arrivals(answer, clock)))
        after = counters.fetch_settled(self.server.endpoint, before, ours)
        delta = after.since(before) if before is not None and after is not None else None
        validity.check_metrics_stay(before, after, self._findings)
        if delta is None or clock != "chunks":
            validity.check_counters(delta, sent, clock, self._findings)
            bound = self.server.plan.measuring.second_clock_bound
            validity.check_server_clock(delta, sent, clock, bound, self._findings)
        if delta is not None:
            self._spoken = counters.speculation(delta)

    def _disturbed(self, batch: TimedBatch) -> bool:
        """Whether the client was late for a batch; one with a failure is never left out."""
        measuring = self.server.plan.measuring
        return all(answer.ok for answer in batch.answers) and any(
            validity.disturbed(answer, answer.clock() or "chunks", measuring)
            for answer in batch.answers
        )

    def _short_wanted(self) -> int:
        if self.concurrency > 1:
            return 0
        planned = self.server.plan.measuring.short_rounds
        return planned if self.short_rounds is None else self.short_rounds

    def _bunched(self) -> int:
        """Tokens that the long answers' clocks leave off at their start; no shorter answer is a
        witness of them."""
        if self.concurrency > 1 or not self.long or self.clock is None:
            return 0
        return metrics.bunched(self.answers, self.clock)

    def _short_tokens(self) -> int:
        """Length of a short answer: beyond what is left off, where that is more than usual."""
        plan = self.server.plan
        bunched = self._bunched()
        return plan.shortest if bunched < plan.shortest else bunched + self.tokens_together // 4

    def _witnesses_wanted(self) -> int:
        """Short answers that are still missing where none of those that are here is a witness."""
        if not (bunched := self._bunched()):
            return 0
        here = sum(answer.asked_tokens > bunched for answer in self.short)
        return max(self.server.plan.measuring.short_rounds - here, 0)

    def _failed(self) -> bool:
        failures = sum(not answer.ok for answer in [*self.answers, *self.short])
        return failures >= _FAILURES

    def _show_rounds(self, left: int, each_s: float) -> None:
        """Say how many rounds are done, with their median and range and the time left."""
        clock = self.clock or "chunks"
        done = len(self.long) + len(self.short)
        rates = [metrics.decode_rate(answer, clock) for answer in self.answers]
        text = f"{self.what}: {done}/{done + left} rounds"
        if rates:
            text += f", {median(rates):.4g} tok/s a stream "
            text += f"[{min(rates):.4g}, {max(rates):.4g}]"
        self.server.show(f"{text}, about {left * each_s:.0f} s left")

    def _write(self) -> None:
        """Keep the raw answers, in a file of this cell's own."""
        if self._records is None:
            self._records = _new_file(
                self.server.directory, f"d{self.depth}-c{self.concurrency}", ".jsonl"
            )
        with self._records.open("w", encoding="utf-8") as stream:
            for kind, answers in (("long", self.answers), ("short", self.short)):
                for answer in answers:
                    stream.write(json.dumps({"kind": kind, **asdict(answer)}) + "\n")


def _new_file(directory: Path, stem: str, suffix: str) -> Path:
    """Make a file that was not there: ``d0-c1.jsonl``, then ``d0-c1-2.jsonl``."""
    directory.mkdir(parents=True, exist_ok=True)
    path, number = directory / f"{stem}{suffix}", 1
    while True:
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
            path = directory / f"{stem}-{number}{suffix}"
        else:
            return path


def is_flat(times: Sequence[float], bound: float) -> bool:
    """Whether a shape is warm: its last two times agree within the bound, and are no more than it
    from the best."""
    if len(times) < 2:
        return False
    before, last = times[-2:]
    return abs(last - before) <= bound * before and last <= min(times) * (1.0 + bound)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return float(median(found)) if found else None


def prefill_slope(cells: Sequence[MeasuredCell]) -> float | None:
    """Prompt tokens a second by the slope of TTFT over the length of the prompt, which what every
    request costs has no part in. None with fewer than two lengths."""
    points = []
    for cell in cells:
        times = [metrics.ttft_ms(a, cell.clock or "chunks") for a in cell.answers + cell.short]
        if times:
            points.append((cell.prompt_tokens, median(times)))
    points.sort()
    if len(points) < 2 or points[-1][1] <= points[0][1] or points[-1][1] == metrics.NEVER:
        return None
    return (points[-1][0] - points[0][0]) / (points[-1][1] - points[0][1]) * 1e3
