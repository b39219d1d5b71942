"""A stream is the same answer as one that comes at once, in chunks as published."""

import json

from sm121.api import invariants, logprobs, responses, schema, stream
from sm121.api.client import Api, Json
from sm121.api.sdk import PROMPT, first_that
from sm121.api.tools import tools
from sm121.core import level_settings, verdict
from sm121.core.unmet import require

#: Of two to four bytes, some of several signs: joined, combined, and of two tokens each.
BEYOND_ASCII = "Grüße, 東京 😀👩\u200d👧 e\u0301!"


def deltas_add_up(api: Api, correctness: level_settings.Correctness, *, with_tools: bool) -> None:
    """The deltas of a chat add up to the message that comes at once, with the same usage."""
    field = api.capabilities.file.reasoning_field
    options: Json = {"max_tokens": correctness.max_answer_tokens}
    if with_tools:
        options["tools"] = tools()
    question = correctness.tool_calls[0].question if with_tools else correctness.chats[0].question
    whole = api.chat(question, **options)
    streamed = api.stream_chat(question, **options)
    message = stream.message_of(streamed, field)
    calls = [{"id": call["id"], "function": call} for call in message["tool_calls"]]
    wrong = invariants.of_tool_calls(calls, options)
    require(not wrong, "well-formed calls", wrong)
    for call in message["tool_calls"]:
        del call["id"]  # made anew each time
    expected = _plain(whole["choices"][0], field)
    require(message == expected, expected, f"{message} in the stream")
    if api.capabilities.can("stream_usage"):
        usage, once = streamed.chunks[-1]["usage"], whole["usage"]
        same = all(usage[name] == once[name] for name in ("prompt_tokens", "total_tokens"))
        require(same, f"usage {once}", f"{usage} in the stream")


def keeps_every_character(api: Api, kind: str, attempts: int) -> None:
    """The chunks of a completion, a chat or a response add up to the text that comes at once, also
    where tokens are parts of characters. Raises NotRun: a response has no form."""
    text = {"type": "object", "properties": {"text": {"enum": [BEYOND_ASCII]}}}
    form = {"name": "text", "schema": {**text, "required": ["text"], "additionalProperties": False}}

    def streamed_and_at_once() -> tuple[str, str]:
        if kind == "completion":
            ids = api.ids("".join(sign for sign in BEYOND_ASCII if not sign.isascii()))
            options: Json = {"allowed_token_ids": sorted({*ids}), "frequency_penalty": 2.0}
            options |= {"max_tokens": 64, "ignore_eos": True}
            streamed = stream.completion_of(api.stream_completion(PROMPT, **options))[0]["text"]
            return streamed, api.complete(PROMPT, **options)["choices"][0]["text"]
        question, schema_of = "What is the capital of France?", {"type": "json_schema"}
        if kind == "chat":
            options = {"response_format": {**schema_of, "json_schema": form}, "max_tokens": 400}
            message = api.chat(question, **options)["choices"][0]["message"]
            streamed = stream.message_of(api.stream_chat(question, **options), None)["content"]
            return streamed or "", message["content"] or ""
        options = {"text": {"format": {**schema_of, **form}}, "max_output_tokens": 400}
        streamed = stream.response_deltas(api.stream_response(question, **options), "output_text")
        return streamed or "", responses.text_of(api.respond(question, **options))

    tries = (streamed_and_at_once() for _ in range(attempts))
    streamed, at_once = first_that(tries, lambda texts: texts[0] == texts[1])
    if kind == "response" and BEYOND_ASCII not in at_once:
        raise verdict.NotRun("the server keeps no form in responses (text.format)")
    beyond = not at_once.isascii() if kind == "completion" else BEYOND_ASCII in at_once
    require(beyond, f"a text of {BEYOND_ASCII!r}", repr(at_once))
    require(streamed == at_once, repr(at_once), f"{streamed!r} in the stream")


def is_as_published(api: Api, listed: int | None) -> None:
    """A completion and a chat, streamed, the log-probabilities of `listed` tokens at each place."""
    with_logprobs: Json = {"logprobs": listed} if listed else {}
    chunks = api.stream_completion(PROMPT, max_tokens=6, **with_logprobs)
    if listed and api.capabilities.can("stream_usage"):
        logprobs.of_a_stream_are_whole(chunks)
    with_logprobs = {"logprobs": True, "top_logprobs": listed} if listed else {}
    cut = api.stream_chat("What is the capital of France?", max_tokens=6, **with_logprobs)
    reason = stream.message_of(cut, None)["finish_reason"]
    require(reason == "length", "finish_reason length after 6 tokens", reason)


def refuses_with_a_status(api: Api) -> None:
    """A stream that is refused is a 4xx with an error object."""
    api.capabilities.require("default_length")
    body = {"model": api.model, "prompt": PROMPT, "max_tokens": -1, "stream": True}
    exchange = api.send("POST", "/v1/completions", json.dumps(body).encode())
    wrong = schema.violations("error", exchange.parsed())
    refused = exchange.status in range(400, 500) and not wrong
    came = f"{exchange.status} {exchange.text} {exchange.failure}"
    require(refused, "a 4xx with an error object", came)


def _plain(choice: Json, reasoning_field: str | None) -> Json:
    """The message of an answer that came at once, in the shape of :func:`stream.message_of`."""
    message = choice["message"]
    calls = message.get("tool_calls") or []
    return {
        "role": message["role"],
        "content": message.get("content") or None,
        "reasoning": (message.get(reasoning_field) if reasoning_field else None) or None,
        "finish_reason": choice["finish_reason"],
        "tool_calls": [{k: call["function"][k] for k in ("name", "arguments")} for call in calls],
    }
