"""Read files of other versions of the suite, whose unknown keys are ignored."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

_Model = TypeVar("_Model", bound=BaseModel)


def validate(model: type[_Model], raw: Any) -> _Model:
    """Validate data, and ignore its unknown keys.

    Args:
        model: The type of the result.
        raw: Plain data, as a JSON parser returns it.

    Raises:
        ValueError: The data does not fit the model; the message is one line.
    """
    try:
        return model.model_validate(raw, extra="ignore")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{first['msg']} at {where}") from error
