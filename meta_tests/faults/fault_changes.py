"""The changes that the faults of ``data/protocol-faults.toml`` make to parsed requests and
answers."""

import copy
import json
import math
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from meta_tests.two_steps import in_two_steps

Json = dict[str, Any]


@in_two_steps
def choice(answer: Json, change: Callable[[Json], Any]) -> Json:
    if answer.get("choices"):
        change(answer["choices"][0])
    return answer


def message(change: Callable[[Json], Any]) -> Callable[[Json], Json]:
    return choice(lambda choice: change(choice["message"]))


@in_two_steps
def top(answer: Json, change: Callable[[Json], Any]) -> Json:
    if "choices" in answer or "output" in answer:
        change(answer)
    return answer


def of_each(change: Callable[[Json], Json]) -> Callable[[list[Json]], list[Json]]:
    return lambda chunks: [change(chunk) for chunk in chunks]


@in_two_steps
def usage(answer: Json, change: Callable[[Json], None]) -> Json:
    if answer.get("usage"):
        change(answer["usage"])
    return answer


def one_token_less(request: Json) -> Json:
    """End an answer one token early, like an engine that ignores min_tokens and ignore_eos."""
    less = max(1, request.get("max_tokens", 16) - 1)
    short = {"max_tokens": less, "min_tokens": less}
    return request | short if request.get("ignore_eos") else request


def logprobs(change: Callable[[Json], Any]) -> Callable[[Json], Json]:
    return choice(lambda part: change(part["logprobs"]) if part.get("logprobs") else None)


def chat_entry(change: Callable[[Json], Any]) -> Callable[[Json], Json]:
    return logprobs(lambda lists: change(lists["content"][0]))


@in_two_steps
def fourth_log_probability(lists: Json, value: float) -> None:
    lists["token_logprobs"][3] = value


def overfull(lists: Json) -> None:
    lists["top_logprobs"][2] = dict.fromkeys(lists["top_logprobs"][2], -0.1)


def one_entry_short(lists: Json) -> None:
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        lists[key].pop()


@in_two_steps
def edit_tokens(chunks: list[Json], edit: Callable[[list[int]], list[int]]) -> list[Json]:
    choices = []
    for chunk in chunks[2:]:
        choices.extend(chunk.get("choices", []))
    first = next((choice for choice in choices if choice.get("token_ids")), {"token_ids": []})
    first["token_ids"] = edit(first["token_ids"]) if first["token_ids"] else []
    return chunks


def with_text(chunks: list[Json]) -> list[Json]:
    return [c for c in chunks if c.get("choices") and c["choices"][0].get("text")]


@in_two_steps
def swap(chunks: list[Json], key: str) -> list[Json]:
    first, second = (chunk["choices"][0] for chunk in with_text(chunks)[1:3])
    first[key], second[key] = second[key], first[key]
    return chunks


def merge(chunks: list[Json]) -> list[Json]:
    """Put two tokens into one chunk that contains only the second id."""
    first, second = with_text(chunks)[1:3]
    second["choices"][0]["text"] = first["choices"][0]["text"] + second["choices"][0]["text"]
    chunks.remove(first)
    return chunks


@in_two_steps
def change(chunks: list[Json], number: int, change: Callable[[Json], Any]) -> list[Json]:
    change(chunks[number])
    return chunks


@in_two_steps
def drop_where(chunks: list[Json], drops: Callable[[Json], bool]) -> list[Json]:
    """Drop the second of those chunks for which ``drops`` is true."""
    hits = [n for n, chunk in enumerate(chunks) if drops(chunk)]
    return [chunk for n, chunk in enumerate(chunks) if n not in hits[1:2]]


def delta(chunk: Json) -> Json:
    return chunk["choices"][0]["delta"] if chunk.get("choices") else {}


def finish_twice(chunks: list[Json]) -> list[Json]:
    last = next(c for c in chunks if c.get("choices") and c["choices"][0].get("finish_reason"))
    chunks.insert(chunks.index(last), copy.deepcopy(last))
    return chunks


def stop_is_kept(answer: Json, request: Json) -> Json:
    for choice in answer.get("choices", []):
        if choice.get("finish_reason") == "stop" and request.get("stop"):
            choice["text"] += request["stop"][0]
    return answer


def tool_call(change: Callable[[Json], Any]) -> Callable[[Json], Json]:
    def apply(message: Json) -> None:
        for call in message.get("tool_calls") or []:
            change(call)

    return message(apply)


def call_as_text(choice: Json) -> None:
    message = choice["message"]
    if message.get("tool_calls"):
        call = message.pop("tool_calls")[0]["function"]
        message["content"] = f"{call['name']}({call['arguments']})"
        choice["finish_reason"] = "stop"


def swapped_choices(answer: Json) -> Json:
    if len(answer.get("choices", [])) > 1:
        first, second = answer["choices"][:2]
        first["text"], second["text"] = second["text"], first["text"]
    return answer


def header_in_front(chunks: list[Json]) -> list[Json]:
    first = next((d for d in map(delta, chunks) if d.get("content")), None)
    if first is not None:
        first["content"] = "assistantfinal" + first["content"]
    return chunks


@in_two_steps
def messages(request: Json, change: Callable[[list[Json]], list[Json]]) -> Json:
    """Change a chat's messages before they reach the server."""
    messages = request.get("messages")
    if not isinstance(messages, list):
        return request
    return {**request, "messages": change(copy.deepcopy(messages))}


def each(change: Callable[[Json], Any], role: str = "") -> Callable[[Json], Json]:
    def apply(messages: list[Json]) -> list[Json]:
        for message in messages:
            if not role or message.get("role") == role:
                change(message)
        return messages

    return messages(apply)


def no_instructions(messages: list[Json]) -> list[Json]:
    return [m for m in messages if m.get("role") not in ("system", "developer")]


def last_turn(messages: list[Json]) -> list[Json]:
    users = [n for n, m in enumerate(messages) if m.get("role") == "user"]
    instructions = [m for m in messages[: users[-1]] if m.get("role") in ("system", "developer")]
    return [*instructions, *messages[users[-1] :]]


@in_two_steps
def texts(message: Json, change: Callable[[str], str]) -> None:
    if isinstance(message.get("content"), str):
        message["content"] = change(message["content"])


def schema_as_text(request: Json) -> Json:
    """Replace the instructions of a request by the schema of its answer."""
    if not request.get("response_format"):
        return request
    schema = {"role": "system", "content": json.dumps(request["response_format"])}
    return {**request, "messages": [schema, *no_instructions(request["messages"])]}


@in_two_steps
def items(request: Json, change: Callable[[list[Json]], list[Json]]) -> Json:
    """Change the input items of a request to the Responses API."""
    are_items = isinstance(request.get("input"), list)
    return {**request, "input": change(request["input"])} if are_items else request


@in_two_steps
def having(part: Json, key: str, change: Callable[[Json], Any]) -> None:
    """Change each object that has the given key."""
    if part.get(key):
        change(part)


#: Changes that are a single expression.
SMALL: dict[str, Callable[..., Any]] = {
    "no_usage": lambda chunks: [chunk for chunk in chunks if chunk.get("choices")],
    "stream_cut_off_with_status_200": lambda text: text[: len(text) // 2],
    "chunk_that_is_no_json": lambda text: text.replace("{", "", 1),
    "events_out_of_order": lambda events: [events[1], events[0], *events[2:]],
    "health_says_503": lambda path: 503 if path == "/health" else None,
    "stream_that_drops_a_token": edit_tokens(lambda ids: ids[1:]),
    "stream_that_doubles_a_token": edit_tokens(lambda ids: [*ids, ids[-1]]),
    "another_id_in_each_chunk": change(1, lambda c: c.update(id="cmpl-x")),
    "no_role": change(0, lambda c: c["choices"][0]["delta"].pop("role")),
    "choice_of_another_index_in_a_chunk": change(1, lambda c: c["choices"][0].update(index=1)),
    "one_log_probability_less": change(
        1, lambda chunk: [each.update(logprobs=None) for each in chunk.get("choices", [])]
    ),
    "chosen_is_not_listed": lambda lists: lists["top_logprobs"][1].pop(lists["tokens"][1]),
    "nan_elsewhere": lambda entry: [
        other.update(logprob=math.nan) for other in entry["top_logprobs"][1:][-1:]
    ],
    "copied_choices": lambda answer: [
        each.update(text=answer["choices"][0]["text"]) for each in answer["choices"][1:]
    ],
    "header_leaks_into_the_content_streamed_or_not": message(
        lambda m: m.update(content=f"assistantfinal{m['content']}")
    ),
    "delta_is_lost": drop_where(lambda c: bool(delta(c).get("content"))),
    "delta_of_a_call_s_arguments_is_lost": drop_where(lambda c: bool(delta(c).get("tool_calls"))),
    "call_in_content_too": having(
        "tool_calls", lambda m: m.update(content=m["tool_calls"][0]["function"]["arguments"])
    ),
    "reasoning_in_content": having(
        "content", having("reasoning", lambda m: m.update(content=m["reasoning"] + m["content"]))
    ),
    # A template that shows earlier reasoning to the model.
    "reasoning_told": having(
        "content",
        having("reasoning", lambda m: m.update(content=m.pop("reasoning") + m["content"])),
    ),
    "reasoning_forgotten": having("tool_calls", lambda m: m.pop("reasoning", None)),
    "no_tool_messages": messages(lambda all_: [m for m in all_ if m.get("role") == "user"]),
    "later_instructions_are_dropped": messages(lambda m: [*m[:1], *no_instructions(m[1:])]),
    "instructions_become_a_user_s_message": each(lambda m: m.update(role="user"), role="developer"),
    "only_the_last_of_two_results_is_told": messages(lambda m: m[:-2] + m[-1:]),
    "special_tokens_typed_as_text_are_taken_out": each(
        texts(lambda text: re.sub(r"<\|\w+\|>", "", text))
    ),
    "stripped": str.strip,
    "texts_are_normalised": each(texts(lambda text: unicodedata.normalize("NFKC", text))),
    "first_part": lambda m: (
        m.update(content=m["content"][:1]) if isinstance(m.get("content"), list) else None
    ),
    "last_item": items(lambda listed: listed[-1:]),
    "no_reasoning_items": items(
        lambda listed: [item for item in listed if item.get("type") != "reasoning"]
    ),
    "no_reasoning_item": lambda answer: answer.update(
        output=[item for item in answer["output"] if item["type"] != "reasoning"]
    ),
    "call_without_id": lambda answer: [
        item.update(call_id="") for item in answer["output"] if item["type"] == "function_call"
    ],
    "delta_of_a_response_is_lost": drop_where(lambda e: e["type"] == "response.output_text.delta"),
    "response_whose_stream_ends_without_usage": change(
        -1, lambda event: event["response"].update(usage=None)
    ),
    "delta_of_a_response_s_reasoning_is_lost": drop_where(
        lambda event: event["type"] == "response.reasoning_text.delta"
    ),
}
