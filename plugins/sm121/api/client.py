"""A client that validates each answer against the published schema before it returns it."""

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

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MODELS = "/v1/models"
#: The timeout of a request in seconds. The requests of the correctness level take far less time.
TIMEOUT_S = 120.0
_KINDS: dict[str, schema.Kind] = {
    COMPLETIONS: "completion",
    CHAT: "chat completion",
    RESPONSES: "response",
}
#: The default number of threads of `together`.
_CONCURRENCY = 4
#: Maximum number of violations that a failure quotes.
_QUOTED = 3


class Refused(Unmet):
    """The status of an answer was not 200.

    Args:
        path: The path of the request.
        exchange: The request and its answer.
    """

    def __init__(self, path: str, exchange: Exchange) -> None:
        #: The status of the answer; None if no answer arrived.
        self.status = exchange.status
        #: The body of the answer.
        self.text = exchange.text
        super().__init__(Fact("200", exchange.observed, path))


@dataclass(frozen=True)
class Api:
    """The OpenAI-compatible API of one server.

    Requests use greedy sampling, unless the options contain a temperature. Every method that sends
    a request may raise these errors:

    - `NotRun`: the engine lacks a capability that the request needs.
    - `Refused`: the status is not 200.
    - `Unmet`: the answer does not match the schema or is inconsistent.
    """

    endpoint: server.Endpoint
    capabilities: Capabilities
    timeout_s: float = TIMEOUT_S
    #: For each id of an answer, an output item or a tool call, how often it was received.
    every_id: Counter[str] = field(default_factory=Counter)

    @property
    def model(self) -> str:
        """The served name."""
        return self.endpoint.served_name

    def complete(self, prompt: Any, **options: Any) -> Json:
        """Send a request to /v1/completions.

        Args:
            prompt: A text, token ids, or a list of either.
            **options: Further fields of the body.

        Returns:
            The answer, which matches the schema and `invariants.of_completion`.
        """
        hidden = self.capabilities.can("hidden_special_tokens")
        check = functools.partial(invariants.of_completion, hidden=hidden)
        return self._answer(COMPLETIONS, {"prompt": prompt, **options}, check)

    def chat(self, messages: str | Sequence[Json], **options: Any) -> Json:
        """Send a request to /v1/chat/completions.

        Args:
            messages: The conversation, or the text of one user message.
            **options: Further fields of the body.

        Returns:
            The answer, which matches the schema and `invariants.of_chat`.
        """
        reasoning_field = self.capabilities.file.reasoning_field
        check = functools.partial(invariants.of_chat, reasoning_field=reasoning_field)
        return self._answer(CHAT, {"messages": _as_messages(messages), **options}, check)

    def send_chat(self, messages: str | Sequence[Json], **options: Any) -> Json:
        """Send a request to /v1/chat/completions and only validate the schema of its answer.

        Args:
            messages: The conversation, or the text of one user message.
            **options: Further fields of the body.

        Returns:
            The answer.
        """
        return self._answer(CHAT, {"messages": _as_messages(messages), **options})

    def respond(self, content: Any, **options: Any) -> Json:
        """Send a request to /v1/responses.

        Args:
            content: The input: a text or a list of items.
            **options: Further fields of the body.

        Returns:
            The answer, which matches the schema and `invariants.of_response`.
        """
        return self._answer(RESPONSES, {"input": content, **options}, invariants.of_response)

    def send_response(self, content: Any, **options: Any) -> Json:
        """Send a request to /v1/responses and only validate the schema of its answer.

        Args:
            content: The input: a text or a list of items.
            **options: Further fields of the body.

        Returns:
            The answer.
        """
        return self._answer(RESPONSES, {"input": content, **options})

    def stream_completion(self, prompt: Any, *, usage: bool = True, **options: Any) -> Stream:
        """Send a streaming request to /v1/completions.

        Args:
            prompt: A text, token ids, or a list of either.
            usage: Whether to request usage in the last chunk, if the engine can send it.
            **options: Further fields of the body.

        Returns:
            The chunks, which match the schema and the published order.
        """
        body = self._body({"prompt": prompt, **options})
        return self._chunks(COMPLETIONS, body, "completion chunk", usage=usage)

    def stream_chat(self, messages: str | Sequence[Json], **options: Any) -> Stream:
        """Send a streaming request to /v1/chat/completions, with usage if the engine can send it.

        Args:
            messages: The conversation, or the text of one user message.
            **options: Further fields of the body.

        Returns:
            The chunks, which match the schema and the published order.
        """
        body = self._body({"messages": _as_messages(messages), **options})
        return self._chunks(CHAT, body, "chat completion chunk", usage=True)

    def stream_response(self, content: Any, **options: Any) -> Stream:
        """Send a streaming request to /v1/responses.

        Args:
            content: The input: a text or a list of items.
            **options: Further fields of the body.

        Returns:
            The events, which match the schema and the published order. Unpublished events that the
            engine is known to send are tolerated.
        """
        body = self._body({"input": content, **options})
        self.capabilities.require(*needed(RESPONSES, body))
        events = self._stream(RESPONSES, {**body, "stream": True})
        responses = [event.get("response") or {} for event in events.chunks]
        self.every_id.update(invariants.ids(responses))
        deviation = self.capabilities.deviation("response-events", "unpublished_event")
        unpublished = deviation.events if deviation is not None else ()
        _require_no_errors(RESPONSES, stream.response_violations(events, unpublished))
        return events

    def models(self) -> Json:
        """Return the answer of /v1/models."""
        return _valid_answer(self.send("GET", MODELS), MODELS, "model list")

    def context_length(self) -> int:
        """Return the maximum length of a sequence in tokens.

        Raises:
            NotRun: The server's list of models does not contain this length.
        """
        length = server.context_of(self.models(), self.model)
        if length is None:
            raise verdict.NotRun("the server does not report its context length (/v1/models)")
        return length

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, as the server tokenises a prompt.

        Args:
            text: The text. It is sent as the prompt of a completion with one token.

        Raises:
            NotRun: The engine does not send token ids.
        """
        answer = self.complete(text, max_tokens=1, return_token_ids=True)
        return list(answer["choices"][0]["prompt_token_ids"])

    def send(
        self, method: str, path: str, content: bytes | None = None, **options: Any
    ) -> Exchange:
        """Send a request, without validating the request or the answer.

        Args:
            method: The HTTP method.
            path: The path.
            content: The body; None for no body.
            **options: ``key`` (another API key) and ``timeout_s``.

        Returns:
            The answer, or the reason why no answer arrived.
        """
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
        """Send a request and validate the answer. `check` returns further errors of the answer."""
        body = self._body(fields)
        self.capabilities.require(*needed(path, body))
        exchange = self.send("POST", path, json.dumps(body).encode())
        answer = _valid_answer(exchange, path, _KINDS[path])
        self.every_id.update(invariants.ids([answer]))
        if check is not None:
            _require_no_errors(path, check(answer, body))
        return answer

    def _chunks(self, path: str, body: Json, kind: schema.Kind, *, usage: bool) -> Stream:
        """Send a streaming request and validate its chunks."""
        usage = usage and self.capabilities.can("stream_usage")
        if usage:
            body = {**body, "stream_options": {"include_usage": True}}
        self.capabilities.require(*needed(path, body))
        chunks = self._stream(path, {**body, "stream": True})
        self.every_id.update(invariants.ids(chunks.chunks))
        _require_no_errors(path, stream.violations(chunks, kind, usage=usage))
        return chunks

    def _stream(self, path: str, body: Json) -> Stream:
        exchange = self.send("POST", path, json.dumps(body).encode())
        if exchange.status != 200:
            raise Refused(path, exchange)
        return stream.parse_stream(exchange.content_type, exchange.content)


def together(
    ask: Callable[[_Item], _Result], items: Sequence[_Item], *, at_once: int = _CONCURRENCY
) -> list[_Result]:
    """Call a function for several items in concurrent threads.

    Args:
        ask: The function, which sends the requests of one item.
        items: The arguments of the calls.
        at_once: The number of threads.

    Returns:
        The results, in the order of the items.
    """
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, items))


def _as_messages(messages: str | Sequence[Json]) -> list[Json]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return list(messages)


def _valid_answer(exchange: Exchange, path: str, kind: schema.Kind) -> Json:
    """Return the JSON of an answer; raise Refused or Unmet if the answer is not valid."""
    if exchange.status != 200:
        raise Refused(path, exchange)
    answer = exchange.parsed()
    errors = schema.violations(kind, answer)
    if errors:
        raise Unmet(Fact(f"a {kind} as published", "; ".join(errors), path))
    return dict(answer)


def _require_no_errors(path: str, errors: list[str]) -> None:
    if errors:
        raise Unmet(Fact("an answer as specified", "; ".join(errors[:_QUOTED]), path))
