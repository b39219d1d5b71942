"""The smallest sets of values that fail, from what the array shows and a few cells more.

The baseline passes, so a failing cell has a set of values, all of them not the baseline's, that
fails whatever the others are. Sets that occur in a passing cell are innocent. Of the others the
smallest are tried, each alone with the baseline's values for all else.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sm121.matrix.axes import Cell, Choice, Space, label
from sm121.matrix.outcome import CellOutcome, CellRecord

#: Runs a cell that is not of the plan; None: there is no more time for it.
Try = Callable[[dict[str, str]], CellRecord | None]


@dataclass(frozen=True)
class FailingSet:
    """Values that fail together, and no part of them is known to."""

    choice: Choice
    outcome: CellOutcome
    reason: str
    #: Cells that show it.
    cells: tuple[str, ...]
    #: True when it was run alone and its failure was seen twice, False when it is what the
    #: outcomes leave.
    confirmed: bool
    #: Other sets that the outcomes leave as well, where it is not confirmed.
    others: tuple[Choice, ...] = ()
    #: Parts of it that are not known to pass alone, each with what is known: ``a=b alone: FAIL``.
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        alone = ""
        if len(self.choice) > 1 and self.confirmed:
            more = f" and {len(self.parts) - 3} parts more" if len(self.parts) > 3 else ""
            known = f"{', '.join(self.parts[:3])}{more}"
            alone = f"; {known}" if self.parts else "; each alone passes"
        text = f"{label(self.choice)}: {self.outcome}{alone} ({self.reason})"
        if not self.confirmed and self.choice:
            also = "".join(f", or {label(other)}" for other in self.others[:3])
            text = f"{label(self.choice)}{also}: {self.outcome}, not isolated ({self.reason})"
        return text


@dataclass
class _Known:
    """What the outcomes say so far."""

    space: Space
    records: list[CellRecord]
    #: Ids of cells that were tried to find a set.
    tried: list[str] = field(default_factory=list)

    def innocent(self, choice: Choice, outcome: CellOutcome) -> bool:
        """Whether the values occur together in a cell that does not fail so."""
        return any(
            _has(record.values, choice) for record in self.records if _clears(record, outcome)
        )

    def record_of(self, cell: Cell) -> CellRecord | None:
        return next((r for r in self.records if r.values == dict(cell)), None)

    def second_of(self, record: CellRecord) -> CellRecord | None:
        """Another start of the same cell; one that does not fail, where there is one."""
        others = [r for r in self.records if r is not record and r.values == record.values]
        return min(others, key=lambda r: r.outcome.broken, default=None)


def smallest(
    space: Space,
    records: Sequence[CellRecord],
    try_cell: Try,
    tell: Callable[[Sequence[FailingSet]], None] = lambda _found: None,
) -> list[FailingSet]:
    """The smallest failing sets of all broken cells, in the order of the cells.

    Args:
        tell: called with all that were found, each time that there are more.
    """
    known = _Known(space, list(records))
    found: list[FailingSet] = []
    baseline = known.record_of(space.baseline)
    if baseline is not None and baseline.outcome.broken:
        return [FailingSet((), baseline.outcome, baseline.reason, (baseline.id,), True)]
    for record in [r for r in records if r.outcome.broken and not r.isolating]:
        if any(_explains(one, record) for one in found):
            continue
        _isolate(known, record, try_cell, found)
        tell([_with_cells(one, known.records) for one in found])
    return [_with_cells(one, known.records) for one in found]


def _isolate(known: _Known, record: CellRecord, try_cell: Try, found: list[FailingSet]) -> None:
    """Add the smallest set of one cell's failure, and what else comes to light on the way."""
    differences = known.space.differences(record.values)
    # Nothing is looked for that does not happen a second time.
    again = known.second_of(record)
    for size in range(1, len(differences) + 1):
        candidates = _ordered(known, _candidates(known, record, differences, size))
        for choice in candidates:
            if known.innocent(choice, record.outcome):
                continue  # a cell that was tried meanwhile has cleared it
            cell = {**known.space.baseline, **dict(choice)}
            if known.space.excluded(cell) is not None:
                continue
            alone = known.record_of(cell)
            if again is None and (alone is None or alone is record):
                again = try_cell(dict(record.values))
                if again is None:
                    found.append(_unconfirmed(known, record, differences, size, choice))
                    return
                known.records.append(again)
            if again is not None and not again.outcome.broken:
                found.append(_flake(record, differences, again))
                return
            if alone is None:
                alone = try_cell(cell)
                if alone is None:
                    found.append(_unconfirmed(known, record, differences, size, choice))
                    return
                known.records.append(alone)
            if alone.outcome.broken and not any(_explains(one, alone) for one in found):
                parts, tried = _parts(known, choice, alone.outcome)
                found.append(
                    FailingSet(
                        choice, alone.outcome, alone.reason, (record.id,), tried, parts=parts
                    )
                )
            if alone.outcome is record.outcome:
                return
    found.append(_flake(record, differences, again))


def _flake(record: CellRecord, differences: Choice, again: CellRecord | None) -> FailingSet:
    """A failure that did not come again."""
    reason = f"once, and not again: {record.reason}"
    if again is not None and not again.outcome.broken and not _clears(again, record.outcome):
        reason = f"once; started again, it came to {again.outcome}: {record.reason}"
    return FailingSet(differences, record.outcome, reason, (record.id,), False)


def _unconfirmed(
    known: _Known, record: CellRecord, differences: Choice, size: int, choice: Choice
) -> FailingSet:
    """What the outcomes leave when nothing more may be started."""
    left = _left(known, record, differences, size)
    first = left[0] if left else choice
    others = tuple(c for c in left[1:] if len(c) == len(first))
    return FailingSet(first, record.outcome, record.reason, (record.id,), False, others)


def _parts(known: _Known, choice: Choice, outcome: CellOutcome) -> tuple[tuple[str, ...], bool]:
    """The smaller parts of a set that are not known to pass, and whether all that can be tried
    alone were."""
    found: list[str] = []
    tried = True
    for size in range(1, len(choice)):
        for part in itertools.combinations(choice, size):
            if known.innocent(part, outcome):
                continue
            cell = {**known.space.baseline, **dict(part)}
            alone = known.record_of(cell)
            if known.space.excluded(cell) is not None:
                found.append(f"{label(part)} cannot be tried alone")
            elif alone is not None:
                found.append(f"{label(part)} alone: {alone.outcome}")
            else:
                found.append(f"{label(part)} was not tried alone")
                tried = False
    return tuple(found), tried


def _candidates(known: _Known, record: CellRecord, differences: Choice, size: int) -> list[Choice]:
    return [
        choice
        for choice in itertools.combinations(differences, size)
        if not known.innocent(choice, record.outcome)
    ]


def _left(known: _Known, record: CellRecord, differences: Choice, size: int) -> list[Choice]:
    return [
        choice
        for bigger in range(size, len(differences) + 1)
        for choice in _ordered(known, _candidates(known, record, differences, bigger))
    ]


def _ordered(known: _Known, candidates: list[Choice]) -> list[Choice]:
    """Those first that explain most of the failing cells."""

    def explains(choice: Choice) -> int:
        return sum(_has(r.values, choice) for r in known.records if r.outcome.broken)

    return sorted(candidates, key=lambda choice: -explains(choice))


def _has(values: Cell, choice: Choice) -> bool:
    return all(values.get(axis) == value for axis, value in choice)


def _clears(record: CellRecord, outcome: CellOutcome) -> bool:
    """Whether a cell shows that its values do not fail so: it got to that check, and passed it."""
    if record.outcome is CellOutcome.PASS:
        return True
    if record.outcome is CellOutcome.INVALID:
        return record.works and outcome is not CellOutcome.SLOWER
    return record.outcome is CellOutcome.SLOWER and outcome is not CellOutcome.SLOWER


def _explains(one: FailingSet, record: CellRecord) -> bool:
    return one.confirmed and one.outcome is record.outcome and _has(record.values, one.choice)


def _with_cells(one: FailingSet, records: Sequence[CellRecord]) -> FailingSet:
    cells = tuple(r.id for r in records if r.outcome is one.outcome and _has(r.values, one.choice))
    return dataclasses.replace(one, cells=cells or one.cells)
