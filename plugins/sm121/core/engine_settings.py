"""A profile's tables about the engine: the model, its arguments by release, its kernel path."""

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from sm121.core import builds, extending
from sm121.core.data_file import DataTable, Pattern
from sm121.core.measuring_settings import Positive
from sm121.core.profile_fields import Gate, Sourced
from sm121.core.versions import Versions, release, within


class Reads(extending.Statement):
    """The bytes that are read for one token of one stream, without the KV cache."""

    weights: Positive


class Model(extending.Statement):
    """The checkpoint."""

    #: A path, a hub id, ``canary:bf16`` or ``canary:mxfp4``.
    id: str = Field(min_length=1)
    #: The digest of its files, as in verdict.json; None: any checkpoint of its shape.
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{16}$")
    served_name: str = Field(pattern=r"^[A-Za-z0-9/.][A-Za-z0-9._/:@+-]*$")
    #: The bytes of a token by the headers of the checkpoint. None: by the shape of gpt-oss.
    reads: Reads | None = None
    #: Whether the model has no experts; reports then do not call their kernel unproven.
    dense: bool = False

    def require_fitting_paths(self, configurations: Mapping[str, "Configuration"]) -> None:
        """Check that no configuration of a dense model requires a kernel of the experts.

        Args:
            configurations: The configurations of the profile, by name.

        Raises:
            ValueError: One requires it.
        """
        if not self.dense:
            return
        for name, configuration in configurations.items():
            paths = [configuration.path, *(setting.path for setting in configuration.settings)]
            if any(path.moe is not None for path in paths):
                raise ValueError(
                    "model.dense: expected a model without experts, got configurations."
                    f"{name}.path.moe, which requires their kernel"
                )


class Needs(DataTable):
    """What a server start requires of the machine. The suite checks it before the start."""

    memory_gib: Positive | None = None
    disk_gib: Positive | None = None
    #: Accepted entries of FLASHINFER_CUDA_ARCH_LIST; empty: the variable is not checked.
    arch_list: tuple[str, ...] = ()
    #: FlashInfer modules that a start may compile, by their names in
    #: ``fixtures/compilation/jit.toml``. The engine's arguments decide which of them it compiles.
    jit_modules: tuple[str, ...] = ()
    #: The memory that the weights occupy during JIT compilation, if GPU and host share memory.
    weights_gib: Positive | None = None


#: How a server is started on several machines.
Launcher = Literal["nnodes", "ray"]
#: The transport between ranks, by NCCL's names; gloo between CPUs.
Transport = Literal["IB", "RoCE", "gloo", "P2P", "SHM", "Socket"]


class Link(extending.Statement):
    """The minimum communication cost of one token between machines."""

    #: The number of all-reduce operations per token.
    collectives: Annotated[int, Field(ge=1)]
    #: The latency of one exchange, in microseconds.
    exchange_us: Positive
    #: The bandwidth, in 10**9 bytes per second.
    gb_s: Positive


class Nodes(extending.Statement):
    """A server that spans machines. The suite derives the engine's arguments from this table."""

    #: The number of machines.
    count: Annotated[int, Field(ge=2)]
    #: The number of ranks: a multiple of the number of machines.
    tensor_parallel: Annotated[int, Field(ge=2)]
    #: The default of ``--launcher``.
    launcher: Launcher = "nnodes"
    #: The accepted transports; with another one the kernel path is wrong.
    transports: tuple[Transport, ...] = Field(min_length=1)
    #: The number of RDMA devices per node that carry traffic when the full link is in use.
    devices: Annotated[int, Field(ge=1)] | None = None
    #: None: the upper bound of a rate ignores the link.
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
    #: The time limit of a start that compiles. It applies only if a compilation is observed.
    cold_ready_within_s: Sourced = Sourced(
        value=2700, source="chosen: fused_moe_120 takes 65 minutes of one core, 16 of four"
    )
    #: A start that logs nothing and uses no CPU time for this long counts as hung.
    stalled_after_s: Positive = 120.0
    #: The time between SIGTERM and SIGKILL.
    stop_within_s: Positive = 20.0
    #: Whether vLLM's worker additionally logs the attention backend of each layer.
    speaking_worker: bool = False
    #: Whether the suite profiles decode steps of the server under test to get their kernel names,
    #: and then keeps or restarts the server. ``restart`` is for GPUs: after a profiler has run,
    #: kernel launches stay slower, and later measurements would be wrong.
    profiler: Literal["off", "keep", "restart"] = "off"
    #: Source checkouts by package. The engine must import the package from the folder if it exists.
    checkouts: dict[Literal["vllm", "flashinfer"], str] = Field(default={})
    needs: Needs = Needs()


class ReleaseSetting(DataTable):
    """Arguments and variables of an engine, for some of its releases."""

    #: The releases, as a specifier of PEP 440; empty: all releases.
    versions: Versions = ""
    #: The name in ``fixtures/builds.toml`` of the only build that the setting is for.
    build: builds.Name | None = None
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    source: str = Field(min_length=3)

    def fits(
        self, identity: str | None, options: Collection[str] | None = None, more: Sequence[str] = ()
    ) -> bool:
        """Check whether the setting applies to an engine.

        Args:
            identity: The engine's `builds.identity`.
            options: The engine's command-line options, which decide if the release is unknown.
                None: the options are unknown, too, and the setting applies.
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
    #: FlashInfer's decode kernel, as vLLM 0.26 and later name it: ``xqa`` or ``trtllm-gen``.
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
    #: Exactly these layers are quantised beyond what the checkpoint has.
    requantised: tuple[str, ...] | None = None
    #: How the experts' kernel rounds the activation between its two products.
    moe_variant: tuple[str, ...] | None = None
    #: Values that these releases do not log, each with the reason. No certificate requires them.
    not_shown: dict[NotShown, str] = Field(default={})


class ConfigurationSetting(ReleaseSetting):
    """The arguments of a configuration for some releases, and the kernel path required there."""

    path: PathValues = PathValues()


class Configuration(DataTable):
    """One named server configuration."""

    description: str
    #: Arguments in addition to those of ``[engine]``.
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    #: Requirements that extend those of ``[kernel_path]``, or override them key by key.
    path: PathValues = PathValues()
    #: Settings by release, newest first. The first that applies to the engine is used.
    settings: tuple[ConfigurationSetting, ...] = ()
    #: Gates of this configuration only, in addition to those of ``[performance]``.
    gates: tuple[Gate, ...] = ()

    def at(
        self, identity: str | None, options: Collection[str] | None = None, *, anyhow: bool = False
    ) -> "Configuration | None":
        """Return the configuration resolved for an engine, without ``settings``.

        Args:
            identity: As in `ReleaseSetting.fits`.
            options: As in `ReleaseSetting.fits`.
            anyhow: Use the first setting if no setting applies.

        Returns:
            The configuration merged with the first setting that applies, or None. The setting of a
            build takes precedence. For an unknown release, the path of any setting that applies is
            accepted.
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
    """Return the values of a table that the profile's file sets, by key; defaults are left out."""
    return {name: getattr(table, name) for name in table.model_fields_set}


def _any_of(paths: Sequence[PathValues]) -> dict[str, object]:
    """Merge paths into values that accept each of them."""
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
    """Patterns that the log or the profile must, or must not, match under one condition."""

    #: The condition. Rules on the log name a ``configuration``. Rules on a profile give a regular
    #: expression that, ignoring case, matches the whole name of the logged ``moe`` or ``attention``
    #: backend.
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

    #: Reasons by the signature ids of accepted fallbacks, which change no kernel.
    accepted_fallbacks: dict[str, str] = Field(default={})
    #: Reasons by ``FIELD=VALUE``, for values that some layers may have besides the required one.
    accepted_also: dict[str, str] = Field(default={})
    source: str = Field(min_length=3)
    rules: tuple[PathRule, ...] = ()
