"""One file that puts two stored runs side by side; it has no script and asks no network."""

import os
from pathlib import Path

from markupsafe import Markup

from sm121 import __version__
from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.core.numbers import number
from sm121.report import metric_names, page, stored
from sm121.report.rows import shortened
from sm121.report.side import Beside, Side
from sm121.run.fingerprint import profile_label

#: Where it goes unless something else is said: in the current folder.
NAME = Path("compare.html")
_STYLES = ("report.css", "beside.css", "compare.css")


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
    style = "".join(page.asset(f"templates/{name}") for name in _STYLES)
    return (
        page.environment()
        .get_template("compare.html.j2")
        .render(
            beside=beside,
            style=Markup(style),  # noqa: S704  # our own files
            policy=page.policy(f"style-src {page.hashes(style)}", "img-src data:"),
            label=profile_label,
            number=number,
            words=metric_names.words,
            short=shortened,
            version=__version__,
        )
    )


def _side(letter: str, name: str, path: Path, target: Path) -> Side:
    report = stored.read(path)
    beside = report.directory / page.NAME
    link = None
    if beside.is_file():
        link = Path(os.path.relpath(beside.absolute(), target.absolute().parent)).as_posix()
    return Side(letter, name, report, link)
