"""Make JSON Schemas with a description for each field.

The description of a field is the ``#:`` comment above it or the docstring below it. Fields that
have neither are described in ``fixtures/field-meanings.toml``.
"""

import ast
import inspect
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib.resources import files
from typing import Any, Literal, get_args, get_type_hints

from pydantic import BaseModel

#: The descriptions that are not in the code: one table for each class.
FILE = files("sm121.fixtures") / "field-meanings.toml"
_MARK = "#:"


def json_schema(
    model: type[BaseModel], mode: Literal["validation", "serialization"]
) -> dict[str, Any]:
    """Return the JSON Schema of a model, with a description of each field.

    Args:
        model: The model.
        mode: As in ``BaseModel.model_json_schema``.
    """
    schema = model.model_json_schema(mode=mode)
    parts = {model.__name__: schema, **schema.get("$defs", {})}
    for part_class in classes(model):
        properties = parts.get(part_class.__name__, {}).get("properties", {})
        for name, text in meanings(part_class).items():
            if name in properties:
                properties[name]["description"] = text
    return schema


def classes(model: type) -> list[type]:
    """Return a class and all classes that its fields contain, each once.

    Args:
        model: The class.
    """
    found = [model]
    for one in found:
        for hint in get_type_hints(one).values():
            for part in _classes_of(hint):
                if part not in found:
                    found.append(part)
    return found


def _classes_of(hint: Any) -> Iterator[type]:
    """Yield the models and dataclasses that a type hint names."""
    if isinstance(hint, type) and (issubclass(hint, BaseModel) or is_dataclass(hint)):
        yield hint
    for argument in get_args(hint):
        yield from _classes_of(argument)


def meanings(model: type) -> dict[str, str]:
    """Return the descriptions of a class's fields. Fields without a description are left out.

    Args:
        model: A pydantic model or a dataclass.
    """
    file = tomllib.loads(FILE.read_text("utf-8"))
    found: dict[str, str] = {}
    for part in reversed(model.__mro__):
        found |= file.get(part.__name__, {})
        if part.__module__.startswith("sm121."):
            found |= in_code(part)
    return found


def in_code(model: type) -> dict[str, str]:
    """Return the descriptions of a class's fields that are in the source code of the class.

    Args:
        model: The class.
    """
    lines = inspect.getsource(model).splitlines()
    found: dict[str, str] = {}
    declared = ""
    (definition,) = ast.parse(textwrap.dedent("\n".join(lines))).body
    assert isinstance(definition, ast.ClassDef)
    for node in definition.body:
        text = _text_of(node)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            declared = node.target.id
            comment = _comment_above(lines, node.lineno - 1)
            if comment:
                found[declared] = comment
        elif text and declared:
            found[declared] = " ".join(text.split())
        else:
            declared = ""
    return found


def _text_of(node: ast.stmt) -> str:
    """Return the text of a statement that is only a string literal, else an empty text."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return ""
    return node.value.value if isinstance(node.value.value, str) else ""


def _comment_above(lines: list[str], index: int) -> str:
    """Return the ``#:`` comment that ends above a line; empty if there is none."""
    texts: list[str] = []
    while index > 0 and lines[index - 1].strip().startswith(_MARK):
        index -= 1
        texts.insert(0, lines[index].strip().removeprefix(_MARK).strip())
    return " ".join(texts)
