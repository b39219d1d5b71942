"""The memory counters of a control group, which show whether its limit killed a process."""

from collections.abc import Iterator, Mapping
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def memory_events() -> dict[str, int] | str:
    """Counters of this process's memory control group (version 2 or 1), or why there are none."""
    try:
        groups = Path("/proc/self/cgroup").read_text("ascii", "replace").splitlines()
        file = next(filter(Path.is_file, _files(groups)), None)
        if file is None:
            return "no memory controller is mounted"
        pairs = [line.partition(" ") for line in file.read_text("ascii", "replace").splitlines()]
        events = {name: int(value) for name, _, value in pairs if value.isdecimal()}
        if (failures := file.with_name("memory.failcnt")).is_file():
            events["failcnt"] = int(failures.read_text("ascii"))
        return events
    except OSError as error:
        return f"no control group is known: {error}"


def _files(groups: list[str]) -> Iterator[Path]:
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield _ROOT / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield _ROOT / "memory" / path.lstrip("/") / "memory.oom_control"
            yield _ROOT / "memory" / "memory.oom_control"  # of a container's own group


def kills(before: Mapping[str, int] | str) -> int:
    """How many processes the limit of this process's group has killed since then."""
    now = memory_events()
    if isinstance(before, str) or isinstance(now, str):
        return 0
    return now.get("oom_kill", 0) - before.get("oom_kill", 0)
