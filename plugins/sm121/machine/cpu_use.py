"""Measure the CPU time of the machine, of this run and of other processes."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil


def processes_of_run(own: Callable[[], Iterable[psutil.Process]]) -> list[psutil.Process]:
    """Return this process, its children, and the other processes of the run.

    Args:
        own: Returns the processes of the run, besides this process and its children.
    """
    this = psutil.Process()
    return [this, *this.children(recursive=True), *own()]


@dataclass(frozen=True)
class CpuUse:
    """The CPU seconds of the machine, of this run, and of each process, at one point in time."""

    at: float
    busy: float
    run_seconds: dict[int, float]
    each: dict[int, tuple[str, float]]

    @classmethod
    def take(cls, own: Callable[[], Iterable[psutil.Process]]) -> "CpuUse":
        """Return the CPU seconds since the machine was started.

        Args:
            own: Returns the processes of the run, besides this process and its children.
        """
        times = psutil.cpu_times()
        # The time `guest` is already contained in `user`. Time stolen by the hypervisor also counts
        # as used by others.
        names = ("user", "nice", "system", "irq", "softirq", "steal")
        busy = sum(float(getattr(times, name, 0.0)) for name in names)
        each: dict[int, tuple[str, float]] = {}
        for process in psutil.process_iter(["name", "cpu_times"]):
            if (used := process.info["cpu_times"]) is not None:
                each[process.pid] = (str(process.info["name"]), used.user + used.system)
        this = psutil.Process().cpu_times()
        run_seconds = {p.pid: each[p.pid][1] for p in processes_of_run(own) if p.pid in each}
        run_seconds[-1] = this.children_user + this.children_system  # children that have ended
        return cls(time.monotonic(), busy, run_seconds, each)

    def seconds_of(self, pids: Iterable[int]) -> float:
        """Return the sum of the CPU seconds of some processes.

        Args:
            pids: The processes. One that did not exist at this time counts as 0 s.
        """
        return sum(self.each[pid][1] for pid in pids if pid in self.each)

    def since(self, before: "CpuUse") -> tuple[float, list[str]]:
        """Return the share of the CPU that other processes used, and the busiest of them.

        Args:
            before: The use at the beginning of the interval.
        """
        elapsed = max(self.at - before.at, 1e-3)
        cores = psutil.cpu_count() or 1
        run = sum(used - before.run_seconds.get(pid, 0.0) for pid, used in self.run_seconds.items())
        other = max(0.0, self.busy - before.busy - run)
        busiest = sorted(
            (
                ((used - before.each[pid][1]) / elapsed, name, pid)
                for pid, (name, used) in self.each.items()
                if pid in before.each and pid not in self.run_seconds
            ),
            reverse=True,
        )
        lines = [f"{name} ({pid}): {share:.0%}" for share, name, pid in busiest[:3] if share > 0.05]
        return min(other / elapsed / cores, 1.0), lines
