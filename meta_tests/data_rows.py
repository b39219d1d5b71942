"""The rows of parametrised tests, read from ``data/rows/``."""

import copy
import inspect
import sys
import tomllib
from collections.abc import Callable
from functools import cache, reduce
from operator import attrgetter, getitem
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

ROWS = Path(__file__).parent / "data" / "rows"


def from_data(test: Callable[..., None]) -> Callable[..., None]:
    """Run ``test`` once for each row of the table with its name in ``data/rows/MODULE.toml``. A key
    is the name of a parameter; a row without the key has None. A list is a tuple, and within a
    table a list. ``=NAME`` stands for what has that name in the module, or anywhere; a list that
    begins with a function is its call. ``case`` is the id of a row. A row with ``slow`` is left to
    `make catalogues`."""
    module = sys.modules[test.__module__]

    def named(text: str) -> Any:
        if not text.startswith("="):
            return text
        name = text[1:] if "." in text else f"builtins.{text[1:]}"
        in_module = hasattr(module, text[1:].partition(".")[0])
        return attrgetter(text[1:])(module) if in_module else resolve_name(name)

    rows = _tables(test.__module__)[test.__name__]
    keys = {key for row in rows for key in row} - {"case", "slow"}
    names = [name for name in inspect.signature(test).parameters if name in keys]
    assert keys, f"{test.__name__} has no rows"
    assert len(names) == len(keys), f"{test.__name__} has no parameter for each of {keys}"
    values = [
        pytest.param(
            *(_frozen(meant(row.get(name), named)) for name in names),
            id=row.get("case"),
            marks=[pytest.mark.slow] * row.get("slow", False),
        )
        for row in rows
    ]
    return pytest.mark.parametrize(names, values)(test)


def meant(term: Any, named: Callable[[str], Any]) -> Any:
    """What a term of data stands for. `named`: what a text does. A list that begins with a function
    is a call, with the keywords of a table at its end."""
    if isinstance(term, dict):
        return {key: meant(value, named) for key, value in term.items()}
    if not isinstance(term, list):
        return named(term) if isinstance(term, str) else term
    terms = [meant(each, named) for each in term]
    if not terms or not callable(terms[0]):
        return terms
    function, *options = terms
    keywords = options.pop() if options and isinstance(options[-1], dict) else {}
    return function(*options, **keywords)


def altered(document: Any, changes: dict[str, Any]) -> Any:
    """A copy of a document of JSON with other values, by their places, as ``tests.0.verdict``."""
    document = copy.deepcopy(document)
    for path, value in changes.items():
        *parents, key = (int(part) if part.isdigit() else part for part in path.split("."))
        parent = reduce(getitem, parents, document)
        assert isinstance(key, int) or key in parent, f"{path} is no place of the document"
        parent[key] = value
    return document


def table(module: str, name: str) -> Any:
    """What the file of a module's rows has under a name that is no test's. A list is a tuple."""
    rows = _tables(module)[name]
    if isinstance(rows, dict):
        return {key: _frozen(row) for key, row in rows.items()}
    return _frozen(rows)


def text_file(name: str) -> str:
    """A text of ``data/texts/``."""
    return (ROWS.parent / "texts" / name).read_text("utf-8")


@cache
def _tables(module: str) -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads((ROWS / f"{module}.toml").read_text("utf-8"))


def _frozen(value: Any) -> Any:
    return tuple(_frozen(entry) for entry in value) if isinstance(value, list) else value
