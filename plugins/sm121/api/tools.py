"""Check tool calls: the tool, its arguments, and the answers to the results of calls."""

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

#: A pattern for refusals by servers that were started without a parser of tool calls.
_NO_PARSER = re.compile(r"tool[-_ ](?:call[-_ ])?parser|auto-tool-choice|--jinja", re.IGNORECASE)
#: Reasoning at the beginning of the content, with both tags.
_REASONING = re.compile(r"^\s*(?:<think>.*?</think>|\[THINK\].*?\[/THINK\])", re.DOTALL)
#: Reasoning that lacks the first tag, which some templates write into the prompt.
_UNOPENED_REASONING = re.compile(r"^(.*?)(?:</think>|\[/THINK\])", re.DOTALL)
#: The end of a text with a call as JSON.
_ENDS_WITH_CALL = re.compile(r'"arguments"\s*:.*\}\s*$', re.DOTALL)
#: Special tokens of calls, which are wrong in reasoning, too.
_SPECIAL = ("<|", "to=functions")
#: The fields of a call that a client sends back.
_SENT_BACK = ("id", "type", "function")


@functools.cache
def tools(count: int = 2) -> list[Json]:
    """Return the first tools of ``fixtures/api/tools.json``, in the format of chats.

    Args:
        count: The number of tools. The list is shared by all callers, who must not change it.
    """
    text = (files("sm121.fixtures") / "api" / "tools.json").read_text("utf-8")
    return list(json.loads(text))[:count]


def called_every_time(api: Api, correctness: Correctness) -> None:
    """Require exactly one call, which is correct, in each answer to the profile's prompts.

    Args:
        api: The API of the server.
        correctness: The profile's table. ``tool_calls`` has the prompts, each of which is sent
            ``repeats`` times.

    Raises:
        Unmet: A call is missing or wrong, or the content contains parts of it.
        NotRun: The server has no parser of tool calls.
    """
    repeated: list[ToolCall] = []
    for case in correctness.tool_calls:
        repeated += [case] * correctness.repeats
    api.capabilities.require("tools")
    choices = together(lambda case: _ask(api, correctness, case.question), repeated)

    def is_called(case: ToolCall, choice: Json) -> None:
        about = f"{case.question!r}"
        calls = [call["function"] for call in _calls(choice)]
        require(calls, f"a call of {case.tool}", no_call(api, choice), about)
        observed = [(call["name"], json.loads(call["arguments"])) for call in calls]
        expected = [(case.tool, case.arguments)]
        require(observed == expected, f"{case.tool}({case.arguments})", observed, about)
        right = choice["finish_reason"] == "tool_calls" and not spilled(choice["message"])
        require(
            right, "finish_reason tool_calls, and no part of the call in the content", choice, about
        )

    require_each(is_called, repeated, choices)


def named(api: Api, correctness: Correctness) -> None:
    """Require that ``tool_choice`` with a name leads to a valid call of that tool.

    Args:
        api: The API of the server.
        correctness: The question of its first chat is sent.

    Raises:
        Unmet: There is no call or a call of another tool, or the arguments do not match the schema.
        NotRun: The server has no parser of tool calls.
    """
    name = tools()[0]["function"]["name"]
    tool_choice = {"type": "function", "function": {"name": name}}
    choice = _ask(api, correctness, correctness.chats[0].question, tool_choice=tool_choice)
    names = [call["function"]["name"] for call in _calls(choice)]
    require(names, f"a call of {name}", no_call(api, choice))
    require(names == [name], f"a call of {name}", choice["message"])
    _require_fitting(_calls(choice)[:1])


def named_as_offered(api: Api, correctness: Correctness, name: str) -> None:
    """Request a call of a tool with an unusual name, and send the call's result.

    The name contains a character other than letters and ``_``. The request's ``tool_choice``
    requires a call of this tool. The call must have the offered name, and the server must accept a
    conversation that contains the call.

    Args:
        api: The API of the server.
        correctness: The first question of its ``tool_calls`` is sent.
        name: The name of the tool. A server may refuse a dot, which the published API does not
            allow.

    Raises:
        Inapplicable: The server refuses a name with a dot.
        Unmet: There is no call or a call with another name, or the server refuses the name.
    """
    case = correctness.tool_calls[0]
    renamed = [copy.deepcopy(tools(1)[0])]
    renamed[0]["function"]["name"] = name
    tool_choice = {"type": "function", "function": {"name": name}}
    limit = correctness.max_answer_tokens
    try:
        choice = ask(api, case.question, renamed, limit, tool_choice=tool_choice)
    except Refused as refusal:
        if "." in name and refusal.status in (400, 422):
            why = f"the server refuses a dot in the name of a tool ({refusal.text})"
            raise Inapplicable(why) from refusal
        raise
    calls = _calls(choice)
    require(calls, f"a call of {name}", no_call(api, choice))
    names = [call["function"]["name"] for call in calls]
    require(names == [name], f"a call of {name}", names)
    ask(api, _conversation(case, calls), renamed, limit)


def required(api: Api, correctness: Correctness) -> None:
    """Require that ``tool_choice: required`` leads to a valid tool call.

    Args:
        api: The API of the server.
        correctness: The question of its first chat is sent.

    Raises:
        Unmet: There is no call, or the arguments do not match the schema.
        NotRun: The server has no parser of tool calls.
    """
    choice = _ask(api, correctness, correctness.chats[0].question, tool_choice="required")
    require(_calls(choice), "a call", no_call(api, choice))
    require(choice["finish_reason"] == "tool_calls", "finish_reason tool_calls", choice)
    _require_fitting(_calls(choice))


def forbidden(api: Api, correctness: Correctness) -> None:
    """Require that the answer has no tool call with ``tool_choice: none``.

    Args:
        api: The API of the server.
        correctness: The first question of its ``tool_calls`` is sent.

    Raises:
        Unmet: A tool was called.
    """
    choice = _ask(api, correctness, correctness.tool_calls[0].question, tool_choice="none")
    require(not _calls(choice), "no tool call", choice["message"])


def called_in_parallel(api: Api, correctness: Correctness) -> None:
    """Require one call for each part of a question that has several parts.

    Args:
        api: The API of the server.
        correctness: ``parallel_question`` has the question, ``parallel_calls`` its number of parts.

    Raises:
        Unmet: The number of calls differs.
        NotRun: The server has no parser of tool calls.
    """
    choice = _ask(api, correctness, correctness.parallel_question)
    count = correctness.parallel_calls
    require(len(_calls(choice)) == count, f"{count} calls", choice["message"])


def results_are_answered(api: Api, correctness: Correctness) -> None:
    """Require that the answer after a call's result uses the content of the result.

    Args:
        api: The API of the server.
        correctness: ``tool_calls`` has the questions, results and expected answers.

    Raises:
        Unmet: There is no call, or the answer lacks the expected text.
        NotRun: The server has no parser of tool calls.
    """

    def is_answered(case: ToolCall) -> None:
        about = f"{case.question!r}"
        choice = _ask(api, correctness, case.question)
        require(_calls(choice), "a call", no_call(api, choice), about)
        answer = _ask(api, correctness, _conversation(case, _calls(choice)))
        right = case.answer_contains in (answer["message"]["content"] or "")
        require(right, repr(case.answer_contains), answer, about)

    require_each(is_answered, correctness.tool_calls)


def _conversation(case: ToolCall, calls: list[Json]) -> list[Json]:
    """Return the messages of a question, its calls, and the result of the first call."""
    sent_back = [{key: call[key] for key in _SENT_BACK} for call in calls]
    return [
        {"role": "user", "content": case.question},
        {"role": "assistant", "content": None, "tool_calls": sent_back},
        {"role": "tool", "tool_call_id": sent_back[0]["id"], "content": case.result},
    ]


def spilled(message: Json) -> bool:
    """Return whether a message's content contains parts of its tool calls.

    A preamble in which gpt-oss announces a call (harmony, "preambles") is allowed. The content may
    begin with reasoning in tags, if the server was started without a parser of reasoning. The
    reasoning may contain names and arguments of tools, but no special tokens. Its first tag may be
    missing only if the message has no parsed reasoning, and the text does not end with a call.

    Args:
        message: A message of the assistant.
    """
    content = message.get("content") or ""
    if any(part in content for part in _SPECIAL):
        return True
    answer = _without_reasoning(message)
    parts: list[str] = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        parts += [function["name"], function["arguments"].strip()]
    return any(part in answer for part in parts if part)


def _without_reasoning(message: Json) -> str:
    content = str(message.get("content") or "")
    tagged = _REASONING.match(content)
    if tagged is not None:
        return content[tagged.end() :]
    unopened = _UNOPENED_REASONING.match(content)
    is_parsed = bool(message.get("reasoning") or message.get("reasoning_content"))
    if unopened is None or is_parsed or _ENDS_WITH_CALL.search(unopened[1]):
        return content
    return content[unopened.end() :]


def refused(api: Api, refusal: Refused) -> NotRun | Refused:
    """Return the error to raise for a refusal of tools.

    Args:
        api: The API of the server.
        refusal: The refusal.

    Returns:
        `NotRun` if the server was started without a parser of tool calls, else the refusal.
    """
    if not _NO_PARSER.search(refusal.text):
        return refusal
    return NotRun(f"the server does not parse tool calls ({refusal.text}); {_start(api)}")


def ask(
    api: Api, messages: str | list[Json], functions: list[Json], limit: int, **options: Any
) -> Json:
    """Send a chat with tools.

    Args:
        api: The API of the server.
        messages: The conversation, or the text of one user message.
        functions: The tools, in the format of /v1/chat/completions.
        limit: Maximum number of tokens of the answer.
        **options: Further fields of the body.

    Returns:
        The first choice of the answer.

    Raises:
        NotRun: The server has no parser of tool calls.
        Unmet: The answer is refused, not valid or inconsistent.
    """
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
    """Describe an answer without tool calls.

    Args:
        api: The API of the server.
        choice: The choice, with ``token_ids`` if the engine sends them.

    Returns:
        A text that states whether the model did not call a tool or the server did not parse the
        call. It also contains the choice, and how to start the engine with a parser.
    """
    ids = choice.get("token_ids")
    if ids and ids[-1] == harmony.CALL:
        cause = (
            "the model called a tool (its last token is <|call|>), but the server did not parse it"
        )
    else:
        cause = "the model called no tool"
    shortened = {k: v for k, v in choice.items() if k not in ("token_ids", "logprobs")}
    return f"no tool_calls: {cause} in {shortened}; {_start(api)}"


def _start(api: Api) -> str:
    """Describe how to start the engine with a parser of tool calls."""
    options = api.capabilities.file.capabilities["tools"].start
    if not options:
        return "a server needs a parser of tool calls"
    return f"{api.capabilities.file.title} parses tool calls if it is started with {options}"


def _calls(choice: Json) -> list[Json]:
    return choice["message"].get("tool_calls") or []


def _require_fitting(calls: list[Json]) -> None:
    for call in calls:
        function = call["function"]
        violation = misfit(function, tools())
        require(violation is None, "arguments that match its schema", violation, function["name"])


def misfit(function: Json, functions: list[Json]) -> str | None:
    """Validate the arguments of a call against the schema of its tool.

    Args:
        function: The ``function`` of the call.
        functions: The offered tools.

    Returns:
        The arguments and the violation, as text; None if the arguments are valid.
    """
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in functions}
    arguments = function["arguments"]
    try:
        jsonschema.validate(json.loads(arguments), schemas[function["name"]])
    except jsonschema.ValidationError as error:
        return f"{arguments} ({error.message})"
    return None
