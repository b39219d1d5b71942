"""Judges kernels in a process of their own, which runs in the interpreter that serves with them. It
is started by `sm121.kernels.child` and needs nothing of the suite to be installed there: torch,
numpy and pydantic, which an engine has. Oracles, poison, replays and clocks work on the provider's
own memory and device, so that they are here and not in pytest's process."""

import contextlib
import functools
import json
import os
import pickle
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from sm121.core import errors, verdict
from sm121.kernels import benchmarks, checks, problems, protocol, registry

_PACKAGES = ("vllm", "flashinfer")


@functools.cache
def _provider(name: str) -> Any:
    return registry.load(name)


def _packages(name: str) -> list[str]:
    _provider(name)
    return [package for package in _PACKAGES if package in sys.modules]


def _check(name: str, case: Any, tactic: str | None = None) -> list[dict[str, Any]]:
    provider = _provider(name)
    if tactic is not None:
        provider = provider.with_tactic(tactic)
    return [asdict(fact) for fact in checks.check(provider, problems.build(case))]


def _replay(name: str, case: Any) -> list[dict[str, Any]]:
    facts = checks.check_replay(_provider(name), problems.build(case))
    return [asdict(fact) for fact in facts]


def _tactics(name: str, operation: Any) -> list[str]:
    provider = _provider(name)
    listed = getattr(provider, "tactics", None)
    names = list(listed(operation)) if listed is not None else []
    if not names:
        declared = protocol.declaration(provider)
        raise verdict.NotRun(f"provider {declared.name} lists no autotune tactics of {operation}")
    return names


def _time(name: str, case: Any, rounds: tuple[int, int]) -> dict[str, Any]:
    """Seconds of each round and what they were compared with; of no rounds the output is judged.
    Raises Invalid where the number is of a call that did not do its work."""
    provider = _provider(name)
    device = protocol.declaration(provider).device
    clock, peak = benchmarks.clock_of(device), benchmarks.bandwidth(device)
    timed = benchmarks.build(provider, case)
    count = rounds[0] if device == "cpu" else rounds[1]
    seconds, output = [], None
    for _ in range(1 + count):
        timed.renew()
        clock.before()
        began = clock.now()
        output = timed.call()
        ended = clock.now()
        seconds.append(ended - began)
    extra = {
        "provider": name,
        "device": device,
        "clock": clock.how,
        "bytes": timed.bytes_moved,
        "bandwidth_gb_s": round(peak.best_gb_s, 1),
        "bandwidth_method": peak.method,
    }
    if not count:
        benchmarks.check_output(case, timed, output)
        return {"seconds": [], "extra": extra}
    seconds = seconds[1:]  # the first warms up
    share = benchmarks.check(case, statistics.median(seconds), timed, output, peak)
    return {"seconds": seconds, "extra": extra | {"roofline_share": round(share, 4)}}


_ANSWERS: tuple[Callable[..., Any], ...] = (_packages, _check, _replay, _tactics, _time)
_QUESTIONS = {each.__name__.removeprefix("_"): each for each in _ANSWERS}


def _answer(question: str, arguments: list[Any]) -> dict[str, Any]:
    try:
        return {"answer": _QUESTIONS[question](*arguments)}
    except (verdict.Inapplicable, verdict.Invalid, verdict.NotRun, errors.UsageError) as error:
        return {"raised": type(error).__name__, "text": str(error)}
    except checks.DeviceFault as error:
        return {"raised": "DeviceFault", "text": str(error)}
    except Exception as error:  # noqa: BLE001 - pytest's process makes a failure of it
        text = f"{type(error).__name__}: {error}"
        return {"raised": "KernelError", "text": text, "trace": traceback.format_exc()}


def main() -> None:
    # What kernels and engines print is for people: it must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own parent's
    if settings["path"] is not None:
        sys.path[:] = settings["path"]
    if settings["workers"] > 1:
        # Threads of several workers on one core wait for each other more than they compute.
        torch.set_num_threads(max(1, torch.get_num_threads() // settings["workers"]))
    with contextlib.suppress(EOFError):
        while True:
            question, *arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 - as above
            answers.write(json.dumps(_answer(question, arguments)) + "\n")
            answers.flush()
