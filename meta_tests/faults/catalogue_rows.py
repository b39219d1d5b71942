"""Run a catalogue of faults as tests, store a row for each case, and write its page with a template
of ``data/pages``."""

import html
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from meta_tests.folders import DATA, META, ROOT

_FILE = "SM121_META_ROWS"

#: The folder that pytest creates for a test, with the name of its worker.
_TEST_FOLDER = re.compile(r"[^\s(=]*/pytest-of-[^/\s]+/pytest-\d+/(?:popen-gw\d+/)?[^/\s]+/")


def keep(row: dict[str, Any]) -> None:
    """Store the row of a case, if rows were requested."""
    if rows := os.environ.get(_FILE):
        with Path(rows).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def run(tests: str, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run all cases of a file of tests; return pytest's exit status and the stored rows."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.touch()
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", str(META / tests), "--slow", *options],
            cwd=ROOT,
            env={**os.environ, _FILE: str(rows)},
            check=False,
        )
        cases = [json.loads(line) for line in rows.read_text("utf-8").splitlines()]
    return ran.returncode, cases


def cell(text: str, most: int = 240) -> str:
    """Return a text for a cell of a Markdown table. Folders of this machine are removed."""
    text = _TEST_FOLDER.sub("", text).replace(f"{ROOT}/", "")
    return html.escape(text[:most], quote=False).replace("|", "\\|").replace("\n", " ")


def page(name: str, **values: Any) -> str:
    """Return the page of a catalogue in Markdown. ``cell`` is a filter of its template."""
    environment = Environment(
        loader=FileSystemLoader(DATA / "pages"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = cell
    return environment.get_template(f"{name}.md.j2").render(values)
