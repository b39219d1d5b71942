"""What the faults of ``data/protocol-faults.toml`` do to parsed requests and answers."""

import copy
import json
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from two_steps import in_two_steps

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
    """Stops early, as an engine that overlooks min_tokens and ignore_eos."""
    asked = request.get("max_tokens", 16)
    short = {**request, "max_tokens": max(1, asked - 1), "min_tokens": max(1, asked - 1)}
    return short if request.get("ignore_eos") else request


def log_probability(value: float) -> Callable[[Json], Json]:
    def change(choice: Json) -> None:
        if choice.get("logprobs"):
            choice["logprobs"]["token_logprobs"][3] = value

    return choice(change)


def overfull(choice: Json) -> None:
    if choice.get("logprobs"):
        top = choice["logprobs"]["top_logprobs"][2]
        choice["logprobs"]["top_logprobs"][2] = dict.fromkeys(top, -0.1)


def chosen_is_not_listed(choice: Json) -> None:
    if choice.get("logprobs"):
        found = choice["logprobs"]
        found["top_logprobs"][1].pop(found["tokens"][1])


def one_entry_short(choice: Json) -> None:
    if choice.get("logprobs"):
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            choice["logprobs"][key].pop()


def chat_entry(change: Callable[[Json], None]) -> Callable[[Json], Json]:
    def apply(choice: Json) -> None:
        if choice.get("logprobs"):
            change(choice["logprobs"]["content"][0])

    return choice(apply)


@in_two_steps
def edit_tokens(chunks: list[Json], edit: Callable[[list[int]], list[int]]) -> list[Json]:
    for chunk in chunks[2:]:
        for choice in chunk.get("choices", []):
            if choice.get("token_ids"):
                choice["token_ids"] = edit(choice["token_ids"])
                return chunks
    return chunks


def with_text(chunks: list[Json]) -> list[Json]:
    return [c for c in chunks if c.get("choices") and c["choices"][0].get("text")]


@in_two_steps
def swap(chunks: list[Json], key: str) -> list[Json]:
    first, second = (chunk["choices"][0] for chunk in with_text(chunks)[1:3])
    first[key], second[key] = second[key], first[key]
    return chunks


def merge(chunks: list[Json]) -> list[Json]:
    """Two tokens in a chunk, of which the client is told only the second's id."""
    first, second = with_text(chunks)[1:3]
    second["choices"][0]["text"] = first["choices"][0]["text"] + second["choices"][0]["text"]
    chunks.remove(first)
    return chunks


@in_two_steps
def change(chunks: list[Json], place: int, change: Callable[[Json], Any]) -> list[Json]:
    change(chunks[place])
    return chunks


@in_two_steps
def drop_where(chunks: list[Json], drops: Callable[[Json], bool]) -> list[Json]:
    """Leave out the second of the chunks for which ``drops`` holds."""
    places = [place for place, chunk in enumerate(chunks) if drops(chunk)]
    return [chunk for n, chunk in enumerate(chunks) if n not in places[1:2]]


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


def call_in_content_too(choice: Json) -> None:
    message = choice["message"]
    if message.get("tool_calls"):
        message["content"] = message["tool_calls"][0]["function"]["arguments"]


def reasoning_in_content(message: Json) -> None:
    if message.get("content") and message.get("reasoning"):
        message["content"] = message["reasoning"] + message["content"]


def no_tool_messages(request: Json) -> Json:
    messages = request.get("messages") or []
    kept = [m for m in messages if m.get("role") == "user"]
    return {**request, "messages": kept} if len(kept) < len(messages) else request


def call_without_id(answer: Json) -> None:
    for item in answer["output"]:
        if item["type"] == "function_call":
            item["call_id"] = ""


def no_reasoning_item(answer: Json) -> None:
    answer["output"] = [item for item in answer["output"] if item["type"] != "reasoning"]


def swapped_choices(answer: Json) -> Json:
    if len(answer.get("choices", [])) > 1:
        first, second = answer["choices"][:2]
        first["text"], second["text"] = second["text"], first["text"]
    return answer


def copied_choices(answer: Json) -> Json:
    for choice in answer.get("choices", [])[1:]:
        choice["text"] = answer["choices"][0]["text"]
    return answer


def one_log_probability_less(chunks: list[Json]) -> list[Json]:
    for chunk in chunks[1:2]:
        for choice in chunk.get("choices", []):
            choice["logprobs"] = None
    return chunks


def header_in_front(chunks: list[Json]) -> list[Json]:
    first = next((d for d in map(delta, chunks) if d.get("content")), None)
    if first is not None:
        first["content"] = "assistantfinal" + first["content"]
    return chunks


def nan_elsewhere(entry: Json) -> None:
    if len(entry["top_logprobs"]) > 1:
        entry["top_logprobs"][-1]["logprob"] = float("nan")


@in_two_steps
def response_at_the_end(events: list[Json], change: Callable[[Json], Any]) -> list[Json]:
    change(events[-1]["response"])
    return events


@in_two_steps
def messages(request: Json, change: Callable[[list[Json]], list[Json]]) -> Json:
    """What becomes of a chat's messages on the way."""
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
    asked = [n for n, m in enumerate(messages) if m.get("role") == "user"]
    kept = [m for m in messages[: asked[-1]] if m.get("role") in ("system", "developer")]
    return [*kept, *messages[asked[-1] :]]


def reasoning_told(message: Json) -> None:
    """A template that shows earlier reasoning to the model."""
    if message.get("reasoning") and message.get("content"):
        message["content"] = message.pop("reasoning") + message["content"]


def reasoning_forgotten(message: Json) -> None:
    if message.get("tool_calls"):
        message.pop("reasoning", None)


@in_two_steps
def texts(message: Json, change: Callable[[str], str]) -> None:
    if isinstance(message.get("content"), str):
        message["content"] = change(message["content"])


def first_part(message: Json) -> None:
    if isinstance(message.get("content"), list):
        message["content"] = message["content"][:1]


def schema_as_text(request: Json) -> Json:
    """The schema is told in place of the instructions."""
    if not request.get("response_format"):
        return request
    told = {"role": "system", "content": json.dumps(request["response_format"])}
    return {**request, "messages": [told, *no_instructions(request["messages"])]}


def no_reasoning_items(request: Json) -> Json:
    items = request.get("input")
    if not isinstance(items, list):
        return request
    return {**request, "input": [item for item in items if item.get("type") != "reasoning"]}


def last_item(request: Json) -> Json:
    items = request.get("input")
    return {**request, "input": items[-1:]} if isinstance(items, list) else request


stream_that_drops_a_token = edit_tokens(lambda ids: ids[1:])
stream_that_doubles_a_token = edit_tokens(lambda ids: [*ids, ids[-1]])


another_id_in_each_chunk = change(1, lambda c: c.update(id="cmpl-x"))


no_role = change(0, lambda c: c["choices"][0]["delta"].pop("role"))
choice_of_another_index_in_a_chunk = change(1, lambda c: c["choices"][0].update(index=1))
header_leaks_into_the_content_streamed_or_not = message(
    lambda m: m.update(content=f"assistantfinal{m['content']}")
)
delta_is_lost = drop_where(lambda c: bool(delta(c).get("content")))
delta_of_a_call_s_arguments_is_lost = drop_where(lambda c: bool(delta(c).get("tool_calls")))
later_instructions_are_dropped = messages(lambda m: [*m[:1], *no_instructions(m[1:])])
instructions_become_a_user_s_message = each(lambda m: m.update(role="user"), role="developer")
only_the_last_of_two_results_is_told = messages(lambda m: m[:-2] + m[-1:])
special_tokens_typed_as_text_are_taken_out = each(
    texts(lambda text: re.sub(r"<\|\w+\|>", "", text))
)
texts_are_normalised = each(texts(lambda text: unicodedata.normalize("NFKC", text)))


delta_of_a_response_is_lost = drop_where(
    lambda event: event["type"] == "response.output_text.delta"
)
response_whose_stream_ends_without_usage = response_at_the_end(
    lambda response: response.update(usage=None)
)
delta_of_a_response_s_reasoning_is_lost = drop_where(
    lambda event: event["type"] == "response.reasoning_text.delta"
)


#: Those of one expression.
SMALL: dict[str, Callable[..., Any]] = {
    "no_usage": lambda chunks: [chunk for chunk in chunks if chunk.get("choices")],
    "stream_cut_off_with_status_200": lambda text: text[: len(text) // 2],
    "chunk_that_is_no_json": lambda text: text.replace("{", "", 1),
    "events_out_of_order": lambda events: [events[1], events[0], *events[2:]],
    "health_says_503": lambda path: 503 if path == "/health" else None,
}
