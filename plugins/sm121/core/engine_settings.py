"""A profile's tables about the engine: the model, its arguments by release, its kernel path."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from sm121.core import builds, engine_arguments, extending
from sm121.core.data_file import DataTable, Pattern
from sm121.core.measuring_settings import Positive
from sm121.core.profile_fields import Gate, Sourced
from sm121.core.versions import Versions, release, within


class Reads(extending.Statement):
    """How many bytes are read to decode one token of one stream, without the KV cache."""

    weights: Positive


class Model(extending.Statement):
    """The checkpoint."""

    #: The checkpoint: a path, an id on the Hugging Face hub, ``canary:bf16`` or ``canary:mxfp4``.
    id: str = Field(min_length=1)
    #: The digest of the checkpoint's files, as in verdict.json. If None, any checkpoint of the same
    #: shape is accepted.
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{16}$")
    served_name: str = Field(pattern=r"^[A-Za-z0-9/.][A-Za-z0-9._/:@+-]*$")
    #: The bytes that are read for one token, as computed from the headers of the checkpoint. If
    #: None, they are computed from the shape of gpt-oss.
    reads: Reads | None = None
    #: Whether the model has no experts. If so, reports do not list the experts' kernel as unproven.
    dense: bool = False

    def require_fitting_paths(self, configurations: Mapping[str, "Configuration"]) -> None:
        """Check that no configuration of a dense model requires a kernel of the experts.

        Args:
            configurations: The configurations of the profile; the keys are their names.

        Raises:
            ValueError: A configuration requires one.
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
    #: The accepted entries of FLASHINFER_CUDA_ARCH_LIST. If empty, the variable is not checked.
    arch_list: tuple[str, ...] = ()
    #: The FlashInfer modules that a start may compile (names in ``fixtures/compilation/jit.toml``).
    #: The engine's arguments decide which of them are compiled.
    jit_modules: tuple[str, ...] = ()
    #: The memory that the weights occupy during JIT compilation, if GPU and host share memory.
    weights_gib: Positive | None = None


#: Who starts the ranks on several machines: vLLM with ``--nnodes``, or Ray.
Launcher = Literal["nnodes", "ray"]
#: The transport between ranks, with NCCL's names. Ranks on CPUs use gloo.
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
    #: How to start the ranks, unless ``--launcher`` is given.
    launcher: Launcher = "nnodes"
    #: The accepted transports. If the ranks use another one, the kernel path is wrong.
    transports: tuple[Transport, ...] = Field(min_length=1)
    #: The number of RDMA devices per node that carry traffic when the full link is in use.
    devices: Annotated[int, Field(ge=1)] | None = None
    #: The cost of communication. If None, the upper bound of a rate ignores the link.
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
    """How to start and watch the engine. Times are in seconds."""

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
    #: For each package, the folder of a source checkout. If the folder exists, the engine must
    #: import the package from there.
    checkouts: dict[Literal["vllm", "flashinfer"], str] = Field(default={})
    needs: Needs = Needs()


class ReleaseSetting(DataTable):
    """Arguments and environment variables for some releases of an engine."""

    #: The releases, as a specifier of PEP 440; empty: all releases.
    versions: Versions = ""
    #: The only build to which the setting applies (a name in ``fixtures/builds.toml``).
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
            options: The engine's command-line options. If the release is unknown, the setting
                applies if they include the setting's options. If they are None (unknown as well),
                the setting applies.
            more: Other arguments that the engine would get.
        """
        if self.build is not None:
            row = builds.named(identity)
            return row is not None and row.name == self.build
        if release(identity) is not None:
            return within(identity, self.versions)
        if options is None:
            return True
        for option in engine_arguments.options([*self.arguments, *more]):
            if option.base.startswith("--") and option.base not in options:
                return False
        return True


#: The fields of a kernel path that some releases do not log.
NotShown = Literal["attention", "moe", "kv_layout"]


class PathValues(DataTable):
    """Accepted values of a resolved kernel path.

    For a field that is None, any value is accepted.
    """

    attention: tuple[str, ...] | None = None
    #: FlashInfer's decode kernel, ``xqa`` or ``trtllm-gen``, which vLLM logs from 0.26 on.
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
    #: The layers that the engine must quantise in addition to those in the checkpoint, and no
    #: others.
    requantised: tuple[str, ...] | None = None
    #: How the experts' kernel rounds the activation between its two products: ``fused`` or
    #: ``unfused``.
    moe_variant: tuple[str, ...] | None = None
    #: Fields that the engine does not log, each with the reason. A certificate does not require
    #: these fields.
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
    #: Requirements of this configuration. Each key is added to ``[kernel_path]``, or overrides the
    #: same key there.
    path: PathValues = PathValues()
    #: Settings for releases, the newest release first. The first setting that applies to the engine
    #: is used.
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
            anyhow: Whether to use the first setting if no setting applies.

        Returns:
            The configuration merged with the first setting that applies; None if none applies. A
            setting for a build takes precedence. If the release is unknown, the paths of all
            settings that apply are accepted.
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
    """Return the values that the profile's file sets in a table.

    Args:
        table: The table. Its fields that have their default because the file does not set them are
            left out.
    """
    return {name: getattr(table, name) for name in table.model_fields_set}


def _any_of(paths: Sequence[PathValues]) -> dict[str, object]:
    """Merge several paths into one that accepts each of them."""
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
    """A rule about patterns that the log or a profile of kernels must match, or must not match."""

    #: When the rule applies. A rule on the log applies to a ``configuration``. A rule on a profile
    #: of kernels has a regular expression for the whole name of the ``moe`` or ``attention``
    #: backend in the log, ignoring case.
    when: dict[Literal["configuration", "moe", "attention"], str] = Field(
        min_length=1, max_length=1
    )
    must_see: tuple[Pattern, ...] = ()
    must_not_see: tuple[Pattern, ...] = ()
    #: Where the patterns are searched: in the start-up log, or in the kernel names of a profile.
    where: Literal["log", "profile"]
    source: str = Field(min_length=3)


class KernelPathRequirement(PathValues):
    """The resolved kernel path that each configuration of a profile must have."""

    #: The accepted fallbacks, which change no kernel. The keys are ids of signatures, the values
    #: are reasons.
    accepted_fallbacks: dict[str, str] = Field(default={})
    #: Values that some layers may have in addition to the required value. The keys are
    #: ``FIELD=VALUE``, the values are reasons.
    accepted_also: dict[str, str] = Field(default={})
    source: str = Field(min_length=3)
    rules: tuple[PathRule, ...] = ()
