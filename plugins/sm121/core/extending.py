"""Data files that name another data file: the file that they extend, or an exam."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from sm121.core.data_file import DataFileError, DataTable

#: Tables of profiles of earlier releases, which are ignored.
RETIRED = ("costs",)


class Statement(DataTable):
    """A table with one statement and its source.

    If a file extends another file, it replaces a statement as a whole. A number is therefore never
    combined with the source of another number.
    """

    source: str = Field(min_length=3)


def extended(parent: BaseModel, own: dict[str, Any], origin: str) -> dict[str, Any]:
    """Merge the table of a file into the table of the file that it extends.

    Tables are merged key by key. Statements and lists replace those of the parent, except lists
    whose entries have a ``metric``: these are merged metric by metric. Before that, the dotted keys
    in ``without`` are removed from the parent.

    Args:
        parent: The validated content of the extended file.
        own: The table of the extending file, before validation.
        origin: The name of the extending file in errors.

    Returns:
        The merged table, before validation.

    Raises:
        DataFileError: ``without`` names a key that the parent does not have.
    """
    before = parent.model_dump(exclude_unset=True)
    without = own.get("without")
    if isinstance(without, list):
        for name in without:
            if name not in RETIRED:
                _remove_key(before, name, origin)
    return dict(_merged(parent, before, own))


def _remove_key(table: Any, name: object, origin: str) -> None:
    """Remove a key. For a key of a nested table, the name has the keys joined by dots."""
    *path, last = str(name).split(".")
    for part in path:
        table = table.get(part, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict) or last not in table:
        raise DataFileError(f"{origin}: key without: expected keys of the parent, got {name!r}")
    del table[last]


def _merged(model: Any, before: Any, own: Any) -> Any:
    """Merge ``own`` into ``before``, which is the plain data of ``model``."""
    if isinstance(own, dict) and isinstance(before, dict) and not isinstance(model, Statement):
        inner = model if isinstance(model, dict) else dict(model)
        merged = dict(before)
        for key, item in own.items():
            merged[key] = _merged(inner.get(key), before.get(key), item)
        return merged
    if isinstance(own, list) and any(_metric(entry) for entry in before or ()):
        replaced = {_metric(entry) for entry in own}
        return [entry for entry in before if _metric(entry) not in replaced] + own
    return own


def _metric(entry: Any) -> str | None:
    return entry.get("metric") if isinstance(entry, dict) else None


def find_exam(table: dict[str, Any], folder: Path) -> None:
    """Replace the path of a profile's exam by its absolute path if it is relative to a folder.

    Args:
        table: The table of the profile, which is modified in place.
        folder: The folder of the profile.
    """
    correctness = table.get("correctness")
    exam = correctness.get("exam") if isinstance(correctness, dict) else None
    if isinstance(exam, str) and exam.endswith(".jsonl") and (folder / exam).is_file():
        table["correctness"]["exam"] = str((folder / exam).absolute())
