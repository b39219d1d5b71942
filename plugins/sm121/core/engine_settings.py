"""What a profile says of the engine: the model, its arguments by release, its kernel path."""

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from sm121.core import builds, extending
from sm121.core.data_file import DataTable, Pattern
from sm121.core.profile_fields import Gate, Positive, Sourced
from sm121.core.versions import Versions, release, within


class Model(extending.Statement):
    """The checkpoint. ``id`` is a path, a hub id, or ``canary:bf16`` / ``canary:mxfp4``."""

    id: str = Field(min_length=1)
    #: Of its files, as the fingerprint in verdict.json has it; None: any checkpoint of its shape.
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{16}$")
    served_name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")


class Needs(DataTable):
    """What the machine must have before a start is worth its time."""

    memory_gib: Positive | None = None
    disk_gib: Positive | None = None
    #: Accepted entries of FLASHINFER_CUDA_ARCH_LIST; empty means that it is not looked at.
    arch_list: tuple[str, ...] = ()
    #: FlashInfer modules that may be compiled at a start, by their names in
    #: ``fixtures/compilation/jit.toml``. Which of them are is decided by the engine's arguments.
    jit_modules: tuple[str, ...] = ()
    #: What is resident while they are compiled, where GPU and host share one memory.
    weights_gib: Positive | None = None


Launcher = Literal["nnodes", "ray"]
#: What carries bytes between ranks, as NCCL calls it; gloo between CPUs.
Transport = Literal["IB", "RoCE", "gloo", "P2P", "SHM", "Socket"]


class Link(extending.Statement):
    """What a token costs between machines at the least."""

    #: Sums over all ranks that a token waits for.
    collectives: Annotated[int, Field(ge=1)]
    exchange_us: Positive
    gb_s: Positive


class Nodes(extending.Statement):
    """Of a server that spans machines. Its arguments for that come from here."""

    count: Annotated[int, Field(ge=2)]
    tensor_parallel: Annotated[int, Field(ge=2)]
    #: Where ``--launcher`` names no other.
    launcher: Launcher = "nnodes"
    #: Any of these may carry the bytes; with another one the path is wrong.
    transports: tuple[Transport, ...] = Field(min_length=1)
    #: RDMA devices of a node that carry bytes when the whole link is used.
    devices: Annotated[int, Field(ge=1)] | None = None
    #: None: what is between the machines is not counted in the bound of a rate.
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
    """How the engine is started and watched. Times in seconds."""

    name: str = Field(default="vllm", pattern=r"^[a-z0-9][a-z0-9-]*$")
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    #: Of a start that compiles nothing: its caches are warm.
    ready_within_s: Sourced
    #: The most that a start may take which compiles: as long as it is seen to do so.
    cold_ready_within_s: Sourced = Sourced(
        value=2700, source="chosen: fused_moe_120 takes 65 minutes of one core, 16 of four"
    )
    #: No log line and no CPU time for so long during start-up means that it hangs.
    stalled_after_s: Positive = 120.0
    #: Time between the polite request to stop and SIGKILL.
    stop_within_s: Positive = 20.0
    #: Start vLLM's own worker with one more log line: what attention resolved to, layer by layer.
    speaking_worker: bool = False
    #: Whether decode steps of the server under test are profiled for their kernel names, and what
    #: becomes of that server: ``keep`` goes on with it; ``restart`` stops it, because what a GPU
    #: profiler leaves behind slows the host's launches and would spoil what is measured later.
    profiler: Literal["off", "keep", "restart"] = "off"
    #: Distribution -> directory. Where that directory exists, the import must come from it.
    checkouts: dict[Literal["vllm", "flashinfer"], str] = Field(default={})
    needs: Needs = Needs()


class ReleaseSetting(DataTable):
    """What an engine is given, in the releases that take it."""

    #: Releases (PEP 440) that this is for.
    versions: Versions = ""
    #: A build of ``fixtures/builds.toml`` that this is for alone.
    build: builds.Name | None = None
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    source: str = Field(min_length=3)

    def fits(
        self, identity: str | None, options: Collection[str] | None = None, more: Sequence[str] = ()
    ) -> bool:
        """Whether an engine of that `builds.identity` takes this beside ``more`` arguments. One of
        an unknown release takes what its parser has, or anything where that was not asked."""
        if self.build is not None:
            return (row := builds.named(identity)) is not None and row.name == self.build
        if release(identity) is not None:
            return within(identity, self.versions)
        words = (word for word in (*self.arguments, *more) if word.startswith("--"))
        return options is None or {re.split("[.=]", word)[0] for word in words} <= {*options}


class PathValues(DataTable):
    """Accepted values of a resolved path. None: any."""

    attention: tuple[str, ...] | None = None
    #: FlashInfer's kernel for decode, as vLLM names it from 0.26 on: ``xqa``, ``trtllm-gen``.
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
    #: Tokens of context (``--max-model-len``).
    context: int | None = None
    #: The layers that are quantised beyond the checkpoint: all of these, and no others.
    requantised: tuple[str, ...] | None = None
    #: How the experts' kernel treats the activation between its two products.
    moe_variant: tuple[str, ...] | None = None
    #: What these releases do not show, each with the reason: no certificate asks for it.
    not_shown: dict[Literal["attention", "moe", "kv_layout"], str] = Field(default={})


class ConfigurationSetting(ReleaseSetting):
    """What a configuration is in some releases, and what its path must be there."""

    path: PathValues = PathValues()


class Configuration(DataTable):
    """One named server configuration, on top of ``[engine]``."""

    description: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    #: What its path must show, where ``[kernel_path]`` leaves that open.
    path: PathValues = PathValues()
    #: By release, the newest first: the first one whose range has the version counts.
    settings: tuple[ConfigurationSetting, ...] = ()
    #: Of this configuration alone, beside those of ``[performance]``.
    gates: tuple[Gate, ...] = ()

    def at(
        self, identity: str | None, options: Collection[str] | None = None, *, anyhow: bool = False
    ) -> "Configuration | None":
        """What it is in an engine (see `ReleaseSetting.fits`); None where no setting has it, or
        ``anyhow`` what the first has. The path of an unknown release may be that of any."""
        if not self.settings:
            return self
        fitting = [each for each in self.settings if each.fits(identity, options, self.arguments)]
        fitting = fitting or [*self.settings[: int(anyhow)]]
        if not fitting:
            return None
        setting = next((each for each in fitting if each.build is not None), fitting[0])
        paths = [setting.path] if release(identity) is not None else [e.path for e in fitting]
        return self.model_copy(
            update={
                "arguments": (*self.arguments, *setting.arguments),
                "environment": {**self.environment, **setting.environment},
                "path": self.path.model_copy(update=_any_of(paths)),
                "settings": (),
            }
        )


def values_set(table: DataTable) -> dict[str, object]:
    return {name: getattr(table, name) for name in table.model_fields_set}


def _any_of(paths: Sequence[PathValues]) -> dict[str, object]:
    if len(paths) == 1:
        return values_set(paths[0])
    merged: dict[str, object] = {
        "not_shown": {name: why for path in paths for name, why in path.not_shown.items()}
    }
    for name in set.intersection(*(set(path.model_fields_set) for path in paths)) - {"not_shown"}:
        values = [getattr(path, name) for path in paths]
        if all(value == values[0] for value in values):
            merged[name] = values[0]
        elif all(isinstance(value, tuple) for value in values):
            merged[name] = tuple(dict.fromkeys(item for value in values for item in value))
    return merged


class PathRule(DataTable):
    """Kernel signatures of one choice: what must be seen, and what must not."""

    #: ``configuration`` for rules on the log; ``moe`` or ``attention`` for rules on kernel names: a
    #: pattern on the whole name of the backend that the log resolved, upper and lower case alike.
    when: dict[Literal["configuration", "moe", "attention"], str] = Field(
        min_length=1, max_length=1
    )
    must_see: tuple[Pattern, ...] = ()
    must_not_see: tuple[Pattern, ...] = ()
    #: Where the names are looked for: the start-up log, or kernel names of a profile.
    where: Literal["log", "profile"]
    source: str = Field(min_length=3)


class KernelPathRequirement(PathValues):
    """The resolved path that every configuration of this profile must show."""

    #: Fallbacks that change no kernel, by their id in the signatures, each with the reason.
    accepted_fallbacks: dict[str, str] = Field(default={})
    #: Values that some layers may have beside the others, as ``FIELD=VALUE``, with the reason.
    accepted_also: dict[str, str] = Field(default={})
    source: str = Field(min_length=3)
    rules: tuple[PathRule, ...] = ()
