"""Names of architectures, and detection of this machine's architecture."""

import contextlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.core.errors import UsageError

CPU = "cpu"

#: The GPU architectures that the suite knows, by their compute capability.
GPUS = ("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121")

NAMES: tuple[str, ...] = (CPU, *GPUS)

#: Names of chips, with their architecture.
ALIASES = {"gb10": "sm121"}

#: The line of a CPU build in torch/version.py.
_CPU_BUILD = re.compile(r"^cuda(: [^=]+)? = None$", re.MULTILINE)


@dataclass(frozen=True)
class Detection:
    """The architecture of this machine."""

    #: One of `NAMES`, or None for a GPU that the suite has no name for.
    name: str | None
    #: The source of the answer, in words.
    evidence: str


def parse(name: str) -> str:
    """Return the name of an architecture.

    Args:
        name: One of `NAMES`, or one of `ALIASES` in any case.

    Raises:
        UsageError: The name is neither.
    """
    known = ALIASES.get(name.lower(), name)
    if known in NAMES:
        return known
    aliases = ", ".join(f"{alias} for {meant}" for alias, meant in ALIASES.items())
    raise UsageError(f"--arch {name}: expected one of {', '.join(NAMES)} ({aliases})")


def expected(marked: Sequence[str]) -> str:
    """Return the architecture that a run probably judges, before its target is resolved.

    Args:
        marked: Architectures that ``-m`` names.

    Returns:
        This machine's architecture, or the first of ``marked`` if this machine's is not among them.
    """
    here = detect().name or CPU
    if marked and here not in marked:
        return marked[0]
    return here


def detect() -> Detection:
    """Detect the architecture of the first device.

    torch answers where it is installed and sees a GPU, else NVML. Without a GPU the architecture is
    `CPU`, and the evidence is what both of them reported.
    """
    failures: list[str] = []
    for probe in (_torch_capability, _nvml_capability):
        capability, evidence = probe()
        if capability is not None:
            major, minor = capability
            name = f"sm{major}{minor}"
            return Detection(name if name in GPUS else None, evidence)
        failures.append(evidence)
    return Detection(CPU, "; ".join(failures))


def require_device(name: str) -> None:
    """Check that this machine has a device.

    Args:
        name: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UsageError: The name has another form, or this machine has no such GPU.
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
    if int(number or 0) >= count:
        raise UsageError(f"--device {name}: expected cpu or cuda:0 to cuda:{count - 1}")


def _torch_capability() -> tuple[tuple[int, int] | None, str]:
    """Return the compute capability by torch, or None, and the evidence in words."""
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
    """Return the compute capability by NVML, or None, and the evidence in words."""
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
    """Initialise NVML for a block, and shut it down afterwards.

    Raises:
        pynvml.NVMLError: There is no driver.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def gpu_count() -> int:
    """Return the number of NVIDIA GPUs; 0 where NVML finds none."""
    import pynvml

    try:
        with opened_nvml():
            return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
