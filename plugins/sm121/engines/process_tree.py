"""Processes that carry a marker in their environment, wherever they have been reparented to.

The idea is mirakuru's: a process group or a parent link is lost when a child daemonises or its
parent dies, while the environment that it was started with stays readable in /proc.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

#: One per run of the suite, in the environment of everything that it starts.
RUN_ID = "SM121_RUN_ID"
#: One per server that is started.
SERVER_ID = "SM121_SERVER_ID"


@dataclass(frozen=True)
class Survivor:
    """A process that should be gone."""

    pid: int
    status: str
    command: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.status}) {self.command}"


def marked(variable: str, value: str, *, besides: Iterable[int] = ()) -> list[psutil.Process]:
    """Living processes with ``variable=value`` in their environment, except those ``besides``."""
    excluded = {os.getpid(), *besides}
    found = []
    for process in psutil.process_iter():
        if process.pid in excluded:
            continue
        try:
            if process.environ().get(variable) == value:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile, a zombie (which has no environment), or another user's
    return found


def describe(processes: Iterable[psutil.Process]) -> list[Survivor]:
    """The processes in words, those that ended meanwhile left out."""
    survivors = []
    for process in processes:
        try:
            command = " ".join(process.cmdline()) or process.name()
            survivors.append(Survivor(process.pid, process.status(), command[:160]))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return survivors


def end(find: Callable[[], list[psutil.Process]], *, polite_s: float, firm_s: float = 5.0) -> int:
    """SIGTERM to what ``find`` returns, SIGKILL after ``polite_s``; number of processes killed.

    ``find`` is asked again each time, since a dying tree may still start processes.
    """
    _signal(find(), signal.SIGTERM)
    deadline = time.monotonic() + polite_s
    while time.monotonic() < deadline:
        if not find():
            return 0
        time.sleep(0.05)
    killed: set[int] = set()
    deadline = time.monotonic() + firm_s
    while (remaining := find()) and time.monotonic() < deadline:
        _signal(remaining, signal.SIGKILL)
        killed.update(process.pid for process in remaining)
        time.sleep(0.05)
    return len(killed)


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue
