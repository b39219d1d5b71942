"""The memory counters of a control group, which show whether its limit killed a process."""

from collections.abc import Iterator, Mapping
from pathlib import Path

#: The folder in which Linux mounts the control groups.
_ROOT = Path("/sys/fs/cgroup")


def memory_events() -> dict[str, int] | str:
    """Read the counters of this process's memory control group, of version 2 or 1.

    Returns:
        The counters by name, or the reason why none could be read.
    """
    try:
        groups = Path("/proc/self/cgroup").read_text("ascii", "replace").splitlines()
        for file in _files(groups):
            if file.is_file():
                return _read_counters(file)
    except OSError as error:
        return f"no control group is known: {error}"
    return "no memory controller is mounted"


def _read_counters(file: Path) -> dict[str, int]:
    events: dict[str, int] = {}
    for line in file.read_text("ascii", "replace").splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal():
            events[name] = int(value)
    failures = file.with_name("memory.failcnt")
    if failures.is_file():
        events["failcnt"] = int(failures.read_text("ascii"))
    return events


def _files(groups: list[str]) -> Iterator[Path]:
    """Yield the files that may have the counters, given the lines of /proc/self/cgroup."""
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield _ROOT / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield _ROOT / "memory" / path.lstrip("/") / "memory.oom_control"
            yield _ROOT / "memory" / "memory.oom_control"  # the container's own group


def kills(before: Mapping[str, int] | str) -> int:
    """Return how many processes were killed by the memory limit of this process's control group.

    Args:
        before: An earlier result of `memory_events`.

    Returns:
        The number of kills since that result; 0 without counters.
    """
    now = memory_events()
    if isinstance(before, str) or isinstance(now, str):
        return 0
    return now.get("oom_kill", 0) - before.get("oom_kill", 0)
