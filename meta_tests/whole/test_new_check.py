"""The steps of the page "You add a check" work on a copy of the tree."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meta_tests.fakes.scripted_sessions import ENGINE, attached_engine
from meta_tests.folders import ROOT

pytest.importorskip("tools")

PAGE = (ROOT / "docs" / "new-check.md").read_text("utf-8")
#: The parts of the project that the steps change or run.
PARTS = ("docs", "fixtures", "meta_tests", "plugins", "tests", "tools", "changelog.d")
_ADDITION = re.compile(r"<!-- add: (?P<file>\S+) -->\n```\w+\n(?P<text>.*?)```", re.S)
_COMMAND = re.compile(r"^\$ python (?P<arguments>.+)$", re.M)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Return a copy of the tree with the additions of the page."""
    copy = tmp_path_factory.mktemp("tree")
    for part in PARTS:
        # Copy the bytecode, too, because compiling it takes longer.
        shutil.copytree(ROOT / part, copy / part)
    for file in ("pytest.ini", "pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / file, copy)
    additions = list(_ADDITION.finditer(PAGE))
    assert len(additions) == 4
    for addition in additions:
        with (copy / addition["file"]).open("a", encoding="utf-8") as file:
            file.write(addition["text"])
    return copy


def run(tree: Path, command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree / "plugins")}
    words = [sys.executable, *shlex.split(command)]
    finished = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_every_place_that_the_page_names_is_there():
    paths = set(re.findall(r"`((?:tests|meta_tests|plugins|fixtures)/[\w/.-]*)`", PAGE))
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.slow("the tree is copied and its new check run twice: 5 s of CPU")
def test_the_check_passes_and_then_fails_on_its_fault(tree, tmp_path):
    (command,) = (line for line in _COMMAND.findall(PAGE) if "--base-url" in line)
    assert f"`python {ENGINE.relative_to(ROOT)} --port 8000`" in PAGE, "the server of this test"
    with attached_engine(tmp_path / "server.log") as (url, _):
        output = run(tree, command.replace("http://127.0.0.1:8000", url))
    clean, broken = (json.loads(line)["tests"] for line in output.splitlines())
    assert [verdict for _, verdict, _ in clean] == ["PASS"]
    ((_, verdict, message),) = broken
    assert verdict == "FAIL" and "expected an id that begins with cmpl-" in message


@pytest.mark.slow("the pages are made anew")
def test_the_requirement_reaches_its_page(tree):
    (command,) = (line for line in _COMMAND.findall(PAGE) if "reference" in line)
    run(tree, command)
    page = (tree / "docs" / "requirements.md").read_text("utf-8")
    assert "The id of a completion begins with cmpl-." in page
