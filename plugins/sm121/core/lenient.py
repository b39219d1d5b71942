"""Reading files of other versions of the suite: unknown keys are dropped."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

_Model = TypeVar("_Model", bound=BaseModel)
_ROUNDS = 8  # of dropping unknown keys: each can bring others to light


def validate(model: type[_Model], raw: Any) -> _Model:
    """``raw`` as ``model``, without the keys that it does not know.

    Raises:
        ValueError: something else is wrong with it; the message is one line.
    """
    known = json.loads(json.dumps(raw))
    for _ in range(_ROUNDS):
        try:
            return model.model_validate(known)
        except ValidationError as error:
            unknown = [item["loc"] for item in error.errors() if item["type"] == "extra_forbidden"]
            if not unknown:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"])) or "the whole"
                raise ValueError(f"{first['msg']} at {where}") from error
            for location in unknown:
                _drop(known, location)
    raise ValueError("too much of it is unknown")


def _drop(data: Any, location: tuple[int | str, ...]) -> None:
    for part in location[:-1]:
        data = data[part]
    del data[location[-1]]
