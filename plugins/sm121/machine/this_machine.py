"""The identity of a machine, which must be the same for two stored results to be comparable."""

import functools
import platform
from pathlib import Path
from typing import Any

from sm121.core import data_file
from sm121.evidence.host import read_gpus, read_host

#: The fields that updates or settings can change on the same machine.
STATE = ("driver", "gpu_clocks", "gpu_power_limit_w")


@functools.cache
def _identity() -> dict[str, Any]:
    """Return the identity of this machine, without the address of a server."""
    host = read_host()
    reading = read_gpus()
    fields: dict[str, Any] = {
        "cpu_model": host.cpu_model,
        "cores_logical": host.cores_logical,
        "memory_gib": None,
        "gpu": None,
        "gpus": None,
        "driver": reading.driver,
        "gpu_clocks": None,
        "gpu_power_limit_w": None,
    }
    if host.memory_bytes:
        # Rounded, because Linux kernels reserve slightly different amounts of memory.
        fields["memory_gib"] = round(host.memory_bytes / 2**30)
    if reading.gpus is not None:
        fields["gpus"] = len(reading.gpus)
    if reading.gpus:
        first = reading.gpus[0]
        fields["gpu"] = first.name
        fields["gpu_clocks"] = first.clocks
        fields["gpu_power_limit_w"] = first.power_limit_w
    return fields


def identity(attached_to: str | None = None) -> dict[str, Any]:
    """Return the identity of the machine of a result.

    Args:
        attached_to: The address of an attached server. Nothing else is known about a remote
            machine.
    """
    return {**_identity(), "attached_to": attached_to}


class _Fault(data_file.DataTable):
    id: str
    arch: tuple[str, ...]
    regex: data_file.Regex
    message: str
    remedy: str
    source: str


def faults(arch: str, system: str | None = None) -> list[str]:
    """Return the known faults of a machine's Linux kernel and driver (``fixtures/machines.toml``).

    Args:
        arch: The architecture of its GPU.
        system: ``Linux RELEASE, driver VERSION``; None for this machine.

    Returns:
        A line for each fault.
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
    """Return the differences between two machines, one phrase each.

    Args:
        one: The identity of the first machine.
        other: The identity of the second machine.
    """
    return [
        f"{name} {one.get(name)!r} and {other.get(name)!r}"
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name)
    ]


def own_memory_gib() -> float:
    """Return the anonymous memory of this process in GiB.

    File-backed pages are not counted, because the kernel can reclaim them.
    """
    status = Path("/proc/self/status").read_text("utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) / 2**20
