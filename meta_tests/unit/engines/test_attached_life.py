"""An attached server whose HTTP endpoints give other answers later."""

from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from sm121.core.server import Server
from sm121.engines.attached_life import AttachedLife
from sm121.engines.life import Alive
from sm121.engines.ports import free_port


@dataclass
class Pages:
    """HTTP endpoints without a server, whose answers the test sets."""

    base_url: str
    models: httpx.Response
    served_name: str = "canary"

    def http(self, *, timeout_s: float = 30.0) -> httpx.Client:
        transport = httpx.MockTransport(self.answer)
        return httpx.Client(base_url=self.base_url, transport=transport, timeout=timeout_s)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return self.models
        if request.url.path == "/metrics":
            return httpx.Response(200, text="process_start_time_seconds 1000.0\n")
        return httpx.Response(404)


@pytest.mark.parametrize("data", [5, True, "canary", {"id": "canary"}, [3, None]])
def test_list_of_models_that_is_none_is_no_error_of_the_suite(data: Any):
    """A list of models that is invalid is no error of the suite.

    A server that did not name its model at first need not name it later."""
    pages = Pages(f"http://127.0.0.1:{free_port()}", httpx.Response(503))
    server: Any = Server(pages, False, "openai-compatible", None, None, None, None)  # type: ignore[arg-type]
    life = AttachedLife(server)
    pages.models = httpx.Response(200, json={"data": data})
    assert isinstance(life.state(), Alive)
