"""A table of measured numbers for the terminal, with a header and one row per metric."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from sm121.core.numbers import number
from sm121.core.printable import printable

#: The maximum number of rows, so that the table and the verdict below it fit on one screen.
MOST = 6
#: The confidence that the table's header shows. A row with another confidence shows its own.
_USUAL_CONFIDENCE = "95%"


@dataclass(frozen=True)
class NumberRow:
    """One row of the table. Each field is the text of a cell, which may be empty."""

    metric: str
    value: str
    interval: str
    required: str
    #: The rate as a fraction of the highest rate that the memory bandwidth allows.
    share: str
    verdict: str


HEADER = NumberRow(
    metric="metric",
    value="value",
    interval=f"interval ({_USUAL_CONFIDENCE})",
    required="required",
    share="of the bound",
    verdict="verdict",
)


def aligned(table: Sequence[NumberRow]) -> str:
    """Return the rows as text in columns with a header.

    Columns that are empty in all rows are omitted.

    Args:
        table: The rows.

    Returns:
        The text; empty if there are no rows.
    """
    if not table:
        return ""
    rows = [astuple(row) for row in table]
    columns = []
    for column in zip(astuple(HEADER), *rows, strict=True):
        if any(column[1:]):
            width = max(len(cell) for cell in column)
            columns.append([cell.ljust(width) for cell in column])
    lines = []
    for cells in zip(*columns, strict=True):
        line = "  ".join(cells).rstrip()
        lines.append(f"{printable(line)}\n")
    return "".join(lines)


def interval(low: float | None, high: float | None, confidence: float | None) -> str:
    """Return an interval as text, for example ``51.9 to 52.4``, with a confidence other than 95 %.

    Args:
        low: The lower bound; None if it is unknown.
        high: The upper bound; None if there is none.
        confidence: The confidence, 0 to 1; None if it is unknown.
    """
    text = f"{number(low) or '?'} to {number(high) or 'unbounded'}"
    shown = "" if confidence is None else f"{confidence:.0%}"
    if shown in ("", _USUAL_CONFIDENCE):
        return text
    return f"{text} ({shown})"
