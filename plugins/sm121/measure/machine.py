"""Which machine this is: what two stored results must have in common to be compared."""

import functools
import platform
from pathlib import Path
from typing import Any

from sm121.core import data_file
from sm121.evidence import environment

#: What an update or a setting changes of the same machine.
STATE = ("driver", "gpu_clocks", "gpu_power_limit_w")


@functools.cache
def _identity() -> tuple[tuple[str, Any], ...]:
    host, (gpus, driver) = environment.host(), environment.gpus({})
    first = gpus[0] if gpus else None
    return (
        ("cpu_model", host.cpu_model),
        ("cores_logical", host.cores_logical),
        # A few MiB of reserved memory differ between kernels: whole GiB identify.
        ("memory_gib", round(host.memory_bytes / 2**30) if host.memory_bytes else None),
        ("gpu", first.name if first else None),
        ("gpus", len(gpus) if gpus is not None else None),
        ("driver", driver),
        ("gpu_clocks", first.clocks if first else None),
        ("gpu_power_limit_w", first.power_limit_w if first else None),
    )


def identity(attached_to: str | None = None) -> dict[str, Any]:
    """What identifies the machine whose numbers these are. `attached_to`: where an attached server
    listens. Of a remote machine nothing else is known."""
    return {**dict(_identity()), "attached_to": attached_to}


class _Fault(data_file.DataTable):
    id: str
    arch: tuple[str, ...]
    regex: data_file.Regex
    message: str
    remedy: str
    source: str


def faults(arch: str, system: str | None = None) -> list[str]:
    """What is known against Linux and the driver of this machine, or of another ("Linux RELEASE,
    driver VERSION"), for a GPU of that architecture: a line each, of fixtures/machines.toml."""
    system = system or f"Linux {platform.release()}, driver {identity()['driver']}"
    rows = data_file.load_key("machines.toml", "fault", tuple[_Fault, ...])
    return [
        f"{match[0]}: {row.message}; {row.remedy} ({row.source})"
        for row in rows
        if arch in row.arch and (match := row.regex.search(system))
    ]


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What tells two machines apart, a phrase each."""
    return [
        f"{name} {one.get(name)!r} and {other.get(name)!r}"
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name)
    ]


def own_memory_gib() -> float:
    """Of this process, without the pages of files, which others may have back."""
    status = Path("/proc/self/status").read_text("utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) / 2**20
