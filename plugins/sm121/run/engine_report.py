"""The engine under test in the form of verdict.json."""

from pydantic import Field

from sm121.core.data_file import Record
from sm121.evidence import kernel_path
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.kernel_profile import KernelProfile
from sm121.evidence.ranks import RankPath
from sm121.evidence.transport import Transport

#: The fields of the kernel path that the report lists for each rank.
_OF_A_RANK = ("attention", "moe", "kv_layout", "kv_cache_dtype", "graph_sizes")


class ServedKernel(Record):
    """A kernel that the server uses, and whether a test compared this kernel with the oracle."""

    operation: str
    """The operation's name in the kernel level: ``fused_moe``, ``decode_attention``, ..."""
    component: str
    """The field of the path that names the kernel."""
    backend: str | None
    """The value of the field that ``component`` names; null if nothing shows it."""
    attention_decode: str | None = None
    """FlashInfer's kernel for decode, if it decides which provider judges; otherwise null."""
    provider: str | None = None
    """The provider that calls this kernel; null if none does."""
    judged: bool | None = None
    """Whether a test judged the kernel; null if the path has no kernel for the operation."""
    cases: int = 0
    """The number of the provider's cases that passed or failed."""
    why: str = ""
    """Why the kernel was not judged, or need not be judged."""


class NodeReport(Record):
    """One rank of a server on several machines. A value is null if no evidence shows it."""

    rank: int | None
    node: str
    """The name or the address of the rank's machine, or the log that shows the rank."""
    version: str | None = None
    path: dict[str, str] = Field(default_factory=dict)
    """The rank's own values of the kernel path."""
    transport: Transport | None = None
    """The transport of the rank's bytes to the other ranks."""
    memory_available_gib: float | None = None

    @classmethod
    def of(cls, shown: RankPath, carried: Transport | None) -> "NodeReport":
        """Return the row of a rank.

        Args:
            shown: The rank as its log shows it.
            carried: The transport between the ranks; None if no evidence shows it.
        """
        path = {}
        for name in _OF_A_RANK:
            value = kernel_path.shown(shown.path, name)
            if value is not None:
                path[name] = str(value)
        return cls(
            rank=shown.rank,
            node=shown.node,
            version=shown.path.log.version,
            path=path,
            transport=carried,
        )

    def __str__(self) -> str:
        parts = list(self.path.values())
        if self.transport is None:
            parts.append("transport not proven")
        else:
            parts.append("+".join(self.transport.kinds))
            if self.transport.devices:
                parts.append(f"{self.transport.devices} RDMA devices")
        if self.version:
            parts.append(f"vLLM {self.version}")
        if self.memory_available_gib:
            parts.append(f"{self.memory_available_gib:.0f} GiB")
        return ", ".join(parts)


class EngineReport(Record):
    """The engine under test. A value is null if no evidence shows it."""

    name: str
    version: str | None = None
    identity: str | None = None
    """The release with the build based on it (``0.14.0+mxfp4``); null if neither is known."""
    rounding: str | None = None
    """The formats that differ from the checkpoint's, as in ``--rounding``; null if unknown."""
    price_allowed: bool = False
    managed: bool
    base_url: str | None = None
    unwatched: str | None = None
    """Why a restart of the attached server may go unnoticed; null if each restart shows."""
    model: str
    dense: bool = False
    """Whether the model has no experts, as the profile says; ``path.moe`` then has no value."""
    configuration: str | None = None
    startup_s: float | None = None
    path: KernelPath = Field(default_factory=KernelPath)
    kernels: KernelProfile | None = None
    """The kernels that took the most time in some decode steps; null without a profile."""
    nodes: list[NodeReport] = Field(default_factory=list)
    """A row for each rank of a server that spans machines; empty for one machine."""
    served: list[ServedKernel] = Field(default_factory=list)
    """The kernels of the path by operation, and which of them the numerics tests judged."""

    @property
    def experts(self) -> str:
        """The kernel of the experts in words."""
        return self.path.moe or ("none" if self.dense else "not proven")
