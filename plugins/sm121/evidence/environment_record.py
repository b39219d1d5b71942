"""The records of the environment of a run. A value that cannot be known is null."""

from typing import Literal

from pydantic import Field, JsonValue

from sm121.core.data_file import Record
from sm121.evidence.mapped import MappedLibrary


class SourceRecord(Record):
    """The source that a piece of software was made from."""

    sha: str | None = None
    """Git commit, as long as it is known (a version string holds 9 digits)."""
    dirty: bool | None = None
    """True when tracked files of the checkout differ from that commit; None without a checkout."""
    version: str | None = None
    changes: str | None = None
    """Digest of the differences from that commit; None where there are none."""

    @property
    def text(self) -> str:
        """All values on one line."""
        parts: list[str] = []
        if self.version:
            parts.append(self.version)
        if self.sha:
            parts.append(self.sha)
        if self.changes:
            parts.append(f"with changes {self.changes}")
        return " ".join(parts) or "unknown"


class GpuRecord(Record):
    """One GPU as NVML reports it. A GB10 reports several values as "not supported": null."""

    name: str | None = None
    unit: str | None = None
    """A digest of its UUID."""
    compute_capability: str | None = None
    clocks: Literal["locked", "default"] | None = None
    """``locked`` when application clocks differ from the default ones. Clocks locked by
    ``nvidia-smi -lgc`` are not visible to NVML, so ``default`` speaks of application clocks."""
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    power_mode: Literal["default", "changed"] | None = None
    persistence: bool | None = None
    memory_total_bytes: int | None = None


class HostRecord(Record):
    """The machine without its GPU."""

    cpu_model: str | None = None
    cores_physical: int | None = None
    cores_logical: int | None = None
    memory_bytes: int | None = None
    kernel: str | None = None
    os: str | None = None
    machine: str | None = None


class ContainerRecord(Record):
    """The container that the suite runs in, as far as a process inside can tell."""

    runtime: str
    """``unknown`` where the user names an image, and the suite is in no container."""
    image: str | None = None
    image_id: str | None = None
    build: dict[str, str] = Field(default_factory=dict)
    """The image's own variables, such as NVIDIA_BUILD_ID."""


class PackagesRecord(Record):
    """Interpreter and installed distributions."""

    python: str | None = None
    packages: dict[str, str] | None = None
    """Normalised name to version."""
    flashinfer_config: str | None = None
    """The output of ``python -m flashinfer show-config``, of an engine's environment alone."""


class EnvironmentRecord(Record):
    """The facts that are needed to repeat a run."""

    git_shas: dict[str, SourceRecord]
    """For ``vllm``, ``flashinfer`` and ``suite``."""
    container: ContainerRecord | None = None
    engine_packages: PackagesRecord
    suite_packages: PackagesRecord
    cuda_version: str | None = None
    driver_version: str | None = None
    cudnn_version: str | None = None
    gpus: list[GpuRecord] | None = None
    """None without NVML."""
    host: HostRecord
    engine_arguments: list[str]
    environment: dict[str, str]
    """The variables that bear on an engine, secrets blanked."""
    workload: dict[str, JsonValue]
    """Sizes and sampling of the timed requests. ``seed`` is null: they are greedy."""
    nccl: dict[str, list[MappedLibrary]] = Field(default_factory=dict)
    """By node, the NCCL that the server's processes mapped, once its path was judged; empty where
    none did, or where they are not seen from here."""
    autotune: dict[str, str] = Field(default_factory=dict)
    """Digest of each set of tactics that FlashInfer's autotuner has saved, by the folder that vLLM
    names after the configuration. Between two starts another set may be a slower one."""
    unknown: dict[str, str] = Field(default_factory=dict)
    """Field to the reason why it is null."""
