"""Facts about a server's last start, read from its log, that are not part of the kernel path."""

from pydantic import Field

from sm121.core import data_file


class RankLinks(data_file.Record):
    """The links between the ranks of a server. A field is None if the log does not show it."""

    group: str | None = None
    """The library of the ranks' process group, for example ``nccl`` or ``gloo``."""
    channels: list[str] = Field(default_factory=list)
    """NCCL's channels to other ranks, for example ``NET/IB/0``, ``NET/Socket/0`` or ``SHM``."""
    rerouted: list[str] = Field(default_factory=list)
    """RDMA devices that NCCL replaces by another device. For example, ``2>0`` means device 0
    instead of 2."""
    network: str | None = None
    """NCCL's network between nodes, for example ``IB``, ``IBext_v10`` or ``Socket``."""
    rdma_devices: str | None = None
    """The RDMA devices that NCCL found, but may not use, for example ``[0]rocep1s0f1:1/RoCE``."""


class Draft(data_file.Record):
    """The drafts of a server that speculates. A field is None if the log does not show it."""

    drafter: str | None = None
    """The draft model of speculative decoding; with MTP, the target model itself."""
    draft_tokens: int | None = None
    """The number of tokens per draft."""


class LogStart(data_file.Record):
    """Facts about a server's last start. A field is None if the log does not show it."""

    version: str | None = None
    """The engine's version, as the engine prints it."""
    build: str | None = None
    """The build in ``fixtures/builds.toml`` whose lines the log contains."""
    asked: str | None = None
    """The arguments that differ from the engine's defaults, as the engine prints them."""
    model: str | None = None
    """The model that the server loaded."""
    served_model: str | None = None
    """The name under which the server serves that model."""
    device: str | None = None
    """The kind of device: ``cuda`` (any GPU), ``cpu``, or ``sm90`` if only that GPU has a kernel of
    the log."""
    draft: Draft = Field(default_factory=Draft)
    rank: int | None = None
    world_size: int | None = None
    graph_sizes: str | None = None
    """The CUDA graphs that a rank will capture, for example ``PIECEWISE=51 (largest=512), FULL=35
    (...)``."""
    start: str | None = None
    """An id that is the same on all ranks of one start, and different in other starts."""
    since: int | None = None
    """When a worker printed its first line, in minutes since the beginning of the year, on its
    node's clock."""
    links: RankLinks = Field(default_factory=RankLinks)
    begins: dict[str, int] = Field(default_factory=dict)
    """For each container, the number of the physical line with which its last start begins."""
    ends: dict[str, int] = Field(default_factory=dict)
    """For each container whose log ends with lines of an older run, the number of the physical line
    with which these begin."""
