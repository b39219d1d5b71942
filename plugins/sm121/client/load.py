"""Sends a load and watches it: every answer whole, and progress at all times. What is timed here is
coarse (tails of seconds); the timed path for rates is ``sm121.client.timed``."""

import asyncio
import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import aiohttp

from sm121.client.completion_json import Completion, parse, text_of
from sm121.client.connection import Patience, open_session, read_whole, refuse_packed
from sm121.client.sse import DONE, EventParser
from sm121.core import bounded, server

_LOOK_EVERY_S = 0.25
_LONGEST_TEXT = 300
#: How long a load that was interrupted may take to close its connections.
_END_WITHIN_S = 10.0
_DISCONNECT_AFTER_S = 0.05
_SLOW_READ_S = 0.15
_SLOW_READ_BYTES = 256
_BROKEN_OFF = ("stopped", "broken off because of another")
#: What makes an answer one that cannot be read.
_UNREADABLE = (ValueError, KeyError, TypeError, AssertionError, AttributeError, RecursionError)
#: Requests that fell silent within so many seconds of the last sign of life did so together.
_TOGETHER_S = 0.15


#: ``complete`` reads to the end; ``cancel`` closes the connection in the middle of the stream;
#: ``disconnect`` goes away before the first byte; ``slow`` reads, but slowly; ``bad`` is a request
#: that must be refused.
Behaviour = Literal["complete", "cancel", "disconnect", "slow", "bad"]


@dataclass(frozen=True)
class Job:
    """A request. ``alone``: the answer to the same prompt, asked alone; None for no comparison."""

    name: str
    body: dict[str, Any]
    tokens: int
    alone: Completion | None = None
    behaviour: Behaviour = "complete"
    path: str = "/v1/completions"
    #: The answer may end before ``tokens`` by itself.
    may_end: bool = False
    #: Which requests it is one of, where several are alike.
    kind: str = ""

    @property
    def choices(self) -> int:
        """Answers to one request: to each of its texts ``n``."""
        prompt = self.body.get("prompt")
        texts = isinstance(prompt, list) and all(isinstance(each, str) for each in prompt)
        return int(self.body.get("n", 1)) * (len(prompt) if prompt and texts else 1)

    @property
    def streamed(self) -> bool:
        """Whether the answer comes as a stream."""
        return bool(self.body.get("stream"))


@dataclass
class JobOutcome:
    """What became of a job; also what a crash bundle shows of those in flight. Times are of
    ``time.monotonic``."""

    number: int
    job: Job
    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    status: int | None = None
    received: int = 0
    answer: Completion | None = None
    #: Where ``n`` is above 1: the other answers.
    others: tuple[Completion, ...] = ()
    #: Why there is no answer, as (kind, text) of a fault.
    problem: tuple[str, str] | None = None

    def progress(self, tokens: int) -> None:
        """Something came."""
        self.last = time.monotonic()
        if tokens and self.first is None:
            self.first = self.last
        self.received += tokens

    @property
    def seconds(self) -> float | None:
        """From the request to the end of the answer."""
        return None if self.ended is None else self.ended - self.started

    def silent_s(self, now: float) -> float:
        """For how long nothing has come."""
        return now - (self.last or self.started)

    def record(self) -> dict[str, Any]:
        """For a file: neither the prompt nor the answer, which may be long."""
        now = time.monotonic()
        prompt = self.job.body.get("prompt")
        return {
            "number": self.number,
            "name": self.job.name,
            "behaviour": self.job.behaviour,
            "prompt_tokens": len(prompt) if isinstance(prompt, list) else None,
            "asked_tokens": self.job.tokens,
            "received_tokens": self.received,
            "status": self.status,
            "running_s": round((self.ended or now) - self.started, 3),
            "silent_s": round(self.silent_s(self.ended or now), 3),
            "problem": self.problem,
        }


#: Is given what is under way, and gives the job that begins now, seconds until it may be asked
#: again, or None: no more begin.
Source = Callable[[Sequence[JobOutcome]], Job | float | None]


@dataclass
class LoadResult:
    """What became of a load."""

    outcomes: list[JobOutcome]
    started: float
    ended: float

    @property
    def seconds(self) -> float:
        """From its first request to the end of the last."""
        return self.ended - self.started

    @property
    def tokens(self) -> int:
        """Tokens that came."""
        return sum(outcome.received for outcome in self.outcomes)


@dataclass
class LoadClient:
    """Sends loads to one server. `stop`: a reason to break off the load, None to go on."""

    endpoint: server.Endpoint
    patience: Patience
    stop: Callable[[], tuple[str, str] | None] = lambda: None
    #: What is under way, or was until it failed; read by whoever writes a crash bundle.
    in_flight: dict[int, JobOutcome] = field(default_factory=dict)
    #: Requests that have ended so far, over all loads.
    completed: int = 0
    _number: int = 0
    #: When anything came last, or a request ended.
    _alive: float = 0.0

    def under_way(self) -> list[JobOutcome]:
        """What is in flight at this moment; may be asked while a load runs in another thread."""
        return list(self.in_flight.copy().values())

    def run(
        self,
        jobs: Sequence[Job],
        *,
        concurrency: int | None = None,
        arrivals: Sequence[float] | None = None,
        preempts: bool = False,
        lasts_s: float | None = None,
        at_least: int = 0,
    ) -> LoadResult:
        """Send the jobs and read their answers.

        Args:
            jobs: What is sent, in this order.
            concurrency: The most requests in flight at a time (closed loop). None: all of them.
            arrivals: When each job begins, in seconds from the first (open loop).
            preempts: The jobs fill the KV cache, so that a request may wait for the end of others.
            lasts_s: Seconds after which no further job begins. None: all of them begin.
            at_least: The number of jobs that begin in any case.
        """
        self.in_flight.clear()
        limit = (concurrency or len(jobs)) if arrivals is None else len(jobs)
        moments = [0.0] * len(jobs) if arrivals is None else arrivals
        source = _planned(jobs, limit, moments)
        if lasts_s is not None:
            source = _for_seconds(source, lasts_s, at_least)
        return _in_a_thread(lambda: self._run(source, preempts))

    def follow(self, source: Source) -> LoadResult:
        """Send what the source gives, until it gives no more or the first request has failed."""
        self.in_flight.clear()

        def until_one_fails(under_way: Sequence[JobOutcome]) -> Job | float | None:
            return None if any(o.problem for o in self.under_way()) else source(under_way)

        return _in_a_thread(lambda: self._run(until_one_fails))

    async def _run(self, source: Source, preempts: bool = False) -> LoadResult:
        started = time.monotonic()
        outcomes: list[JobOutcome] = []
        tasks: dict[asyncio.Task[None], JobOutcome] = {}
        # A server may end an idle connection at any moment, as llama-server does after an answer:
        # a request that is sent on it just then is lost, and nobody's fault.
        async with open_session(self.endpoint.api_key, reuse=False) as session:
            try:
                while (job := source([*tasks.values()])) is not None or tasks:
                    if isinstance(job, Job):
                        outcomes.append(outcome := self._begin(job))
                        tasks[asyncio.create_task(self._send(session, outcome))] = outcome
                        continue
                    wait_s = _LOOK_EVERY_S if job is None else min(_LOOK_EVERY_S, job)
                    if tasks:
                        ended, _ = await asyncio.wait(
                            tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
                        )
                    else:
                        await asyncio.sleep(wait_s)
                        ended = set()
                    for task in ended:
                        self._finish(tasks.pop(task))
                        task.result()
                    if (reason := self._trouble([*tasks.values()], preempts)) is not None:
                        now = time.monotonic()
                        for outcome in tasks.values():
                            guilty = self._silent(outcome, now) or self._late(outcome, now)
                            all_of_them = reason[0] != "stuck_request"
                            outcome.problem = reason if guilty or all_of_them else _BROKEN_OFF
                        break
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                # They stay in `in_flight`: that is what they were when something ended the load.
                for outcome in tasks.values():
                    outcome.ended = outcome.ended or time.monotonic()
        return LoadResult(outcomes, started, time.monotonic())

    def _begin(self, job: Job) -> JobOutcome:
        self._number += 1
        outcome = JobOutcome(self._number, job)
        self.in_flight[outcome.number] = outcome
        return outcome

    def _finish(self, outcome: JobOutcome) -> None:
        outcome.ended = outcome.ended or time.monotonic()
        self.completed += 1
        if outcome.problem is None or outcome.job.behaviour == "bad":
            self.in_flight.pop(outcome.number, None)
        self._alive = max(self._alive, outcome.last or outcome.started)

    def _silent(self, outcome: JobOutcome, now: float) -> bool:
        return outcome.silent_s(now) > self.patience.silent_s

    def _late(self, outcome: JobOutcome, now: float) -> bool:
        return now - outcome.started > self.patience.within_s

    def _trouble(self, running: Sequence[JobOutcome], preempts: bool) -> tuple[str, str] | None:
        """Why the load cannot go on: a request without progress says what it is."""
        if (reason := self.stop()) is not None:
            return reason
        now = time.monotonic()
        silent = [outcome for outcome in running if self._silent(outcome, now)]
        # A request that waits for its turn gets nothing while others do: it has `within_s`.
        stuck = [o for o in silent if o.first is not None and not preempts]
        stuck = stuck or [outcome for outcome in running if self._late(outcome, now)]
        quiet_s = now - self._alive  # all that wait for their turn are silent while others end
        if silent and len(silent) == len(running) and quiet_s > self.patience.silent_s:
            if self._alive < max(o.last or o.started for o in silent) + _TOGETHER_S:
                return "hang", (
                    f"none of {len(running)} requests under way got a token for "
                    f"{self.patience.silent_s:.0f} s "
                    f"(numbers {', '.join(str(outcome.number) for outcome in silent[:8])})"
                )
            stuck = silent
        if stuck:
            first = stuck[0]
            return "stuck_request", (
                f"request {first.number} ({first.job.name}) has {first.received} of "
                f"{first.job.tokens} tokens and got none for {first.silent_s(now):.0f} s, while "
                f"{len(running) - len(stuck)} others went on"
            )
        return None

    async def _send(self, session: aiohttp.ClientSession, outcome: JobOutcome) -> None:
        job = outcome.job
        url = self.endpoint.base_url + job.path
        try:
            if job.behaviour == "disconnect":
                # It goes away while the server works on the prompt.
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with asyncio.timeout(_DISCONNECT_AFTER_S):
                        response = await session.post(url, json=job.body, allow_redirects=False)
                        outcome.status = response.status
                        response.close()
                return
            async with session.post(url, json=job.body, allow_redirects=False) as response:
                outcome.status = response.status
                if response.status != 200:
                    text = (await read_whole(response)).decode("utf-8", "replace")[:_LONGEST_TEXT]
                    kind = "http_5xx" if response.status >= 500 else "refused"
                    outcome.problem = kind, f"status {response.status}: {text}"
                elif job.streamed:
                    await self._read_stream(response, outcome)
                else:
                    content = json.loads(await read_whole(response))
                    outcome.answer, *others = _answers(job, content)
                    outcome.others = tuple(others)
                    outcome.progress(len(outcome.answer.ids or ()) or 1)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            outcome.problem = "connection", f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
        except _UNREADABLE as error:
            outcome.problem = "bad_stream", f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
        finally:
            outcome.ended = time.monotonic()

    async def _read_stream(self, response: aiohttp.ClientResponse, outcome: JobOutcome) -> None:
        refuse_packed(response)
        events = EventParser()
        parts: list[dict[str, Any]] = []
        ended = False
        size = 0
        content, slow = response.content, outcome.job.behaviour == "slow"
        while piece := await (content.read(_SLOW_READ_BYTES) if slow else content.readany()):
            size += len(piece)
            if size > bounded.LARGEST_STREAM:
                raise ValueError(f"the stream is larger than {bounded.LARGEST_STREAM >> 20} MiB")
            for data in events.feed(piece):
                if data == DONE:
                    ended = True
                    continue
                event = json.loads(data)
                if event.get("error"):
                    raise ValueError(f"an error in the stream: {str(event['error'])[:200]}")
                parts.append(event)
                outcome.progress(_tokens(event))
            if outcome.job.behaviour == "cancel" and outcome.received >= 2:
                response.close()
                return
            if slow and not ended:
                await asyncio.sleep(_SLOW_READ_S)
        if not ended:
            raise ValueError(f"the stream ended after {outcome.received} tokens without [DONE]")
        outcome.answer, *others = _answers(outcome.job, *parts)
        outcome.others = tuple(others)


def _planned(jobs: Sequence[Job], limit: int, moments: Sequence[float]) -> Source:
    """The jobs in turn: at most so many at a time, each not before its moment."""
    began = time.monotonic()
    pending = deque(zip(jobs, moments, strict=False))

    def source(under_way: Sequence[JobOutcome]) -> Job | float | None:
        if not pending:
            return None
        if len(under_way) >= limit:
            return _LOOK_EVERY_S
        due_s = began + pending[0][1] - time.monotonic()
        return due_s if due_s > 0 else pending.popleft()[0]

    return source


def _for_seconds(source: Source, lasts_s: float, at_least: int) -> Source:
    """The jobs of a source until so many seconds have passed and so many have begun."""
    ends = time.monotonic() + lasts_s
    begun = 0

    def limited(under_way: Sequence[JobOutcome]) -> Job | float | None:
        nonlocal begun
        if begun >= at_least and time.monotonic() >= ends:
            return None
        job = source(under_way)
        if isinstance(job, Job):
            begun += 1
        return job

    return limited


def _in_a_thread(work: Callable[[], Coroutine[Any, Any, LoadResult]]) -> LoadResult:
    """Run it beside the calling thread, and end it when that is interrupted. The time limit of a
    test and Ctrl-C are exceptions that a signal raises in the main thread. In a callback of an
    event loop they would only be logged, and the load would go on."""
    result: Future[LoadResult] = Future()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def main() -> LoadResult:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        return await work()

    def run() -> None:
        try:
            result.set_result(asyncio.run(main()))
        except BaseException as error:  # noqa: BLE001 - raised again by who waits for the result
            result.set_exception(error)

    thread = threading.Thread(target=run, name="sm121-load", daemon=True)
    thread.start()
    try:
        return result.result()
    finally:
        if not result.done():
            for loop, task in running:
                with contextlib.suppress(RuntimeError):  # the loop has just ended
                    loop.call_soon_threadsafe(task.cancel)
            thread.join(_END_WITHIN_S)


def _answers(job: Job, *parts: dict[str, Any]) -> list[Completion]:
    if job.choices == 1:
        return [parse(*parts)]
    answers = []
    for index in range(job.choices):
        of_index = [
            {**part, "choices": [c for c in part.get("choices") or () if c.get("index") == index]}
            for part in parts
        ]
        answers.append(answer := parse(*of_index))
        if answer.completion_tokens == job.choices * job.tokens:  # usage counts all choices
            answers[-1] = replace(answer, completion_tokens=job.tokens)
    return answers


def _tokens(event: dict[str, Any]) -> int:
    """Tokens of an event; a chunk without ids that has text counts as one."""
    return sum(
        bool(text_of(choice)) if choice.get("token_ids") is None else len(choice["token_ids"])
        for choice in event.get("choices") or ()
    )
