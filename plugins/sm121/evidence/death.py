"""The cause of an abnormal end from everything that is known: the log, exit codes, the kernel, the
control group. A log alone cannot tell the OOM killer from anybody else's SIGKILL."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from sm121.evidence.failure import Cause, classify_lines
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
    """The cause, better than the log's where something else says more.

    Args:
        logged: from the log and the main process's exit status.
        exits: how processes of the tree ended (pid, name, status).
        kernel: messages since the start.
        kills: OOM kills of the control group since then.
        pids: of the tree.
    """
    named = kernel.killed(pids)
    if named:
        found = classify_lines(named)
        return found.model_copy(update={"lines": [*named[:4], *logged.lines[:4]]})
    if xids := [line for line in kernel.lines if "NVRM: Xid" in line]:
        found = classify_lines(xids)
        return found.model_copy(update={"lines": [*xids[:4], *logged.lines[:4]]})
    ended = [entry for entry in exits if (entry.get("status") or 0) < 0]
    killed = [entry for entry in ended if entry["status"] == -signal.SIGKILL]
    guessed = logged.kind == "oom" and "no cause in the log" in logged.summary
    if kills > 0 and (killed or guessed):
        return Cause(
            kind="oom",
            summary=f"the control group killed a process of the server ({kills} OOM kills)",
            owner="host memory: the limit of the control group (the container's --memory)",
            remedy="raise the limit, or lower the engine's memory settings",
            lines=logged.lines,
        )
    if (killed and (logged.kind in VAGUE or guessed)) or (guessed and not kernel.unavailable):
        who = ", ".join(f"{e.get('name') or 'process'} ({e['pid']})" for e in killed)
        checked = (
            f"the kernel's log cannot be read ({kernel.unavailable}), so that this may have been "
            "the OOM killer"
            if kernel.unavailable
            else "neither the kernel's log nor the control group shows an OOM kill"
        )
        return Cause(
            kind="killed",
            summary=f"{who or 'the server'} was killed by SIGKILL; {checked}",
            owner="whoever sent SIGKILL (an operator, a container's stop, a watchdog)",
            remedy="look for who did: systemd-oomd, earlyoom, docker stop, a scheduler's limit",
            lines=logged.lines,
        )
    silent = [entry for entry in exits if entry.get("status") is None]
    if "something outside ended the process" in logged.summary and not ended:
        who = ", ".join(f"{e.get('name') or 'process'} ({e['pid']})" for e in silent)
        return Cause(
            kind="killed",
            summary=f"{who or 'a process of the engine'} ended without a word in the log, and its "
            "parent does not say how: most likely SIGKILL",
            owner="whoever sent SIGKILL (an operator, a container's stop, a watchdog)",
            remedy="look for who did: systemd-oomd, earlyoom, docker stop, a scheduler's limit",
            lines=logged.lines,
        )
    # SIGTERM is how helpers are sent home, also by an engine that is well.
    first = next((entry for entry in ended if entry["status"] != -signal.SIGTERM), None)
    if first is not None and logged.kind in VAGUE:
        name = signal.Signals(-first["status"]).name
        who = f"{first.get('name') or 'process'} ({first['pid']})"
        return logged.model_copy(
            update={
                "kind": "engine_dead",
                "summary": f"{who} was ended by {name}; {logged.summary}",
            }
        )
    return logged
