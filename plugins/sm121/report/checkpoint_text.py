"""The output of ``sm121 checkpoint``: a table as text, or JSON for programs."""

import dataclasses
from collections.abc import Sequence

from sm121.checkpoint.inspection import Inspection
from sm121.core import numbers, templates
from sm121.core.data_file import Record
from sm121.core.unmet import Fact

_HEAD = ("part", "format", "layers", "weights", "stored", "a token reads")


class CheckpointPart(Record):
    """The weights of one part of a model in one format."""

    part: str
    format: str
    layers: str
    weights: int
    stored_bytes: int
    read_bytes: float


class CheckpointFact(Record):
    """A contradiction, with the texts of a `sm121.core.unmet.Fact`."""

    about: str
    required: str
    observed: str
    evidence: str


class CheckpointKvCache(Record):
    """The KV cache of one sequence."""

    #: The number of layers that keep all tokens, of layers with a sliding window, and its length.
    full_layers: int
    sliding_layers: int
    window: int
    #: The number of cached values per token and layer.
    values: int


class CheckpointReport(Record):
    """A checkpoint as its headers describe it."""

    folder: str
    label: str
    files: int
    tensors: int
    bytes: int
    parts: list[CheckpointPart]
    #: The number of bytes of weights that are read per token.
    token_bytes: float
    #: The bytes of a drafter, which are only read if the server speculates.
    drafter_bytes: int
    experts: int | None
    used_experts: int | None
    #: The KV cache; None if it is unknown.
    kv_cache: CheckpointKvCache | None
    facts: list[CheckpointFact]
    notes: list[str]
    #: The parts of the checkpoint that could not be judged.
    unjudged: list[str]


def report(inspection: Inspection) -> CheckpointReport:
    """Return an inspection as data.

    Args:
        inspection: The inspection.
    """
    kv: CheckpointKvCache | None = None
    if inspection.kv is not None:
        kv = CheckpointKvCache(**dataclasses.asdict(inspection.kv))
    return CheckpointReport(
        folder=str(inspection.stored.folder),
        label=inspection.label.name,
        files=len(inspection.stored.files),
        tensors=len(inspection.stored.tensors),
        bytes=inspection.stored.size,
        parts=[
            CheckpointPart(
                part=part.name,
                format=part.format,
                layers=part.layers,
                weights=part.weights,
                stored_bytes=part.stored,
                read_bytes=part.read,
            )
            for part in inspection.parts
        ],
        token_bytes=inspection.read,
        drafter_bytes=inspection.drafter,
        experts=inspection.experts,
        used_experts=inspection.used_experts,
        kv_cache=kv,
        facts=[_fact(fact) for fact in inspection.facts],
        notes=[*inspection.notes],
        unjudged=[*inspection.unjudged],
    )


def _fact(fact: Fact) -> CheckpointFact:
    number = "" if fact.value is None else numbers.number(fact.value)
    return CheckpointFact(
        about=fact.about,
        required=fact.requirement,
        observed=fact.observed or number,
        evidence=fact.evidence,
    )


def text(model: str, inspection: Inspection) -> str:
    """Return an inspection as text.

    Args:
        model: The checkpoint's name, as the user gave it.
        inspection: The inspection.
    """
    rows = [_HEAD]
    for part in inspection.parts:
        rows.append(
            (
                part.name,
                part.format,
                part.layers,
                str(part.weights),
                size(part.stored),
                size(part.read),
            )
        )
    return templates.rendered(
        "checkpoint.txt.j2",
        templates.one_line,
        model=model,
        own=inspection,
        table=_aligned(rows),
        size=size,
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = []
    for row in rows:
        cells = []
        for column, cell in enumerate(row):
            is_number = column >= _HEAD.index("weights")
            cells.append(cell.rjust(widths[column]) if is_number else cell.ljust(widths[column]))
        lines.append("  ".join(cells).rstrip())
    return lines


def size(count: float) -> str:
    """Return a number of bytes as text, in decimal units like bandwidths.

    Args:
        count: The bytes.
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"
