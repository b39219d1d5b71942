"""Convert models to JSON that every parser accepts."""

from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json


def json_text(model: BaseModel) -> str:
    """Return a model as JSON in ASCII.

    Lone surrogates, which may come from an engine's answer or a path, are written as escapes,
    because parsers would otherwise reject the file.

    Args:
        model: The model. Infinite and NaN numbers become ``null``.
    """
    try:
        return model.model_dump_json(indent=2, ensure_ascii=True)
    except PydanticSerializationError:
        values = _readable(model.model_dump(mode="json"))
        return to_json(values, indent=2, ensure_ascii=True, inf_nan_mode="null").decode()


def _readable(value: Any) -> Any:
    """Return JSON data with escapes for lone surrogates."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_readable(key): _readable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_readable(item) for item in value]
    return value
