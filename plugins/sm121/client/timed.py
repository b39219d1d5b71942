"""The timed path: requests over one session, each socket read stamped before it is parsed. What is
parsed is parsed when the whole batch has ended, so that no stream waits for another's."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp

from sm121.client.connection import Patience, open_session, refuse_packed
from sm121.client.timed_answer import TimedAnswer, read_answer, read_event
from sm121.core.bounded import LARGEST_ANSWER

_TICK_S = 0.004
#: Delays below this are the resolution of the event loop's own timers.
_LAG_OF_NOTE_NS = 2_000_000
_ERROR_LENGTH = 300
#: A server that ends an idle connection does so at once, when it gets a request that it will not
#: read. One that takes longer had the request.
_AT_ONCE_NS = 50_000_000


@dataclass(frozen=True)
class TimedRequest:
    """One request of a batch, ready to be sent."""

    path: str
    body: bytes
    asked_tokens: int
    asked_prompt: int
    stream: bool = True
    #: The fixed text that its prompt ends with.
    text: str = ""


@dataclass
class TimedBatch:
    """The answers of a batch, and what the client itself needed for it."""

    answers: list[TimedAnswer]
    #: From the first request's start to the end of the last.
    wall_s: float
    cpu_s: float
    worst_lag_ns: int
    #: Seconds that the clock used here and other clocks of the machine went apart meanwhile.
    clock_steps: dict[str, float] = field(default_factory=dict)


class LagWatch:
    """When the event loop was late, and by how much."""

    def __init__(self) -> None:
        self.late: list[tuple[int, int]] = []
        self.worst_ns = 0
        self._timer: asyncio.TimerHandle

    def start(self) -> None:
        """Look every few milliseconds from now on, until `stop`."""
        due_ns = time.perf_counter_ns() + int(_TICK_S * 1e9)
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._look, due_ns)

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self, due_ns: int) -> None:
        now = time.perf_counter_ns()
        lag = now - due_ns
        self.worst_ns = max(self.worst_ns, lag)
        if lag > _LAG_OF_NOTE_NS:
            self.late.append((now, lag))
        self.start()

    def at(self, stamp_ns: int) -> int:
        """The delay that may be in a stamp: the loop was blocked until shortly before it."""
        slack = 2_000_000
        return max(
            (lag for end, lag in self.late if end - lag - slack <= stamp_ns <= end + slack),
            default=0,
        )


class TimedClient:
    """Requests to one server. Use it in one event loop."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._base_url, self._api_key = base_url, api_key
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> "TimedClient":
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        trace.on_connection_create_start.append(_stamp_sending)
        trace.on_request_headers_sent.append(_stamp_sending)
        self._session = open_session(self._api_key, trace_configs=[trace], read_bufsize=1 << 20)
        return self

    async def __aexit__(self, *_reason: object) -> None:
        await self._session.close()

    async def run(
        self, requests: Sequence[TimedRequest], *, concurrency: int, patience: Patience
    ) -> TimedBatch:
        """Send the requests, so many at a time; each worker sends its next when one has ended."""
        watch = LagWatch()
        pending = iter(enumerate(requests))
        results: list[tuple[TimedAnswer, list[tuple[int, bytes]]] | None] = [None] * len(requests)

        async def work() -> None:
            for index, request in pending:
                results[index] = await self._send(request, patience)

        clocks = _clocks()
        cpu = time.process_time()
        started = time.perf_counter()
        watch.start()
        try:
            await asyncio.gather(*(work() for _ in range(min(concurrency, len(requests)))))
        finally:
            watch.stop()
        batch = TimedBatch(
            answers=[],
            wall_s=time.perf_counter() - started,
            cpu_s=time.process_time() - cpu,
            worst_lag_ns=watch.worst_ns,
            clock_steps=steps(clocks, _clocks()),
        )
        for request, result in zip(requests, results, strict=True):
            assert result is not None
            batch.answers.append(_finish(request, *result, watch))
        return batch

    async def _send(
        self, request: TimedRequest, patience: Patience
    ) -> tuple[TimedAnswer, list[tuple[int, bytes]]]:
        reads: list[tuple[int, bytes]] = []
        answer = TimedAnswer(
            time.perf_counter_ns(),
            asked_tokens=request.asked_tokens,
            asked_prompt=request.asked_prompt,
            text=request.text,
        )
        deadline = time.monotonic() + patience.within_s
        reading = asyncio.create_task(self._read(request, answer, reads))
        last, since = 0, time.monotonic()
        while True:
            # Looked at now and then: a timer for each read would be work on the timed path.
            await asyncio.wait((reading,), timeout=min(0.5, patience.silent_s / 4))
            now = time.monotonic()
            if reading.done():
                reading.result()
                break
            if len(reads) != last:
                last, since = len(reads), now
            silent = bool(reads) and now - since > patience.silent_s
            if silent or now > deadline:
                reading.cancel()
                await asyncio.wait((reading,))
                answer.error = (
                    f"stalled: nothing came for {now - since:.1f} s after {len(reads)} reads"
                    if silent
                    else f"timed-out: no end within {patience.within_s:.0f} s"
                )
                break
        answer.ended_ns = answer.ended_ns or time.perf_counter_ns()
        return answer, reads

    async def _read(
        self, request: TimedRequest, answer: TimedAnswer, reads: list[tuple[int, bytes]]
    ) -> None:
        """The request, once more when the server had ended the idle connection that it was sent on:
        llama-server does so at the end of a stream, now and then, and never saw the request. The
        clock of the first sending goes on."""
        now = time.perf_counter_ns
        sending = _Sending(answer)
        for attempt in (1, 2):
            sending.reused = False
            began_ns = now()
            try:
                await self._read_once(request, sending, reads)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                answer.ended_ns = now()
                closed = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
                unread = answer.status is None and not reads
                at_once = now() - began_ns < _AT_ONCE_NS
                if closed and unread and at_once and sending.reused and attempt == 1:
                    answer.retries += 1
                    continue
                open_s = (now() - answer.sent_ns) / 1e9
                answer.error = (
                    f"connection: {type(error).__name__} after {open_s:.3f} s: {error}"
                )[:_ERROR_LENGTH]
            return

    async def _read_once(
        self, request: TimedRequest, sending: "_Sending", reads: list[tuple[int, bytes]]
    ) -> None:
        now, answer = time.perf_counter_ns, sending.answer
        async with self._session.post(
            self._base_url + request.path,
            data=request.body,
            trace_request_ctx=sending,
            allow_redirects=False,  # what comes after one would be timed from its own sending
        ) as response:
            answer.status = response.status
            answer.redirected_to = response.headers.get("Location")
            refuse_packed(response)
            read = response.content.readany
            size = 0
            while piece := await read():
                reads.append((now(), piece))
                size += len(piece)
                if size > LARGEST_ANSWER:
                    raise aiohttp.ClientPayloadError(
                        f"the answer is larger than {LARGEST_ANSWER >> 20} MiB"
                    )
            answer.ended_ns = now()


@dataclass
class _Sending:
    answer: TimedAnswer
    stamped: bool = False
    reused: bool = False


async def _stamp_sending(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _event: object
) -> None:
    """The request leaves now, or has to wait for a connection from now on. What the client needed
    to compose it is not the server's time; a connection that the server is slow to take is."""
    sending: _Sending = context.trace_request_ctx
    if not sending.stamped:
        sending.stamped = True
        sending.answer.sent_ns = time.perf_counter_ns()


async def _note_reuse(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _event: object
) -> None:
    context.trace_request_ctx.reused = True


def _finish(
    request: TimedRequest, answer: TimedAnswer, reads: list[tuple[int, bytes]], watch: LagWatch
) -> TimedAnswer:
    body = b"".join(piece for _, piece in reads)
    if answer.status not in (None, 200):
        text = body.decode("utf-8", "replace")
        if answer.redirected_to is not None:
            text = f"redirected to {answer.redirected_to}: give that address as --base-url"
        answer.error = f"status-{answer.status}: {text}"[:_ERROR_LENGTH]
    elif request.stream:
        read_answer(answer, reads)
    else:
        read_event(answer, answer.ended_ns, body)
    stamps = [chunk.at_ns for chunk in answer.chunks] or [answer.ended_ns]
    answer.lag_ns = (watch.at(answer.sent_ns), watch.at(stamps[0]), watch.at(stamps[-1]))
    return answer


def _clocks() -> dict[str, int]:
    return {
        "used": time.perf_counter_ns(),
        "boot": time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        "raw": time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW),
    }


def steps(before: dict[str, int], after: dict[str, int]) -> dict[str, float]:
    """How far each clock went apart from the one that is used, in seconds."""
    used = after["used"] - before["used"]
    return {name: (after[name] - before[name] - used) / 1e9 for name in before if name != "used"}


def completion(
    model: str,
    prompt: list[int] | str,
    *,
    prompt_tokens: int,
    tokens: int,
    stream: bool = True,
    ids: bool = False,
    text: str = "",
) -> TimedRequest:
    """A greedy completion of exactly so many tokens, whose chunks say how many there are so far.
    `ids`: ask for the token ids as well; vLLM puts the prompt's into the first chunk, which is late
    by that: not for what is timed. `text`: name of the fixed text at the prompt's end."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": stream,
    }
    if ids:
        body["return_token_ids"] = True
    if isinstance(prompt, str):
        body["add_special_tokens"] = False  # the text has the tokens that it should have
    if stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    content = json.dumps(body).encode()
    return TimedRequest("/v1/completions", content, tokens, prompt_tokens, stream, text)


def chat(
    model: str, question: str, tokens: int, *, greedy: bool = True, stream: bool = True
) -> TimedRequest:
    """A chat to its own end. `greedy`: False: sampled as the model's settings say."""
    messages = [{"role": "user", "content": question}]
    body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": tokens}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if greedy:
        body["temperature"] = 0.0
    return TimedRequest("/v1/chat/completions", json.dumps(body).encode(), tokens, 0, stream)
