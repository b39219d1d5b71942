"""What belongs together in a run of several workers (pytest-xdist).

A worker has a run of its own in a folder of its own, with its own server. What needs a server is
given to one worker, in order; kernel numerics and compilations are spread. Nothing that measures
time runs beside other workers. The cells of a matrix run: what they are for is whether they work,
and servers of two workers are never on one device.

Which tests belong together is written to a file of the worker's folder, which the controller
reads. xdist 3.8 appends the names of groups to node ids, which pytest 9.2 ignores without a word
(pytest-dev/pytest-xdist#1386).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from sm121.core.files import write_text
from sm121.core.profile import LEVELS
from sm121.plugin.stash import LEVEL, SETTINGS
from sm121.session.session import Session

#: What an item shares a server with, as `shards` has found: `UNDER_TEST`, a name that begins with
#: `CONFIGURATION`, or none of both.
GROUP = pytest.StashKey[str]()
#: All levels' servers but a matrix's: the configuration under test, and what is started around it.
UNDER_TEST = "under-test"
#: Before the name of a server configuration of a matrix.
CONFIGURATION = "server-"
_FILE = "groups.json"
#: Fixtures of tests that need no server and measure no time: they may run anywhere.
_ALONE = frozenset({"kernels", "compilation"})
_SERVERS = frozenset({"server", "servers"})
#: Levels whose verdicts rest on how long something took.
_TIMED = frozenset({"stress", "performance", "regression"})


def is_parallel(config: pytest.Config) -> bool:
    """Whether tests run in several processes: in a worker, and in their controller."""
    worker = getattr(config, "workerinput", None) is not None
    return worker or bool(config.getoption("numprocesses", None))


def disable_timing(config: pytest.Config) -> None:
    """Beside other workers no benchmark is timed; pytest-benchmark would only warn."""
    if is_parallel(config) and hasattr(config.option, "benchmark_disable"):
        config.option.benchmark_disable = True


def why_not(item: pytest.Item) -> str | None:
    """Why a test is not begun in this worker; None if it is."""
    if item.config.stash[SETTINGS].worker is None:
        return None
    if item.stash[LEVEL] in _TIMED or "benchmark" in getattr(item, "fixturenames", ()):
        return "no time is measured beside other workers; run this one without -n"
    return None


def write_groups(session: Session, items: Iterable[pytest.Item]) -> None:
    """Write what of a worker's items must be in one worker, for its controller."""
    groups = {item.nodeid: group for item in items if (group := _group(item)) is not None}
    try:
        write_text(json.dumps(groups, indent=1), session.directory / _FILE)
    except OSError as error:
        session.cannot_write(error)


def read_groups(folder: Path) -> dict[str, str]:
    """What a worker has said: the group of a node id, where it has one.

    Raises:
        OSError: it has written nothing: it died, or has no test of a level.
        ValueError: it died while it wrote.
    """
    groups: dict[str, str] = json.loads((folder / _FILE).read_text("utf-8"))
    return groups


def _group(item: pytest.Item) -> str | None:
    names = {
        str(mark.args[0] if mark.args else mark.kwargs.get("name", "default"))
        for mark in item.iter_markers("xdist_group")
    }
    if names:
        return "_".join(sorted(names))
    if not _needs_order(item):
        return None
    group = item.stash.get(GROUP, UNDER_TEST)
    return group if group.startswith(CONFIGURATION) else UNDER_TEST


def _needs_order(item: pytest.Item) -> bool:
    """Whether a test of a level must be in the worker that has the server."""
    if not any(item.get_closest_marker(level) for level in LEVELS):
        return False
    names = set(getattr(item, "fixturenames", ()))
    return bool(names & _SERVERS) or not names & _ALONE
