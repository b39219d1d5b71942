"""Autotune tactics, each in a process of its own: one that crashes takes nothing else along.

A provider lists them with `tactics(operation)` and gives itself with one of them by
`with_tactic(tactic)`. Run as a module, this judges one: PROVIDER GROUP CASE TACTIC.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

from sm121.core.verdict import NotRun
from sm121.kernels import cases, registry
from sm121.kernels.cases import Case
from sm121.kernels.protocol import Operation, declaration

_LIMIT_S = 180.0
_GROUP = "tactics"
_OPERATION: Operation = "fused_moe"


def check(name: str, provider: Any, case: Case, limit_s: float = _LIMIT_S) -> list[str]:
    """What is wrong with any tactic on a case of the group `tactics`. Raises NotRun when the
    provider lists none."""
    declared = declaration(provider)
    listed = getattr(provider, "tactics", None)
    found = tuple(listed(_OPERATION)) if listed is not None else ()
    if not found:
        raise NotRun(f"provider {declared.name} lists no autotune tactics of {_OPERATION}")
    wrong = []
    for tactic in found:
        wrong += [f"tactic {tactic}: {line}" for line in _apart(name, case, tactic, limit_s)]
    return wrong


def _apart(name: str, case: Case, tactic: str, limit_s: float) -> list[str]:
    command = [sys.executable, "-m", "sm121.kernels.tactics", name, str(case), tactic]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return [f"required: an end within {limit_s:g} s, seen: none"]
    if done.returncode:
        by = signal.Signals(-done.returncode).name if done.returncode < 0 else done.returncode
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return [f"required: a result, seen: the process ended with {by}: {last[:300]}"]
    try:
        lines: list[str] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return [f"required: a result, seen: the process ended with 0 and {done.stdout[-200:]!r}"]
    return lines


def main(arguments: list[str]) -> int:
    """Judge one tactic; a JSON list of what is wrong is the last line written."""
    from sm121.kernels import checks, problems

    name, wanted, tactic = arguments
    (case,) = (case for case in cases.GROUPS[_GROUP] if str(case) == wanted)
    fixed = registry.load(name).with_tactic(tactic)
    sys.stdout.write(json.dumps(checks.check(fixed, problems.build(case))) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
