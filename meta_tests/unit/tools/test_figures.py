"""tools/figures.py: its output, and its failures."""

from pathlib import Path

import pytest

pytest.importorskip("tools")
from tools import figures

SIZES = """
[tool.sm121-sizes]
module = 8
function = 4
class = 1
fields = 2
methods = 2
[tool.sm121-sizes.exceptions]
"plugins/long.py" = 9
[tool.sm121-sizes.heirs]
[tool.sm121-sizes.file-formats]
"""
WIDE = "class C:\n    a: int\n    b: int\n    c: int\n"
TALL = "class C:\n    def a(self): ...\n    def _b(self): ...\n    def _c(self): ...\n"
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(WIDE, "plugins/two.py:C: expected at most 2 fields, got 3", id="fields"),
        pytest.param(TALL, "plugins/two.py:C: expected at most 2 methods, got 3", id="methods"),
    ],
)
def test_a_large_class_of_the_package_is_named(tree, capsys, text, message):
    (tree / "tools" / "two.py").write_text(text)
    assert figures.main([str(tree)]) == 0, "it is no class of the package"
    (tree / "plugins" / "two.py").write_text(text)
    assert figures.main([str(tree)]) == 1
    assert message in capsys.readouterr().out


def test_the_data_of_a_file_format_is_listed_while_it_is_large(tree, capsys):
    heading = "[tool.sm121-sizes.file-formats]"
    listed = SIZES.replace(heading, f'{heading}\n"plugins/two.py:C" = "a.json"')
    (tree / "pyproject.toml").write_text(listed)
    (tree / "plugins" / "two.py").write_text(WIDE)
    assert figures.main([str(tree)]) == 0
    (tree / "plugins" / "two.py").write_text("class C: ...\n")
    assert figures.main([str(tree)]) == 1
    assert "Remove it from file-formats" in capsys.readouterr().out


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
