"""The smallest sets of values that fail, from what the array shows and a few cells more. The
baseline passes, so a failing cell has a set of values, all of them not the baseline's, that fails
whatever the others are. Sets that occur in a passing cell are innocent. Of the others the smallest
are tried, each alone with the baseline's values for all else."""

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
    cells: tuple[str, ...]
    #: True when it was run alone and its failure was seen twice, False when it is what the
    #: outcomes leave.
    confirmed: bool
    #: Other sets that the outcomes leave as well, where it is not confirmed.
    alternatives: tuple[Choice, ...] = ()
    #: Parts of it that are not known to pass alone, each with what is known: ``a=b alone: FAIL``.
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        alone = ""
        if len(self.choice) > 1 and self.confirmed:
            more = f" and {len(self.parts) - 3} parts more" if len(self.parts) > 3 else ""
            parts = f"{', '.join(self.parts[:3])}{more}"
            alone = f"; {parts}" if self.parts else "; each alone passes"
        text = f"{label(self.choice)}: {self.outcome}{alone} ({self.reason})"
        if not self.confirmed and self.choice:
            also = "".join(f", or {label(other)}" for other in self.alternatives[:3])
            text = f"{label(self.choice)}{also}: {self.outcome}, not isolated ({self.reason})"
        return text


def smallest(
    space: Space,
    records: Sequence[CellRecord],
    try_cell: Try,
    tell: Callable[[list[FailingSet]], None] = lambda _found: None,
) -> list[FailingSet]:
    """The smallest failing sets of all broken cells, in the order of the cells. `tell`: called with
    all that were found, each time that there are more."""
    search = _Search(space, list(records), try_cell)
    baseline = search.record_of(space.baseline)
    if baseline is not None and baseline.outcome.broken:
        return [FailingSet((), baseline.outcome, baseline.reason, (baseline.id,), True)]
    for record in [r for r in records if r.outcome.broken and not r.isolating]:
        if not search.explains(record):
            search.isolate(record)
            tell(search.sets())
    return search.sets()


@dataclass
class _Search:
    space: Space
    records: list[CellRecord]
    try_cell: Try
    failing: list[FailingSet] = field(default_factory=list)

    def sets(self) -> list[FailingSet]:
        cells_of = [
            tuple(r.id for r in self.records if r.outcome is one.outcome and r.has(one.choice))
            for one in self.failing
        ]
        return [
            dataclasses.replace(one, cells=cells or one.cells)
            for one, cells in zip(self.failing, cells_of, strict=True)
        ]

    def explains(self, record: CellRecord) -> bool:
        return any(
            one.confirmed and one.outcome is record.outcome and record.has(one.choice)
            for one in self.failing
        )

    def innocent(self, choice: Choice, outcome: CellOutcome) -> bool:
        return any(r.has(choice) for r in self.records if _clears(r, outcome))

    def record_of(self, cell: Cell) -> CellRecord | None:
        return next((r for r in self.records if r.values == dict(cell)), None)

    def suspects(self, record: CellRecord, size: int) -> list[Choice]:
        """Sets of so many values that may be why the cell fails; first those that explain most of
        the failing cells."""
        choices = itertools.combinations(self.space.differences(record.values), size)
        broken = [r for r in self.records if r.outcome.broken]
        return sorted(
            (choice for choice in choices if not self.innocent(choice, record.outcome)),
            key=lambda choice: -sum(r.has(choice) for r in broken),
        )

    def isolate(self, record: CellRecord) -> None:
        """Add the smallest set of one cell's failure, and what else comes to light on the way."""
        differences = self.space.differences(record.values)
        # Nothing is looked for that does not happen a second time: another start of the same cell,
        # one that does not fail where there is one.
        starts = [r for r in self.records if r is not record and r.values == record.values]
        again = min(starts, key=lambda r: r.outcome.broken, default=None)
        for size in range(1, len(differences) + 1):
            for choice in self.suspects(record, size):
                if self.innocent(choice, record.outcome):
                    continue  # a cell that was tried meanwhile has cleared it
                cell = {**self.space.baseline, **dict(choice)}
                if self.space.excluded(cell) is not None:
                    continue
                alone = self.record_of(cell)
                if again is None and (alone is None or alone is record):
                    again = self._try(dict(record.values))
                    if again is None:
                        return self._add_suspects(record, choice)
                if again is not None and not again.outcome.broken:
                    return self._add_flake(record, again)
                if alone is None:
                    alone = self._try(cell)
                    if alone is None:
                        return self._add_suspects(record, choice)
                if alone.outcome.broken and not self.explains(alone):
                    parts, tried = self._parts(choice, alone.outcome)
                    facts = (alone.outcome, alone.reason, (record.id,), tried)
                    self.failing.append(FailingSet(choice, *facts, parts=parts))
                if alone.outcome is record.outcome:
                    return None
        return self._add_flake(record, again)

    def _try(self, cell: dict[str, str]) -> CellRecord | None:
        record = self.try_cell(cell)
        if record is not None:
            self.records.append(record)
        return record

    def _add_flake(self, record: CellRecord, again: CellRecord | None) -> None:
        reason = f"once, and not again: {record.reason}"
        if again is not None and not again.outcome.broken and not _clears(again, record.outcome):
            reason = f"once; started again, it came to {again.outcome}: {record.reason}"
        differences = self.space.differences(record.values)
        self.failing.append(FailingSet(differences, record.outcome, reason, (record.id,), False))

    def _add_suspects(self, record: CellRecord, choice: Choice) -> None:
        """What the outcomes leave when nothing more may be started; ``choice`` was to be next."""
        first, *alternatives = self.suspects(record, len(choice)) or [choice]
        facts = (record.outcome, record.reason, (record.id,), False)
        self.failing.append(FailingSet(first, *facts, tuple(alternatives)))

    def _parts(self, choice: Choice, outcome: CellOutcome) -> tuple[tuple[str, ...], bool]:
        """The smaller parts of a set that are not known to pass, and whether all that can be tried
        alone were."""
        lines: list[str] = []
        tried = True
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
                    tried = False
        return tuple(lines), tried


def _clears(record: CellRecord, outcome: CellOutcome) -> bool:
    """Whether a cell shows that its values do not fail so: it got to that check, and passed it."""
    if record.outcome is CellOutcome.PASS:
        return True
    if record.outcome is CellOutcome.INVALID:
        return record.works and outcome is not CellOutcome.SLOWER
    return record.outcome is CellOutcome.SLOWER and outcome is not CellOutcome.SLOWER
