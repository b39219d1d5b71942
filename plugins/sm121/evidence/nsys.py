"""Read kernels from the table ``cuda_gpu_kern_sum`` of Nsight Systems (``nsys stats``)."""

import csv
import io
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm121.core import verdict
from sm121.core.errors import UsageError
from sm121.evidence.kernel_profile import KernelProfile, Launches, build_profile

_REPORT = "cuda_gpu_kern_sum"
_TIME_COLUMN = "Total Time (ns)"
_CALLS_COLUMN = "Instances"
_NAME_COLUMN = "Name"
_COLUMNS = (_TIME_COLUMN, _CALLS_COLUMN, _NAME_COLUMN)
_NSYS_TIMEOUT_S = 300.0
#: The maximum length of nsys' message in an error, in characters.
_LONGEST_MESSAGE = 300
#: The dashes between a column's heading and its values in a table of nsys.
_RULER = re.compile(r"-{4,}")


def read_nsys(text: str, source: Path) -> KernelProfile:
    """Read the table from the output of nsys, which may contain other lines.

    Args:
        text: The table as CSV, or as nsys prints it. In a printed table, names are truncated to
            about 100 characters, so that several rows may have the same name. If the text contains
            several printed tables, the last one is read.
        source: The file with the text.

    Raises:
        UsageError: The text has no such table.
    """
    lines = text.splitlines()
    heads = [number for number, line in enumerate(lines) if _is_head(line)]
    if not heads:
        raise UsageError(f"{source}: expected the columns {', '.join(_COLUMNS)} of nsys' {_REPORT}")
    try:
        launches = _read_table(lines, first_head=heads[0], last_head=heads[-1])
    except csv.Error as error:
        expected = f"{source}: expected the CSV of nsys' {_REPORT}"
        raise UsageError(f"{expected}: {error}") from error
    if not launches:
        raise UsageError(f"{source}: expected kernels, the table of nsys is empty")
    return build_profile("gpu", source, None, launches)


def _is_head(line: str) -> bool:
    return all(column in line for column in _COLUMNS)


def _read_table(lines: Sequence[str], *, first_head: int, last_head: int) -> list[Launches]:
    """Read the last printed table, or else the CSV that begins with the first heading."""
    table = lines[last_head:]
    columns: list[tuple[int, int]] = []
    if len(table) > 1:
        columns = [match.span() for match in _RULER.finditer(table[1])]
    if columns:
        return _read_printed(table, columns)
    return _read_csv(lines[first_head:])


def _read_csv(lines: Sequence[str]) -> list[Launches]:
    """Read the rows of a CSV table; empty lines, and lines after the table, are skipped."""
    launches: list[Launches] = []
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        one = _read_row(row)
        if one is not None and _is_kernel(one):
            launches.append(one)
    return launches


def _read_printed(lines: Sequence[str], columns: Sequence[tuple[int, int]]) -> list[Launches]:
    """Read a printed table: a heading, a line of dashes, and rows up to an empty line."""
    head = _divide(lines[0], columns)
    launches: list[Launches] = []
    for line in lines[2:]:
        one = _read_row(dict(zip(head, _divide(line, columns), strict=True)))
        if one is None:
            break
        if _is_kernel(one):
            launches.append(one)
    return launches


def _divide(line: str, columns: Sequence[tuple[int, int]]) -> list[str]:
    """Split a printed line at the columns of the dashes.

    The last column takes the rest of the line.
    """
    parts = [line[start:end].strip() for start, end in columns[:-1]]
    last_start, _ = columns[-1]
    return [*parts, line[last_start:].strip()]


def _read_row(row: Mapping[str, str]) -> Launches | None:
    """Return the launches in a row, or None if it is not a row of the table."""
    try:
        seconds = float(row[_TIME_COLUMN].replace(",", "")) / 1e9
        calls = int(row[_CALLS_COLUMN].replace(",", ""))
        return Launches(row[_NAME_COLUMN], calls, seconds)
    except (KeyError, ValueError, AttributeError):
        return None


def _is_kernel(launches: Launches) -> bool:
    return bool(launches.name) and math.isfinite(launches.seconds)


def read_report(path: Path) -> KernelProfile:
    """Read a report file of Nsight Systems with ``nsys stats``.

    Args:
        path: The report, ``.nsys-rep``.

    Raises:
        NotRun: nsys is not installed, or cannot read this report.
        UsageError: The report has no kernels.
    """
    nsys = shutil.which("nsys")
    if nsys is None:
        raise verdict.NotRun(
            f"{path}: nsys is not on PATH; it comes with CUDA, or as the package nsight-systems"
        )
    options = ["--report", _REPORT, "--format", "csv", "--force-export", "true"]
    command = [nsys, "stats", *options, str(path)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_NSYS_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise verdict.NotRun(f"{path}: nsys stats did not answer ({error})") from error
    if run.returncode != 0:
        message = (run.stderr or run.stdout).strip() or "no message"
        last = message.splitlines()[-1][:_LONGEST_MESSAGE]
        raise verdict.NotRun(f"{path}: nsys stats ended with {run.returncode}: {last}")
    return read_nsys(run.stdout, path)
