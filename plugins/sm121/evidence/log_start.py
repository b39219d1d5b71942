"""Facts in the log of a server's last start that are not part of the kernel path."""

from pydantic import Field

from sm121.core import data_file


class RankLinks(data_file.Record):
    """The links between the ranks of a server. A field is None if the log does not show it."""

    group: str | None = None
    """The library of the ranks' process group: ``nccl``, ``gloo``."""
    channels: list[str] = Field(default_factory=list)
    """NCCL's channels to other ranks: ``NET/IB/0``, ``NET/Socket/0``, ``SHM``."""
    rerouted: list[str] = Field(default_factory=list)
    """RDMA devices that NCCL replaces by another one: ``2>0``."""
    network: str | None = None
    """NCCL's network between nodes: ``IB``, ``IBext_v10``, ``Socket``."""
    rdma_devices: str | None = None
    """The RDMA devices that NCCL found, but need not use: ``[0]rocep1s0f1:1/RoCE``."""


class LogStart(data_file.Record):
    """Facts about a server's last start. A field is None if the log does not show it."""

    version: str | None = None
    """The engine's version, as the engine prints it."""
    build: str | None = None
    """The build in ``fixtures/builds.toml`` whose lines the log contains."""
    asked: str | None = None
    """The arguments that differ from the defaults, as the engine prints them."""
    model: str | None = None
    """The model that the server loaded."""
    served_model: str | None = None
    """The name under which the server serves that model."""
    drafter: str | None = None
    """The draft model of speculative decoding; with MTP, the target model itself."""
    draft_tokens: int | None = None
    """The number of tokens per draft."""
    rank: int | None = None
    world_size: int | None = None
    graph_sizes: str | None = None
    """The graphs that a rank will capture: ``PIECEWISE=51 (largest=512), FULL=35 (...)``."""
    start: str | None = None
    """An id that is the same on all ranks of one start, and different in other starts."""
    since: int | None = None
    """The minute of the year of a worker's first line, by its node's clock."""
    links: RankLinks = Field(default_factory=RankLinks)
    begins: dict[str, int] = Field(default_factory=dict)
    """By container, the number of the physical line with which its last start begins."""
    ends: dict[str, int] = Field(default_factory=dict)
    """By container, the number of the physical line with which lines of an older run begin, if the
    log ends with such lines."""
