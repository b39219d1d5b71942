"""Constructed answers of a server, with the fields that a check reads."""

import itertools
import json

from meta_tests.texts import text_file
from sm121.api.client import Api
from sm121.client.exchange import Exchange
from sm121.core.server import Endpoint
from sm121.engines import capabilities

REQUEST = {"model": "canary", "prompt": "The capital of France is"}
COMPLETION = json.loads(text_file("completion.json"))
USAGE = COMPLETION["usage"]


def of_chat(kind, **choice):
    head = {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "canary"}
    return {**head, "choices": [{"index": 0, **choice}]}


def chat(message, finish="stop"):
    whole = of_chat("chat.completion", message=message, finish_reason=finish, logprobs=None)
    return {**whole, "usage": USAGE}


ENDPOINT = Endpoint("http://127.0.0.1:1", "key", "canary")


def replying(*answers: Exchange, engine: str = "vllm", version: str | None = None) -> Api:
    """Return an API whose server sends these answers in their order.

    The last answer is repeated.
    """
    to_come = itertools.chain(answers, itertools.repeat(answers[-1]))

    class Replying(Api):
        def send(self, *_arguments, **_options):
            return next(to_come)

    return Replying(ENDPOINT, capabilities.capabilities_of(engine, version))


def answer(status: int | None, body: object = None, failure: str = "") -> Exchange:
    return Exchange(status, "application/json", json.dumps(body).encode(), failure)


ERROR = {"error": {"message": "no", "type": "x", "param": None, "code": 400}}
