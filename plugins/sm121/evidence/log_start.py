"""What the log of a server's last start shows beside the kernel path."""

from pydantic import Field

from sm121.core import data_file


class RankLinks(data_file.Record):
    """What a log shows of the links between the ranks of a server. None where it is silent."""

    group: str | None = None
    """The library of the ranks' process group: ``nccl``, ``gloo``."""
    channels: list[str] = Field(default_factory=list)
    """NCCL's channels to other ranks: ``NET/IB/0``, ``NET/Socket/0``, ``SHM``."""
    rerouted: list[str] = Field(default_factory=list)
    """RDMA devices in whose place NCCL uses another one: ``2>0``."""
    network: str | None = None
    """NCCL's network between nodes: ``IB``, ``IBext_v10``, ``Socket``."""
    rdma_devices: str | None = None
    """Those that NCCL found, which need not carry anything: ``[0]rocep1s0f1:1/RoCE``."""


class LogStart(data_file.Record):
    """What a log shows of a server's last start beside its path. None where it is silent."""

    version: str | None = None
    """The engine's own version, as it prints it."""
    build: str | None = None
    """The build of ``fixtures/builds.toml`` whose lines the log has."""
    asked: str | None = None
    """The arguments, as the engine prints those that are not its default ones."""
    model: str | None = None
    """The model that the server loaded."""
    served_model: str | None = None
    """The name by which it serves that model."""
    rank: int | None = None
    world_size: int | None = None
    graph_sizes: str | None = None
    """The graphs that a rank is to capture: ``PIECEWISE=51 (largest=512), FULL=35 (...)``."""
    start: str | None = None
    """An id that all ranks of one start share, and no other start has."""
    since: int | None = None
    """The minute of the year of a worker's first line, by its node's clock."""
    links: RankLinks = Field(default_factory=RankLinks)
    begins: dict[str, int] = Field(default_factory=dict)
    """Container to the number of the physical line with which its last start begins."""
    ends: dict[str, int] = Field(default_factory=dict)
    """Container to that with which the rest of an older run begins, where the log ends in one."""
