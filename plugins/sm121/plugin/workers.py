"""What belongs together in a run that is divided: by ``--shard I/N``, or by the workers of
pytest-xdist. Tests of one server configuration stay together. A shard gets whole groups; xdist
gives a group to the next worker that is free. Each worker has its own run in its own folder, with
its own server, and no two servers are on one device. Tests that need a server go to one worker, in
order. Kernel numerics and compilations are spread over all workers. Tests that measure time do not
run; cells of the matrix do. Each worker writes to a file of its folder which tests belong together,
and the controller reads it: xdist 3.8 appends the names of groups to node ids, and pytest 9.2
ignores them silently (pytest-dev/pytest-xdist#1386)."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from sm121.core import files, profile_fields
from sm121.core.errors import UsageError
from sm121.plugin.matrix import PLAN
from sm121.plugin.stash import LEVEL, SETTINGS, SHARD
from sm121.run import verdict_file
from sm121.session.session import Session

#: The group of tests with which an item shares a server, as `divide` found it: `UNDER_TEST`, a name
#: that begins with `CONFIGURATION`, or absent.
GROUP = pytest.StashKey[str]()
#: The servers of all levels but the matrix: the configuration under test, and those beside it.
UNDER_TEST = "under-test"
CONFIGURATION = "server-"
#: Key of a worker's output: the lines of the refusal that ended it.
REFUSED = "sm121_refused"
#: The group of tests that judge all that ran. Each shard has them, for its own part.
_EVERYWHERE = "everywhere"
_FILE = "groups.json"
#: Fixtures of tests that need no server and measure no time: they may run anywhere.
_ALONE = frozenset({"kernels", "compilation"})
_SERVERS = frozenset({"server", "servers"})
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


def hand_over_refusal(config: pytest.Config, error: pytest.UsageError) -> None:
    """In a worker: tell the controller why the run is refused. Its own output is read by nobody.

    Args:
        config: The worker's; nothing happens in a process that is no worker.
        error: What the worker's collection was refused for.
    """
    output = getattr(config, "workeroutput", None)
    if output is not None:
        output[REFUSED] = [str(line) for line in error.args]


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
    of_level = any(item.get_closest_marker(level) for level in profile_fields.LEVELS)
    if not of_level or not uses_a_server(item):
        return None
    group = item.stash.get(GROUP, UNDER_TEST)
    return group if group.startswith(CONFIGURATION) else UNDER_TEST


def uses_a_server(item: pytest.Item) -> bool:
    """Whether a test of a level must be in the worker that has the server."""
    names = set(getattr(item, "fixturenames", ()))
    return bool(names & _SERVERS) or not names & _ALONE


def parse(text: str | None) -> tuple[int, int] | None:
    """I and N of ``--shard I/N``; None without it. Raises UsageError: not I/N with 1 <= I <= N."""
    if text is None:
        return None
    index, slash, of = text.partition("/")
    if not (slash and index.isdecimal() and of.isdecimal() and 1 <= int(index) <= int(of)):
        raise UsageError(f"--shard {text}: expected I/N with I from 1 to N, as in 1/2")
    return int(index), int(of)


def divide(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests by server; keep this shard's. Raises UsageError: ``--shard`` is not I/N."""
    tests = [item for item in items if LEVEL in item.stash]
    for item in tests:
        item.stash[GROUP] = _server_group(config, item)
    part = parse(config.getoption("--shard"))
    if part is None:
        return
    index, of = part
    whole = [verdict_file.ShardTest(id=t.nodeid, level=t.stash[LEVEL]) for t in tests]
    config.stash[SHARD] = verdict_file.ShardReport(index=index, of=of, tests=whole)
    divided = [g for g in dict.fromkeys(item.stash[GROUP] for item in tests) if g != _EVERYWHERE]
    # Parts take whole groups in turns, in the order of the tests.
    groups = {_EVERYWHERE, *divided[index - 1 :: of]}
    items[:] = [item for item in items if item.stash.get(GROUP, _EVERYWHERE) in groups]


def lines(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """A line on how much of the run this shard has."""
    shard = config.stash.get(SHARD, None)
    if shard is None:
        return []
    count = sum(LEVEL in item.stash for item in items)
    return [f"shard {shard.index}/{shard.of}: {count} of {len(shard.tests)} tests are run here"]


def _server_group(config: pytest.Config, item: pytest.Item) -> str:
    level = item.stash[LEVEL]
    if level == "kernel":
        return level
    if level != "matrix":
        return UNDER_TEST
    callspec = getattr(item, "callspec", None)
    planned = callspec.params.get("cell") if callspec is not None else None
    plan = config.stash.get(PLAN, None)
    if planned is None or plan is None:
        return _EVERYWHERE
    started_with = plan.of_cell(planned.cell)
    if started_with == plan.under_test(config.stash[SETTINGS].configuration):
        return UNDER_TEST
    made_of = json.dumps(started_with)
    return f"{CONFIGURATION}{hashlib.sha256(made_of.encode()).hexdigest()[:10]}"
