"""The changes that the faults of ``data/lies.toml`` make, in addition to those of the proxy.

Many of them are intermittent."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from meta_tests.faults.fault_changes import Json, top
from meta_tests.faults.fault_exchanges import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    Answer,
    Exchange,
    Forward,
    Request,
)
from meta_tests.two_steps import in_two_steps

Chunks = Callable[[list[Json]], list[Json]]
Text = Callable[[str], str]


def shifted_logprobs(listed: Json) -> None:
    for key in {"token_logprobs", "top_logprobs"} & listed.keys():
        listed[key] = [*listed[key][:1], *listed[key][:0:-1]]
    entries = listed.get("content") or []
    for entry, value in zip(entries, [entry["logprob"] for entry in entries[::-1]], strict=True):
        entry["logprob"] = value


@in_two_steps
def scaled_logprobs(listed: Json, factor: float) -> None:
    values = listed.get("token_logprobs") or []
    tops = listed.get("top_logprobs") or []
    listed["token_logprobs"] = [value and value * factor for value in values]
    listed["top_logprobs"] = [top and {k: v * factor for k, v in top.items()} for top in tops]


@in_two_steps
def rows_of_ids(request: Json, change: Callable[[list[int]], list[int]]) -> Json:
    ids = request.get("prompt")
    of_ids = isinstance(ids, list) and all(isinstance(token, int) for token in ids)
    return {**request, "prompt": change(ids)} if of_ids and ids else request


def ends_of(length: int, count: int) -> Callable[[list[int]], list[int]]:
    return lambda ids: [*ids[:count], *ids[-count:]] if len(ids) >= length else ids


@in_two_steps
def biased(request: Json, low: float, high: float) -> Json:
    bias = request.get("logit_bias") or {}
    if isinstance(bias, dict) and bias:
        request["logit_bias"] = {k: v for k, v in bias.items() if low <= v <= high}
    return request


def response_texts(change: Text) -> Callable[[Json], Json]:
    def apply(answer: Json) -> None:
        for item in answer["output"]:
            for part in item.get("content") or () if item["type"] == "message" else ():
                part["text"] = change(part["text"])

    return top(apply)


def _choices_of(chunks: list[Json]) -> list[Json]:
    choices = []
    for chunk in chunks:
        choices += chunk.get("choices", [])
    return choices


def other_fields(fields: Json) -> Chunks:
    return lambda chunks: [chunk | fields if n else chunk for n, chunk in enumerate(chunks)]


@in_two_steps
def texts_of_stream(chunks: list[Json], change: Text, fewest: int = 0) -> list[Json]:
    tokens = 0
    for part in _choices_of(chunks):
        tokens += len(part.get("token_ids") or [0])
        piece = part.get("delta", part)
        if tokens > fewest:
            piece |= {k: change(piece[k]) for k in ("text", "content") if piece.get(k)}
    return chunks


def last_text_lost(chunks: list[Json]) -> list[Json]:
    for part in _choices_of(chunks[::-1]):
        piece = part.get("delta", part)
        if keys := [key for key in ("text", "content") if piece.get(key)]:
            piece[keys[0]] = ""
            break
    return chunks


def reasoning_of_deltas(chunks: list[Json]) -> list[Json]:
    for part in _choices_of(chunks):
        part["delta"] |= {"content": part["delta"].get("reasoning") or part["delta"].get("content")}
    return chunks


@dataclass
class Traffic:
    """The numbers and kinds of earlier and running requests, and the latest answer of each kind."""

    requests: int = 0
    under_way: int = 0
    bodies: set[str] = field(default_factory=set)
    latest: dict[tuple[str, bool], Answer] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


When = Callable[[Traffic, Request], bool]
Change = Callable[[Answer, Answer], Answer]


def sometimes(when: When, change: Change, fields: Json | None = None) -> Callable[[], Exchange]:
    """An intermittent fault that changes an answer or the fields of a request.

    The new answer is made from the original one and the latest answer of the same kind. ``drop``
    names a field that is dropped."""

    def make() -> Exchange:
        traffic = Traffic()

        def hook(request: Request, forward: Forward) -> Answer:
            body = request.body
            if request.path not in (COMPLETIONS, CHAT, RESPONSES) or body is None:
                return forward(request)
            with traffic.lock:
                traffic.requests += 1
                traffic.under_way += 1
                struck = when(traffic, request)
                traffic.bodies.add(_unsalted(request))
            if struck and fields:
                changed = body | fields
                changed.pop(changed.pop("drop", ""), None)
                request = replace(request, content=json.dumps(changed).encode())
            answer = forward(request)
            kind = request.path, bool(body.get("stream"))
            with traffic.lock:
                traffic.under_way -= 1
                before = traffic.latest.get(kind, answer)
                traffic.latest[kind] = answer
            return change(answer, before) if struck and answer.status == 200 else answer

        return hook

    return make


def crowd(fewest: int, path: str = "") -> When:
    return lambda traffic, request: traffic.under_way >= fewest and path in request.path


def every(number: int, path: str = "") -> When:
    return lambda traffic, request: traffic.requests % number == 0 and path in request.path


def _unsalted(request: Request) -> str:
    return json.dumps((request.body or {}) | {"cache_salt": None}, sort_keys=True)


def failing(status: int) -> Change:
    error = b'{"error": {"message": "no", "type": "server_error"}}'
    return lambda _answer, _before: Answer(status, "application/json", error)


def exchanged(old: str, new: str) -> Change:
    """Replace a text in any place of an answer."""
    return lambda answer, _before: replace(
        answer, content=answer.content.replace(old.encode(), new.encode())
    )


#: Changes that are a single expression.
SMALL: dict[str, Callable[..., Any]] = {
    "part_of": lambda first, end=None: lambda row: row[first:end] or row,
    "swapped": lambda ids: [*ids[:2][::-1], *ids[2:]],
    "ascii_alone": lambda text: text.encode("ascii", "replace").decode(),
    "replaced": lambda old, new: lambda text: text.replace(old, new),
    "no_message": lambda _request, answer: replace(answer, content=b'{"error": {}}'),
    "first_text_lost": lambda chunks: last_text_lost(chunks[::-1])[::-1],
    "after": lambda number: lambda traffic, _request: traffic.requests > number,
    "again": lambda traffic, request: _unsalted(request) in traffic.bodies,
    "unchanged": lambda answer, _before: answer,
    "neighbour": lambda _answer, before: before,
    "late": lambda seconds: lambda answer, _before: time.sleep(seconds) or answer,
}
