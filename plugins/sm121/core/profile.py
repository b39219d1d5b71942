"""Profiles: what a target must be and reach, as data. A profile is one TOML file, validated whole
when it is loaded; a mistake is one line that names the file, the key and what was expected."""

import fnmatch
import os
from collections.abc import Collection, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from sm121.core import architecture, builds, data_file, engine_settings, extending, level_settings
from sm121.core.architecture import NAMES
from sm121.core.arguments import did_you_mean
from sm121.core.configuration import ServerConfiguration
from sm121.core.data_file import DataTable, compiles
from sm121.core.engine_settings import Configuration, KernelPathRequirement, values_set
from sm121.core.errors import UsageError
from sm121.core.profile_fields import (
    LEVELS,
    ConfigurationName,
    Count,
    Gate,
    Level,
    Positive,
)

SCHEMA_VERSION = 1


class PlanRow(DataTable):
    """What ``--plan NAME`` asks of all that there is. What it does not say is asked whole."""

    purpose: str = Field(min_length=3)
    levels: tuple[Level, ...] = Field(default=get_args(Level), min_length=1)
    #: Of a level only these tests: names, in which ``*`` is any text, or names of markers.
    tests: dict[Level, tuple[Annotated[str, Field(min_length=1)], ...]] = Field(default={})
    #: Some of ``[performance]``, and of its ``measuring``.
    depths: tuple[int, ...] | None = Field(default=None, min_length=1)
    generated_tokens: tuple[int, ...] | None = Field(default=None, min_length=1)
    concurrency: tuple[int, ...] | None = None
    rounds: Count | None = None

    @model_validator(mode="after")
    def _tests_of_its_levels(self) -> "PlanRow":
        if strange := [level for level in self.tests if level not in self.levels]:
            raise ValueError(f"tests.{strange[0]}: expected a level of its levels")
        return self

    def asks(self, level: str, name: str, markers: Collection[str]) -> bool:
        """Whether it asks a test, by its level, its name without parameters, and its markers."""
        chosen = self.tests.get(level)  # type: ignore[call-overload]
        return level in self.levels and (
            chosen is None or any(named(entry, name, markers) for entry in chosen)
        )


def named(entry: str, name: str, markers: Collection[str]) -> bool:
    """Whether an entry of a plan's ``tests`` names a test."""
    return entry in markers or fnmatch.fnmatchcase(name, entry)


#: The plan of that name is the suite's own, and asks all that there is.
FULL = "full"
_FULL = PlanRow(purpose="all that there is; a certificate needs it")


class Profile(DataTable):
    """What a target must be and reach."""

    schema_version: Literal[1]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    #: The profile that this one is made from: a shipped one, or a path from this file; and the keys
    #: of that one which this one does not have. What resolved counts, not how it was written.
    extends: str | None = Field(default=None, exclude=True)
    without: tuple[str, ...] = Field(default=(), exclude=True)
    description: str
    arch: str
    model: engine_settings.Model
    engine: engine_settings.EngineSettings
    #: The machines that its server spans; None: one.
    nodes: engine_settings.Nodes | None = None
    #: The configuration that is judged, and the one that must still work beside it. Of ``fastest``
    #: the first one that the build has is judged instead.
    under_test: str
    baseline: str
    fastest: tuple[ConfigurationName, ...] = ()
    #: The configuration whose own gates are asked (`judging`). None: ``[performance]``'s.
    question: str | None = Field(default=None, exclude=True)
    configurations: dict[ConfigurationName, Configuration] = Field(min_length=1)
    #: Those that the engine which is judged cannot have (`judging`).
    lacking: dict[ConfigurationName, Configuration] = Field(default={}, exclude=True)
    kernel_path: KernelPathRequirement
    correctness: level_settings.Correctness
    stress: level_settings.StressSizes
    performance: level_settings.Performance
    regression: level_settings.Regression = level_settings.Regression()
    box: level_settings.Box | None = None
    matrix: level_settings.MatrixPlan | None = None
    #: By what they are for, beside ``full``.
    plans: dict[ConfigurationName, PlanRow] = Field(default={})
    certify: level_settings.Certify
    severities: level_settings.Severities = level_settings.Severities()
    #: Seconds that a single test of a level may take before pytest-timeout ends it.
    test_timeout_s: dict[Level, Positive]

    @model_validator(mode="before")
    @classmethod
    def _without_costs(cls, data: Any) -> Any:
        return data_file.without_retired(data, *extending.RETIRED)

    @model_validator(mode="after")
    def _consistent(self) -> "Profile":
        if self.arch not in NAMES:
            raise ValueError(f"arch: expected one of {', '.join(NAMES)}, got {self.arch!r}")
        named = [("under_test", self.under_test), ("baseline", self.baseline)]
        named += [("correctness.same_answers", name) for name in self.correctness.same_answers]
        named += [("fastest", name) for name in self.fastest]
        for rule in self.kernel_path.rules:
            keys = {"log": ("configuration",), "profile": ("moe", "attention")}[rule.where]
            if not rule.when.keys() & {*keys}:
                raise ValueError(
                    f"kernel_path.rules: a rule on the {rule.where} is chosen by "
                    f"{' or '.join(f'when.{key}' for key in keys)}, got {rule.when}"
                )
            compiles(rule.when.get("moe", rule.when.get("attention", "")))
            if (name := rule.when.get("configuration")) is not None:
                named.append(("kernel_path.rules: when.configuration", name))
        for key, name in named:
            if name not in self.configurations:
                names = ", ".join(self.configurations)
                raise ValueError(f"{key}: expected one of [configurations] ({names}), got {name!r}")
        missing = [level for level in LEVELS if level not in self.test_timeout_s]
        if missing:
            raise ValueError(f"test_timeout_s: expected every level, {missing[0]} is missing")
        metrics = [gate.metric for gate in self.performance.gates]
        for name, configuration in (("", None), *self.configurations.items()):
            table = f"configurations.{name}.gates" if configuration else "performance.gates"
            each = [gate.metric for gate in configuration.gates] if configuration else metrics
            if doubled := sorted({metric for metric in each if each.count(metric) > 1}):
                raise ValueError(f"{table}: {', '.join(doubled)} given twice")
        self._refuse_wrong_plans()
        metrics += [gate.metric for each in self.configurations.values() for gate in each.gates]
        if metrics and "performance" not in self.certify.levels:
            raise ValueError(
                "certify.levels: expected performance, too: a certificate needs a number for each "
                f"of performance.gates ({metrics[0]}); got {', '.join(self.certify.levels)}"
            )
        return self

    def _refuse_wrong_plans(self) -> None:
        performance = self.performance
        for name, row in self.plans.items():
            if name == FULL:
                raise ValueError(f"plans.{FULL}: expected another name: {FULL} is {_FULL.purpose}")
            for key, planned, allowed in (
                ("depths", row.depths, performance.depths),
                ("generated_tokens", row.generated_tokens, performance.generated_tokens),
                ("concurrency", row.concurrency, performance.measuring.concurrency),
            ):
                if strange := sorted({*(planned or ())} - {*allowed}):
                    listed = ", ".join(map(str, allowed))
                    raise ValueError(
                        f"plans.{name}.{key}: expected some of [performance]'s ({listed}), "
                        f"got {strange[0]}"
                    )

    def plan(self, name: str) -> PlanRow:
        """The plan of that name. Raises UsageError: the profile has none; names those it has."""
        plans = {**self.plans, FULL: _FULL}
        if name not in plans:
            raise UsageError(
                f"--plan {name}: expected one of profile {self.name}: {', '.join(plans)}"
                f"{did_you_mean(name, plans)}"
            )
        return plans[name]

    def judging(
        self,
        configuration: str | None = None,
        identity: str | None = None,
        options: Collection[str] | None = None,
    ) -> "Profile":
        """The profile as one configuration is judged by it (default: the fastest that the engine
        has, else ``under_test``), with what each one is in an engine of that `builds.identity` and
        those parser options. One that was named is judged by its own gates, where it has some, in
        place of the rates of ``[performance]``; else those come first. Raises UsageError: there is
        no such configuration, or that engine cannot have it."""
        named = self.configurations.get(configuration or "")
        may_have_it = options is None and any(
            builds.may_be(identity, each.build) for each in (named.settings if named else ())
        )
        resolved = {
            key: each.at(identity, options, anyhow=may_have_it and key == configuration)
            for key, each in self.configurations.items()
        }
        fastest = (name for name in self.fastest if resolved.get(name) is not None)
        name = configuration or next(fastest, self.under_test)
        if name not in self.configurations:
            names = ", ".join(self.configurations)
            raise UsageError(
                f"--configuration {name}: expected one of profile {self.name}: {names}"
            )
        for key in (name, self.baseline):
            if resolved[key] is None:
                raise UsageError(self._lacks(key, identity, resolved))
        gates, project = self.configurations[name].gates, self.performance.gates
        first, second = (project, gates)
        if configuration is not None and gates:
            first, second = (gates, tuple(gate for gate in project if gate.at_most is not None))
        metrics = [gate.metric for gate in first]
        gates = (*first, *(gate for gate in second if gate.metric not in metrics))
        return self.model_copy(
            update={
                "under_test": name,
                "question": name if gates and configuration is not None else None,
                "configurations": {key: each for key, each in resolved.items() if each is not None},
                "lacking": self.lacking
                | {
                    key: each.at(identity, options, anyhow=True)
                    for key, each in self.configurations.items()
                    if resolved[key] is None
                },
                "performance": self.performance.model_copy(update={"gates": gates}),
            }
        )

    def _lacks(
        self, name: str, identity: str | None, resolved: Mapping[str, Configuration | None]
    ) -> str:
        needs = [
            next(f"{row.title} ({', '.join(row.options)})" for row in builds.shipped()
                 if row.name == each.build)
            if each.build is not None
            else f"{self.engine.name} {each.versions}"
            for each in self.configurations[name].settings
        ]  # fmt: skip
        row = builds.named(identity)
        engine = f"{self.engine.name} {identity or 'of a release that is not known'}"
        has = ", ".join(key for key, each in resolved.items() if each is not None)
        return (
            f"profile {self.name}, configuration {name}: expected {' or '.join(needs)}; this is "
            f"{engine if row is None else f'{row.title}, {engine}'}, which has {has}"
        )

    def arguments_of(self, started: ServerConfiguration | None) -> tuple[str, ...]:
        """What a server was started with; None of an attached one: as the one under test is."""
        if started is not None:
            return started.arguments
        return (*self.engine.arguments, *self.configurations[self.under_test].arguments)

    def path_of(self, configuration: str, requested: Collection[str] = ()) -> KernelPathRequirement:
        """What the path of a configuration must show; of one that is not the profile's, what holds
        for all. `requested`: values that the server was asked for by name: what the profile says of
        them for all configurations does not hold; what this one promises does."""
        row = {**self.lacking, **self.configurations}.get(configuration)
        required = self.kernel_path.model_copy(update=dict.fromkeys(requested))
        return required.model_copy(update=values_set(row.path) if row is not None else {})

    @property
    def asks(self) -> str | None:
        """Another question than the project's, in words; None where the project's own is asked."""
        if self.question is None:
            return None
        rate = next(gate for gate in self.performance.gates if gate.minimum is not None)
        return (
            f"is it as fast as configuration {self.question} has been "
            f"({rate.metric} at least {rate.minimum:g} {rate.unit})"
        )

    def gate(self, metric: str) -> Gate | None:
        """The gate of a metric, or None where the profile sets none."""
        return next((g for g in self.performance.gates if g.metric == metric), None)


def shipped() -> dict[str, Traversable]:
    """The profiles that come with the suite, by name."""
    return data_file.shipped("profiles")


def for_architecture(arch: str, engine: str = "vllm") -> str:
    """Name of the shipped profile for an architecture and an engine: the one that extends none of
    that engine. Raises UsageError: the suite ships none for it."""
    for name in shipped():
        candidate = load(name)
        parent = None if candidate.extends is None else load(candidate.extends).engine.name
        if candidate.arch == arch and candidate.engine.name == engine != parent:
            return name
    raise UsageError(
        f"no profile is shipped for {arch} and {engine}; give one with --profile NAME|PATH "
        f"(shipped: {', '.join(shipped())})"
    )


def expected(given: Profile | None, arch: str | None, engine: str = "vllm") -> Profile:
    """The profile that a run will have, before its target is resolved: the one that was given, else
    that of an architecture (default: this machine's), else the CPU's."""
    if given is not None:
        return given
    try:
        name = for_architecture(arch or architecture.detect().name or architecture.CPU, engine)
    except UsageError:  # said again, to the user, when the target is resolved
        name = for_architecture(architecture.CPU)
    return load(name)


def load(name_or_path: str) -> Profile:
    """Load a profile by name or path, with what it extends. Raises UsageError: not valid."""
    return _load(name_or_path, "--profile", ())


def _load(name_or_path: str, asked_by: str, children: tuple[str, ...]) -> Profile:
    table, origin = data_file.chosen_table(name_or_path, "profiles", asked_by, "profile")
    if "extends" not in table and "without" not in table:
        return data_file.validated(table, origin, Profile)
    key = f"{origin}: key extends:"
    if not isinstance(extends := table.get("extends"), str):
        raise UsageError(f"{key} expected the name or path of a profile, got {extends!r}")
    if "name" not in table:
        raise UsageError(f"{origin}: key name: required key is missing: expected a name of its own")
    if origin in children:
        chain = " -> ".join([*children[children.index(origin) :], origin])
        raise UsageError(f"{key} expected no circle, got {chain}")
    parent_path = extends if extends in shipped() else str(Path(name_or_path).parent / extends)
    parent = _load(os.path.normpath(parent_path), key, (*children, origin))
    merged = extending.extended(parent, table, origin)
    # Of the parent's plans what this profile does not measure is left out.
    measured = merged.get("performance", {})
    sizes = {**measured, **measured.get("measuring", {})}
    for name in {*merged.get("plans", {})} - {*table.get("plans", {})}:
        row = merged["plans"][name]
        for key in ("depths", "generated_tokens", "concurrency"):
            if row.get(key) and key in sizes:
                row[key] = [size for size in row[key] if size in sizes[key]] or sizes[key]
    if "under_test" in table and "fastest" not in table:
        merged["fastest"] = []  # whoever says what is judged means it
    return data_file.validated(merged, origin, Profile)
