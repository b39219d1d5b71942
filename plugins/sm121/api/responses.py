"""What /v1/responses answers: items of reasoning, messages and calls, a status, and events."""

from __future__ import annotations

import json
from collections.abc import Iterable

from sm121.api import invariants, stream
from sm121.api.client import Api, Json
from sm121.api.tools import tools
from sm121.core.profile import Correctness
from sm121.core.verdict import require


def has_reasoning_and_message(api: Api, known: Correctness) -> None:
    """A completed response has one item of reasoning and one message, which has the answer."""
    chat = known.chats[0]
    answer = api.respond(chat.question, max_output_tokens=known.max_answer_tokens)
    require(answer["status"] == "completed", "completed", answer["status"])
    types = [item["type"] for item in answer["output"]]
    require(types == ["reasoning", "message"], "reasoning and message", types)
    text = _text(answer["output"][-1:])
    require(chat.contains in text, repr(chat.contains), repr(text))


def calls_and_reads_the_result(api: Api, known: Correctness) -> None:
    """A response calls the right tool, and after its output says what that says."""
    case, limit = known.tool_calls[0], known.max_answer_tokens
    offered = [{"type": "function", **tool["function"]} for tool in tools()]
    output = api.respond(case.question, tools=offered, max_output_tokens=limit)["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    seen = [(call["name"], json.loads(call["arguments"])) for call in calls]
    require(seen == [(case.tool, case.arguments)], f"{case.tool}({case.arguments})", output)
    number = calls[0]["call_id"]
    messages = [
        {"role": "user", "content": case.question},
        {key: calls[0][key] for key in ("type", "call_id", "name", "arguments")},
        {"type": "function_call_output", "call_id": number, "output": case.result},
    ]
    after = api.respond(messages, tools=offered, max_output_tokens=limit)["output"][-1]
    require(case.answer_contains in _text([after]), repr(case.answer_contains), after)


def events_add_up(api: Api, known: Correctness) -> None:
    """The deltas of text and of reasoning are those of the response at the end."""
    chat = known.chats[0]
    seen = api.stream_response(chat.question, max_output_tokens=known.max_answer_tokens)
    whole = seen.chunks[-1]["response"]
    text, deltas = _text(whole["output"][-1:]), stream.response_text(seen)
    require(deltas == text and chat.contains in text, f"deltas of {text!r}", repr(deltas))
    wrong = invariants.of_response(whole, {"model": api.model})
    require(not wrong, "a response as specified at the end", "; ".join(wrong))
    reasoning = _text(item for item in whole["output"] if item["type"] == "reasoning")
    told = stream.response_reasoning(seen)
    require(told in (None, reasoning), f"deltas of {reasoning!r}", repr(told))


def _text(items: Iterable[Json]) -> str:
    return "".join(part["text"] for item in items for part in item.get("content") or [])
