"""Profile some decode steps of a running server.

With ``--profiler-config``, vLLM profiles from POST /start_profile until POST /stop_profile. Before
that, the option costs no time. ``docs/kernel-path.md`` describes the slowdown that remains
afterwards.

A profiler slows the host while it runs. The times of steps in a trace are therefore too long, so
the suite measures the time of a step before it starts the profiler.
"""

import itertools
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sm121.client.completions import Refused, stream
from sm121.core.server import Endpoint
from sm121.core.verdict import NotRun
from sm121.evidence.decode_time import StreamTime
from sm121.measure import counters
from sm121.measure.counters import Counters

#: The names of the trace files that the torch profiler writes.
_TRACES = ("*.pt.trace.json", "*.pt.trace.json.gz")
#: A part of the name of the front end's trace, which has no kernels.
_FRONT_END = "async_llm"
_WRITTEN_WITHIN_S = 30.0
_LOOK_EVERY_S = 0.3
_REQUEST_TIMEOUT_S = 300.0
#: The maximum number of tokens of the profiled answer. The client aborts it after the profiled
#: steps.
LONGEST_ANSWER = 1024
#: This many tokens are read before the timed ones, because the first tokens may arrive late and
#: together.
SETTLING_TOKENS = 64


class NoProfiler(NotRun):
    """The server was started without its profiler."""


@dataclass(frozen=True)
class DecodeTrace:
    """A trace of decode steps.

    Attributes:
        path: The trace.
        stream: The time of a token before the profiler was started; None if it was not measured.
    """

    path: Path
    stream: StreamTime | None = None


def profile_decode(
    endpoint: Endpoint,
    traces: Path,
    steps: int = 16,
    *,
    prompt: str | list[int] = "One, two, three,",
    longest: int = LONGEST_ANSWER,
    timed: int = 0,
) -> DecodeTrace:
    """Profile decode steps of one request, without its prefill.

    Args:
        endpoint: The server.
        traces: The folder on this machine to which the server writes its traces.
        steps: The approximate number of decode steps to profile.
        prompt: The prompt of the request.
        longest: The maximum number of tokens of the answer.
        timed: How many tokens to time before the profiler starts. They follow the first
            `SETTLING_TOKENS` tokens. With 0, no time is measured.

    Returns:
        The trace, and the time of a token.

    Raises:
        NoProfiler: The server was started without its profiler.
        NotRun: The server ended the answer too early, or wrote no trace.
    """
    before = _written(traces)
    stream_time = _decode(endpoint, steps, prompt, longest, timed)
    deadline = time.monotonic() + _WRITTEN_WITHIN_S
    last_size = 0
    while time.monotonic() < deadline:
        new = [path for path in _written(traces) - before if _FRONT_END not in path.name]
        if new:
            first = min(new, key=lambda path: path.name)
            size = first.stat().st_size
            if size == last_size and size > 0:
                return DecodeTrace(first, stream_time)
            last_size = size
        time.sleep(_LOOK_EVERY_S)
    raise NotRun(f"the engine wrote no trace into {traces} within {_WRITTEN_WITHIN_S:.0f} s")


def _decode(
    endpoint: Endpoint, steps: int, prompt: str | list[int], longest: int, timed: int
) -> StreamTime | None:
    """Generate tokens, and profile `steps` of them once /start_profile has answered.

    The tokens are read in parallel to the request /start_profile, because that may be slow, and
    many tokens may arrive before its answer.
    """
    request: dict[str, Any] = {
        "model": endpoint.served_name,
        "prompt": prompt,
        "max_tokens": longest,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    before = None
    if timed:
        before = counters.fetch_quiet(endpoint)
        request["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    with (
        endpoint.http(timeout_s=_REQUEST_TIMEOUT_S) as control,
        closing(stream(endpoint, request, timeout_s=_REQUEST_TIMEOUT_S)) as chunks,
        ThreadPoolExecutor(1) as beside,
    ):
        tokens = (chunk for chunk in chunks if chunk.get("choices"))
        try:
            next(tokens, None)
        except Refused as refusal:
            raise NotRun(
                f"no decode to profile: /v1/completions answers {refusal.status}"
            ) from refusal
        token_s = _time_of_a_token(tokens, timed) if timed else None
        stream_time = None
        if token_s is not None:
            per_step = _tokens_per_step(before, counters.fetch(endpoint))
            stream_time = StreamTime(token_s, per_step)
        started = beside.submit(_post, control, "/start_profile")
        while not started.done() and next(tokens, None):
            pass
        started.result()
        try:
            profiled = len(list(itertools.islice(tokens, steps)))
        finally:
            _post(control, "/stop_profile")
    if profiled < steps:
        raise NotRun(
            f"only {profiled} of {steps} decode steps were profiled before the end of the answer "
            f"(at most {longest} tokens); other processes may keep the machine busy"
        )
    return stream_time


def _time_of_a_token(tokens: Iterator[Mapping[str, Any]], timed: int) -> float | None:
    """Read tokens of an answer, and return the mean time of the last `timed` ones.

    A chunk may contain several tokens, so the tokens are counted by the ``usage`` of each chunk.
    """
    first_count, first_at = 0, 0.0
    for chunk in tokens:
        count = int((chunk.get("usage") or {}).get("completion_tokens") or 0)
        if count == 0:
            return None  # the server does not count the tokens of a chunk
        now = time.perf_counter()
        if first_count == 0:
            if count >= SETTLING_TOKENS:
                first_count, first_at = count, now
        elif count >= first_count + timed:
            return (now - first_at) / (count - first_count)
    return None


def _tokens_per_step(before: Counters | None, now: Counters | None) -> float | None:
    """Return the mean number of tokens of a decode step; None if the counters do not show it.

    A step generates a token of the model's own, and the accepted drafts. The first token of an
    answer comes from the prefill.
    """
    if before is None or now is None:
        return None
    changes = now.since(before)
    generated = changes.get("generated", 0.0) - 1.0
    steps = generated - changes.get("accepted_tokens", 0.0)
    if steps <= 0:
        return None
    return generated / steps


def _post(http: httpx.Client, path: str) -> None:
    """Send an empty request, and raise NotRun if the server does not accept it."""
    status = http.post(path).status_code
    if status == 404:
        raise NoProfiler(
            f"the server has no {path}: it was started without --profiler-config (vLLM 0.13 or "
            "later)"
        )
    if status != 200:
        raise NotRun(f"the server answers {path} with status {status}; its log shows the reason")


def _written(traces: Path) -> set[Path]:
    files: set[Path] = set()
    for pattern in _TRACES:
        files.update(traces.glob(pattern))
    return files
