"""Streams: server-sent events, compared with the published order, and put together again."""

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sm121.api import schema
from sm121.client.sse import DONE, EventParser

Json = dict[str, Any]
_DONE = DONE.decode()


@dataclass(frozen=True)
class Stream:
    """What came: the data of each event, in order, and those that are JSON objects."""

    content_type: str
    events: tuple[str, ...]
    chunks: tuple[Json, ...]
    #: What is wrong already with the form of the events.
    malformed: tuple[str, ...]


def read(content_type: str, content: bytes) -> Stream:
    """A stream from the body of an answer."""
    parser = EventParser()
    # The end of the body ends its last event too: what a client would drop is judged all the same.
    blocks = [*parser.feed(content), *parser.feed(b"\n\n")]
    events = tuple(data.decode("utf-8", "replace") for data in blocks)
    malformed = [
        f"a line that is no event: {line.decode('utf-8', 'replace')[:80]!r}"
        for line in parser.malformed
    ]
    chunks = []
    for data in (data for data in events if data != _DONE):
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            malformed.append(f"data that is not JSON: {data[:80]!r}")
            continue
        if isinstance(chunk, dict):
            chunks.append(chunk)
        else:
            malformed.append(f"data that is no JSON object: {data[:80]!r}")
    return Stream(content_type, events, tuple(chunks), tuple(malformed))


def violations(stream: Stream, kind: schema.Kind, *, usage: bool) -> list[str]:
    """What is not as published in a stream of completion or chat completion chunks. `usage`: it was
    asked for with ``include_usage``."""
    errors = _form(stream)
    if stream.events.count(_DONE) != 1 or stream.events[-1] != _DONE:
        errors.append("[DONE] is not once, at the end")
    for chunk in stream.chunks:
        if chunk.get("error") is not None:
            errors.append(f"an error inside the stream: {chunk['error']}")
        else:
            wrong = schema.violations(kind, chunk)
            errors += [f"chunk {json.dumps(chunk)[:120]}: {wrong[0]}"] if wrong else []
        if len(errors) > 3:
            return errors
    return errors or _between(stream, kind, usage)


def _form(stream: Stream) -> list[str]:
    errors = list(stream.malformed)
    if not stream.content_type.startswith("text/event-stream"):
        errors.append(f"content type {stream.content_type!r} in place of text/event-stream")
    if not stream.chunks:
        errors.append("not one chunk")
    return errors


def _between(stream: Stream, kind: schema.Kind, usage: bool) -> list[str]:
    """What is wrong between chunks of which each is right."""
    errors = []
    for key in ("id", "model", "object"):
        values = {str(chunk.get(key)) for chunk in stream.chunks}
        if len(values) != 1:
            examples = "" if key == "id" else f": {sorted(values)[:3]}"
            errors.append(f"not one {key} in every chunk{examples}")
    finished: Counter[int] = Counter()
    begun: set[int] = set()
    for number, chunk in enumerate(stream.chunks):
        for choice in chunk["choices"]:
            index = choice["index"]
            if index in finished and (choice.get("text") or choice.get("delta")):
                errors.append(f"chunk {number} goes on with choice {index}, which had finished")
            first = kind == "chat completion chunk" and index not in begun
            if first and choice["delta"].get("role") != "assistant":
                errors.append(f"the first delta of choice {index} has no role 'assistant'")
            begun.add(index)
            if choice.get("finish_reason") is not None:
                finished[index] += 1
    for index in sorted(begun):
        if finished[index] != 1:
            errors.append(f"{finished[index]} finish_reasons of choice {index}")
    if begun != set(range(len(begun))):
        errors.append(f"choices with index {sorted(begun)}, not from 0 on")
    having = [index for index, chunk in enumerate(stream.chunks) if chunk.get("usage")]
    if usage and having != [len(stream.chunks) - 1]:
        errors.append(f"usage not in the last chunk alone, but in chunks {having[:4]}")
    elif usage and stream.chunks[-1]["choices"]:
        errors.append("choices in the chunk with the usage")
    return errors


def completion_of(stream: Stream) -> list[Json]:
    """The choices that the chunks of a completion add up to: text, token ids, finish_reason."""
    choices: dict[int, Json] = {}
    for chunk in stream.chunks:
        for choice in chunk["choices"]:
            empty: Json = {"text": "", "token_ids": [], "finish_reason": None}
            whole = choices.setdefault(choice["index"], empty)
            whole["text"] += choice["text"]
            whole["token_ids"] += choice.get("token_ids") or []
            whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def log_probabilities(stream: Stream) -> list[float | None]:
    """Of the tokens of a completion, from all chunks; in a chat's form too (llama-server)."""
    values: list[float | None] = []
    for chunk in stream.chunks:
        for choice in chunk["choices"]:
            entries = choice.get("logprobs") or {}
            values += entries.get("token_logprobs") or []
            values += [entry.get("logprob") for entry in entries.get("content") or []]
    return values


def message_of(stream: Stream, reasoning_field: str | None) -> Json:
    """The message and finish_reason that the deltas of a chat add up to (choice 0)."""
    whole: Json = {"role": None, "content": None, "reasoning": None, "finish_reason": None}
    calls: dict[int, Json] = {}
    for chunk in stream.chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            whole["role"] = whole["role"] or delta.get("role")
            for key, name in (("content", "content"), ("reasoning", reasoning_field)):
                if name and delta.get(name):
                    whole[key] = (whole[key] or "") + delta[name]
            for part in delta.get("tool_calls") or []:
                call = calls.setdefault(part["index"], {"id": None, "name": "", "arguments": ""})
                call["id"] = call["id"] or part.get("id")
                function = part.get("function") or {}
                call["name"] += function.get("name") or ""
                call["arguments"] += function.get("arguments") or ""
            whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]
    whole["tool_calls"] = [calls[index] for index in sorted(calls)]
    return whole


def response_violations(stream: Stream, unpublished: Collection[str]) -> list[str]:
    """What is not as published in the events of a response. `unpublished`: types of events that are
    not published, and are known of this engine."""
    errors = _form(stream)
    for event in stream.chunks:
        if event.get("type") in unpublished:
            continue
        if wrong := schema.violations("response event", event):
            errors.append(f"event {event.get('type')}: {wrong[0]}")
        if len(errors) > 3:
            return errors
    if errors:
        return errors
    types = [event["type"] for event in stream.chunks]
    numbers = [event["sequence_number"] for event in stream.chunks]
    if numbers != sorted(set(numbers)):
        errors.append(f"sequence numbers do not rise: {numbers[:12]}")
    if types[0] != "response.created":
        errors.append(f"the first event is {types[0]} in place of response.created")
    if types[-1] not in ("response.completed", "response.incomplete", "response.failed"):
        errors.append(f"the last event is {types[-1]} in place of response.completed")
    open_items: set[int] = set()
    for event in stream.chunks:
        if event["type"] == "response.output_item.added":
            open_items.add(event["output_index"])
        elif event["type"] == "response.output_item.done":
            open_items.discard(event["output_index"])
        elif "output_index" in event and event["output_index"] not in open_items:
            errors.append(f"{event['type']} outside its item {event['output_index']}")
            break
    if open_items:
        errors.append(f"items {sorted(open_items)} were begun and not done")
    return errors


def response_deltas(stream: Stream, kind: str) -> str | None:
    """What the deltas of a response's ``output_text``, or its ``reasoning_text``, add up to; None
    where a server sends none of it."""
    deltas = [e["delta"] for e in stream.chunks if e["type"] == f"response.{kind}.delta"]
    return "".join(deltas) if deltas else None
