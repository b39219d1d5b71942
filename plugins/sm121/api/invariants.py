"""Check invariants that every answer must satisfy in addition to its schema.

Each check returns one line for each violation. The list is empty if the answer is valid.
"""

import json
from collections.abc import Iterable
from typing import Any

from sm121.api import harmony

Json = dict[str, Any]


def ids(parts: Iterable[Json]) -> set[str]:
    """Collect the ids of an answer, of its items and of its calls.

    Args:
        parts: The whole answer, or the chunks of a stream.

    Returns:
        All ids that are not empty.
    """
    found: set[str] = set()
    for part in parts:
        values = [part.get("id")]
        for item in part.get("output") or ():
            values += [item.get("id"), item.get("call_id")]
        for choice in part.get("choices") or ():
            message = choice.get("message") or choice.get("delta") or {}
            for call in message.get("tool_calls") or ():
                values.append(call.get("id"))
        found.update(str(value) for value in values if value)
    return found


def of_completion(answer: Json, request: Json, *, hidden: bool) -> list[str]:
    """Check an answer of /v1/completions.

    Args:
        answer: The answer, which is valid according to its schema.
        request: The body of the request.
        hidden: Whether the engine removes special tokens from texts.

    Returns:
        The violations.
    """
    count = _prompt_count(request.get("prompt")) * (request.get("n") or 1)
    errors = [*_identity(answer, request), *_choices(answer, count), *_usage(answer)]
    if hidden and not request.get("echo"):
        for choice in answer["choices"]:
            errors += _no_special(choice["text"], "text")
    return errors


def _prompt_count(prompt: Any) -> int:
    """Return the number of prompts. A list of integers counts as one prompt of token ids."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return 1
    return len(prompt)


def of_chat(answer: Json, request: Json, reasoning_field: str | None = None) -> list[str]:
    """Check an answer of /v1/chat/completions.

    Args:
        answer: The answer, which is valid according to its schema.
        request: The body of the request.
        reasoning_field: The engine's field for reasoning; None if it has none.

    Returns:
        The violations.
    """
    errors = [*_identity(answer, request), *_usage(answer)]
    errors += _choices(answer, request.get("n") or 1)
    for choice in answer["choices"]:
        errors += of_message(choice["message"], choice["finish_reason"], request, reasoning_field)
    return errors


def of_message(
    message: Json, finish_reason: str, request: Json, reasoning_field: str | None = None
) -> list[str]:
    """Check an assistant's message.

    Args:
        message: The message.
        finish_reason: The finish_reason of its choice.
        request: The body of the request.
        reasoning_field: The engine's field for reasoning; None if it has none.

    Returns:
        The violations.
    """
    errors = []
    if message.get("role") != "assistant":
        errors.append(f"role {message.get('role')!r} in place of 'assistant'")
    content = message.get("content")
    errors += _no_special(content, "content")
    if isinstance(content, str):
        headers = harmony.headers(content)
        if headers:
            errors.append(f"harmony's header {headers[0]!r} in content: {content!r}")
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
    """Check the tool calls of a message.

    Args:
        calls: The calls, as in ``tool_calls``.
        request: The body of the request, with the offered tools.

    Returns:
        The violations.
    """
    # /v1/chat/completions has the name in ``function``, /v1/responses in the tool itself.
    offered = {tool.get("function", tool).get("name") for tool in request.get("tools") or []}
    errors = []
    if calls and not offered:
        errors.append("a tool call where no tool was offered")
    ids = [call.get("id") for call in calls]
    if not all(ids) or len(set(ids)) != len(ids):
        errors.append("tool call ids that are not unique")
    for call in calls:
        function = call.get("function") or {}
        name = function.get("name")
        if offered and name not in offered:
            tools = sorted(map(str, offered))
            errors.append(f"a call of the tool {name!r}, which is not one of the offered {tools}")
        errors += arguments(function.get("arguments"))
        errors += _no_special(function.get("arguments"), "arguments")
    return errors


def arguments(text: Any) -> list[str]:
    """Check that the arguments of a call are the text of a JSON object.

    Args:
        text: The field ``arguments`` of the call, of any type.

    Returns:
        The violations.
    """
    try:
        parsed = json.loads(text)
    except (ValueError, TypeError) as error:
        return [f"arguments {text!r} are not JSON ({error})"]
    if not isinstance(parsed, dict):
        return [f"arguments {text!r} are not a JSON object"]
    return []


def of_response(answer: Json, request: Json) -> list[str]:
    """Check an answer of /v1/responses.

    Args:
        answer: The answer, which is valid according to its schema.
        request: The body of the request.

    Returns:
        The violations.
    """
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
    """Check that usage exists and adds up. `prompt` and `generated` are the names of its fields."""
    usage = answer.get("usage")
    if usage is None:
        return ["no usage"]
    if usage["total_tokens"] != usage[prompt] + usage[generated]:
        return [f"usage does not add up: {usage}"]
    return []


def _no_special(text: Any, where: str) -> list[str]:
    if not isinstance(text, str):
        return []
    leaks = harmony.leaked(text)
    if not leaks:
        return []
    return [f"special token {leaks[0]} in {where}: {text!r}"]
