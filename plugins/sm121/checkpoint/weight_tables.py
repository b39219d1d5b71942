"""The tables of ``fixtures/checkpoint.toml``: formats, parts of a model, words of labels."""

from typing import Literal

from pydantic import Field

from sm121.core import data_file
from sm121.core.data_file import DataTable, Entries, Regex

#: How much of a part a token reads.
Read = Literal["all", "used", "row", "nothing"]


class FormatRow(DataTable):
    """How a format is stored: a weight with its scale."""

    #: The format as formats.toml names it; ``int``: its bits are found by the shapes.
    id: str
    #: The end of the weight's name, and its dtypes.
    weight: str
    dtypes: tuple[str, ...]
    #: The end of the scale's name, and its dtypes.
    scale: str
    scale_dtypes: tuple[str, ...]
    #: The end of the name of the zero points.
    zeros: str | None = None
    #: The values in an element of the weight; None: found by the shapes.
    values: int | None = None


class PartRow(DataTable):
    """A part of a model."""

    id: str
    #: Found in the names of its modules.
    pattern: Regex
    read: Read
    #: Whether a label speaks of its matrices.
    linear: bool


class LabelRow(DataTable):
    """What a word of a label means."""

    formats: tuple[str, ...]
    #: The parts that it speaks of; empty: all with ``linear``.
    parts: tuple[str, ...] = ()


class _Names(DataTable):
    ends: tuple[str, ...]
    #: Found in the name of a module of a drafter.
    draft: Regex
    #: Found in the name of a module that is no matrix, though its tensor has rows.
    no_matrix: Regex


class _Keys(DataTable):
    used_experts: tuple[str, ...]
    experts: tuple[str, ...]


class WeightTables(DataTable):
    """The content of checkpoint.toml."""

    format: tuple[FormatRow, ...] = Field(min_length=1)
    #: The format of a weight without a scale, by its dtype.
    plain: dict[str, str]
    names: _Names
    part: Entries[PartRow]
    label: dict[str, LabelRow]
    keys: _Keys


def load() -> WeightTables:
    """Return the content of ``fixtures/checkpoint.toml``.

    Raises:
        DataFileError: The file is wrong.
    """
    return data_file.load("checkpoint.toml", WeightTables)
