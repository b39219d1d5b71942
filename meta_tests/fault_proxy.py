"""A proxy in front of a real server that breaks its answers in one known way at a time.

Most faults work on parsed answers: ``completion``, ``chat`` and ``response`` get the JSON of an
answer that came at once, ``stream``, ``deltas`` and ``events`` the list of a stream's chunks,
``request`` what is sent on. ``exchange`` has it all in its hands, for the others. What only changes
fields is a row of ``data/protocol-faults.toml``.
"""

from __future__ import annotations

import copy
import json
import re
import time
import tomllib
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from loopback import JsonHandler, serving

Json = dict[str, Any]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


@dataclass(frozen=True)
class Request:
    """What came from the client. ``body`` is None where it is no JSON object."""

    method: str
    path: str
    content: bytes
    key: str | None

    @property
    def body(self) -> Json | None:
        try:
            parsed = json.loads(self.content)
        except (ValueError, RecursionError):
            return None
        return parsed if isinstance(parsed, dict) else None


@dataclass(frozen=True)
class Answer:
    """What goes back. No status: the connection is dropped."""

    status: int | None
    content_type: str
    content: bytes


Forward = Callable[[Request], Answer]
Exchange = Callable[[Request, Forward], Answer]


def _same(content: Any) -> Any:
    return content


@dataclass(frozen=True)
class Fault:
    """One way of being wrong, and the test that must fail on it."""

    name: str
    caught_by: str
    request: Callable[[Json], Json] = _same
    completion: Callable[[Json], Json] = _same
    chat: Callable[[Json], Json] = _same
    response: Callable[[Json], Json] = _same
    stream: Callable[[list[Json]], list[Json]] = _same
    deltas: Callable[[list[Json]], list[Json]] = _same
    events: Callable[[list[Json]], list[Json]] = _same
    #: On the text of a whole stream.
    wire: Callable[[str], str] = _same
    #: Makes the hook anew for each run, so that it may remember something.
    exchange: Callable[[], Exchange] | None = None
    status: Callable[[str], int | None] = lambda _path: None


# -------------------- tools for writing faults


def _choice(change: Callable[[Json], Any]) -> Callable[[Json], Json]:
    def apply(answer: Json) -> Json:
        if answer.get("choices"):
            change(answer["choices"][0])
        return answer

    return apply


def _message(change: Callable[[Json], Any]) -> Callable[[Json], Json]:
    return _choice(lambda choice: change(choice["message"]))


def _top(change: Callable[[Json], Any]) -> Callable[[Json], Json]:
    def apply(answer: Json) -> Json:
        if "choices" in answer or "output" in answer:
            change(answer)
        return answer

    return apply


def _without(*keys: str) -> Callable[[Json], Json]:
    return lambda request: {key: value for key, value in request.items() if key not in keys}


def _usage(change: Callable[[Json], None]) -> Callable[[Json], Json]:
    def apply(answer: Json) -> Json:
        if answer.get("usage"):
            change(answer["usage"])
        return answer

    return apply


def _more_completion_tokens(usage: Json) -> None:
    usage["completion_tokens"] += 1
    usage["total_tokens"] += 1


def _fewer_prompt_tokens(usage: Json) -> None:
    usage["prompt_tokens"] -= 1
    usage["total_tokens"] -= 1


def _one_token_less(request: Json) -> Json:
    """Stops early, as an engine that overlooks min_tokens and ignore_eos."""
    asked = request.get("max_tokens", 16)
    short = {**request, "max_tokens": max(1, asked - 1), "min_tokens": max(1, asked - 1)}
    return short if request.get("ignore_eos") else request


def _log_probability(value: float) -> Callable[[Json], Json]:
    def change(choice: Json) -> None:
        if choice.get("logprobs"):
            choice["logprobs"]["token_logprobs"][3] = value

    return _choice(change)


def _overfull(choice: Json) -> None:
    if choice.get("logprobs"):
        top = choice["logprobs"]["top_logprobs"][2]
        choice["logprobs"]["top_logprobs"][2] = dict.fromkeys(top, -0.1)


def _chosen_is_not_listed(choice: Json) -> None:
    if choice.get("logprobs"):
        found = choice["logprobs"]
        found["top_logprobs"][1].pop(found["tokens"][1])


def _one_entry_short(choice: Json) -> None:
    if choice.get("logprobs"):
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            choice["logprobs"][key].pop()


def _chat_entry(change: Callable[[Json], None]) -> Callable[[Json], Json]:
    def apply(choice: Json) -> None:
        if choice.get("logprobs"):
            change(choice["logprobs"]["content"][0])

    return _choice(apply)


def _edit_tokens(edit: Callable[[list[int]], list[int]]) -> Callable[[list[Json]], list[Json]]:
    def apply(chunks: list[Json]) -> list[Json]:
        for chunk in chunks[2:]:
            for choice in chunk.get("choices", []):
                if choice.get("token_ids"):
                    choice["token_ids"] = edit(choice["token_ids"])
                    return chunks
        return chunks

    return apply


def _with_text(chunks: list[Json]) -> list[Json]:
    return [c for c in chunks if c.get("choices") and c["choices"][0].get("text")]


def _swap(key: str) -> Callable[[list[Json]], list[Json]]:
    def apply(chunks: list[Json]) -> list[Json]:
        first, second = (chunk["choices"][0] for chunk in _with_text(chunks)[1:3])
        first[key], second[key] = second[key], first[key]
        return chunks

    return apply


def _merge(chunks: list[Json]) -> list[Json]:
    """Two tokens in a chunk, of which the client is told only the second's id."""
    first, second = _with_text(chunks)[1:3]
    second["choices"][0]["text"] = first["choices"][0]["text"] + second["choices"][0]["text"]
    chunks.remove(first)
    return chunks


def _no_usage(chunks: list[Json]) -> list[Json]:
    return [chunk for chunk in chunks if chunk.get("choices")]


def _usage_everywhere(chunks: list[Json]) -> list[Json]:
    for chunk in chunks:
        chunk["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return chunks


def _wrong_usage(chunks: list[Json]) -> list[Json]:
    for chunk in chunks:
        _usage(_more_completion_tokens)(chunk)
    return chunks


def _change(place: int, change: Callable[[Json], Any]) -> Callable[[list[Json]], list[Json]]:
    def apply(chunks: list[Json]) -> list[Json]:
        change(chunks[place])
        return chunks

    return apply


def _drop_where(drops: Callable[[Json], bool]) -> Callable[[list[Json]], list[Json]]:
    """Leave out the second of the chunks for which ``drops`` holds."""

    def apply(chunks: list[Json]) -> list[Json]:
        places = [place for place, chunk in enumerate(chunks) if drops(chunk)]
        return [chunk for n, chunk in enumerate(chunks) if n not in places[1:2]]

    return apply


def _delta(chunk: Json) -> Json:
    return chunk["choices"][0]["delta"] if chunk.get("choices") else {}


def _finish_twice(chunks: list[Json]) -> list[Json]:
    last = next(c for c in chunks if c.get("choices") and c["choices"][0].get("finish_reason"))
    chunks.insert(chunks.index(last), copy.deepcopy(last))
    return chunks


def _never_finish(chunks: list[Json]) -> list[Json]:
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            choice["finish_reason"] = None
    return chunks


def _stop_is_kept(answer: Json, request: Json) -> Json:
    for choice in answer.get("choices", []):
        if choice.get("finish_reason") == "stop" and request.get("stop"):
            choice["text"] += request["stop"][0]
    return answer


def _shift(choice: Json) -> None:
    choice["index"] += 1


def _tool_call(change: Callable[[Json], Any]) -> Callable[[Json], Json]:
    def apply(message: Json) -> None:
        for call in message.get("tool_calls") or []:
            change(call)

    return _message(apply)


def _call_as_text(choice: Json) -> None:
    message = choice["message"]
    if message.get("tool_calls"):
        call = message.pop("tool_calls")[0]["function"]
        message["content"] = f"{call['name']}({call['arguments']})"
        choice["finish_reason"] = "stop"


def _call_in_content_too(choice: Json) -> None:
    message = choice["message"]
    if message.get("tool_calls"):
        message["content"] = message["tool_calls"][0]["function"]["arguments"]


def _cold_chat(request: Json) -> Json:
    return {**request, "temperature": 0.0} if "messages" in request else request


def _reasoning_in_content(message: Json) -> None:
    if message.get("content") and message.get("reasoning"):
        message["content"] = message["reasoning"] + message["content"]


def _no_tool_messages(request: Json) -> Json:
    messages = request.get("messages") or []
    kept = [m for m in messages if m.get("role") == "user"]
    return {**request, "messages": kept} if len(kept) < len(messages) else request


def _call_without_id(answer: Json) -> None:
    for item in answer["output"]:
        if item["type"] == "function_call":
            item["call_id"] = ""


def _completed(answer: Json) -> None:
    answer.update(status="completed", incomplete_details=None)


def _no_reasoning_item(answer: Json) -> None:
    answer["output"] = [item for item in answer["output"] if item["type"] != "reasoning"]


def _each_fifth(change: Callable[[Json], Any]) -> Callable[[], Exchange]:
    """A fault that comes and goes: it strikes every fifth chat."""

    def make() -> Exchange:
        count = 0

        def hook(request: Request, forward: Forward) -> Answer:
            nonlocal count
            answer = forward(request)
            count += request.path == CHAT
            return _changed(answer, change) if count % 5 == 4 else answer

        return hook

    return make


def _changed(answer: Answer, change: Callable[[Json], Any]) -> Answer:
    if answer.status != 200 or "json" not in answer.content_type:
        return answer
    parsed = json.loads(answer.content)
    change(parsed)
    return replace(answer, content=json.dumps(parsed).encode())


def _plainly(hook: Exchange) -> Callable[[], Exchange]:
    return lambda: hook


def _on_error(make: Callable[[Request, Answer], Answer]) -> Callable[[], Exchange]:
    """What becomes of an answer that refuses a request."""

    def hook(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        refused = answer.status is not None and 400 <= answer.status < 500
        return make(request, answer) if refused else answer

    return _plainly(hook)


def _hang(_request: Request, answer: Answer) -> Answer:
    time.sleep(HANG_S)
    return answer


def _after_an_error(broken: Callable[[Request, Answer], Answer]) -> Callable[[], Exchange]:
    """The server is another one once it has refused a request."""

    def make() -> Exchange:
        refused = False

        def hook(request: Request, forward: Forward) -> Answer:
            nonlocal refused
            answer = broken(request, forward(request)) if refused else forward(request)
            # A GET that was refused was only a look at what there is.
            refused = refused or (request.method == "POST" and answer.status in range(400, 500))
            return answer

        return hook

    return make


def _clamped(change: Callable[[Json], Json]) -> Callable[[], Exchange]:
    """A request that must be refused is made one that is served."""

    def hook(request: Request, forward: Forward) -> Answer:
        if (body := request.body) is not None:
            request = replace(request, content=json.dumps(change(body)).encode())
        return forward(request)

    return _plainly(hook)


def _any_key(request: Request, forward: Forward) -> Answer:
    return forward(replace(request, key=None))


def _stale() -> Exchange:
    """Each completion gets the answer of the one before."""
    before: dict[str, Answer] = {}

    def hook(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        if request.path != COMPLETIONS or answer.status != 200:
            return answer
        now, before["answer"] = before.get("answer", answer), answer
        return now

    return hook


def _stop_included(request: Request, forward: Forward) -> Answer:
    body = request.body or {}
    return _changed(forward(request), lambda answer: _stop_is_kept(answer, body))


def _swapped_choices(answer: Json) -> Json:
    if len(answer.get("choices", [])) > 1:
        first, second = answer["choices"][:2]
        first["text"], second["text"] = second["text"], first["text"]
    return answer


def _copied_choices(answer: Json) -> Json:
    for choice in answer.get("choices", [])[1:]:
        choice["text"] = answer["choices"][0]["text"]
    return answer


def _cut_prompt(request: Json) -> Json:
    prompt = request.get("prompt")
    return {**request, "prompt": prompt[:800]} if isinstance(prompt, str) else request


def _other_token_first(entry: Json) -> None:
    entry.update(token="The", bytes=list(b"The"), top_logprobs=[])


def _models_without_object(request: Request, forward: Forward) -> Answer:
    answer = forward(request)
    if request.path != "/v1/models":
        return answer
    return _changed(answer, lambda listed: [entry.pop("object") for entry in listed["data"]])


def _said_all_along(chunks: list[Json]) -> list[Json]:
    """The end is called a natural one."""
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            if choice.get("finish_reason"):
                choice["finish_reason"] = "stop"
    return chunks


def _one_log_probability_less(chunks: list[Json]) -> list[Json]:
    for chunk in chunks[1:2]:
        for choice in chunk.get("choices", []):
            choice["logprobs"] = None
    return chunks


def _header_in_front(chunks: list[Json]) -> list[Json]:
    first = next((d for d in map(_delta, chunks) if d.get("content")), None)
    if first is not None:
        first["content"] = "assistantfinal" + first["content"]
    return chunks


def _nan_elsewhere(entry: Json) -> None:
    if len(entry["top_logprobs"]) > 1:
        entry["top_logprobs"][-1]["logprob"] = float("nan")


def _any_key_of_a_chat(request: Request, forward: Forward) -> Answer:
    return forward(replace(request, key=None) if request.path == CHAT else request)


def _response_at_the_end(change: Callable[[Json], Any]) -> Callable[[list[Json]], list[Json]]:
    def apply(events: list[Json]) -> list[Json]:
        change(events[-1]["response"])
        return events

    return apply


def _error_in_the_stream(request: Request, answer: Answer) -> Answer:
    if not (request.body or {}).get("stream"):
        return answer
    text = f"data: {answer.content.decode()}\n\ndata: [DONE]\n\n"
    return Answer(200, "text/event-stream", text.encode())


def _messages(change: Callable[[list[Json]], list[Json]]) -> Callable[[Json], Json]:
    """What becomes of a chat's messages on the way."""

    def apply(request: Json) -> Json:
        messages = request.get("messages")
        if not isinstance(messages, list):
            return request
        return {**request, "messages": change(copy.deepcopy(messages))}

    return apply


def _each(change: Callable[[Json], Any], *, role: str = "") -> Callable[[Json], Json]:
    def apply(messages: list[Json]) -> list[Json]:
        for message in messages:
            if not role or message.get("role") == role:
                change(message)
        return messages

    return _messages(apply)


def _no_instructions(messages: list[Json]) -> list[Json]:
    return [m for m in messages if m.get("role") not in ("system", "developer")]


def _last_turn(messages: list[Json]) -> list[Json]:
    asked = [n for n, m in enumerate(messages) if m.get("role") == "user"]
    kept = [m for m in messages[: asked[-1]] if m.get("role") in ("system", "developer")]
    return [*kept, *messages[asked[-1] :]]


def _reasoning_told(message: Json) -> None:
    """A template that shows earlier reasoning to the model."""
    if message.get("reasoning") and message.get("content"):
        message["content"] = message.pop("reasoning") + message["content"]


def _reasoning_forgotten(message: Json) -> None:
    if message.get("tool_calls"):
        message.pop("reasoning", None)


def _texts(change: Callable[[str], str]) -> Callable[[Json], None]:
    def apply(message: Json) -> None:
        if isinstance(message.get("content"), str):
            message["content"] = change(message["content"])

    return apply


def _first_part(message: Json) -> None:
    if isinstance(message.get("content"), list):
        message["content"] = message["content"][:1]


def _schema_as_text(request: Json) -> Json:
    """The schema is told in place of the instructions."""
    if not request.get("response_format"):
        return request
    told = {"role": "system", "content": json.dumps(request["response_format"])}
    return {**request, "messages": [told, *_no_instructions(request["messages"])]}


def _prompt_rewritten(change: Callable[[str], list[int]]) -> Callable[[], Exchange]:
    """The model is given other tokens than those of the chat, and the server says so."""

    def hook(request: Request, forward: Forward) -> Answer:
        body = request.body
        if request.path != CHAT or body is None or body.get("stream"):
            return forward(request)
        plain = {**body, "max_tokens": 1, "return_token_ids": True}
        first = forward(replace(request, content=json.dumps(plain).encode()))
        if first.status != 200:
            return first
        ids = change(_harmony().decode(json.loads(first.content)["prompt_token_ids"]))
        body["kv_transfer_params"] = {"prompt_token_ids": ids}
        return forward(replace(request, content=json.dumps(body).encode()))

    return _plainly(hook)


def _harmony() -> Any:
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def _as_control_tokens(text: str) -> list[int]:
    return list(_harmony().encode(text, allowed_special="all"))


def _another_date(text: str) -> list[int]:
    return _as_control_tokens(re.sub(r"Current date: \S+", "Current date: 2023-01-01", text))


def _says_other_ids(request: Request, forward: Forward) -> Answer:
    """Instructions are dropped, and the ids and usage are those of the chat with them."""
    body = request.body
    if request.path != CHAT or body is None or body.get("stream"):
        return forward(request)
    whole = json.loads(forward(request).content)
    body["messages"] = _no_instructions(body["messages"])
    answer = forward(replace(request, content=json.dumps(body).encode()))

    def lie(said: Json) -> None:
        said["prompt_token_ids"] = whole.get("prompt_token_ids")
        prompt = whole["usage"]["prompt_tokens"]
        usage = said["usage"]
        usage.update(prompt_tokens=prompt, total_tokens=prompt + usage["completion_tokens"])

    return _changed(answer, lie)


def _no_reasoning_items(request: Json) -> Json:
    items = request.get("input")
    if not isinstance(items, list):
        return request
    return {**request, "input": [item for item in items if item.get("type") != "reasoning"]}


def _last_item(request: Json) -> Json:
    items = request.get("input")
    return {**request, "input": items[-1:]} if isinstance(items, list) else request


#: Longer than the cases of fixtures/api wait for an answer.
HANG_S = 30.0
PUBLISHED, STREAMS = "test_answers_are_as_published", "test_streams_are_as_published"
CHATS, CALLS = "test_chats_end_in_a_final_message", "test_tool_calls_are_right_every_time"
CHAT_SAMPLED = "test_a_chat_obeys_temperature_and_seed"
DELTAS = "test_deltas_add_up_to_the_message"
BECOMES = "test_a_chat_becomes_its_harmony"

PARTS = {
    "top": _top,
    "choice": _choice,
    "message": _message,
    "chat_entry": _chat_entry,
    "tool_call": _tool_call,
    "tool_call.function": lambda change: _tool_call(lambda call: change(call["function"])),
}


def _edit(row: Json) -> Callable[[Json], Json]:
    """Change the fields of an object as a row says."""

    def change(part: Json) -> Json:
        part.update(row.get("set", {}), **dict.fromkeys(row.get("null", ())))
        for key in row.get("drop", ()):
            part.pop(key, None)
        slices = row.get("slice", {}).items()
        part |= {key: part[key][first:end] for key, (first, end) in slices if key in part}
        if "replace" in row:
            part = json.loads(json.dumps(part).replace(*row["replace"]))
        return part

    return change


def _faults_of_fields() -> Iterator[Fault]:
    file = Path(__file__).parent / "data" / "protocol-faults.toml"
    for name, row in tomllib.loads(file.read_text("utf-8")).items():
        hook, _, part = row["of"].partition(".")
        change = _edit(row)
        changes = {hook: PARTS[part](change) if part else change}
        yield Fault(name, row["caught_by"], **changes)


FAULTS = {fault.name: fault for fault in _faults_of_fields()} | {
    fault.name: fault
    for fault in (
        # ---------- answers
        Fault(
            "the answer to the request before",
            "test_answers_belong_to_their_prompts",
            exchange=_stale,
        ),
        Fault(
            "two prompts get each other's answers",
            "test_answers_belong_to_their_prompts",
            completion=_swapped_choices,
        ),
        Fault(
            "the time in milliseconds",
            "test_answers_have_ids_and_times",
            completion=_top(lambda a: a.update(created=a["created"] * 1000)),
        ),
        Fault(
            "usage that does not add up",
            PUBLISHED,
            chat=_usage(lambda u: u.update(total_tokens=u["total_tokens"] + 1)),
        ),
        Fault("choices counted from 1", PUBLISHED, completion=_choice(_shift)),
        Fault(
            "a model without type",
            "test_models_are_as_published",
            exchange=_plainly(_models_without_object),
        ),
        # ---------- counts and parameters
        Fault(
            "usage counts one token more",
            "test_token_counts_are_exact",
            completion=_usage(_more_completion_tokens),
        ),
        Fault(
            "usage counts one prompt token less",
            "test_usage_equals_the_ids",
            completion=_usage(_fewer_prompt_tokens),
        ),
        Fault("one token too few", "test_token_counts_are_exact", request=_one_token_less),
        Fault(
            "the stop string is in the text",
            "test_a_stop_string_ends_the_text",
            exchange=_plainly(_stop_included),
        ),
        Fault(
            "another limit by default",
            "test_sixteen_tokens_by_default",
            request=lambda r: {"max_tokens": 20, **r},
        ),
        Fault("n copies of one choice", "test_each_choice_is_its_own", completion=_copied_choices),
        Fault("the temperature of a chat is ignored", CHAT_SAMPLED, request=_cold_chat),
        # ---------- log-probabilities
        Fault(
            "a NaN log-probability",
            "test_log_probabilities_are_finite",
            completion=_log_probability(float("nan")),
        ),
        Fault(
            "a positive log-probability",
            "test_log_probabilities_are_finite",
            completion=_log_probability(0.5),
        ),
        Fault(
            "probabilities that sum to more than 1",
            "test_log_probabilities_are_finite",
            completion=_choice(_overfull),
        ),
        Fault(
            "the chosen token is not among the likeliest",
            "test_log_probabilities_name_the_chosen_token",
            completion=_choice(_chosen_is_not_listed),
        ),
        Fault(
            "log-probabilities of one token less",
            "test_log_probabilities_name_the_chosen_token",
            completion=_choice(_one_entry_short),
        ),
        Fault(
            "a NaN beside the chosen token of a chat",
            "test_log_probabilities_of_a_chat_are_whole",
            chat=_chat_entry(_nan_elsewhere),
        ),
        Fault(
            "a stream without one log-probability",
            f"{STREAMS}[with log-probabilities]",
            stream=_one_log_probability_less,
        ),
        # ---------- streams
        Fault(
            "a stream that calls its limit a natural end",
            "test_streaming_equals_not_streaming",
            stream=_said_all_along,
        ),
        Fault(
            "a stream that drops a token",
            "test_streaming_equals_not_streaming",
            stream=_edit_tokens(lambda ids: ids[1:]),
        ),
        Fault(
            "a stream that doubles a token",
            "test_streaming_equals_not_streaming",
            stream=_edit_tokens(lambda ids: [*ids, ids[-1]]),
        ),
        Fault(
            "a stream that changes the order of tokens",
            "test_streaming_equals_not_streaming",
            stream=_swap("token_ids"),
        ),
        Fault(
            "a stream that changes the order of texts",
            "test_streaming_equals_not_streaming",
            stream=_swap("text"),
        ),
        Fault(
            "a stream that merges two tokens", "test_streaming_equals_not_streaming", stream=_merge
        ),
        Fault("a stream without usage", "test_streaming_equals_not_streaming", stream=_no_usage),
        Fault("a chat stream without usage", STREAMS, deltas=_no_usage),
        Fault(
            "usage that nobody asked for",
            "test_a_stream_without_usage_has_none",
            stream=_usage_everywhere,
        ),
        Fault(
            "a stream whose usage counts one more",
            "test_usage_of_a_stream_equals_the_ids",
            stream=_wrong_usage,
        ),
        Fault("no [DONE]", STREAMS, wire=lambda text: text.replace("data: [DONE]\n\n", "")),
        Fault("[DONE] twice", STREAMS, wire=lambda text: text + "data: [DONE]\n\n"),
        Fault(
            "a stream cut off, with status 200", STREAMS, wire=lambda text: text[: len(text) // 2]
        ),
        Fault("a chunk that is no JSON", STREAMS, wire=lambda text: text.replace("{", "", 1)),
        Fault(
            "another id in each chunk", STREAMS, stream=_change(1, lambda c: c.update(id="cmpl-x"))
        ),
        Fault(
            "chunks of another object",
            STREAMS,
            deltas=lambda chunks: [{**c, "object": "chat.completion"} for c in chunks],
        ),
        Fault(
            "no role", STREAMS, deltas=_change(0, lambda c: c["choices"][0]["delta"].pop("role"))
        ),
        Fault("an end that comes twice", STREAMS, stream=_finish_twice),
        Fault("an end that never comes", STREAMS, deltas=_never_finish),
        Fault(
            "the choice of another index in a chunk",
            STREAMS,
            stream=_change(1, lambda c: c["choices"][0].update(index=1)),
        ),
        Fault(
            "an error inside a stream with status 200",
            "test_an_error_of_a_stream_is_an_error",
            exchange=_on_error(_error_in_the_stream),
        ),
        # ---------- harmony
        Fault(
            "content is null now and then",
            CHATS,
            exchange=_each_fifth(_message(lambda m: m.update(content=None))),
        ),
        Fault(
            "a special token leaks into the content",
            CHATS,
            chat=_message(lambda m: m.update(content=f"{m['content']}<|return|>")),
        ),
        Fault(
            "a special token leaks into a text",
            "test_special_tokens_never_leak",
            completion=_choice(lambda c: c.update(text=c["text"] + "<|end|>")),
        ),
        Fault(
            "a reserved token leaks into the content",
            CHATS,
            chat=_message(lambda m: m.update(content=f"{m['content']}<|reserved_200013|>")),
        ),
        Fault(
            "a header leaks into the content, streamed or not",
            CHATS,
            chat=_message(lambda m: m.update(content=f"assistantfinal{m['content']}")),
            deltas=_header_in_front,
        ),
        Fault("reasoning in the content", CHATS, chat=_message(_reasoning_in_content)),
        Fault(
            "the first token is lost",
            "test_tokens_of_a_chat_are_harmony",
            chat=_choice(lambda c: c.update(token_ids=(c.get("token_ids") or [])[1:])),
        ),
        Fault(
            "another first token",
            "test_first_token_is_the_channel_token",
            chat=_chat_entry(_other_token_first),
        ),
        Fault(
            "a delta is lost", DELTAS, deltas=_drop_where(lambda c: bool(_delta(c).get("content")))
        ),
        Fault(
            "a delta of a call's arguments is lost",
            DELTAS,
            deltas=_drop_where(lambda c: bool(_delta(c).get("tool_calls"))),
        ),
        # ---------- tools
        Fault("a call that is text", CALLS, chat=_choice(_call_as_text)),
        Fault("a call that is text too", CALLS, chat=_choice(_call_in_content_too)),
        Fault(
            "tool results are dropped", "test_a_tool_result_is_answered", request=_no_tool_messages
        ),
        # ---------- what a chat becomes
        Fault(
            "system and developer messages are dropped",
            f"{BECOMES}[system]",
            request=_messages(_no_instructions),
        ),
        Fault(
            "later instructions are dropped",
            f"{BECOMES}[later-instructions]",
            request=_messages(lambda m: [*m[:1], *_no_instructions(m[1:])]),
        ),
        Fault(
            "instructions become a user's message",
            f"{BECOMES}[developer]",
            request=_each(lambda m: m.update(role="user"), role="developer"),
        ),
        Fault("earlier turns are dropped", f"{BECOMES}[turns]", request=_messages(_last_turn)),
        Fault(
            "earlier reasoning is kept",
            f"{BECOMES}[earlier-reasoning-left-out]",
            request=_each(_reasoning_told),
        ),
        Fault(
            "the reasoning before a tool's result is forgotten",
            f"{BECOMES}[tool-result-and-its-reasoning]",
            request=_each(_reasoning_forgotten),
        ),
        Fault(
            "only the last of two results is told",
            f"{BECOMES}[two-calls-and-their-results]",
            request=_messages(lambda m: m[:-2] + m[-1:]),
        ),
        Fault("another date", f"{BECOMES}[question]", exchange=_prompt_rewritten(_another_date)),
        Fault(
            "special tokens typed as text are control tokens",
            f"{BECOMES}[special-tokens-as-text]",
            exchange=_prompt_rewritten(_as_control_tokens),
        ),
        Fault(
            "special tokens in a tool's result are control tokens",
            f"{BECOMES}[special-tokens-in-a-tool-result]",
            exchange=_prompt_rewritten(_as_control_tokens),
        ),
        Fault(
            "special tokens typed as text are taken out",
            f"{BECOMES}[special-tokens-as-text]",
            request=_each(_texts(lambda text: re.sub(r"<\|\w+\|>", "", text))),
        ),
        Fault(
            "texts are normalised",
            f"{BECOMES}[unicode]",
            request=_each(_texts(lambda text: unicodedata.normalize("NFKC", text))),
        ),
        Fault("texts are stripped", f"{BECOMES}[unicode]", request=_each(_texts(str.strip))),
        Fault("only the first part of a content", f"{BECOMES}[parts]", request=_each(_first_part)),
        Fault(
            "a schema takes the place of the instructions",
            f"{BECOMES}[response-format]",
            request=_schema_as_text,
        ),
        Fault(
            "instructions are dropped, and other ids are told",
            "test_an_answer_is_to_its_chat[system]",
            exchange=_plainly(_says_other_ids),
        ),
        Fault(
            "earlier turns of a response are dropped",
            "test_a_response_is_to_its_harmony[turns]",
            request=_last_item,
        ),
        Fault(
            "the reasoning of a response before a tool's result is forgotten",
            "test_a_response_is_to_its_harmony[tool-result-and-its-reasoning]",
            request=_no_reasoning_items,
        ),
        # ---------- structured output
        # ---------- Responses
        Fault(
            "a cut response is called complete",
            "test_a_response_that_was_cut_off_says_so",
            response=_top(_completed),
        ),
        Fault(
            "a response without its reasoning",
            "test_a_response_has_reasoning_and_message",
            response=_top(_no_reasoning_item),
        ),
        Fault(
            "a function call without call_id",
            "test_a_response_calls_a_tool_and_reads_its_result",
            response=_top(_call_without_id),
        ),
        Fault(
            "events out of order",
            "test_events_of_a_response_add_up",
            events=lambda events: [events[1], events[0], *events[2:]],
        ),
        Fault(
            "the last event is missing",
            "test_events_of_a_response_add_up",
            events=lambda events: events[:-1],
        ),
        Fault(
            "a delta of a response is lost",
            "test_events_of_a_response_add_up",
            events=_drop_where(lambda event: event["type"] == "response.output_text.delta"),
        ),
        Fault(
            "a response whose stream ends without usage",
            "test_events_of_a_response_add_up",
            events=_response_at_the_end(lambda response: response.update(usage=None)),
        ),
        Fault(
            "a delta of a response's reasoning is lost",
            "test_events_of_a_response_add_up",
            events=_drop_where(lambda event: event["type"] == "response.reasoning_text.delta"),
        ),
        # ---------- errors
        Fault(
            "500 for 400",
            "test_request[negative-max-tokens]",
            exchange=_on_error(lambda _r, a: replace(a, status=500)),
        ),
        Fault(
            "200 for an error",
            "test_request[bad-json]",
            exchange=_on_error(lambda _r, a: replace(a, status=200)),
        ),
        Fault(
            "a bad value is made a good one",
            "test_request[negative-max-tokens]",
            exchange=_clamped(lambda b: {**b, "max_tokens": max(1, int(b.get("max_tokens", 16)))}),
        ),
        Fault(
            "an error without error object",
            "test_request[prompt-is-a-number]",
            exchange=_on_error(lambda _r, a: replace(a, content=b'{"detail": "no"}')),
        ),
        Fault(
            "an error as a web page",
            "test_request[messages-is-a-text]",
            exchange=_on_error(lambda _r, _a: Answer(400, "text/html", b"<h1>Bad Request</h1>")),
        ),
        Fault("a bad request hangs", "test_request[body-is-a-list]", exchange=_on_error(_hang)),
        Fault(
            "a bad request breaks the connection",
            "test_request[empty-body]",
            exchange=_on_error(lambda _r, _a: Answer(None, "", b"")),
        ),
        Fault(
            "dead after an error",
            "test_request[id-beyond-the-vocabulary]",
            exchange=_after_an_error(lambda _r, _a: Answer(503, "text/plain", b"EngineDeadError")),
        ),
        Fault(
            "another answer after an error",
            "test_request[logit-bias-is-a-list]",
            exchange=_after_an_error(
                lambda _r, a: _changed(a, _choice(lambda c: c.update(text="!!!!")))
            ),
        ),
        Fault(
            "an unknown model is served",
            "test_request[wrong-model]",
            exchange=_clamped(lambda b: {**b, "model": "canary"}),
        ),
        Fault(
            "any key will do for a chat",
            "test_request[wrong-key-chat]",
            exchange=_plainly(_any_key_of_a_chat),
        ),
        Fault("any key will do", "test_request[wrong-key]", exchange=_plainly(_any_key)),
        Fault(
            "a prompt that is too long is cut",
            "test_request[overlong-prompt]",
            exchange=_clamped(_cut_prompt),
        ),
        Fault(
            "/health says 503",
            "test_health",
            status=lambda path: 503 if path == "/health" else None,
        ),
    )
}


class FaultProxy:
    """Forwards to ``upstream``, broken by a fault that can be changed meanwhile.

    Args:
        key: the real server's, for the fault that lets anybody in.
    """

    def __init__(self, upstream: str, fault: Fault, key: str, http: httpx.Client) -> None:
        self._upstream, self._key, self._http = upstream, key, http
        #: Where it listens.
        self.base_url = ""
        self.switch(fault)

    @classmethod
    @contextmanager
    def listening(cls, upstream: str, fault: Fault, key: str = "") -> Iterator[FaultProxy]:
        """One on a free loopback port, for as long as a block lasts."""
        with httpx.Client(timeout=120.0, trust_env=False) as http:
            proxy = cls(upstream, fault, key, http)
            with serving(_handler(proxy)) as proxy.base_url:
                yield proxy

    def switch(self, fault: Fault) -> None:
        """From now on another fault."""
        self._fault = fault
        self._exchange = fault.exchange() if fault.exchange else None

    def answer(self, request: Request) -> Answer:
        """What the client gets."""
        exchange = self._exchange
        answer = exchange(request, self._forward) if exchange else self._forward(request)
        status = self._fault.status(request.path)
        return replace(answer, status=status) if status else answer

    def _forward(self, request: Request) -> Answer:
        fault, content = self._fault, request.content
        if (body := request.body) is not None and request.path in (COMPLETIONS, CHAT, RESPONSES):
            content = json.dumps(fault.request(body)).encode()
        answer = self._http.request(
            request.method,
            self._upstream + request.path,
            content=content,
            headers={
                "Content-Type": "application/json",
                "Authorization": f"Bearer {self._key}" if request.key is None else request.key,
            },
        )
        kind = answer.headers.get("content-type", "")
        changed = answer.content
        if answer.status_code == 200:
            changed = _break(fault, request.path, kind, changed)
        return Answer(answer.status_code, kind, changed)


def _break(fault: Fault, path: str, kind: str, content: bytes) -> bytes:
    if "event-stream" in kind:
        change = {COMPLETIONS: fault.stream, CHAT: fault.deltas, RESPONSES: fault.events}.get(path)
        if change is None or (change is _same and fault.wire is _same):
            return content
        return fault.wire(_stream(content.decode(), change)).encode()
    change = {COMPLETIONS: fault.completion, CHAT: fault.chat, RESPONSES: fault.response}.get(path)
    if change is None or change is _same:
        return content
    return json.dumps(change(json.loads(content))).encode()


def _stream(text: str, change: Callable[[list[Json]], list[Json]]) -> str:
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    done = "[DONE]" in data
    chunks = change([json.loads(event) for event in data if event != "[DONE]"])
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*lines, *(["data: [DONE]\n\n"] if done else [])])


def _handler(proxy: FaultProxy) -> type[JsonHandler]:
    class Handler(JsonHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            self._answer("GET", b"")

        def do_POST(self) -> None:
            self._answer("POST", self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def _answer(self, method: str, content: bytes) -> None:
            key = self.headers.get("Authorization") or ""
            answer = proxy.answer(Request(method, self.path, content, key))
            if answer.status is None:
                self.close_connection = True
            else:
                self.say(answer.content, answer.status, answer.content_type)

    return Handler
