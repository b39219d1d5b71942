"""Conversations of the harmony tests: the tools, what follows a call, and messages in one shape
however they came."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any

from sm121.core.profile import ToolCall

Json = dict[str, Any]

#: A chat in harmony's own form, for /v1/completions: it ends by itself, with a special token.
HARMONY_PROMPT = "<|start|>user<|message|>What is the capital of France?<|end|><|start|>assistant"


@functools.cache
def _shipped() -> tuple[Json, ...]:
    text = (files("sm121.fixtures") / "api" / "tools.json").read_text("utf-8")
    return tuple(json.loads(text))


def tools() -> list[Json]:
    """The tools as /v1/chat/completions takes them."""
    return list(_shipped())


def response_tools() -> list[Json]:
    """The same as /v1/responses takes them."""
    return [{"type": "function", **tool["function"]} for tool in _shipped()]


def forced(name: str) -> Json:
    """A ``tool_choice`` that names a tool."""
    return {"type": "function", "function": {"name": name}}


def told_the_result(asked: ToolCall, message: Json) -> list[Json]:
    """The messages after a call: question, call, result."""
    calls = [
        {key: call[key] for key in ("id", "type", "function")} for call in message["tool_calls"]
    ]
    return [
        {"role": "user", "content": asked.question},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": asked.result},
    ]


def response_told_the_result(asked: ToolCall, call: Json) -> list[Json]:
    """The same for /v1/responses."""
    return [
        {"role": "user", "content": asked.question},
        {key: call[key] for key in ("type", "call_id", "name", "arguments")},
        {"type": "function_call_output", "call_id": call["call_id"], "output": asked.result},
    ]


def wrong_call(calls: list[Json], asked: ToolCall) -> str | None:
    """What is wrong with the calls of a message that should call one tool once."""
    seen = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
    if seen != [(asked.tool, asked.arguments)]:
        return f"{asked.question!r}: required {asked.tool}({asked.arguments}), seen {seen}"
    return None


def said(message: Json) -> str:
    """All text of a message: reasoning, under any of its names, and content."""
    names = ("reasoning", "reasoning_content", "content")
    return "".join(str(message[name]) for name in names if message.get(name))


def spilled(message: Json) -> bool:
    """Whether the content beside a call has parts of it. gpt-oss may say in a preamble what it is
    about to do (harmony, "preambles"): that is text, and none of the call."""
    content = message.get("content") or ""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    parts = [part for f in functions for part in (f["name"], f["arguments"].strip()) if part]
    return any(part in content for part in (*parts, "<|", "to=functions"))


def misfit(arguments: str, tool: str) -> str | None:
    """Why the arguments of a call do not fit the tool's own schema; None if they do."""
    import jsonschema

    schema = next(t["function"]["parameters"] for t in tools() if t["function"]["name"] == tool)
    try:
        jsonschema.validate(json.loads(arguments), schema)
    except jsonschema.ValidationError as error:
        return f"{tool}: required: arguments by its schema, seen {arguments} ({error.message})"
    return None


def plain(choice: Json, reasoning_field: str | None) -> Json:
    """The message of an answer that came at once, in the shape of :func:`stream.message_of`,
    without the ids of calls, which are made anew each time."""
    message = choice["message"]
    return without_ids(
        {
            "role": message["role"],
            "content": message.get("content") or None,
            "reasoning": (message.get(reasoning_field) if reasoning_field else None) or None,
            "finish_reason": choice["finish_reason"],
            "tool_calls": [
                {"id": call["id"], **call["function"]} for call in message.get("tool_calls") or []
            ],
        }
    )


def without_ids(message: Json) -> Json:
    """A message whose calls have only name and arguments."""
    calls = [{k: call[k] for k in ("name", "arguments")} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}
