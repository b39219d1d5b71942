"""The axes as one version of one engine supports them: values, settings, rules and cells."""

import functools
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from sm121.core import errors
from sm121.core.versions import release, within
from sm121.evidence.host import cpu_flags
from sm121.matrix.axes import AxesFile, AxisValue, Cell, Choice, Incompatible, Setting

#: The allowed cells are only counted if there are at most this many combinations.
_COUNTABLE = 2_000_000


@dataclass(frozen=True)
class Space:
    """The axes of an engine. Values for which it has no setting are omitted.

    Raises:
        UsageError: The incompatibilities of the file rule out the baseline or a value.
    """

    file: AxesFile
    engine: str
    #: The engine's `sm121.core.builds.identity`. If it names neither a release nor a build, the
    #: settings of all releases apply whose options the engine's parser accepts.
    version: str | None = None
    #: The options of the engine's parser, if ``version`` names neither a release nor a build. If
    #: None, they are unknown, and all settings apply, as for ``sm121 matrix`` without an engine.
    options: Collection[str] | None = None
    #: The engine's settings of each axis and value.
    settings: Mapping[str, Mapping[str, Setting]] = field(init=False)
    #: The reason why a value is not in the space. The keys are axis and value.
    absent: Mapping[tuple[str, str], str] = field(init=False)

    def __post_init__(self) -> None:
        settings: dict[str, dict[str, Setting]] = {}
        absent: dict[tuple[str, str], str] = {}
        for name, axis in self.file.axes.items():
            chosen: dict[str, Setting] = {}
            for value_name, value in axis.values.items():
                setting = self._setting_of(value)
                if name in self.file.left_out and value_name != axis.baseline:
                    absent[name, value_name] = f"left out: {self.file.left_out[name]}"
                elif setting is not None:
                    chosen[value_name] = setting
                else:
                    absent[name, value_name] = self._why_absent(value)
            if axis.baseline in chosen:
                settings[name] = chosen
                continue
            # Without its baseline, an axis has nothing to compare with, and is omitted.
            why = absent[name, axis.baseline]
            for value_name in chosen:
                absent[name, value_name] = f"its baseline {axis.baseline} is absent: {why}"
        object.__setattr__(self, "settings", settings)
        object.__setattr__(self, "absent", absent)
        self._require_cells()

    def _setting_of(self, value: AxisValue) -> Setting | None:
        """Return the setting for a value of an axis, or None if there is none.

        A setting for the engine's build is preferred to a setting for its version.
        """
        fitting = []
        for setting in value.settings:
            if setting.engine != self.engine or not setting.fits(self.version, self.options):
                continue
            if setting.cpu is None or re.search(rf"\b({setting.cpu})\b", cpu_flags()):
                fitting.append(setting)
        return min(fitting, key=lambda setting: setting.build is None, default=None)

    def _why_absent(self, value: AxisValue) -> str:
        if value.not_applicable:
            return value.not_applicable
        return f"{self.engine} {self.version or '(version unknown)'} has no setting for it"

    def _require_cells(self) -> None:
        """Raise UsageError if the baseline or all cells of some value are ruled out."""
        where = f"matrix {self.file.name}"
        rule = self.excluded(self.baseline)
        if rule is not None:
            raise errors.UsageError(
                f"{where}: the baseline itself is ruled out for {self.engine} by {rule}"
            )
        for name, value_name in self._single_values():
            if self.completion({name: value_name}) is None:
                rules = "; ".join(str(rule) for rule in self.rules if name in rule.when)
                raise errors.UsageError(
                    f"{where}: no combination is left with {name}={value_name}; its "
                    f"incompatibilities contradict each other: {rules}"
                )

    def completion(self, partial: Cell) -> dict[str, str] | None:
        """Complete some values to an allowed cell.

        Args:
            partial: The values of some axes. The other axes get their baseline's value if that is
                allowed.

        Returns:
            The cell, or None if no allowed cell has these values.
        """
        if self.excluded(partial) is not None:
            return None
        open_axes = [axis for axis in self.axes if axis not in partial]
        if not open_axes:
            return {**partial}
        axis = open_axes[0]
        for value in sorted(self.values(axis), key=lambda value: value != self.baseline[axis]):
            whole = self.completion({**partial, axis: value})
            if whole is not None:
                return whole
        return None

    @functools.cached_property
    def rules(self) -> tuple[Incompatible, ...]:
        """The incompatibilities of this engine and version."""
        rules = []
        for rule in self.file.incompatible:
            is_of_version = release(self.version) is None or within(self.version, rule.versions)
            if rule.engine in (None, self.engine) and is_of_version:
                rules.append(rule)
        return tuple(rules)

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes with at least two values."""
        return tuple(name for name, values in self.settings.items() if len(values) > 1)

    @functools.cached_property
    def baseline(self) -> dict[str, str]:
        """The baseline cell."""
        return {axis: self.file.axes[axis].baseline for axis in self.axes}

    @functools.cached_property
    def fixed(self) -> dict[str, str]:
        """The axes that have only one value for this engine, with that value."""
        fixed = {}
        for name in self.settings:
            if name not in self.axes:
                fixed[name] = self.file.axes[name].baseline
        return fixed

    def unproven(self) -> dict[str, str]:
        """Return the values that may silently fall back, as ``axis=value``, with the reasons."""
        reasons: dict[str, str] = {}
        for axis, name in self._single_values():
            value = self.value(axis, name)
            proven = value.expected.proves or self.settings[axis][name].expected.proves
            if value.unproven is not None and name != self.baseline[axis] and not proven:
                reasons[f"{axis}={name}"] = value.unproven
        return reasons

    def values(self, axis: str) -> tuple[str, ...]:
        """Return the names of an axis's values.

        Args:
            axis: The name of an axis that this engine has.

        Raises:
            KeyError: The engine lacks the axis.
        """
        return tuple(self.settings[axis])

    def value(self, axis: str, name: str) -> AxisValue:
        """Return the entry of the axes file for a value of an axis.

        Args:
            axis: The name of the axis.
            name: The name of the value.

        Raises:
            KeyError: The file has no such axis or value.
        """
        return self.file.axes[axis].values[name]

    def excluded(self, cell: Cell) -> Incompatible | None:
        """Return the first incompatibility that rules out a cell; None if the cell is allowed.

        Args:
            cell: The values of some or all axes. Axes with only one value for this engine are
                added.
        """
        whole = {**self.fixed, **cell}
        for rule in self.rules:
            if rule.covers(whole):
                return rule
        return None

    def allowed(self, choice: Choice) -> bool:
        """Return whether an allowed cell with these values exists.

        Args:
            choice: The values of some axes, as (axis, value) pairs.
        """
        return self.completion(dict(choice)) is not None

    def _single_values(self) -> Iterator[tuple[str, str]]:
        """Yield the axis and the name of each value of `axes`."""
        for axis in self.axes:
            for name in self.values(axis):
                yield axis, name

    def choices(self, strength: int) -> Iterator[Choice]:
        """Yield the combinations of values, allowed or not, of each set of axes.

        Args:
            strength: The number of axes in a set. Only axes with at least two values are combined.
        """
        for names in itertools.combinations(self.axes, strength):
            for values in itertools.product(*(self.values(axis) for axis in names)):
                yield tuple(zip(names, values, strict=True))

    def full(self) -> Iterator[dict[str, str]]:
        """Yield each allowed cell."""
        for values in itertools.product(*(self.values(axis) for axis in self.axes)):
            cell = dict(zip(self.axes, values, strict=True))
            if self.excluded(cell) is None:
                yield cell

    @functools.cached_property
    def product(self) -> int:
        """The number of all combinations, allowed or not."""
        return math.prod(len(self.values(axis)) for axis in self.axes)

    def given(self, cell: Cell) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the engine's arguments and variables for a cell, axis by axis.

        Args:
            cell: The value of each axis of `axes`.

        Returns:
            The arguments in the order of the axes, and the environment variables. If several axes
            set a variable, the last one counts.

        Raises:
            KeyError: The cell lacks an axis.
        """
        arguments: list[str] = []
        variables: dict[str, str] = {}
        for axis in self.axes:
            setting = self.settings[axis][cell[axis]]
            arguments.extend(setting.arguments)
            variables.update(setting.environment)
        return tuple(arguments), variables

    def differences(self, cell: Cell) -> Choice:
        """Return the values of a cell that differ from those of the baseline.

        Args:
            cell: The value of each axis of `axes`.

        Returns:
            (axis, value) pairs in the order of the axes; empty for the baseline.

        Raises:
            KeyError: The cell lacks an axis.
        """
        return tuple((a, cell[a]) for a in self.axes if cell[a] != self.baseline[a])


def count_allowed(space: Space) -> int | None:
    """Return the number of allowed combinations.

    Args:
        space: The axes.

    Returns:
        The number; None if there are more than 2,000,000 combinations, too many to count.
    """
    if space.product > _COUNTABLE:
        return None
    return sum(1 for _ in space.full())


def identity(space: Space, cell: Cell) -> str:
    """Return the name of a cell, also the id of its test: the values that differ from the baseline.

    Args:
        space: The axes.
        cell: The value of each axis. The name of the baseline is ``baseline``.
    """
    return ",".join(f"{axis}={value}" for axis, value in space.differences(cell)) or "baseline"
