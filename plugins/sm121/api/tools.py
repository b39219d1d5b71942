"""Calls of tools: the right one with the right arguments, and answers to their results."""

import copy
import functools
import json
import re
from importlib.resources import files
from typing import Any

import jsonschema

from sm121.api import harmony
from sm121.api.client import Api, Json, Refused, together
from sm121.core.level_settings import Correctness, ToolCall
from sm121.core.unmet import require, require_each
from sm121.core.verdict import Inapplicable, NotRun

#: How servers say that they were started without a parser of tool calls.
_NO_PARSER = re.compile(r"tool[-_ ](?:call[-_ ])?parser|auto-tool-choice|--jinja", re.IGNORECASE)


@functools.cache
def tools(count: int = 2) -> list[Json]:
    """So many tools as /v1/chat/completions takes them."""
    text = (files("sm121.fixtures") / "api" / "tools.json").read_text("utf-8")
    return list(json.loads(text))[:count]


def called_every_time(api: Api, correctness: Correctness) -> None:
    """Each question, asked again and again: one right call, and none of it in the content."""
    repeated = [case for case in correctness.tool_calls for _ in range(correctness.repeats)]
    api.capabilities.require("tools")
    answers = together(lambda case: _ask(api, correctness, case.question), repeated)

    def is_called(case: ToolCall, choice: Json) -> None:
        of = f"{case.question!r}"
        calls = [call["function"] for call in _calls(choice)]
        require(calls, f"a call of {case.tool}", no_call(api, choice), of)
        observed = [(call["name"], json.loads(call["arguments"])) for call in calls]
        expected = [(case.tool, case.arguments)]
        require(observed == expected, f"{case.tool}({case.arguments})", observed, of)
        right = choice["finish_reason"] == "tool_calls" and not spilled(choice["message"])
        require(right, "tool_calls, and nothing of the call in the content", choice, of)

    require_each(is_called, repeated, answers)


def named(api: Api, correctness: Correctness) -> None:
    """``tool_choice`` with a name calls that tool, with arguments by its schema."""
    name = tools()[0]["function"]["name"]
    tool_choice = {"type": "function", "function": {"name": name}}
    answer = _ask(api, correctness, correctness.chats[0].question, tool_choice=tool_choice)
    names = [call["function"]["name"] for call in _calls(answer)]
    require(names, f"a call of {name}", no_call(api, answer))
    require(names == [name], f"a call of {name}", answer["message"])
    _hold_fitting(_calls(answer)[:1])


def named_as_offered(api: Api, correctness: Correctness, name: str) -> None:
    """Call a tool whose name has a sign beyond letters and ``_``, and send back its result.

    The call has the name that was offered, and a conversation that has the call is accepted. The
    model's choice has no part in it: ``tool_choice`` names the tool.

    Args:
        api: the API of the server.
        correctness: the first question of its ``tool_calls`` is asked.
        name: of the tool. A server may refuse a dot, which the published API does not list.

    Raises:
        Inapplicable: the server refuses a name with a dot.
        Unmet: another name came back, no call did, or the server refuses the name.
    """
    case = correctness.tool_calls[0]
    renamed = [copy.deepcopy(tools(1)[0])]
    renamed[0]["function"]["name"] = name
    tool_choice = {"type": "function", "function": {"name": name}}
    limit = correctness.max_answer_tokens
    try:
        answer = ask(api, case.question, renamed, limit, tool_choice=tool_choice)
    except Refused as refusal:
        if "." in name and refusal.status in (400, 422):
            why = f"the server refuses a dot in the name of a tool ({refusal.text})"
            raise Inapplicable(why) from refusal
        raise
    calls = _calls(answer)
    require(calls, f"a call of {name}", no_call(api, answer))
    names = [call["function"]["name"] for call in calls]
    require(names == [name], f"a call of {name}", names)
    sent_back = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
    messages: list[Json] = [
        {"role": "user", "content": case.question},
        {"role": "assistant", "content": None, "tool_calls": sent_back},
        {"role": "tool", "tool_call_id": sent_back[0]["id"], "content": case.result},
    ]
    ask(api, messages, renamed, limit)


def required(api: Api, correctness: Correctness) -> None:
    """``tool_choice: required`` calls a tool, with arguments by its schema."""
    answer = _ask(api, correctness, correctness.chats[0].question, tool_choice="required")
    require(_calls(answer), "a call", no_call(api, answer))
    require(answer["finish_reason"] == "tool_calls", "finish_reason tool_calls", answer)
    _hold_fitting(_calls(answer))


def forbidden(api: Api, correctness: Correctness) -> None:
    """``tool_choice: none`` calls none."""
    answer = _ask(api, correctness, correctness.tool_calls[0].question, tool_choice="none")
    require(not _calls(answer), "no tool call", answer["message"])


def called_in_parallel(api: Api, correctness: Correctness) -> None:
    """A question about several things is answered by a call for each."""
    answer = _ask(api, correctness, correctness.parallel_question)
    count = correctness.parallel_calls
    require(len(_calls(answer)) == count, f"{count} calls", answer["message"])


def results_are_answered(api: Api, correctness: Correctness) -> None:
    """After the result of a call the answer says what the result says."""

    def is_answered(case: ToolCall) -> None:
        of = f"{case.question!r}"
        call = _ask(api, correctness, case.question)
        require(_calls(call), "a call", no_call(api, call), of)
        calls = [{k: each[k] for k in ("id", "type", "function")} for each in _calls(call)]
        messages: list[Json] = [
            {"role": "user", "content": case.question},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": case.result},
        ]
        choice = _ask(api, correctness, messages)
        right = case.answer_contains in (choice["message"]["content"] or "")
        require(right, repr(case.answer_contains), choice, of)

    require_each(is_answered, correctness.tool_calls)


def spilled(message: Json) -> bool:
    """Whether the content beside a call has parts of it. gpt-oss may say in a preamble what it is
    about to do (harmony, "preambles"): that is text, and none of the call."""
    content = message.get("content") or ""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    parts = [part for f in functions for part in (f["name"], f["arguments"].strip()) if part]
    return any(part in content for part in (*parts, "<|", "to=functions"))


def refused(api: Api, refusal: Refused) -> NotRun | Refused:
    """What to raise for a refusal of tools: NotRun where the server says that it has no parser."""
    if not _NO_PARSER.search(refusal.text):
        return refusal
    return NotRun(f"the server reads no tool calls ({refusal.text}); {_start(api)}")


def ask(
    api: Api, messages: str | list[Json], functions: list[Json], limit: int, **options: Any
) -> Json:
    """The first choice of a chat with tools, of so many tokens at most. Raises NotRun: the server
    reads no tool calls."""
    if api.capabilities.can("chat_token_ids"):
        options["return_token_ids"] = True
    try:
        answer = api.chat(messages, tools=functions, max_tokens=limit, **options)
    except Refused as refusal:
        raise refused(api, refusal) from refusal
    return dict(answer["choices"][0])


def _ask(api: Api, correctness: Correctness, messages: str | list[Json], **options: Any) -> Json:
    return ask(api, messages, tools(), correctness.max_answer_tokens, **options)


def no_call(api: Api, choice: Json) -> str:
    """What came in place of a call: the model's own doing, or the server's."""
    called = (choice.get("token_ids") or [None])[-1] == harmony.CALL
    who = "the model called a tool (its last token is <|call|>), and the server did not read it"
    shortened = {k: v for k, v in choice.items() if k not in ("token_ids", "logprobs")}
    return f"no tool_calls: {who if called else 'no call at all'} in {shortened}; {_start(api)}"


def _start(api: Api) -> str:
    if not (options := api.capabilities.file.capabilities["tools"].start):
        return "a server needs a parser of tool calls"
    return f"{api.capabilities.file.title} reads tool calls when started with {options}"


def _calls(choice: Json) -> list[Json]:
    return choice["message"].get("tool_calls") or []


def _hold_fitting(calls: list[Json]) -> None:
    for call in calls:
        why, name = misfit(call["function"], tools()), call["function"]["name"]
        require(why is None, "arguments by its schema", why, f"{name}")


def misfit(function: Json, functions: list[Json]) -> str | None:
    """What does not fit in the arguments of a call, by the schema of its tool."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in functions}
    arguments = function["arguments"]
    try:
        jsonschema.validate(json.loads(arguments), schemas[function["name"]])
    except jsonschema.ValidationError as error:
        return f"{arguments} ({error.message})"
    return None
