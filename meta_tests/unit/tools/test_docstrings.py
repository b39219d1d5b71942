"""tools/docstrings.py: which functions must have the section Args in their docstring."""

import pytest

pytest.importorskip("tools")
from tools import docstrings, figures

ARGS = '"""Do it.\n\n    Args:\n        a: A.\n    """'
PROTOCOL = f"class Base:\n  def f(self, a):\n    {ARGS}\n"


def found(folder, text: str) -> list[str]:
    """Return the lines about a module with this text."""
    (folder / "plugins").mkdir()
    (folder / "plugins" / "one.py").write_text(text)
    return list(docstrings.without_args(folder, "plugins"))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        pytest.param('def f(a):\n  """Do it."""', "1: f", id="function"),
        pytest.param("\ndef f(*a, **b): ...", "2: f", id="only stars and no docstring"),
        pytest.param("async def f(*, a): ...", "1: f", id="coroutine"),
        pytest.param("class C:\n  def f(self, a): ...", "2: f", id="method"),
        pytest.param("class C:\n  @staticmethod\n  def f(a): ...", "3: f", id="static method"),
        pytest.param("class C:\n  class D:\n    def f(self, a): ...", "3: f", id="inner class"),
        pytest.param("if X:\n  def f(a): ...", "2: f", id="condition"),
        pytest.param(f"{PROTOCOL}class C(Other):\n  def f(self, a): ...", "9: f", id="other base"),
    ],
)
def test_a_public_function_with_parameters_needs_args(tmp_path, text, place):
    (line,) = found(tmp_path, text)
    assert line.startswith(f"plugins/one.py:{place}: expected a docstring with Args:"), line


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f"def f(a):\n    {ARGS}", id="with Args"),
        pytest.param("def f(): ...\nclass C:\n  def f(self): ...", id="no parameters"),
        pytest.param("class C:\n  @classmethod\n  def f(cls): ...", id="class method"),
        pytest.param("def _f(a): ...\nclass _C:\n  def f(self, a): ...", id="private"),
        pytest.param("class C:\n  def __call__(self, a): ...", id="dunder"),
        pytest.param("def pytest_configure(config): ...", id="hook of pytest"),
        pytest.param("@pytest.fixture(scope='session')\ndef f(a): ...", id="fixture"),
        pytest.param("def f():\n  def inner(a): ...", id="inner function"),
        pytest.param(f"{PROTOCOL}class C(m.Base[int]):\n  def f(self, a): ...", id="inherited"),
    ],
)
def test_a_function_may_lack_args(tmp_path, text):
    assert found(tmp_path, text) == []


def test_lint_fails_on_a_function_without_args(tmp_path, capsys):
    (tmp_path / "pyproject.toml").write_text(
        "[tool.sm121-sizes]\nmodule = 9\nfunction = 9\nclass = 9\nfields = 9\nmethods = 9\n"
        "exceptions = {}\nheirs = {}\nfile-formats = {}\n"
    )
    assert found(tmp_path, "def f(a, *b): ...")
    assert figures.main([str(tmp_path)]) == 1
    message = "plugins/one.py:1: f: expected a docstring with Args:, got none. Describe a, b."
    assert message in capsys.readouterr().out
