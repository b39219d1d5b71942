"""Covering arrays: few cells that contain every combination of N values.

The package `covertable` makes the array (greedy, deterministic). This module counts the coverage
independently, from the cells.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import covertable

from sm121.core.errors import OptionError, Sm121Error
from sm121.matrix.axes import Cell, Choice, Incompatible, label
from sm121.matrix.space import Space, identity

#: The number of axes whose values are combined in all ways. ``full`` stands for all cells, ``none``
#: for the baseline alone.
Strength = int | Literal["full", "none"]
#: The number of random orders to try for each strength. The smallest resulting array is used.
_TRIES = {1: 8, 2: 24, 3: 1}
#: The largest number of digits of a strength. Python converts no text of thousands of digits.
_DIGITS = 18


@dataclass(frozen=True)
class Coverage:
    """How many of the allowed combinations of values occur in some cells."""

    #: The number of values in a combination.
    strength: int
    allowed: int
    covered: int
    #: The allowed combinations that no cell contains.
    missing: tuple[Choice, ...]
    #: The number of combinations that are not allowed.
    excluded: int

    def __str__(self) -> str:
        unit = {1: "values", 2: "pairs", 3: "triples"}.get(
            self.strength, f"combinations of {self.strength} values"
        )
        share = self.covered / self.allowed if self.allowed else 1.0
        ruled_out = f"; {self.excluded} are incompatible" if self.excluded else ""
        return f"{self.covered} of {self.allowed} allowed {unit} ({share:.0%}){ruled_out}"


@dataclass(frozen=True)
class Planned:
    """A cell of the plan."""

    cell: dict[str, str]
    #: The reasons why the cell is in the plan.
    why: tuple[str, ...]


@dataclass(frozen=True)
class Array:
    """The cells of a run, the baseline first."""

    strength: Strength
    cells: tuple[Planned, ...]
    #: Named cells that are known not to work, with the rule.
    incompatible: Mapping[str, Incompatible]
    #: Named cells with a value that the engine does not have, with the reason.
    absent: Mapping[str, str]

    @property
    def rows(self) -> list[Cell]:
        """The cells without the reasons why they are planned."""
        return [planned.cell for planned in self.cells]

    def names(self, space: Space) -> list[str]:
        """Return the names of the cells (`sm121.matrix.space.identity`).

        Args:
            space: The axes for which the array was built.
        """
        return [identity(space, cell) for cell in self.rows]


@dataclass(frozen=True)
class _Addition:
    """A cell that a run has in addition to those of the covering array."""

    name: str
    #: The values that the cell sets; other axes have the baseline's value.
    values: dict[str, str]
    #: Whether the cell combines two features.
    of_features: bool


def parse_strength(text: str) -> Strength:
    """Parse the value of ``--matrix``.

    Args:
        text: A positive number of at most 18 digits, ``full`` or ``none``.

    Raises:
        OptionError: The text is anything else.
    """
    if text == "full":
        return "full"
    if text == "none":
        return "none"
    if not text.isdecimal() or len(text) > _DIGITS or int(text) < 1:
        raise OptionError("--matrix", f"{text[:40]}: expected 1, 2 (pairs), ..., full or none")
    return int(text)


def require_strength(space: Space, strength: Strength) -> None:
    """Require a strength of at most the number of axes.

    Args:
        space: The axes.
        strength: The number of values that are combined in all ways.

    Raises:
        OptionError: The strength is larger than the number of axes.
    """
    if isinstance(strength, int) and strength > len(space.axes):
        raise OptionError(
            "--matrix",
            f"{strength}: expected at most {len(space.axes)}, the number of axes, or full "
            f"({', '.join(space.axes)})",
        )


def build(space: Space, strength: Strength = 2) -> Array:
    """Choose the cells: the baseline, the named ones, pairs of features, and the array.

    Args:
        space: The axes.
        strength: The number of values that are combined in all ways.

    Raises:
        OptionError: The strength is larger than the number of axes.
        Sm121Error: The array of `covertable` is wrong.
    """
    require_strength(space, strength)
    builder = _Builder(space, strength)
    builder.add_cell(space.baseline, "baseline")
    if strength != "none":
        for addition in _additions(space):
            builder.add_addition(addition)
        for row in _array(space, strength, builder.cells):
            builder.add_cell(row, "array")
    array = builder.array()
    if isinstance(strength, int):
        _require_covered(space, array, strength)
    return array


class _Builder:
    """The cells of an array while it is built."""

    def __init__(self, space: Space, strength: Strength) -> None:
        self.space = space
        self.strength = strength
        #: The reasons of each cell.
        self._planned: dict[Choice, list[str]] = {}
        self._incompatible: dict[str, Incompatible] = {}
        self._absent: dict[str, str] = {}

    @property
    def cells(self) -> list[Cell]:
        return [dict(values) for values in self._planned]

    def array(self) -> Array:
        cells = []
        for values, why in self._planned.items():
            cells.append(Planned(dict(values), tuple(why)))
        return Array(self.strength, tuple(cells), self._incompatible, self._absent)

    def add_cell(self, cell: Cell, why: str) -> None:
        values = tuple((axis, cell[axis]) for axis in self.space.axes)
        self._planned.setdefault(values, []).append(why)

    def add_addition(self, addition: _Addition) -> None:
        """Add a cell that is not in the covering array, or record why it cannot be added."""
        space = self.space
        applicable = {}
        ignored = []
        for axis, value in addition.values.items():
            if axis in space.axes:
                applicable[axis] = value
            elif value != space.file.axes[axis].baseline:
                ignored.append(f"{axis}={value}")
        for axis, value in applicable.items():
            if (axis, value) in space.absent:
                reason = f"{axis}={value}: not applicable: {space.absent[axis, value]}"
                self._absent[addition.name] = reason
                return
        if ignored:
            reason = f"tried without {', '.join(ignored)}, which is not applicable here"
            self._absent[addition.name] = reason
        cell = {**space.baseline, **applicable}
        if addition.of_features:  # add the other values that the two features need
            cell = space.completion(applicable) or cell
        rule = space.excluded(cell)
        if rule is not None:
            self._incompatible[addition.name] = rule
        elif self.strength != 1 or not addition.of_features:
            self.add_cell(cell, addition.name)


def _require_covered(space: Space, array: Array, strength: int) -> None:
    """Check the library's array: raise Sm121Error for a wrong cell or a missing combination."""
    for cell in array.rows:
        rule = space.excluded(cell)
        if rule is not None:
            raise Sm121Error(f"the covering array has a cell that is ruled out: {rule}")
    missing = coverage(space, array.rows, strength).missing
    if missing:
        raise Sm121Error(f"the covering array misses {len(missing)} combinations: {missing[0]}")


def _additions(space: Space) -> Iterator[_Addition]:
    """Yield the named cells, and each pair of features that have no axis in common."""
    for name, named in space.file.named.items():
        yield _Addition(name, named.values, of_features=False)
    for number, newer in enumerate(space.file.features):
        for prior in space.file.features[:number]:
            pair = {**prior, **newer}
            if len(pair) == len(prior) + len(newer):
                yield _Addition(label(tuple(pair.items())), pair, of_features=True)


def coverage(space: Space, cells: Iterable[Cell], strength: int) -> Coverage:
    """Count the combinations of values that some cells contain.

    Args:
        space: The axes.
        cells: The cells.
        strength: The number of values in a combination.
    """
    present: set[Choice] = set()
    for cell in cells:
        for names in itertools.combinations(space.axes, strength):
            present.add(tuple((axis, cell[axis]) for axis in names))
    allowed = 0
    excluded = 0
    missing = []
    for choice in space.choices(strength):
        if choice in present:
            allowed += 1
        elif space.allowed(choice):
            allowed += 1
            missing.append(choice)
        else:
            excluded += 1
    return Coverage(
        strength=strength,
        allowed=allowed,
        covered=allowed - len(missing),
        missing=tuple(missing),
        excluded=excluded,
    )


def lower_bound(space: Space, strength: int) -> int:
    """Return a lower bound of the number of cells of an array.

    Each allowed combination of the values of the same axes needs its own cell. The bound is the
    largest number of such combinations over all sets of axes.

    Args:
        space: The axes.
        strength: The number of values in a combination.
    """
    allowed: Counter[tuple[str, ...]] = Counter()
    for choice in space.choices(strength):
        if space.allowed(choice):
            allowed[tuple(axis for axis, _ in choice)] += 1
    return max(allowed.values(), default=0)


def _array(space: Space, strength: Strength, fixed: Sequence[Cell]) -> Sequence[Cell]:
    """Return the rows of an array that includes the fixed cells."""
    if strength == "none":
        return []
    if strength == "full" or len(space.axes) < 2:  # with one axis, each value is a cell
        return list(space.full())
    factors = {axis: list(space.values(axis)) for axis in space.axes}
    constraints = []
    for rule in space.rules:
        condition = _condition(space, rule)
        if condition is not None:
            constraints.append(condition)
    arrays = []
    for salt in range(_TRIES.get(strength, 1)):
        arrays.append(
            covertable.make(
                factors,
                salt=str(salt),
                presets=[dict(cell) for cell in fixed],
                constraints=constraints,
                strength=strength,
            )
        )
    return [dict(row) for row in min(arrays, key=len)]


def _condition(space: Space, rule: Incompatible) -> dict[str, Any] | None:
    """Return a rule as a constraint of covertable; None if the rule cannot apply here."""
    parts = []
    for axis, values in rule.when.items():
        listed = [values] if isinstance(values, str) else list(values)
        if axis in space.axes:
            parts.append({"operator": "in", "left": axis, "values": listed})
        elif space.fixed.get(axis) not in listed:
            return None  # the engine lacks the axis, or only has another value of it
    return {"operator": "not", "condition": {"operator": "and", "conditions": parts}}


def bare(space: Space, strength: int) -> int:
    """Return the number of cells of an array that contains the baseline, but no named cells.

    Args:
        space: The axes.
        strength: The number of axes whose values are combined in all ways.
    """
    return len(_array(space, strength, [space.baseline]))
