"""Validate answers against the published schema.

The schema consists of the ``openai`` package's models, applied in pydantic's strict mode. The
package itself constructs its models without validation, so it accepts nearly any answer.
"""

import functools
import json
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from sm121.core.unmet import steady

Kind = Literal[
    "completion",
    "completion chunk",
    "chat completion",
    "chat completion chunk",
    "response",
    "response event",
    "model",
    "model list",
    "error",
]

#: Tolerated errors, given by pydantic's error type and the end of the location. The field became
#: required later than some releases that are still in use: openai 1.99 to 2.8 do not have it, and
#: vLLM 0.24 does not send it.
_REQUIRED_LATER = (("missing", ("usage", "input_tokens_details", "cache_write_tokens")),)
#: Maximum number of violations that are returned for one answer.
_MOST = 4
#: Maximum number of characters of a value that a violation quotes.
_QUOTED = 60


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Error(_Open):
    """The error object. The published ``code`` is a string or null, but servers send the status."""

    message: str = Field(min_length=1)
    type: str = Field(min_length=1)
    param: str | None = None
    code: str | int | None = None


@functools.cache
def _types() -> dict[Kind, Any]:
    from openai import types  # imported here, because it takes half a second
    from openai.types import chat, responses

    class Choice(types.CompletionChoice):
        """A choice of a chunk. Unlike in `openai`, the finish_reason is null until the end."""

        finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]

    class Chunk(types.Completion):
        choices: list[Choice]  # type: ignore[assignment]

    models: dict[str, Any] = {"object": (Literal["list"], ...), "data": (list[types.Model], ...)}
    return {
        "completion": types.Completion,
        "completion chunk": Chunk,
        "chat completion": chat.ChatCompletion,
        "chat completion chunk": chat.ChatCompletionChunk,
        "response": responses.Response,
        "response event": responses.ResponseStreamEvent,
        "model": types.Model,
        "model list": create_model("ModelList", __base__=_Open, **models),
        "error": create_model("ErrorBody", __base__=_Open, error=(_Error, ...)),
    }


def violations(kind: Kind, content: Any) -> list[str]:
    """Validate a parsed answer.

    Args:
        kind: The kind of the answer.
        content: The answer: parsed JSON.

    Returns:
        One line for each of the first four violations; empty if the answer is valid.
    """
    adapter = _adapter(kind)
    if kind == "response event" and isinstance(content, dict):
        # Validate only against the type of this event, because a union of forty types would report
        # the errors of all forty.
        event = str(content.get("type"))
        if event not in _event_adapters():
            return [f"{event[:_QUOTED]!r} is not a published type of event"]
        adapter = _event_adapters()[event]
    try:
        # Validate the JSON text, because pydantic's strict mode rejects Python values that JSON
        # cannot distinguish.
        adapter.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        lines = []
        for item in error.errors(include_url=False):
            if (item["type"], item["loc"][-3:]) not in _REQUIRED_LATER:
                lines.append(_line(item))
        return lines[:_MOST]
    return []


@functools.cache
def _adapter(kind: Kind) -> TypeAdapter[Any]:
    return TypeAdapter(_types()[kind])


@functools.cache
def _event_adapters() -> dict[str, TypeAdapter[Any]]:
    """Return the validator of each type of event."""
    union = get_args(_types()["response event"])[0]
    adapters = {}
    for event in get_args(union):
        for name in get_args(event.model_fields["type"].annotation):
            adapters[name] = TypeAdapter(event)
    return adapters


def _line(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"]) or "the whole"
    observed = str(steady(item["input"]))
    return f"{path}: {item['msg']}, got {observed[:_QUOTED]!r}"
