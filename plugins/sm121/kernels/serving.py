"""Which provider judges the kernels of a kernel path (`fixtures/kernels/serving.toml`)."""

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
Fact = Literal["moe", "attention", "attention_decode", "dtype", "kv_cache_dtype", "requantised"]
"""Values of the path that say which kernel serves an operation."""


class Rule(data_file.DataTable):
    """Who judges some operations, on the paths that are like this."""

    operations: tuple[Operation, ...] = Field(min_length=1)
    arch: tuple[str, ...] = ()
    """Architectures, or ``gpu``; none: on any."""
    moe: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    attention_decode: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    kv_cache_dtype: tuple[str, ...] = ()
    requantised: tuple[str, ...] = ()
    """``none``: no layer beyond the experts is shown to be in fewer bits."""
    provider: str | None = None
    """A name of `sm121.kernels.registry`."""
    nothing: str | None = None
    """Why such a path has no kernel of its own for the operation: nothing is to be judged."""
    unjudged: str | None = None
    """Why no provider has the kernel that serves."""
    source: str = Field(min_length=3)

    @model_validator(mode="after")
    def _check(self) -> "Rule":
        verdicts = [self.provider, self.nothing, self.unjudged]
        if sum(each is not None for each in verdicts) != 1:
            raise ValueError("expected one of provider, nothing, unjudged")
        if self.provider is not None and self.provider not in registry.NAMES:
            names = ", ".join(registry.NAMES)
            raise ValueError(f"provider: expected one of {names}; got {self.provider!r}")
        return self

    def decides(self, arch: str, facts: Mapping[Fact, str | None]) -> bool:
        of_arch = {arch} if arch == architecture.CPU else {arch, "gpu"}
        if self.arch and not of_arch & {*self.arch}:
            return False
        return all(
            not getattr(self, name) or value in getattr(self, name) for name, value in facts.items()
        )


class _ServingFile(data_file.DataTable):
    #: By engine; of an operation the first one that decides counts.
    engine: dict[str, tuple[Rule, ...]]
    #: What names the kernel of an operation; `dtype` where nothing else does.
    component: dict[Operation, Fact]


def _data() -> _ServingFile:
    return data_file.load("kernels/serving.toml", _ServingFile)


@dataclass(frozen=True)
class Choice:
    """Who judges an operation, or ``why`` nobody does, or ``nothing``: why nobody has to."""

    backend: str | None
    """The value of the path that names the kernel."""
    provider: str | None = None
    nothing: str | None = None
    why: str = ""
    attention_decode: str | None = None
    """FlashInfer's kernel for decode, where the rule depends on it."""


def component(operation: Operation) -> Fact:
    return _data().component[operation]


def choices(engine: str, arch: str, path: KernelPath, operation: Operation) -> list[Choice]:
    """Who judges an operation on a path: one choice for each kernel that serves it. `path`:
    resolved, or expected; where layers run several values (``also``), each of them is a kernel that
    serves."""
    named = component(operation)
    facts: dict[Fact, str | None] = {name: getattr(path, name) for name in get_args(Fact)}
    facts["requantised"] = ",".join(path.requantised or ()) or "none"
    decoding = (facts["attention_decode"], *path.also.get("attention_decode", ()))
    chosen: list[Choice] = []
    for value in (facts[named], *path.also.get(named, ())):
        for decode in decoding:
            served = {**facts, named: value, "attention_decode": decode}
            choice = _choice(engine, arch, operation, served)
            if choice not in chosen:
                chosen.append(choice)
    return chosen


def _choice(
    engine: str, arch: str, operation: Operation, facts: Mapping[Fact, str | None]
) -> Choice:
    named = component(operation)
    value = facts[named]
    remedy = f"--kernel-provider {'|'.join(registry.NAMES)}|MODULE:ATTR"
    for rule in _data().engine.get(engine, ()):
        if operation in rule.operations and rule.decides(arch, facts):
            return Choice(
                backend=value,
                provider=rule.provider,
                nothing=rule.nothing,
                why=rule.unjudged or "",
                attention_decode=facts["attention_decode"] if rule.attention_decode else None,
            )
    if value is None:
        why = f"nothing shows which {named} serves, so that nobody can be chosen to judge it"
    else:
        why = f"no provider for {operation} of {engine} on {arch} with {named} {value}"
    return Choice(value, why=f"{why} ({remedy})")


def path_of(backends: Mapping[str, str | None]) -> KernelPath:
    """The path whose kernels have these backends, by value of the path."""
    layers = backends.get("requantised") or "none"
    requantised = None if layers == "none" else layers.split(",")
    return KernelPath.model_validate({**backends, "requantised": requantised})


def expected(
    accepted: Mapping[Fact, Sequence[str] | None],
    patterns: Mapping[str, Collection[re.Pattern[str]]],
) -> KernelPath:
    """The path that a configuration will have, as far as known. `accepted`: by the profile, the
    likeliest first; `patterns`: what values match after what arguments and variables ask for."""
    rules = [rule for rules in _data().engine.values() for rule in rules]
    values: dict[str, Any] = {"requantised": accepted.get("requantised")}
    for name in (name for name in get_args(Fact) if name not in values):
        likely = accepted.get(name)
        if likely is None and name in patterns:
            likely = [value for rule in rules for value in getattr(rule, name)]
        fits = [
            value
            for value in likely or ()
            if all(pattern.fullmatch(value) for pattern in patterns.get(name, ()))
        ]
        if fits:
            values[name] = fits[0]
    return KernelPath.model_validate(values)
