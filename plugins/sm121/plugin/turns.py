"""A test that measures waits until no other run of the suite uses this machine. Workers of
pytest-xdist would wait for each other: their controller takes one turn for all of them."""

import contextlib
from collections.abc import Iterator

import pytest

from sm121.core import architecture
from sm121.measure import turns
from sm121.measure.turns import Turn, Turns
from sm121.plugin import stash, terminal
from sm121.session.session import Session

_TURNS = pytest.StashKey[Turns]()


def needs(item: pytest.Item) -> Turn:
    """How a test uses the machine."""
    fixtures = {*getattr(item, "fixturenames", ())}
    return turns.needed(
        item.stash[stash.LEVEL],
        is_benchmark="benchmark" in fixtures and "price_of_rounding" not in fixtures,  # not timed
        has_gpu_servers=_has_gpu_servers(item.config.stash[stash.SESSION]),
    )


def _has_gpu_servers(session: Session) -> bool:
    chosen = session.target
    starts = chosen.obstacle is None and session.settings.base_url is None
    return starts and chosen.arch != architecture.CPU


@contextlib.contextmanager
def turn(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Wait for a test's turn. It is kept after the test when the next one needs the same. Raises
    UsageError: the lock files cannot be used."""
    if not _takes_turns(item.config):
        yield
        return
    machine_turns = _turns(item.config)
    machine_turns.take(needs(item))
    try:
        yield
    finally:
        last = nextitem is None or stash.LEVEL not in nextitem.stash
        machine_turns.end_test(None if last or nextitem is None else needs(nextitem))


def of_all_workers(config: pytest.Config, session: Session) -> None:
    """Take one turn for all workers."""
    if _takes_turns(config):
        _turns(config).take(Turn.ALONE if _has_gpu_servers(session) else Turn.SHARED)


def end(config: pytest.Config) -> None:
    """Let other runs have the machine."""
    if _TURNS in config.stash:
        config.stash[_TURNS].close()
        del config.stash[_TURNS]


def _takes_turns(config: pytest.Config) -> bool:
    return config.stash[stash.SETTINGS].worker is None and not config.getoption("share_machine")


def _turns(config: pytest.Config) -> Turns:
    if _TURNS not in config.stash:
        try:
            config.stash[_TURNS] = Turns(lambda line: terminal.say(config, "turn", line))
        except OSError as error:
            raise pytest.UsageError(
                f"{error.filename}: expected a lock file of this user, by which runs of the suite "
                f"take turns ({error.strerror}); --share-machine does without"
            ) from error
    return config.stash[_TURNS]
