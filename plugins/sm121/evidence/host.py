"""This machine: its processor, its GPUs, and the container around the suite."""

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from sm121.core import architecture, data_file, digest
from sm121.evidence.environment_record import ContainerRecord, GpuRecord, HostRecord

#: The variable with which the user passes the id of the image into the container.
IMAGE_ID = "SM121_IMAGE_ID"
#: The variable with which the user passes the name of the image into the container.
_IMAGE = "SM121_IMAGE"
#: The variables that describe an image.
_IMAGE_VARIABLES = data_file.load_key(
    "recorded-variables.toml", "recorded", dict[str, tuple[str, ...]]
)["image"]
_DRIVER_FILE = "proc/driver/nvidia/version"
_DRIVER_VERSION = re.compile(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s")
_OS_NAME = re.compile(r'(?m)^PRETTY_NAME="?([^"\n]+)"?')
_CPU_MODEL = re.compile(r"(?m)^model name\s*:\s*(.+)$")
_CPU_FLAGS = re.compile(r"(?m)^flags\s*:\s*(.+)$")
_ARM_PART = re.compile(r"(?m)^CPU part\s*:\s*(\S+)")
_ARM_IMPLEMENTER = re.compile(r"(?m)^CPU implementer\s*:\s*(\S+)")
#: A line in Podman's ``/run/.containerenv``.
_PODMAN_VALUE = re.compile(r'(?m)^(\w+)="?([^"\n]*)"?$')


@dataclass(frozen=True)
class NvmlReading:
    """The GPUs and the driver, as NVML reports them.

    Attributes:
        gpus: The GPUs; None if NVML is not available.
        driver: The version of the driver.
        problem: The reason why `gpus` is None.
    """

    gpus: list[GpuRecord] | None = None
    driver: str | None = None
    problem: str | None = None


def read_gpus() -> NvmlReading:
    """Read the GPUs of this machine and the version of their driver."""
    nvml: Any = import_module("pynvml")
    try:
        with architecture.opened_nvml():
            driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion)
            count: int = _ask(nvml, nvml.nvmlDeviceGetCount) or 0
            gpus: list[GpuRecord] = []
            for index in range(count):
                handle = _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
                if handle is not None:
                    gpus.append(_read_gpu(nvml, handle))
            return NvmlReading(gpus, driver)
    except nvml.NVMLError as error:
        return NvmlReading(problem=f"NVML: {error}")


def _ask(nvml: Any, function: Any, *arguments: Any) -> Any:
    """Call a function of NVML; return None if the GPU does not support it, as on a GB10."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _read_gpu(nvml: Any, handle: Any) -> GpuRecord:
    def ask(question: str, *arguments: Any) -> Any:
        return _ask(nvml, getattr(nvml, f"nvmlDeviceGet{question}"), handle, *arguments)

    record = GpuRecord(
        name=ask("Name"),
        sm_clock_mhz=ask("ClockInfo", nvml.NVML_CLOCK_SM),
        sm_clock_max_mhz=ask("MaxClockInfo", nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask("ClockInfo", nvml.NVML_CLOCK_MEM),
    )
    uuid = ask("UUID")
    if uuid is not None:
        record.unit = digest.of_value(uuid)
    capability = ask("CudaComputeCapability")
    if capability is not None:
        major, minor = capability
        record.compute_capability = f"{major}.{minor}"
    persistence = ask("PersistenceMode")
    if persistence is not None:
        record.persistence = bool(persistence)
    memory = ask("MemoryInfo")
    if memory is not None:
        record.memory_total_bytes = int(memory.total)
    clock = ask("ApplicationsClock", nvml.NVML_CLOCK_SM)
    default_clock = ask("DefaultApplicationsClock", nvml.NVML_CLOCK_SM)
    if clock is not None and default_clock is not None:
        record.clocks = "default" if clock == default_clock else "locked"
    limit_mw = ask("EnforcedPowerLimit")
    default_limit_mw = ask("PowerManagementDefaultLimit")
    if limit_mw is not None:
        record.power_limit_w = limit_mw / 1000
    if default_limit_mw is not None:
        record.power_limit_default_w = default_limit_mw / 1000
    if limit_mw is not None and default_limit_mw is not None:
        record.power_mode = "default" if limit_mw == default_limit_mw else "changed"
    return record


def read_driver_version(root: Path = Path("/")) -> str | None:
    """Read the version of NVIDIA's driver from ``/proc``.

    Args:
        root: The folder that contains ``proc``.

    Returns:
        The version; None if there is no driver.
    """
    return _search(_DRIVER_VERSION, root / _DRIVER_FILE)


def has_driver_file(root: Path = Path("/")) -> bool:
    """Return whether ``/proc`` has the file of NVIDIA's driver.

    Args:
        root: The folder that contains ``proc``.
    """
    return (root / _DRIVER_FILE).exists()


def read_host(root: Path = Path("/")) -> HostRecord:
    """Read the processor, memory, kernel and distribution of this machine.

    Args:
        root: The folder that contains ``proc`` and ``etc``.
    """
    cpu_info = root / "proc/cpuinfo"
    model = _search(_CPU_MODEL, cpu_info)
    return HostRecord(
        cpu_model=_arm_model(cpu_info) if model is None else model.strip(),
        cores_physical=psutil.cpu_count(logical=False),
        cores_logical=psutil.cpu_count(logical=True),
        memory_bytes=psutil.virtual_memory().total,
        kernel=platform.release() or None,
        os=_search(_OS_NAME, root / "etc/os-release"),
        machine=platform.machine() or None,
    )


def _arm_model(cpu_info: Path) -> str | None:
    """Return the part numbers of an ARM processor, which has no model name (GB10)."""
    parts = sorted(set(_ARM_PART.findall(_read(cpu_info) or "")))
    implementer = _search(_ARM_IMPLEMENTER, cpu_info)
    if not parts or implementer is None:
        return None
    return f"ARM implementer {implementer} part {', '.join(parts)}"


def cpu_flags(root: Path = Path("/")) -> str:
    """Read the flags of this machine's processor.

    Args:
        root: The folder that contains ``proc``.

    Returns:
        The flags as /proc/cpuinfo lists them; empty if it lists none.
    """
    return _search(_CPU_FLAGS, root / "proc/cpuinfo") or ""


def read_container(
    environment: Mapping[str, str], root: Path = Path("/")
) -> ContainerRecord | None:
    """Read the container of this process.

    Podman writes the name of the image to ``/run/.containerenv``. Docker's ``.dockerenv`` does not
    contain a name. With Docker, the image is therefore null, unless the image's own variables name
    it (as in NGC's and vLLM's images), or the user sets SM121_IMAGE (name) and SM121_IMAGE_ID (id).
    Outside a container, these two variables describe the container of an attached server.

    Args:
        environment: The environment of the process.
        root: The folder that contains ``run`` and ``.dockerenv``.

    Returns:
        The container; None if there is no evidence of one.
    """
    build = {name: environment[name] for name in _IMAGE_VARIABLES if environment.get(name)}
    container = ContainerRecord(
        runtime="podman",
        image=environment.get(_IMAGE) or environment.get("VLLM_IMAGE_TAG"),
        image_id=environment.get(IMAGE_ID) or None,
        build=build,
    )
    text = _read(root / "run/.containerenv")
    if text is not None:
        values = dict(_PODMAN_VALUE.findall(text))
        container.image = values.get("image") or container.image
        container.image_id = values.get("imageid") or container.image_id
        return container
    if (root / ".dockerenv").exists():
        container.runtime = "docker"
        return container
    if environment.get("KUBERNETES_SERVICE_HOST"):
        container.runtime = "kubernetes"
        return container
    if environment.get(IMAGE_ID) or environment.get(_IMAGE):
        container.runtime = "unknown"
        return container
    return None


def _search(pattern: re.Pattern[str], path: Path) -> str | None:
    """Return the first group of a pattern in a file, or None."""
    match = pattern.search(_read(path) or "")
    return match[1] if match else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
