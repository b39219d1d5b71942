"""Write docs/options.md: every option, marker and fixture, from their declarations.

It is the only module of `tools.reference` that needs pytest.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from pytest_gpu_arch import markers
from pytest_gpu_arch import plugin as gpu_arch
from pytest_llm_server import options as llm_server
from sm121.plugin import MODULES, options
from tools.reference.markdown import MADE_BY, cell, code, table

if TYPE_CHECKING:
    import pytest

#: The headings of the sections that the page does not show.
_SECTIONS = ("Args:", "Returns:", "Yields:", "Raises:")


@dataclass(frozen=True)
class Option:
    """An option of pytest's command line."""

    group: str
    names: tuple[str, ...]
    value: str
    help: str

    @property
    def shown(self) -> str:
        """The option as it is written on the command line."""
        return f"{self.names[0]} {self.value}".strip()


@dataclass
class _Parser:
    """Record the options that the plugin declares.

    This object replaces pytest's parser and option group.
    """

    options: list[Option] = field(default_factory=list)
    _group: str = ""

    def getgroup(self, _name: str, title: str) -> _Parser:
        self._group = title
        return self

    def addini(self, *_names: str, **_attributes: Any) -> None:
        """Ignore a setting of pytest.ini, because the page of its plugin describes it."""

    def addoption(self, *names: str, **attributes: Any) -> None:
        value = attributes.get("metavar") or ""
        if isinstance(value, tuple):
            value = " ".join(value)
        if choices := attributes.get("choices"):
            value = "|".join(choices)
        self.options.append(
            Option(self._group, names, str(value), str(attributes.get("help") or ""))
        )


def modules() -> list[ModuleType]:
    """Return the modules of the plugins."""
    return [importlib.import_module(name) for name in MODULES]


def declared() -> tuple[list[Option], list[str]]:
    """Return every option and every marker that the plugins declare."""
    taken = _Parser()
    gpu_arch.pytest_addoption(cast("pytest.Parser", taken))
    options.add(cast("pytest.Parser", taken))
    llm_server.add(cast("pytest.Parser", taken))
    return taken.options, [*options.markers(), *markers.lines()]


def _description(docstring: str) -> str:
    """Return the text of a docstring before its first Google section, on one line."""
    paragraphs = []
    for paragraph in docstring.split("\n\n"):
        if paragraph.startswith(_SECTIONS):
            break
        paragraphs.append(paragraph)
    return " ".join(" ".join(paragraphs).split())


def fixtures() -> dict[str, str]:
    """Return every fixture with the description in its docstring."""
    found = {}
    for module in modules():
        for node in ast.parse(inspect.getsource(module)).body:
            given = isinstance(node, ast.FunctionDef) and any(
                "pytest.fixture" in ast.unparse(item) for item in node.decorator_list
            )
            if isinstance(node, ast.FunctionDef) and given and not node.name.startswith("_"):
                found[node.name] = _description(ast.get_docstring(node) or "")
    return dict(sorted(found.items()))


def _groups(every: list[Option]) -> list[str]:
    """Return the options of each group, with a heading and a table."""
    lines = []
    for group in dict.fromkeys(option.group for option in every):
        lines += ["", f"### {group.removeprefix('SM121: ').capitalize()}", ""]
        rows = []
        for option in every:
            if option.group == group:
                rows.append((code(option.shown), cell(option.help)))
        lines += table(("option", "meaning"), rows)
    return lines


def page() -> str:
    """Return docs/options.md."""
    every, markers = declared()
    split = [line.partition(":") for line in markers]
    lines = [
        "# Options, markers and fixtures",
        "",
        MADE_BY.format(source="the plugin"),
        "## Options of pytest",
        "",
        "The options are grouped as in `pytest --help`.",
        *_groups(every),
        "",
        "pytest-benchmark's own options (`--benchmark-autosave`, `--benchmark-compare`, "
        "`--benchmark-compare-fail`, `--benchmark-storage`) work on every measurement "
        "([gates](gates.md)).",
        "",
        "## Markers",
        "",
        *table(("marker", "meaning"), [(f"`{n}`", cell(text)) for n, _, text in split]),
        "",
        "## Fixtures",
        "",
        "The tests of the levels use these fixtures. Tests of another project can use them as "
        "well, but only the fixtures in [the table of stable names](python-api.md#stable-names) "
        "keep their names and behaviour.",
        "",
        *table(("fixture", "meaning"), [(f"`{n}`", cell(t)) for n, t in fixtures().items()]),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
