"""Take a profile of some decode steps from a running server.

With ``--profiler-config``, vLLM profiles from POST /start_profile until /stop_profile. Before that,
the option has no cost. ``docs/kernel-path.md`` describes the slowdown that remains afterwards.
"""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx

from sm121.client.completions import Refused, stream
from sm121.core.server import Endpoint
from sm121.core.verdict import NotRun

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


def profile_decode(
    endpoint: Endpoint,
    traces: Path,
    steps: int = 16,
    *,
    prompt: str | list[int] = "One, two, three,",
    longest: int = LONGEST_ANSWER,
) -> Path:
    """Profile decode steps of one request, without its prefill.

    Args:
        endpoint: The server.
        traces: The folder on this machine to which the server writes its traces.
        steps: The approximate number of decode steps to profile.
        prompt: The prompt of the request.
        longest: The maximum number of tokens of the answer.

    Returns:
        The trace.

    Raises:
        NotRun: The server has no profiler, ended the answer too early, or wrote no trace.
    """
    before = _written(traces)
    _decode(endpoint, steps, prompt, longest)
    deadline = time.monotonic() + _WRITTEN_WITHIN_S
    last_size = 0
    while time.monotonic() < deadline:
        new = [path for path in _written(traces) - before if _FRONT_END not in path.name]
        if new:
            first = min(new, key=lambda path: path.name)
            size = first.stat().st_size
            if size == last_size and size > 0:
                return first
            last_size = size
        time.sleep(_LOOK_EVERY_S)
    raise NotRun(f"the engine wrote no trace into {traces} within {_WRITTEN_WITHIN_S:.0f} s")


def _decode(endpoint: Endpoint, steps: int, prompt: str | list[int], longest: int) -> None:
    """Generate tokens, and profile `steps` of them once /start_profile has answered.

    The tokens are read while /start_profile runs: it may be slow, and many may arrive before its
    answer.
    """
    request = {
        "model": endpoint.served_name,
        "prompt": prompt,
        "max_tokens": longest,
        "temperature": 0.0,
        "ignore_eos": True,
    }
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
            f"{profiled} of {steps} decode steps were profiled: the answer ended before, of "
            f"{longest} tokens at most; the machine may be busy with something else"
        )


def _post(http: httpx.Client, path: str) -> None:
    """Send an empty request, and raise NotRun if the server does not accept it."""
    status = http.post(path).status_code
    if status == 404:
        raise NotRun(
            f"the server has no {path}: it was started without --profiler-config (vLLM 0.13 or "
            "later)"
        )
    if status != 200:
        raise NotRun(f"the server answers {path} with status {status}; its log says why")


def _written(traces: Path) -> set[Path]:
    files: set[Path] = set()
    for pattern in _TRACES:
        files.update(traces.glob(pattern))
    return files
