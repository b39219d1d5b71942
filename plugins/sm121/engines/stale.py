"""Servers of runs that are dead: found by the owner in their environment, and only then ended.

A server's supervisor ends it when the suite dies, so that one is left only where the supervisor was
killed too.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from sm121.engines.process_tree import RUN_ID, SERVER_ID, Survivor, describe, end

#: Who started a server: pid and start time of the suite's process.
OWNER = "SM121_OWNER"


def owner() -> str:
    """This process, as an owner."""
    return f"{os.getpid()}:{psutil.Process().create_time():.2f}"


def find() -> dict[str, list[psutil.Process]]:
    """Processes of servers whose owner is dead, by run id."""
    found: dict[str, list[psutil.Process]] = {}
    here = _pid_namespace(os.getpid())
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            if SERVER_ID not in variables or OWNER not in variables:
                continue
            # Of another container, the owner's pid would be somebody else's here.
            if _pid_namespace(process.pid) != here or _lives(variables[OWNER]):
                continue
            run = variables.get(RUN_ID, "")
            mine = found.setdefault(run, [])
            for each in (process, *process.children(recursive=True)):
                if each not in mine:
                    mine.append(each)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found


def remove() -> list[tuple[str, list[Survivor]]]:
    """End what `find` finds; what it was, by run id."""
    removed = []
    for run, processes in find().items():
        removed.append((run, describe(processes)))

        def remaining(own: list[psutil.Process] = processes) -> list[psutil.Process]:
            return [each for each in own if _is_alive(each)]

        end(remaining, polite_s=5.0)
    return removed


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _lives(text: str) -> bool:
    pid, _, created = text.partition(":")
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(created)) < 1.0
    except (psutil.NoSuchProcess, ValueError):
        return False


def _pid_namespace(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/pid").readlink())
