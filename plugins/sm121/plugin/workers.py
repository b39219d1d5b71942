"""What belongs together in a run of several workers (pytest-xdist). Each worker has its own run in
its own folder, with its own server, and no two servers are on one device. Tests that need a server
go to one worker, in order. Kernel numerics and compilations are spread over all workers. Tests that
measure time do not run; cells of the matrix do. Each worker writes to a file of its folder which
tests belong together, and the controller reads it: xdist 3.8 appends the names of groups to node
ids, and pytest 9.2 ignores them silently (pytest-dev/pytest-xdist#1386)."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from sm121.core import files, profile_fields
from sm121.plugin.stash import LEVEL, SETTINGS
from sm121.session.session import Session

#: The group of tests with which an item shares a server, as `shards` found it: `UNDER_TEST`, a name
#: that begins with `CONFIGURATION`, or absent.
GROUP = pytest.StashKey[str]()
#: The servers of all levels but the matrix: the configuration under test, and those beside it.
UNDER_TEST = "under-test"
#: Prefix of the name of a cell's server configuration.
CONFIGURATION = "server-"
_FILE = "groups.json"
#: Fixtures of tests that need no server and measure no time: they may run anywhere.
_ALONE = frozenset({"kernels", "compilation"})
_SERVERS = frozenset({"server", "servers"})
#: Levels whose verdicts depend on time.
_TIMED = frozenset({"stress", "performance", "regression"})


def is_parallel(config: pytest.Config) -> bool:
    """Whether tests run in several processes. True in a worker and in the controller."""
    worker = getattr(config, "workerinput", None) is not None
    return worker or bool(config.getoption("numprocesses", None))


def disable_timing(config: pytest.Config) -> None:
    """Do not time benchmarks beside other workers. pytest-benchmark would only warn."""
    if is_parallel(config) and hasattr(config.option, "benchmark_disable"):
        config.option.benchmark_disable = True


def why_not(item: pytest.Item) -> str | None:
    """Why a test is not started in this worker; None when it is."""
    if item.config.stash[SETTINGS].worker is None:
        return None
    if item.stash[LEVEL] in _TIMED or "benchmark" in getattr(item, "fixturenames", ()):
        return "no time is measured while other workers run; run this one without -n"
    return None


def write_groups(session: Session, items: Iterable[pytest.Item]) -> None:
    """Write for the controller which of the items must run in one worker."""
    groups = {item.nodeid: group for item in items if (group := _group(item)) is not None}
    try:
        files.write_text(json.dumps(groups, indent=1), session.directory / _FILE)
    except OSError as error:
        session.cannot_write(error)


def read_groups(folder: Path) -> dict[str, str]:
    """The group of each node id that has one, as a worker has written it. Raises OSError: there is
    no file: the worker died, or has no test of a level; ValueError: it died meanwhile."""
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
    if not any(item.get_closest_marker(level) for level in profile_fields.LEVELS):
        return False
    names = set(getattr(item, "fixturenames", ()))
    return bool(names & _SERVERS) or not names & _ALONE
