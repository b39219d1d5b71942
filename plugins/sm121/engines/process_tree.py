"""Find, describe and end all processes of a server.

The processes are found in three ways, because each way misses some:

- By a marker in the environment, which survives reparenting. This misses processes that set their
  title (vLLM's engine core and workers do so with setproctitle), because that overwrites the memory
  from which the kernel reads the environment.
- By session. This misses a child that begins its own session.
- By descent. This misses the children of a dead parent, unless one of their ancestors is a
  subreaper.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from sm121.core.waiting import until

#: ``PR_SET_CHILD_SUBREAPER`` of linux/prctl.h.
_PR_SET_CHILD_SUBREAPER = 36
#: The field ``starttime`` of /proc/PID/stat (proc(5)), counted from the field after the name.
_START = 19

#: The variable with the id of the run, in the environment of all started processes.
RUN_ID = "SM121_RUN_ID"
#: The variable with the id of a started server.
SERVER_ID = "SM121_SERVER_ID"
#: The variable with the `identity` of the suite's process that started a server.
OWNER = "SM121_STARTED_BY"
#: The file with the id of the boot, which changes with each boot.
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LONGEST_COMMAND = 160


@dataclass(frozen=True)
class Survivor:
    """A process that should have ended."""

    pid: int
    #: The status in psutil's words, for example running, sleeping or zombie.
    status: str
    #: The command line, truncated.
    command: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.status}) {self.command}"


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Return the other living processes whose environment has a variable with the given value.

    Args:
        variable: The name of the variable.
        value: The value that the variable must have.
    """
    processes = []
    for process in psutil.process_iter(["environ"]):
        # The environment is None if the process is a zombie, or belongs to another user.
        environment = process.info["environ"] or {}
        if process.pid != os.getpid() and environment.get(variable) == value:
            processes.append(process)
    return processes


def tree(
    variable: str, value: str, *, root: int | None = None, session: int | None = None
) -> list[psutil.Process]:
    """Return the living processes of a server, without zombies.

    Args:
        variable: The variable that marks the server's processes.
        value: The value of that variable.
        root: The pid of the supervisor. The result includes the supervisor and all its descendants.
        session: The session of the server's main process. The result includes all processes of it.
    """
    members = {process.pid: process for process in marked(variable, value)}
    if root is not None:
        # If the root process has ended, the searches by variable and by session find its
        # descendants.
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(root)
            descendants = top.children(recursive=True)
            for process in (top, *descendants):
                members[process.pid] = process
    if session is not None:
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if process.pid != os.getpid() and os.getsid(process.pid) == session:
                    members[process.pid] = process
    return [process for process in members.values() if not has_ended(process)]


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process no longer exists or is a zombie.

    Args:
        process: The process.
    """
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def describe(processes: Iterable[psutil.Process]) -> list[Survivor]:
    """Describe processes for a report. Processes that have ended meanwhile are left out.

    Args:
        processes: The processes.
    """
    survivors = []
    for process in processes:
        try:
            command = " ".join(process.cmdline()) or process.name()
            survivors.append(Survivor(process.pid, process.status(), command[:_LONGEST_COMMAND]))
        except psutil.ZombieProcess:  # a zombie has no command line, but is described as well
            survivors.append(Survivor(process.pid, psutil.STATUS_ZOMBIE, "(zombie)"))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return survivors


def start_ticks(pid: int) -> int:
    """Return the start time of a process in ticks since boot, which clock changes do not affect.

    Args:
        pid: The process.

    Raises:
        OSError: The process does not exist.
    """
    text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    return int(text.rpartition(")")[2].split()[_START])


def identity(pid: int) -> str:
    """Return a unique name of a process: ``pid:ticks:boot``.

    Args:
        pid: The process.

    Raises:
        FileNotFoundError: There is no such process.
    """
    return f"{pid}:{start_ticks(pid)}:{_BOOT.read_text('ascii').strip()}"


def owner() -> str:
    """Return the `identity` of this process."""
    return identity(os.getpid())


def pid_of(identity: str) -> int | None:
    """Return the pid in an `identity`; None if the text is not an identity.

    Args:
        identity: The identity, or the value of `OWNER` in some environment.
    """
    pid = identity.partition(":")[0]
    return int(pid) if pid.isdecimal() else None


def become_subreaper() -> None:
    """Make this process a child subreaper: the new parent of its orphaned descendants (prctl(2)).

    This process can then reap them even if process 1 of the container does not.

    Raises:
        OSError: The kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


def reap(pids: Iterable[int]) -> None:
    """Reap child processes of this process that have ended.

    Args:
        pids: The processes.
    """
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue  # not a child of this process, or already collected


def end(find: Callable[[], list[psutil.Process]], *, polite_s: float, firm_s: float = 5.0) -> int:
    """Send SIGTERM to processes, and SIGKILL to those that are left later.

    Args:
        find: Returns the processes. It is called before each signal, because processes that are
            being ended may still start others.
        polite_s: Seconds between the two signals.
        firm_s: For how many seconds SIGKILL is repeated.

    Returns:
        The number of processes that got a SIGKILL.
    """
    send(find(), signal.SIGTERM)
    if until(lambda: not find(), polite_s, every_s=0.05):
        return 0
    killed: set[int] = set()
    deadline = time.monotonic() + firm_s
    while (remaining := find()) and time.monotonic() < deadline:
        send(remaining, signal.SIGKILL)
        killed.update(process.pid for process in remaining)
        time.sleep(0.05)
    return len(killed)


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each process that still lives.

    Args:
        processes: The processes.
        number: The signal.
    """
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
