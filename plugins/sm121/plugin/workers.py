"""A worker of pytest-xdist: a run of its own in a folder of its own, with its own server.

What needs a server is given to one worker, in order; kernel numerics and compilations are spread.
Nothing that measures time runs beside other workers. The cells of a matrix run: what they are for
is whether they work, and servers of two workers are never on one device.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import pytest

from sm121.plugin.selection import LEVEL
from sm121.profile import LEVELS

_GROUP = "server"
#: Fixtures of tests that need no server and measure no time: they may run anywhere.
_ALONE = frozenset({"kernels", "compilation"})
_SERVERS = frozenset({"server", "servers"})
#: Levels whose verdicts rest on how long something took.
_TIMED = frozenset({"stress", "performance", "regression"})


@dataclass(frozen=True)
class Worker:
    """This process, as one of several. ``run`` names the run that they are all part of."""

    id: str
    run: str


def of(config: pytest.Config) -> Worker | None:
    """What this process is; None where it is no worker."""
    given = getattr(config, "workerinput", None)
    if given is None or "sm121_run" not in given:
        return None
    return Worker(str(given["workerid"]), str(given["sm121_run"]))


def is_parallel(config: pytest.Config) -> bool:
    """Whether tests run in several processes: in a worker, and in their controller."""
    return of(config) is not None or bool(config.getoption("numprocesses", None))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "xdist_group(name): with --dist loadgroup, tests of one name share a worker"
    )
    # pytest-benchmark would do so itself, with a warning that says less than our own reason.
    if is_parallel(config) and hasattr(config.option, "benchmark_disable"):
        config.option.benchmark_disable = True


@pytest.hookimpl(wrapper=True)  # outside `selection`, which finds the levels, inside xdist
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    if of(config) is not None:
        for item in items:
            if _needs_order(item) and item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(_GROUP))
    return (yield)


def _needs_order(item: pytest.Item) -> bool:
    """Whether a test of a level must be in the worker that has the server."""
    if not any(item.get_closest_marker(level) for level in LEVELS):
        return False
    names = set(getattr(item, "fixturenames", ()))
    return bool(names & _SERVERS) or not names & _ALONE


def pytest_runtest_setup(item: pytest.Item) -> None:
    if LEVEL not in item.stash or of(item.config) is None:
        return
    if item.stash[LEVEL] in _TIMED or "benchmark" in getattr(item, "fixturenames", ()):
        pytest.skip("NOT_RUN: no time is measured beside other workers; run this one without -n")
