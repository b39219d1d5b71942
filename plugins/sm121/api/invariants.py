"""What must hold in every answer beyond its schema, whatever was asked."""

import json
from collections.abc import Iterable
from typing import Any

from sm121.api import harmony

Json = dict[str, Any]


def ids(parts: Iterable[Json]) -> set[str]:
    """The ids of an answer, its items and its calls. `parts`: the whole, or a stream's chunks."""
    holders: list[Json] = []
    for part in parts:
        items = part.get("output") or ()
        holders += [part, *items, *({"id": item.get("call_id")} for item in items)]
        for choice in part.get("choices") or ():
            holders += (choice.get("message") or choice.get("delta") or {}).get("tool_calls") or ()
    return {str(holder["id"]) for holder in holders if holder.get("id")}


def of_completion(answer: Json, request: Json, *, hidden: bool) -> list[str]:
    """What is wrong in an answer of /v1/completions. `hidden`: it shows no special tokens."""
    prompts = request.get("prompt")
    several = isinstance(prompts, list) and prompts and not isinstance(prompts[0], int)
    count = (len(prompts) if several and prompts else 1) * (request.get("n") or 1)
    errors = [*_identity(answer, request), *_choices(answer, count), *_usage(answer)]
    if hidden and not request.get("echo"):
        for choice in answer["choices"]:
            errors += _no_special(choice["text"], "text")
    return errors


def of_chat(answer: Json, request: Json, reasoning_field: str | None = None) -> list[str]:
    """What does not hold in an answer of /v1/chat/completions."""
    errors = [*_identity(answer, request), *_usage(answer)]
    errors += _choices(answer, request.get("n") or 1)
    for choice in answer["choices"]:
        errors += of_message(choice["message"], choice["finish_reason"], request, reasoning_field)
    return errors


def of_message(
    message: Json, finish_reason: str, request: Json, reasoning_field: str | None = None
) -> list[str]:
    """What does not hold in an assistant's message."""
    errors = []
    if message.get("role") != "assistant":
        errors.append(f"role {message.get('role')!r} in place of 'assistant'")
    content = message.get("content")
    errors += _no_special(content, "content")
    if header := harmony.headers(content if isinstance(content, str) else None):
        errors.append(f"harmony's header {header[0]!r} in content: {content!r}")
    if reasoning_field:
        errors += _no_special(message.get(reasoning_field), reasoning_field)
    calls = message.get("tool_calls") or []
    errors += of_tool_calls(calls, request)
    if calls and finish_reason not in ("tool_calls", "stop", "length"):
        errors.append(f"finish_reason {finish_reason!r} with tool calls")
    if finish_reason == "tool_calls" and not calls:
        errors.append("finish_reason 'tool_calls' without a tool call")
    return errors


def of_tool_calls(calls: list[Json], request: Json) -> list[str]:
    """What does not hold in the tool calls of a message."""
    offered = {tool.get("function", tool).get("name") for tool in request.get("tools") or []}
    errors = []
    if calls and not offered:
        errors.append("a tool call where no tool was offered")
    ids = [call.get("id") for call in calls]
    if not all(ids) or len(set(ids)) != len(ids):
        errors.append("tool call ids that are not one of its own for each")
    for call in calls:
        function = call.get("function") or {}
        if offered and (name := function.get("name")) not in offered:
            errors.append(f"a call of {name!r}, offered: {sorted(map(str, offered))}")
        errors += arguments(function.get("arguments"))
        errors += _no_special(function.get("arguments"), "arguments")
    return errors


def arguments(text: Any) -> list[str]:
    """What is wrong with the arguments of a call: required is the text of a JSON object."""
    try:
        parsed = json.loads(text)
    except (ValueError, TypeError) as error:
        return [f"arguments {text!r} are not JSON ({error})"]
    return [] if isinstance(parsed, dict) else [f"arguments {text!r} are no object"]


def of_response(answer: Json, request: Json) -> list[str]:
    """What does not hold in an answer of /v1/responses."""
    errors = [*_identity(answer, request), *_usage(answer, "input_tokens", "output_tokens")]
    for item in answer["output"]:
        if item["type"] == "message":
            for part in item["content"]:
                errors += _no_special(part.get("text"), "output_text")
        if item["type"] == "function_call":
            errors += arguments(item["arguments"])
            if not item.get("call_id"):
                errors.append("a function_call without call_id")
    return errors


def _identity(answer: Json, request: Json) -> list[str]:
    errors = []
    if not answer["id"]:
        errors.append("id is empty")
    if answer["model"] != request["model"]:
        errors.append(f"model {answer['model']!r} in place of {request['model']!r}")
    return errors


def _choices(answer: Json, count: int) -> list[str]:
    indices = [choice["index"] for choice in answer["choices"]]
    if sorted(indices) != list(range(count)):
        return [f"choices with index {indices} in place of 0 to {count - 1}, each once"]
    return []


def _usage(
    answer: Json, prompt: str = "prompt_tokens", generated: str = "completion_tokens"
) -> list[str]:
    if (usage := answer.get("usage")) is None:
        return ["no usage"]
    if usage["total_tokens"] != usage[prompt] + usage[generated]:
        return [f"usage does not add up: {usage}"]
    return []


def _no_special(text: Any, where: str) -> list[str]:
    leaks = harmony.leaked(text if isinstance(text, str) else None)
    return [f"special token {leaks[0]} in {where}: {text!r}"] if leaks else []
