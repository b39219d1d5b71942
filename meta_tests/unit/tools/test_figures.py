"""tools/figures.py: what is printed, and what fails."""

from pathlib import Path

import pytest

pytest.importorskip("tools")
from tools import figures

SIZES = """
[tool.sm121-sizes]
module = 8
function = 4
class = 1
[tool.sm121-sizes.exceptions]
"plugins/long.py" = 9
"""
MODULE = "def f() -> int:\n    matches = 1\n    return matches\n"


@pytest.fixture
def tree(tmp_path) -> Path:
    """A small tree within its limits."""
    (tmp_path / "pyproject.toml").write_text(SIZES)
    (tmp_path / "docs").mkdir()
    for folder in figures.FOLDERS:
        (tmp_path / folder).mkdir()
    (tmp_path / "plugins" / "one.py").write_text(MODULE)
    return tmp_path


def test_a_small_tree_is_within_its_limits(tree, capsys):
    assert figures.main([str(tree)]) == 0
    assert "expected at most" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        pytest.param(
            "two.py", "#\n" * 9, "plugins/two.py: expected at most 8 lines, got 9", id="module"
        ),
        pytest.param(
            "long.py", "#\n" * 10, "plugins/long.py: expected at most 9 lines", id="exception"
        ),
        pytest.param(
            "two.py",
            "def f():\n" + "    pass\n" * 4,
            "plugins/two.py:f: expected at most 4 lines, got 5",
            id="function",
        ),
        pytest.param(
            "two.py",
            "class C:\n    def a(self): ...\n    def b(self): ...\n    def _c(self): ...\n",
            "plugins/two.py:C: expected at most 1 public methods, got 2",
            id="class",
        ),
    ],
)
def test_a_part_above_its_limit_is_named(tree, capsys, file, text, message):
    (tree / "plugins" / file).write_text(text)
    assert figures.main([str(tree)]) == 1
    assert message in capsys.readouterr().out


def test_two_pages_with_nearly_one_name_are_refused(tree, capsys):
    for name in ("gate.md", "gates.md", "index.md"):
        (tree / "docs" / name).write_text("")
    assert figures.main([str(tree)]) == 1
    assert "differ only by an s: gate.md, gates.md" in capsys.readouterr().out


def test_counts_of_a_module(tmp_path):
    source = '"""Two\nlines."""\n\n# A comment.\na, b = 1, 2\nc = [x for x in (a if b else c)]\n'
    (tmp_path / "module.py").write_text(source)
    (tmp_path / "rows.toml").write_text("a = 1\nb = 2\n")
    counts = figures.counted(tmp_path)
    assert (counts.code, counts.docstrings, counts.comments, counts.blank, counts.data) == (
        2,
        2,
        1,
        1,
        2,
    )
    assert counts.expressions == {"conditional": 1, "comprehension": 1, "assignment": 0, "tuple": 1}
