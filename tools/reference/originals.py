"""Count the rows of docs/tables/originals.md, the requirements of the original documents."""

import re
from dataclasses import dataclass
from pathlib import Path

#: The states of a row, as the page writes them. A reason follows the second one.
COMPLETE = "complete"
NOT_APPLICABLE = "not applicable: "
_PAGE = "tables/originals.md"
_ROW = re.compile(r"\| (?P<text>.+?) \| (?P<state>.+?) \| (?P<where>.+) \|")
_HEADER = ("requirement", "---")


@dataclass(frozen=True)
class Row:
    """A requirement of an original document, its state, and the part of the suite that satisfies
    it.
    """

    document: str
    text: str
    state: str
    where: str


def read_rows(docs: Path) -> list[Row]:
    """Return the rows of docs/tables/originals.md.

    Args:
        docs: The folder ``docs`` of the checkout.
    """
    rows = []
    document = ""
    for line in (docs / _PAGE).read_text("utf-8").splitlines():
        if line.startswith("## "):
            document = line.removeprefix("## ")
        match = _ROW.fullmatch(line)
        if match is not None and not match["text"].startswith(_HEADER):
            rows.append(Row(document, match["text"], match["state"], match["where"]))
    return rows


def counts(docs: Path) -> list[str]:
    """Return the section of docs/requirements.md with a row for each document.

    Args:
        docs: The folder ``docs`` of the checkout.
    """
    rows = read_rows(docs)
    lines = [
        "## The original documents",
        "",
        f"[A page lists the requirements]({_PAGE}) of the documents with which the project began, "
        "with the test, the command or the file of each.",
        "",
        "| document | requirements | complete | not applicable, with its reason | partial |",
        "|---|---:|---:|---:|---:|",
    ]
    documents = list(dict.fromkeys(row.document for row in rows))
    for document in documents:
        of_document = [row for row in rows if row.document == document]
        lines.append(_line(document, of_document))
    return [*lines, _line("all", rows)]


def _line(name: str, rows: list[Row]) -> str:
    complete = len([row for row in rows if row.state == COMPLETE])
    not_applicable = len([row for row in rows if row.state.startswith(NOT_APPLICABLE)])
    partial = len(rows) - complete - not_applicable
    return f"| {name} | {len(rows)} | {complete} | {not_applicable} | {partial} |"
