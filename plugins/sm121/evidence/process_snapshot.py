"""A process tree at one moment, in words and numbers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from sm121.core.redaction import redact_arguments


def snapshot(processes: Iterable[psutil.Process]) -> list[dict[str, Any]]:
    """What each process is and does, with its dead children; those that end are left out."""
    by_pid: dict[int, dict[str, Any]] = {}
    for process in processes:
        try:
            for each in (process, *process.children()):
                if each.pid not in by_pid:
                    by_pid[each.pid] = _one(each)
        except psutil.NoSuchProcess:
            continue
    return [by_pid[pid] for pid in sorted(by_pid)]


def _one(process: psutil.Process) -> dict[str, Any]:
    entry: dict[str, Any] = {"pid": process.pid, "parent": process.ppid(), "name": process.name()}
    entry["status"] = process.status()
    try:
        with process.oneshot():
            entry["command"] = " ".join(redact_arguments(process.cmdline())).strip()[:400]
            entry["threads"] = process.num_threads()
            entry["rss_bytes"] = process.memory_info().rss
            entry["cpu_s"] = round(sum(process.cpu_times()[:2]), 2)  # of the user, of the system
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
    """For people."""
    lines = [f"{'pid':>8} {'parent':>8} {'status':<12} {'rss MiB':>9} {'cpu s':>8}  name, command"]
    for entry in entries:
        rss = entry.get("rss_bytes")
        lines.append(
            f"{entry['pid']:>8} {entry['parent']:>8} {entry['status']:<12} "
            f"{'-' if rss is None else f'{rss / 2**20:.0f}':>9} {entry.get('cpu_s', '-'):>8}  "
            f"{entry['name']}: {entry.get('command', '')}"
        )
    return "\n".join(lines) + "\n"
