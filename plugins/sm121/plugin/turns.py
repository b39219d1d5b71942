"""A test that measures waits until no other run of the suite works on this machine.

Workers of pytest-xdist take no turns, since they would wait for each other: their controller takes
one for all of them.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from sm121.core import architecture
from sm121.measure import turns
from sm121.measure.turns import Turn, Turns
from sm121.plugin import workers
from sm121.plugin.run import RUN, Run
from sm121.plugin.selection import LEVEL
from sm121.plugin.terminal import announce

_TURNS = pytest.StashKey[Turns]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("sm121").addoption(
        "--beside-others",
        action="store_true",
        help="measure even while other runs of the suite work here (default: take turns with them)",
    )


def needs(item: pytest.Item) -> Turn:
    """How a test uses the machine."""
    return turns.needed(
        item.stash[LEVEL],
        is_benchmark="benchmark" in getattr(item, "fixturenames", ()),
        has_gpu_servers=_has_gpu_servers(item.config.stash[RUN]),
    )


def _has_gpu_servers(run: Run) -> bool:
    chosen = run.target
    starts = chosen.obstacle is None and run.settings.base_url is None
    return starts and chosen.arch != architecture.CPU


# Outermost: the time that it waits is no part of the test's own time limit.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    config = item.config
    if RUN not in config.stash or LEVEL not in item.stash or not _takes_turns(config):
        return (yield)
    own = _turns(config)
    own.take(needs(item))
    try:
        return (yield)
    finally:
        last = nextitem is None or LEVEL not in nextitem.stash
        own.end_test(None if last or nextitem is None else needs(nextitem))


def _takes_turns(config: pytest.Config) -> bool:
    return workers.of(config) is None and not config.getoption("beside_others")


def _turns(config: pytest.Config) -> Turns:
    if _TURNS not in config.stash:
        try:
            config.stash[_TURNS] = Turns(lambda line: announce(config, "turn", line))
        except OSError as error:
            raise pytest.UsageError(
                f"{error.filename}: expected a lock file of this user, by which runs of the suite "
                f"take turns ({error.strerror}); --beside-others does without"
            ) from error
    return config.stash[_TURNS]


# After the controller has opened the run. No worker is given a test before this has returned for
# each of them.
@pytest.hookimpl(optionalhook=True, trylast=True)
def pytest_xdist_node_collection_finished(node: Any) -> None:
    config = node.config
    run = config.stash.get(RUN, None)
    if run is not None and _takes_turns(config):
        _turns(config).take(Turn.ALONE if _has_gpu_servers(run) else Turn.SHARED)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after the box was read for the last time
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        own = session.config.stash.get(_TURNS, None)
        if own is not None:
            own.close()
            del session.config.stash[_TURNS]
