"""The rates and times of the measuring plan. Each is measured when it is first asked for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sm121.client.timed import chat
from sm121.core.server import Server
from sm121.core.verdict import Inapplicable, NotRun, Undecided, Verdict
from sm121.measure import gate, metrics
from sm121.measure.cells import MeasuredCell, MeasuredServer, Show, prefill_slope
from sm121.measure.counters import Drafted
from sm121.measure.measurement import Invalidity, Measurement
from sm121.measure.plan import Plan
from sm121.measure.validity import Findings
from sm121.performance.recorder import Recorder
from sm121.run.harness import Harness, places

#: Rounds of a cell at its first visit and in the last look. The others come in between.
_FIRST_VISIT, _LAST_LOOK = 2, 3


@dataclass(frozen=True)
class _Judged:
    """A metric that was recorded, and how it is read from its cell."""

    read: Callable[[MeasuredCell], Measurement]
    cell: MeasuredCell
    #: Of the rate of one stream, over so many tokens; 0 for anything else.
    tokens: int

    @property
    def own_rounds(self) -> int:
        """How many rounds of its own it needs to pass in the end: where a gate looked at as many
        answers of all lengths, those of this length may be the slow ones."""
        near = self.tokens and self.read(self.cell).rounds >= gate.STEADY_LOOK
        return gate.STEADY_LOOK if near else 0


@dataclass
class Bench:
    """The cells of one server, each measured once. `Bench.open` makes one."""

    server: MeasuredServer
    plan: Plan
    #: Whether tails are measured with as many requests as their gates need.
    tails: bool = False
    #: Why what was just measured is off the required path, by what the log says now.
    off_path: Callable[[], list[Invalidity]] = list
    #: Tokens a second of all streams, by how many decode at the same time.
    rates_together: dict[int, float] = field(default_factory=dict)
    _cells: dict[tuple[int, int], MeasuredCell] = field(default_factory=dict)
    #: By name; and the cell that was measured last.
    _judged: dict[str, _Judged] = field(default_factory=dict)
    _latest: MeasuredCell | None = None
    _looked: bool = False

    @classmethod
    @contextmanager
    def open(
        cls,
        harness: Harness,
        plan: Plan,
        *,
        tails: bool = False,
        show: Show | None = None,
    ) -> Iterator[Bench]:
        """Measure the server under test, which is started if need be.

        Raises:
            NotRun, StartError: there is no server to measure.
            Sm121Error: the server accepts neither token ids nor text.
        """
        server = harness.server()
        invalid, unproven = _against_the_path(harness, server)
        with MeasuredServer.open(
            server.endpoint,
            plan,
            harness.directory / "records",
            show=show or (lambda line: harness.say("measuring", line)),
            invalid=invalid,
            unproven=unproven,
        ) as measured:
            measured.places = places(harness, server)
            again = lambda: [] if invalid else _against_the_path(harness, server)[0]  # noqa: E731
            yield cls(measured, plan, tails, again)

    def cell(
        self, depth: int = 0, concurrency: int = 1, *, first_visit: bool = False
    ) -> MeasuredCell:
        """A cell, with the plan's rounds at least; on a first visit, with some of them."""
        measuring = self.plan.measuring
        cell = self._cells.setdefault(
            (depth, concurrency), MeasuredCell(self.server, depth, concurrency=concurrency)
        )
        wanted = measuring.rounds if concurrency == 1 else measuring.concurrency_rounds
        if first_visit:
            wanted = min(wanted, _FIRST_VISIT)
        self._latest = cell
        return cell.gather(wanted)

    def judged(
        self,
        name: str,
        read: Callable[[MeasuredCell], Measurement],
        at: MeasuredCell,
        tokens: int = 0,
    ) -> None:
        """Note how a metric is read, so that the last look can decide on it again."""
        self._judged[name] = _Judged(read, at, tokens)

    def measured(self) -> list[MeasuredCell]:
        """The cells with one stream, by depth."""
        return [cell for (_, streams), cell in sorted(self._cells.items()) if streams == 1]

    def last_look(self, recorder: Recorder, *, unless_latest: bool = False) -> None:
        """Measure again what passed, and the first depth, and decide with all rounds together.

        A server that has become slower since has no rate that passes. A metric that did not pass
        is not looked at again, nor is anything when this was done before.

        Args:
            recorder: has what was decided, and decides again.
            unless_latest: the cell that was measured last gets no more long rounds: its own are
                the end.

        Raises:
            AssertionError, Inconclusive, Invalid: the worst that is said now.
            NotRun: nothing was measured before.
        """
        if self._looked:
            return
        self._looked = True
        if not self._judged:
            raise NotRun("no rate was measured that a last look could be held against")
        profile, first = recorder.harness.profile, self._cells.get((self.plan.depths[0], 1))
        passed = {
            found.measurement.name for found in recorder.recorded if found.verdict is Verdict.PASS
        }
        again = {name: judged for name, judged in self._judged.items() if name in passed}
        cells = {
            id(judged.cell): judged.cell
            for name, judged in again.items()
            if profile.gate(name) is not None or judged.cell is first
        }
        failures: list[AssertionError | Undecided] = []
        for cell in cells.values():
            rounds = len(cell.long)
            if not (unless_latest and cell is self._latest):
                rounds += _LAST_LOOK
            here = {name: judged for name, judged in again.items() if judged.cell is cell}
            for name, judged in here.items():
                own = judged.own_rounds if profile.gate(name) is not None else 0
                cell.gather(rounds, own=own, of=judged.tokens)
            for name, judged in here.items():
                self._decide_again(recorder, name, judged, failures)
        if failures:
            worst = min(failures, key=lambda failure: isinstance(failure, Undecided))
            raise type(worst)("; ".join(map(str, failures)))

    @staticmethod
    def _decide_again(
        recorder: Recorder, name: str, judged: _Judged, failures: list[AssertionError | Undecided]
    ) -> None:
        def more(rounds: int) -> Measurement:
            if judged.tokens:
                return judged.read(judged.cell.gather(0, own=rounds, of=judged.tokens))
            missing = rounds - judged.read(judged.cell).rounds
            return judged.read(judged.cell.gather(len(judged.cell.long) + missing))

        try:
            found = judged.read(judged.cell)
            bound = gate.next_look(found.rounds + 1, 2 * found.rounds)
            recorder.record(found, more, maximum_rounds=bound)
        except (AssertionError, Undecided) as failure:
            said = f"the last look: {name} passed before, and does not now: {failure}"
            failures.append(type(failure)(said))


@dataclass(frozen=True)
class PerformanceChecks:
    """Measures, and records each measurement with its verdict.

    Args:
        bench: of the server under test.
        record: decides on a measurement and raises its verdict, like `Recorder.record`.
    """

    bench: Bench
    record: Callable[..., object]

    def decode_rate(self, tokens: int, depth: int) -> None:
        """tgN@dD, in tokens a second."""
        self._judge(lambda cell: cell.decode(tokens), depth, tokens=tokens)

    def prefill_rate(self, depth: int) -> None:
        """ppN@dD, in tokens a second, with the slope over the prompts measured so far."""

        def read(cell: MeasuredCell) -> Measurement:
            measurement = cell.prefill()
            slope = prefill_slope(self.bench.measured())
            if slope is not None:
                measurement.extra["slope_tok_s"] = slope
            return measurement

        self._judge(read, depth, short=True, first_visit=True)

    def concurrent_rate(self, streams: int) -> None:
        """tgN_cC@dD of C streams while all of them decode, in tokens a second; tgN_qC@dD where the
        server was asked to run fewer at once."""
        depth, rates = self.bench.plan.depths[0], self.bench.rates_together

        def read(cell: MeasuredCell) -> Measurement:
            found = cell.decode_together()
            if found.valid and found.samples and not cell.queued:
                rates[streams] = statistics.median(found.samples)
                found.remarks += metrics.dips(rates)
            return found

        self._judge(read, depth, streams)

    def concurrent_prefill_rate(self, streams: int) -> None:
        """ppN_cC@dD: the prompts of C requests at once, in tokens a second."""
        depth = self.bench.plan.depths[0]
        self._judge(lambda cell: cell.prefill(), depth, streams)

    def time(self, name: str, quantile: float, *, streams: int = 1) -> None:
        """ttft, tpot, itl or e2e at the first depth, in milliseconds."""
        depth = self.bench.plan.depths[0]
        tail = quantile > 0.5
        self._judge(
            lambda cell: cell.times(name, quantile),
            depth,
            streams,
            bound=self.bench.plan.measuring.tail_requests if tail else None,
            growing=not tail or self.bench.tails,
            short=name == "ttft" and streams == 1,
        )

    def visible_time(self, questions: Sequence[str], tokens: int) -> None:
        """ttft_visible_p50: the first text of the answer proper, in milliseconds.

        The questions are real ones, since a model does not answer random tokens. Their prefix may
        therefore come from a cache; the time that this saves is small beside the reasoning.
        """
        server, rounds = self.bench.server, self.bench.plan.measuring.concurrency_rounds
        findings = Findings(list(server.invalid), list(server.unproven))
        samples, waited, retries = [], [], 0
        for number in range(rounds):
            question = questions[number % len(questions)]
            request = chat(server.endpoint.served_name, question, tokens)
            server.show(f"time to the first visible text: {number + 1}/{rounds}")
            answer = server.sender.run([request], patience=server.patience).answers[0]
            seen = metrics.visible_ms(answer)
            retries += answer.retries
            if not answer.ok:
                findings.against("request_failed", str(answer.error))
            elif seen is None:
                events = f"{len(answer.chunks)} events within {tokens} tokens"
                findings.against("no_visible_text", f"{events}, none with content")
            samples.append(seen if answer.ok and seen is not None else metrics.NEVER)
            waited.append(sum(chunk.text and not chunk.visible for chunk in answer.chunks))
        self.record(
            Measurement(
                name="ttft_visible_p50",
                unit="ms",
                samples=samples,
                higher_is_better=False,
                quantile=0.5,
                invalid=[*findings.invalid, *self.bench.off_path()],
                unproven=findings.unproven,
                extra={"reasoning_chunks": waited, "cold": False, "retries": retries},
            )
        )

    def acceptance(self, drafted: Drafted, position: int) -> None:
        """acceptance@P, in percent of the drafts.

        Raises:
            Inapplicable: drafts are shorter, or the engine does not tell the places apart.
            NotRun: nothing was accepted there, so that there is no share to compare with.
        """
        places = drafted.by_position
        if position > len(places):
            raise Inapplicable(
                f"a draft has {len(places)} places"
                if places
                else "the engine does not count accepted tokens by their place in the draft"
            )
        if not places[position - 1]:
            raise NotRun(f"of {drafted.drafts:.0f} drafts none was accepted at place {position}")
        share = 100.0 * places[position - 1] / drafted.drafts
        self.once(f"acceptance@{position}", "%", share, higher_is_better=True)

    def accepted_length(self, drafted: Drafted) -> None:
        """accepted_length, in tokens of a step."""
        self.once(
            "accepted_length", "tokens", drafted.accepted_length or 1.0, higher_is_better=True
        )

    def once(self, name: str, unit: str, value: float, *, higher_is_better: bool = False) -> None:
        """A value that exists once in a run: a start, a peak."""
        self.record(
            Measurement.model_validate(
                {
                    "name": name,
                    "unit": unit,
                    "samples": [value],
                    "higher_is_better": higher_is_better,
                }
            )
        )

    def _judge(
        self,
        read: Callable[[MeasuredCell], Measurement],
        depth: int,
        streams: int = 1,
        *,
        bound: int | None = None,
        growing: bool = True,
        short: bool = False,
        first_visit: bool = False,
        tokens: int = 0,
    ) -> None:
        def judged(cell: MeasuredCell) -> Measurement:
            measurement = read(cell)
            measurement.invalid = [*measurement.invalid, *self.bench.off_path()]
            return measurement

        cell = self.bench.cell(depth, streams, first_visit=first_visit)

        def more(samples: int) -> Measurement:
            if tokens:
                # No longer than what is asked: they tell as much in less time.
                return judged(cell.gather(0, own=samples, of=tokens))
            if short:
                return judged(cell.gather_short(samples))
            found, rounds = read(cell), len(cell.long)
            now = found.rounds
            # A round of several streams has several samples.
            each = max(1, len(found.samples) // max(1, rounds))
            return judged(cell.gather(rounds + max(1, math.ceil((samples - now) / each))))

        found = judged(cell)
        if found.unit == "tok/s":
            self.bench.judged(found.name, judged, cell, tokens)
        self.record(
            found,
            more if growing else None,
            maximum_rounds=bound or self.bench.plan.measuring.maximum_rounds,
        )


def _against_the_path(harness: Harness, server: Server) -> tuple[list[Invalidity], list[str]]:
    """Why the numbers of a server that is not on its required kernel path are invalid, and which
    parts of the path cannot be checked."""
    if server.log is None:
        return [], [f"kernel path: {server.why_no_log}"]
    found = harness.contradictions(server)
    if not found:
        return [], []
    return [Invalidity(reason="kernel_path", evidence="; ".join(found)[:500])], []
