"""A profile's tables about the engine: the model, its arguments by release, its kernel path."""

import itertools
import re
from collections.abc import Collection, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from sm121.core import builds, extending
from sm121.core.data_file import DataTable, Pattern
from sm121.core.measuring_settings import Positive
from sm121.core.profile_fields import Gate, Sourced
from sm121.core.versions import Versions, release, within


class Model(extending.Statement):
    """The checkpoint."""

    #: A path, a hub id, ``canary:bf16`` or ``canary:mxfp4``.
    id: str = Field(min_length=1)
    #: The digest of its files, as in verdict.json; None: any checkpoint of its shape.
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{16}$")
    served_name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")


class Needs(DataTable):
    """Requirements of a start, which the machine is checked for before it."""

    memory_gib: Positive | None = None
    disk_gib: Positive | None = None
    #: Accepted entries of FLASHINFER_CUDA_ARCH_LIST; empty: it is not checked.
    arch_list: tuple[str, ...] = ()
    #: FlashInfer modules that a start may compile, by their names in
    #: ``fixtures/compilation/jit.toml``. The engine's arguments decide which of them it compiles.
    jit_modules: tuple[str, ...] = ()
    #: The memory of the weights during the compilation, where GPU and host share one memory.
    weights_gib: Positive | None = None


#: How a server is started on several machines.
Launcher = Literal["nnodes", "ray"]
#: The transport between ranks, by NCCL's names; gloo between CPUs.
Transport = Literal["IB", "RoCE", "gloo", "P2P", "SHM", "Socket"]


class Link(extending.Statement):
    """The least cost of a token between machines."""

    #: The number of sums over all ranks for a token.
    collectives: Annotated[int, Field(ge=1)]
    #: The latency of one exchange, in microseconds.
    exchange_us: Positive
    #: The bandwidth, in 10**9 bytes per second.
    gb_s: Positive


class Nodes(extending.Statement):
    """A server that spans machines. The engine's arguments for that are made of this table."""

    #: The number of machines.
    count: Annotated[int, Field(ge=2)]
    #: The number of ranks: a multiple of the number of machines.
    tensor_parallel: Annotated[int, Field(ge=2)]
    #: The default of ``--launcher``.
    launcher: Launcher = "nnodes"
    #: The accepted transports; with another one the kernel path is wrong.
    transports: tuple[Transport, ...] = Field(min_length=1)
    #: The number of a node's RDMA devices that carry bytes when the whole link is used.
    devices: Annotated[int, Field(ge=1)] | None = None
    #: None: the bound of a rate does not count the link.
    link: Link | None = None

    @model_validator(mode="after")
    def _equal_shares(self) -> "Nodes":
        if self.tensor_parallel % self.count:
            raise ValueError(
                f"tensor_parallel: expected a multiple of count ({self.count}): each node has as "
                f"many ranks; got {self.tensor_parallel}"
            )
        return self


class EngineSettings(DataTable):
    """How the engine is started and watched. Times are in seconds."""

    #: The name of the engine's module in ``engines/``.
    name: str = Field(default="vllm", pattern=r"^[a-z0-9][a-z0-9-]*$")
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    #: The time limit of a start with warm caches, which compiles nothing.
    ready_within_s: Sourced
    #: The time limit of a start that compiles, as long as the compilation is observed.
    cold_ready_within_s: Sourced = Sourced(
        value=2700, source="chosen: fused_moe_120 takes 65 minutes of one core, 16 of four"
    )
    #: A start without a log line and without CPU time for so long hangs.
    stalled_after_s: Positive = 120.0
    #: The time between SIGTERM and SIGKILL.
    stop_within_s: Positive = 20.0
    #: Start vLLM's own worker with one more log line: the attention backend of each layer.
    speaking_worker: bool = False
    #: Whether decode steps of the server under test are profiled for their kernel names. ``keep``
    #: uses the server further. ``restart`` stops it: after a GPU profiler, the host's launches are
    #: slower, and later measurements would be wrong.
    profiler: Literal["off", "keep", "restart"] = "off"
    #: Folders by distribution. If the folder exists, the engine must import from it.
    checkouts: dict[Literal["vllm", "flashinfer"], str] = Field(default={})
    needs: Needs = Needs()


class ReleaseSetting(DataTable):
    """Arguments and variables of an engine, for some of its releases."""

    #: The releases, as a specifier of PEP 440; empty: all releases.
    versions: Versions = ""
    #: The only build, by its name in ``fixtures/builds.toml``.
    build: builds.Name | None = None
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    source: str = Field(min_length=3)

    def fits(
        self, identity: str | None, options: Collection[str] | None = None, more: Sequence[str] = ()
    ) -> bool:
        """Check whether the setting is for an engine.

        Args:
            identity: The engine's `builds.identity`.
            options: The options of the engine's parser, which decide for an unknown release. None:
                not known; the setting then fits.
            more: Further arguments that the engine would get.
        """
        if self.build is not None:
            row = builds.named(identity)
            return row is not None and row.name == self.build
        if release(identity) is not None:
            return within(identity, self.versions)
        if options is None:
            return True
        for word in (*self.arguments, *more):
            name = re.split("[.=]", word)[0]
            if word.startswith("--") and name not in options:
                return False
        return True


#: The fields of a kernel path that some releases do not log.
NotShown = Literal["attention", "moe", "kv_layout"]


class PathValues(DataTable):
    """Accepted values of a resolved kernel path. None: any value."""

    attention: tuple[str, ...] | None = None
    #: FlashInfer's kernel for decode, by the names of vLLM 0.26 and later: ``xqa``, ``trtllm-gen``.
    attention_decode: tuple[str, ...] | None = None
    moe: tuple[str, ...] | None = None
    kv_layout: tuple[str, ...] | None = None
    kv_cache_dtype: tuple[str, ...] | None = None
    dtype: tuple[str, ...] | None = None
    quantization: tuple[str, ...] | None = None
    speculative: tuple[str, ...] | None = None
    load_format: tuple[str, ...] | None = None
    cuda_graphs: bool | None = None
    prefix_caching: bool | None = None
    #: The length of the context (``--max-model-len``), in tokens.
    context: int | None = None
    #: The layers that are quantised beyond the checkpoint: exactly these.
    requantised: tuple[str, ...] | None = None
    #: How the experts' kernel rounds the activation between its two products.
    moe_variant: tuple[str, ...] | None = None
    #: Values that these releases do not log, each with the reason. No certificate requires them.
    not_shown: dict[NotShown, str] = Field(default={})


class ConfigurationSetting(ReleaseSetting):
    """The arguments of a configuration in some releases, and its path there."""

    path: PathValues = PathValues()


class Configuration(DataTable):
    """One named server configuration."""

    description: str
    #: On top of those of ``[engine]``.
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    #: Requirements on top of those of ``[kernel_path]``.
    path: PathValues = PathValues()
    #: By release, the newest first; the first range with the engine's version counts.
    settings: tuple[ConfigurationSetting, ...] = ()
    #: The gates of this configuration alone, beside those of ``[performance]``.
    gates: tuple[Gate, ...] = ()

    def at(
        self, identity: str | None, options: Collection[str] | None = None, *, anyhow: bool = False
    ) -> "Configuration | None":
        """Return the configuration as an engine gets it, without ``settings``.

        Args:
            identity: As in `ReleaseSetting.fits`.
            options: As in `ReleaseSetting.fits`.
            anyhow: Use the first setting if no setting fits.

        Returns:
            The configuration with the setting that fits; the setting of a build comes first. None
            if no setting fits. For an unknown release, any path of a fitting setting is accepted.
        """
        if not self.settings:
            return self
        fitting = [row for row in self.settings if row.fits(identity, options, self.arguments)]
        if not fitting and anyhow:
            fitting = [self.settings[0]]
        if not fitting:
            return None
        of_builds = [row for row in fitting if row.build is not None]
        setting = of_builds[0] if of_builds else fitting[0]
        paths = [setting.path]
        if release(identity) is None:
            paths = [row.path for row in fitting]
        return self.model_copy(
            update={
                "arguments": (*self.arguments, *setting.arguments),
                "environment": {**self.environment, **setting.environment},
                "path": self.path.model_copy(update=_any_of(paths)),
                "settings": (),
            }
        )


def values_set(table: DataTable) -> dict[str, object]:
    """Return the values of a table that its file sets, by their keys."""
    return {name: getattr(table, name) for name in table.model_fields_set}


def _any_of(paths: Sequence[PathValues]) -> dict[str, object]:
    """Return the values that accept each of the paths."""
    if len(paths) == 1:
        return values_set(paths[0])
    not_shown: dict[NotShown, str] = {}
    for path in paths:
        not_shown.update(path.not_shown)
    merged: dict[str, object] = {"not_shown": not_shown}
    set_by_all = set.intersection(*(set(path.model_fields_set) for path in paths))
    for name in set_by_all - {"not_shown"}:
        values = [getattr(path, name) for path in paths]
        if all(value == values[0] for value in values):
            merged[name] = values[0]
        elif all(isinstance(value, tuple) for value in values):
            merged[name] = tuple(dict.fromkeys(itertools.chain(*values)))
    return merged


class PathRule(DataTable):
    """Patterns that must be, and must not be, in the log or the profile of one choice."""

    #: The choice. Rules on the log name a ``configuration``. Rules on kernel names have a pattern
    #: for the whole name, in any case, of the ``moe`` or ``attention`` backend in the log.
    when: dict[Literal["configuration", "moe", "attention"], str] = Field(
        min_length=1, max_length=1
    )
    must_see: tuple[Pattern, ...] = ()
    must_not_see: tuple[Pattern, ...] = ()
    #: The start-up log, or the kernel names of a profile.
    where: Literal["log", "profile"]
    source: str = Field(min_length=3)


class KernelPathRequirement(PathValues):
    """The resolved kernel path that each configuration of a profile must have."""

    #: Fallbacks that change no kernel, by their ids in the signatures, with the reasons.
    accepted_fallbacks: dict[str, str] = Field(default={})
    #: Values that some layers may have beside the required one, as ``FIELD=VALUE``, with reasons.
    accepted_also: dict[str, str] = Field(default={})
    source: str = Field(min_length=3)
    rules: tuple[PathRule, ...] = ()
