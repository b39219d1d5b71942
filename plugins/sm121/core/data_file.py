"""Read TOML data files into models. A mistake in a file is reported in one line."""

import copy
import functools
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sm121.core.errors import UsageError
from sm121.core.files import cause_of

_Model = TypeVar("_Model", bound=BaseModel)
_Value = TypeVar("_Value")
#: In an error message, the first of these keys that an entry has names the entry.
_IDENTITY = ("id", "name", "test", "metric")


class DataFileError(UsageError):
    """A data file is wrong. The message names the file, the key and what was expected."""


class DataTable(BaseModel):
    """A table of a data file. The object is immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def without_retired(data: Any, *keys: str) -> Any:
    """Remove retired keys from a table, so that files of earlier releases stay valid.

    Args:
        data: The table before validation. A value that is not a table is returned unchanged.
        *keys: The keys that earlier releases of the suite had.
    """
    if not isinstance(data, dict):
        return data
    return {key: value for key, value in data.items() if key not in keys}


def refuse_moved(data: Any, moved: Mapping[str, str]) -> Any:
    """Return a table unchanged; refuse the keys of earlier releases that have a new place.

    Args:
        data: The table before validation. A value that is not a table is returned unchanged.
        moved: The old keys, and what is expected in their place.

    Raises:
        ValueError: The table has one of the keys.
    """
    if isinstance(data, dict):
        for key, place in moved.items():
            if key in data:
                raise ValueError(f"{key}: {place}")
    return data


class Record(BaseModel):
    """A table of a file that the suite writes. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


def _compiled(pattern: Any) -> Any:
    """Compile a regular expression, or raise ValueError, which pydantic converts."""
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"expected a regular expression, got {pattern!r}: {error}") from error


def compiles(pattern: str) -> str:
    """Check a regular expression, and return it unchanged.

    Args:
        pattern: The expression, in the syntax of `re`.

    Raises:
        ValueError: The text is not a valid regular expression.
    """
    _compiled(pattern)
    return pattern


def _name_of(entry: BaseModel) -> str:
    """Return the id or the name of an entry."""
    key = "id" if hasattr(entry, "id") else "name"
    return str(getattr(entry, key))


def _unique(entries: tuple[_Model, ...]) -> tuple[_Model, ...]:
    """Check that no id or name occurs twice, and return the entries unchanged."""
    ids = [_name_of(entry) for entry in entries]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ValueError(f"expected ids that differ: {', '.join(twice)} given twice")
    return entries


#: A regular expression, kept as its text.
Pattern = Annotated[str, AfterValidator(compiles)]
#: A regular expression, compiled.
Regex = Annotated[re.Pattern[str], BeforeValidator(_compiled)]
#: One or more entries, whose ``id`` or ``name`` is unique.
Entries = Annotated[tuple[_Model, ...], Field(min_length=1), AfterValidator(_unique)]


def named(entries: tuple[_Model, ...], name: str, what: str) -> _Model:
    """Return an entry by its id or name.

    Args:
        entries: The entries, each with an ``id`` or a ``name``.
        name: The id or name of the wanted entry.
        what: What the error message is about, for example the option.

    Raises:
        UsageError: No entry has this name. The message lists the names.
    """
    by_name = {_name_of(entry): entry for entry in entries}
    if name not in by_name:
        raise UsageError(f"{what} {name!r}: expected one of {', '.join(by_name)}")
    return by_name[name]


def load(path: str, model: type[_Model]) -> _Model:
    """Read a data file of the suite; a second call returns the same object.

    Args:
        path: The path of the file in ``fixtures/``.
        model: The type of its contents.

    Raises:
        DataFileError: The file is missing or wrong.
    """
    loaded: _Model = _loaded(path, model)
    return loaded


@functools.cache
def _loaded(path: str, model: type[BaseModel]) -> Any:
    file = files("sm121.fixtures") / path
    if not file.is_file():
        raise DataFileError(f"fixtures/{path}: no such file")
    return parse(file.read_text("utf-8"), model, path)


def load_key(path: str, key: str, kind: type[_Value]) -> _Value:
    """Read the value of a data file with one key; a second call returns the same object.

    Args:
        path: The path of the file in ``fixtures/``.
        key: The key.
        kind: The type of the value.

    Raises:
        DataFileError: The file is missing or wrong.
    """
    hashable: Any = kind  # a type is hashable, but mypy does not know this
    value: _Value = getattr(_loaded(path, _table_of(key, hashable)), key)
    return value


@functools.cache
def _table_of(key: str, kind: Any) -> type[BaseModel]:
    """Return the model of a file with one key."""
    fields: dict[str, Any] = {key: (kind, ...)}
    return pydantic.create_model("Table", __base__=DataTable, **fields)


def shipped(folder: str, ending: str = ".toml") -> dict[str, Traversable]:
    """Return the data files of a folder, sorted. The keys are the files' names without the ending.

    Args:
        folder: The folder in ``fixtures/``.
        ending: The end of the files' names.
    """
    by_name = {}
    entries = sorted((files("sm121.fixtures") / folder).iterdir(), key=lambda item: item.name)
    for entry in entries:
        if entry.name.endswith(ending):
            by_name[entry.name.removesuffix(ending)] = entry
    return by_name


def chosen(name_or_path: str, folder: str, model: type[_Model], what: str, kind: str) -> _Model:
    """Read a data file that a user named.

    Args:
        name_or_path: The name of a file that ships with the suite, or a path.
        folder: The folder in ``fixtures/`` with the shipped files.
        model: The type of its contents.
        what: The option in errors, such as ``--profile``.
        kind: The kind of file in errors, such as ``profile``.

    Raises:
        UsageError: The file does not exist, or is wrong.
    """
    return validated(*chosen_table(name_or_path, folder, what, kind), model)


def chosen_table(
    name_or_path: str, folder: str, what: str, kind: str
) -> tuple[dict[str, Any], str]:
    """Read a data file that a user named, without validation.

    Args:
        name_or_path: As in `chosen`.
        folder: As in `chosen`.
        what: As in `chosen`.
        kind: As in `chosen`.

    Returns:
        The file's table, and the name of the file in errors.

    Raises:
        UsageError: The file does not exist, or is not valid TOML.
    """
    sources = shipped(folder)
    if name_or_path in sources:
        origin = f"{kind} {name_or_path}.toml"
        return _table(sources[name_or_path].read_text("utf-8"), origin), origin
    path = Path(name_or_path)
    if not path.is_file():
        raise UsageError(f"{what} {path}: expected a file or one of {', '.join(sources)}")
    origin = f"{kind} {path}"
    return _table(read_text(path, f"{what} {path}"), origin), origin


def read_text(path: Traversable, subject: str) -> str:
    """Return the text of a file.

    Args:
        path: The file.
        subject: The subject of the error message.

    Raises:
        UsageError: The file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{subject}: expected a text file in UTF-8, got: {cause_of(error)}"
        ) from error


def read_json(path: Path, model: type[_Model], subject: str, writer: str) -> _Model:
    """Read a JSON file that a command of the suite wrote.

    Args:
        path: The file.
        model: The type of its contents.
        subject: The subject of the error message.
        writer: The command that writes such files.

    Raises:
        UsageError: The file cannot be read, or does not fit the model.
    """
    text = read_text(path, subject)
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        line = f"{subject}: expected a file of {writer}; {where}: {first['msg']}"
        raise UsageError(line) from error


def parse(text: str, model: type[_Model], origin: str) -> _Model:
    """Validate the text of a TOML file.

    Args:
        text: The text.
        model: The type of its contents.
        origin: The name of the file in errors.

    Raises:
        DataFileError: The text is not valid TOML, or does not fit the model.
    """
    return validated(_table(text, origin), origin, model)


def _table(text: str, origin: str) -> dict[str, Any]:
    """Parse TOML into a table that the caller may modify."""
    try:
        return copy.deepcopy(_parsed(text))
    except tomllib.TOMLDecodeError as error:
        raise DataFileError(f"{origin}: expected TOML: {error}") from error


#: Parses TOML. Results are cached, because a run loads its profile a dozen times, and parsing takes
#: ten times as long as copying.
_parsed = functools.lru_cache(maxsize=64)(tomllib.loads)


def validated(data: dict[str, Any], origin: str, model: type[_Model]) -> _Model:
    """Validate the table of a file.

    Args:
        data: The table.
        origin: The name of the file in errors.
        model: The type of its contents.

    Raises:
        DataFileError: The table does not fit the model.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise DataFileError(f"{origin}: {_explain(error, model, data)}") from error


def _explain(error: ValidationError, model: type[BaseModel], data: dict[str, Any]) -> str:
    """Describe the first mistake: its key, the expected value, and the number of other mistakes."""
    # A misspelt key causes two errors, an unknown key and a missing key. Show the unknown key
    # first.
    errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    if len(errors) > 1:
        # If an entry of an array is wrong, pydantic may also report that the array is too short.
        # Drop this second error.
        errors = [item for item in errors if item["type"] != "too_short"] or errors
    first = errors[0]
    if first["type"] == "extra_forbidden":
        table = functools.reduce(_item_type, first["loc"][:-1], model)
        keys = sorted(getattr(table, "model_fields", {}))
        expected = f"unknown key; expected one of {', '.join(keys)}"
    elif first["type"] == "missing":
        expected = "required key is missing"
    elif first["type"] == "too_short":
        sizes = first["ctx"]
        noun = "entry" if sizes["min_length"] == 1 else "entries"
        expected = f"expected at least {sizes['min_length']} {noun}, got {sizes['actual_length']}"
    elif first["type"] == "value_error":  # raised by a validator, whose message contains the value
        expected = first["msg"].removeprefix("Value error, ")
    else:
        expected = f"{first['msg']}, got {first['input']!r}"[:300]
    key = ".".join(_labels(first["loc"], data))
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"key {key}: {expected}{more}" if key else f"key {expected}{more}"


def _labels(location: tuple[int | str, ...], data: Any) -> list[str]:
    """Return the path to a value, with the names of array entries in place of their numbers."""
    labels = []
    for part in location:
        is_entry = isinstance(part, int) and isinstance(data, list) and part < len(data)
        has_part = is_entry or (isinstance(data, dict) and part in data)
        data = data[part] if has_part else None
        name = _entry_name(data) if is_entry else None
        labels.append(str(part) if name is None else name)
    return labels


def _entry_name(entry: Any) -> str | None:
    """Return the value of an entry's first key in `_IDENTITY`, if it is a text."""
    if not isinstance(entry, dict):
        return None
    for key in _IDENTITY:
        if key in entry:
            return entry[key] if isinstance(entry[key], str) else None
    return None


def _item_type(model: Any, part: int | str) -> Any:
    """Return the pydantic class of a model's field, or of the items of that field.

    Return None if the field contains no pydantic model.
    """
    fields = getattr(model, "model_fields", None)
    annotation = fields[part].annotation if fields and part in fields else model
    while not hasattr(annotation, "model_fields"):
        arguments = getattr(annotation, "__args__", ())
        inner = [argument for argument in arguments if argument not in (str, type(None), ...)]
        if not inner:
            return None
        annotation = inner[-1]
    return annotation
