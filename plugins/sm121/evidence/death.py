"""Find the cause of an abnormal end from the log, exit codes, kernel messages and control group.

The log alone cannot distinguish the OOM killer from another sender of SIGKILL.
"""

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from sm121.evidence.failure import Basis, Cause, classify_lines, ended
from sm121.evidence.kernel_messages import KernelMessages

#: The classes of causes that only state that a process ended.
VAGUE = ("engine_dead", "unknown")
#: The name prefixes of engines' own processes. As long as a server runs, none of these processes
#: ends.
OF_ENGINES = ("VLLM::", "sglang::")
#: The maximum number of kernel messages, and also of log lines, that a cause quotes.
_QUOTED = 4


def cause_of(
    logged: Cause,
    *,
    exits: Sequence[Mapping[str, Any]],
    kernel: KernelMessages,
    kills: int,
    pids: set[int],
) -> Cause:
    """Find the cause of an abnormal end.

    Args:
        logged: The cause that the log shows.
        exits: The pid, name and status of each process of the tree that has ended. A process with
            ``by_us`` was ended by the suite itself, so its end is not a cause.
        kernel: The messages of the Linux kernel since the server's start.
        kills: The number of OOM kills in the suite's control group since the server's start.
        pids: The pids of the tree.

    Returns:
        The most specific cause; `logged` if no other evidence is more specific.
    """
    exits = [entry for entry in exits if not entry.get("by_us")]
    signalled = [entry for entry in exits if (entry.get("status") or 0) < 0]
    killed = [entry for entry in signalled if entry["status"] == -signal.SIGKILL]
    guessed = logged.basis is Basis.SIGKILL_ALONE
    vague = logged.kind in VAGUE and logged.basis is not Basis.FATAL_EXCEPTION
    messages = kernel.killed(pids) or kernel.xids
    if not messages and (vague or guessed or logged.basis is Basis.AFTERMATH):
        messages = kernel.no_memory
    if messages:
        lines = [*messages[:_QUOTED], *logged.lines[:_QUOTED]]
        return classify_lines(messages).model_copy(update={"lines": lines})
    if kills > 0 and (killed or guessed):
        return ended("group_killed", logged.lines, kills=kills)
    if (killed and (vague or guessed)) or (guessed and not kernel.unavailable):
        checked = "neither the kernel's log nor the control group shows an OOM kill"
        if kernel.unavailable:
            checked = (
                f"the kernel's log cannot be read ({kernel.unavailable}), so that this may have "
                "been the OOM killer"
            )
        how = f"{_names(killed) or 'the server'} was killed by SIGKILL; {checked}"
        return ended("killed", logged.lines, how=how)
    silent = _ended_silently(exits)
    if logged.basis is Basis.AFTERMATH and not signalled:
        how = (
            f"{_names(silent) or 'a process of the engine'} ended without a message in the log, "
            "and its parent process does not report how: most likely by SIGKILL"
        )
        return ended("killed", logged.lines, how=how)
    # A healthy engine also ends its helper processes with SIGTERM.
    unexpected = [entry for entry in signalled if entry["status"] != -signal.SIGTERM]
    if unexpected and vague:
        first = unexpected[0]
        name = signal.Signals(-first["status"]).name
        summary = f"{_names([first])} was ended by {name}; {logged.summary}"
        return logged.model_copy(update={"kind": "engine_dead", "summary": summary})
    return logged


def _ended_silently(exits: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the processes whose exit status is unknown.

    The status of an engine's helper processes, for example compilers, is known only to the engine.
    If a process with an engine's name is among the processes, the helpers are left out.
    """
    silent = [entry for entry in exits if entry.get("status") is None]
    of_engines = [entry for entry in silent if str(entry.get("name")).startswith(OF_ENGINES)]
    return of_engines or silent


def _names(entries: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{entry.get('name') or 'process'} ({entry['pid']})" for entry in entries)
