"""What the tests are given. The server is started when the first test asks for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest

from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.core.verdict import NotRun
from sm121.engines.capabilities import Capabilities
from sm121.engines.managed import StopReport
from sm121.evidence.kernel_path import KernelPath
from sm121.plugin.stash import SESSION
from sm121.session.session import Session

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="session")
def conformance(pytestconfig: pytest.Config) -> Session:
    """The conformance run: settings, target, report directory."""
    run = pytestconfig.stash.get(SESSION, None)
    if run is None:
        raise NotRun("no conformance run is open: only tests with a level marker have one")
    return run


@pytest.fixture(scope="session")
def profile(conformance: Session) -> Profile:
    """The profile in force."""
    return conformance.profile


@dataclass(frozen=True)
class Servers:
    """Servers by configuration name. One lives at a time; asking for another stops it."""

    _session: Session

    def __call__(self, configuration: str | None = None) -> Server:
        """The server of a configuration (default: the one under test), started if need be."""
        return self._session.server(configuration)

    def stop(self) -> StopReport:
        """Stop the running server; what it left. Raises NotRun: it is attached, or none runs."""
        if (report := self._session.stop()) is None:
            raise NotRun(
                "no server that the suite started is running; attached ones are not stopped"
            )
        return report


@pytest.fixture(scope="session")
def servers(conformance: Session) -> Servers:
    """Gives the server of any of the profile's configurations."""
    return Servers(conformance)


@pytest.fixture
def server(conformance: Session) -> Iterator[Server]:
    """The server under test, alive before and after the test."""
    yield conformance.server()
    conformance.check_alive()


@pytest.fixture
def client(server: Server, capabilities: Capabilities) -> "Iterator[openai.OpenAI]":
    """An OpenAI client of the server under test; it does not retry, and a request for what the
    engine cannot do is NOT_RUN."""
    from sm121.api.guarded_client import GuardedClient

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
def kernel_path(conformance: Session, server: Server) -> KernelPath:
    """What the log of the server under test proves about its kernels."""
    return conformance.kernel_path(server)
