"""The records of a run's environment. A value that cannot be determined is null."""

from typing import Literal

from pydantic import Field, JsonValue

from sm121.core.data_file import Record
from sm121.evidence.mapped import MappedLibrary


class SourceRecord(Record):
    """The source of installed software."""

    sha: str | None = None
    """The git commit, perhaps abbreviated (if it is from a version string, it has 9 digits)."""
    dirty: bool | None = None
    """Whether tracked files of the checkout differ from that commit; None if there is none."""
    version: str | None = None
    changes: str | None = None
    """The digest of the differences from that commit; None if there are none."""

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
    """One GPU as NVML reports it. On a GB10, several values are null ("not supported")."""

    name: str | None = None
    unit: str | None = None
    """A digest of the GPU's UUID."""
    compute_capability: str | None = None
    clocks: Literal["locked", "default"] | None = None
    """``locked`` if the application clocks differ from the default ones. Other clocks are not
    compared, because NVML does not report those locked by ``nvidia-smi -lgc``."""
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
    """The container in which the suite runs, as far as it can be determined from inside."""

    runtime: str
    """``unknown`` if the user names an image, but the suite runs outside a container."""
    image: str | None = None
    image_id: str | None = None
    build: dict[str, str] = Field(default_factory=dict)
    """The image's own environment variables, for example NVIDIA_BUILD_ID."""


class PackagesRecord(Record):
    """An interpreter and the distributions installed in its environment."""

    python: str | None = None
    packages: dict[str, str] | None = None
    """The version of each distribution, by its normalised name."""
    flashinfer_config: str | None = None
    """The output of ``python -m flashinfer show-config``, only for an engine's environment."""


class EnvironmentRecord(Record):
    """The facts that are needed to repeat a run."""

    git_shas: dict[str, SourceRecord]
    """The sources of ``vllm``, ``flashinfer`` and ``suite``."""
    container: ContainerRecord | None = None
    engine_packages: PackagesRecord
    suite_packages: PackagesRecord
    cuda_version: str | None = None
    driver_version: str | None = None
    cudnn_version: str | None = None
    gpus: list[GpuRecord] | None = None
    """The GPUs; None if NVML is not available."""
    host: HostRecord
    engine_arguments: list[str]
    environment: dict[str, str]
    """The variables that affect an engine, with secrets redacted."""
    workload: dict[str, JsonValue]
    """The sizes and the sampling of the timed requests. ``seed`` is null, because the requests use
    greedy sampling."""
    nccl: dict[str, list[MappedLibrary]] = Field(default_factory=dict)
    """For each node, the NCCL libraries that the server's processes had mapped when the kernel path
    was judged. Empty if no process had mapped one, or if the processes cannot be inspected."""
    autotune: dict[str, str] = Field(default_factory=dict)
    """The digest of each set of tactics that FlashInfer's autotuner has saved, by the folder that
    vLLM names after the configuration. A later start with another set may be slower.
    """
    unknown: dict[str, str] = Field(default_factory=dict)
    """For each null field, the reason why it is null."""
