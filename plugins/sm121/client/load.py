"""A client that sends concurrent requests and watches their progress.

The client's times are accurate to about 0.1 s. To measure rates, use `sm121.client.timed`.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from sm121.client.completion_json import Completion, parse, text_of
from sm121.client.connection import open_session, read_whole, refuse_packed
from sm121.client.jobs import Job, JobOutcome, LoadResult, Problem
from sm121.client.patience import Patience
from sm121.client.sse import DONE, EventParser
from sm121.core import bounded, server

#: The interval at which a load is checked against its time limits, in seconds.
_LOOK_EVERY_S = 0.25
#: Maximum number of characters in the text of a problem.
_LONGEST_TEXT = 300
#: Maximum number of characters that are quoted from an error event.
_LONGEST_EVENT = 200
#: Time limit for closing the connections of an interrupted load, in seconds.
_END_WITHIN_S = 10.0
#: Seconds after which a job with the behaviour ``disconnect`` closes its connection.
_DISCONNECT_AFTER_S = 0.05
#: Seconds between two reads of a job with the behaviour ``slow``.
_SLOW_READ_S = 0.15
#: Maximum number of bytes per read of a job with the behaviour ``slow``.
_SLOW_READ_BYTES = 256
#: Tokens after which a job with the behaviour ``cancel`` closes its connection.
_CANCEL_AFTER = 2
#: Maximum number of requests that a message about a hang names.
_QUOTED = 8
#: The problem to record for healthy requests that are cancelled because another request is stuck.
_BROKEN_OFF = ("stopped", "cancelled because another request failed")
#: Exceptions that parsing a malformed answer can raise.
_UNREADABLE = (ValueError, KeyError, TypeError, AssertionError, AttributeError, RecursionError)
#: If requests received their last data within this many seconds, they count as having become silent
#: together.
_TOGETHER_S = 0.15

#: A function that gets the jobs in flight. It returns the next job, or the seconds until it must be
#: called again, or None after the last job.
Source = Callable[[Sequence[JobOutcome]], Job | float | None]


@dataclass
class LoadClient:
    """Sends loads to one server, one load at a time."""

    endpoint: server.Endpoint
    patience: Patience
    #: Returns why the load must end, or None to continue.
    stop: Callable[[], Problem | None] = lambda: None
    #: The jobs in flight and the failed jobs of this load; the keys are their numbers.
    in_flight: dict[int, JobOutcome] = field(default_factory=dict)
    #: The number of requests that have ended, over all loads.
    completed: int = 0
    #: The number of the last request.
    _number: int = 0
    #: When a request that has ended received data for the last time.
    _alive: float = 0.0

    def under_way(self) -> list[JobOutcome]:
        """Return the jobs in flight. It may be called while a load runs in another thread."""
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
            jobs: The jobs. They are started in this order.
            concurrency: The maximum number of requests in flight (closed loop); None for no limit.
            arrivals: When to start each job, in seconds after the first one (open loop).
            preempts: Whether the jobs fill the KV cache. If so, the engine may preempt a running
                request until others end.
            lasts_s: After this many seconds, no further job is started. None to start all jobs.
            at_least: The minimum number of jobs to start, even after ``lasts_s``.

        Returns:
            The outcomes. If a job failed, its outcome has the problem.
        """
        self.in_flight.clear()
        if arrivals is None:
            source = _planned(jobs, concurrency or len(jobs), [0.0] * len(jobs))
        else:
            source = _planned(jobs, len(jobs), arrivals)
        if lasts_s is not None:
            source = _for_seconds(source, lasts_s, at_least)
        return _in_a_thread(lambda: self._run(source, preempts))

    def follow(self, source: Source) -> LoadResult:
        """Send the jobs of a source until its end or the first failure.

        Args:
            source: The function that returns the next job; see `Source`.

        Returns:
            The outcomes.
        """
        self.in_flight.clear()

        def until_one_fails(under_way: Sequence[JobOutcome]) -> Job | float | None:
            if any(outcome.problem for outcome in self.under_way()):
                return None
            return source(under_way)

        return _in_a_thread(lambda: self._run(until_one_fails))

    async def _run(self, source: Source, preempts: bool = False) -> LoadResult:
        started = time.monotonic()
        outcomes: list[JobOutcome] = []
        tasks: dict[asyncio.Task[None], JobOutcome] = {}
        # Connections are not reused, because a server may close an idle connection at any time
        # (llama-server does so after an answer). A request on such a connection would be lost
        # without a fault of the server.
        async with open_session(self.endpoint.api_key, reuse=False) as session:
            try:
                while True:
                    job = source(list(tasks.values()))
                    if job is None and not tasks:
                        break
                    if isinstance(job, Job):
                        outcome = self._begin(job)
                        outcomes.append(outcome)
                        tasks[asyncio.create_task(self._send(session, outcome))] = outcome
                        continue
                    wait_s = _LOOK_EVERY_S if job is None else min(_LOOK_EVERY_S, job)
                    for task in await _wait_for_any(tasks, wait_s):
                        self._finish(tasks.pop(task))
                        task.result()
                    running = list(tasks.values())
                    problem = self._trouble(running, preempts)
                    if problem is not None:
                        self._assign(problem, running)
                        break
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                # The cancelled jobs stay in `in_flight`, which shows the state at the end of the
                # load.
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
        self._alive = max(self._alive, outcome.last_sign)

    def _silent(self, outcome: JobOutcome, now: float) -> bool:
        return outcome.silent_s(now) > self.patience.silent_s

    def _late(self, outcome: JobOutcome, now: float) -> bool:
        return now - outcome.started > self.patience.within_s

    def _assign(self, problem: Problem, running: Sequence[JobOutcome]) -> None:
        """In all running jobs, record the problem that ends the load.

        If the problem is a stuck request, the jobs that are not stuck are recorded as broken off.
        """
        now = time.monotonic()
        kind, _ = problem
        for outcome in running:
            stuck = self._silent(outcome, now) or self._late(outcome, now)
            if stuck or kind != "stuck_request":
                outcome.problem = problem
            else:
                outcome.problem = _BROKEN_OFF

    def _trouble(self, running: Sequence[JobOutcome], preempts: bool) -> Problem | None:
        """Return the problem because of which the load must end; None if there is none."""
        reason = self.stop()
        if reason is not None:
            return reason
        now = time.monotonic()
        silent = [outcome for outcome in running if self._silent(outcome, now)]
        stuck: list[JobOutcome] = []
        if not preempts:
            # A queued request gets no token as long as others do, so only the limit `within_s`
            # applies to it.
            stuck = [outcome for outcome in silent if outcome.first is not None]
        if not stuck:
            stuck = [outcome for outcome in running if self._late(outcome, now)]
        # After other requests have ended, all queued requests may be silent for a while.
        none_ended = now - self._alive > self.patience.silent_s
        if silent and len(silent) == len(running) and none_ended:
            last_sign = max(outcome.last_sign for outcome in silent)
            if self._alive < last_sign + _TOGETHER_S:
                return self._hang(silent)
            stuck = silent
        if not stuck:
            return None
        first = stuck[0]
        return "stuck_request", (
            f"request {first.number} ({first.job.name}) has {first.received} of "
            f"{first.job.tokens} tokens and got none for {first.silent_s(now):.0f} s, while "
            f"{len(running) - len(stuck)} others continued"
        )

    def _hang(self, silent: Sequence[JobOutcome]) -> Problem:
        numbers = ", ".join(str(outcome.number) for outcome in silent[:_QUOTED])
        return "hang", (
            f"none of {len(silent)} requests under way got a token for "
            f"{self.patience.silent_s:.0f} s (numbers {numbers})"
        )

    async def _send(self, session: aiohttp.ClientSession, outcome: JobOutcome) -> None:
        """Send a job and read its answer. A failure is stored as the problem of the outcome."""
        job = outcome.job
        url = self.endpoint.base_url + job.path
        try:
            if job.behaviour == "disconnect":
                await _disconnect(session, url, outcome)
                return
            async with session.post(url, json=job.body, allow_redirects=False) as response:
                await _read(response, outcome)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            outcome.problem = "connection", f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
        except _UNREADABLE as error:
            outcome.problem = "bad_stream", f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
        finally:
            outcome.ended = time.monotonic()


async def _wait_for_any(
    tasks: Collection[asyncio.Task[None]], wait_s: float
) -> Collection[asyncio.Task[None]]:
    """Wait until a task ends or the given seconds pass, and return the ended tasks."""
    if not tasks:
        await asyncio.sleep(wait_s)
        return ()
    ended, _ = await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    return ended


async def _disconnect(session: aiohttp.ClientSession, url: str, outcome: JobOutcome) -> None:
    """Close the connection while the server processes the prompt."""
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(_DISCONNECT_AFTER_S):
            response = await session.post(url, json=outcome.job.body, allow_redirects=False)
            outcome.status = response.status
            response.close()


async def _read(response: aiohttp.ClientResponse, outcome: JobOutcome) -> None:
    outcome.status = response.status
    if response.status != 200:
        text = (await read_whole(response)).decode("utf-8", "replace")[:_LONGEST_TEXT]
        kind = "http_5xx" if response.status >= 500 else "refused"
        outcome.problem = kind, f"status {response.status}: {text}"
    elif outcome.job.streamed:
        await _read_stream(response, outcome)
    else:
        content = json.loads(await read_whole(response))
        choices = _parse_choices(outcome.job, content)
        outcome.set_choices(choices)
        outcome.progress(len(choices[0].ids or ()) or 1)


async def _read_stream(response: aiohttp.ClientResponse, outcome: JobOutcome) -> None:
    """Read a stream in the way that the job prescribes for its client."""
    refuse_packed(response)
    slow = outcome.job.behaviour == "slow"
    events = EventParser()
    parts: list[dict[str, Any]] = []
    ended = False
    size = 0
    while True:
        if slow:
            piece = await response.content.read(_SLOW_READ_BYTES)
        else:
            piece = await response.content.readany()
        if not piece:
            break
        size += len(piece)
        if size > bounded.LARGEST_STREAM:
            raise ValueError(f"the stream is larger than {bounded.LARGEST_STREAM >> 20} MiB")
        for data in events.feed(piece):
            if data == DONE:
                ended = True
                continue
            event = json.loads(data)
            if event.get("error"):
                error = str(event["error"])[:_LONGEST_EVENT]
                raise ValueError(f"an error in the stream: {error}")
            parts.append(event)
            outcome.progress(_count_tokens(event))
        if outcome.job.behaviour == "cancel" and outcome.received >= _CANCEL_AFTER:
            response.close()
            return
        if slow and not ended:
            await asyncio.sleep(_SLOW_READ_S)
    if not ended:
        raise ValueError(f"the stream ended after {outcome.received} tokens without [DONE]")
    outcome.set_choices(_parse_choices(outcome.job, *parts))


def _planned(jobs: Sequence[Job], limit: int, moments: Sequence[float]) -> Source:
    """Return a source of jobs in order, with a limit of jobs in flight or with start times."""
    began = time.monotonic()
    pending = deque(zip(jobs, moments, strict=False))

    def source(under_way: Sequence[JobOutcome]) -> Job | float | None:
        if not pending:
            return None
        if len(under_way) >= limit:
            return _LOOK_EVERY_S
        job, moment = pending[0]
        due_s = began + moment - time.monotonic()
        if due_s > 0:
            return due_s
        pending.popleft()
        return job

    return source


def _for_seconds(source: Source, lasts_s: float, at_least: int) -> Source:
    """Return a source that ends after ``lasts_s``, but not before ``at_least`` jobs started."""
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
    """Run a coroutine in its own thread, and cancel it if the calling thread is interrupted.

    A test's time limit and Ctrl-C are exceptions that a signal handler raises in the main thread.
    If they were raised in a callback of an event loop, they would only be logged, and the load
    would continue.
    """
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
        except BaseException as error:  # noqa: BLE001 - the caller of result() raises it again
            result.set_exception(error)

    thread = threading.Thread(target=run, name="sm121-load", daemon=True)
    thread.start()
    try:
        return result.result()
    finally:
        if not result.done():
            for loop, task in running:
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    loop.call_soon_threadsafe(task.cancel)
            thread.join(_END_WITHIN_S)


def _parse_choices(job: Job, *parts: dict[str, Any]) -> list[Completion]:
    """Return the completion of each choice of an answer."""
    if job.choices == 1:
        return [parse(*parts)]
    completions: list[Completion] = []
    for index in range(job.choices):
        completion = parse(*[_only_choice(part, index) for part in parts])
        if completion.completion_tokens == job.choices * job.tokens:  # usage counts all choices
            completion = replace(completion, completion_tokens=job.tokens)
        completions.append(completion)
    return completions


def _only_choice(part: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a copy of an answer or a chunk that has only the choice with this index."""
    choices = [choice for choice in part.get("choices") or () if choice.get("index") == index]
    return {**part, "choices": choices}


def _count_tokens(event: dict[str, Any]) -> int:
    """Return the number of tokens in an event.

    A choice with text, but without ids, counts as one token.
    """
    tokens = 0
    for choice in event.get("choices") or ():
        ids = choice.get("token_ids")
        if ids is not None:
            tokens += len(ids)
        elif text_of(choice):
            tokens += 1
    return tokens
