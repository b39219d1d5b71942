"""Count the fields and the methods of each class, with those that it inherits.

- Fields: the annotated names of its body, except class variables, and the attributes that a method
  assigns on ``self``.
- Methods: the functions of its body, private ones and properties too, except ``__dunder__`` ones.
- A base counts too if it is a class of the counted modules. It is searched by name, in the same
  module first.

``python -m tools.class_sizes CHECKOUT NAME...`` prints the counts of classes of ``plugins/``.
"""

import argparse
import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ClassMembers:
    """The names of a class's own members.

    Attributes:
        module: The path of the class's module.
        name: Its name.
        bases: The names of its bases.
        fields: The names of its fields.
        methods: The names of its methods.
    """

    module: str
    name: str
    bases: tuple[str, ...]
    fields: frozenset[str]
    methods: frozenset[str]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node at any depth, without their expressions.

    Args:
        node: A module, or a statement that contains others.
    """
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, name, ()):
            yield each
            yield from statements(each)


def classes_of(module: str, tree: ast.Module) -> Iterator[ClassMembers]:
    """Yield the classes of a module.

    Args:
        module: Its path.
        tree: Its source, parsed.
    """
    for node in statements(tree):
        if isinstance(node, ast.ClassDef):
            yield ClassMembers(
                module=module,
                name=node.name,
                bases=tuple(_bare_name(base) for base in node.bases),
                fields=frozenset(_fields(node)),
                methods=frozenset(_methods(node)),
            )


def classes_below(root: Path, folder: str) -> list[ClassMembers]:
    """Return the classes of all modules of a folder.

    Args:
        root: A checkout.
        folder: The folder in it.
    """
    classes: list[ClassMembers] = []
    for path in sorted((root / folder).rglob("*.py")):
        module = path.relative_to(root).as_posix()
        classes += classes_of(module, ast.parse(path.read_text("utf-8")))
    return classes


def with_inherited(classes: Iterable[ClassMembers]) -> Iterator[tuple[str, int, int]]:
    """Yield ``path:name``, the number of fields and the number of methods of each class.

    Args:
        classes: The classes of all counted modules.
    """
    by_name = _by_name(classes)
    for named in by_name.values():
        for one in named:
            ancestry = _ancestry(one, by_name)
            fields = frozenset[str]().union(*(each.fields for each in ancestry))
            methods = frozenset[str]().union(*(each.methods for each in ancestry))
            yield f"{one.module}:{one.name}", len(fields), len(methods)


def heirs(classes: Iterable[ClassMembers]) -> Iterator[str]:
    """Yield ``path:name`` of each class that inherits from another counted class.

    Data (of pydantic) and errors are left out.

    Args:
        classes: The classes of all counted modules.
    """
    by_name = _by_name(classes)
    for named in by_name.values():
        for one in named:
            ancestry = _ancestry(one, by_name)
            outer = {base for each in ancestry for base in each.bases}
            is_error = any(base.endswith(("Error", "Exception")) for base in outer)
            if len(ancestry) > 1 and not is_error and "BaseModel" not in outer:
                yield f"{one.module}:{one.name}"


def inherited_methods(classes: Iterable[ClassMembers]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield ``path:name`` of each class, with the names of the methods of its bases.

    Args:
        classes: The classes of all counted modules.
    """
    by_name = _by_name(classes)
    for named in by_name.values():
        for one in named:
            _, *bases = _ancestry(one, by_name)
            yield f"{one.module}:{one.name}", frozenset().union(*(base.methods for base in bases))


def _by_name(classes: Iterable[ClassMembers]) -> dict[str, list[ClassMembers]]:
    by_name: dict[str, list[ClassMembers]] = {}
    for one in classes:
        by_name.setdefault(one.name, []).append(one)
    return by_name


def _ancestry(one: ClassMembers, by_name: Mapping[str, list[ClassMembers]]) -> list[ClassMembers]:
    """Return a class and its ancestors among the counted classes."""
    ancestry = [one]
    for member in ancestry:  # the list grows in the loop
        for base in member.bases:
            found = by_name.get(base, [])
            own = [each for each in found if each.module == member.module]
            chosen = own or found
            if len(chosen) == 1 and chosen[0] not in ancestry:
                ancestry.append(chosen[0])
    return ancestry


def _bare_name(base: ast.expr) -> str:
    """Return the last name of a base, without its module and its type arguments."""
    if isinstance(base, ast.Subscript):
        base = base.value
    return ast.unparse(base).rpartition(".")[2]


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            if "ClassVar" not in ast.unparse(member.annotation):
                yield member.target.id
        elif isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _assigned_on_self(member)


def _assigned_on_self(method: ast.AST) -> Iterator[str]:
    for part in ast.walk(method):
        if (
            isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and isinstance(part.value, ast.Name)
            and part.value.id == "self"
        ):
            yield part.attr


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for member in node.body:
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            is_dunder = member.name.startswith("__") and member.name.endswith("__")
            if not is_dunder:
                yield member.name


def main(arguments: list[str] | None = None) -> None:
    """Print the fields and methods of the named classes, or of the twelve largest ones.

    Args:
        arguments: The words of the command line; None for those of this process.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="a checkout")
    parser.add_argument("names", nargs="*", help="names of classes (default: the largest twelve)")
    given = parser.parse_args(arguments)
    counts = list(with_inherited(classes_below(given.root, "plugins")))
    counts.sort(key=lambda count: (-count[1] - count[2], count[0]))
    shown = counts[:12]
    if given.names:
        shown = [count for count in counts if count[0].rpartition(":")[2] in given.names]
    for name, fields, methods in shown:
        print(f"{fields:3} fields {methods:3} methods  {name}")


if __name__ == "__main__":
    main()
