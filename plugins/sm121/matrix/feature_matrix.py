"""matrix.json and FEATURE_MATRIX.md: which combinations work, and how that is known."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup
from pydantic import Field

from sm121.core import data_file, errors, files, numbers, templates
from sm121.core.printable import printable
from sm121.core.time_range import duration
from sm121.matrix import isolation, size
from sm121.matrix.axes import AxesFile, Choice, Space, identity, label
from sm121.matrix.covering import Array, coverage, parse_strength
from sm121.matrix.covering import build as build_array
from sm121.matrix.outcome import CellOutcome, CellRecord

PairState = Literal["works", "broken", "incompatible", "unknown"]
_SIGN: dict[PairState, str] = {
    "works": "ok",
    "broken": "**X**",
    "incompatible": "-",
    "unknown": "?",
}
_LONGEST = 300
MARKDOWN = "FEATURE_MATRIX.md"


class CoverageReport(data_file.Record):
    """Combinations of so many values."""

    strength: int
    allowed: int
    covered: int
    """By the plan."""
    ran: int
    """By cells that came to an outcome."""
    incompatible: int


class FailingSetReport(data_file.Record):
    """Values that fail together."""

    values: dict[str, str]
    outcome: CellOutcome
    reason: str
    cells: list[str]
    confirmed: bool
    text: str


class MatrixFile(data_file.Record):
    """The whole of matrix.json."""

    schema_version: int = 1
    axes: str
    engine: str
    version: str | None
    options: list[str] | None = None
    """Of the engine's parser, where the version names no release and it was asked."""
    strength: int | str
    profile: str
    values: dict[str, list[str]]
    baseline: dict[str, str]
    absent: dict[str, str] = Field(default_factory=dict)
    """axis=value -> why this engine does not have it."""
    incompatible: dict[str, str] = Field(default_factory=dict)
    """Known not to go together: values -> reason."""
    unproven: dict[str, str] = Field(default_factory=dict)
    """axis=value -> why nothing shows that it was in force."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """Named cells that could not be in: name -> why."""
    product: int
    cells: list[CellRecord]
    not_run: list[str] = Field(default_factory=list)
    """Cells of the plan that have no outcome yet."""
    interrupted: bool = False
    """The run was interrupted before it had all of its cells, or knew what fails together."""
    coverage: list[CoverageReport]
    failing_sets: list[FailingSetReport]
    spent: dict[str, float]
    axes_file: dict[str, Any] = Field(default_factory=dict)
    """The whole of the axes' file, so that this one can be read without it."""


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
    """What is known of the matrix now. `references`: starts of the baseline that are no cells,
    whose time is counted; `interrupted`: no more will come."""
    ended = {record.id for record in records if record.outcome is not CellOutcome.NOT_RUN}
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
        left_out={
            **{name: f"{CellOutcome.INCOMPATIBLE}: {rule.reason}"
               for name, rule in array.incompatible.items()},
            **dict(array.absent),
        },
        product=space.product,
        cells=list(records),
        not_run=[i for p in array.cells if (i := identity(space, p.cell)) not in ended],
        coverage=_coverage(space, array, records),
        failing_sets=[
            FailingSetReport(
                values=dict(one.choice), outcome=one.outcome, reason=one.reason,
                cells=list(one.cells), confirmed=one.confirmed, text=str(one),
            )
            for one in sets
        ],
        interrupted=interrupted,
        axes_file=space.file.model_dump(mode="json"),
        spent=dict(size.spent(records, references)),
    )  # fmt: skip


def _coverage(space: Space, array: Array, records: Sequence[CellRecord]) -> list[CoverageReport]:
    most = max(2, array.strength) if isinstance(array.strength, int) else 2
    planned = [planned.cell for planned in array.cells]
    ended = [r.values for r in records if r.outcome is not CellOutcome.NOT_RUN]
    strengths = range(1, min(most, len(space.axes)) + 1)
    return [
        CoverageReport(
            strength=strength,
            allowed=planned_coverage.allowed,
            covered=planned_coverage.covered,
            ran=coverage(space, ended, strength).covered,
            incompatible=planned_coverage.excluded,
        )
        for strength, planned_coverage in ((n, coverage(space, planned, n)) for n in strengths)
    ]


def unexplained(file: MatrixFile) -> list[CellRecord]:
    """Cells that fail and are in no failing set: which of their values it takes is not known."""
    explained = {cell for one in file.failing_sets for cell in one.cells}
    broken = {r.id: r for r in file.cells if r.outcome.broken and r.id not in explained}
    again = {r.id for r in file.cells if r.isolating and not r.outcome.broken}
    return [record for name, record in broken.items() if name not in again]


def incomplete(file: MatrixFile) -> str | None:
    """Why the matrix is not whole, a sentence; None where it is."""
    if not file.interrupted and not file.not_run:
        return None
    planned = len({*file.not_run, *(r.id for r in file.cells if not r.isolating)})
    counts = f"{len(file.not_run)} of {planned} cells have no outcome"
    if file.interrupted:
        return f"Interrupted: {counts}."
    return (
        f"Not whole: {counts} yet; the run goes on, was ended from outside, or is one of several."
    )


def pairs(space: Space, file: MatrixFile) -> dict[Choice, PairState]:
    """What is known of each pair of values: it works in a cell that passes, but perhaps for its
    rate; it is broken with a failing set in it; in other cells alone it is unknown."""
    passing = [record for record in file.cells if record.works]
    broken = [{*one.values.items()} for one in file.failing_sets if one.confirmed]
    states: dict[Choice, PairState] = {}
    for choice in space.choices(2) if len(space.axes) > 1 else ():
        if not space.allowed(choice):
            states[choice] = "incompatible"
        elif any(one <= {*choice} for one in broken):
            states[choice] = "broken"
        elif any(record.has(choice) for record in passing):
            states[choice] = "works"
        else:
            states[choice] = "unknown"
    return states


def markdown(space: Space, file: MatrixFile, *, command: str | None = None) -> str:
    """FEATURE_MATRIX.md."""
    environment = templates.environment(_plain, package="sm121.matrix")
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
        signs={choice: _SIGN[state] for choice, state in pairs(space, file).items()},
    )


def counted(records: Sequence[CellRecord]) -> str:
    """How many cells came to each outcome: ``1 CRASH, 5 PASS``, in the order of the outcomes."""
    counts = {o: sum(r.outcome is o for r in records) for o in CellOutcome}
    return ", ".join(f"{n} {o.value}" for o, n in counts.items() if n)


def _plain(value: object) -> str:
    """One line of Markdown; what the template calls safe stands as it is."""
    if isinstance(value, Markup):
        return value
    line = printable(" ".join(str(value).split()))
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
    return line.replace("|", "\\|").replace("<", "&lt;")


def merged(parts: Sequence[MatrixFile]) -> tuple[Space, MatrixFile]:
    """One matrix of the matrices of shards: all cells, and what they say together. Raises
    UsageError: they are of different axes or engines."""
    first = parts[0]
    for part in parts[1:]:
        for name in ("axes_file", "engine", "version", "options", "strength", "profile"):
            if getattr(part, name) != getattr(first, name):
                raise errors.UsageError(f"the shards' matrices are of another {name}")
    file = AxesFile.model_validate(first.axes_file)
    space = Space(file, first.engine, first.version, first.options)
    array = build_array(space, parse_strength(str(first.strength)))
    # A cell and its second start are both kept: what did not come again is told apart by it.
    records: dict[tuple[str, bool], CellRecord] = {}
    for record in (record for part in parts for record in part.cells):
        key = (record.id, record.isolating)
        if key not in records or (record.outcome.broken and not records[key].outcome.broken):
            records[key] = record
    order = {identity(space, p.cell): index for index, p in enumerate(array.cells)}
    cells = sorted(records.values(), key=lambda r: (r.isolating, order.get(r.id, len(order))))
    sets = isolation.smallest(space, cells, lambda _cell: None)
    whole = build(space, array, cells, sets, profile=first.profile)
    totals = {key: sum(part.spent.get(key, 0.0) for part in parts) for key in first.spent}
    return space, whole.model_copy(update={"spent": totals})


def as_json(space: Space, file: MatrixFile) -> dict[str, Any]:
    """matrix.json: the file, and beside the cells the state of each pair."""
    states = {label(choice): state for choice, state in pairs(space, file).items()}
    return {**file.model_dump(mode="json"), "pairs": states}


def write(
    space: Space,
    file: MatrixFile,
    folder: Path,
    *,
    command: str | None = None,
    redact: Callable[[str], str] = lambda text: text,
) -> None:
    """matrix.json and FEATURE_MATRIX.md in a folder, which is made if need be. `command`: what made
    it, said in FEATURE_MATRIX.md."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(as_json(space, file), indent=2, ensure_ascii=False)
    files.write_text(redact(text) + "\n", folder / "matrix.json")
    files.write_text(redact(markdown(space, file, command=command)), folder / MARKDOWN)
