"""Reading files of other versions of the suite: unknown keys are dropped."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

_Model = TypeVar("_Model", bound=BaseModel)


def validate(model: type[_Model], raw: Any) -> _Model:
    """``raw`` as ``model`` without unknown keys. Raises ValueError: it is wrong; one line."""
    try:
        return model.model_validate(raw, extra="ignore")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{first['msg']} at {where}") from error
