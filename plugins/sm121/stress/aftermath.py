"""The state of a server after its load: idle, and as fast as before."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from sm121.client.jobs import JobOutcome
from sm121.client.load import LoadClient
from sm121.core import level_settings, verdict
from sm121.core.server import Endpoint
from sm121.core.verdict import NotRun
from sm121.machine.cpu_use import CpuUse
from sm121.measure import counters
from sm121.stress import cache, checks
from sm121.stress.shapes import Shapes

#: Maximum time in seconds that an ended child process may remain a zombie.
_ZOMBIE_FOR_S = 2.0
_IDLE_WITHIN_S = 15.0
_LOOK_EVERY_S = 0.2
#: An idle server uses fewer KV-cache blocks than this; the engine itself keeps one.
_NO_BLOCKS = 1.5
#: Maximum KV-cache usage of an idle server that does not report its number of blocks.
_NO_USAGE = 0.01
#: Number of requests in a throughput measurement.
REQUESTS = 6
#: Number of tokens of each answer in a throughput measurement.
TOKENS = 48
_READINGS = 4
_WAIT_BETWEEN_READINGS_S = 15.0
#: If other processes use at most this fraction of the CPU, they are ignored.
_OTHERS_OF_NOTE = 0.1
#: A slowdown counts as caused by other processes if the server's threads waited for a processor for
#: at least this fraction of the lost time.
_WAITED_SHARE = 0.5
#: Maximum number of zombies that a fault names.
_LISTED_ZOMBIES = 5
Processes = Callable[[], Iterable[psutil.Process]]


def not_idle(endpoint: Endpoint) -> checks.Fault | None:
    """Check that the server keeps no request and no KV block after the last answer.

    Args:
        endpoint: The server.

    Returns:
        A fault if the server is not idle within 15 s; None if it is, or lacks these metrics.
    """
    deadline = time.monotonic() + _IDLE_WITHIN_S
    most = {"running": 0.0, "waiting": 0.0, "cache_usage": _NO_USAGE}
    with contextlib.suppress(NotRun):  # the server does not count its blocks
        most["cache_usage"] = _NO_BLOCKS / cache.cache_blocks(endpoint).count
    while True:
        now = counters.fetch(endpoint)
        if now is None:
            return None
        busy: list[str] = []
        for name, idle in most.items():
            value = now.values.get(name, 0.0)
            if value > idle:
                busy.append(f"{name} {value:g}")
        if not busy:
            return None
        if time.monotonic() > deadline:
            required = f"an idle server within {_IDLE_WITHIN_S:.0f} s of the last answer"
            return checks.Fault("not_idle", f"expected {required}, got {', '.join(busy)}")
        time.sleep(_LOOK_EVERY_S)


@dataclass(frozen=True)
class _Zombie:
    pid: int
    #: The name and the pid of the zombie's parent.
    parent: str


def zombies(processes: Processes) -> checks.Fault | None:
    """Check that the server reaps its ended child processes.

    Args:
        processes: Returns the server's process tree.

    Returns:
        A fault if a child is still a zombie after 2 s, else None.
    """
    first = _find_zombies(processes())
    if not first:
        return None
    time.sleep(_ZOMBIE_FOR_S)
    still = [zombie for zombie in _find_zombies(processes()) if zombie in first]
    if not still:
        return None
    shown = still[:_LISTED_ZOMBIES]
    listed = ", ".join(f"pid {zombie.pid}, a child of {zombie.parent}" for zombie in shown)
    return checks.Fault("zombie", f"expected none, got {len(still)}: {listed}")


def _find_zombies(processes: Iterable[psutil.Process]) -> list[_Zombie]:
    parents: dict[int, str] = {}
    for process in processes:
        try:
            parent = f"{process.name()} ({process.pid})"
            for child in process.children():
                if child.status() == psutil.STATUS_ZOMBIE:
                    parents[child.pid] = parent
        except psutil.NoSuchProcess:
            continue
    return [_Zombie(pid, parent) for pid, parent in sorted(parents.items())]


@dataclass(frozen=True)
class ThroughputReading:
    """A measurement of the throughput."""

    #: Tokens per second, the median over single streams.
    rate: float
    tokens: int
    #: Tokens per second of processor time that the server used.
    per_cpu_s: float
    #: Seconds for which the server's threads were ready to run but waited for a processor.
    waited_s: float
    #: The fraction of the CPU that processes outside the run used.
    other_load: float


def read_throughput(
    client: LoadClient, shapes: Shapes, bound: level_settings.AgreementBound, processes: Processes
) -> ThroughputReading:
    """Measure the throughput of single streams.

    Args:
        client: Sends the requests.
        shapes: Makes the requests.
        bound: How far an answer may differ from the answer to the same prompt sent alone.
        processes: Returns the server's process tree; none if the server is attached.

    Raises:
        UnderLoad: An answer is wrong.
        NotRun: The answers are not streamed.
    """
    jobs = [job for job in itertools.islice(shapes.short(TOKENS), REQUESTS) if job.streamed]
    cpu_before = CpuUse.take(processes)
    waited_before_s = _waited_s(processes())
    load = client.run(jobs, concurrency=1)
    cpu_after = CpuUse.take(processes)
    waited_s = _waited_s(processes()) - waited_before_s
    faults = checks.faults(load, bound)
    if faults:
        raise checks.UnderLoad("one request at a time", faults, len(jobs))
    rates = [rate for rate in map(_rate_of, load.outcomes) if rate is not None]
    if not rates:
        raise verdict.NotRun("the rate is unknown, because each answer came in one piece")
    pids = {process.pid for process in processes()}
    server_s = cpu_after.seconds_of(pids) - cpu_before.seconds_of(pids)
    other_load, _busiest = cpu_after.since(cpu_before)
    return ThroughputReading(
        rate=statistics.median(rates),
        tokens=load.tokens,
        per_cpu_s=load.tokens / max(server_s, 1e-9),
        waited_s=waited_s,
        other_load=other_load,
    )


def _rate_of(outcome: JobOutcome) -> float | None:
    """Return the tokens per second of a stream, or None if all its tokens came at once."""
    if outcome.first is None or outcome.last is None or outcome.last <= outcome.first:
        return None
    return (outcome.received - 1) / (outcome.last - outcome.first)


def compare_throughput(
    before: ThroughputReading,
    take: Callable[[], ThroughputReading],
    *,
    allowed: float,
    on_cpu: bool,
    max_other_load: float,
) -> str:
    """Check that the server is as fast as before the load, with at most four measurements.

    If the server computes on a CPU that other processes also use, wall times show little. Then the
    tokens per second of processor time can show that the server is as fast as before.

    Args:
        before: The throughput before the load.
        take: Measures the throughput.
        allowed: The maximum loss of the rate, as a fraction.
        on_cpu: Whether the server computes on the CPU.
        max_other_load: If other processes use more than this fraction of the CPU, a slow server
            proves nothing.

    Returns:
        A line with both rates.

    Raises:
        UnderLoad: All measurements are slower than allowed.
        Inconclusive: All measurements are slower, but other processes used more of the CPU than
            `max_other_load`.
    """
    least_rate = (1.0 - allowed) * before.rate
    for attempt in range(_READINGS):
        if attempt:
            time.sleep(_WAIT_BETWEEN_READINGS_S)
        after = take()
        beside = f"while other processes used {after.other_load:.0%} of the CPU"
        rates = f"throughput {before.rate:.1f} tok/s before, {after.rate:.1f} after the load"
        if after.rate >= least_rate:
            return rates
        # Other processes caused the loss only if the server's threads had to wait for a processor.
        lost_s = after.tokens / after.rate - after.tokens / before.rate
        has_waited = after.waited_s >= _WAITED_SHARE * lost_s
        is_as_efficient = after.per_cpu_s >= (1.0 - allowed) * before.per_cpu_s
        is_disturbed = on_cpu and after.other_load > _OTHERS_OF_NOTE and has_waited
        if is_disturbed and is_as_efficient:
            return f"{rates}; the server did as much work per CPU second, {beside}"
    text = (
        f"expected at least {least_rate:.1f} tok/s "
        f"({allowed:.0%} below the {before.rate:.1f} before the load), got {after.rate:.1f}"
    )
    if after.other_load > max_other_load and (has_waited or not on_cpu):
        raise verdict.Inconclusive(f"{text}, {beside}")
    raise checks.UnderLoad("after the load", [checks.Fault("slower_after_load", text)], 0)


def _waited_s(processes: Iterable[psutil.Process]) -> float:
    """Return the seconds for which the processes' threads were ready but waited for a processor.

    Source: the second number of ``/proc/PID/task/TID/schedstat``, in nanoseconds (Linux,
    Documentation/scheduler/sched-stats.rst).
    """
    waited_s = 0.0
    for process in processes:
        for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                waited_s += int(file.read_text("ascii").split()[1]) / 1e9
    return waited_s
