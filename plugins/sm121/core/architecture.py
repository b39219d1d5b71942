"""Names of architectures, and detection of this machine's architecture.

Names and detection come from the plugin `pytest_gpu_arch`. This module converts the plugin's errors
into those of the suite.
"""

from collections.abc import Sequence

from pytest_gpu_arch import names
from pytest_gpu_arch.detection import Detection, detect, gpu_count, opened_nvml
from pytest_gpu_arch.names import ALIASES, CPU, GPUS, NAMES
from sm121.core.errors import UsageError

__all__ = [
    "ALIASES",
    "CPU",
    "GPUS",
    "NAMES",
    "Detection",
    "detect",
    "expected",
    "gpu_count",
    "gpu_number",
    "opened_nvml",
    "parse",
    "require_device",
]


def parse(name: str) -> str:
    """Return the canonical name of an architecture.

    Args:
        name: One of `NAMES`, or one of `ALIASES` in any case.

    Raises:
        UsageError: The name is unknown.
    """
    try:
        return names.parse(name)
    except ValueError as error:
        raise UsageError(str(error)) from error


def expected(marked: Sequence[str]) -> str:
    """Return the architecture that a run will probably test, before its target is resolved.

    Args:
        marked: The architectures that occur in the expression of ``-m``.

    Returns:
        This machine's architecture. If ``marked`` does not contain it, the first one of ``marked``.
    """
    here = detect().name or CPU
    if marked and here not in marked:
        return marked[0]
    return here


def gpu_number(device: str) -> int:
    """Return the number of a GPU, for example 1 for ``cuda:1``.

    Args:
        device: The name of a torch device.

    Returns:
        The number; 0 for a name without one.
    """
    number = device.partition(":")[2]
    return int(number) if number.isdecimal() else 0


def require_device(name: str) -> None:
    """Check that this machine has a device.

    Args:
        name: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UsageError: The name does not have this form, or this machine does not have that GPU.
    """
    detected = detect()
    kind, _, number = name.partition(":")
    if name == CPU:
        return
    if kind != "cuda" or not (number.isdecimal() or not number):
        raise UsageError(f"--device {name}: expected cpu or cuda:N, as in cuda:0")
    if detected.name == CPU:
        evidence = f"this machine has no GPU ({detected.evidence})"
        raise UsageError(f"--device {name}: expected cpu, {evidence}")
    count = max(1, gpu_count())
    if gpu_number(name) >= count:
        raise UsageError(f"--device {name}: expected cpu or cuda:0 to cuda:{count - 1}")
