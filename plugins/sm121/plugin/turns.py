"""A test that measures waits until no other run of the suite works on this machine.

Where the suite starts servers on a GPU a whole run has the machine alone: GB10 holds gpt-oss-120b
once. Workers of pytest-xdist take no turns, since they would wait for each other: their controller
takes one for all of them.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from sm121.core import architecture
from sm121.measure.turns import Share, Turns
from sm121.plugin import workers
from sm121.plugin.run import RUN, Run
from sm121.plugin.selection import LEVEL
from sm121.plugin.terminal import announce

#: Levels whose verdicts rest on how long something took.
_TIMED = frozenset({"stress", "performance", "regression", "matrix"})
_TURNS = pytest.StashKey[Turns]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("sm121").addoption(
        "--beside-others",
        action="store_true",
        help="measure even while other runs of the suite work here (default: take turns with them)",
    )


def has_the_machine(run: Run) -> bool:
    """Whether nobody else may work here from a run's first test to its end: its servers have the
    GPU's memory, and on GB10 the machine's."""
    chosen = run.target
    runs = chosen.obstacle is None and run.settings.base_url is None
    return runs and chosen.arch != architecture.CPU


def needs(item: pytest.Item) -> Share:
    """What a test needs of the machine."""
    if has_the_machine(item.config.stash[RUN]):
        return Share.ALONE
    timed = item.stash[LEVEL] in _TIMED or "benchmark" in getattr(item, "fixturenames", ())
    return Share.ALONE if timed else Share.SHARED


# Outermost: what it waits is no part of the test's own time limit.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    config = item.config
    if RUN not in config.stash or LEVEL not in item.stash or not _takes_turns(config):
        return (yield)
    turns = _turns(config)
    turns.take(needs(item))
    try:
        return (yield)
    finally:
        # A run's measurements belong together, up to the last look at the machine.
        last = nextitem is None or LEVEL not in nextitem.stash
        following = None if last or nextitem is None else needs(nextitem)
        if turns.held is Share.SHARED or following is Share.SHARED:
            turns.release()


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
        _turns(config).take(Share.ALONE if has_the_machine(run) else Share.SHARED)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after the box was read for the last time
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        turns = session.config.stash.get(_TURNS, None)
        if turns is not None:
            turns.close()
            del session.config.stash[_TURNS]
