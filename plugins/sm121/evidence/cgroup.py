"""The memory counters of a control group, which show whether its limit killed a process."""

from collections.abc import Mapping
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def memory_events(pid: int | str = "self") -> dict[str, int] | str:
    """Counters of a process's memory control group (version 2's memory.events, or what version 1
    has of it), or why there are none."""
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text("ascii", "replace").splitlines()
    except OSError as error:
        return f"no control group is known: {error}"
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            events = _ROOT / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            events = _ROOT / "memory" / path.lstrip("/") / "memory.oom_control"
            if not events.is_file():  # in a container its own group is mounted at the root
                events = _ROOT / "memory" / "memory.oom_control"
        else:
            continue
        if events.is_file():
            return _read(events)
    return "no memory controller is mounted"


def kills(before: Mapping[str, int] | str) -> int:
    """How many processes the limit of this process's group has killed since then."""
    now = memory_events()
    if isinstance(before, str) or isinstance(now, str):
        return 0
    return now.get("oom_kill", 0) - before.get("oom_kill", 0)


def _read(file: Path) -> dict[str, int] | str:
    try:
        lines = file.read_text("ascii", "replace").splitlines()
    except OSError as error:
        return f"{file}: {error}"
    pairs = (line.partition(" ")[::2] for line in lines)
    events = {name: int(value) for name, value in pairs if value.isdecimal()}
    failures = file.with_name("memory.failcnt")
    if failures.is_file():
        events["failcnt"] = int(failures.read_text("ascii"))
    return events
