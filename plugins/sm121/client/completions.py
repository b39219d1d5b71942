"""Request greedy completions with token ids and log-probabilities (OpenAI-compatible API)."""

import json
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from sm121.client.completion_json import Completion, Position, Prompt, parse
from sm121.client.completion_rules import SPECIAL_TOKEN, malformed
from sm121.client.sse import DONE, EventParser
from sm121.core.errors import Sm121Error
from sm121.core.server import Endpoint, Server, require_context
from sm121.core.unmet import Fact, Unmet, with_subject
from sm121.core.verdict import NotRun
from sm121.core.vocabulary import Vocabulary, of_server

#: The fields of OpenAI's own /v1/completions. The others are vLLM's; most engines accept them.
_OPENAI_FIELDS = frozenset({"model", "prompt", "max_tokens", "temperature", "logprobs"})
#: The HTTP statuses with which engines refuse unknown fields.
_NOT_UNDERSTOOD = (400, 404, 422)
#: Maximum number of characters that a message quotes from a prompt.
_SHOWN = 60
#: Maximum number of characters that a message quotes from a refusal.
_LONGEST_BODY = 300
#: The field of /detokenize's answer that contains the text, in vLLM, llama-server and SGLang.
_TEXT_FIELDS = ("prompt", "content", "text")
_Result = TypeVar("_Result")


class Refused(Sm121Error):
    """The server answered a request with an error.

    Args:
        status: The status of the answer.
        body: The body of the answer.
    """

    def __init__(self, status: int, body: str) -> None:
        #: The status of the answer.
        self.status = status
        super().__init__(f"the server answered {status}: {body[:_LONGEST_BODY]}")


@dataclass(frozen=True)
class Request:
    """A greedy request to /v1/completions."""

    prompt: Prompt
    #: The maximum number of generated tokens.
    tokens: int
    #: How many of the likeliest tokens to request for each generated token. With 0, no
    #: log-probabilities are requested.
    top: int = 5
    #: Whether to request the log-probabilities of the prompt, which must then be ids.
    prompt_log_probabilities: bool = False
    #: How many of the likeliest tokens to request for each prompt token.
    prompt_top: int = 0
    #: Requests share the prefix cache only if they have the same salt (vLLM's ``cache_salt``).
    salt: str | None = None
    #: Further fields of the body. With the default, generation continues after the end-of-text
    #: token.
    fields: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON of the request.

        Args:
            model: The name of the model on the server.
        """
        body: dict[str, Any] = {
            "model": model,
            "prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt),
            "max_tokens": self.tokens,
            "temperature": 0.0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **self.fields,
        }
        if self.top:
            body["logprobs"] = self.top
        if self.prompt_log_probabilities:
            body["prompt_logprobs"] = self.prompt_top
        if self.salt is not None:
            body["cache_salt"] = self.salt
        return body


class Asker:
    """Sends greedy requests to one server, and checks each answer.

    Each answer is compared with its request (`completion_rules.malformed`), and its text with its
    ids if a tokenizer.json is available. No tolerance applies to these checks.

    Args:
        server: The server.
        timeout_s: The time limit of an answer, in seconds.
        checkpoint: The folder with the tokenizer.json of the served model. If None, the model with
            which the suite started the server.
    """

    def __init__(
        self, server: Server, *, timeout_s: float = 240.0, checkpoint: Path | None = None
    ) -> None:
        self._server = server
        self._checkpoint = checkpoint
        self._timeout_s = timeout_s
        #: Whether the server is vLLM, which must send all fields that it documents. Other engines
        #: may lack some.
        self._documented = server.engine == "vllm" or server.version is not None
        #: Whether the server may ban the end token for ``ignore_eos``, as llama.cpp does. The
        #: log-probabilities that it sends are those before the ban.
        self._bans_end = server.engine == "llama-cpp" or not self._documented
        #: Whether the server only accepts the fields of OpenAI's own API.
        self._plain = False
        self._context = server.context_tokens()

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary for comparing ids with texts; None if there is no tokenizer.json."""
        return of_server(self._server, self._checkpoint)

    def ask(self, request: Request) -> Completion:
        """Send a request.

        Args:
            request: The request.

        Returns:
            The completion.

        Raises:
            NotRun: The server's context is too short, or its engine does not accept the request.
            Refused: The server answered with an error.
            Unmet: The answer is malformed.
        """
        with self._server.endpoint.http(timeout_s=self._timeout_s) as http:
            return self._ask(http, request)

    def ask_together(self, requests: Sequence[Request]) -> list[Completion]:
        """Send requests at the same time.

        Args:
            requests: The requests.

        Returns:
            The completions, in the order of the requests.

        Raises:
            NotRun: The server's context is too short, or its engine does not accept a request.
            Refused: The server answered with an error.
            Unmet: An answer is malformed.
        """
        with (
            self._server.endpoint.http(timeout_s=self._timeout_s) as http,
            ThreadPoolExecutor(max(1, len(requests))) as pool,
        ):
            return list(pool.map(lambda request: self._ask(http, request), requests))

    def stream(self, request: Request) -> Completion:
        """Send a streaming request and join its chunks.

        Args:
            request: The request.

        Returns:
            The completion.

        Raises:
            NotRun: The server's context is too short.
            Refused: The server answered with an error.
            Unmet: The answer is malformed.
        """
        with closing(self._chunks(request)) as chunks:
            return self._checked(request, parse(*chunks))

    def abort(self, request: Request) -> None:
        """Start a streamed completion and close its connection after the first chunk.

        Args:
            request: The request.

        Raises:
            NotRun: The server's context is too short.
            Refused: The server answered with an error.
        """
        with closing(self._chunks(request)) as chunks:
            next(chunks, None)

    def need(self, value: _Result | None, name: str) -> _Result:
        """Return a value that a check needs.

        Args:
            value: The value; None if the server did not send it.
            name: The name of the value in error messages.

        Returns:
            The value.

        Raises:
            Unmet: vLLM, which documents the value, did not send it.
            NotRun: Another engine did not send it.
        """
        if value is not None:
            return value
        if self._documented:
            raise Unmet(Fact(f"{name} with every answer"))
        raise NotRun(f"this check needs {name}, and the engine sends none with its completions")

    def text_of(self, ids: Sequence[int]) -> str:
        """Convert token ids to text with the server's /detokenize, and remove control tokens.

        Args:
            ids: The token ids.

        Returns:
            The text.

        Raises:
            NotRun: The server has no /detokenize.
        """
        body = {"model": self._server.endpoint.served_name, "tokens": list(ids)}
        with self._server.endpoint.http(timeout_s=self._timeout_s) as http:
            answer = http.post("/detokenize", json=body)
        if answer.status_code != 200:
            raise NotRun(f"/detokenize: {Refused(answer.status_code, answer.text)}")
        content = answer.json()
        for field_name in _TEXT_FIELDS:
            if field_name in content:
                return SPECIAL_TOKEN.sub("", str(content[field_name]))
        return ""

    def ids(self, answer: Completion) -> tuple[int, ...]:
        """Return the generated token ids.

        Args:
            answer: An answer of `ask`.

        Raises:
            Unmet: vLLM, which documents them, did not send them.
            NotRun: Another engine did not send them.
        """
        return self.need(answer.ids, "the generated token ids (return_token_ids)")

    def positions(self, answer: Completion) -> tuple[Position, ...]:
        """Return the generated tokens with log-probabilities.

        Args:
            answer: An answer of `ask`.

        Raises:
            Unmet: vLLM, which documents them, did not send them.
            NotRun: Another engine did not send them.
        """
        return self.need(answer.positions, "log-probabilities (logprobs)")

    def _ask(self, http: httpx.Client, request: Request) -> Completion:
        answer = http.post("/v1/completions", json=self._body(request))
        if answer.status_code in _NOT_UNDERSTOOD and not self._documented:
            self._plain = True
            answer = http.post("/v1/completions", json=self._body(request))
            if answer.status_code in _NOT_UNDERSTOOD:
                refusal = Refused(answer.status_code, answer.text)
                raise NotRun(
                    f"this check needs a request that the engine does not accept: {refusal}"
                )
        if answer.status_code != 200:
            raise Refused(answer.status_code, answer.text)
        return self._checked(request, parse(answer.json()))

    def _checked(self, request: Request, answer: Completion) -> Completion:
        """Return the answer, or raise Unmet if it is malformed."""
        # Engines other than vLLM may not support ignore_eos, so their answers may end early.
        may_end = self._plain or not self._documented or "ignore_eos" not in request.fields
        banned = "min_tokens" in request.fields
        end_banned = self._bans_end and "ignore_eos" in request.fields
        fault = malformed(
            answer,
            request.tokens,
            request.prompt,
            may_end=may_end,
            banned=banned,
            end_banned=end_banned,
        )
        if fault is None:
            fault = self._wrong_text(request, answer)
        if fault is not None:
            raise Unmet(
                *with_subject(f"{_shown(request.prompt)}, {request.tokens} tokens", [fault])
            )
        return answer

    def _wrong_text(self, request: Request, answer: Completion) -> Fact | None:
        """Compare the text of an answer with its ids."""
        if answer.ids is None:
            return None
        vocabulary = self.vocabulary
        if vocabulary is None:
            return None
        prompt = () if isinstance(request.prompt, str) else request.prompt
        difference = vocabulary.differs(answer.ids, answer.text, prompt)
        return Fact("the text of the ids", difference) if difference else None

    def _chunks(self, request: Request) -> Generator[dict[str, Any], None, None]:
        body = {**self._body(request), "stream_options": {"include_usage": True}}
        return stream(self._server.endpoint, body, timeout_s=self._timeout_s)

    def _body(self, request: Request) -> dict[str, Any]:
        prompt_tokens = 1 if isinstance(request.prompt, str) else len(request.prompt)
        require_context(self._context, prompt_tokens, request.tokens)
        body = request.body(self._server.endpoint.served_name)
        if self._plain:
            return {key: value for key, value in body.items() if key in _OPENAI_FIELDS}
        return body


def stream(
    endpoint: Endpoint, body: Mapping[str, Any], *, timeout_s: float
) -> Generator[dict[str, Any], None, None]:
    """Send a streaming request to /v1/completions.

    Args:
        endpoint: The server.
        body: The JSON of the request, without ``stream``.
        timeout_s: The time limit of the whole answer, in seconds.

    Yields:
        Each chunk as soon as it arrives. To close the connection, close the generator.

    Raises:
        Refused: The server answered with an error.
    """
    events = EventParser()
    with (
        endpoint.http(timeout_s=timeout_s) as http,
        http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
    ):
        if answer.status_code != 200:
            raise Refused(answer.status_code, answer.read().decode("utf-8", "replace"))
        for piece in answer.iter_bytes():
            for data in events.feed(piece):
                if data != DONE:
                    yield json.loads(data)


def _shown(prompt: Prompt) -> str:
    """Return a prompt as text for messages."""
    if not isinstance(prompt, str):
        return f"a prompt of {len(prompt)} ids"
    if len(prompt) <= _SHOWN:
        return repr(prompt)
    return repr(f"{prompt[: _SHOWN - 3]}...")
