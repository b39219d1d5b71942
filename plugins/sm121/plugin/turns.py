"""A test that measures waits until no other run of the suite works on this machine."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from sm121.measure.turns import Share, Turns
from sm121.plugin import workers
from sm121.plugin.run import RUN
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


def needs(item: pytest.Item) -> Share:
    """What a test needs of the machine."""
    if workers.of(item.config) is not None:
        return Share.SHARED  # one worker of a run must not wait for another; none of them times
    timed = item.stash[LEVEL] in _TIMED or "benchmark" in getattr(item, "fixturenames", ())
    return Share.ALONE if timed else Share.SHARED


# Outermost: what it waits is no part of the test's own time limit.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    config = item.config
    if RUN not in config.stash or LEVEL not in item.stash or config.getoption("beside_others"):
        return (yield)
    if _TURNS not in config.stash:
        try:
            config.stash[_TURNS] = Turns(lambda line: announce(config, "turn", line))
        except OSError as error:
            raise pytest.UsageError(
                f"{error.filename}: expected a lock file of this user, by which runs of the suite "
                f"take turns ({error.strerror}); --beside-others does without"
            ) from error
    turns = config.stash[_TURNS]
    turns.take(needs(item))
    try:
        return (yield)
    finally:
        # A run's measurements belong together, up to the last look at the machine.
        last = nextitem is None or LEVEL not in nextitem.stash
        following = None if last or nextitem is None else needs(nextitem)
        if turns.held is Share.SHARED or following is Share.SHARED:
            turns.release()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after the box was read for the last time
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        turns = session.config.stash.get(_TURNS, None)
        if turns is not None:
            turns.close()
            del session.config.stash[_TURNS]
