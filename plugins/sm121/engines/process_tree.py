"""All processes of a server, found in three ways of which each has a hole.

By a marker in the environment, as mirakuru does: it outlives reparenting, but a process that sets
its title (vLLM's engine core and workers do, with setproctitle) overwrites the memory in which the
kernel looks for it. By session: lost when a child begins its own. By descent: lost when a parent
dies, unless a subreaper stands above it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

_PR_SET_CHILD_SUBREAPER = 36

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


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Living processes with ``variable=value`` in their environment, except this one."""
    return [
        process
        # None: a zombie, which has no environment, or another user's.
        for process in psutil.process_iter(["environ"])
        if process.pid != os.getpid() and (process.info["environ"] or {}).get(variable) == value
    ]


def tree(
    variable: str, value: str, *, root: int | None = None, session: int | None = None
) -> list[psutil.Process]:
    """Living processes of a server, zombies left out, by marker, descent and session.

    Args:
        variable, value: the marker.
        root: the supervisor, if it lives: itself and what descends from it.
        session: session id of the server's main process.
    """
    found = {process.pid: process for process in marked(variable, value)}
    if root is not None:
        try:
            top = psutil.Process(root)
            found.update({process.pid: process for process in [top, *top.children(recursive=True)]})
        except psutil.NoSuchProcess:
            root = None  # it has ended: what came from it is found in the other two ways
    if session is not None:
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if process.pid != os.getpid() and os.getsid(process.pid) == session:
                    found[process.pid] = process
    return [process for process in found.values() if not has_ended(process)]


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or a zombie."""
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def describe(processes: Iterable[psutil.Process]) -> list[Survivor]:
    """The processes in words, those that ended meanwhile left out."""
    survivors = []
    for process in processes:
        try:
            command = " ".join(process.cmdline()) or process.name()
            survivors.append(Survivor(process.pid, process.status(), command[:160]))
        except psutil.ZombieProcess:  # has no command line, and is what we are looking for
            survivors.append(Survivor(process.pid, psutil.STATUS_ZOMBIE, "(zombie)"))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return survivors


def become_subreaper() -> None:
    """Make this process the new parent of orphans among its descendants (prctl(2)), so that they
    can be reaped also where process 1 of a container reaps nothing.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


def reap(pids: Iterable[int]) -> None:
    """Collect those of the processes that have ended and are our children."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue  # somebody else's child, or collected already


def end(find: Callable[[], list[psutil.Process]], *, polite_s: float, firm_s: float = 5.0) -> int:
    """SIGTERM to what ``find`` returns, SIGKILL after ``polite_s``; number of processes killed.

    ``find`` is asked again each time, since a dying tree may still start processes.
    """
    send(find(), signal.SIGTERM)
    deadline = time.monotonic() + polite_s
    while time.monotonic() < deadline:
        if not find():
            return 0
        time.sleep(0.05)
    killed: set[int] = set()
    deadline = time.monotonic() + firm_s
    while (remaining := find()) and time.monotonic() < deadline:
        send(remaining, signal.SIGKILL)
        killed.update(process.pid for process in remaining)
        time.sleep(0.05)
    return len(killed)


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each of the processes that still lives."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
