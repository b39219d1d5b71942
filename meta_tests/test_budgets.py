"""What grows beyond its budget, and two pages with nearly one name, are detected."""

import shutil
from pathlib import Path

import pytest
from data_rows import from_data, text_file

pytest.importorskip("tools")
from tools import budgets

SETTINGS = text_file("budgets.toml")
MODULE = "def f() -> int:\n    matches = 1\n    return matches\n"


@pytest.fixture
def tree(tmp_path) -> Path:
    """A small tree that keeps its budgets."""
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    (tmp_path / "package").mkdir()
    (tmp_path / "docs").mkdir()
    for name in ("one.py", "two.py"):
        (tmp_path / "package" / name).write_text(MODULE)
    return tmp_path


def test_the_tree_keeps_its_budgets(capsys):
    assert budgets.main([]) == 0, capsys.readouterr().out


def test_a_small_tree_is_within_its_budgets(tree, capsys):
    assert budgets.main([str(tree)]) == 0
    assert "package 6 lines; limit 12; target 10\n" in capsys.readouterr().out


@from_data
def test_what_exceeds_its_budget_is_named(tree, capsys, file, text, message):
    (tree / "package" / file).write_text(text)
    assert budgets.main([str(tree)]) == 1
    assert message in capsys.readouterr().out


def test_two_pages_with_nearly_one_name_are_refused(tree, capsys):
    for name in ("gate.md", "gates.md", "index.md"):
        shutil.copy(tree / "pyproject.toml", tree / "docs" / name)
    assert budgets.main([str(tree)]) == 1
    assert "differ only by an s: gate.md, gates.md" in capsys.readouterr().out
