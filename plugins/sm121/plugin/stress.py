"""What the stress tests are given: the server under load, each load checked as a whole."""

from __future__ import annotations

import pytest

from sm121.answers.log_probabilities import bound_for
from sm121.core.server import Server
from sm121.engines.capabilities import Capabilities
from sm121.plugin.stash import LEVEL
from sm121.session.session import Session
from sm121.stress import soak
from sm121.stress.level import Stress

_STRESS = pytest.StashKey[tuple[Server, Stress]]()


@pytest.fixture
def stress(
    conformance: Session, pytestconfig: pytest.Config, server: Server, capabilities: Capabilities
) -> Stress:
    """The server under load (see `Stress`); one for as long as the server lives."""
    known = pytestconfig.stash.get(_STRESS, None)
    if known is not None and known[0] is server:
        return known[1]
    if known is not None:
        known[1].close()
    profile = conformance.profile
    bound = bound_for(profile.correctness.agreement, server, profile, "agreement")
    made = Stress(conformance, server, capabilities, bound)
    pytestconfig.stash[_STRESS] = (server, made)
    return made


@pytest.fixture
def soak_s(pytestconfig: pytest.Config) -> float:
    """How long ``--soak`` says."""
    return soak.parse_duration(pytestconfig.getoption("--soak"))


def end_with_its_level(item: pytest.Item, session: Session) -> None:
    """The other levels are not sampled every second: they measure."""
    if item.stash[LEVEL] != "stress":
        end(item.config)
        session.observer = None  # what it saw is of this server under load, and of no later one


def end(config: pytest.Config) -> None:
    """Sample no more, and keep what was sampled."""
    known = config.stash.get(_STRESS, None)
    if known is not None:
        known[1].close()
        del config.stash[_STRESS]
