"""Compare streamed answers with the answers to the same requests without streaming."""

import json
from typing import NamedTuple

from sm121.api import invariants, logprobs, responses, schema, stream
from sm121.api.client import Api, Json
from sm121.api.sdk import PROMPT, first_that
from sm121.api.tools import tools
from sm121.core import level_settings, verdict
from sm121.core.unmet import require

#: Characters of two to four bytes in UTF-8. Some are combined characters, and some have two tokens.
BEYOND_ASCII = "Grüße, 東京 😀👩\u200d👧 e\u0301!"
_QUESTION = "What is the capital of France?"
#: Maximum number of tokens of an answer in JSON, including reasoning.
_FORM_LIMIT = 400
#: An object whose only value is `BEYOND_ASCII`.
_SCHEMA: Json = {
    "type": "object",
    "properties": {"text": {"enum": [BEYOND_ASCII]}},
    "required": ["text"],
    "additionalProperties": False,
}


def deltas_add_up(api: Api, correctness: level_settings.Correctness, *, with_tools: bool) -> None:
    """Require that the deltas of a chat add up to the whole message, with the same usage.

    Args:
        api: The API of the server.
        correctness: The question of its first chat or first tool call is sent.
        with_tools: Whether to offer tools, and send the question of the first tool call.

    Raises:
        Unmet: The message or the usage differs.
    """
    reasoning_field = api.capabilities.file.reasoning_field
    options: Json = {"max_tokens": correctness.max_answer_tokens}
    question = correctness.chats[0].question
    if with_tools:
        options["tools"] = tools()
        question = correctness.tool_calls[0].question
    whole = api.chat(question, **options)
    streamed = api.stream_chat(question, **options)
    message = stream.message_of(streamed, reasoning_field)
    calls = [{"id": call["id"], "function": call} for call in message["tool_calls"]]
    errors = invariants.of_tool_calls(calls, options)
    require(not errors, "well-formed calls", errors)
    for call in message["tool_calls"]:
        del call["id"]  # the id differs in each answer
    expected = _joined(whole["choices"][0], reasoning_field)
    require(message == expected, expected, f"{message} in the stream")
    if api.capabilities.can("stream_usage"):
        usage = streamed.chunks[-1]["usage"]
        at_once = whole["usage"]
        same = all(usage[name] == at_once[name] for name in ("prompt_tokens", "total_tokens"))
        require(same, f"usage {at_once}", f"{usage} in the stream")


class _Texts(NamedTuple):
    """The text of a streamed answer, and of the same answer without streaming."""

    streamed: str
    at_once: str


def keeps_every_character(api: Api, kind: str, attempts: int) -> None:
    """Require that chunks add up to the whole text if tokens are parts of characters.

    Args:
        api: The API of the server.
        kind: ``completion``, ``chat`` or ``response``.
        attempts: The number of attempts to get the same text twice.

    Raises:
        Unmet: The text differs, or has no characters beyond ASCII.
        NotRun: The server does not support structured output in responses.
    """

    def ask() -> _Texts:
        if kind == "completion":
            return _completions(api)
        if kind == "chat":
            return _chats(api)
        return _responses(api)

    answers = (ask() for _ in range(attempts))
    streamed, at_once = first_that(answers, lambda texts: texts.streamed == texts.at_once)
    if kind == "response" and BEYOND_ASCII not in at_once:
        raise verdict.NotRun("the server does not enforce the format of responses (text.format)")
    beyond = not at_once.isascii() if kind == "completion" else BEYOND_ASCII in at_once
    require(beyond, f"a text of {BEYOND_ASCII!r}", repr(at_once))
    require(streamed == at_once, repr(at_once), f"{streamed!r} in the stream")


def _completions(api: Api) -> _Texts:
    """Send a completion that may consist only of tokens of `BEYOND_ASCII`."""
    ids = api.ids("".join(sign for sign in BEYOND_ASCII if not sign.isascii()))
    options: Json = {
        "allowed_token_ids": sorted(set(ids)),
        "frequency_penalty": 2.0,
        "max_tokens": 64,
        "ignore_eos": True,
    }
    streamed = stream.completion_of(api.stream_completion(PROMPT, **options))[0]["text"]
    at_once = api.complete(PROMPT, **options)["choices"][0]["text"]
    return _Texts(streamed, at_once)


def _chats(api: Api) -> _Texts:
    form = {"type": "json_schema", "json_schema": {"name": "text", "schema": _SCHEMA}}
    options = {"response_format": form, "max_tokens": _FORM_LIMIT}
    at_once = api.chat(_QUESTION, **options)["choices"][0]["message"]["content"]
    streamed = stream.message_of(api.stream_chat(_QUESTION, **options), None)["content"]
    return _Texts(streamed or "", at_once or "")


def _responses(api: Api) -> _Texts:
    form = {"type": "json_schema", "name": "text", "schema": _SCHEMA}
    options = {"text": {"format": form}, "max_output_tokens": _FORM_LIMIT}
    events = api.stream_response(_QUESTION, **options)
    streamed = stream.response_deltas(events, "output_text")
    at_once = responses.text_of(api.respond(_QUESTION, **options))
    return _Texts(streamed or "", at_once)


def is_as_published(api: Api, listed: int | None) -> None:
    """Stream a completion and a chat, with or without log-probabilities.

    `Api` validates the chunks. The streamed log-probabilities must be finite and complete.

    Args:
        api: The API of the server.
        listed: The number of log-probabilities at each position; None to request none.

    Raises:
        Unmet: A stream is not as published, or the finish_reason of the chat is not length.
    """
    options: Json = {"logprobs": listed} if listed else {}
    chunks = api.stream_completion(PROMPT, max_tokens=6, **options)
    if listed and api.capabilities.can("stream_usage"):
        logprobs.of_a_stream_are_whole(chunks)
    if not api.capabilities.can("chat"):
        return
    options = {"logprobs": True, "top_logprobs": listed} if listed else {}
    chat = api.stream_chat(_QUESTION, max_tokens=6, **options)
    reason = stream.message_of(chat, None)["finish_reason"]
    require(reason == "length", "finish_reason length after 6 tokens", reason)


def refuses_with_a_status(api: Api) -> None:
    """Require a 4xx with an error object for an invalid streaming request.

    Args:
        api: The API of the server.

    Raises:
        Unmet: The server sends another answer.
    """
    api.capabilities.require("default_length")
    body = {"model": api.model, "prompt": PROMPT, "max_tokens": -1, "stream": True}
    exchange = api.send("POST", "/v1/completions", json.dumps(body).encode())
    errors = schema.violations("error", exchange.parsed())
    refused = exchange.status in range(400, 500) and not errors
    observed = f"{exchange.status} {exchange.text} {exchange.failure}"
    require(refused, "a 4xx with an error object", observed)


def _joined(choice: Json, reasoning_field: str | None) -> Json:
    """Return the message of an unstreamed answer in the format of :func:`stream.message_of`."""
    message = choice["message"]
    reasoning = message.get(reasoning_field) if reasoning_field else None
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        calls.append({"name": function["name"], "arguments": function["arguments"]})
    return {
        "role": message["role"],
        "content": message.get("content") or None,
        "reasoning": reasoning or None,
        "finish_reason": choice["finish_reason"],
        "tool_calls": calls,
    }
