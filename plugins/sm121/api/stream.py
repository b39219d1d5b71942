"""Validate streams of server-sent events, and join their chunks to an answer."""

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sm121.api import schema
from sm121.client.sse import DONE, EventParser

Json = dict[str, Any]
_DONE = DONE.decode()
#: After more than this number of errors, no further errors are collected.
_MOST = 3
_LAST_RESPONSE_EVENTS = ("response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True)
class Stream:
    """The body of a streamed answer."""

    content_type: str
    #: The data of the events, in their order.
    events: tuple[str, ...]
    #: The events that are JSON objects.
    chunks: tuple[Json, ...]
    #: One line for each violation of the format of server-sent events.
    malformed: tuple[str, ...]


def parse_stream(content_type: str, content: bytes) -> Stream:
    """Parse the body of a streamed answer.

    Args:
        content_type: The header of the answer.
        content: The body.

    Returns:
        The events and chunks. Violations of the format are in `Stream.malformed`.
    """
    parser = EventParser()
    # Clients drop a last event that is not followed by an empty line. It is parsed here
    # nevertheless.
    blocks = [*parser.feed(content), *parser.feed(b"\n\n")]
    events = tuple(data.decode("utf-8", "replace") for data in blocks)
    malformed = [
        f"a line that is not an event: {line.decode('utf-8', 'replace')[:80]!r}"
        for line in parser.malformed
    ]
    chunks = []
    for data in events:
        if data == _DONE:
            continue
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            malformed.append(f"data that is not JSON: {data[:80]!r}")
            continue
        if isinstance(chunk, dict):
            chunks.append(chunk)
        else:
            malformed.append(f"data that is not a JSON object: {data[:80]!r}")
    return Stream(content_type, events, tuple(chunks), tuple(malformed))


def violations(stream: Stream, kind: schema.Kind, *, usage: bool) -> list[str]:
    """Validate a stream of completion or chat completion chunks.

    Args:
        stream: The stream.
        kind: The kind of its chunks.
        usage: Whether the request contained ``include_usage``.

    Returns:
        One line for each violation; empty if the stream is as published. Relations between chunks
        are checked only if each chunk is valid.
    """
    errors = _form_errors(stream)
    if stream.events.count(_DONE) != 1 or stream.events[-1] != _DONE:
        errors.append("[DONE]: expected once, at the end")
    for chunk in stream.chunks:
        if chunk.get("error") is not None:
            errors.append(f"an error inside the stream: {chunk['error']}")
        else:
            in_chunk = schema.violations(kind, chunk)
            if in_chunk:
                errors.append(f"chunk {json.dumps(chunk)[:120]}: {in_chunk[0]}")
        if len(errors) > _MOST:
            return errors
    if errors:
        return errors
    errors += _identity_errors(stream)
    errors += _choice_errors(stream, kind)
    if usage:
        errors += _usage_errors(stream)
    return errors


def _form_errors(stream: Stream) -> list[str]:
    errors = list(stream.malformed)
    if not stream.content_type.startswith("text/event-stream"):
        errors.append(f"content type {stream.content_type!r} in place of text/event-stream")
    if not stream.chunks:
        errors.append("no chunk")
    return errors


def _identity_errors(stream: Stream) -> list[str]:
    """Require that all chunks have the same id, model and object."""
    errors = []
    for key in ("id", "model", "object"):
        values = {str(chunk.get(key)) for chunk in stream.chunks}
        if len(values) != 1:
            # Ids differ in each run, so they are not in the message.
            examples = "" if key == "id" else f": {sorted(values)[:3]}"
            errors.append(f"chunks with different values of {key}{examples}")
    return errors


def _choice_errors(stream: Stream, kind: schema.Kind) -> list[str]:
    """Require that each choice begins with its role, ends once, and then does not continue."""
    errors = []
    finished: Counter[int] = Counter()
    begun: set[int] = set()
    for number, chunk in enumerate(stream.chunks):
        for choice in chunk["choices"]:
            index = choice["index"]
            if index in finished and (choice.get("text") or choice.get("delta")):
                errors.append(
                    f"chunk {number} continues choice {index}, which had already finished"
                )
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
        errors.append(f"choices with index {sorted(begun)}: expected all numbers from 0 on")
    return errors


def _usage_errors(stream: Stream) -> list[str]:
    """Require that only the last chunk has usage, and that it has no choices."""
    with_usage = [index for index, chunk in enumerate(stream.chunks) if chunk.get("usage")]
    if with_usage != [len(stream.chunks) - 1]:
        return [f"usage in chunks {with_usage[:4]}, not only in the last chunk"]
    if stream.chunks[-1]["choices"]:
        return ["choices in the chunk with the usage"]
    return []


def completion_of(stream: Stream) -> list[Json]:
    """Join the chunks of a completion.

    Args:
        stream: A valid stream of completion chunks.

    Returns:
        The choices in the order of their index, with ``text``, ``token_ids`` and
        ``finish_reason``.
    """
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
    """Return the log-probabilities of a streamed completion's tokens, over all choices.

    llama-server sends them in the format of a chat (``logprobs.content``); both formats are read.

    Args:
        stream: A valid stream of completion chunks.

    Returns:
        The values in natural-log units, in the order of arrival; None where the engine sent null.
    """
    values: list[float | None] = []
    for chunk in stream.chunks:
        for choice in chunk["choices"]:
            entries = choice.get("logprobs")
            if not isinstance(entries, Mapping):
                continue
            values += entries.get("token_logprobs") or []
            for entry in entries.get("content") or []:
                values.append(entry.get("logprob") if entry else None)
    return values


def message_of(stream: Stream, reasoning_field: str | None) -> Json:
    """Join the deltas of a chat.

    Args:
        stream: A valid stream of chat completion chunks with one choice.
        reasoning_field: The engine's field for reasoning; None if it has none.

    Returns:
        ``role``, ``content``, ``reasoning``, ``finish_reason`` and ``tool_calls``; a call has
        ``id``, ``name`` and ``arguments``.
    """
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
    """Validate the events of a response.

    Args:
        stream: The stream.
        unpublished: Unpublished types of events that this engine is known to send.

    Returns:
        One line for each violation; empty if the events are as published. Relations between events
        are checked only if each event is valid.
    """
    errors = _form_errors(stream)
    for event in stream.chunks:
        if event.get("type") in unpublished:
            continue
        in_event = schema.violations("response event", event)
        if in_event:
            errors.append(f"event {event.get('type')}: {in_event[0]}")
        if len(errors) > _MOST:
            return errors
    if errors:
        return errors
    numbers = [event["sequence_number"] for event in stream.chunks]
    if numbers != sorted(set(numbers)):
        errors.append(f"sequence numbers do not rise: {numbers[:12]}")
    first = stream.chunks[0]["type"]
    if first != "response.created":
        errors.append(f"the first event is {first} in place of response.created")
    last = stream.chunks[-1]["type"]
    if last not in _LAST_RESPONSE_EVENTS:
        errors.append(f"the last event is {last} in place of response.completed")
    return errors + _item_errors(stream)


def _item_errors(stream: Stream) -> list[str]:
    """Require that each event of an item is between the item's ``added`` and ``done`` events."""
    errors = []
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
        errors.append(f"items {sorted(open_items)} were begun but not completed")
    return errors


def response_deltas(stream: Stream, kind: str) -> str | None:
    """Join the deltas of a response.

    Args:
        stream: The valid events of a response.
        kind: ``output_text`` or ``reasoning_text``.

    Returns:
        The text; None if there is no delta of this kind.
    """
    name = f"response.{kind}.delta"
    deltas = [event["delta"] for event in stream.chunks if event["type"] == name]
    if not deltas:
        return None
    return "".join(deltas)
