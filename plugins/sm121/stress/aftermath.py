"""What a server must be like once its load has ended: idle, and as fast as before."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from sm121.client.load import LoadClient
from sm121.core import level_settings, verdict
from sm121.core.server import Endpoint
from sm121.core.verdict import NotRun
from sm121.measure import counters
from sm121.measure.cpu_use import CpuUse
from sm121.stress import checks, shapes
from sm121.stress.shapes import Shapes

_ZOMBIE_FOR_S = 2.0
_IDLE_WITHIN_S = 15.0
#: Of the KV cache less than two blocks: the engine keeps one. Where none are counted, a share.
_NO_BLOCKS, _NO_USAGE = 1.5, 0.01
#: Requests of a reading, and tokens of each.
REQUESTS, TOKENS = 6, 48
_READINGS = 4
_WAIT_BETWEEN_READINGS_S = 15.0
#: Others that take a smaller share of the CPU do not matter.
_OTHERS_OF_NOTE = 0.1
Processes = Callable[[], Iterable[psutil.Process]]


def not_idle(endpoint: Endpoint) -> checks.Fault | None:
    """Requests or KV blocks kept after the last answer; None: none, or nothing says so."""
    deadline, most_usage = time.monotonic() + _IDLE_WITHIN_S, _NO_USAGE
    with contextlib.suppress(NotRun):  # the server does not say
        most_usage = _NO_BLOCKS / shapes.cache_blocks(endpoint)[0]
    while True:
        if (now := counters.fetch(endpoint)) is None:
            return None
        idle = {"running": 0.0, "waiting": 0.0, "cache_usage": most_usage}
        busy = {name: v for name, most in idle.items() if (v := now.values.get(name, 0.0)) > most}
        if not busy:
            return None
        if time.monotonic() > deadline:
            observed = ", ".join(f"{name} {value:g}" for name, value in busy.items())
            required = f"0 within {_IDLE_WITHIN_S:.0f} s of the last answer"
            return checks.Fault("not_idle", f"required {required}, seen {observed}")
        time.sleep(0.2)


def zombies(processes: Callable[[], Iterable[psutil.Process]]) -> checks.Fault | None:
    """Children of the server's tree that ended and are not waited for, but for a moment."""
    if not (first := _dead_children(processes())):
        return None
    time.sleep(_ZOMBIE_FOR_S)
    if not (still := [entry for entry in _dead_children(processes()) if entry in first]):
        return None
    listed = ", ".join(f"pid {pid}, a child of {parent}" for pid, parent in still[:5])
    return checks.Fault("zombie", f"required none, seen {len(still)}: {listed}")


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


@dataclass(frozen=True)
class ThroughputReading:
    """A reading of the throughput."""

    #: Tokens a second, the median of single streams.
    rate: float
    tokens: int
    #: Tokens for each second of the processor that the server used.
    per_cpu_s: float
    #: Seconds for which threads of the server were ready to run and others had the processor.
    waited_s: float
    other_load: float


def read_throughput(
    client: LoadClient, shapes: Shapes, bound: level_settings.AgreementBound, processes: Processes
) -> ThroughputReading:
    """Take a reading. `processes`: of the server's tree; none where it is attached. Raises
    UnderLoad: an answer is wrong; NotRun: the answers do not come as streams."""
    jobs = [job for job in itertools.islice(shapes.short(TOKENS), REQUESTS) if job.streamed]
    began, waited_before_s = CpuUse.take(processes), _waited_s(processes())
    load = client.run(jobs, concurrency=1)
    ended, waited_s = CpuUse.take(processes), _waited_s(processes())
    if wrong := checks.faults(load, bound):
        raise checks.UnderLoad("one request at a time", wrong, len(jobs))
    rates = [
        (o.received - 1) / (o.last - o.first)
        for o in load.outcomes
        if o.first is not None and o.last is not None and o.last > o.first
    ]
    if not rates:
        raise verdict.NotRun("no rate: the answers came in one piece")
    pids = {process.pid for process in processes()}
    server_s = ended.seconds_of(pids) - began.seconds_of(pids)
    return ThroughputReading(
        rate=statistics.median(rates),
        tokens=load.tokens,
        per_cpu_s=load.tokens / max(server_s, 1e-9),
        waited_s=waited_s - waited_before_s,
        other_load=ended.since(began)[0],
    )


def compare_throughput(
    before: ThroughputReading,
    take: Callable[[], ThroughputReading],
    *,
    allowed: float,
    on_cpu: bool,
    max_other_load: float,
) -> str:
    """Read until the server is as fast as before, within a bound; gives a line that says so. On a
    CPU that others use the clock says little: there the tokens for each second of processor time
    may show it. `take`: takes a reading; `allowed`: share of the rate that may be lost; `on_cpu`:
    the server computes there; `max_other_load`: share of the CPU that others may take where the
    server is found slow. Raises UnderLoad: it is slower, by several readings; Inconclusive: so it
    is, and others took more of the CPU than that."""
    for attempt in range(_READINGS):
        if attempt:
            time.sleep(_WAIT_BETWEEN_READINGS_S)
        after = take()
        beside = f"while others took {after.other_load:.0%} of the CPU"
        rates = f"throughput {before.rate:.1f} tok/s before, {after.rate:.1f} after the load"
        if after.rate >= (1.0 - allowed) * before.rate:
            return rates
        # Time is lost to others only where the server was ready to run and had to wait.
        lost_s = after.tokens / after.rate - after.tokens / before.rate
        waited = after.waited_s >= 0.5 * lost_s
        as_much = after.per_cpu_s >= (1.0 - allowed) * before.per_cpu_s
        if on_cpu and after.other_load > _OTHERS_OF_NOTE and waited and as_much:
            return f"{rates}; as much work for each CPU second, {beside}"
    text = (
        f"required at least {(1.0 - allowed) * before.rate:.1f} tok/s "
        f"({allowed:.0%} below the {before.rate:.1f} before the load), seen {after.rate:.1f}"
    )
    if after.other_load > max_other_load and (waited or not on_cpu):
        raise verdict.Inconclusive(f"{text}, {beside}")
    raise checks.UnderLoad("after the load", [checks.Fault("slower_after_load", text)], 0)


def _waited_s(processes: Iterable[psutil.Process]) -> float:
    """Seconds so far for which threads were ready to run and others had the processor."""
    waited_s = 0.0
    for process in processes:
        for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                waited_s += int(file.read_text("ascii").split()[1]) / 1e9
    return waited_s
