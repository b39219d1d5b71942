"""The rows of parametrised tests, read from ``data/rows/``."""

import inspect
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROWS = Path(__file__).parent / "data" / "rows"


def from_data(test: Callable[..., None]) -> Callable[..., None]:
    """Run ``test`` once for each row of the table with its name in ``data/rows/MODULE.toml``. A key
    is the name of a parameter; a row without the key has None. A list is a tuple, and within a
    table a list. ``case`` is the id of a row. A row with ``slow`` is left to `make catalogues`."""
    rows = _tables(test.__module__)[test.__name__]
    keys = {key for row in rows for key in row} - {"case", "slow"}
    names = [name for name in inspect.signature(test).parameters if name in keys]
    assert len(names) == len(keys), f"{test.__name__} has no parameter for each of {keys}"
    values = [
        pytest.param(
            *(_frozen(row.get(name)) for name in names),
            id=row.get("case"),
            marks=[pytest.mark.slow] * row.get("slow", False),
        )
        for row in rows
    ]
    return pytest.mark.parametrize(names, values)(test)


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
