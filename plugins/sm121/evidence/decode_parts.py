"""The pieces of a decode step, which are the rows of the table of kernels.

The rows are those of the table in the benchmark plan (`docs/from-the-plan.md`).
``fixtures/kernels/decode.toml`` subdivides parts of `kernel_names`: the experts' kernels into
matrix products and routing, and the other kernels into norms and the rest.
"""

from functools import cache
from typing import Literal, get_args

from sm121.core import data_file
from sm121.core.data_file import DataTable, Entries, Regex
from sm121.evidence.kernel_names import Part, entry_of, part_of

Row = Literal[
    "moe_fc1", "moe_fc2", "moe_products", "moe_other", "attention", "norms", "quantise", "routing",
    "dense", "other", "host",
]  # fmt: skip
"""A row of the table. ``moe_products`` is both products of the experts, if they cannot be
distinguished. ``host`` is the time in which no kernel ran."""
ROWS: tuple[Row, ...] = get_args(Row)


class _Piece(DataTable):
    """A pattern for kernels that are a smaller piece of a part of the model."""

    id: Literal["norms", "routing", "product"]
    part: Part
    regex: Regex


class DecisionRow(DataTable):
    """A row of the benchmark plan's decision table (`docs/from-the-plan.md`)."""

    #: The rows of the table of kernels whose shares are summed for this decision.
    rows: tuple[Row, ...]
    #: The decision applies if these rows take more than this share of a step.
    share: float
    #: A description of the rows in `rows`, for the report.
    what: str
    #: What to do if the decision applies, for the report.
    then: str
    source: str


class Gates(DataTable):
    """Limits of decoding. Those of the SM121 testing guide (`docs/from-the-plan.md`) are in ms."""

    #: The limit for the time of both matrix products of one layer's experts, for one token.
    moe_ms: float
    #: The limit for one decoded token, if the suite's profile has no gate for it.
    token_ms: float
    #: The limit for the share of a step in which no kernel runs.
    host_share: float
    #: The share is judged only if the time without a running kernel is at least this long, in
    #: milliseconds.
    host_ms: float


class DecodeFile(DataTable):
    """The content of decode.toml."""

    piece: Entries[_Piece]
    decision: tuple[DecisionRow, ...]
    gates: Gates


@cache
def load() -> DecodeFile:
    """Load the pieces, the decisions and the gates.

    Raises:
        DataFileError: The file breaks the schema.
    """
    return data_file.load("kernels/decode.toml", DecodeFile)


@cache
def row_of(name: str) -> Row:
    """Return the row of a kernel; ``moe_products`` for either product of the experts.

    Args:
        name: The name of the kernel.
    """
    part = part_of(name)
    for piece in load().piece:
        if piece.part == part and piece.regex.search(name):
            return "moe_products" if piece.id == "product" else piece.id
    return "moe_other" if part == "moe" else part


def is_product(name: str) -> bool:
    """Return whether a kernel is one of the experts' two products.

    Args:
        name: The name of the kernel.
    """
    return row_of(name) == "moe_products"


def is_first_product(name: str) -> bool:
    """Return whether a kernel is the experts' first product with a fused activation.

    Args:
        name: The name of the kernel.
    """
    entry = entry_of(name)
    return is_product(name) and entry is not None and entry.proves == "fused"
