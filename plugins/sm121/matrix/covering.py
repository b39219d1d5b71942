"""Covering arrays: the fewest cells with every combination of N values. The array is `covertable`'s
(greedy, deterministic); what it covers is counted here, from the cells alone."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import covertable

from sm121.core.errors import OptionError, Sm121Error
from sm121.matrix.axes import Cell, Choice, Incompatible, Space

Strength = int | Literal["full", "none"]
#: Orders of the construction that are tried, by strength; the smallest array is taken.
_TRIES = {1: 8, 2: 24, 3: 1}


@dataclass(frozen=True)
class Coverage:
    """How many of the allowed combinations of so many values occur."""

    strength: int
    allowed: int
    covered: int
    missing: tuple[Choice, ...]
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
    """A cell of the plan, and why it is in it."""

    cell: dict[str, str]
    why: tuple[str, ...]


@dataclass(frozen=True)
class Array:
    """The cells of a run, the baseline first."""

    strength: Strength
    cells: tuple[Planned, ...]
    #: Named cells that are known not to work: name -> why.
    incompatible: Mapping[str, Incompatible]
    #: Named cells that have a value that the engine does not have: name -> why.
    absent: Mapping[str, str]


def parse_strength(text: str) -> Strength:
    """What ``--matrix`` says. Raises OptionError: neither a number nor ``full`` nor ``none``."""
    if text in ("full", "none"):
        return text  # type: ignore[return-value]
    if not text.isdecimal() or int(text) < 1:
        raise OptionError("--matrix", f"{text}: expected 1, 2 (pairs), ..., full or none")
    return int(text)


def build(space: Space, strength: Strength = 2) -> Array:
    """The cells that are tried: baseline, named ones, feature by feature, and the array. Raises
    OptionError: the strength is larger than the number of axes."""
    if isinstance(strength, int) and strength > len(space.axes):
        raise OptionError(
            "--matrix",
            f"{strength}: expected at most {len(space.axes)}, or full: there are so many axes "
            f"({', '.join(space.axes)})",
        )
    planned: dict[tuple[tuple[str, str], ...], list[str]] = {}
    incompatible: dict[str, Incompatible] = {}
    absent: dict[str, str] = {}

    def add(cell: Cell, why: str) -> None:
        planned.setdefault(tuple((axis, cell[axis]) for axis in space.axes), []).append(why)

    add(space.baseline, "baseline")
    if strength != "none":
        for name, values, feature in _always(space):
            applicable = {axis: value for axis, value in values.items() if axis in space.axes}
            missing = [choice for choice in applicable.items() if choice in space.absent]
            if missing:
                axis, value = missing[0]
                absent[name] = f"{axis}={value}: not applicable: {space.absent[axis, value]}"
                continue
            ignored = [
                f"{axis}={value}"
                for axis, value in values.items()
                if axis not in applicable and value != space.file.axes[axis].baseline
            ]
            if ignored:
                absent[name] = f"tried without {', '.join(ignored)}, which is not applicable here"
            cell = {**space.baseline, **applicable}
            if feature:  # with whatever else the two features need
                cell = space.completion(applicable) or cell
            if (rule := space.excluded(cell)) is not None:
                incompatible[name] = rule
            elif strength != 1 or not feature:
                add(cell, name)
        for row in _array(space, strength, [dict(key) for key in planned]):
            add(row, "array")
    cells = tuple(Planned(dict(key), tuple(why)) for key, why in planned.items())
    if isinstance(strength, int):  # the library's arrays are not believed
        if rule := next(filter(None, (space.excluded(each.cell) for each in cells)), None):
            raise Sm121Error(f"the covering array has a cell that is ruled out: {rule}")
        if untried := coverage(space, [planned.cell for planned in cells], strength).missing:
            line = f"the covering array misses {len(untried)} combinations: {untried[0]}"
            raise Sm121Error(line)
    return Array(strength, cells, incompatible, absent)


def _always(space: Space) -> Iterable[tuple[str, dict[str, str], bool]]:
    """Cells beside the array: name, its own values, whether it is two features together."""
    for name, named in space.file.named.items():
        yield name, named.values, False
    for number, newer in enumerate(space.file.features):
        for prior in space.file.features[:number]:
            pair = {**prior, **newer}
            if len(pair) == len(prior) + len(newer):
                yield " + ".join(f"{a}={v}" for a, v in pair.items()), pair, True


def coverage(space: Space, cells: Iterable[Cell], strength: int) -> Coverage:
    """How many combinations of so many values occur in the cells."""
    choices: set[Choice] = set()
    for cell in cells:
        for names in itertools.combinations(space.axes, strength):
            choices.add(tuple((axis, cell[axis]) for axis in names))
    allowed, missing, excluded = 0, [], 0
    for choice in space.choices(strength):
        if choice in choices:
            allowed += 1
        elif space.allowed(choice):
            allowed += 1
            missing.append(choice)
        else:
            excluded += 1
    return Coverage(strength, allowed, allowed - len(missing), tuple(missing), excluded)


def lower_bound(space: Space, strength: int) -> int:
    """No array can be smaller: the product of the sizes of the largest so many axes, of which each
    combination needs a cell of its own (the incompatible ones left out)."""
    allowed = Counter(
        tuple(axis for axis, _ in choice)
        for choice in space.choices(strength)
        if space.allowed(choice)
    )
    return max(allowed.values(), default=0)


def _array(space: Space, strength: Strength, fixed: Sequence[Cell]) -> Sequence[Cell]:
    if strength == "none":
        return []
    if strength == "full" or len(space.axes) < 2:  # of one axis, every value is all of it
        return list(space.full())
    factors = {axis: list(space.values(axis)) for axis in space.axes}
    arrays = (
        covertable.make(
            factors,
            salt=str(salt),
            presets=[dict(cell) for cell in fixed],
            constraints=[rule for one in space.rules if (rule := _condition(space, one))],
            strength=strength,
        )
        for salt in range(_TRIES.get(strength, 1))
    )
    return [dict(row) for row in min(arrays, key=len)]


def _condition(space: Space, rule: Incompatible) -> dict[str, Any] | None:
    """The rule as covertable takes it: not all of these at once. None: it never applies."""
    parts = []
    for axis, values in rule.when.items():
        listed = [values] if isinstance(values, str) else list(values)
        if axis in space.axes:
            parts.append({"operator": "in", "left": axis, "values": listed})
        elif space.fixed.get(axis) not in listed:
            return None  # an axis that this engine does not have, or has at another value
    return {"operator": "not", "condition": {"operator": "and", "conditions": parts}}


def bare(space: Space, strength: int) -> int:
    """Number of cells of the array alone, without those that are always in."""
    return len(_array(space, strength, [space.baseline]))
