"""Describe a process tree at one point in time."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from sm121.core.redaction import redact_arguments

#: The length to which command lines are truncated, in characters.
_LONGEST_COMMAND = 400


def snapshot(processes: Iterable[psutil.Process]) -> list[dict[str, Any]]:
    """Describe processes and their children, including zombies.

    Args:
        processes: The processes. Processes that end in the meantime are left out.

    Returns:
        An entry for each process, sorted by pid: its pid, parent, name and status and, if they can
        be read, its command, threads, memory (bytes), CPU time (seconds) and handles.
    """
    by_pid: dict[int, dict[str, Any]] = {}
    for process in processes:
        try:
            for member in (process, *process.children()):
                if member.pid not in by_pid:
                    by_pid[member.pid] = _describe(member)
        except psutil.NoSuchProcess:
            continue
    return [by_pid[pid] for pid in sorted(by_pid)]


def _describe(process: psutil.Process) -> dict[str, Any]:
    entry: dict[str, Any] = {"pid": process.pid, "parent": process.ppid(), "name": process.name()}
    entry["status"] = process.status()
    try:
        with process.oneshot():
            command = " ".join(redact_arguments(process.cmdline())).strip()
            entry["command"] = command[:_LONGEST_COMMAND]
            entry["threads"] = process.num_threads()
            entry["rss_bytes"] = process.memory_info().rss
            times = process.cpu_times()
            entry["cpu_s"] = round(times.user + times.system, 2)
            entry["handles"] = process.num_fds()
    except (psutil.ZombieProcess, psutil.AccessDenied) as error:
        entry["not_known"] = type(error).__name__
    waits = Path(f"/proc/{process.pid}/wchan")
    try:
        entry["waits_in"] = waits.read_text("ascii", "replace").strip("\0\n") or None
    except OSError:
        entry["waits_in"] = None
    return entry


def table(entries: list[dict[str, Any]]) -> str:
    """Format a snapshot as a table of text.

    Args:
        entries: The result of `snapshot`.

    Returns:
        A heading and a line for each process.
    """
    lines = [f"{'pid':>8} {'parent':>8} {'status':<12} {'rss MiB':>9} {'cpu s':>8}  name, command"]
    for entry in entries:
        rss_mib = "-"
        if entry.get("rss_bytes") is not None:
            rss_mib = f"{entry['rss_bytes'] / 2**20:.0f}"
        lines.append(
            f"{entry['pid']:>8} {entry['parent']:>8} {entry['status']:<12} "
            f"{rss_mib:>9} {entry.get('cpu_s', '-'):>8}  "
            f"{entry['name']}: {entry.get('command', '')}"
        )
    return "\n".join(lines) + "\n"
