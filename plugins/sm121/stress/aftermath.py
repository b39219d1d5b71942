"""What a server must be like once its load has ended."""

import contextlib
import time
from collections.abc import Callable, Iterable

import psutil

from sm121.core.server import Endpoint
from sm121.core.verdict import NotRun
from sm121.measure import counters
from sm121.stress import capacity, fault

_ZOMBIE_FOR_S = 2.0
_IDLE_WITHIN_S = 15.0
#: Of the KV cache less than two blocks: the engine keeps one. Where none are counted, a share.
_NO_BLOCKS, _NO_USAGE = 1.5, 0.01


def not_idle(endpoint: Endpoint) -> fault.Fault | None:
    """Requests or KV blocks kept after the last answer; None: none, or nothing says so."""
    deadline, most_usage = time.monotonic() + _IDLE_WITHIN_S, _NO_USAGE
    with contextlib.suppress(NotRun):  # the server does not say
        most_usage = _NO_BLOCKS / capacity.cache_blocks(endpoint)[0]
    while True:
        now = counters.fetch(endpoint)
        if now is None:
            return None
        idle = {"running": 0.0, "waiting": 0.0, "cache_usage": most_usage}
        busy = {name: v for name, most in idle.items() if (v := now.values.get(name, 0.0)) > most}
        if not busy:
            return None
        if time.monotonic() > deadline:
            observed = ", ".join(f"{name} {value:g}" for name, value in busy.items())
            required = f"0 within {_IDLE_WITHIN_S:.0f} s of the last answer"
            return fault.Fault("not_idle", f"required {required}, seen {observed}")
        time.sleep(0.2)


def zombies(processes: Callable[[], Iterable[psutil.Process]]) -> fault.Fault | None:
    """Children of the server's tree that ended and are not waited for, but for a moment."""
    first = _dead_children(processes())
    if not first:
        return None
    time.sleep(_ZOMBIE_FOR_S)
    still = [entry for entry in _dead_children(processes()) if entry in first]
    if not still:
        return None
    listed = ", ".join(f"pid {pid}, a child of {parent}" for pid, parent in still[:5])
    return fault.Fault("zombie", f"required none, seen {len(still)}: {listed}")


def _dead_children(processes: Iterable[psutil.Process]) -> list[tuple[int, str]]:
    parents = {}
    for process in processes:
        try:
            parent = f"{process.name()} ({process.pid})"
            for child in process.children():
                if child.status() == psutil.STATUS_ZOMBIE:
                    parents[child.pid] = parent
        except psutil.NoSuchProcess:
            continue
    return sorted(parents.items())
