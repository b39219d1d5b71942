"""What the tree may grow to: counts lines and names, and holds them to their limits.

``python -m tools.budgets`` prints each count with its limit and its target, and ends with status 1
if one is above its limit. The limits are data: ``[tool.sm121-budgets]`` in pyproject.toml.
"""

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
#: So many of the longest modules and functions are printed.
SHOWN = 3


@dataclass(frozen=True)
class Count:
    """A counted quantity and the most that it may be."""

    name: str
    value: float
    limit: float
    #: What the limit becomes when the work on it is done; None where the limit is the target.
    target: float | None = None
    unit: str = "lines"

    @property
    def exceeded(self) -> bool:
        return self.value > self.limit

    def __str__(self) -> str:
        """One line: ``package 53,140 lines; limit 53,140; target 46,000``."""
        number = ",.2f" if self.unit == "%" else ",.0f"
        parts = [f"{self.name} {self.value:{number}} {self.unit}", f"limit {self.limit:{number}}"]
        if self.target is not None and self.target != self.limit:
            parts.append(f"target {self.target:{number}}")
        return "; ".join(parts) + (": TOO MUCH" if self.exceeded else "")


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every function of a module with its lines, without decorators."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def assigned(tree: ast.Module) -> Iterator[str]:
    """Every name and attribute that a module assigns to, without underscores around it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr).strip("_")


def counts(root: Path, budgets: dict[str, Any]) -> list[Count]:
    """All counts of the tree `root`: totals and dialect of each folder, then the longest parts."""
    dialect = set(budgets["dialect"])
    totals: list[Count] = []
    lengths: dict[str, list[Count]] = {"module": [], "function": []}
    longer: dict[str, int] = budgets["longer"]

    def add(kind: str, name: str, lines: int) -> None:
        lengths[kind].append(Count(name, lines, longer.get(name, budgets[kind]), budgets[kind]))

    for name, row in budgets["folders"].items():
        total = 0
        names: list[str] = []
        for path in sorted((root / row["path"]).rglob(row.get("files", "*.py"))):
            text = path.read_text("utf-8")
            lines = text.count("\n")
            total += lines
            if path.suffix != ".py":
                continue
            tree = ast.parse(text)
            names += assigned(tree)
            module = path.relative_to(root).as_posix()
            add("module", module, lines)
            for function, length in functions(tree):
                add("function", f"{module}:{function}", length)
        share = 100 * sum(word in dialect for word in names) / max(1, len(names))
        if "lines" in row:
            totals.append(Count(name, total, row["lines"], row["lines_target"]))
        if "dialect" in row:
            limits = row["dialect"], row["dialect_target"]
            totals.append(Count(f"dialect in {name}", share, *limits, unit="%"))
    for kind in lengths.values():
        kind.sort(key=lambda count: (count.exceeded, count.value), reverse=True)
        exceeded = sum(count.exceeded for count in kind)
        totals += kind[: max(SHOWN, exceeded)]
    return totals


def similar_pages(docs: Path) -> list[str]:
    """The pages of a folder whose names differ only by a final s."""
    stems = {page.stem for page in docs.glob("*.md")}
    return [f"{stem}.md, {stem}s.md" for stem in sorted(stems) if f"{stem}s" in stems]


def main(arguments: list[str] | None = None) -> int:
    """Print the counts of a tree. The status is 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=ROOT, help="a checkout")
    root: Path = parser.parse_args(arguments).root
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    measured = counts(root, project["tool"]["sm121-budgets"])
    pages = similar_pages(root / "docs")
    for count in measured:
        print(count)
    for pair in pages:
        print(f"docs: two pages differ only by an s: {pair}")
    return int(bool(pages) or any(count.exceeded for count in measured))


if __name__ == "__main__":
    sys.exit(main())
