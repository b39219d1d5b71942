"""The engine under test in the form of verdict.json."""

from pydantic import Field

from sm121.core.data_file import Record
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.kernel_profile import KernelProfile
from sm121.evidence.ranks import RankPath
from sm121.evidence.transport import Transport

#: The fields of the kernel path that differ between ranks.
_OF_A_RANK = ("attention", "moe", "kv_layout", "kv_cache_dtype", "graph_sizes")


class ServedKernel(Record):
    """A kernel of the path that was served, and whether anything held it against the oracle."""

    operation: str
    """As the kernel level names it: ``fused_moe``, ``decode_attention``, ..."""
    component: str
    """The value of the path that names the kernel."""
    backend: str | None
    """That value; null where nothing shows it."""
    attention_decode: str | None = None
    """FlashInfer's kernel for decode, where it decides who judges; null elsewhere."""
    provider: str | None = None
    """Whose calls are this kernel's; null where no provider has it."""
    judged: bool | None = None
    """Null where the path has no kernel for the operation."""
    cases: int = 0
    """So many of the provider's cases passed or failed."""
    why: str = ""
    """Why it was not judged, or need not be."""


class NodeReport(Record):
    """One rank of a server that spans machines. Null where the evidence does not show a value."""

    rank: int | None
    node: str
    """Its name, or its address, or the log that shows it."""
    version: str | None = None
    path: dict[str, str] = Field(default_factory=dict)
    """Its own values of the kernel path."""
    transport: Transport | None = None
    """What carries its bytes to the other ranks."""
    memory_available_gib: float | None = None

    @classmethod
    def of(cls, shown: RankPath, carried: Transport | None) -> "NodeReport":
        """Return the row of a rank.

        Args:
            shown: The rank by its log.
            carried: The transport of its bytes; None if nothing shows it.
        """
        path = {}
        for name in _OF_A_RANK:
            value = getattr(shown.path, name)
            if value is not None:
                path[name] = str(value)
        return cls(
            rank=shown.rank,
            node=shown.node,
            version=shown.path.version,
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
    """The engine under test. Null where the evidence does not show a value."""

    name: str
    version: str | None = None
    identity: str | None = None
    """The release, with the build based on it (``0.14.0+mxfp4``); null where neither is known."""
    rounding: str | None = None
    """Beyond the checkpoint, as ``--rounding`` takes it; null where nothing shows it."""
    price_allowed: bool = False
    managed: bool
    base_url: str | None = None
    unwatched: str | None = None
    """Why a restart of the attached server may go unnoticed; null where each one shows."""
    model: str
    configuration: str | None = None
    startup_s: float | None = None
    path: KernelPath = Field(default_factory=KernelPath)
    kernels: KernelProfile | None = None
    """Kernels of some decode steps, those of the longest time; null where none were profiled."""
    nodes: list[NodeReport] = Field(default_factory=list)
    """A row for each rank of a server that spans machines; empty: it is on one."""
    served: list[ServedKernel] = Field(default_factory=list)
    """The kernels of the path by operation, and which of them the numerics judged."""
