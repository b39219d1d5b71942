"""Functions for Markdown that every generated page uses."""

from collections.abc import Iterable, Sequence

MADE_BY = "Made by `sm121 reference docs` from {source}; do not edit it by hand.\n"


def cell(text: str) -> str:
    """Escape a text for a cell of a table.

    Args:
        text: The text, which may have several lines.
    """
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    """Format code for a cell of a table, where a bar would end the cell.

    Args:
        text: The code, on one line.
    """
    if "|" in text:
        return f"<code>{text.replace('|', '&#124;').replace('<', '&lt;')}</code>"
    return f"`{text}`"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table in Markdown, one string for each line.

    Args:
        header: The headings.
        rows: The cells of each row. They are Markdown already.
    """
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
