"""Find the smallest sets of values that fail, from the outcomes of the array and a few more cells.

The baseline passes. A failing cell therefore contains a set of values, none of them the baseline's,
that fails whatever the other values are. A set that a passing cell contains is innocent. The
smallest remaining sets are tested, each with the baseline's values on all other axes.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sm121.matrix.axes import Cell, Choice, label
from sm121.matrix.space import Space
from sm121.run.cell_record import CellOutcome, CellRecord

#: Runs a cell that is not in the plan. Returns None if no time or no start is left for it.
Try = Callable[[dict[str, str]], CellRecord | None]
#: The maximum number of parts, and of alternatives, that are shown for a failing set.
_SHOWN = 3


@dataclass(frozen=True)
class FailingSet:
    """Values that fail together, although no subset of them is known to fail."""

    choice: Choice
    outcome: CellOutcome
    reason: str
    #: The ids of the cells whose failure the set explains.
    cells: tuple[str, ...]
    #: Whether the set failed with the baseline's other values, and the cell's failure happened
    #: twice. If false, the set is only one of those that the outcomes do not rule out.
    confirmed: bool
    #: If the set is not confirmed, the other sets that the outcomes do not rule out.
    alternatives: tuple[Choice, ...] = ()
    #: The subsets that are not known to pass alone, with their outcomes: ``a=b alone: FAIL``.
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.confirmed and self.choice:
            shown = self.alternatives[:_SHOWN]
            alternatives = "".join(f", or {label(other)}" for other in shown)
            return (
                f"{label(self.choice)}{alternatives}: {self.outcome}, not isolated ({self.reason})"
            )
        alone = self._alone() if len(self.choice) > 1 and self.confirmed else ""
        return f"{label(self.choice)}: {self.outcome}{alone} ({self.reason})"

    def _alone(self) -> str:
        """Return the outcomes of the set's subsets as text."""
        if not self.parts:
            return "; each part alone passes"
        parts = ", ".join(self.parts[:_SHOWN])
        if len(self.parts) > _SHOWN:
            parts += f" and {len(self.parts) - _SHOWN} parts more"
        return f"; {parts}"


def _ignore(_sets: list[FailingSet]) -> None:
    pass


def smallest(
    space: Space,
    records: Sequence[CellRecord],
    try_cell: Try,
    tell: Callable[[list[FailingSet]], None] = _ignore,
) -> list[FailingSet]:
    """Find the smallest failing sets of all broken cells.

    Args:
        space: The axes.
        records: The cells of the run.
        try_cell: Runs another cell.
        tell: Called with all sets so far, whenever a cell was isolated.

    Returns:
        The sets in the order of the cells.
    """
    search = _Search(space, list(records), try_cell)
    baseline = search.record_of(space.baseline)
    if baseline is not None and baseline.outcome.broken:
        return [
            FailingSet(
                choice=(),
                outcome=baseline.outcome,
                reason=baseline.reason,
                cells=(baseline.id,),
                confirmed=True,
            )
        ]
    for record in records:
        if record.outcome.broken and not record.isolating and not search.explains(record):
            search.isolate(record)
            tell(search.sets())
    return search.sets()


class _OutOfTriesError(Exception):
    """No further cell may run."""


@dataclass
class _Search:
    space: Space
    records: list[CellRecord]
    try_cell: Try
    failing: list[FailingSet] = field(default_factory=list)

    def sets(self) -> list[FailingSet]:
        """Return the sets so far, each with all cells that it explains."""
        sets = []
        for found in self.failing:
            cells = []
            for record in self.records:
                if record.outcome is found.outcome and record.has(found.choice):
                    cells.append(record.id)
            sets.append(dataclasses.replace(found, cells=tuple(cells) or found.cells))
        return sets

    def explains(self, record: CellRecord) -> bool:
        """Check whether a confirmed failing set is contained in a cell and explains its failure."""
        for found in self.failing:
            if found.confirmed and found.outcome is record.outcome and record.has(found.choice):
                return True
        return False

    def innocent(self, choice: Choice, outcome: CellOutcome) -> bool:
        """Whether some cell shows that these values do not cause this outcome."""
        return any(r.has(choice) for r in self.records if _clears(r, outcome))

    def record_of(self, cell: Cell) -> CellRecord | None:
        """Return the first record of a cell."""
        for record in self.records:
            if record.values == dict(cell):
                return record
        return None

    def suspects(self, record: CellRecord, size: int) -> list[Choice]:
        """Return the sets of ``size`` values that may cause a cell's failure.

        Sets that explain most of the failing cells come first.
        """
        choices = itertools.combinations(self.space.differences(record.values), size)
        suspects = [choice for choice in choices if not self.innocent(choice, record.outcome)]
        broken = [cell for cell in self.records if cell.outcome.broken]
        return sorted(suspects, key=lambda choice: -sum(cell.has(choice) for cell in broken))

    def isolate(self, record: CellRecord) -> None:
        """Find the smallest set that causes a cell's failure; also add other failures found."""
        again = self._second_start(record)
        differences = self.space.differences(record.values)
        for size in range(1, len(differences) + 1):
            for choice in self.suspects(record, size):
                if self.innocent(choice, record.outcome):
                    # A cell that ran in the meantime has shown that the set is not the cause.
                    continue
                cell = {**self.space.baseline, **dict(choice)}
                if self.space.excluded(cell) is not None:
                    continue
                alone = self.record_of(cell)
                try:
                    if again is None and (alone is None or alone is record):
                        again = self._try(dict(record.values))
                    if again is not None and not again.outcome.broken:
                        self._add_flake(record, again)
                        return
                    if alone is None:
                        alone = self._try(cell)
                except _OutOfTriesError:
                    self._add_suspects(record, choice)
                    return
                if alone.outcome.broken and not self.explains(alone):
                    self._add_confirmed(record, choice, alone)
                if alone.outcome is record.outcome:
                    return
        self._add_flake(record, again)

    def _second_start(self, record: CellRecord) -> CellRecord | None:
        """Return another start of the same cell, preferably one that did not fail.

        Failing sets are only searched for failures that happen twice.
        """
        starts = []
        for start in self.records:
            if start is not record and start.values == record.values:
                starts.append(start)
        return min(starts, key=lambda start: start.outcome.broken, default=None)

    def _try(self, cell: dict[str, str]) -> CellRecord:
        """Run a cell, or raise _OutOfTriesError."""
        record = self.try_cell(cell)
        if record is None:
            raise _OutOfTriesError
        self.records.append(record)
        return record

    def _add_confirmed(self, record: CellRecord, choice: Choice, alone: CellRecord) -> None:
        """Add a set that failed alone; it is confirmed if all its subsets ran alone."""
        parts, all_tried = self._parts(choice, alone.outcome)
        self.failing.append(
            FailingSet(
                choice=choice,
                outcome=alone.outcome,
                reason=alone.reason,
                cells=(record.id,),
                confirmed=all_tried,
                parts=parts,
            )
        )

    def _add_flake(self, record: CellRecord, again: CellRecord | None) -> None:
        """Add all values of a cell whose failure did not happen again."""
        reason = f"failed once, and not in a second start: {record.reason}"
        if again is not None and not again.outcome.broken and not _clears(again, record.outcome):
            reason = f"failed once; the second start ended with {again.outcome}: {record.reason}"
        self.failing.append(
            FailingSet(
                choice=self.space.differences(record.values),
                outcome=record.outcome,
                reason=reason,
                cells=(record.id,),
                confirmed=False,
            )
        )

    def _add_suspects(self, record: CellRecord, choice: Choice) -> None:
        """Add all sets that the outcomes do not rule out. ``choice`` is the next one to try."""
        suspects = self.suspects(record, len(choice)) or [choice]
        self.failing.append(
            FailingSet(
                choice=suspects[0],
                outcome=record.outcome,
                reason=record.reason,
                cells=(record.id,),
                confirmed=False,
                alternatives=tuple(suspects[1:]),
            )
        )

    def _parts(self, choice: Choice, outcome: CellOutcome) -> tuple[tuple[str, ...], bool]:
        """Return the subsets that are not known to pass, and whether all subsets ran.

        A subset that the axes rule out cannot run, and counts as tried.
        """
        lines: list[str] = []
        all_tried = True
        for size in range(1, len(choice)):
            for part in itertools.combinations(choice, size):
                if self.innocent(part, outcome):
                    continue
                cell = {**self.space.baseline, **dict(part)}
                alone = self.record_of(cell)
                if self.space.excluded(cell) is not None:
                    lines.append(f"{label(part)} cannot be tried alone")
                elif alone is not None:
                    lines.append(f"{label(part)} alone: {alone.outcome}")
                else:
                    lines.append(f"{label(part)} was not tried alone")
                    all_tried = False
        return tuple(lines), all_tried


def _clears(record: CellRecord, outcome: CellOutcome) -> bool:
    """Whether a cell shows that its values do not cause an outcome.

    A cell shows this if it reached and passed the check that otherwise results in the outcome.
    """
    if record.outcome is CellOutcome.PASS:
        return True
    if record.outcome is CellOutcome.INVALID:
        return record.works and outcome is not CellOutcome.SLOWER
    return record.outcome is CellOutcome.SLOWER and outcome is not CellOutcome.SLOWER
