"""A client that believes nothing: an answer is compared with the schema before it is handed on."""

import functools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sm121.api import invariants, schema, stream
from sm121.api.stream import Stream
from sm121.client.exchange import Exchange, send
from sm121.core import server, verdict
from sm121.core.unmet import Fact, Unmet
from sm121.engines.capabilities import Capabilities, needed

Json = dict[str, Any]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MODELS = "/v1/models"
#: A request that takes longer than this hangs, for the sizes that the correctness level asks for.
TIMEOUT_S = 120.0
_KINDS: dict[str, schema.Kind] = {
    COMPLETIONS: "completion",
    CHAT: "chat completion",
    RESPONSES: "response",
}
_TOGETHER = 4


class Refused(Unmet):
    """The server answered with another status than 200. ``text`` is what it wrote."""

    def __init__(self, path: str, exchange: Exchange) -> None:
        self.status, self.text = exchange.status, exchange.text
        super().__init__(Fact("200", exchange.observed, path))


@dataclass(frozen=True)
class Api:
    """The API of one server. The methods that are named for an answer return its JSON, valid and
    consistent. Raises NotRun: the server cannot do what a request needs; Unmet: it is not."""

    endpoint: server.Endpoint
    capabilities: Capabilities
    timeout_s: float = TIMEOUT_S
    #: The ids of all answers, of their items and of their calls.
    every_id: Counter[str] = field(default_factory=Counter)

    @property
    def model(self) -> str:
        """The served name."""
        return self.endpoint.served_name

    def complete(self, prompt: Any, **options: Any) -> Json:
        """An answer of /v1/completions, greedy unless the options say otherwise."""
        hidden = self.capabilities.can("hidden_special_tokens")
        check = functools.partial(invariants.of_completion, hidden=hidden)
        return self._answer(COMPLETIONS, {"prompt": prompt, **options}, check)

    def chat(self, messages: str | Sequence[Json], **options: Any) -> Json:
        """An answer of /v1/chat/completions, greedy unless the options say otherwise."""
        field = self.capabilities.file.reasoning_field
        check = functools.partial(invariants.of_chat, reasoning_field=field)
        return self._answer(CHAT, {"messages": _messages(messages), **options}, check)

    def send_chat(self, messages: str | Sequence[Json], **options: Any) -> Json:
        """A chat whose answer is only compared with the schema."""
        return self._answer(CHAT, {"messages": _messages(messages), **options})

    def respond(self, content: Any, **options: Any) -> Json:
        """An answer of /v1/responses, greedy unless the options say otherwise."""
        return self._answer(RESPONSES, {"input": content, **options}, invariants.of_response)

    def send_response(self, content: Any, **options: Any) -> Json:
        """A response whose answer is only compared with the schema."""
        return self._answer(RESPONSES, {"input": content, **options})

    def stream_completion(self, prompt: Any, *, usage: bool = True, **options: Any) -> Stream:
        """A stream of /v1/completions."""
        body = self._body({"prompt": prompt, **options})
        return self._chunks(COMPLETIONS, body, "completion chunk", usage=usage)

    def stream_chat(self, messages: str | Sequence[Json], **options: Any) -> Stream:
        """A stream of /v1/chat/completions."""
        body = self._body({"messages": _messages(messages), **options})
        return self._chunks(CHAT, body, "chat completion chunk", usage=True)

    def stream_response(self, content: Any, **options: Any) -> Stream:
        """The events of a response."""
        body = self._body({"input": content, **options})
        self.capabilities.require(*needed(RESPONSES, body))
        events = self._stream(RESPONSES, {**body, "stream": True})
        self.every_id.update(invariants.ids([e.get("response") or {} for e in events.chunks]))
        deviation = self.capabilities.deviation("response-events", "unpublished_event")
        unpublished = deviation.events if deviation is not None else ()
        _hold(RESPONSES, stream.response_violations(events, unpublished))
        return events

    def models(self) -> Json:
        """The list of models."""
        return _json_of(self.send("GET", MODELS), MODELS, "model list")

    def context_length(self) -> int:
        """How many tokens a sequence may have; `NotRun` where the list of models does not say."""
        if (length := server.context_of(self.models(), self.model)) is None:
            raise verdict.NotRun("the server does not say how long a sequence may be (/v1/models)")
        return length

    def ids(self, text: str) -> list[int]:
        """The token ids of a text, from the server's own prompt."""
        answer = self.complete(text, max_tokens=1, return_token_ids=True)
        return list(answer["choices"][0]["prompt_token_ids"])

    def send(
        self, method: str, path: str, content: bytes | None = None, **options: Any
    ) -> Exchange:
        """Any request; whatever comes back, or does not. `options`: ``key`` and ``timeout_s``."""
        options = {"timeout_s": self.timeout_s, **options}
        return send(self.endpoint, method, path, content, **options)

    def _body(self, fields: Json) -> Json:
        body = {"model": self.model, "temperature": 0.0, **fields}
        if body["temperature"] is None:
            del body["temperature"]
        return body

    def _answer(
        self, path: str, fields: Json, check: Callable[[Json, Json], list[str]] | None = None
    ) -> Json:
        body = self._body(fields)
        self.capabilities.require(*needed(path, body))
        exchange = self.send("POST", path, json.dumps(body).encode())
        answer = _json_of(exchange, path, _KINDS[path])
        self.every_id.update(invariants.ids([answer]))
        _hold(path, check(answer, body) if check is not None else [])
        return answer

    def _chunks(self, path: str, body: Json, kind: schema.Kind, *, usage: bool) -> Stream:
        usage = usage and self.capabilities.can("stream_usage")
        if usage:
            body = {**body, "stream_options": {"include_usage": True}}
        self.capabilities.require(*needed(path, body))
        chunks = self._stream(path, {**body, "stream": True})
        self.every_id.update(invariants.ids(chunks.chunks))
        _hold(path, stream.violations(chunks, kind, usage=usage))
        return chunks

    def _stream(self, path: str, body: Json) -> Stream:
        exchange = self.send("POST", path, json.dumps(body).encode())
        if exchange.status != 200:
            raise Refused(path, exchange)
        return stream.read(exchange.content_type, exchange.content)


def together(
    ask: Callable[[_Item], _Result], items: Sequence[_Item], *, at_once: int = _TOGETHER
) -> list[_Result]:
    """Ask for several things, a few at once; the results are in the order of the items."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, items))


def _messages(messages: str | Sequence[Json]) -> list[Json]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _json_of(exchange: Exchange, path: str, kind: schema.Kind) -> Json:
    if exchange.status != 200:
        raise Refused(path, exchange)
    answer = exchange.parsed()
    if wrong := schema.violations(kind, answer):
        raise Unmet(Fact(f"a {kind} as published", "; ".join(wrong), path))
    return dict(answer)


def _hold(path: str, errors: list[str]) -> None:
    if errors:
        raise Unmet(Fact("an answer as specified", "; ".join(errors[:3]), path))
