"""Profiles: TOML files with the requirements on a target.

A profile is validated as a whole when it is loaded. A mistake is reported in one line with the
file, the key and the expected value.
"""

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from sm121.core import architecture, builds, data_file, engine_settings, extending, level_settings
from sm121.core.architecture import NAMES
from sm121.core.configuration import ServerConfiguration
from sm121.core.data_file import DataTable, compiles
from sm121.core.engine_settings import Configuration, KernelPathRequirement, PathRule, values_set
from sm121.core.errors import UsageError
from sm121.core.measuring_settings import Positive
from sm121.core.plan_settings import PlanRow
from sm121.core.profile_fields import FULL, LEVELS, ConfigurationName, Gate, Level
from sm121.core.suggestion import did_you_mean

SCHEMA_VERSION = 1
_FULL = PlanRow(purpose="all checks; a certificate requires it")


class Profile(DataTable):
    """The requirements on a target."""

    schema_version: Literal[1]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    #: The profile that this one extends: the name of a shipped profile, or a path relative to this
    #: file. The field is not serialised, so that profiles with the same merged contents are equal.
    extends: str | None = Field(default=None, exclude=True)
    #: The dotted keys of the extended profile that this one removes.
    without: tuple[str, ...] = Field(default=(), exclude=True)
    description: str
    arch: str
    model: engine_settings.Model
    engine: engine_settings.EngineSettings
    #: The machines that the server spans. If None, it runs on one machine.
    nodes: engine_settings.Nodes | None = None
    #: The configuration that is tested and measured.
    under_test: str
    #: The configuration with which ``under_test`` is compared, and which must also work.
    baseline: str
    #: The first of these configurations that the engine supports replaces ``under_test``.
    fastest: tuple[ConfigurationName, ...] = ()
    #: The configuration whose own gates apply; if None, those of ``[performance]`` apply.
    question: str | None = Field(default=None, exclude=True)
    configurations: dict[ConfigurationName, Configuration] = Field(min_length=1)
    #: The configurations that the engine under test does not support (`judging`).
    lacking: dict[ConfigurationName, Configuration] = Field(default={}, exclude=True)
    kernel_path: KernelPathRequirement
    correctness: level_settings.Correctness
    stress: level_settings.StressSizes
    performance: level_settings.Performance
    regression: level_settings.Regression = level_settings.Regression()
    box: level_settings.Box | None = None
    matrix: level_settings.MatrixPlan | None = None
    #: The plans, except ``full``; the keys are their names.
    plans: dict[ConfigurationName, PlanRow] = Field(default={})
    certify: level_settings.Certify
    severities: level_settings.Severities = level_settings.Severities()
    #: The time limit of one test of a level, in seconds, for pytest-timeout.
    test_timeout_s: dict[Level, Positive]

    @model_validator(mode="before")
    @classmethod
    def _without_costs(cls, data: Any) -> Any:
        return data_file.without_retired(data, *extending.RETIRED)

    @model_validator(mode="after")
    def _consistent(self) -> "Profile":
        if self.arch not in NAMES:
            raise ValueError(f"arch: expected one of {', '.join(NAMES)}, got {self.arch!r}")
        for rule in self.kernel_path.rules:
            _require_choice(rule)
        self._require_configurations()
        self.model.require_fitting_paths(self.configurations)
        for level in LEVELS:
            if level not in self.test_timeout_s:
                raise ValueError(f"test_timeout_s: expected every level, {level} is missing")
        _require_distinct_gates("performance.gates", self.performance.gates)
        for name, configuration in self.configurations.items():
            _require_distinct_gates(f"configurations.{name}.gates", configuration.gates)
        self._require_valid_plans()
        self._require_performance_certified()
        return self

    def _require_configurations(self) -> None:
        """Raise ValueError if a key names a configuration that does not exist."""
        named = [("under_test", self.under_test), ("baseline", self.baseline)]
        for name in self.correctness.same_answers:
            named.append(("correctness.same_answers", name))
        for name in self.fastest:
            named.append(("fastest", name))
        for rule in self.kernel_path.rules:
            if "configuration" in rule.when:
                key = "kernel_path.rules: when.configuration"
                named.append((key, rule.when["configuration"]))
        for key, name in named:
            if name not in self.configurations:
                names = ", ".join(self.configurations)
                raise ValueError(f"{key}: expected one of [configurations] ({names}), got {name!r}")

    def _require_valid_plans(self) -> None:
        """Raise ValueError if a plan has a reserved name, or sizes that are not measured."""
        for name, row in self.plans.items():
            if name == FULL:
                raise ValueError(f"plans.{FULL}: expected another name: {FULL} is {_FULL.purpose}")
            for key, allowed in self._planned_sizes().items():
                planned = getattr(row, key) or ()
                unknown = sorted(set(planned) - set(allowed))
                if unknown:
                    listed = ", ".join(map(str, allowed))
                    raise ValueError(
                        f"plans.{name}.{key}: expected some of [performance]'s ({listed}), "
                        f"got {unknown[0]}"
                    )

    def _planned_sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the measured sizes, by the keys with which a plan selects sizes."""
        return {
            "depths": self.performance.depths,
            "generated_tokens": self.performance.generated_tokens,
            "concurrency": self.performance.measuring.concurrency,
        }

    def _require_performance_certified(self) -> None:
        """Raise ValueError if there are gates, but a certificate does not require their level."""
        gates = list(self.performance.gates)
        for configuration in self.configurations.values():
            gates.extend(configuration.gates)
        if gates and "performance" not in self.certify.levels:
            raise ValueError(
                "certify.levels: expected performance, too: a certificate needs a number for each "
                f"of performance.gates ({gates[0].metric}); got {', '.join(self.certify.levels)}"
            )

    def plan(self, name: str) -> PlanRow:
        """Return a plan.

        Args:
            name: The name of the plan, or `FULL`.

        Raises:
            UsageError: The profile has no plan of this name. The message lists its plans.
        """
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
        """Return the profile resolved for one configuration and one engine.

        The gates are those of ``[performance]``, then those of the configuration. If the user named
        a configuration that has its own gates, these come first, and the gates on rates in
        ``[performance]`` do not apply.

        Args:
            configuration: The configuration that the user named. If None, the first one in
                ``fastest`` that the engine supports is used, or else ``under_test``.
            identity: The engine's `builds.identity`.
            options: The engine's command-line options; None if they are unknown.

        Returns:
            The profile, with its configurations resolved for the engine.

        Raises:
            UsageError: The configuration does not exist, or the engine does not support it or the
                baseline.
        """
        resolved = self._resolved(configuration, identity, options)
        fastest = [name for name in self.fastest if resolved.get(name) is not None]
        name = configuration or (fastest[0] if fastest else self.under_test)
        if name not in self.configurations:
            names = ", ".join(self.configurations)
            raise UsageError(
                f"--configuration {name}: expected one of profile {self.name}: {names}"
            )
        for key in (name, self.baseline):
            if resolved[key] is None:
                raise UsageError(self._lacks(key, identity, resolved))
        supported = {}
        lacking = dict(self.lacking)
        for key, result in resolved.items():
            if result is not None:
                supported[key] = result
                continue
            first = self.configurations[key].at(identity, options, anyhow=True)
            if first is not None:
                lacking[key] = first
        own_gates = self.configurations[name].gates
        if configuration is not None and own_gates:
            times = [gate for gate in self.performance.gates if gate.at_most is not None]
            gates = _without_doubles((*own_gates, *times))
        else:
            gates = _without_doubles((*self.performance.gates, *own_gates))
        return self.model_copy(
            update={
                "under_test": name,
                "question": name if gates and configuration is not None else None,
                "configurations": supported,
                "lacking": lacking,
                "performance": self.performance.model_copy(update={"gates": gates}),
            }
        )

    def _resolved(
        self, configuration: str | None, identity: str | None, options: Collection[str] | None
    ) -> dict[str, Configuration | None]:
        """Return each configuration resolved for an engine; None if the engine lacks it."""
        resolved = {}
        for key, row in self.configurations.items():
            may_support_it = False
            # An engine with unknown options may be a build that supports the named configuration.
            if key == configuration and options is None:
                may_support_it = any(
                    builds.may_be(identity, setting.build) for setting in row.settings
                )
            resolved[key] = row.at(identity, options, anyhow=may_support_it)
        return resolved

    def _lacks(
        self, name: str, identity: str | None, resolved: Mapping[str, Configuration | None]
    ) -> str:
        """Return the message for a configuration that the engine does not support."""
        titles = {row.name: f"{row.title} ({', '.join(row.options)})" for row in builds.shipped()}
        needs = []
        for setting in self.configurations[name].settings:
            if setting.build is not None:
                needs.append(titles[setting.build])
            else:
                needs.append(f"{self.engine.name} {setting.versions}")
        engine = f"{self.engine.name} {identity or 'of an unknown release'}"
        row = builds.named(identity)
        if row is not None:
            engine = f"{row.title}, {engine}"
        supported = ", ".join(key for key, result in resolved.items() if result is not None)
        return (
            f"profile {self.name}, configuration {name}: expected {' or '.join(needs)}; this is "
            f"{engine}, which has {supported}"
        )

    def arguments_of(self, started: ServerConfiguration | None) -> tuple[str, ...]:
        """Return a server's arguments.

        Args:
            started: The configuration with which the suite started the server. If None, the server
                is attached, and the arguments of ``under_test`` are returned.
        """
        if started is not None:
            return started.arguments
        return (*self.engine.arguments, *self.configurations[self.under_test].arguments)

    def path_of(self, configuration: str, requested: Collection[str] = ()) -> KernelPathRequirement:
        """Return the requirements on the kernel path of a configuration.

        Args:
            configuration: The name; if the profile lacks it, ``[kernel_path]`` applies.
            requested: Fields whose values the user who started the server chose. For these, only
                the configuration's requirements apply, not those in ``[kernel_path]``.
        """
        required = self.kernel_path.model_copy(update=dict.fromkeys(requested))
        row = {**self.lacking, **self.configurations}.get(configuration)
        if row is None:
            return required
        return required.model_copy(update=values_set(row.path))

    @property
    def asks(self) -> str | None:
        """What the gates of the named configuration test, as a question; None if there are none."""
        rates = [gate for gate in self.performance.gates if gate.minimum is not None]
        if self.question is None or not rates:
            return None
        rate = rates[0]
        return (
            f"is it as fast as configuration {self.question} has been "
            f"({rate.metric} at least {rate.minimum:g} {rate.unit})"
        )

    def gate(self, metric: str) -> Gate | None:
        """Return the gate of a metric, or None.

        Args:
            metric: The name of the metric, for example ``tg128@d0``.
        """
        for gate in self.performance.gates:
            if gate.metric == metric:
                return gate
        return None


def _require_choice(rule: PathRule) -> None:
    """Raise ValueError if a rule's ``when`` has no condition that fits its ``where``."""
    keys = {"log": ("configuration",), "profile": ("moe", "attention")}[rule.where]
    if rule.when.keys().isdisjoint(keys):
        listed = " or ".join(f"when.{key}" for key in keys)
        raise ValueError(
            f"kernel_path.rules: expected {listed} for a rule on the {rule.where}, got {rule.when}"
        )
    compiles(rule.when.get("moe", rule.when.get("attention", "")))


def _require_distinct_gates(table: str, gates: Sequence[Gate]) -> None:
    """Raise ValueError if a metric has two gates in one table."""
    metrics = [gate.metric for gate in gates]
    doubled = sorted({metric for metric in metrics if metrics.count(metric) > 1})
    if doubled:
        raise ValueError(f"{table}: {', '.join(doubled)} given twice")


def _without_doubles(gates: Sequence[Gate]) -> tuple[Gate, ...]:
    """Return the first gate of each metric."""
    by_metric: dict[str, Gate] = {}
    for gate in gates:
        by_metric.setdefault(gate.metric, gate)
    return tuple(by_metric.values())


def shipped() -> dict[str, Traversable]:
    """Return the profiles that ship with the suite; the keys are their names."""
    return data_file.shipped("profiles")


@functools.cache  # called a dozen times in a run, and loading the profiles is slow
def for_architecture(arch: str, engine: str = "vllm") -> str:
    """Return the name of the shipped profile for an architecture and an engine.

    Of several such profiles, the one that extends no profile of the same engine is returned.

    Args:
        arch: A name of `architecture.NAMES`.
        engine: The name of the engine.

    Raises:
        UsageError: The suite has no profile for this architecture and engine.
    """
    for name in shipped():
        candidate = load(name)
        if candidate.arch != arch or candidate.engine.name != engine:
            continue
        if candidate.extends is None or load(candidate.extends).engine.name != engine:
            return name
    raise UsageError(
        f"no profile is shipped for {arch} and {engine}; give one with --profile NAME|PATH "
        f"(shipped: {', '.join(shipped())})"
    )


def expected(
    given: Profile | None, arch: str | None, engine: str = "vllm", marked: Sequence[str] = ()
) -> Profile:
    """Return the profile that a run will probably have, before its target is resolved.

    Args:
        given: The profile that the user named.
        arch: The architecture. If None, `architecture.expected` is used. If the suite has no
            profile for the architecture, the CPU's profile is returned.
        engine: The name of the engine.
        marked: The architectures that occur in the expression of ``-m``.
    """
    if given is not None:
        return given
    try:
        name = for_architecture(arch or architecture.expected(marked), engine)
    except UsageError:  # the error is raised again when the target is resolved
        name = for_architecture(architecture.CPU)
    return load(name)


def load(name_or_path: str) -> Profile:
    """Load a profile, merged with the profile that it extends.

    Args:
        name_or_path: The name of a shipped profile, or a path.

    Raises:
        UsageError: The profile does not exist, or is wrong.
    """
    if name_or_path in shipped():
        return _load_shipped(name_or_path)
    return _load(name_or_path, "--profile", ())


@functools.cache
def _load_shipped(name: str) -> Profile:
    """Load a shipped profile, with a cache, because a run searches all of them."""
    return _load(name, "--profile", ())


def _load(name_or_path: str, what: str, children: tuple[str, ...]) -> Profile:
    """Load the profile that an option or a key (``what``) names.

    ``children`` are the files that extend the profile, directly or not; the outermost first.
    """
    table, origin = data_file.chosen_table(name_or_path, "profiles", what, "profile")
    extending.find_exam(table, Path(name_or_path).parent)
    if "extends" not in table and "without" not in table:
        return data_file.validated(table, origin, Profile)
    key = f"{origin}: key extends:"
    extends = table.get("extends")
    if not isinstance(extends, str):
        raise UsageError(f"{key} expected the name or path of a profile, got {extends!r}")
    if "name" not in table:
        raise UsageError(
            f"{origin}: key name: required key is missing: expected a name other than the parent's"
        )
    if origin in children:
        chain = " -> ".join([*children[children.index(origin) :], origin])
        raise UsageError(f"{key} expected no cycle, got {chain}")
    parent_path = extends if extends in shipped() else str(Path(name_or_path).parent / extends)
    parent = _load(os.path.normpath(parent_path), key, (*children, origin))
    merged = extending.extended(parent, table, origin)
    _fit_inherited_plans(merged, own_plans=table.get("plans", {}))
    if "under_test" in table and "fastest" not in table:
        merged["fastest"] = []  # this profile chooses the configuration itself
    return data_file.validated(merged, origin, Profile)


def _fit_inherited_plans(merged: dict[str, Any], own_plans: Collection[str]) -> None:
    """In the plans that a profile inherits, remove the sizes that the profile does not measure."""
    performance = _table(merged.get("performance"))
    sizes = {**performance, **_table(performance.get("measuring"))}
    for name, row in _table(merged.get("plans")).items():
        if name in own_plans:
            continue
        for key in ("depths", "generated_tokens", "concurrency"):
            measured = sizes.get(key)
            if row.get(key) and isinstance(measured, list | tuple):
                row[key] = [size for size in row[key] if size in measured] or measured


def _table(value: Any) -> dict[str, Any]:
    """Return a value if it is a table; else return an empty table, and let validation report it."""
    return value if isinstance(value, dict) else {}
