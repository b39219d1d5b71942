"""A scripted engine for `/v1/completions`.

It is correct, or correct with the different tokens of an engine under load, or has one known fault.
Its tokens are bytes. At one of 32 positions, two tokens are almost equally likely; under load, the
engine chooses the second one."""

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meta_tests.fakes.loopback import JsonHandler, serving
from sm121.core.server import Endpoint, Server
from sm121.core.vocabulary import FILE, byte_alphabet

Json = dict[str, Any]
#: A function that changes an answer. It gets the body of the request, whether other requests are
#: running, and the correct answer.
Break = Callable[[Json, bool, Json], None]
LETTERS = b"abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ,.0123456789"


def write_tokenizer(directory: Path) -> Path:
    """Write the engine's tokenizer.json, in which a byte is a token."""
    vocabulary = {sign: byte for byte, sign in enumerate(byte_alphabet())}
    content = {
        "added_tokens": [{"id": 256, "content": "<|end|>", "special": True}],
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (directory / FILE).write_text(json.dumps(content), "utf-8")
    return directory


def likeliest(before: bytes) -> list[tuple[int, float]]:
    """Return the three likeliest next tokens, and their log-probabilities."""
    seed = hashlib.sha256(before).digest()
    first, second, third = (LETTERS[(seed[0] + 7 * n) % len(LETTERS)] for n in range(3))
    gap = 0.05 if seed[1] % 32 == 0 else 2.0
    top = math.log(0.45 if gap < 1 else 0.8)
    return [(first, top), (second, top - gap), (third, top - gap - 2.0)]


def answer(prompt: bytes, tokens: int, *, together: bool) -> Json:
    """Return the answer of a correct engine.

    One of many concurrent requests gets the second of two equally likely tokens."""
    ids: list[int] = []
    tops = []
    for _ in range(tokens):
        top = likeliest(prompt + bytes(ids))
        if together and top[0][1] - top[1][1] < 0.1:
            top[0], top[1] = (top[1][0], top[0][1]), (top[0][0], top[1][1])
        ids.append(top[0][0])
        tops.append(top)
    return {"ids": ids, "places": tops, "text": bytes(ids).decode(), "finish": "length"}


def _wire(prompt: bytes, answered: Json) -> Json:
    names = []
    for top in answered["places"]:
        names.append([(f"token_id:{token}", value) for token, value in top])
    choice = {"index": 0, "text": answered["text"], "finish_reason": answered["finish"]}
    choice["token_ids"] = answered["ids"]
    choice["prompt_token_ids"] = None if answered.get("hides_prompt") else list(prompt)
    choice["logprobs"] = {
        "tokens": [top[0][0] for top in names],
        "token_logprobs": [top[0][1] for top in names],
        "top_logprobs": [dict(top) for top in names],
    }
    count = answered.get("usage", len(answered["ids"]))
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
    return {"id": "c", "object": "text_completion", "choices": [choice], "usage": usage}


@contextmanager
def scripted(broken: Break | None = None, *, context: int = 131_072) -> Iterator[Server]:
    """Serve on a loopback port until the block ends.

    An answer ends at the latest when the context is full."""

    class Handler(JsonHandler):
        running = 0
        lock = threading.Lock()

        def do_GET(self) -> None:
            self.say({"data": [{"id": "canary", "max_model_len": context}]})

        def do_POST(self) -> None:
            body = self.asked()
            text = body["prompt"]
            prompt = bytes(text) if isinstance(text, list) else text.encode()
            with self.lock:
                type(self).running += 1
            time.sleep(0.03)  # concurrent requests run together
            together = type(self).running > 1
            time.sleep(0.03)
            tokens = min(body["max_tokens"], context - len(prompt))
            answered = answer(prompt, tokens, together=together)
            if broken is not None:
                broken(body, together, answered)
            with self.lock:
                type(self).running -= 1
            self.say(_wire(prompt, answered))

    with serving(Handler) as url:
        yield Server(Endpoint(url, "key", "canary"), False, "vllm", "0.32.0", None, None, None)
