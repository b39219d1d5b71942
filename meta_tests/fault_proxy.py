"""A proxy in front of a real server that breaks its answers in one known way.

Faults work on parsed answers: ``completion`` and ``chat`` get the JSON of an answer that came at
once, ``stream`` the list of a stream's chunks, ``request`` what is sent on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

Json = dict[str, Any]


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
    stream: Callable[[list[Json]], list[Json]] = _same
    status: Callable[[str], int | None] = lambda _path: None


def _choice(change: Callable[[Json], None]) -> Callable[[Json], Json]:
    def apply(answer: Json) -> Json:
        if "choices" in answer:
            change(answer["choices"][0])
        return answer

    return apply


def _without(*keys: str) -> Callable[[Json], Json]:
    return lambda request: {key: value for key, value in request.items() if key not in keys}


def _one_token_less(request: Json) -> Json:
    """Stops early, as an engine that overlooks min_tokens and ignore_eos."""
    asked = request.get("max_tokens", 16)
    short = {**request, "max_tokens": max(1, asked - 1), "min_tokens": max(1, asked - 1)}
    return short if request.get("ignore_eos") else request


def _usage(change: Callable[[Json], None]) -> Callable[[Json], Json]:
    def apply(answer: Json) -> Json:
        if answer.get("usage"):
            change(answer["usage"])
        return answer

    return apply


def _log_probability(value: float) -> Callable[[Json], Json]:
    def change(choice: Json) -> None:
        if choice.get("logprobs"):
            choice["logprobs"]["token_logprobs"][3] = value

    return _choice(change)


def _overfull(choice: Json) -> None:
    if choice.get("logprobs"):
        top = choice["logprobs"]["top_logprobs"][2]
        choice["logprobs"]["top_logprobs"][2] = dict.fromkeys(top, -0.1)


def _edit_tokens(edit: Callable[[list[int]], list[int]]) -> Callable[[list[Json]], list[Json]]:
    def apply(chunks: list[Json]) -> list[Json]:
        for chunk in chunks[2:]:
            for choice in chunk.get("choices", []):
                if choice.get("token_ids"):
                    choice["token_ids"] = edit(choice["token_ids"])
                    return chunks
        return chunks

    return apply


def _swap_texts(chunks: list[Json]) -> list[Json]:
    with_text = [c for c in chunks if c.get("choices") and c["choices"][0].get("text")]
    first, second = with_text[1]["choices"][0], with_text[2]["choices"][0]
    first["text"], second["text"] = second["text"], first["text"]
    return chunks


def _no_usage(chunks: list[Json]) -> list[Json]:
    return [chunk for chunk in chunks if chunk.get("choices")]


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "another city",
            "test_known_answers",
            completion=_choice(lambda c: c.update(text=" London")),
        ),
        Fault(
            "an empty completion",
            "test_one_completion",
            completion=_choice(lambda c: c.update(text="")),
        ),
        Fault(
            "content is null though tokens were made",
            "test_chats_end_in_a_final_message",
            chat=_choice(lambda c: c["message"].update(content=None)),
        ),
        Fault(
            "a special token leaks into the content",
            "test_chats_end_in_a_final_message",
            chat=_choice(
                lambda c: c["message"].update(content=c["message"]["content"] + "<|return|>")
            ),
        ),
        Fault(
            "a chat that was cut off",
            "test_one_chat",
            chat=_choice(lambda c: c.update(finish_reason="length")),
        ),
        Fault(
            "usage counts one token more",
            "test_token_counts_are_exact",
            completion=_usage(lambda u: u.update(completion_tokens=u["completion_tokens"] + 1)),
        ),
        Fault(
            "usage counts one prompt token less",
            "test_token_counts_are_exact",
            completion=_usage(lambda u: u.update(prompt_tokens=u["prompt_tokens"] - 1)),
        ),
        Fault("one token too few", "test_token_counts_are_exact", request=_one_token_less),
        Fault(
            "a wrong finish_reason",
            "test_token_counts_are_exact",
            completion=_choice(lambda c: c.update(finish_reason="stop")),
        ),
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
            "a stream that changes the order of texts",
            "test_streaming_equals_not_streaming",
            stream=_swap_texts,
        ),
        Fault("a stream without usage", "test_streaming_equals_not_streaming", stream=_no_usage),
        Fault("the seed is ignored", "test_same_seed_same_tokens", request=_without("seed")),
        Fault(
            "every seed is the same",
            "test_seed_is_used",
            request=lambda request: {**request, "seed": 1},
        ),
        Fault(
            "/health says 503",
            "test_health",
            status=lambda path: 503 if path == "/health" else None,
        ),
    )
}


class FaultProxy:
    """Listens on a free loopback port and forwards to ``upstream``, broken by ``fault``."""

    def __init__(self, upstream: str, fault: Fault) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(upstream, fault))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *_arguments: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(upstream: str, fault: Fault) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            self._forward("GET", b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = fault.request(json.loads(body))
            self._forward("POST", json.dumps(request).encode())

        def _forward(self, method: str, body: bytes) -> None:
            headers = {"Content-Type": "application/json"}
            if key := self.headers.get("Authorization"):
                headers["Authorization"] = key
            with httpx.Client(timeout=120.0, trust_env=False) as http:
                answer = http.request(method, upstream + self.path, content=body, headers=headers)
            kind = answer.headers.get("content-type", "")
            content = answer.content
            if self.path == "/v1/completions" and "event-stream" in kind:
                content = _stream(content, fault)
            elif self.path == "/v1/completions":
                content = json.dumps(fault.completion(answer.json())).encode()
            elif self.path == "/v1/chat/completions":
                content = json.dumps(fault.chat(answer.json())).encode()
            self.send_response(fault.status(self.path) or answer.status_code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


def _stream(content: bytes, fault: Fault) -> bytes:
    events = [line[6:] for line in content.decode().splitlines() if line.startswith("data: ")]
    chunks = fault.stream([json.loads(event) for event in events if event != "[DONE]"])
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()
