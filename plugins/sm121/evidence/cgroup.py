"""The memory counters of a control group, which show whether its limit killed a process."""

from collections.abc import Mapping
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def memory_events() -> dict[str, int] | str:
    """Counters of this process's memory control group (version 2), or why there are none."""
    try:
        groups = Path("/proc/self/cgroup").read_text("ascii", "replace").splitlines()
        group = next((line.removeprefix("0::/") for line in groups if line.startswith("0::")), "")
        text = (_ROOT / group / "memory.events").read_text("ascii", "replace")
    except OSError as error:
        return f"no control group is known: {error}"
    return {name: int(value) for name, _, value in (x.partition(" ") for x in text.splitlines())}


def kills(before: Mapping[str, int] | str) -> int:
    """How many processes the limit of this process's group has killed since then."""
    now = memory_events()
    if isinstance(before, str) or isinstance(now, str):
        return 0
    return now.get("oom_kill", 0) - before.get("oom_kill", 0)
