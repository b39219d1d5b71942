"""The rates and times of the measuring plan. Each is measured when it is first asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sm121.client.timed import chat
from sm121.core.server import Server
from sm121.core.verdict import Invalid, NotRun
from sm121.measure import metrics, validity
from sm121.measure.cells import MeasuredCell, MeasuredServer, Show, prefill_slope
from sm121.measure.measurement import Invalidity, Measurement
from sm121.measure.plan import Plan
from sm121.measure.validity import Findings
from sm121.run.harness import Harness

#: Requests of the final check of the rate, after everything else was measured.
_LAST_LOOK = 3


@dataclass
class Bench:
    """The cells of one server, each measured once. `Bench.open` makes one."""

    server: MeasuredServer
    plan: Plan
    #: Whether tails are measured with as many requests as their gates need.
    tails: bool = False
    #: Why what was just measured is off the required path, by what the log says now.
    off_path: Callable[[], list[Invalidity]] = list
    #: Called after each measurement; clears the line of progress.
    ended: Callable[[], None] = lambda: None
    _cells: dict[tuple[int, int], MeasuredCell] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def open(
        cls,
        harness: Harness,
        plan: Plan,
        *,
        tails: bool = False,
        show: Show | None = None,
        ended: Callable[[], None] = lambda: None,
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
            again = lambda: [] if invalid else _against_the_path(harness, server)[0]  # noqa: E731
            yield cls(measured, plan, tails, again, ended)

    def cell(self, depth: int = 0, concurrency: int = 1) -> MeasuredCell:
        """A cell, with the plan's rounds at least."""
        measuring = self.plan.measuring
        cell = self._cells.setdefault(
            (depth, concurrency), MeasuredCell(self.server, depth, concurrency=concurrency)
        )
        wanted = measuring.rounds if concurrency == 1 else measuring.concurrency_rounds
        return cell.gather(wanted)

    def measured(self) -> list[MeasuredCell]:
        """The cells with one stream, by depth."""
        return [cell for (_, streams), cell in sorted(self._cells.items()) if streams == 1]

    def check_rate_held(self) -> None:
        """Measure the first cell again, and require that the server is as fast as at the beginning.

        Raises:
            Invalid: the rate has changed.
            NotRun: nothing was measured before.
        """
        depth = self.plan.depths[0]
        first = next((cell for cell in self.measured() if cell.depth == depth), None)
        if first is None or first.clock is None:
            raise NotRun("nothing was measured at the first depth of the plan")
        before = [metrics.decode_rate(answer, first.clock) for answer in first.answers]
        again = MeasuredCell(self.server, depth, short_rounds=0, warm=True).gather(_LAST_LOOK)
        clock = again.clock or first.clock
        after = [metrics.decode_rate(answer, clock) for answer in again.answers]
        findings = Findings()
        validity.check_drift([*before, *after], self.plan.measuring.drift_bound, findings)
        if findings.invalid:
            raise Invalid(f"{first.what}: {findings.invalid[0]}")


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
        self._judge(lambda cell: cell.decode(tokens), depth)

    def prefill_rate(self, depth: int) -> None:
        """ppN@dD, in tokens a second, with the slope over the prompts measured so far."""

        def read(cell: MeasuredCell) -> Measurement:
            measurement = cell.prefill()
            slope = prefill_slope(self.bench.measured())
            if slope is not None:
                measurement.extra["slope_tok_s"] = slope
            return measurement

        self._judge(read, depth)

    def concurrent_rate(self, streams: int) -> None:
        """tgN_cC@dD of C streams while all of them decode, in tokens a second."""
        depth = self.bench.plan.depths[0]
        self._judge(lambda cell: cell.decode_together(), depth, streams)

    def concurrent_prefill_rate(self, streams: int) -> None:
        """ppN_cC@dD: the prompts of C requests at once, in tokens a second."""
        depth = self.bench.plan.depths[0]
        self._judge(lambda cell: cell.prefill(), depth, streams)

    def time(self, name: str, quantile: float, *, streams: int = 1) -> None:
        """ttft, tpot, itl or e2e at the first depth, in milliseconds."""
        depth = self.bench.plan.depths[0]
        suffix = "" if streams == 1 else f"_c{streams}"
        tail = quantile > 0.5
        self._judge(
            lambda cell: cell.times(name, quantile, suffix=suffix),
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
        samples, waited = [], []
        try:
            for number in range(rounds):
                question = questions[number % len(questions)]
                request = chat(server.endpoint.served_name, question, tokens)
                server.show(f"time to the first visible text: {number + 1}/{rounds}")
                answer = server.sender.run([request], patience=server.patience).answers[0]
                seen = metrics.visible_ms(answer)
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
                    extra={"reasoning_chunks": waited, "cold": False},
                )
            )
        finally:
            self.bench.ended()

    def once(self, name: str, unit: str, value: float) -> None:
        """A value that exists once in a run: a start, a peak."""
        self.record(
            Measurement.model_validate(
                {"name": name, "unit": unit, "samples": [value], "higher_is_better": False}
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
    ) -> None:
        def judged(cell: MeasuredCell) -> Measurement:
            measurement = read(cell)
            measurement.invalid = [*measurement.invalid, *self.bench.off_path()]
            return measurement

        try:
            cell = self.bench.cell(depth, streams)

            def more(samples: int) -> Measurement:
                if short:
                    return judged(cell.gather_short(samples))
                now, rounds = len(read(cell).samples), len(cell.long)
                each = max(1, now // max(1, rounds))  # a round of several streams has several
                return judged(cell.gather(rounds + max(1, math.ceil((samples - now) / each))))

            self.record(
                judged(cell),
                more if growing else None,
                maximum_rounds=bound or self.bench.plan.measuring.maximum_rounds,
            )
        finally:
            self.bench.ended()


def _against_the_path(harness: Harness, server: Server) -> tuple[list[Invalidity], list[str]]:
    """Why the numbers of a server that is not on its required kernel path are invalid, and which
    parts of the path cannot be checked."""
    if server.log is None:
        return [], [f"kernel path: {server.why_no_log}"]
    found = harness.contradictions(server)
    if not found:
        return [], []
    return [Invalidity(reason="kernel_path", evidence="; ".join(found)[:500])], []
