"""Fixtures for the stress tests: the server under load. Each load is checked as a whole."""

import pytest

from sm121.core.server import Server
from sm121.engines.capabilities import Capabilities
from sm121.plugin.stash import LEVEL
from sm121.session.session import Session
from sm121.stress import level, soak

_STRESS = pytest.StashKey[tuple[Server, level.Stress]]()


@pytest.fixture
def stress(
    conformance: Session, pytestconfig: pytest.Config, server: Server, capabilities: Capabilities
) -> level.Stress:
    """The server under load (see `Stress`); one for as long as the server lives."""
    current = pytestconfig.stash.get(_STRESS, None)
    if current is not None and current[0] is server:
        return current[1]
    if current is not None:
        current[1].close()
    made = level.Stress(conformance, server, capabilities)
    pytestconfig.stash[_STRESS] = (server, made)
    return made


@pytest.fixture
def soak_s(pytestconfig: pytest.Config) -> float:
    """How long ``--soak`` says."""
    return soak.parse_duration(pytestconfig.getoption("--soak"))


def end_with_its_level(item: pytest.Item, session: Session) -> None:
    """Stop sampling when the level ends: sampling every second would disturb other levels."""
    if item.stash[LEVEL] != "stress":
        end(item.config)
        session.load = None  # its samples are of this server only


def end(config: pytest.Config) -> None:
    """Stop sampling, and keep the samples."""
    current = config.stash.get(_STRESS, None)
    if current is not None:
        current[1].close()
        del config.stash[_STRESS]
