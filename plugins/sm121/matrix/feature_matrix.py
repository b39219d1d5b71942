"""matrix.json and FEATURE_MATRIX.md: which combinations work, and the evidence."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup
from pydantic import Field

from sm121.core import data_file, errors, files, numbers, templates
from sm121.core.printable import printable
from sm121.core.time_range import duration
from sm121.matrix import isolation, size
from sm121.matrix.axes import AxesFile, Choice, label
from sm121.matrix.covering import Array, coverage, parse_strength
from sm121.matrix.covering import build as build_array
from sm121.matrix.space import Space
from sm121.run.cell_record import CellOutcome, CellRecord

#: The state of two values together.
PairState = Literal["works", "broken", "incompatible", "unknown"]
_SIGN: dict[PairState, str] = {
    "works": "ok",
    "broken": "**X**",
    "incompatible": "-",
    "unknown": "?",
}
#: The maximum number of characters of a value in FEATURE_MATRIX.md.
_LONGEST = 300
#: The name of the page in the folder of the matrix.
MARKDOWN = "FEATURE_MATRIX.md"


class CoverageReport(data_file.Record):
    """The coverage of combinations of ``strength`` values."""

    strength: int
    allowed: int
    #: The number of combinations that the planned cells contain.
    covered: int
    #: The number of combinations that cells with an outcome contain.
    ran: int
    incompatible: int


class FailingSetReport(data_file.Record):
    """Values that fail together; see `isolation.FailingSet`."""

    values: dict[str, str]
    outcome: CellOutcome
    reason: str
    cells: list[str]
    confirmed: bool
    text: str


class MatrixFile(data_file.Record):
    """The contents of matrix.json."""

    schema_version: int = 1
    #: The name of the axes' file.
    axes: str
    engine: str
    version: str | None
    #: The options of the engine's parser, if the version names no release. None: not known.
    options: list[str] | None = None
    strength: int | str
    profile: str
    #: The values of each axis.
    values: dict[str, list[str]]
    baseline: dict[str, str]
    #: The reason why this engine does not have a value. The keys are ``axis=value``.
    absent: dict[str, str] = Field(default_factory=dict)
    #: The reason why several values are known not to work together. The keys name these values.
    incompatible: dict[str, str] = Field(default_factory=dict)
    #: The reason why no evidence shows a value. The keys are ``axis=value``.
    unproven: dict[str, str] = Field(default_factory=dict)
    #: The reason why a named cell is not in the plan. The keys are the names of cells.
    left_out: dict[str, str] = Field(default_factory=dict)
    #: The cells of ``left_out`` whose values are known not to work together.
    left_out_incompatible: list[str] = Field(default_factory=list)
    #: The number of all combinations, allowed or not.
    product: int
    cells: list[CellRecord]
    #: The planned cells without an outcome.
    not_run: list[str] = Field(default_factory=list)
    #: Whether the run was interrupted before it had all cells and failing sets.
    interrupted: bool = False
    coverage: list[CoverageReport]
    failing_sets: list[FailingSetReport]
    #: The cost of the cells (`size.spent`).
    spent: dict[str, float]
    #: The contents of the axes' file, so that this file can be read without it.
    axes_file: dict[str, Any] = Field(default_factory=dict)


def build(
    space: Space,
    array: Array,
    records: Sequence[CellRecord],
    sets: Sequence[isolation.FailingSet],
    *,
    profile: str,
    references: Sequence[CellRecord] = (),
    interrupted: bool = False,
) -> MatrixFile:
    """Return the contents of matrix.json.

    Args:
        space: The axes.
        array: The planned cells.
        records: The cells that ran.
        sets: The failing sets so far.
        profile: The name of the profile.
        references: Starts of the baseline that are not cells of this run; only their cost counts.
        interrupted: Whether no more cells will run.
    """
    ended = {record.id for record in records if record.ended}
    return MatrixFile(
        axes=space.file.name,
        engine=space.engine,
        version=space.version,
        options=None if space.options is None else sorted(space.options),
        strength=array.strength,
        profile=profile,
        values={axis: list(space.values(axis)) for axis in space.axes},
        baseline=dict(space.baseline),
        absent={f"{axis}={value}": why for (axis, value), why in space.absent.items()},
        incompatible={rule.values: rule.reason for rule in space.rules},
        unproven=space.unproven(),
        left_out=_left_out(array),
        left_out_incompatible=list(array.incompatible),
        product=space.product,
        cells=list(records),
        not_run=[name for name in array.names(space) if name not in ended],
        coverage=_coverage(space, array, records),
        failing_sets=[_reported(failing_set) for failing_set in sets],
        interrupted=interrupted,
        axes_file=space.file.model_dump(mode="json"),
        spent=dict(size.spent(records, references)),
    )


def _left_out(array: Array) -> dict[str, str]:
    """Return the named cells that are not in an array, with the reasons."""
    reasons = dict(array.absent)
    for name, rule in array.incompatible.items():
        reasons[name] = f"{CellOutcome.INCOMPATIBLE}: {rule.reason}"
    return reasons


def _reported(failing_set: isolation.FailingSet) -> FailingSetReport:
    return FailingSetReport(
        values=dict(failing_set.choice),
        outcome=failing_set.outcome,
        reason=failing_set.reason,
        cells=list(failing_set.cells),
        confirmed=failing_set.confirmed,
        text=str(failing_set),
    )


def _coverage(space: Space, array: Array, records: Sequence[CellRecord]) -> list[CoverageReport]:
    """Return the coverage of single values, of pairs, and so on up to the array's strength."""
    largest = max(2, array.strength) if isinstance(array.strength, int) else 2
    ended = [record.values for record in records if record.ended]
    reports = []
    for strength in range(1, min(largest, len(space.axes)) + 1):
        of_plan = coverage(space, array.rows, strength)
        reports.append(
            CoverageReport(
                strength=strength,
                allowed=of_plan.allowed,
                covered=of_plan.covered,
                ran=coverage(space, ended, strength).covered,
                incompatible=of_plan.excluded,
            )
        )
    return reports


def unexplained(file: MatrixFile) -> list[CellRecord]:
    """Return the broken cells that no failing set explains and that did not pass a second start.

    Args:
        file: The content of matrix.json.
    """
    explained: set[str] = set()
    for failing_set in file.failing_sets:
        explained.update(failing_set.cells)
    passed_again = {cell.id for cell in file.cells if cell.isolating and not cell.outcome.broken}
    broken = {}
    for cell in file.cells:
        if cell.outcome.broken and cell.id not in explained | passed_again:
            broken[cell.id] = cell
    return list(broken.values())


def incomplete(file: MatrixFile) -> str | None:
    """Return why the matrix is not complete, as a sentence.

    Args:
        file: The content of matrix.json.

    Returns:
        The sentence; None if all planned cells have an outcome and the run was not interrupted.
    """
    if not file.interrupted and not file.not_run:
        return None
    planned = {*file.not_run, *(record.id for record in file.cells if not record.isolating)}
    counts = f"{len(file.not_run)} of {len(planned)} cells have no outcome"
    if file.interrupted:
        return f"Interrupted: {counts}."
    return f"Incomplete ({counts} so far): the run is in progress, was killed, or is one shard."


def pairs(space: Space, file: MatrixFile) -> dict[Choice, PairState]:
    """Return the state of each pair of values.

    A pair is broken if it contains a confirmed failing set. Otherwise it works if a cell with it
    passes; the cell's rate may be invalid. A pair that is only in other cells is unknown.

    Args:
        space: The axes.
        file: The content of matrix.json, for these axes.

    Returns:
        The state of each pair, allowed or not; empty with fewer than two axes.
    """
    if len(space.axes) < 2:
        return {}
    passing = [record for record in file.cells if record.works]
    broken = [set(found.values.items()) for found in file.failing_sets if found.confirmed]
    states: dict[Choice, PairState] = {}
    for choice in space.choices(2):
        if not space.allowed(choice):
            states[choice] = "incompatible"
        elif any(values <= set(choice) for values in broken):
            states[choice] = "broken"
        elif any(record.has(choice) for record in passing):
            states[choice] = "works"
        else:
            states[choice] = "unknown"
    return states


def merged(parts: Sequence[MatrixFile]) -> tuple[Space, MatrixFile]:
    """Merge the matrices of shards.

    Args:
        parts: The matrices, at least one.

    Returns:
        The axes, and one matrix with the cells of all shards and the failing sets among them.

    Raises:
        UsageError: The shards have different axes or engines.
    """
    first = parts[0]
    for part in parts[1:]:
        for name in ("axes_file", "engine", "version", "options", "strength", "profile"):
            if getattr(part, name) != getattr(first, name):
                raise errors.UsageError(f"the matrices of the shards differ in their {name}")
    file = AxesFile.model_validate(first.axes_file)
    space = Space(file, first.engine, first.version, first.options)
    array = build_array(space, parse_strength(str(first.strength)))
    cells = _merged_cells(space, array, parts)
    sets = isolation.smallest(space, cells, lambda _cell: None)
    whole = build(space, array, cells, sets, profile=first.profile)
    spent = dict.fromkeys(first.spent, 0.0)
    for part in parts:
        for key in spent:
            spent[key] += part.spent.get(key, 0.0)
    return space, whole.model_copy(update={"spent": spent})


def _merged_cells(space: Space, array: Array, parts: Sequence[MatrixFile]) -> list[CellRecord]:
    """Return the cells of shards in the order of the plan, without duplicates.

    Both records of a cell that was started twice are kept: they show whether its failure happened
    again. If several shards ran a cell, the first broken record is kept, else the first record.
    """
    records: dict[tuple[str, bool], CellRecord] = {}
    for part in parts:
        for record in part.cells:
            key = (record.id, record.isolating)
            if key not in records or (record.outcome.broken and not records[key].outcome.broken):
                records[key] = record
    order = {name: number for number, name in enumerate(array.names(space))}
    return sorted(
        records.values(),
        key=lambda record: (record.isolating, order.get(record.id, len(order))),
    )


def as_json(space: Space, file: MatrixFile) -> dict[str, Any]:
    """Return matrix.json as plain data, with the state of each pair in ``pairs``.

    Args:
        space: The axes.
        file: The content of matrix.json, for these axes.
    """
    states = {label(choice): state for choice, state in pairs(space, file).items()}
    return {**file.model_dump(mode="json"), "pairs": states}


def markdown(space: Space, file: MatrixFile, *, command: str | None = None) -> str:
    """Return the text of FEATURE_MATRIX.md.

    Args:
        space: The axes.
        file: The matrix.
        command: The command that ran it.
    """
    environment = templates.environment(_plain, package="sm121.matrix")
    signs = {choice: _SIGN[state] for choice, state in pairs(space, file).items()}
    return environment.get_template("feature_matrix.md.j2").render(
        space=space,
        file=file,
        command=command,
        counted=counted,
        incomplete=incomplete(file),
        unexplained=unexplained(file),
        number=numbers.number,
        duration=duration,
        columns=[choice for (choice,) in space.choices(1)],
        signs=signs,
    )


def counted(records: Sequence[CellRecord]) -> str:
    """Return the number of cells with each outcome, the worst first: ``1 CRASH, 5 PASS``.

    Args:
        records: The cells. Outcomes that no cell has are left out.
    """
    counts = Counter(record.outcome for record in records)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in CellOutcome if counts[outcome])


def _plain(value: object) -> str:
    """Return a value as one line of Markdown; the template's own markup is not changed."""
    if isinstance(value, Markup):
        return value
    line = printable(" ".join(str(value).split()))
    if len(line) > _LONGEST:
        line = f"{line[:_LONGEST]}..."
    return line.replace("|", "\\|").replace("<", "&lt;")


def _unchanged(text: str) -> str:
    return text


def write(
    space: Space,
    file: MatrixFile,
    folder: Path,
    *,
    command: str | None = None,
    redact: Callable[[str], str] = _unchanged,
) -> None:
    """Write matrix.json and FEATURE_MATRIX.md.

    Args:
        space: The axes.
        file: The matrix.
        folder: The folder, which is created if it does not exist.
        command: The command that ran the matrix.
        redact: Applied to both texts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(as_json(space, file), indent=2, ensure_ascii=False)
    files.write_text(redact(text) + "\n", folder / "matrix.json")
    files.write_text(redact(markdown(space, file, command=command)), folder / MARKDOWN)
