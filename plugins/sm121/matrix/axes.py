"""Axes as data: the features of an engine that are switched when it starts (``fixtures/matrix``).
An axis has values; a value says what each engine and version must be given for it, what must then
be seen, and what it cannot be combined with. A value that an engine has no knob for is not
applicable there, with the reason."""

import functools
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sm121.core import data_file, engine_settings, errors, level_settings
from sm121.core.data_file import DataTable, Pattern, without_retired
from sm121.core.versions import Versions, release, within
from sm121.evidence.host import cpu_flags
from sm121.evidence.kernel_path import KernelPath

Cell = Mapping[str, str]
#: Chosen values of some axes, in an order that does not depend on how they were found.
Choice = tuple[tuple[str, str], ...]

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
_Fraction = Annotated[float, Field(ge=0, lt=1)]
#: More cells than this in a full product are not enumerated.
_COUNTABLE = 2_000_000


class Expected(DataTable):
    """What the evidence must show when the value is in force."""

    #: Field of the kernel path -> pattern of the whole resolved value; case does not count.
    path: dict[str, Pattern] = Field(default_factory=dict)
    must_see: tuple[Pattern, ...] = ()
    must_not_see: tuple[Pattern, ...] = ()

    @model_validator(mode="after")
    def _known(self) -> "Expected":
        for name in self.path:
            if name not in KernelPath.model_fields:
                fields = ", ".join(sorted(KernelPath.model_fields))
                raise ValueError(f"path: expected one of {fields}; got {name!r}")
        return self

    @property
    def proves(self) -> bool:
        """Whether something must be seen; that something is not seen proves nothing."""
        return bool(self.path or self.must_see)

    def unmet(self, where: str, path: KernelPath, log: str | None) -> list[str]:
        """What of it the evidence does not show. `where`: the value; `log`: None without one."""
        wrong = []
        for name, pattern in self.path.items():
            observed = getattr(path, name)
            if not re.fullmatch(pattern, str(observed), re.I):
                line = path.evidence.get(name, "no line of the log shows it")
                wrong.append(f"{where}: required {name} {pattern}, seen {observed} ({line})")
        if log is None:
            return wrong
        for pattern in self.must_see:
            if not re.search(pattern, log):
                wrong.append(f"{where}: must see {pattern!r}, no line of the log matches")
        for pattern in self.must_not_see:
            if match := re.search(f".*{pattern}.*", log):
                wrong.append(f"{where}: must not see {pattern!r}, seen: {match[0].strip()[:200]}")
        return wrong


class Setting(engine_settings.ReleaseSetting):
    """What one engine is given for a value. Nothing at all where it is the engine's default."""

    engine: str
    #: Of the flags of /proc/cpuinfo, one that the machine must have: ``avx512f|amx_tile``.
    cpu: Pattern | None = None
    #: What this engine's log must show, beside what the value's own ``expected`` says.
    expected: Expected = Expected()


class AxisValue(DataTable):
    """One value of an axis."""

    settings: tuple[Setting, ...] = ()
    #: Where no setting fits: why, and what to do instead.
    not_applicable: str | None = None
    expected: Expected = Expected()
    #: Why nothing can show that it is in force, where nothing can: it may silently fall back.
    unproven: Annotated[str, Field(min_length=3)] | None = None
    #: Fallbacks of the log (ids of ``fixtures/signatures``) that belong to the value.
    fallbacks: tuple[str, ...] = ()
    #: Answers of this value are other numbers; null: those of the baseline's dtype.
    bound: level_settings.GoldenBound | None = None
    #: Whether its answers are held against the oracle, too, which rounds as the server does.
    oracle: bool = False
    #: By how much it may be slower than the baseline; null: the profile's own threshold.
    may_be_slower: _Fraction | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_costs(cls, data: Any) -> Any:
        return without_retired(data, "boot_s")

    @model_validator(mode="after")
    def _given(self) -> "AxisValue":
        if not self.settings and self.not_applicable is None:
            raise ValueError("expected settings, or not_applicable with the reason")
        return self


class Axis(DataTable):
    """A feature that is switched."""

    title: str
    baseline: str
    values: dict[_Name, AxisValue] = Field(min_length=2)

    @model_validator(mode="after")
    def _has_baseline(self) -> "Axis":
        if self.baseline not in self.values:
            values = ", ".join(self.values)
            raise ValueError(f"baseline: expected one of {values}; got {self.baseline!r}")
        return self

    @model_validator(mode="after")
    def _is_proven(self) -> "Axis":
        """What is switched must be seen, or the file says that it cannot be."""
        for name, value in self.values.items():
            if name == self.baseline or value.unproven is not None or value.expected.proves:
                continue
            for setting in value.settings:
                if not setting.expected.proves:
                    raise ValueError(
                        f"values.{name}: {setting.engine}: expected evidence (path or must_see of "
                        "expected), or unproven with the reason why nothing shows it"
                    )
        return self


class Incompatible(DataTable):
    """Values that are known not to go together."""

    when: dict[str, str | tuple[str, ...]] = Field(min_length=1)
    #: Of the engines and versions that it is about.
    engine: str | None = None
    versions: Versions = ""
    reason: str = Field(min_length=3)
    source: str = Field(min_length=3)

    def covers(self, cell: Cell) -> bool:
        """Whether the cell has these values."""
        return all(cell.get(axis) in _listed(values) for axis, values in self.when.items())

    @property
    def values(self) -> str:
        """What does not go together, for people."""
        return " + ".join(f"{axis}={'|'.join(_listed(v))}" for axis, v in self.when.items())

    def __str__(self) -> str:
        return f"{self.values}: {self.reason}"


class Named(DataTable):
    """A cell that is always in; axes that it leaves out are as in the baseline."""

    values: dict[str, str]
    source: str = Field(min_length=3)


class AxesFile(DataTable):
    """A file of ``fixtures/matrix``."""

    schema_version: Literal[1]
    name: _Name
    description: str
    axes: dict[_Name, Axis] = Field(min_length=1)
    incompatible: tuple[Incompatible, ...] = ()
    named: dict[_Name, Named] = Field(default_factory=dict)
    #: Features in the order in which they were merged: each newer one is tried with each before.
    features: tuple[dict[str, str], ...] = ()
    #: Axes that stay at their baseline, each with the reason (a profile's ``matrix.left_out``).
    left_out: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> "AxesFile":
        used: list[tuple[str, Mapping[str, str | tuple[str, ...]]]] = [
            *((f"named.{name}", one.values) for name, one in self.named.items()),
            *((f"features.{n}", one) for n, one in enumerate(self.features)),
            *((f"incompatible.{n}", one.when) for n, one in enumerate(self.incompatible)),
            ("left_out", dict.fromkeys(self.left_out, ())),
        ]
        for key, values in used:
            for axis, listed in values.items():
                if axis not in self.axes:
                    names = ", ".join(self.axes)
                    raise ValueError(f"{key}: expected an axis ({names}); got {axis!r}")
                names = ", ".join(self.axes[axis].values)
                for value in _listed(listed):
                    if value not in self.axes[axis].values:
                        raise ValueError(f"{key}: {axis}: expected one of {names}; got {value!r}")
        baseline = {name: axis_.baseline for name, axis_ in self.axes.items()}
        for rule in self.incompatible:
            if rule.engine is None and rule.covers(baseline):
                raise ValueError(f"incompatible: the baseline itself is ruled out by {rule}")
        return self


def _listed(values: str | tuple[str, ...]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else values


def load(name_or_path: str) -> AxesFile:
    """An axis file by the name of a shipped one, or by path. Raises UsageError: there is none, or
    it is not valid; one line with file, key and expectation."""
    return data_file.chosen(name_or_path, "matrix", AxesFile, "matrix axes", "matrix")


def leave_out(file: AxesFile, reasons: Mapping[str, str]) -> AxesFile:
    """Return a file whose axes `reasons` stay at their baseline.

    Raises:
        UsageError: One of them is no axis of the file.
    """
    if unknown := sorted(reasons.keys() - file.axes.keys()):
        names = ", ".join(file.axes)
        raise errors.UsageError(
            f"matrix.left_out: expected axes of {file.name} ({names}), got {', '.join(unknown)}"
        )
    return file.model_copy(update={"left_out": dict(reasons)})


@dataclass(frozen=True)
class Space:
    """The axes as one engine of one version has them: what it has no knob for is left out."""

    file: AxesFile
    engine: str
    #: As `sm121.core.builds.identity` has it. What names no release and no build has the settings
    #: of every release that its parser takes.
    version: str | None = None
    #: Of the engine's parser, for such a version. None where it was not asked: all settings are
    #: then shown, as ``sm121 matrix`` does without an engine.
    options: Collection[str] | None = None
    #: axis -> value -> what the engine is given.
    settings: Mapping[str, Mapping[str, Setting]] = field(init=False)
    #: (axis, value) -> why it is not there.
    absent: Mapping[tuple[str, str], str] = field(init=False)

    def __post_init__(self) -> None:
        settings: dict[str, dict[str, Setting]] = {}
        absent: dict[tuple[str, str], str] = {}
        for name, axis in self.file.axes.items():
            settings[name] = {}
            for value_name, value in axis.values.items():
                fitting = [
                    setting
                    for setting in value.settings
                    if setting.engine == self.engine
                    and setting.fits(self.version, self.options)
                    and (setting.cpu is None or re.search(rf"\b({setting.cpu})\b", cpu_flags()))
                ]
                if name in self.file.left_out and value_name != axis.baseline:
                    absent[name, value_name] = f"left out: {self.file.left_out[name]}"
                elif fitting:  # a build's own knob goes before that of everybody
                    chosen = min(fitting, key=lambda setting: setting.build is None)
                    settings[name][value_name] = chosen
                else:
                    absent[name, value_name] = value.not_applicable or (
                        f"{self.engine} {self.version or '(version unknown)'} has no setting for it"
                    )
            if axis.baseline not in settings[name]:
                why = absent[name, axis.baseline]
                # Without its baseline an axis has nothing to be compared with.
                for value_name in settings.pop(name):
                    absent[name, value_name] = f"its baseline {axis.baseline} is absent: {why}"
        object.__setattr__(self, "settings", settings)
        object.__setattr__(self, "absent", absent)
        where = f"matrix {self.file.name}"
        if (rule := self.excluded(self.baseline)) is not None:
            raise errors.UsageError(
                f"{where}: the baseline itself is ruled out for {self.engine} by {rule}"
            )
        for ((name, value_name),) in self.choices(1):
            if self.completion({name: value_name}) is None:
                raise errors.UsageError(
                    f"{where}: no combination is left with {name}={value_name}; its "
                    "incompatibilities contradict each other: "
                    f"{'; '.join(str(r) for r in self.rules if name in r.when)}"
                )

    def completion(self, partial: Cell) -> dict[str, str] | None:
        """A whole allowed cell with these values; the baseline's for the others where possible."""
        if self.excluded(partial) is not None:
            return None
        axis = next((axis for axis in self.axes if axis not in partial), None)
        if axis is None:
            return {**partial}
        for value in sorted(self.values(axis), key=lambda v: v != self.baseline[axis]):
            if (whole := self.completion({**partial, axis: value})) is not None:
                return whole
        return None

    @functools.cached_property
    def rules(self) -> tuple[Incompatible, ...]:
        """The incompatibilities that are about this engine and version."""
        return tuple(
            rule
            for rule in self.file.incompatible
            if rule.engine in (None, self.engine)
            and (release(self.version) is None or within(self.version, rule.versions))
        )

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes with a choice: at least two values."""
        return tuple(name for name, values in self.settings.items() if len(values) > 1)

    @functools.cached_property
    def baseline(self) -> dict[str, str]:
        """The baseline cell."""
        return {axis: self.file.axes[axis].baseline for axis in self.axes}

    @functools.cached_property
    def fixed(self) -> dict[str, str]:
        """Axes without a choice here: they are as in the baseline."""
        return {
            name: self.file.axes[name].baseline
            for name, values in self.settings.items()
            if name not in self.axes and self.file.axes[name].baseline in values
        }

    def unproven(self) -> dict[str, str]:
        """Values of this engine that may silently fall back: ``axis=value`` -> why."""
        reasons: dict[str, str] = {}
        for ((axis, name),) in self.choices(1):
            value = self.value(axis, name)
            proven = value.expected.proves or self.settings[axis][name].expected.proves
            if value.unproven is not None and name != self.baseline[axis] and not proven:
                reasons[f"{axis}={name}"] = value.unproven
        return reasons

    def values(self, axis: str) -> tuple[str, ...]:
        """The values of an axis."""
        return tuple(self.settings[axis])

    def value(self, axis: str, name: str) -> AxisValue:
        """What the file says of a value."""
        return self.file.axes[axis].values[name]

    def excluded(self, cell: Cell) -> Incompatible | None:
        """The incompatibility that rules a cell out, whole or in part; None if it is allowed."""
        whole = {**self.fixed, **cell}
        return next((rule for rule in self.rules if rule.covers(whole)), None)

    def allowed(self, choice: Choice) -> bool:
        """Whether some whole cell has these values."""
        return self.completion(dict(choice)) is not None

    def choices(self, strength: int) -> Iterator[Choice]:
        """All combinations of values of so many axes, allowed or not."""
        for names in itertools.combinations(self.axes, strength):
            for values in itertools.product(*(self.values(axis) for axis in names)):
                yield tuple(zip(names, values, strict=True))

    def full(self) -> Iterator[dict[str, str]]:
        """Every allowed cell."""
        for values in itertools.product(*(self.values(axis) for axis in self.axes)):
            cell = dict(zip(self.axes, values, strict=True))
            if self.excluded(cell) is None:
                yield cell

    @functools.cached_property
    def product(self) -> int:
        """Number of all combinations, allowed or not."""
        return math.prod(len(self.values(axis)) for axis in self.axes)

    def given(self, cell: Cell) -> tuple[tuple[str, ...], dict[str, str]]:
        """The arguments and the variables that the engine is given for a cell, axis by axis."""
        settings = [self.settings[axis][cell[axis]] for axis in self.axes]
        variables = {name: value for each in settings for name, value in each.environment.items()}
        return tuple(argument for each in settings for argument in each.arguments), variables

    def differences(self, cell: Cell) -> Choice:
        """The values of a cell that are not the baseline's."""
        return tuple((a, cell[a]) for a in self.axes if cell[a] != self.baseline[a])


def count_allowed(space: Space) -> int | None:
    """Return the number of allowed combinations; None if there are too many to count."""
    if space.product > _COUNTABLE:
        return None
    return sum(1 for _ in space.full())


def label(choice: Choice) -> str:
    """Return values for people: ``graphs=eager + moe=cutlass``; ``baseline`` without any."""
    return " + ".join(f"{axis}={value}" for axis, value in choice) or "baseline"


def identity(space: Space, cell: Cell) -> str:
    """Name of a cell, and the id of its test: the values that are not the baseline's."""
    return ",".join(f"{a}={v}" for a, v in space.differences(cell)) or "baseline"
