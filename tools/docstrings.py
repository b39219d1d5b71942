"""Find the public functions with parameters whose docstring has no section ``Args:``.

ruff (D417) checks that a section ``Args:`` names all parameters, but not that there is one. Private
functions, hooks and fixtures of pytest, and methods that a base of the class has too are left out.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools import class_sizes

#: Decorators of functions that are not called with these parameters, or are described elsewhere.
_DECORATORS = {"fixture", "overload", "override", "setter"}


def without_args(root: Path, folder: str) -> Iterator[str]:
    """Yield a line for each public function with parameters and without ``Args:``.

    Args:
        root: A checkout.
        folder: The folder in it whose modules are checked.
    """
    inherited = dict(class_sizes.inherited_methods(class_sizes.classes_below(root, folder)))
    for path in sorted((root / folder).rglob("*.py")):
        module = path.relative_to(root).as_posix()
        for owner, function in _public_functions(ast.parse(path.read_text("utf-8")).body):
            is_described = "Args:" in (ast.get_docstring(function) or "")
            if is_described or function.name in inherited.get(f"{module}:{owner}", ()):
                continue
            parameters = _parameters(function, is_method=bool(owner))
            if parameters:
                place = f"{module}:{function.lineno}: {function.name}"
                listed = ", ".join(parameters)
                yield f"{place}: expected a docstring with Args:, got none. Describe {listed}."


def _public_functions(
    body: Iterable[ast.stmt], owner: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the public functions of a module or a class, each with the name of its class."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _public_functions([*node.body, *node.orelse], owner)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node.body, node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_left_out = not _DECORATORS.isdisjoint(_decorators(node))
            if not is_left_out and not node.name.startswith(("_", "pytest_")):
                yield owner, node


def _decorators(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the names of a function's decorators, without their modules and arguments."""
    for node in function.decorator_list:
        called = node.func if isinstance(node, ast.Call) else node
        yield ast.unparse(called).rpartition(".")[2]


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, *, is_method: bool) -> list[str]:
    """Return the names of a function's parameters, without those of the object or the class."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    if is_method and "staticmethod" not in _decorators(function):
        positional = positional[1:]
    both = (given.vararg, given.kwarg)
    others = [*given.kwonlyargs, *(argument for argument in both if argument is not None)]
    return [argument.arg for argument in (*positional, *others)]
