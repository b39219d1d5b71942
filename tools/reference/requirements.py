"""Write docs/requirements.md: the requirements of each level, from the docstrings of its tests."""

import ast
from dataclasses import dataclass
from pathlib import Path

from sm121.core import profile
from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.core.profile_fields import FULL, LEVELS
from tools.reference import originals
from tools.reference.markdown import MADE_BY, cell

#: The profile whose plans the page shows: that of the real model on a GB10.
PROFILE = "sm121-gpt-oss-120b"
#: The option with which a test runs, by the marker that requires it.
_OPTIONS = {"slow": "--slow", "ab_run": "--ab A B"}
_OPTIONAL_MARKS = (*_OPTIONS, "asked_for")


@dataclass(frozen=True)
class Requirement:
    """One test: its name, its requirement, and the conditions under which it runs."""

    name: str
    text: str
    applies_to: tuple[str, ...]
    #: The names of the markers of the test and of its module.
    marks: tuple[str, ...]
    #: The option without which the test does not run; empty if it needs none.
    option: str
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

    Args:
        folder: The folder.

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
    """Return docs/requirements.md.

    Args:
        folder: The folder of the tests.
        docs: The folder ``docs`` of the checkout.

    Raises:
        UsageError: The folder has no test, or a test without a docstring.
    """
    modules = read_levels(folder)
    chosen = profile.load(PROFILE)
    count = sum(len(module.requirements) for module in modules)
    lines = [
        "# What each level requires",
        "",
        MADE_BY.format(source="the tests in `tests/`"),
        f"There are {count} tests in {len(modules)} levels. Many of them run several times, for "
        "example once for each depth, shape, prompt or request. If the smoke level fails, no "
        "other level runs.",
        "",
        f"The column `in plan` gives the smallest plan of the profile `{PROFILE}` that contains "
        "the test; each larger plan contains it too (quick, merge, full; [plans](plans.md)). If "
        "the column gives an option, the test runs only with this option.",
    ]
    for module in modules:
        lines += ["", f"## {module.level}", "", *module.text.split("\n"), ""]
        lines += ["| test | requires | applies to | in plan |", "|---|---|---|---|"]
        for item in module.requirements:
            over = ""
            if item.varied:
                names = " and ".join(f"`{name}`" for name in item.varied)
                over = f" Runs once for each value of {names}."
            applies = ", ".join(item.applies_to) or "all"
            plan = f"`{item.option}`" if item.option else _smallest_plan(chosen, module, item)
            lines.append(f"| `{item.name}` | {cell(item.text)}{over} | {applies} | {plan} |")
    lines += ["", *originals.counts(docs)]
    return "\n".join(lines) + "\n"


def _smallest_plan(chosen: Profile, module: LevelModule, item: Requirement) -> str:
    """Return the first of the plans quick, merge and full that contains a test."""
    for name in (*chosen.plans, FULL):
        if chosen.plan(name).asks(module.level, item.name, item.marks):
            return name
    raise LookupError(f"{item.name}: expected a test of the plan {FULL}")


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
        marks=tuple(name for name, _ in marks),
        varied=tuple(varied),
        optional=any(name in _OPTIONAL_MARKS for name, _ in marks),
        option=_option(marks),
    )


def _option(marks: list[tuple[str, tuple[str, ...]]]) -> str:
    """Return the option without which a test does not run; empty if it needs none."""
    for name, arguments in marks:
        if name in _OPTIONS:
            return _OPTIONS[name]
        if name == "asked_for" and arguments:
            return arguments[0]
    return ""


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
