"""Greedy completions of any OpenAI-compatible server, with the tokens and log-probabilities."""

import json
import math
import re
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from sm121.client.sse import DONE, EventParser
from sm121.core.errors import Sm121Error
from sm121.core.server import Endpoint, Server, require_context
from sm121.core.unmet import Fact, Unmet, of, require
from sm121.core.verdict import NotRun
from sm121.core.vocabulary import Vocabulary, of_server

Prompt = str | tuple[int, ...]
_ID = "token_id:"
#: The fields of OpenAI's own /v1/completions; the others are vLLM's, which most engines also know.
_OF_THE_API = frozenset({"model", "prompt", "max_tokens", "temperature", "logprobs"})
_NOT_UNDERSTOOD = (400, 404, 422)
_Result = TypeVar("_Result")
#: What two evaluations of one log-softmax in float32 may differ by.
_ROUNDING = 1e-3
_SPECIAL = re.compile(r"<\|[^|<>]*\|>")


class Refused(Sm121Error):
    """The server answered a request with an error."""

    def __init__(self, status: int, body: str) -> None:
        self.status = status
        super().__init__(f"the server answered {status}: {body[:300]}")


@dataclass(frozen=True)
class Position:
    """One generated token, and the most likely ones at its place. Tokens are named as the engine
    names them: ``token_id:N`` where it gives ids, else their text."""

    token: str
    log_probability: float
    top: Mapping[str, float]


@dataclass(frozen=True)
class Completion:
    """A completion. What the engine did not send is None."""

    text: str
    finish_reason: str | None
    ids: tuple[int, ...] | None
    prompt_ids: tuple[int, ...] | None
    positions: tuple[Position, ...] | None
    prompt_log_probabilities: tuple[float, ...] | None
    """Of the prompt's tokens from the second on."""
    completion_tokens: int | None
    prompt_tokens: int | None
    #: The tokens that it tells before each of the prompt's from the second on, by their ids.
    prompt_tops: tuple[Mapping[int, float], ...] | None = None


@dataclass(frozen=True)
class Request:
    """What is asked: always greedily. ``prompt_log_probabilities`` needs a prompt of ids."""

    prompt: Prompt
    tokens: int
    top: int = 5
    prompt_log_probabilities: bool = False
    #: So many of the likeliest tokens at each place of the prompt, beside its own.
    prompt_top: int = 0
    #: Requests of one salt share the prefix cache, others do not (vLLM's ``cache_salt``).
    salt: str | None = None
    #: Where the answer may end: by default it goes on past the end of its text.
    fields: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})

    def body(self, model: str) -> dict[str, Any]:
        """The JSON of /v1/completions."""
        prompt = list(self.prompt) if isinstance(self.prompt, tuple) else self.prompt
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
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
    """Asks one server. No tolerance reaches an answer that is not in itself whole: each is held
    against its request by `malformed` before it is handed on. `checkpoint`: the folder of what is
    served, for its tokenizer.json; without it, that of a managed server's model."""

    def __init__(
        self, server: Server, *, timeout_s: float = 240.0, checkpoint: Path | None = None
    ) -> None:
        self._server = server
        self._checkpoint = checkpoint
        self._timeout_s = timeout_s
        #: What vLLM is documented to send is required of it; of others it may be missing.
        self._documented = server.engine == "vllm" or server.version is not None
        self._plain = False
        self._context = server.context_tokens()

    @property
    def vocabulary(self) -> Vocabulary | None:
        """What ids are compared with texts by; None where no tokenizer.json is at hand."""
        return of_server(self._server, self._checkpoint)

    def ask(self, request: Request) -> Completion:
        """One completion. Raises NotRun: the context of the server is too short for it; Refused:
        the server answered with an error; AssertionError: the answer is `malformed`."""
        with self._server.endpoint.http(timeout_s=self._timeout_s) as http:
            return self._ask(http, request)

    def ask_together(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions that are under way at the same time, in the order of the requests."""
        with (
            self._server.endpoint.http(timeout_s=self._timeout_s) as http,
            ThreadPoolExecutor(max(1, len(requests))) as pool,
        ):
            return list(pool.map(lambda request: self._ask(http, request), requests))

    def stream(self, request: Request) -> Completion:
        """The same completion, streamed and put together again."""
        with closing(self._chunks(request)) as chunks:
            return self._whole(request, parse(*chunks))

    def abort(self, request: Request) -> None:
        """Start a streamed completion and hang up after its first chunk."""
        with closing(self._chunks(request)) as chunks:
            next(chunks, None)

    def need(self, value: _Result | None, name: str) -> _Result:
        """What a check cannot do without. Raises AssertionError: vLLM did not send it, though it is
        documented to; NotRun: another engine did not send it."""
        if value is not None:
            return value
        if self._documented:
            raise Unmet(Fact(f"{name} with every answer"))
        raise NotRun(f"this check needs {name}, and the engine sends none with its completions")

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of ids without control tokens. Raises NotRun: there is no /detokenize."""
        body = {"model": self._server.endpoint.served_name, "tokens": list(ids)}
        with self._server.endpoint.http(timeout_s=self._timeout_s) as http:
            answer = http.post("/detokenize", json=body)
        if answer.status_code != 200:
            raise NotRun(f"/detokenize: {Refused(answer.status_code, answer.text)}")
        content = answer.json()
        text = next((content[key] for key in ("prompt", "content", "text") if key in content), "")
        return _SPECIAL.sub("", str(text))

    def ids(self, answer: Completion) -> tuple[int, ...]:
        """The generated token ids (see `need`)."""
        return self.need(answer.ids, "the generated token ids (return_token_ids)")

    def positions(self, answer: Completion) -> tuple[Position, ...]:
        """The generated tokens with their log-probabilities (see `need`)."""
        return self.need(answer.positions, "log-probabilities (logprobs)")

    def _ask(self, http: httpx.Client, request: Request) -> Completion:
        answer = http.post("/v1/completions", json=self._body(request))
        if answer.status_code in _NOT_UNDERSTOOD and not self._documented:
            self._plain = True  # it takes nothing beside the API's own fields
            answer = http.post("/v1/completions", json=self._body(request))
            if answer.status_code in _NOT_UNDERSTOOD:
                refusal = Refused(answer.status_code, answer.text)
                raise NotRun(f"this check needs a request that the engine does not take: {refusal}")
        if answer.status_code != 200:
            raise Refused(answer.status_code, answer.text)
        return self._whole(request, parse(answer.json()))

    def _whole(self, request: Request, answer: Completion) -> Completion:
        # Another engine may not know ignore_eos, and then the answer may end by itself.
        may_end = self._plain or not self._documented or "ignore_eos" not in request.fields
        banned = "min_tokens" in request.fields
        wrong = malformed(answer, request.tokens, request.prompt, may_end=may_end, banned=banned)
        if wrong is None and answer.ids is not None and (vocabulary := self.vocabulary) is not None:
            prompt = () if isinstance(request.prompt, str) else request.prompt
            differs = vocabulary.differs(answer.ids, answer.text, prompt)
            wrong = Fact("the text of the ids", differs) if differs else None
        if wrong is not None:
            raise Unmet(*of(f"{_shown(request.prompt)}, {request.tokens} tokens", [wrong]))
        return answer

    def _chunks(self, request: Request) -> Generator[dict[str, Any], None, None]:
        body = {**self._body(request), "stream_options": {"include_usage": True}}
        return stream(self._server.endpoint, body, timeout_s=self._timeout_s)

    def _body(self, request: Request) -> dict[str, Any]:
        prompt = 1 if isinstance(request.prompt, str) else len(request.prompt)
        require_context(self._context, prompt, request.tokens)
        body = request.body(self._server.endpoint.served_name)
        if self._plain:
            return {key: value for key, value in body.items() if key in _OF_THE_API}
        return body


def stream(
    endpoint: Endpoint, body: Mapping[str, Any], *, timeout_s: float
) -> Generator[dict[str, Any], None, None]:
    """The chunks of a streamed completion as they come; close it to hang up. Raises Refused: the
    server answered with an error."""
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


def parse(*parts: Mapping[str, Any]) -> Completion:
    """A completion from the JSON of /v1/completions, /v1/chat/completions (whole, or the chunks of
    a stream) or /v1/responses (whole). Raises AssertionError: there is no choice in it."""
    if parts and "output" in parts[0]:
        parts = (_of_response(parts[0]),)
    if not (choices := [choice for part in parts for choice in part.get("choices") or ()]):
        raise Unmet(Fact("an answer with choices"))
    ids = [choice["token_ids"] for choice in choices if choice.get("token_ids") is not None]
    positions = [p for choice in choices for p in _positions(choice.get("logprobs"))]
    prompt_ids = next((c["prompt_token_ids"] for c in choices if c.get("prompt_token_ids")), None)
    tops = _of_prompt(choices[0].get("prompt_logprobs"), prompt_ids)
    generated = tuple(token for group in ids for token in group) if ids else None
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    usage: dict[str, Any] = next((p["usage"] for p in reversed(parts) if p.get("usage")), {})
    return Completion(
        text="".join(text_of(choice) for choice in choices),
        finish_reason=reasons[-1] if reasons else None,
        # llama-server gives them with the log-probabilities alone.
        ids=generated or (ids_of(positions) if positions else None),
        prompt_ids=None if prompt_ids is None else tuple(prompt_ids),
        positions=tuple(positions) or None,
        prompt_log_probabilities=None
        if tops is None or prompt_ids is None
        else tuple(top.get(t, math.nan) for t, top in zip(prompt_ids[1:], tops, strict=True)),
        completion_tokens=usage.get("completion_tokens"),
        prompt_tokens=usage.get("prompt_tokens"),
        prompt_tops=tops,
    )


def _of_response(response: Mapping[str, Any]) -> dict[str, Any]:
    """A response as /v1/completions would give it."""
    contents = [part for item in response["output"] for part in item.get("content") or ()]
    text = "".join(part.get("text") or "" for part in contents)
    usage = response.get("usage") or {}
    counts = {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
    }
    return {"choices": [{"text": text, "finish_reason": response.get("status")}], "usage": counts}


def text_of(choice: Mapping[str, Any]) -> str:
    """The text of a choice: of a chat its reasoning, its content and its calls."""
    if isinstance(text := choice.get("text"), str):
        return text
    message = choice.get("message") or choice.get("delta") or {}
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    texts = [message.get("reasoning") or message.get("reasoning_content"), message.get("content")]
    texts += [call.get(key) for call in calls for key in ("name", "arguments")]
    return "".join(text for text in texts if text)


def malformed(
    answer: Completion,
    tokens: int,
    prompt: Prompt = "",
    *,
    may_end: bool = False,
    banned: bool = False,
) -> Fact | None:
    """What makes a greedy answer wrong in itself, whatever another run says; None for nothing. Held
    against each other: the tokens that were asked for, the ids, usage, the entries of the
    log-probabilities and their values, finish_reason, the prompt's ids, the text. `may_end`: the
    answer may end before the limit, as finish_reason must then say. `banned`: the end of a text is
    not generated where it is the likeliest."""
    lists = {"ids": answer.ids, "log-probabilities": answer.positions}
    lengths = {name: len(each) for name, each in lists.items() if each is not None}
    if answer.completion_tokens is not None:
        lengths["usage"] = answer.completion_tokens
    fits = all(count <= tokens for count in lengths.values())
    ended = may_end and answer.finish_reason == "stop" and fits
    if len({*lengths.values()} | (set() if ended else {tokens})) > 1:
        observed = ", ".join(f"{count} {name}" for name, count in lengths.items())
        return Fact(f"{tokens} tokens", f"{observed}, finish_reason {answer.finish_reason}")
    if answer.finish_reason != "length" and not may_end:
        return Fact("finish_reason length", f"{answer.finish_reason}")
    prompt_ids = answer.prompt_ids
    if prompt_ids is not None and not isinstance(prompt, str) and prompt_ids != prompt:
        return Fact("the ids of the prompt", _different(prompt, prompt_ids))
    if prompt_ids is not None and answer.prompt_tokens not in (None, len(prompt_ids)):
        return Fact(f"usage of {len(prompt_ids)} prompt tokens", f"{answer.prompt_tokens}")
    return wrong_positions(answer, banned=banned)


def wrong_positions(answer: Completion, *, banned: bool = False) -> Fact | None:
    """What is wrong with the log-probabilities of a greedy answer: they are of its tokens, and each
    is that of the likeliest one. None for nothing, or where there are none."""
    if answer.positions is None:
        return None
    positions = answer.positions
    named = ids_of(positions)
    if named is not None and answer.ids is not None and named != answer.ids:
        different = _different(answer.ids, named)
        return Fact("log-probabilities of the tokens that were generated", different)
    if named is None:
        texts = "".join(position.token for position in positions)
        alike = {_SPECIAL.sub("", text) for text in (texts, answer.text)}
        if len(alike) > 1 and "\ufffd" not in texts + answer.text:
            return Fact(f"log-probabilities of the text {answer.text!r}", f"{texts!r}")
    for index, position in enumerate(positions):
        value, best = position.log_probability, max(position.top.values(), default=-math.inf)
        if not value <= _ROUNDING or math.isinf(value):
            return Fact("a log-probability", f"{value}", f"token {index}")
        if best > value + _ROUNDING and not banned:
            evidence = f"{value:.6g}, and another has {best:.6g}"
            return Fact("the likeliest token", position.token, f"token {index}", evidence=evidence)
    return None


def _different(required: Sequence[int], observed: Sequence[int]) -> str:
    pairs = enumerate(zip(required, observed, strict=False))
    index = next((n for n, (a, b) in pairs if a != b), min(len(required), len(observed)))
    mine, other = (str(x[index]) if index < len(x) else "the end" for x in (required, observed))
    return f"{other} in place of {mine} at {index}"


def _shown(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return repr(prompt if len(prompt) <= 60 else f"{prompt[:57]}...")
    return f"a prompt of {len(prompt)} ids"


def ids_of(positions: Sequence[Position]) -> tuple[int, ...] | None:
    """Token ids from the names of tokens, None where they are texts."""
    ids = [id_of(position.token) for position in positions]
    return None if None in ids else tuple(token for token in ids if token is not None)


def id_of(name: str) -> int | None:
    """The id in the name of a token, None where that is its text."""
    return int(name.removeprefix(_ID)) if name.startswith(_ID) else None


def name_of(token_id: int) -> str:
    """The name of a token that an engine gives by its id."""
    return f"{_ID}{token_id}"


def _positions(entries: Mapping[str, Any] | None) -> list[Position]:
    if entries and entries.get("content"):
        return [_position(item) for item in entries["content"]]
    if not entries or not entries.get("tokens") or entries.get("token_logprobs") is None:
        return []
    tops = entries.get("top_logprobs") or [None] * len(entries["tokens"])
    rows = zip(entries["tokens"], entries["token_logprobs"], tops, strict=True)
    return [
        Position(str(token), _number(value), {str(k): _number(v) for k, v in (top or {}).items()})
        for token, value, top in rows
    ]


def _position(item: Mapping[str, Any]) -> Position:
    """A token as chats and llama-server name it, by its id where that is there."""

    def name(of: Mapping[str, Any]) -> str:
        return name_of(of["id"]) if isinstance(of.get("id"), int) else str(of.get("token"))

    return Position(
        token=name(item),
        log_probability=_number(item.get("logprob")),
        top={name(top): _number(top.get("logprob")) for top in item.get("top_logprobs") or ()},
    )


def _of_prompt(
    entries: Sequence[Mapping[str, Any] | None] | None, ids: Sequence[int] | None
) -> tuple[Mapping[int, float], ...] | None:
    """vLLM's ``prompt_logprobs``, from the second token on."""
    if entries is None or ids is None:
        return None
    require(len(entries) == len(ids), f"prompt_logprobs of {len(ids)} tokens", len(entries))
    return tuple(
        {int(token): _number(value["logprob"]) for token, value in (entry or {}).items() if value}
        for entry in entries[1:]
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
