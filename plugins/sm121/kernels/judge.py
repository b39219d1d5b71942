"""Test kernels in a separate process, which runs in the engine's Python environment.

`sm121.kernels.child` starts the process. The interpreter must have torch, numpy and pydantic, as an
engine's has, but not the suite. Oracles, poisoned memory, graph replays and timers work on the
provider's own memory and device. They therefore run in this process, and not in pytest's.
"""

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

#: Packages with kernels that a provider may import.
_PACKAGES = ("vllm", "flashinfer")


@functools.cache
def _provider(name: str) -> Any:
    return registry.load(name)


def _packages(name: str) -> list[str]:
    """Import a provider, and return the names of the kernel packages that are then imported."""
    _provider(name)
    return [package for package in _PACKAGES if package in sys.modules]


def _check(name: str, case: Any, tactic: str | None = None) -> list[dict[str, Any]]:
    """Return the faults of a provider on a case, with its default tactic or with a given one."""
    provider = _provider(name)
    if tactic is not None:
        provider = provider.with_tactic(tactic)
    return [asdict(fact) for fact in checks.check(provider, problems.build(case))]


def _replay(name: str, case: Any) -> list[dict[str, Any]]:
    """Return the faults of a provider's CUDA graph on a case."""
    facts = checks.check_replay(_provider(name), problems.build(case))
    return [asdict(fact) for fact in facts]


def _tactics(name: str, operation: Any) -> list[str]:
    """Return the autotuning tactics of an operation, or raise NotRun if the provider lists none."""
    provider = _provider(name)
    list_tactics = getattr(provider, "tactics", None)
    names = [] if list_tactics is None else list(list_tactics(operation))
    if not names:
        declared = protocol.declaration(provider)
        raise verdict.NotRun(f"provider {declared.name} lists no autotune tactics of {operation}")
    return names


def _time(name: str, case: Any, rounds: tuple[int, int]) -> dict[str, Any]:
    """Time a case. Without rounds, only check its output.

    Args:
        name: The provider.
        case: The operation and its sizes.
        rounds: The number of rounds on a CPU and on a GPU.

    Returns:
        The seconds of each round, and a description of the provider, the timer and the bandwidth.

    Raises:
        Invalid: The output of a call is wrong, or the call was impossibly fast.
    """
    provider = _provider(name)
    device = protocol.declaration(provider).device
    clock = benchmarks.clock_of(device)
    peak = benchmarks.bandwidth(device)
    timed = benchmarks.build(provider, case)
    on_cpu, on_gpu = rounds
    count = on_cpu if device == "cpu" else on_gpu
    extra = {
        "provider": name,
        "device": device,
        "clock": clock.how,
        "bytes": timed.bytes_moved,
        "bandwidth_gb_s": round(peak.best_gb_s, 1),
        "bandwidth_method": peak.method,
    }
    seconds = []
    output = None
    for _ in range(1 + count):  # the first round warms up
        timed.renew()
        clock.before()
        began = clock.now()
        output = timed.call()
        ended = clock.now()
        seconds.append(ended - began)
    seconds = seconds[1:]
    if not seconds:
        benchmarks.check_output(case, timed, output)
        return {"seconds": [], "extra": extra}
    share = benchmarks.check(case, statistics.median(seconds), timed, output, peak)
    return {"seconds": seconds, "extra": extra | {"roofline_share": round(share, 4)}}


#: The function that answers each request.
_QUESTIONS: dict[str, Callable[..., Any]] = {
    "packages": _packages,
    "check": _check,
    "replay": _replay,
    "tactics": _tactics,
    "time": _time,
}


def _answer(question: str, arguments: list[Any]) -> dict[str, Any]:
    try:
        return {"answer": _QUESTIONS[question](*arguments)}
    except (verdict.Inapplicable, verdict.Invalid, verdict.NotRun, errors.UsageError) as error:
        return {"raised": type(error).__name__, "text": str(error)}
    except checks.DeviceFault as error:
        return {"raised": "DeviceFault", "text": str(error)}
    except Exception as error:  # noqa: BLE001 - pytest's process reports it as a failure
        text = f"{type(error).__name__}: {error}"
        return {"raised": "KernelError", "text": text, "trace": traceback.format_exc()}


def main() -> None:
    """Answer requests from stdin until it ends, with one JSON object per line on stdout.

    The first pickled object on stdin has the settings: the import path and the number of workers.
    Each later object is the name of a request with its arguments.
    """
    # Kernels and engines print to stdout as well; their output goes to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = pickle.load(sys.stdin.buffer)  # noqa: S301 - sent by our parent
    if settings["path"] is not None:
        sys.path[:] = settings["path"]
    if settings["workers"] > 1:
        # If several workers' threads share a core, they mostly wait for each other.
        torch.set_num_threads(max(1, torch.get_num_threads() // settings["workers"]))
    with contextlib.suppress(EOFError):
        while True:
            question, *arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 - sent by our parent
            answers.write(json.dumps(_answer(question, arguments)) + "\n")
            answers.flush()
