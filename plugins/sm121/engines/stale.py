"""Servers of runs that are dead: found by the owner in their environment, and only then ended. A
server's supervisor ends it when the suite dies, so that one is left only where the supervisor was
killed too. A process that sets its title, as vLLM's engine core does, has overwritten what the
kernel shows of its environment; its output still goes to the server's log, and beside that lies who
started the server."""

import contextlib
import json
import os
import re
from pathlib import Path

import psutil

from sm121.core.waiting import until
from sm121.engines.process_tree import (
    RUN_ID,
    SERVER_ID,
    Survivor,
    began,
    describe,
    end,
    has_ended,
)

#: Who started a server: pid and start time of the suite's process, and the boot it was in.
#: Earlier versions of the suite wrote otherwise, to SM121_OWNER: neither ends the servers of the
#: other.
OWNER = "SM121_STARTED_BY"
_SUPERVISOR = "sm121.engines.supervisor"
_SUPERVISED_WITHIN_S = 25.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def owner() -> str:
    """This process, as an owner."""
    return identity(os.getpid())


def identity(pid: int) -> str:
    """A name of a process that no other process ever gets: ``pid:ticks:boot``. Raises
    FileNotFoundError: there is no such process."""
    return f"{pid}:{began(pid)}:{_BOOT.read_text('ascii').strip()}"


def find() -> dict[str, list[psutil.Process]]:
    """Processes of servers whose owner is dead, by run id."""
    by_run: dict[str, list[psutil.Process]] = {}
    namespace = _pid_namespace(os.getpid())
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            if SERVER_ID not in variables or OWNER not in variables:
                variables = _written_beside_the_log(process)
            # In another container the same pid is another process.
            if (
                OWNER not in variables
                or _pid_namespace(process.pid) != namespace
                or _lives(variables[OWNER])
            ):
                continue
            run = variables.get(RUN_ID, "")
            mine = by_run.setdefault(run, [])
            for each in (process, *process.children(recursive=True)):
                if each not in mine:
                    mine.append(each)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return by_run


def _written_beside_the_log(process: psutil.Process) -> dict[str, str]:
    """Owner and run of a process of a server's session whose output goes to that server's log, as
    the supervisor wrote them down; nothing of any other process."""
    log = Path(f"/proc/{process.pid}/fd/1").readlink()
    start = re.fullmatch(r"(server-.+?)(?:-\d+)?\.log", log.name)
    if start is None or process.uids().real != os.getuid():
        return {}
    for name in (log.stem, start[1]):  # a later start of a configuration has a log of its own
        try:
            status = json.loads((log.parent / f"{name}.status.json").read_text("utf-8"))
            if status["pid"] == os.getsid(process.pid):
                return {OWNER: str(status["started_by"]), RUN_ID: str(status["run"])}
        except (OSError, ValueError, KeyError, TypeError):
            continue  # no status of ours, or one of an earlier version of the suite
    return {}


def remove() -> list[tuple[str, list[Survivor]]]:
    """End what `find` finds; what it was, by run id. A supervisor that lives is given time to write
    down what happened, and to end its server itself."""
    until(lambda: not any(map(_is_supervised, find().values())), _SUPERVISED_WITHIN_S, every_s=0.5)
    removed = []
    for run, processes in find().items():
        removed.append((run, describe(processes)))

        def remaining(own: list[psutil.Process] = processes) -> list[psutil.Process]:
            return [each for each in own if not has_ended(each)]

        end(remaining, polite_s=5.0)
    return removed


def _is_supervised(processes: list[psutil.Process]) -> bool:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if _SUPERVISOR in process.cmdline():
                return True
    return False


def _lives(text: str) -> bool:
    pid = text.partition(":")[0]
    if not pid.isdecimal():
        return True  # not written by the suite: its owner is not known to be dead
    try:
        now = identity(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return now == text


def _pid_namespace(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/pid").readlink())
