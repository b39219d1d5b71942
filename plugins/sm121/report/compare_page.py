"""One file that puts two stored runs side by side; it has no script and asks no network."""

import os
from pathlib import Path

from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.report import page, stored
from sm121.report.side import Beside, Side

#: Where it goes unless something else is said: in the current folder.
NAME = Path("compare.html")


def write(runs: list[tuple[str, Path]], target: Path) -> Path:
    """Write the page of two runs. `runs`: the name and the report directory of A, and of B. Raises
    UsageError: they are not two report directories."""
    if len(runs) != 2:
        raise UsageError(f"--html: expected two runs, A and B, got {len(runs)}")
    sides = [_side(letter, *run, target) for letter, run in zip("AB", runs, strict=True)]
    write_text(html(Beside(*sides)), target)
    return target


def html(beside: Beside) -> str:
    """The page of two runs."""
    template = page.environment().get_template("compare.html.j2")
    return template.render(
        page.inlined("report", "beside", "compare", plotted=False), beside=beside
    )


def _side(letter: str, name: str, path: Path, target: Path) -> Side:
    report = stored.read(path)
    beside = report.directory / page.NAME
    link = None
    if beside.is_file():
        link = Path(os.path.relpath(beside.absolute(), target.absolute().parent)).as_posix()
    return Side(letter, name, report, link)
