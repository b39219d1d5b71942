"""Text from a model or a log, so that a file or a terminal shows it and obeys none of it."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json


def printable(text: str) -> str:
    """The text with control characters, reversals of direction and half surrogates written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def json_text(model: BaseModel) -> str:
    """A model as JSON of ASCII, which no terminal obeys. Half a surrogate pair, from an engine or a
    path, is written out: it would make a file that no parser reads."""
    try:
        return model.model_dump_json(indent=2, ensure_ascii=True)
    except PydanticSerializationError:
        values = _readable(model.model_dump(mode="json"))
        return to_json(values, indent=2, ensure_ascii=True, inf_nan_mode="null").decode()


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_readable(key): _readable(item) for key, item in value.items()}
    return [_readable(item) for item in value] if isinstance(value, list) else value


def some_of(texts: Sequence[str], limit: int) -> str:
    """The first texts of what may be a long list, and how many there are beside them."""
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more
