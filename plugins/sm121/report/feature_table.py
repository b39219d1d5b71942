"""FEATURE_MATRIX.md in a folder of the user, and the evidence to which its rows link.

A run adds one row for its configuration, and one per cell of its matrix.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sm121.answers import served_rounding
from sm121.core.errors import UsageError
from sm121.evidence.kernel_path import KernelPath
from sm121.matrix.feature_matrix import MARKDOWN
from sm121.report.stored import StoredReport
from sm121.report.summary import plain
from sm121.run.cell_record import CellRecord
from sm121.run.verdict_file import VerdictFile

#: The folder with the evidence of all runs, in the folder of the documents.
RUNS = "runs"
#: The line that ends the table's head. New rows are inserted below it, the latest first.
_MARK = "|------|--------|------------|-------|------|--------|-------------|--------|----------|"
_HEAD = f"""# Feature matrix

Each row is a configuration, or a cell of a matrix, that a run has judged. It is added by
`sm121 testlog RUN --output DIR`. "-": nothing in the run shows the value. gpt-oss always has sinks.

| Test | Kernel | Activation | Sinks | Spec | Graphs | Flags, variables | Status | Evidence |
{_MARK}
"""
#: Shown for a value that no evidence shows.
_UNKNOWN = "-"
_ON_OFF = {True: "on", False: "off", None: _UNKNOWN}


@dataclass(frozen=True)
class LinkedFiles:
    """The files of a run in the folder of the documents, by the texts of their links."""

    links: Mapping[str, str]

    @property
    def text(self) -> str:
        """The links as Markdown."""
        return ", ".join(f"[{words}]({path})" for words, path in self.links.items())


def keep_evidence(report: StoredReport, folder: Path, run_id: str) -> LinkedFiles:
    """Copy the metadata, the table of kernels, the review and the matrix of a run.

    Args:
        report: The run.
        folder: The folder of the documents.
        run_id: The name of the run in that folder.

    Returns:
        The files, which always include the metadata.
    """
    kept = folder / RUNS / run_id
    kept.mkdir(parents=True, exist_ok=True)
    metadata = kept / "metadata.json"
    metadata.write_text(json.dumps(report.run.environment, indent=2) + "\n", "utf-8")
    found = {"metadata": metadata}
    traces = sorted([*report.directory.glob("kernels-*.md"), *report.directory.glob("decode.md")])
    sources = {
        "trace": traces[0] if traces else None,
        "review": report.directory / "review.md",
        "matrix": report.directory / "matrix" / MARKDOWN,
    }
    for words, source in sources.items():
        if source is not None and source.is_file():
            found[words] = kept / source.name
            shutil.copyfile(source, found[words])
    return LinkedFiles({words: str(path.relative_to(folder)) for words, path in found.items()})


def add(report: StoredReport, folder: Path, run_id: str, evidence: LinkedFiles) -> Path:
    """Add the rows of a run to FEATURE_MATRIX.md, the latest first. A run is added once.

    Args:
        report: The run.
        folder: The folder of the documents.
        run_id: The name of the run.
        evidence: The files of the run.

    Returns:
        The page.

    Raises:
        UsageError: The page exists, but does not contain the table.
    """
    page = folder / MARKDOWN
    text = page.read_text("utf-8") if page.is_file() else _HEAD
    if _MARK not in text:
        raise UsageError(f"{page}: expected the table of `sm121 testlog`")
    rows = []
    for cells in _rows(report):
        row = " | ".join(plain(cell) for cell in (f"{run_id} {cells[0]}".strip(), *cells[1:]))
        rows.append(f"| {row} | {evidence.text} |")
    new = [row for row in rows if row not in text]
    if new:
        lines = "\n".join([_MARK, *new])
        page.write_text(text.replace(_MARK, lines, 1), "utf-8")
    return page


def _rows(report: StoredReport) -> list[list[str]]:
    """Return the cells of each row, without the evidence."""
    rows = [_of_configuration(report.run)]
    identity = report.run.engine.identity
    if report.matrix is not None:
        rows += [_of_cell(cell, identity) for cell in report.matrix.cells if not cell.isolating]
    return rows


def _of_configuration(run: VerdictFile) -> list[str]:
    path = run.engine.path
    arguments = run.environment.get("engine_arguments") or []
    variables = run.environment.get("environment") or {}
    activations = served_rounding.activations_of(path.moe, path.dtype, run.engine.identity)
    return [
        run.engine.configuration or run.engine.name,
        path.moe or _UNKNOWN,
        activations or _UNKNOWN,
        _UNKNOWN,
        path.speculative or _UNKNOWN,
        _ON_OFF[path.cuda_graphs],
        _flags(arguments, variables),
        run.verdict.value,
    ]


def _of_cell(cell: CellRecord, identity: str | None) -> list[str]:
    """Return the axis values of a cell; for other values, those that its kernel path shows."""
    values = cell.values
    shown = {key: value for key, value in cell.path.items() if key in KernelPath.model_fields}
    path = KernelPath.model_validate(shown)
    activations = served_rounding.activations_of(path.moe, path.dtype, identity)
    return [
        cell.id,
        values.get("moe") or path.moe or _UNKNOWN,
        values.get("activation") or activations or _UNKNOWN,
        values.get("sinks") or _UNKNOWN,
        values.get("spec") or path.speculative or _UNKNOWN,
        values.get("graphs") or _ON_OFF[path.cuda_graphs],
        _flags(cell.arguments, cell.environment),
        f"{cell.outcome.value} {cell.reason}".strip(),
    ]


def _flags(arguments: list[str], variables: Mapping[str, str]) -> str:
    """Return the variables and arguments of a server, as in a shell command."""
    assigned = [f"{name}={value}" for name, value in sorted(variables.items())]
    return " ".join([*assigned, *arguments]) or _UNKNOWN
