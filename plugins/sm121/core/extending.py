"""A data file that is made from another one: what it says merges into what the other says."""

from typing import Any

from pydantic import BaseModel, Field

from sm121.core.data_file import DataFileError, DataTable

#: Tables of a profile that earlier releases had: forecasts were computed from them.
RETIRED = ("costs",)


class Statement(DataTable):
    """A table that says one thing and where it comes from. A file that extends another replaces it
    whole: a number never stands beside the source of another number."""

    source: str = Field(min_length=3)


def extended(parent: BaseModel, own: dict[str, Any], origin: str) -> dict[str, Any]:
    """The table of a file that extends another, validated one. Tables merge by key. Statements and
    lists replace, but a list of entries that have a ``metric`` merges by that name. The keys in
    ``without`` (with dots) are those of the parent that are left out before. Raises DataFileError:
    ``without`` names what the parent has not; ``origin`` names the file."""
    before = parent.model_dump(exclude_unset=True)
    without = own.get("without", ())
    for name in without if isinstance(without, list) else ():
        if name in RETIRED:
            continue
        *path, last = str(name).split(".")
        table = before
        for part in path:
            table = table.get(part, {}) if isinstance(table, dict) else {}
        if not isinstance(table, dict) or last not in table:
            raise DataFileError(f"{origin}: key without: expected keys of the parent, got {name!r}")
        del table[last]
    return dict(_merged(parent, before, own))


def _merged(model: Any, before: Any, own: Any) -> Any:
    """``own`` over ``before``, which is what ``model`` says as plain data."""
    if isinstance(own, dict) and isinstance(before, dict) and not isinstance(model, Statement):
        inner = model if isinstance(model, dict) else dict(model)
        added = {key: _merged(inner.get(key), before.get(key), item) for key, item in own.items()}
        return {**before, **added}
    if isinstance(own, list) and any(_metric(entry) for entry in before or ()):
        replaced = {_metric(entry) for entry in own}
        return [*(entry for entry in before if _metric(entry) not in replaced), *own]
    return own


def _metric(entry: Any) -> str | None:
    return entry.get("metric") if isinstance(entry, dict) else None
