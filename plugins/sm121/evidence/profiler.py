"""Takes a profile of some decode steps from a running server. vLLM with ``--profiler-config``
profiles from POST /start_profile until /stop_profile, at no cost before. What a profile leaves
behind is another matter: ``docs/kernel-path.md``."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx

from sm121.client.completions import Refused, stream
from sm121.core.server import Endpoint
from sm121.core.verdict import NotRun

_TRACES = ("*.pt.trace.json", "*.pt.trace.json.gz")
_WRITTEN_WITHIN_S = 30.0
#: Tokens of the answer that is profiled: it is dropped when its steps are there.
_LONGEST_ANSWER = 1024


def profile_decode(endpoint: Endpoint, traces: Path, steps: int = 16) -> Path:
    """The trace of about `steps` decode steps of one request, without its prefill, which the server
    writes into `traces` here. Raises NotRun: it has no profiler, or wrote no trace."""
    before = set(_written(traces))
    _decode(endpoint, steps)
    deadline, size = time.monotonic() + _WRITTEN_WITHIN_S, -1
    while time.monotonic() < deadline:
        new = {path for path in _written(traces) if "async_llm" not in path.name} - before
        if new:
            first = min(new, key=lambda path: path.name)
            if (now := first.stat().st_size) == size and now > 0:
                return first
            size = now
        time.sleep(0.3)
    raise NotRun(f"the engine wrote no trace into {traces} within {_WRITTEN_WITHIN_S:.0f} s")


def _decode(endpoint: Endpoint, steps: int) -> None:
    """Generate, with the profiler on for `steps` tokens after it says that it is on. The answer is
    read all the while: many tokens may be ready before a slow /start_profile answers."""
    request = {
        "model": endpoint.served_name,
        "prompt": "One, two, three,",
        "max_tokens": _LONGEST_ANSWER,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    with (
        endpoint.http(timeout_s=300.0) as control,
        closing(stream(endpoint, request, timeout_s=300.0)) as chunks,
        ThreadPoolExecutor(1) as beside,
    ):
        tokens = (chunk for chunk in chunks if chunk.get("choices"))
        try:
            next(tokens, None)
        except Refused as refusal:
            raise NotRun(
                f"no decode to profile: /v1/completions answers {refusal.status}"
            ) from refusal
        started = beside.submit(_post, control, "/start_profile")
        while not started.done() and next(tokens, None):
            pass
        started.result()
        try:
            profiled = sum(1 for _ in itertools.islice(tokens, steps))
        finally:
            _post(control, "/stop_profile")
    if profiled < steps:
        raise NotRun(
            f"{profiled} of {steps} decode steps were profiled: the answer ended before, of "
            f"{_LONGEST_ANSWER} tokens at most; the machine may be busy with something else"
        )


def _post(http: httpx.Client, path: str) -> None:
    status = http.post(path).status_code
    if status == 404:
        raise NotRun(
            f"the server has no {path}: it was started without --profiler-config (vLLM 0.13 or "
            "later)"
        )
    if status != 200:
        raise NotRun(f"the server answers {path} with status {status}; its log says why")


def _written(traces: Path) -> list[Path]:
    return [path for pattern in _TRACES for path in traces.glob(pattern)]
