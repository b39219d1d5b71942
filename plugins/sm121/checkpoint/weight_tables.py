"""The tables in ``fixtures/checkpoint.toml``: formats, parts of a model, words in labels."""

from typing import Literal

from pydantic import Field

from sm121.core import data_file
from sm121.core.data_file import DataTable, Entries, Regex

#: How much of a part is read for a token.
Read = Literal["all", "used", "row", "nothing"]


class FormatRow(DataTable):
    """How a format is stored: the tensors for a weight and its scales."""

    #: The name in formats.toml. With ``int``, the number of bits is derived from the shapes.
    id: str
    #: The suffix of the weight's name.
    weight: str
    #: The possible dtypes of the weight.
    dtypes: tuple[str, ...]
    #: The suffix of the scale's name.
    scale: str
    #: The possible dtypes of the scale.
    scale_dtypes: tuple[str, ...]
    #: The suffix of the name of the zero points; None if the format has none.
    zeros: str | None = None
    #: The number of values in an element of the weight; None if it is derived from the shapes.
    values: int | None = None
    #: The dimension of the weight and of the scale that has the inputs of the matrix.
    inputs_dimension: int = -1


class PartRow(DataTable):
    """A part of a model."""

    id: str
    #: A pattern that occurs in the names of the part's modules.
    pattern: Regex
    read: Read
    #: Whether a declared quantisation applies to the part's matrices.
    linear: bool


class LabelRow(DataTable):
    """The meaning of a word in a label, i.e. in the declared quantisation of a checkpoint."""

    formats: tuple[str, ...]
    #: The parts to which the word applies; empty for all parts with ``linear``.
    parts: tuple[str, ...] = ()


class _Names(DataTable):
    #: The suffixes of tensors' names after the name of the module.
    ends: tuple[str, ...]
    #: A pattern that occurs in the names of a drafter's modules.
    draft: Regex
    #: A pattern that occurs in the names of modules that are not matrices, although their tensors
    #: have several dimensions.
    no_matrix: Regex


class _Keys(DataTable):
    #: Keys in config.json for the number of experts that a token uses.
    used_experts: tuple[str, ...]
    #: Keys in config.json for the number of experts in a layer.
    experts: tuple[str, ...]


class WeightTables(DataTable):
    """The content of checkpoint.toml."""

    format: tuple[FormatRow, ...] = Field(min_length=1)
    #: The formats of weights without a scale, by dtype.
    plain: dict[str, str]
    names: _Names
    part: Entries[PartRow]
    label: dict[str, LabelRow]
    keys: _Keys


def load() -> WeightTables:
    """Return the content of ``fixtures/checkpoint.toml``.

    Raises:
        DataFileError: The file is invalid.
    """
    return data_file.load("checkpoint.toml", WeightTables)
