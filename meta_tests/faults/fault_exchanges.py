"""Faults that need both the request and the answer.

Rows of ``data/protocol-faults.toml`` name them as ``exchange``."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from meta_tests.faults.fault_changes import Json, choice, message, no_instructions, stop_is_kept

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
#: This time is longer than the time limit of the cases of fixtures/api.
HANG_S = 30.0


@dataclass(frozen=True)
class Request:
    """A client's request. ``body`` is None if it is not a JSON object."""

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
    """The answer for the client. If it has no status, the connection is dropped."""

    status: int | None
    content_type: str
    content: bytes


Forward = Callable[[Request], Answer]
Exchange = Callable[[Request, Forward], Answer]


def each_fifth(change: Callable[[Json], Any]) -> Callable[[], Exchange]:
    """An intermittent fault, which affects every fifth chat."""

    def make() -> Exchange:
        count = 0

        def hook(request: Request, forward: Forward) -> Answer:
            nonlocal count
            answer = forward(request)
            count += request.path == CHAT
            return changed(answer, change) if count % 5 == 4 else answer

        return hook

    return make


def changed(answer: Answer, change: Callable[[Json], Any]) -> Answer:
    if answer.status != 200 or "json" not in answer.content_type:
        return answer
    parsed = json.loads(answer.content)
    change(parsed)
    return replace(answer, content=json.dumps(parsed).encode())


def plainly(hook: Exchange) -> Callable[[], Exchange]:
    return lambda: hook


def on_error(make: Callable[[Request, Answer], Answer]) -> Callable[[], Exchange]:
    """Change an answer with which the server refuses a request."""

    def hook(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        refused = answer.status is not None and 400 <= answer.status < 500
        return make(request, answer) if refused else answer

    return plainly(hook)


def on_odd_chats(make: Callable[[Request, Answer], Answer]) -> Callable[[], Exchange]:
    """Change chats that ignore the end token, have forced tokens that are not harmony, or contain a
    tool's result but no tools."""

    def hook(request: Request, forward: Forward) -> Answer:
        body = request.body or {}
        answer = forward(request)
        results = '"role": "tool"' in json.dumps(body.get("messages"))
        is_forced = '"2000' in json.dumps(body.get("logit_bias"))
        is_odd = body.get("ignore_eos") or is_forced or (results and not body.get("tools"))
        return make(request, answer) if is_odd and request.path == CHAT else answer

    return plainly(hook)


def hang(_request: Request, answer: Answer) -> Answer:
    time.sleep(HANG_S)
    return answer


def harmony_error(_request: Request, _answer: Answer) -> Answer:
    return Answer(500, "application/json", b'{"error": {"message": "Unknown role: final"}}')


def no_answer(_request: Request, _answer: Answer) -> Answer:
    return Answer(None, "", b"")


def after_an_error(broken: Callable[[Request, Answer], Answer]) -> Callable[[], Exchange]:
    """Behave differently after the first refused request."""

    def make() -> Exchange:
        refused = False

        def hook(request: Request, forward: Forward) -> Answer:
            nonlocal refused
            answer = broken(request, forward(request)) if refused else forward(request)
            # A refused GET does not count, because it only looked for a page.
            refused = refused or (request.method == "POST" and answer.status in range(400, 500))
            return answer

        return hook

    return make


@plainly
def any_key(request: Request, forward: Forward) -> Answer:
    return forward(replace(request, key=None))


def stale() -> Exchange:
    """Give each completion the answer of the completion before it."""
    before: dict[str, Answer] = {}

    def hook(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        if request.path != COMPLETIONS or answer.status != 200:
            return answer
        now = before.get("answer", answer)
        before["answer"] = answer
        return now

    return hook


def empty_but_the_first() -> Exchange:
    """Return the right first answer, and later only empty answers whose tokens are counted.

    This fault is vllm#31422: gpt-oss on two GPUs."""
    count = 0

    def hook(request: Request, forward: Forward) -> Answer:
        nonlocal count
        answer = forward(request)
        of_chats = request.path == CHAT
        count += of_chats or request.path == COMPLETIONS
        empty: Json = {"content": None, "reasoning": "", "tool_calls": []}
        if of_chats and count > 1:
            return changed(answer, message(lambda part: part.update(empty)))
        if request.path == COMPLETIONS and count > 1:
            return changed(answer, choice(lambda part: part.update(text="")))
        return answer

    return hook


@plainly
def stop_included(request: Request, forward: Forward) -> Answer:
    body = request.body or {}
    return changed(forward(request), lambda answer: stop_is_kept(answer, body))


@plainly
def models_without_object(request: Request, forward: Forward) -> Answer:
    answer = forward(request)
    if request.path != "/v1/models":
        return answer
    return changed(answer, lambda listed: [entry.pop("object") for entry in listed["data"]])


@plainly
def any_key_of_a_chat(request: Request, forward: Forward) -> Answer:
    return forward(replace(request, key=None) if request.path == CHAT else request)


def error_in_the_stream(request: Request, answer: Answer) -> Answer:
    if not (request.body or {}).get("stream"):
        return answer
    text = f"data: {answer.content.decode()}\n\ndata: [DONE]\n\n"
    return Answer(200, "text/event-stream", text.encode())


def prompt_rewritten(change: Callable[[str], list[int]]) -> Callable[[], Exchange]:
    """Send other tokens than those of the chat to the model, and report these other tokens."""

    def hook(request: Request, forward: Forward) -> Answer:
        body = request.body
        if request.path != CHAT or body is None or body.get("stream"):
            return forward(request)
        plain = {**body, "max_tokens": 1, "return_token_ids": True}
        first = forward(replace(request, content=json.dumps(plain).encode()))
        if first.status != 200:
            return first
        ids = change(harmony().decode(json.loads(first.content)["prompt_token_ids"]))
        body["kv_transfer_params"] = {"prompt_token_ids": ids}
        return forward(replace(request, content=json.dumps(body).encode()))

    return plainly(hook)


def harmony() -> Any:
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def as_control_tokens(text: str) -> list[int]:
    return list(harmony().encode(text, allowed_special="all"))


def another_date(text: str) -> list[int]:
    return as_control_tokens(re.sub(r"Current date: \S+", "Current date: 2023-01-01", text))


@plainly
def says_other_ids(request: Request, forward: Forward) -> Answer:
    """Answer a chat without its instructions.

    The reported prompt ids and usage are those of the chat with the instructions.
    """
    body = request.body
    if request.path != CHAT or body is None or body.get("stream"):
        return forward(request)
    whole = json.loads(forward(request).content)
    body["messages"] = no_instructions(body["messages"])
    answer = forward(replace(request, content=json.dumps(body).encode()))

    def lie(answered: Json) -> None:
        answered["prompt_token_ids"] = whole.get("prompt_token_ids")
        prompt = whole["usage"]["prompt_tokens"]
        usage = answered["usage"]
        usage.update(prompt_tokens=prompt, total_tokens=prompt + usage["completion_tokens"])

    return changed(answer, lie)


content_is_null_now_and_then = each_fifth(message(lambda m: m.update(content=None)))
status_500_for_400 = on_error(lambda _r, a: replace(a, status=500))
status_200_for_an_error = on_error(lambda _r, a: replace(a, status=200))
error_without_error_object = on_error(lambda _r, a: replace(a, content=b'{"detail": "no"}'))
error_as_a_web_page = on_error(lambda _r, _a: Answer(400, "text/html", b"<h1>Bad Request</h1>"))
bad_request_breaks_the_connection = on_error(no_answer)
dead_after_an_error = after_an_error(lambda _r, _a: Answer(503, "text/plain", b"EngineDeadError"))
another_answer_after_an_error = after_an_error(
    lambda _r, a: changed(a, choice(lambda c: c.update(text="!!!!")))
)
