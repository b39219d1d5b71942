"""Print figures of the tree, and check the sizes of its parts and the docstrings of functions.

``python -m tools.figures`` prints, for each folder, the lines of code, docstrings and comments, and
how many expressions per 1,000 lines need decoding. These are figures, not limits. The status is 1
only if a module, a function or a class is larger than ``[tool.sm121-sizes]`` of pyproject.toml
allows, or if `tools.docstrings` finds a public function whose parameters are not described. The
fields and all methods of a class, and docstrings, are checked in ``plugins/`` alone.
"""

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import class_sizes, docstrings

ROOT = Path(__file__).parent.parent
PACKAGE = "plugins"
FOLDERS = (PACKAGE, "tests", "meta_tests", "tools", "fixtures")
DATA_SUFFIXES = {".toml", ".json", ".jsonl", ".yaml", ".j2", ".jinja"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: A class of these folders inherits from no other class of the package, except for data and errors.
RUN_FOLDERS = ("plugins/sm121/engines/", "plugins/sm121/run/", "plugins/sm121/session/")
#: Kinds of expressions that the style guide limits, in the order of the table.
KINDS = ("conditional", "comprehension", "assignment", "tuple")


@dataclass
class Figures:
    """The counts of one folder.

    Attributes:
        lines: All lines of its Python files.
        docstrings: Lines within docstrings.
        comments: Lines that only have a comment.
        blank: Empty lines.
        data: Lines of data files and templates.
        expressions: The number of expressions of each kind in `KINDS`.
    """

    lines: int = 0
    docstrings: int = 0
    comments: int = 0
    blank: int = 0
    data: int = 0
    expressions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    @property
    def code(self) -> int:
        """Lines that are neither empty nor comments nor docstrings."""
        return self.lines - self.docstrings - self.comments - self.blank

    def per_thousand(self, kind: str) -> float:
        """Return the number of expressions of a kind per 1,000 lines of Python.

        Args:
            kind: One of `KINDS`.
        """
        return 1000 * self.expressions[kind] / max(self.lines, 1)

    def add_python(self, text: str, tree: ast.Module) -> None:
        """Count a Python file.

        Args:
            text: Its source.
            tree: The same, parsed.
        """
        for line in text.splitlines():
            self.lines += 1
            if not line.strip():
                self.blank += 1
            elif line.lstrip().startswith("#"):
                self.comments += 1
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                constant = node.body[0]
                self.docstrings += (constant.end_lineno or constant.lineno) - constant.lineno + 1
            kind = kind_of(node)
            if kind is not None:
                self.expressions[kind] += 1


def kind_of(node: ast.AST) -> str | None:
    """Return which of `KINDS` a node is, or None.

    Args:
        node: Any node of a syntax tree.
    """
    if isinstance(node, ast.IfExp):
        return "conditional"
    if isinstance(node, COMPREHENSIONS):
        return "comprehension"
    if isinstance(node, ast.NamedExpr):
        return "assignment"
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
    ):
        return "tuple"
    return None


def sizes(module: str, text: str, tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yield the kind, name and size of a module and of its functions and classes.

    Args:
        module: Its path.
        text: Its source.
        tree: The same, parsed.

    Yields:
        ("module", path, lines), ("function", path:name, lines), ("class", path:name, methods).
    """
    yield "module", module, text.count("\n")
    for node in class_sizes.statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "function", f"{module}:{node.name}", (node.end_lineno or 0) - node.lineno + 1
        elif isinstance(node, ast.ClassDef):
            methods = []
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    methods.append(member)
            public = []
            for method in methods:
                if not method.name.startswith("_"):
                    public.append(method)
            yield "class", f"{module}:{node.name}", len(public)


def similar_pages(docs: Path) -> list[str]:
    """Return the pairs of pages in a folder whose names differ only by a final s.

    Args:
        docs: The folder. Its subfolders are not searched.
    """
    stems = {page.stem for page in docs.glob("*.md")}
    return [f"{stem}.md, {stem}s.md" for stem in sorted(stems) if f"{stem}s" in stems]


def problems(root: Path, limits: dict[str, Any]) -> list[str]:
    """Return one line for each part that is larger than its limit, or is not described.

    Args:
        root: A checkout.
        limits: The table ``[tool.sm121-sizes]``: the limit of each kind, and exceptions by name.
    """
    units = {"module": "lines", "function": "lines", "class": "public methods"}
    lines = []
    for path in python_files(root):
        text = path.read_text("utf-8")
        module = path.relative_to(root).as_posix()
        for kind, name, size in sizes(module, text, ast.parse(text)):
            limit = limits["exceptions"].get(name, limits[kind])
            if size > limit:
                lines.append(_too_large(name, limit, units[kind], size))
    lines += class_problems(root, limits)
    lines += docstrings.without_args(root, PACKAGE)
    for pair in similar_pages(root / "docs"):
        lines.append(f"docs: two pages have names that differ only by an s: {pair}. Rename one.")
    return lines


def class_problems(root: Path, limits: dict[str, Any]) -> list[str]:
    """Return one line for each class of the package that is too large, or inherits in a run.

    Args:
        root: A checkout.
        limits: The table ``[tool.sm121-sizes]``: ``fields`` and ``methods``, and the classes that
            are the data of a file format, whose fields do not count.

    Returns:
        The lines, and one for each class that is listed as a file format without need.
    """
    classes = class_sizes.classes_below(root, PACKAGE)
    formats = limits["file-formats"]
    lines = []
    for name in class_sizes.heirs(classes):
        if name.startswith(RUN_FOLDERS) and name not in limits["heirs"]:
            lines.append(f"{name}: it inherits from a class of the package. Compose it instead.")
    wide = set()
    for name, fields, methods in class_sizes.with_inherited(classes):
        if fields > limits["fields"]:
            wide.add(name)
            if name not in formats:
                lines.append(_too_large(name, limits["fields"], "fields", fields))
        if methods > limits["methods"]:
            lines.append(_too_large(name, limits["methods"], "methods", methods))
    for name in formats.keys() - wide:
        lines.append(f"{name}: its fields are within the limit. Remove it from file-formats.")
    return lines


def _too_large(name: str, limit: int, unit: str, size: int) -> str:
    return f"{name}: expected at most {limit} {unit}, got {size}. Split it."


def python_files(root: Path) -> Iterator[Path]:
    """Yield the Python files of the counted folders.

    Args:
        root: A checkout.
    """
    for folder in FOLDERS:
        yield from sorted((root / folder).rglob("*.py"))


def counted(folder: Path) -> Figures:
    """Return the figures of one folder.

    Args:
        folder: The folder. A folder that does not exist has no lines.
    """
    figures = Figures()
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".py":
            text = path.read_text("utf-8")
            figures.add_python(text, ast.parse(text))
        elif path.suffix in DATA_SUFFIXES:
            figures.data += path.read_text("utf-8").count("\n")
    return figures


def table(root: Path) -> list[str]:
    """Return the table of figures, one line for each folder.

    Args:
        root: A checkout.
    """
    headings = ("folder", "code", "docstrings", "comments", "data", *KINDS)
    rows = ["  ".join(f"{heading:>13}" for heading in headings)]
    for name in FOLDERS:
        figures = counted(root / name)
        cells = [name]
        for count in (figures.code, figures.docstrings, figures.comments, figures.data):
            cells.append(f"{count:,}")
        for kind in KINDS:
            cells.append(f"{figures.per_thousand(kind):.1f}")
        rows.append("  ".join(f"{cell:>13}" for cell in cells))
    rows.append("The last four columns are expressions per 1,000 lines of Python.")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Print the figures of a checkout.

    Args:
        arguments: The words of the command line; None for those of this process.

    Returns:
        1 if a part is larger than its limit or a public function is not described, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=ROOT, help="a checkout")
    root: Path = parser.parse_args(arguments).root
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    print("\n".join(table(root)))
    lines = problems(root, project["tool"]["sm121-sizes"])
    for line in lines:
        print(line)
    if lines:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
