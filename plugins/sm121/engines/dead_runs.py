"""Servers that dead runs of the suite left behind: find them, and end them.

The environment of each server process names the process of the suite that started it (the owner). A
server belongs to a dead run if its owner is dead. A server's supervisor ends the server when the
suite dies, so a server is left only if its supervisor was killed too. If a server process has
overwritten its environment, the owner is read from the supervisor's status file, which is beside
the log to which the process writes.
"""

import contextlib
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from sm121.core.waiting import until
from sm121.engines.process_tree import (
    OWNER,
    RUN_ID,
    SERVER_ID,
    Survivor,
    describe,
    end,
    has_ended,
    identity,
    pid_of,
)
from sm121.engines.supervision import status_file_of

_SUPERVISOR = "sm121.engines.supervisor"
#: If a supervisor of a dead run still runs, it gets this many seconds to end its server itself.
_SUPERVISED_WITHIN_S = 25.0
#: Seconds between SIGTERM and SIGKILL.
_POLITE_S = 5.0


@dataclass(frozen=True)
class EndedRun:
    """The servers of one dead run, which were ended."""

    #: The id of the run; empty if it is not known.
    run: str
    #: Descriptions of the processes, made before they were ended.
    processes: list[Survivor]


def of_dead_runs() -> dict[str, list[psutil.Process]]:
    """Return the server processes whose owner is dead, grouped by the id of their run."""
    by_run: dict[str, list[psutil.Process]] = {}
    namespace = _pid_namespace(os.getpid())
    for process in psutil.process_iter():
        try:
            variables = _marks(process)
            if OWNER not in variables:
                continue
            # In another container the same pid is another process.
            if _pid_namespace(process.pid) != namespace or _lives(variables[OWNER]):
                continue
            found = by_run.setdefault(variables.get(RUN_ID, ""), [])
            for member in (process, *process.children(recursive=True)):
                if member not in found:
                    found.append(member)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return by_run


def end_dead_runs() -> list[EndedRun]:
    """End the processes that `of_dead_runs` finds.

    A living supervisor first gets time to record what happened, and to end its server itself.

    Returns:
        One entry for each dead run.
    """
    until(lambda: not _has_supervisor(), _SUPERVISED_WITHIN_S, every_s=0.5)
    ended = []
    for run, processes in of_dead_runs().items():
        ended.append(EndedRun(run, describe(processes)))

        def remaining(own: list[psutil.Process] = processes) -> list[psutil.Process]:
            return [process for process in own if not has_ended(process)]

        end(remaining, polite_s=_POLITE_S)
    return ended


def _has_supervisor() -> bool:
    """Return whether a supervisor is among the processes of dead runs."""
    for process in itertools.chain.from_iterable(of_dead_runs().values()):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if _SUPERVISOR in process.cmdline():
                return True
    return False


def _marks(process: psutil.Process) -> dict[str, str]:
    """Return the environment variables of a process.

    If the process has overwritten its environment, return only its owner and its run, which are
    read from the supervisor's status file.
    """
    variables = process.environ()
    if SERVER_ID in variables and OWNER in variables:
        return variables
    return _marks_beside_the_log(process)


def _marks_beside_the_log(process: psutil.Process) -> dict[str, str]:
    """Return owner and run of a server's process from the status file of the supervisor.

    The result is empty if the process does not write to a server's log, or does not belong to the
    session of that server.
    """
    log = Path(f"/proc/{process.pid}/fd/1").readlink()
    if log.suffix != ".log" or process.uids().real != os.getuid():
        return {}
    try:
        status = json.loads(status_file_of(log).read_text("utf-8"))
        if status["pid"] != os.getsid(process.pid):
            return {}  # the log of a server that ended long ago
        return {OWNER: str(status["started_by"]), RUN_ID: str(status["run"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # no status file of the suite, or one of an earlier version


def _lives(owner: str) -> bool:
    """Return False if the owner of a server is known to be dead, else True."""
    pid = pid_of(owner)
    if pid is None:
        return True  # not written by the suite
    try:
        return identity(pid) == owner
    except (FileNotFoundError, ProcessLookupError):
        return False


def _pid_namespace(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/pid").readlink())
