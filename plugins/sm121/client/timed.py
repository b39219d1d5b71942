"""Send timed requests over one session, with a timestamp for each socket read.

Answers are parsed after all requests of a batch have ended, so that no stream waits for the parsing
of another.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpcore

from sm121.client.patience import Patience
from sm121.client.stamped_network import CURRENT, StampedNetwork, Stamps
from sm121.client.timed_answer import TimedAnswer, read_answer, read_event
from sm121.core.bounded import LARGEST_ANSWER, tls

#: The interval at which `LagWatch` measures the delay of the event loop, in seconds.
_TICK_S = 0.004
#: Shorter delays are ignored, because they are within the resolution of the event loop's timers.
_SHORTEST_LAG_NS = 2_000_000
#: A timestamp counts as affected by a delay if it is within this many nanoseconds of the delay.
_LAG_SLACK_NS = 2_000_000
#: The maximum length of an error, in characters.
_ERROR_LENGTH = 300
#: If a reused connection breaks within this time, the server had already closed it and did not read
#: the request. If it breaks later, the server may have read the request.
_AT_ONCE_NS = 50_000_000
#: The maximum interval between two checks of a request's time limits, in seconds.
_LONGEST_LOOK_S = 0.5
#: An idle connection is not used again after this time, in seconds. uvicorn closes idle connections
#: after five seconds.
_KEEP_ALIVE_S = 2.0
#: Time limit for establishing a connection, in seconds.
_CONNECT_WITHIN_S = 30.0


class _Unusable(Exception):
    """The answer cannot be timed, or its size is unlimited."""


_FAILURES = (
    _Unusable,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    OSError,
    TimeoutError,
)


@dataclass(frozen=True)
class TimedRequest:
    """One request of a batch, ready to be sent."""

    path: str
    #: The JSON of the request.
    body: bytes
    #: The number of tokens to generate.
    asked_tokens: int
    #: The number of tokens of the prompt; 0 if it is unknown.
    asked_prompt: int
    stream: bool = True
    #: The name of the fixed text that ends the prompt; empty if there is none.
    text: str = ""


@dataclass
class TimedBatch:
    """The answers of a batch, and the client's own figures."""

    #: The answers, in the order of the requests.
    answers: list[TimedAnswer]
    #: Seconds from the start of the first request to the end of the last one.
    wall_s: float
    #: The processor time of the client, in seconds.
    cpu_s: float
    #: The longest delay of the event loop, in nanoseconds.
    worst_lag_ns: int
    #: By how many seconds the machine's other clocks drifted from the client's clock; see `steps`.
    clock_steps: dict[str, float] = field(default_factory=dict)
    #: The package of the event loop: uvloop, or asyncio if uvloop is not installed.
    event_loop: str = ""


class LagWatch:
    """Measures the delays of the running event loop.

    Attributes:
        late: The end and the length of each delay, in nanoseconds.
        worst_ns: The longest delay in nanoseconds.
    """

    def __init__(self) -> None:
        self.late: list[tuple[int, int]] = []
        self.worst_ns = 0
        self._timer: asyncio.TimerHandle

    def start(self) -> None:
        """Measure every few milliseconds until `stop`."""
        due_ns = time.perf_counter_ns() + int(_TICK_S * 1e9)
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._look, due_ns)

    def stop(self) -> None:
        """End the measurement."""
        self._timer.cancel()

    def _look(self, due_ns: int) -> None:
        now = time.perf_counter_ns()
        lag = now - due_ns
        self.worst_ns = max(self.worst_ns, lag)
        if lag > _SHORTEST_LAG_NS:
            self.late.append((now, lag))
        self.start()

    def at(self, stamp_ns: int) -> int:
        """Return by how much a timestamp may be late, because the event loop was busy.

        Args:
            stamp_ns: The timestamp (``time.perf_counter_ns``).

        Returns:
            The longest delay around that time in nanoseconds; 0 if there was none.
        """
        longest = 0
        for end_ns, lag_ns in self.late:
            began_ns = end_ns - lag_ns
            if began_ns - _LAG_SLACK_NS <= stamp_ns <= end_ns + _LAG_SLACK_NS:
                longest = max(longest, lag_ns)
        return longest


class TimedClient:
    """Sends timed requests to one server. It is an asynchronous context manager for one event loop.

    Args:
        base_url: The address of the server, without /v1.
        api_key: The server's API key.
    """

    def __init__(self, base_url: str, api_key: str) -> None:
        self._base_url = base_url
        self._api_key = api_key
        self._pool: httpcore.AsyncConnectionPool

    async def __aenter__(self) -> "TimedClient":
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=tls(),
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=_KEEP_ALIVE_S,
            network_backend=StampedNetwork(),
        )
        return self

    async def __aexit__(self, *_reason: object) -> None:
        await self._pool.aclose()

    async def run(
        self, requests: Sequence[TimedRequest], *, concurrency: int, patience: Patience
    ) -> TimedBatch:
        """Send the requests of a batch and wait for its end.

        Args:
            requests: The requests. They are started in this order.
            concurrency: The number of workers. A worker sends its next request when its last answer
                has ended.
            patience: The time limits of each request.

        Returns:
            The answers and the client's own figures. A failed request is an answer with an error.
        """
        watch = LagWatch()
        sent = [_Sending(request) for request in requests]
        pending = iter(sent)

        async def work() -> None:
            for sending in pending:
                await self._send(sending, patience)

        clocks = _clocks()
        cpu = time.process_time()
        started = time.perf_counter()
        watch.start()
        try:
            workers = min(concurrency, len(requests))
            await asyncio.gather(*(work() for _ in range(workers)))
        finally:
            watch.stop()
        batch = TimedBatch(
            answers=[],
            wall_s=time.perf_counter() - started,
            cpu_s=time.process_time() - cpu,
            worst_lag_ns=watch.worst_ns,
            event_loop=type(asyncio.get_running_loop()).__module__.partition(".")[0],
            clock_steps=steps(clocks, _clocks()),
        )
        batch.answers.extend(_finish(sending, watch) for sending in sent)
        return batch

    async def _send(self, sending: "_Sending", patience: Patience) -> None:
        """Send one request, and end it if it reaches one of its time limits."""
        sending.begin()
        answer = sending.answer
        reads = sending.reads
        reading = asyncio.create_task(self._read(sending))
        last_change = time.monotonic()
        deadline = last_change + patience.within_s
        known_reads = 0
        while True:
            # Check at intervals, because a timer for each read would add work to the timed path.
            await asyncio.wait((reading,), timeout=min(_LONGEST_LOOK_S, patience.silent_s / 4))
            now = time.monotonic()
            if reading.done():
                reading.result()
                break
            if len(reads) != known_reads:
                known_reads = len(reads)
                last_change = now
            silent_s = now - last_change
            if reads and silent_s > patience.silent_s:
                error = f"stalled: no data came for {silent_s:.1f} s after {len(reads)} reads"
            elif now > deadline:
                error = f"timed-out: no end within {patience.within_s:.0f} s"
            else:
                continue
            reading.cancel()
            await asyncio.wait((reading,))
            answer.error = error
            break
        answer.ended_ns = answer.ended_ns or time.perf_counter_ns()

    async def _read(self, sending: "_Sending") -> None:
        """Send the request. If the server had closed the idle connection, send it again.

        llama-server sometimes closes a connection at the end of a stream and then never reads the
        next request on it. A repeated request keeps the time of its first attempt.
        """
        answer = sending.answer
        for attempt in (1, 2):
            began_ns = time.perf_counter_ns()
            stamps = Stamps(answer.sent_ns if attempt > 1 else None)
            CURRENT.set(stamps)
            try:
                await self._read_once(sending, stamps)
            except _FAILURES as error:
                answer.ended_ns = time.perf_counter_ns()
                took_ns = answer.ended_ns - began_ns
                unread = stamps.reused and not stamps.heard and took_ns < _AT_ONCE_NS
                if attempt == 1 and unread:
                    answer.retries += 1
                    continue
                open_s = (answer.ended_ns - answer.sent_ns) / 1e9
                message = f"connection: {type(error).__name__} after {open_s:.3f} s: {error}"
                answer.error = message[:_ERROR_LENGTH]
            finally:
                answer.sent_ns = stamps.sent_ns or answer.sent_ns
            return

    async def _read_once(self, sending: "_Sending", stamps: Stamps) -> None:
        answer = sending.answer
        reads = sending.reads
        # Redirects are not followed, because the answer from the new address would have another
        # start time.
        async with self._pool.stream(
            "POST",
            self._base_url + sending.request.path,
            headers=self._headers(),
            content=sending.request.body,
            extensions={"timeout": {"connect": _CONNECT_WITHIN_S}},
        ) as response:
            answer.status = response.status
            headers = {name.lower(): value.decode("latin-1") for name, value in response.headers}
            answer.redirected_to = headers.get(b"location")
            packed = headers.get(b"content-encoding", "identity")
            if packed.lower() != "identity":
                raise _Unusable(
                    f"the response is compressed ({packed}), although the request had "
                    "Accept-Encoding: identity"
                )
            size = 0
            async for piece in response.aiter_stream():
                reads.append((stamps.read_ns, piece))
                size += len(piece)
                if size > LARGEST_ANSWER:
                    raise _Unusable(f"the answer is larger than {LARGEST_ANSWER >> 20} MiB")
            answer.ended_ns = time.perf_counter_ns()

    def _headers(self) -> Mapping[bytes | str, bytes | str]:
        return {
            b"Authorization": f"Bearer {self._api_key}".encode(),
            b"Content-Type": b"application/json",
            b"Accept": b"*/*",
            b"Accept-Encoding": b"identity",
        }


class _Sending:
    """A request that is in progress, its answer, and the time and bytes of each socket read."""

    def __init__(self, request: TimedRequest) -> None:
        self.request = request
        self.answer: TimedAnswer
        self.reads: list[tuple[int, bytes]] = []

    def begin(self) -> None:
        """Create the answer. ``sent_ns`` is the current time until the request has been sent."""
        self.answer = TimedAnswer(
            time.perf_counter_ns(),
            asked_tokens=self.request.asked_tokens,
            asked_prompt=self.request.asked_prompt,
            text=self.request.text,
        )


def _finish(sending: _Sending, watch: LagWatch) -> TimedAnswer:
    """Parse the data of an answer, after all requests of the batch have ended."""
    answer = sending.answer
    body = b"".join(piece for _, piece in sending.reads)
    if answer.status not in (None, 200):
        text = body.decode("utf-8", "replace")
        if answer.redirected_to is not None:
            text = f"redirected to {answer.redirected_to}: give that address as --base-url"
        answer.error = f"status-{answer.status}: {text}"[:_ERROR_LENGTH]
    elif sending.request.stream:
        read_answer(answer, sending.reads)
    else:
        read_event(answer, answer.ended_ns, body)
    first_ns = answer.ended_ns
    last_ns = answer.ended_ns
    if answer.chunks:
        first_ns = answer.chunks[0].at_ns
        last_ns = answer.chunks[-1].at_ns
    answer.lag_ns = (watch.at(answer.sent_ns), watch.at(first_ns), watch.at(last_ns))
    return answer


def _clocks() -> dict[str, int]:
    return {
        "used": time.perf_counter_ns(),
        "boot": time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        "raw": time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW),
    }


def steps(before: dict[str, int], after: dict[str, int]) -> dict[str, float]:
    """Return by how much the machine's other clocks drifted from the client's clock.

    Args:
        before: The reading of each clock at the start, in nanoseconds. ``used`` is the client's
            clock.
        after: The readings at the end.

    Returns:
        The drift of each other clock in seconds.
    """
    used_ns = after["used"] - before["used"]
    drifts: dict[str, float] = {}
    for name in before:
        if name != "used":
            drifts[name] = (after[name] - before[name] - used_ns) / 1e9
    return drifts


def completion(
    model: str,
    prompt: list[int] | str,
    *,
    prompt_tokens: int,
    tokens: int,
    stream: bool = True,
    ids: bool = False,
    text: str = "",
    temperature: float = 0.0,
) -> TimedRequest:
    """Return a request for a completion of an exact number of tokens.

    Args:
        model: The name of the model on the server.
        prompt: The prompt, as token ids or as a text that includes all special tokens.
        prompt_tokens: The number of tokens of the prompt.
        tokens: The number of tokens to generate.
        stream: Whether to stream the answer, with continuous usage.
        ids: Whether to request token ids. Do not use this for timed requests, because vLLM then
            also sends the prompt's ids in the first chunk, which delays the chunk.
        text: The name of the fixed text that ends the prompt.
        temperature: The temperature; 0 for greedy sampling. Above 0, top_p is 1, whatever the
            default of the server is.

    Returns:
        The request.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": temperature,
        "stream": stream,
    }
    if temperature > 0.0:
        body["top_p"] = 1.0
    if ids:
        body["return_token_ids"] = True
    if isinstance(prompt, str):
        body["add_special_tokens"] = False  # the text already contains all special tokens
    if stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    content = json.dumps(body).encode()
    return TimedRequest(
        path="/v1/completions",
        body=content,
        asked_tokens=tokens,
        asked_prompt=prompt_tokens,
        stream=stream,
        text=text,
    )


def chat(
    model: str, question: str, tokens: int, *, greedy: bool = True, stream: bool = True
) -> TimedRequest:
    """Return a request for a chat whose answer may end before the limit of tokens.

    Args:
        model: The name of the model on the server.
        question: The text of the user's message.
        tokens: The maximum number of generated tokens.
        greedy: Whether to sample greedily. If false, the model's default settings are used.
        stream: Whether to stream the answer, with usage.

    Returns:
        The request.
    """
    messages = [{"role": "user", "content": question}]
    body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": tokens}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if greedy:
        body["temperature"] = 0.0
    return TimedRequest(
        path="/v1/chat/completions",
        body=json.dumps(body).encode(),
        asked_tokens=tokens,
        asked_prompt=0,
        stream=stream,
    )
