"""``-n N``: the tests of a run in N workers of pytest-xdist, by xdist's own means.

All tests that need the server are one ``xdist_group``, so that one worker has the server. Kernel
numerics and compilation go to any worker. Tests that measure time do not run. Each worker writes
its part of the run as a shard does, into a folder of its own; the first process joins the parts
when the workers have ended. A worker that died is not replaced: xdist would give the test that
killed it to the next one. `sm121.plugin.parts` joins the parts.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from sm121.core.errors import UsageError
from sm121.plugin.selection import uses_a_server
from sm121.plugin.stash import ID, LEVEL, SETTINGS
from sm121.run.verdict_file import ShardReport, ShardTest
from sm121.session.settings import Worker

#: Key of a worker's output: the lines of the refusal that ended it.
REFUSED = "sm121_refused"
#: Key of a worker's input: whether tests of a group go to one worker, and none is replaced.
GROUPED = "sm121_grouped"
#: The group of all tests that need the server.
GROUP = "server"
#: Options that need pytest-xdist.
_OPTIONS = ("-n", "--numprocesses", "--dist")
_TIMED = frozenset({"stress", "performance", "regression"})


def is_parallel(config: pytest.Config) -> bool:
    """Whether tests run in several processes: this is a worker, or the process that starts them.

    Args:
        config: pytest's.
    """
    worker = getattr(config, "workerinput", None) is not None
    return worker or bool(config.getoption("numprocesses", None))


def refuse_without_xdist(unknown: Iterable[str]) -> None:
    """Name the package of an option that pytest does not know.

    Args:
        unknown: The words of the command line that no parser knows.

    Raises:
        pytest.UsageError: One of them needs pytest-xdist.
    """
    for word in unknown:
        if word.partition("=")[0] in _OPTIONS or (word[:2] == "-n" and word[2:].isdecimal()):
            raise pytest.UsageError(
                f"{word}: expected the package pytest-xdist, got none. Install it: "
                "pip install 'sm121-conformance[parallel]'"
            )


def choose(config: pytest.Config) -> None:
    """Choose groups for ``-n`` without ``--dist``, and that no worker is replaced.

    A worker reads the command line again; its input has what the first process chose.

    Args:
        config: pytest's, whose options are changed.
    """
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadgroup"
        config.option.maxworkerrestart = config.option.maxworkerrestart or "0"
    if getattr(config, "workerinput", {}).get(GROUPED):
        config.option.loadgroup = True


def disable_timing(config: pytest.Config) -> None:
    """Do not time benchmarks beside other workers. pytest-benchmark would only warn.

    Args:
        config: pytest's, whose option is changed.
    """
    if is_parallel(config) and hasattr(config.option, "benchmark_disable"):
        config.option.benchmark_disable = True


# In a worker.


def worker_of(config: pytest.Config) -> Worker | None:
    """Return which worker of which run this process is.

    Args:
        config: pytest's.

    Returns:
        The worker; None in a process that is none.
    """
    given: Mapping[str, Any] | None = getattr(config, "workerinput", None)
    if given is None or "sm121_run" not in given:
        return None
    return Worker(
        id=str(given["workerid"]), run=str(given["sm121_run"]), count=int(given["workercount"])
    )


def group(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Put the tests that need the server into one group, before xdist reads the groups.

    Args:
        config: pytest's; nothing happens in a process that is no worker.
        items: The collected tests.
    """
    if config.stash[SETTINGS].worker is None:
        return
    for item in items:
        if LEVEL in item.stash and uses_a_server(item):
            item.add_marker(pytest.mark.xdist_group(GROUP))


def name_groups(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """See that xdist has named the group of each test in its node id, which is how xdist groups.

    Args:
        config: pytest's; nothing happens in a process that is no worker.
        items: The selected tests.

    Raises:
        UsageError: The levels run with another ``--dist``, with workers that are replaced, or in
            parts; or a test that needs the server has a group of its own.
    """
    tests = [item for item in items if LEVEL in item.stash]
    if config.stash[SETTINGS].worker is None or not tests:
        return
    if not config.workerinput[GROUPED]:  # type: ignore[attr-defined]
        raise UsageError(
            "--dist, --max-worker-restart: expected -n N alone for tests of levels: what needs "
            "the server is for one worker, and a test that kills its worker is not tried again"
        )
    if config.getoption("--shard") is not None:
        raise UsageError("--shard with -n: expected one of them. Leave out -n.")
    for item in filter(uses_a_server, tests):
        if item.nodeid == item.stash[ID]:
            _name_group(item)
        if item.nodeid != f"{item.stash[ID]}@{GROUP}":
            raise UsageError(
                f"xdist_group of {item.stash[ID]}: expected none for a test that needs the server, "
                f"got {item.nodeid}. Remove the marker."
            )


def _name_group(item: pytest.Item) -> None:
    """Name the group of a test in its id, as pytest 9.2 does not for xdist (pytest-xdist#1386)."""
    item._id = item.id.parse(f"{item.nodeid}@{GROUP}")


def why_not(item: pytest.Item) -> str | None:
    """Return why a test is not started in this worker.

    Args:
        item: The test, which has a level.

    Returns:
        The reason; None if it is started.
    """
    if item.config.stash[SETTINGS].worker is None:
        return None
    if item.stash[LEVEL] in _TIMED or "benchmark" in getattr(item, "fixturenames", ()):
        return "no time is measured while other workers run; run this one without -n"
    return None


def part(worker: Worker, items: Iterable[pytest.Item]) -> ShardReport:
    """Return the run of which a worker's file is a part: all tests, since xdist chooses as it goes.

    Args:
        worker: The worker.
        items: The selected tests.
    """
    tests = []
    for item in items:
        if LEVEL in item.stash:
            tests.append(ShardTest(id=item.stash[ID], level=item.stash[LEVEL]))
    number = int(worker.id.removeprefix("gw")) + 1
    return ShardReport(index=number, of=worker.count, tests=tests)


def hand_over_refusal(config: pytest.Config, error: pytest.UsageError) -> None:
    """Tell the first process why a worker refuses the run. Nobody reads a worker's output.

    Args:
        config: The worker's; nothing happens in a process that is no worker.
        error: What the worker's collection was refused for.
    """
    output = getattr(config, "workeroutput", None)
    if output is not None:
        output[REFUSED] = [str(line) for line in error.args]
