"""The fixtures `llm_server_factory`, `llm_server` and `llm_client`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from pytest_llm_server import run

if TYPE_CHECKING:
    import openai

    from pytest_llm_server.factory import LlmServerFactory
    from pytest_llm_server.server import LlmServer


@pytest.fixture(scope="session")
def llm_server_factory(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> "LlmServerFactory":
    """Starts a server with any model and any arguments for a ``with`` block."""
    from pytest_llm_server.factory import LlmServerFactory  # imports the suite, needed only here

    return LlmServerFactory(run.run_of(pytestconfig), tmp_path_factory.getbasetemp() / "llm-server")


@pytest.fixture(scope="session")
def llm_server(llm_server_factory: "LlmServerFactory") -> "Iterator[LlmServer]":
    """The server of the run: started for its first test, or running at ``--base-url``."""
    __tracebackhide__ = True
    with llm_server_factory.of_the_run() as server:
        yield server


@pytest.fixture
def llm_client(llm_server: "LlmServer") -> "Iterator[openai.OpenAI]":
    """An OpenAI client of `llm_server`. It does not retry."""
    with llm_server.client() as client:
        yield client
