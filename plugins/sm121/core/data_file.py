"""TOML data files: read into a model, with mistakes reported as one line."""

import copy
import functools
import re
import tomllib
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sm121.core.errors import UsageError

_Model = TypeVar("_Model", bound=BaseModel)
_Value = TypeVar("_Value")
#: Keys by which people know an entry of an array of tables.
_IDENTITY = ("id", "name", "test", "metric")


class DataFileError(UsageError):
    """A data file does not say what it has to say. Names file, key and expectation."""


class DataTable(BaseModel):
    """A table of a data file. It is never changed, and an unknown key is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def without_retired(data: Any, *keys: str) -> Any:
    """Leave out keys that a table no longer has, so that a file which was valid stays valid."""
    if not isinstance(data, dict):
        return data
    return {key: value for key, value in data.items() if key not in keys}


class Record(BaseModel):
    """A table of a file that the suite writes. Reading an unknown key is a mistake."""

    model_config = ConfigDict(extra="forbid")


def _compiled(pattern: Any) -> Any:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"expected a regular expression, got {pattern!r}: {error}") from error


def compiles(pattern: str) -> str:
    """The pattern itself. Raises ValueError: it is no regular expression."""
    _compiled(pattern)
    return pattern


def _name_of(entry: BaseModel) -> str:
    return str(next(getattr(entry, key) for key in ("id", "name") if hasattr(entry, key)))


def _unique(entries: tuple[_Model, ...]) -> tuple[_Model, ...]:
    ids = [_name_of(entry) for entry in entries]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"expected ids that differ: {', '.join(twice)} given twice")
    return entries


#: A regular expression, kept as its text.
Pattern = Annotated[str, AfterValidator(compiles)]
#: A regular expression, compiled.
Regex = Annotated[re.Pattern[str], BeforeValidator(_compiled)]
#: At least one entry, each with an ``id`` or a ``name`` of its own.
Entries = Annotated[tuple[_Model, ...], Field(min_length=1), AfterValidator(_unique)]


def named(entries: tuple[_Model, ...], name: str, what: str) -> _Model:
    """The entry of that id or name. Raises UsageError: there is none; names those there are."""
    by_name = {_name_of(entry): entry for entry in entries}
    if name not in by_name:
        raise UsageError(f"{what} {name!r}: expected one of {', '.join(by_name)}")
    return by_name[name]


def load(path: str, model: type[_Model]) -> _Model:
    """A data file in ``fixtures/``, read once. Raises DataFileError: it is missing or wrong."""
    loaded: _Model = _loaded(path, model)
    return loaded


@functools.cache
def _loaded(path: str, model: type[BaseModel]) -> Any:
    file = files("sm121.fixtures") / path
    if not file.is_file():
        raise DataFileError(f"fixtures/{path}: no such file")
    return parse(file.read_text("utf-8"), model, path)


def load_key(path: str, key: str, kind: type[_Value]) -> _Value:
    """What a data file of the suite has at its only key. Raises DataFileError: as `load`."""
    fields: Any = (key, kind)  # a type is hashable, whatever mypy says
    value: _Value = getattr(_loaded(path, _table_of(*fields)), key)
    return value


@functools.cache
def _table_of(key: str, kind: Any) -> type[BaseModel]:
    fields: dict[str, Any] = {key: (kind, ...)}
    return pydantic.create_model("Table", __base__=DataTable, **fields)


def shipped(folder: str, ending: str = ".toml") -> dict[str, Traversable]:
    """The files of that ending in a folder of ``fixtures/``, by their names without it."""
    entries = sorted((files("sm121.fixtures") / folder).iterdir(), key=lambda item: item.name)
    return {e.name.removesuffix(ending): e for e in entries if e.name.endswith(ending)}


def chosen(name_or_path: str, folder: str, model: type[_Model], what: str, kind: str) -> _Model:
    """A data file that a user named: one that ships in ``folder`` of ``fixtures/``, or a path.
    Errors name the choice as ``what`` (``--profile``), the file as ``kind``. Raises UsageError."""
    return validated(*chosen_table(name_or_path, folder, what, kind), model)


def chosen_table(
    name_or_path: str, folder: str, what: str, kind: str
) -> tuple[dict[str, Any], str]:
    """The table of a data file that a user named, not validated, and the file's name in errors.
    Raises UsageError: there is no such file, or it is no TOML; one line."""
    sources = shipped(folder)
    if name_or_path in sources:
        text = sources[name_or_path].read_text("utf-8")
        return _table(text, origin := f"{kind} {name_or_path}.toml"), origin
    path = Path(name_or_path)
    if not path.is_file():
        raise UsageError(f"{what} {path}: expected a file or one of {', '.join(sources)}")
    return _table(read_text(path, f"{what} {path}"), origin := f"{kind} {path}"), origin


def read_text(path: Traversable, subject: str) -> str:
    """The text of a file; ``subject`` names it. Raises UsageError: no file, or no UTF-8."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{subject}: expected a text file in UTF-8 ({error})") from error


def read_json(path: Path, model: type[_Model], subject: str, writer: str) -> _Model:
    """A JSON file that `writer` made; ``subject`` names it. Raises UsageError: it is none."""
    text = read_text(path, subject)
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        line = f"{subject}: expected a file of {writer}; {where}: {first['msg']}"
        raise UsageError(line) from error


def parse(text: str, model: type[_Model], origin: str) -> _Model:
    """Validate a file's text; ``origin`` names it in errors. Raises DataFileError: one line with
    the file, the key and what was expected."""
    return validated(_table(text, origin), origin, model)


def _table(text: str, origin: str) -> dict[str, Any]:
    try:
        return copy.deepcopy(_parsed(text))
    except tomllib.TOMLDecodeError as error:
        raise DataFileError(f"{origin}: expected TOML: {error}") from error


#: A run loads its profile a dozen times; to parse it takes ten times as long as to copy it.
_parsed = functools.lru_cache(maxsize=64)(tomllib.loads)


def validated(data: dict[str, Any], origin: str, model: type[_Model]) -> _Model:
    """Validate a file's table; ``origin`` names the file in errors. Raises DataFileError: one line
    with the file, the key and what was expected."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise DataFileError(f"{origin}: {_explain(error, model, data)}") from error


def _explain(error: ValidationError, model: type[BaseModel], data: dict[str, Any]) -> str:
    # A misspelt key is also a missing one: the unknown key is the better thing to say first.
    errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    if len(errors) > 1:
        # pydantic counts the valid entries too, which only repeats that one is wrong.
        errors = [item for item in errors if item["type"] != "too_short"]
    first, rest = errors[0], errors[1:]
    if first["type"] == "extra_forbidden":
        table = functools.reduce(_item_type, first["loc"][:-1], model)
        keys = sorted(getattr(table, "model_fields", {}))
        expected = f"unknown key; expected one of {', '.join(keys)}"
    elif first["type"] == "missing":
        expected = "required key is missing"
    elif first["type"] == "value_error":  # raised by a validator: it names what it saw itself
        expected = first["msg"].removeprefix("Value error, ")
    else:
        expected = f"{first['msg']}, got {first['input']!r}"[:300]
    key = ".".join(_labels(first["loc"], data))
    more = f" (and {len(rest)} more)" if rest else ""
    return f"key {key}: {expected}{more}" if key else f"key {expected}{more}"


def _labels(location: tuple[int | str, ...], data: Any) -> list[str]:
    """The path to a value, entries of arrays by their own name where they have one."""
    labels = []
    for part in location:
        has_entry = isinstance(part, int) and isinstance(data, list) and part < len(data)
        data = data[part] if has_entry or (isinstance(data, dict) and part in data) else None
        table = data if isinstance(data, dict) else {}
        name = next((table[key] for key in _IDENTITY if key in table), None)
        labels.append(str(name) if has_entry and isinstance(name, str) else str(part))
    return labels


def _item_type(model: Any, part: int | str) -> Any:
    fields = getattr(model, "model_fields", None)
    annotation = fields[part].annotation if fields and part in fields else model
    while not hasattr(annotation, "model_fields"):
        inner = [a for a in getattr(annotation, "__args__", ()) if a not in (str, type(None), ...)]
        if not inner:
            return None
        annotation = inner[-1]
    return annotation
