"""The cause of an abnormal end from everything that is known: the log, exit codes, the kernel, the
control group. A log alone cannot tell the OOM killer from anybody else's SIGKILL."""

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from sm121.evidence.failure import Basis, Cause, classify_lines, ended
from sm121.evidence.kernel_messages import KernelMessages

#: Classes that only say that something died.
VAGUE = ("engine_dead", "unknown")


def cause_of(
    logged: Cause,
    *,
    exits: Sequence[Mapping[str, Any]],
    kernel: KernelMessages,
    kills: int,
    pids: set[int],
) -> Cause:
    """The cause, better than the log's (``logged``) where something else says more: how processes
    of the tree ended (pid, name, status; one that our own stop ended, by_us, is no cause), the
    kernel's messages and the control group's OOM kills since the start."""
    exits = [entry for entry in exits if not entry.get("by_us")]
    signalled = [entry for entry in exits if (entry.get("status") or 0) < 0]
    killed = [entry for entry in signalled if entry["status"] == -signal.SIGKILL]
    guessed = logged.basis is Basis.SIGKILL_ALONE
    vague = logged.kind in VAGUE and logged.basis is not Basis.FATAL_EXCEPTION
    unexplained = kernel.no_memory if vague or guessed or logged.basis is Basis.AFTERMATH else []
    if messages := kernel.killed(pids) or kernel.xids or unexplained:
        cause_by_messages = classify_lines(messages)
        return cause_by_messages.model_copy(update={"lines": [*messages[:4], *logged.lines[:4]]})
    if kills > 0 and (killed or guessed):
        return ended("group_killed", logged.lines, kills=kills)
    if (killed and (vague or guessed)) or (guessed and not kernel.unavailable):
        checked = (
            f"the kernel's log cannot be read ({kernel.unavailable}), so that this may have been "
            "the OOM killer"
            if kernel.unavailable
            else "neither the kernel's log nor the control group shows an OOM kill"
        )
        how = f"{_names(killed) or 'the server'} was killed by SIGKILL; {checked}"
        return ended("killed", logged.lines, how=how)
    silent = [entry for entry in exits if entry.get("status") is None]
    if logged.basis is Basis.AFTERMATH and not signalled:
        how = (
            f"{_names(silent) or 'a process of the engine'} ended without a word in the log, and "
            "its parent does not say how: most likely SIGKILL"
        )
        return ended("killed", logged.lines, how=how)
    # SIGTERM is how helpers are sent home, also by an engine that is well.
    first = next((entry for entry in signalled if entry["status"] != -signal.SIGTERM), None)
    if first is not None and vague:
        name = signal.Signals(-first["status"]).name
        summary = f"{_names([first])} was ended by {name}; {logged.summary}"
        return logged.model_copy(update={"kind": "engine_dead", "summary": summary})
    return logged


def _names(entries: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{entry.get('name') or 'process'} ({entry['pid']})" for entry in entries)
