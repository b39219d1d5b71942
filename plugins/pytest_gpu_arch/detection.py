"""Detect the architecture of this machine."""

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_gpu_arch.names import CPU, GPUS

#: The line in torch/version.py that shows a CPU build.
_CPU_BUILD = re.compile(r"^cuda(: [^=]+)? = None$", re.MULTILINE)


@dataclass(frozen=True)
class Detection:
    """The architecture of this machine.

    Attributes:
        name: One of `names.NAMES`; None for a GPU whose architecture is not in that list.
        evidence: The source of the result, as text.
    """

    name: str | None
    evidence: str


def detect() -> Detection:
    """Detect the architecture of the first device.

    The source is torch, if it is installed and detects a GPU, or else NVML. If there is no GPU, the
    architecture is `CPU`, and the evidence contains the answers of both sources.
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


def _torch_capability() -> tuple[tuple[int, int] | None, str]:
    """Return the compute capability that torch reports, or None, and the evidence as text."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, "torch is not installed"
    # Importing torch takes seconds. A CPU build can be recognised by version.py without importing
    # torch.
    version_file = Path(spec.origin).with_name("version.py")
    if version_file.is_file() and _CPU_BUILD.search(version_file.read_text("utf-8")):
        return None, "torch is a CPU build"
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:  # a CUDA build on a machine without CUDA
        return None, f"torch cannot be imported ({str(error).splitlines()[0]})"
    if not torch.cuda.is_available():
        return None, f"torch {torch.__version__} sees no CUDA device"
    major, minor = torch.cuda.get_device_capability(0)
    return (major, minor), f"torch {torch.__version__}: {torch.cuda.get_device_name(0)}"


def _nvml_capability() -> tuple[tuple[int, int] | None, str]:
    """Return the compute capability that NVML reports, or None, and the evidence as text."""
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
        pynvml.NVMLError: No driver is installed.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def gpu_count() -> int:
    """Return the number of NVIDIA GPUs that NVML finds; 0 if there is no driver."""
    import pynvml

    try:
        with opened_nvml():
            return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
