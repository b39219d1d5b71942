"""What the stress tests are given: the server under load, each load checked as a whole."""

from __future__ import annotations

import pytest

from sm121.answers.agreement import Bound
from sm121.answers.log_probabilities import bound_for
from sm121.core.server import Server
from sm121.engines.capabilities import Capabilities
from sm121.plugin.run import RUN, Run
from sm121.plugin.selection import LEVEL
from sm121.stress import soak
from sm121.stress.level import Stress

_STRESS = pytest.StashKey[tuple[Server, Stress]]()


@pytest.fixture
def stress(conformance: Run, server: Server, capabilities: Capabilities) -> Stress:
    """The server under load (see `Stress`); one for as long as the server lives."""
    stash = conformance.config.stash
    known = stash.get(_STRESS, None)
    if known is not None and known[0] is server:
        return known[1]
    if known is not None:
        known[1].close()
    profile = conformance.profile
    own = bound_for(profile.correctness.agreement, server, profile, "agreement")
    limits = Bound(own.max_abs, own.mean_abs, own.fork)
    made = Stress(conformance, server, capabilities, limits)
    stash[_STRESS] = (server, made)
    return made


@pytest.fixture
def soak_s(pytestconfig: pytest.Config) -> float:
    """How long ``--soak`` says."""
    return soak.parse_duration(pytestconfig.getoption("--soak"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The other levels are not sampled every second: they measure."""
    stash = item.config.stash
    if item.stash.get(LEVEL, None) == "stress":
        return
    if (known := stash.get(_STRESS, None)) is not None:
        known[1].close()
        del stash[_STRESS]
    if (run := stash.get(RUN, None)) is not None:
        run.observer = None  # what it saw is of this server under load, and of no later one


@pytest.hookimpl(tryfirst=True)  # before the server is stopped
def pytest_sessionfinish(session: pytest.Session) -> None:
    known = session.config.stash.get(_STRESS, None)
    if known is not None and session.config.stash.get(RUN, None) is not None:
        known[1].close()
