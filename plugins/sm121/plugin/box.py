"""The machine's state in a run: read before the measurements and after them."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from sm121.performance.box import RunBox
from sm121.plugin.run import RUN, Run

BOX = pytest.StashKey[RunBox]()


@pytest.fixture(scope="session")
def box(conformance: Run) -> RunBox:
    """The machine's state, read before the first measurement."""
    config = conformance.config
    found = RunBox(conformance, canaries=config.rootpath / ".cache" / "canary")
    config.stash[BOX] = found
    found.read_before()
    return found


# Around the others and first: the server is still there, and pytest-benchmark has not saved yet.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """A machine that went bad in between makes what was measured INCONCLUSIVE."""
    run = session.config.stash.get(RUN, None)
    found = session.config.stash.get(BOX, None)
    if run is not None and found is not None and not run.interrupted:
        found.read_at_the_end()
    return (yield)
