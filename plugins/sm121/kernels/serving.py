"""Choose the provider that calls the same kernels as a server with a given kernel path.

The rules are rows of `fixtures/kernels/serving.toml`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from sm121.core import architecture, data_file
from sm121.evidence.kernel_path import KernelPath
from sm121.kernels import registry
from sm121.kernels.protocol import Operation

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
#: The fields of the kernel path on which the choice of a provider depends.
Fact = Literal["moe", "attention", "attention_decode", "dtype", "kv_cache_dtype", "requantised"]
#: The value of `requantised` for a path without evidence of requantised layers.
_NO_LAYERS = "none"


class Rule(data_file.DataTable):
    """A rule that chooses the provider of some operations if the kernel path has these values.

    An empty tuple matches any value.
    """

    operations: tuple[Operation, ...] = Field(min_length=1)
    #: The architectures to which the rule applies. The name ``gpu`` stands for all GPUs.
    arch: tuple[str, ...] = ()
    moe: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    attention_decode: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    kv_cache_dtype: tuple[str, ...] = ()
    #: ``none`` matches a path without evidence of requantised layers (other than the experts).
    requantised: tuple[str, ...] = ()
    #: The name of a provider in `sm121.kernels.registry`.
    provider: str | None = None
    #: The reason why a path that matches this row has no separate kernel for the operation, so that
    #: nothing is tested.
    nothing: str | None = None
    #: The reason why no provider calls the kernel that the server uses.
    unjudged: str | None = None
    source: str = Field(min_length=3)

    @model_validator(mode="after")
    def _check(self) -> "Rule":
        verdicts = [self.provider, self.nothing, self.unjudged]
        if sum(verdict is not None for verdict in verdicts) != 1:
            raise ValueError("expected one of provider, nothing, unjudged")
        if self.provider is not None and self.provider not in registry.NAMES:
            names = ", ".join(registry.NAMES)
            raise ValueError(f"provider: expected one of {names}; got {self.provider!r}")
        return self

    def decides(self, arch: str, facts: Mapping[Fact, str | None]) -> bool:
        """Return whether this rule applies to a path.

        Args:
            arch: The architecture.
            facts: The values of the path.
        """
        architectures = {arch} if arch == architecture.CPU else {arch, "gpu"}
        if self.arch and architectures.isdisjoint(self.arch):
            return False
        for name, value in facts.items():
            accepted = getattr(self, name)
            if accepted and value not in accepted:
                return False
        return True


class _ServingFile(data_file.DataTable):
    #: The rules of each engine. The first rule that applies to an operation and a path is used.
    engine: dict[str, tuple[Rule, ...]]
    #: The field of the path that names the kernel of each operation; `dtype` if no other field
    #: does.
    component: dict[Operation, Fact]


def _data() -> _ServingFile:
    return data_file.load("kernels/serving.toml", _ServingFile)


@dataclass(frozen=True)
class ProviderChoice:
    """The provider with which an operation is tested, or the reason why there is none.

    Attributes:
        backend: The kernel, as the path names it.
        provider: The name of the provider.
        nothing: The reason why there is nothing to test.
        why: The reason why no provider calls the kernel.
        attention_decode: FlashInfer's kernel for decode, if the rule depends on it.
    """

    backend: str | None
    provider: str | None = None
    nothing: str | None = None
    why: str = ""
    attention_decode: str | None = None


def component(operation: Operation) -> Fact:
    """Return the field of the path that names the kernel of an operation.

    Args:
        operation: The operation.
    """
    return _data().component[operation]


def choices(engine: str, arch: str, path: KernelPath, operation: Operation) -> list[ProviderChoice]:
    """Choose the providers of an operation on a path.

    Args:
        engine: The name of the engine.
        arch: The architecture.
        path: The resolved or the expected path. If its layers run several kernels (field ``also``),
            the result has a choice for each kernel.
        operation: The operation.

    Returns:
        One choice for each kernel that serves the operation.
    """
    named = component(operation)
    facts: dict[Fact, str | None] = {name: getattr(path, name) for name in get_args(Fact)}
    facts["requantised"] = ",".join(path.requantised or ()) or _NO_LAYERS
    decode_kernels = (facts["attention_decode"], *path.also.get("attention_decode", ()))
    chosen: list[ProviderChoice] = []
    for value in (facts[named], *path.also.get(named, ())):
        for decode_kernel in decode_kernels:
            served = {**facts, named: value, "attention_decode": decode_kernel}
            choice = _choose(engine, arch, operation, served)
            if choice not in chosen:
                chosen.append(choice)
    return chosen


def _choose(
    engine: str, arch: str, operation: Operation, facts: Mapping[Fact, str | None]
) -> ProviderChoice:
    named = component(operation)
    value = facts[named]
    for rule in _data().engine.get(engine, ()):
        if operation in rule.operations and rule.decides(arch, facts):
            return ProviderChoice(
                backend=value,
                provider=rule.provider,
                nothing=rule.nothing,
                why=rule.unjudged or "",
                attention_decode=facts["attention_decode"] if rule.attention_decode else None,
            )
    if value is None:
        why = f"no evidence shows which {named} the server uses, so no provider can be chosen"
    else:
        why = f"no provider for {operation} of {engine} on {arch} with {named} {value}"
    remedy = f"--kernel-provider {'|'.join(registry.NAMES)}|MODULE:ATTR"
    return ProviderChoice(value, why=f"{why} ({remedy})")


def path_of(backends: Mapping[str, str | None]) -> KernelPath:
    """Return a kernel path with these kernels.

    Args:
        backends: The kernel for each field of the path.
    """
    layers = backends.get("requantised") or _NO_LAYERS
    requantised = None if layers == _NO_LAYERS else layers.split(",")
    return KernelPath.model_validate({**backends, "requantised": requantised})


def expected(
    accepted: Mapping[Fact, Sequence[str] | None],
    patterns: Mapping[str, Collection[re.Pattern[str]]],
) -> KernelPath:
    """Return the path that a configuration will have, as far as it is known.

    Args:
        accepted: For each field of the path, the values that the profile accepts, the likeliest
            first.
        patterns: For each field of the path, the patterns that its value must match, given the
            arguments and environment variables of the configuration.
    """
    values: dict[str, Any] = {"requantised": accepted.get("requantised")}
    for name in get_args(Fact):
        if name in values:
            continue
        likely = accepted.get(name)
        if likely is None and name in patterns:
            likely = _values_of_rules(name)
        for value in likely or ():
            if all(pattern.fullmatch(value) for pattern in patterns.get(name, ())):
                values[name] = value
                break
    return KernelPath.model_validate(values)


def _values_of_rules(name: str) -> list[str]:
    """Return all values of a field of the rules, in the order of the file."""
    values: list[str] = []
    for rules in _data().engine.values():
        for rule in rules:
            values.extend(getattr(rule, name))
    return values
