"""Architectures: their names, and which one this machine has."""

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sm121.core.errors import UsageError

CPU = "cpu"

#: The GPU architectures that the suite knows, by their compute capability.
GPUS = ("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121")

NAMES: tuple[str, ...] = (CPU, *GPUS)

#: Other names of an architecture: of the chip that has it.
ALIASES = {"gb10": "sm121"}

_CPU_BUILD = re.compile(r"^cuda(: [^=]+)? = None$", re.MULTILINE)


@dataclass(frozen=True)
class Detection:
    """The architecture of this machine. ``name`` is one of :data:`NAMES`, or None for a GPU that
    the suite has no name for; ``evidence`` says in words what was looked at."""

    name: str | None
    evidence: str


def parse(name: str) -> str:
    """Return an architecture's name, given that or one of :data:`ALIASES`. Raises UsageError: it is
    neither."""
    known = ALIASES.get(name.lower(), name)
    if known in NAMES:
        return known
    aliases = ", ".join(f"{alias} for {meant}" for alias, meant in ALIASES.items())
    raise UsageError(f"--arch {name}: expected one of {', '.join(NAMES)} ({aliases})")


def detect() -> Detection:
    """Detect the first device's architecture: through torch where it is installed, else NVML."""
    names: list[str] = []
    for probe in (_torch_capability, _nvml_capability):
        capability, evidence = probe()
        if capability is not None:
            name = "sm{}{}".format(*capability)
            return Detection(name if name in GPUS else None, evidence)
        names.append(evidence)
    return Detection(CPU, "; ".join(names))


def require_device(name: str) -> None:
    """Raises UsageError: ``cpu`` or ``cuda:N`` was expected, or this machine has no such GPU."""
    detected = detect()
    kind, _, number = name.partition(":")
    if name == CPU:
        return
    if kind != "cuda" or not (number.isdecimal() or not number):
        raise UsageError(f"--device {name}: expected cpu or cuda:N, as in cuda:0")
    if detected.name == CPU:
        evidence = f"this machine has no GPU ({detected.evidence})"
        raise UsageError(f"--device {name}: expected cpu, {evidence}")
    if int(number or 0) >= (count := max(1, gpu_count())):
        raise UsageError(f"--device {name}: expected cpu or cuda:0 to cuda:{count - 1}")


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
        with opened_nvml():
            if pynvml.nvmlDeviceGetCount() == 0:
                return None, "NVML: no device"
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            return (major, minor), f"NVML: {pynvml.nvmlDeviceGetName(handle)}"
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"


@contextlib.contextmanager
def opened_nvml() -> Iterator[None]:
    """NVML, shut down afterwards. Raises pynvml.NVMLError: there is no driver."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def gpu_count() -> int:
    """Number of NVIDIA GPUs; 0 where NVML finds none."""
    import pynvml

    try:
        with opened_nvml():
            return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
