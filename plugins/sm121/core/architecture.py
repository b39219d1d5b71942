"""Architectures: their names, and which one this machine has."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from sm121.core.errors import UsageError

CPU = "cpu"

#: Compute capability of each GPU architecture that the suite knows by name.
CAPABILITIES: dict[str, tuple[int, int]] = {
    "sm80": (8, 0),
    "sm86": (8, 6),
    "sm87": (8, 7),
    "sm89": (8, 9),
    "sm90": (9, 0),
    "sm100": (10, 0),
    "sm103": (10, 3),
    "sm110": (11, 0),
    "sm120": (12, 0),
    "sm121": (12, 1),
}

NAMES: tuple[str, ...] = (CPU, *CAPABILITIES)


_CPU_BUILD = re.compile(r"^cuda(: [^=]+)? = None$", re.MULTILINE)


@dataclass(frozen=True)
class Detection:
    """The architecture of this machine.

    ``name`` is one of :data:`NAMES`, or None for a GPU that the suite has no name for;
    ``evidence`` says in words what was looked at.
    """

    name: str | None
    evidence: str


def parse(name: str) -> str:
    """Check an architecture's name as given by a user.

    Raises:
        UsageError: the name is not one of :data:`NAMES`.
    """
    if name in NAMES:
        return name
    raise UsageError(f"--arch {name}: expected one of {', '.join(NAMES)}")


def detect() -> Detection:
    """Detect the first device's architecture: through torch where it is installed, else NVML."""
    seen: list[str] = []
    for probe in (_torch_capability, _nvml_capability):
        capability, evidence = probe()
        if capability is not None:
            name = next((n for n, c in CAPABILITIES.items() if c == capability), None)
            return Detection(name, evidence)
        seen.append(evidence)
    return Detection(CPU, "; ".join(seen))


def _torch_capability() -> tuple[tuple[int, int] | None, str]:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, "torch is not installed"
    # Importing torch takes seconds; a CPU build can be told by the file that says how it was built.
    version_file = Path(spec.origin).with_name("version.py")
    if version_file.is_file() and _CPU_BUILD.search(version_file.read_text("utf-8")):
        return None, "torch is a CPU build"
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:  # a CUDA build on a machine without it
        return None, f"torch cannot be imported ({str(error).splitlines()[0]})"
    if not torch.cuda.is_available():
        return None, f"torch {torch.__version__} sees no CUDA device"
    major, minor = torch.cuda.get_device_capability(0)
    return (major, minor), f"torch {torch.__version__}: {torch.cuda.get_device_name(0)}"


def _nvml_capability() -> tuple[tuple[int, int] | None, str]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    try:
        if pynvml.nvmlDeviceGetCount() == 0:
            return None, "NVML: no device"
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        return (major, minor), f"NVML: {pynvml.nvmlDeviceGetName(handle)}"
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()


def gpu_count() -> int:
    """Number of NVIDIA GPUs; 0 where NVML finds none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()
