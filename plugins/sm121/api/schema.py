"""Answers against the published schema: the models of the ``openai`` package, applied strictly. The
package itself constructs its models without validating them, which accepts nearly anything."""

import functools
import json
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

Kind = Literal[
    "completion", "completion chunk", "chat completion", "chat completion chunk", "response",
    "response event", "model", "model list", "error",
]  # fmt: skip


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Error(_Open):
    """The error object. ``code`` is a string or null as published; servers send the status."""

    message: str = Field(min_length=1)
    type: str = Field(min_length=1)
    param: str | None = None
    code: str | int | None = None


@functools.cache
def _types() -> dict[Kind, Any]:
    from openai import types  # half a second, which a run without requests need not spend
    from openai.types import chat, responses

    class Choice(types.CompletionChoice):
        """In a chunk: null until the end, whatever the published type says."""

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


#: Fields that were not required when releases of an engine that are still served were made: openai
#: 1.99 to 2.8 do not know the first one, and vLLM 0.24 does not send it.
_REQUIRED_LATER = (("missing", ("usage", "input_tokens_details", "cache_write_tokens")),)


def violations(kind: Kind, content: Any) -> list[str]:
    """What in a parsed answer is not as published; empty when all is."""
    adapter = _adapter(kind)
    if kind == "response event" and isinstance(content, dict):
        # Of the forty kinds of events only the errors of its own say anything.
        kind_of_event = str(content.get("type"))
        if kind_of_event not in _event_adapters():
            return [f"no published kind of event is {kind_of_event[:60]!r}"]
        adapter = _event_adapters()[kind_of_event]
    try:
        # By way of JSON: only there does strict mean what it means for an answer.
        adapter.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        wrong = [e for e in errors if (e["type"], e["loc"][-3:]) not in _REQUIRED_LATER]
        return [_line(item) for item in wrong[:4]]
    return []


@functools.cache
def _adapter(kind: Kind) -> TypeAdapter[Any]:
    return TypeAdapter(_types()[kind])


@functools.cache
def _event_adapters() -> dict[str, TypeAdapter[Any]]:
    union = get_args(_types()["response event"])[0]
    return {
        name: TypeAdapter(event)
        for event in get_args(union)
        for name in get_args(event.model_fields["type"].annotation)
    }


def _line(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"]) or "the whole"
    return f"{path}: {item['msg']}, got {str(item['input'])[:60]!r}"
