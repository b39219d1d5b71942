"""What the tests are given. The server is started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest

from sm121.api.guarded import GuardedClient
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.core.verdict import NotRun
from sm121.engines.capabilities import Capabilities
from sm121.engines.managed import StopReport
from sm121.evidence.kernel_path import KernelPath
from sm121.plugin.run import RUN, Run

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="session")
def conformance(pytestconfig: pytest.Config) -> Run:
    """The conformance run: settings, target, report directory."""
    run = pytestconfig.stash.get(RUN, None)
    if run is None:
        raise NotRun("no conformance run is open: only tests with a level marker have one")
    return run


@pytest.fixture(scope="session")
def profile(conformance: Run) -> Profile:
    """The profile in force."""
    return conformance.profile


@dataclass(frozen=True)
class Servers:
    """Servers by configuration name. One lives at a time; asking for another stops it."""

    _run: Run

    def __call__(self, configuration: str | None = None) -> Server:
        """The server of a configuration (default: the one under test), started if need be."""
        return self._run.server(configuration)

    def stop(self) -> StopReport:
        """Stop the server that runs, and say what it left.

        Raises:
            NotRun: the server is attached, or none runs.
        """
        if self._run.pool is None or self._run.pool.current is None:
            raise NotRun(
                "no server that the suite started is running; attached ones are not stopped"
            )
        report = self._run.pool.stop()
        assert report is not None
        return report


@pytest.fixture(scope="session")
def servers(conformance: Run) -> Servers:
    """Gives the server of any of the profile's configurations."""
    return Servers(conformance)


@pytest.fixture
def server(conformance: Run) -> Iterator[Server]:
    """The server under test, alive before and after the test."""
    yield conformance.server()
    if conformance.pool is not None:
        conformance.pool.check()


@pytest.fixture
def client(server: Server, capabilities: Capabilities) -> Iterator[openai.OpenAI]:
    """An OpenAI client of the server under test; it does not retry, and a request for what the
    engine cannot do is NOT_RUN."""
    with GuardedClient(server.endpoint, capabilities) as client:
        yield client


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    """A plain HTTP client of the server under test, for what is beside the API."""
    with server.endpoint.http() as client:
        yield client


@pytest.fixture
def model(server: Server) -> str:
    """The served name of the model."""
    return server.endpoint.served_name


@pytest.fixture
def kernel_path(conformance: Run, server: Server) -> KernelPath:
    """What the log of the server under test proves about its kernels."""
    return conformance.kernel_path(server)
