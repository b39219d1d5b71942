"""The identity of a machine: what two stored results must have in common to be compared."""

import functools
import platform
from pathlib import Path
from typing import Any

from sm121.core import data_file
from sm121.evidence.host import read_gpus, read_host

#: Fields that an update or a setting changes on the same machine.
STATE = ("driver", "gpu_clocks", "gpu_power_limit_w")


@functools.cache
def _identity() -> tuple[tuple[str, Any], ...]:
    host = read_host()
    reading = read_gpus()
    gpus = reading.gpus
    first = gpus[0] if gpus else None
    return (
        ("cpu_model", host.cpu_model),
        ("cores_logical", host.cores_logical),
        # A few MiB of reserved memory differ between kernels: whole GiB identify.
        ("memory_gib", round(host.memory_bytes / 2**30) if host.memory_bytes else None),
        ("gpu", first.name if first else None),
        ("gpus", len(gpus) if gpus is not None else None),
        ("driver", reading.driver),
        ("gpu_clocks", first.clocks if first else None),
        ("gpu_power_limit_w", first.power_limit_w if first else None),
    )


def identity(attached_to: str | None = None) -> dict[str, Any]:
    """Return what identifies the machine of a result.

    Args:
        attached_to: The address of an attached server. Nothing else is known about a remote
            machine.
    """
    return {**dict(_identity()), "attached_to": attached_to}


class _Fault(data_file.DataTable):
    id: str
    arch: tuple[str, ...]
    regex: data_file.Regex
    message: str
    remedy: str
    source: str


def faults(arch: str, system: str | None = None) -> list[str]:
    """Return the known faults of a machine's Linux and driver (``fixtures/machines.toml``).

    Args:
        arch: The architecture of its GPU.
        system: ``Linux RELEASE, driver VERSION``; None for this machine.

    Returns:
        A line of each fault.
    """
    if system is None:
        system = f"Linux {platform.release()}, driver {identity()['driver']}"
    lines = []
    for row in data_file.load_key("machines.toml", "fault", tuple[_Fault, ...]):
        match = row.regex.search(system)
        if arch in row.arch and match:
            lines.append(f"{match[0]}: {row.message}; {row.remedy} ({row.source})")
    return lines


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the differences of two machines, one phrase each.

    Args:
        one: The identity of the first machine.
        other: The identity of the second one.
    """
    return [
        f"{name} {one.get(name)!r} and {other.get(name)!r}"
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name)
    ]


def own_memory_gib() -> float:
    """Return the anonymous memory of this process in GiB.

    Pages of files are not counted, since other processes may have them back.
    """
    status = Path("/proc/self/status").read_text("utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) / 2**20
