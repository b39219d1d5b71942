"""Write docs/requirements.md: the requirements of each level, from the docstrings of its tests."""

import ast
from dataclasses import dataclass
from pathlib import Path

from sm121.core.errors import UsageError
from sm121.core.profile_fields import LEVELS
from tools.reference import originals
from tools.reference.markdown import MADE_BY, cell

_SHOWN_MARKS = ("slow", "ab_run")
_OPTIONAL_MARKS = (*_SHOWN_MARKS, "asked_for")


@dataclass(frozen=True)
class Requirement:
    """One test: its name, its requirement, and the conditions under which it runs."""

    name: str
    text: str
    applies_to: tuple[str, ...]
    marks: tuple[str, ...]
    varied: tuple[str, ...]
    """The names of the parameters over which the test is repeated."""
    optional: bool = False
    """Whether the test runs only with an option of its own."""


@dataclass(frozen=True)
class LevelModule:
    """One module of tests: a level, with its docstring."""

    level: str
    file: str
    text: str
    requirements: tuple[Requirement, ...]


def read_levels(folder: Path) -> list[LevelModule]:
    """Return the levels of a folder of tests, in their order.

    Raises:
        UsageError: The folder has no test, or a test without a docstring.
    """
    modules = []
    for file in sorted(folder.glob("test_*.py")):
        modules.append(_module(file))
    if not modules:
        raise UsageError(f"{folder}: expected the tests of the levels, test_*.py")
    return sorted(modules, key=lambda module: LEVELS.index(module.level))


def page(folder: Path, docs: Path) -> str:
    """Return docs/requirements.md."""
    modules = read_levels(folder)
    count = sum(len(module.requirements) for module in modules)
    lines = [
        "# What each level requires",
        "",
        MADE_BY.format(source="the tests in `tests/`"),
        f"There are {count} tests in {len(modules)} levels. Many of them run several times, for "
        "example once for each depth, shape, prompt or request. If the smoke level fails, no "
        "other level runs.",
    ]
    for module in modules:
        lines += ["", f"## {module.level}", "", *module.text.split("\n"), ""]
        lines += ["| test | requires | applies to |", "|---|---|---|"]
        for item in module.requirements:
            over = ""
            if item.varied:
                over = f" Parametrized by: {', '.join(item.varied)}."
            marks = "".join(f" ({mark})" for mark in item.marks)
            applies = ", ".join(item.applies_to) or "all"
            lines.append(f"| `{item.name}` | {cell(item.text)}{over}{marks} | {applies} |")
    lines += ["", *originals.counts(docs)]
    return "\n".join(lines) + "\n"


def _module(file: Path) -> LevelModule:
    tree = ast.parse(file.read_text("utf-8"), str(file))
    marks = []
    for node in tree.body:
        marks += _module_marks(node)
    level = next((name for name, _ in marks if name in LEVELS), None)
    if level is None:
        raise UsageError(f"{file}: expected pytestmark with the marker of a level")
    general = _applies_to(marks)
    tests = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            tests.append(_requirement(file, node, general))
    return LevelModule(level, file.name, ast.get_docstring(tree) or "", tuple(tests))


def _requirement(file: Path, node: ast.FunctionDef, general: tuple[str, ...]) -> Requirement:
    text = " ".join((ast.get_docstring(node) or "").split())
    if not text:
        raise UsageError(f"{file}: {node.name}: expected a docstring that says what it requires")
    marks = []
    for decorator in node.decorator_list:
        if (mark := _mark(decorator)) is not None:
            marks.append(mark)
    varied = []
    for name, arguments in marks:
        if name == "parametrize" and arguments:
            varied.append(arguments[0])
    return Requirement(
        name=node.name,
        text=text,
        applies_to=_applies_to(marks) or general,
        marks=tuple(name for name, _ in marks if name in _SHOWN_MARKS),
        varied=tuple(varied),
        optional=any(name in _OPTIONAL_MARKS for name, _ in marks),
    )


def _module_marks(node: ast.stmt) -> list[tuple[str, tuple[str, ...]]]:
    if not isinstance(node, ast.Assign) or not any(
        isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets
    ):
        return []
    listed = node.value.elts if isinstance(node.value, (ast.List, ast.Tuple)) else [node.value]
    return [mark for item in listed if (mark := _mark(item)) is not None]


def _mark(node: ast.expr) -> tuple[str, tuple[str, ...]] | None:
    """Return the name and the text arguments of ``pytest.mark.name(...)``."""
    arguments: list[str] = []
    if isinstance(node, ast.Call):
        for argument in node.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                arguments.append(argument.value)
            elif isinstance(argument, ast.Tuple):
                names = []
                for item in argument.elts:
                    if isinstance(item, ast.Constant):
                        names.append(item.value)
                arguments.append(", ".join(map(str, names)))
        node = node.func
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Attribute):
        return None
    if node.value.attr == "mark":
        return (node.attr, tuple(arguments))
    return None


def _applies_to(marks: list[tuple[str, tuple[str, ...]]]) -> tuple[str, ...]:
    return next((arguments for name, arguments in marks if name == "applies_to"), ())
