"""A client that believes nothing: an answer is compared with the schema before it is handed on."""

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
        body = self._body("prompt", prompt, options)
        hidden = self.capabilities.can("hidden_special_tokens")
        return self._answer(
            COMPLETIONS, body, lambda a, r: invariants.of_completion(a, r, hidden=hidden)
        )

    def chat(self, messages: str | Sequence[Json], **options: Any) -> Json:
        """An answer of /v1/chat/completions, greedy unless the options say otherwise."""
        body = self._body("messages", _messages(messages), options)
        field = self.capabilities.file.reasoning_field
        return self._answer(CHAT, body, lambda a, r: invariants.of_chat(a, r, field))

    def send_chat(self, messages: str | Sequence[Json], **options: Any) -> Json:
        """A chat whose answer is only compared with the schema."""
        body = self._body("messages", _messages(messages), options)
        return self._answer(CHAT, body, lambda _a, _r: [])

    def respond(self, content: Any, **options: Any) -> Json:
        """An answer of /v1/responses, greedy unless the options say otherwise."""
        body = self._body("input", content, options)
        return self._answer(RESPONSES, body, invariants.of_response)

    def send_response(self, content: Any, **options: Any) -> Json:
        """A response whose answer is only compared with the schema."""
        body = self._body("input", content, options)
        return self._answer(RESPONSES, body, lambda _a, _r: [])

    def stream_completion(self, prompt: Any, *, usage: bool = True, **options: Any) -> Stream:
        """A stream of /v1/completions."""
        body = self._body("prompt", prompt, options)
        return self._chunks(COMPLETIONS, body, "completion chunk", usage)

    def stream_chat(
        self, messages: str | Sequence[Json], *, usage: bool = True, **options: Any
    ) -> Stream:
        """A stream of /v1/chat/completions."""
        body = self._body("messages", _messages(messages), options)
        return self._chunks(CHAT, body, "chat completion chunk", usage)

    def stream_response(self, content: Any, **options: Any) -> Stream:
        """The events of a response."""
        body = self._body("input", content, options)
        self.capabilities.require(*needed(RESPONSES, body))
        events = self._stream(RESPONSES, {**body, "stream": True})
        self.every_id.update(
            invariants.ids([event.get("response") or {} for event in events.chunks])
        )
        deviation = self.capabilities.deviation("response-events", "unpublished_event")
        _hold(
            RESPONSES,
            stream.response_violations(events, deviation.events if deviation is not None else ()),
        )
        return events

    def models(self) -> Json:
        """The list of models."""
        exchange = self.send("GET", MODELS)
        return _json_of(exchange, MODELS, "model list")

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
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        key: str | None = None,
        timeout_s: float | None = None,
    ) -> Exchange:
        """Any request; whatever comes back, or does not."""
        timeout_s = timeout_s or self.timeout_s
        return send(self.endpoint, method, path, content, key=key, timeout_s=timeout_s)

    def _body(self, name: str, value: Any, options: Json) -> Json:
        body = {"model": self.model, name: value, "temperature": 0.0, **options}
        if body["temperature"] is None:
            del body["temperature"]
        return body

    def _answer(self, path: str, body: Json, check: Callable[[Json, Json], list[str]]) -> Json:
        self.capabilities.require(*needed(path, body))
        exchange = self.send("POST", path, json.dumps(body).encode())
        answer = _json_of(exchange, path, _KINDS[path])
        self.every_id.update(invariants.ids([answer]))
        _hold(path, check(answer, body))
        return answer

    def _chunks(self, path: str, body: Json, kind: schema.Kind, usage: bool) -> Stream:
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


def together(ask: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Ask for several things, a few at once; the results are in the order of the items."""
    with ThreadPoolExecutor(_TOGETHER) as pool:
        return list(pool.map(ask, items))


def _messages(messages: str | Sequence[Json]) -> list[Json]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return list(messages)


def _json_of(exchange: Exchange, path: str, kind: schema.Kind) -> Json:
    if exchange.status != 200:
        raise Refused(path, exchange)
    answer = exchange.parsed()
    wrong = schema.violations(kind, answer)
    if wrong:
        raise Unmet(Fact(f"a {kind} as published", "; ".join(wrong), path))
    return dict(answer)


def _hold(path: str, errors: list[str]) -> None:
    if errors:
        raise Unmet(Fact("an answer as specified", "; ".join(errors[:3]), path))
