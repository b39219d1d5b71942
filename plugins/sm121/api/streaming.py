"""A stream is the same answer as one that comes at once, in chunks as published."""

import json

from sm121.api import invariants, logprobs, schema, stream
from sm121.api.client import Api, Json
from sm121.api.sdk import PROMPT, Sdk, first_that
from sm121.api.tools import tools
from sm121.core.level_settings import Correctness
from sm121.core.unmet import require


def equals_not_streaming(sdk: Sdk, attempts: int) -> None:
    """The chunks of a completion add up to the completion that comes at once."""
    ids: list[int] = []
    text = ""
    usage = finish = None
    for chunk in sdk.exactly(48, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            ids.extend(getattr(choice, "token_ids", None) or [])
            text += choice.text
            finish = choice.finish_reason or finish
    wholes = (sdk.exactly(48).choices[0] for _ in range(attempts))
    whole = first_that(wholes, lambda answer: answer.token_ids == ids)
    require(len(whole.token_ids) == 48, "48 token ids", len(whole.token_ids))
    require(ids == whole.token_ids, f"token ids {whole.token_ids}", f"{ids} in the stream")
    require(text == whole.text, repr(whole.text), f"{text!r} in the stream")
    reason = whole.finish_reason
    require(finish == reason, f"finish_reason {reason}", f"{finish} in the stream")
    counted = usage is not None and usage.completion_tokens == len(ids)
    require(counted, f"usage of {len(ids)} tokens in the last chunk", usage)


def deltas_add_up(api: Api, correctness: Correctness, *, with_tools: bool) -> None:
    """The deltas of a chat add up to the message that comes at once, with the same usage."""
    field = api.capabilities.file.reasoning_field
    options: Json = {"max_tokens": correctness.max_answer_tokens}
    if with_tools:
        options["tools"] = tools()
    question = correctness.tool_calls[0].question if with_tools else correctness.chats[0].question
    whole = api.chat(question, **options)
    streamed = api.stream_chat(question, **options)
    message = stream.message_of(streamed, field)
    wrong = invariants.of_tool_calls(
        [{"id": call["id"], "function": call} for call in message["tool_calls"]], options
    )
    require(not wrong, "well-formed calls", wrong)
    for call in message["tool_calls"]:
        del call["id"]  # made anew each time
    expected = _plain(whole["choices"][0], field)
    require(message == expected, expected, f"{message} in the stream")
    if api.capabilities.can("stream_usage"):
        usage, once = streamed.chunks[-1]["usage"], whole["usage"]
        same = all(usage[name] == once[name] for name in ("prompt_tokens", "total_tokens"))
        require(same, f"usage {once}", f"{usage} in the stream")


def is_as_published(api: Api, listed: int | None) -> None:
    """A completion and a chat, streamed, the log-probabilities of `listed` tokens at each place."""
    with_logprobs: Json = {"logprobs": listed} if listed else {}
    chunks = api.stream_completion(PROMPT, max_tokens=6, **with_logprobs)
    if listed and api.capabilities.can("stream_usage"):
        logprobs.of_a_stream_are_whole(chunks)
    with_logprobs = {"logprobs": True, "top_logprobs": listed} if listed else {}
    api.stream_chat("What is the capital of France?", max_tokens=6, **with_logprobs)


def refuses_with_a_status(api: Api) -> None:
    """A stream that is refused is a 4xx with an error object."""
    api.capabilities.require("default_length")
    body = {"model": api.model, "prompt": PROMPT, "max_tokens": -1, "stream": True}
    exchange = api.send("POST", "/v1/completions", json.dumps(body).encode())
    refused = exchange.status in range(400, 500) and not schema.violations(
        "error", exchange.parsed()
    )
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
        "tool_calls": [
            {key: call["function"][key] for key in ("name", "arguments")} for call in calls
        ],
    }
