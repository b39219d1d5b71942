"""``-n N``: distributes the tests of a run to N workers of pytest-xdist.

All tests that need the server are in one ``xdist_group``, so that only one worker has a server.
Tests of kernel numerics and compilation go to any worker. Tests that measure time do not run. Each
worker writes the report of its part into its own folder, as a shard does. After the workers have
ended, the first process merges the parts (`sm121.plugin.parts`). A dead worker is not replaced,
because xdist would run the test that killed it in the new worker.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.plugin.selection import parameters, uses_a_server
from sm121.plugin.stash import ID, LEVEL, SETTINGS
from sm121.run.shard_report import ShardReport, ShardTest
from sm121.session.settings import Worker

#: A key of a worker's output: the lines of its refusal.
REFUSED = "sm121_refused"
#: A key of a worker's input: whether the tests of a group go to one worker, and no worker is
#: replaced.
GROUPED = "sm121_grouped"
#: The group of all tests that need the server.
GROUP = "server"
#: Options that need pytest-xdist.
_OPTIONS = ("-n", "--numprocesses", "--dist")
_TIMED = frozenset({"stress", "performance", "regression"})
#: The marker, and the name, of the test that times kernels.
_KERNEL_BENCHMARKS = "kernel_benchmarks"
_KERNEL_SPEED = "test_kernel_speed"


def is_parallel(config: pytest.Config) -> bool:
    """Return whether a run has several processes (``-n N``).

    The result is true in the workers, and in the process that starts them.

    Args:
        config: The configuration of pytest.
    """
    worker = getattr(config, "workerinput", None) is not None
    return worker or bool(config.getoption("numprocesses", None))


def refuse_without_xdist(unknown: Iterable[str], *, certify: bool) -> None:
    """Refuse an unknown option that needs a package, and name the package.

    Args:
        unknown: The arguments of the command line that no parser knows.
        certify: Whether a certificate is requested. Its process does not load pytest-xdist.

    Raises:
        pytest.UsageError: One of them needs pytest-xdist.
    """
    for word in unknown:
        is_short = word[:2] == "-n" and word[2:].isdecimal()
        is_of_xdist = is_short or word.partition("=")[0] in _OPTIONS
        if is_of_xdist and certify:
            raise pytest.UsageError(
                f"--certify with {word}: expected a run without workers, got {word}. Leave it out."
            )
        if is_of_xdist:
            raise pytest.UsageError(
                f"{word}: expected the package pytest-xdist, got none. Install it: "
                "pip install 'sm121-conformance[parallel]'"
            )


def choose(config: pytest.Config) -> None:
    """For ``-n`` without ``--dist``, distribute by groups, and do not replace dead workers.

    A worker reads the command line again. Its input contains what the first process has chosen.

    Args:
        config: The configuration of pytest. Its options are changed.
    """
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadgroup"
        config.option.maxworkerrestart = config.option.maxworkerrestart or "0"
    if getattr(config, "workerinput", {}).get(GROUPED):
        config.option.loadgroup = True


def disable_timing(config: pytest.Config) -> None:
    """Disable the timing of benchmarks in workers. pytest-benchmark would only print a warning.

    Args:
        config: The configuration of pytest. Its option is changed.
    """
    if is_parallel(config) and hasattr(config.option, "benchmark_disable"):
        config.option.benchmark_disable = True


# in a worker


def worker_of(config: pytest.Config) -> Worker | None:
    """Return the number of this worker and the name of its run.

    Args:
        config: The configuration of pytest.

    Returns:
        The worker; None if this process is not a worker.
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
        config: The configuration of pytest. Nothing happens in a process that is not a worker.
        items: The collected tests.
    """
    if config.stash[SETTINGS].worker is None:
        return
    for item in items:
        if LEVEL in item.stash and uses_a_server(item):
            item.add_marker(pytest.mark.xdist_group(GROUP))


def name_groups(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Ensure that the node id of each test contains its group, because xdist groups by this name.

    Args:
        config: The configuration of pytest. Nothing happens in a process that is not a worker.
        items: The selected tests.

    Raises:
        UsageError: The run has another ``--dist``, replaces workers, or is a shard; or a test that
            needs the server already has another group.
    """
    tests = [item for item in items if LEVEL in item.stash]
    if config.stash[SETTINGS].worker is None or not tests:
        return
    refuse_other_distribution(config, grouped=config.workerinput[GROUPED])  # type: ignore[attr-defined]
    for item in filter(uses_a_server, tests):
        if item.nodeid == item.stash[ID]:
            _name_group(item)
        if item.nodeid != f"{item.stash[ID]}@{GROUP}":
            raise UsageError(
                f"xdist_group of {item.stash[ID]}: expected none for a test that needs the server, "
                f"got {item.nodeid}. Remove the marker."
            )


def refuse_other_distribution(config: pytest.Config, *, grouped: bool) -> None:
    """Refuse tests of levels that are distributed to workers by any option but ``-n N``.

    Args:
        config: The configuration of pytest.
        grouped: Whether tests of a group go to one worker, and no worker is replaced.

    Raises:
        UsageError: Another option distributes the tests.
    """
    if not grouped:
        raise UsageError(
            "--dist, --max-worker-restart: expected -n N alone for tests of levels: one worker "
            "must run all tests that need the server, and a test that kills its worker must not "
            "run again"
        )
    if config.getoption("--shard") is not None:
        raise UsageError("--shard with -n: expected one of them. Leave out -n.")


def is_grouped(config: pytest.Config) -> bool:
    """Whether tests of a group go to one worker, and no worker is replaced.

    Args:
        config: The configuration of the first process.
    """
    options = config.option
    return bool(options.dist == "loadgroup" and options.maxworkerrestart == "0")


def _name_group(item: pytest.Item) -> None:
    """Add the group of a test to its id; xdist cannot do so with pytest 9.2 (pytest-xdist#1386)."""
    item._id = item.id.parse(f"{item.nodeid}@{GROUP}")


def why_not(item: pytest.Item) -> str | None:
    """Return why a test is not started in this worker.

    Args:
        item: The test. It has a level.

    Returns:
        The reason; None if the test is started.
    """
    if item.config.stash[SETTINGS].worker is None:
        return None
    if item.stash[LEVEL] in _TIMED or "benchmark" in getattr(item, "fixturenames", ()):
        return "time is not measured while other workers are running; run this test without -n"
    return None


def refuse_gates(config: pytest.Config, items: Iterable[pytest.Item], profile: Profile) -> None:
    """Refuse, in a worker, tests that measure what the profile limits.

    Without this refusal a build that misses its gates would pass, because nothing is timed. These
    tests are the level performance if the profile has gates, the level stress, whose limits every
    profile has, and a benchmark of a kernel that has a gate.

    Args:
        config: The configuration of the worker, or of a run without workers.
        items: The selected tests.
        profile: The profile of the run.

    Raises:
        UsageError: There is such a test among the selected ones.
    """
    if config.stash[SETTINGS].worker is None:
        return
    gates = {gate.metric for gate in profile.performance.gates}
    levels: set[str] = set()
    kernels: set[str] = set()
    for item in items:
        level = item.stash.get(LEVEL, None)
        if level == "stress" or (level == "performance" and gates):
            levels.add(level)
        elif level == "kernel":
            kernels |= gates.intersection(_timed_kernel(item))
    if not levels and not kernels:
        return
    what = sorted(kernels)
    without = []
    if levels:
        what = [*(f"the {level} level" for level in sorted(levels)), *what]
        without.append("-m '" + " and ".join(f"not {level}" for level in sorted(levels)) + "'")
    if kernels:
        without.append(f"-k 'not {_KERNEL_SPEED}'")
    raise UsageError(
        f"-n: expected no workers, because no time is measured while they run, and profile"
        f" {profile.name} has gates or limits for {', '.join(what)}. Leave out -n, or leave these"
        f" out: {' '.join(without)}"
    )


def _timed_kernel(item: pytest.Item) -> Iterator[str]:
    """Yield the metric of a test that times a kernel; yield nothing for any other test."""
    if item.get_closest_marker(_KERNEL_BENCHMARKS) is not None:
        yield parameters(item)["case"].metric


def part(worker: Worker, items: Iterable[pytest.Item]) -> ShardReport:
    """Return the whole run of a worker: all tests, because xdist assigns tests during the run.

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


@contextlib.contextmanager
def reporting_no_test(items: list[pytest.Item]) -> Iterator[None]:
    """If the block refuses the request, report to the first process that no test was collected.

    pytest-xdist reports the tests also of a refused collection.

    Args:
        items: The collected tests; emptied in place.

    Raises:
        UsageError: The request is refused.
    """
    try:
        yield
    except UsageError:
        items.clear()
        raise


def hand_over_refusal(config: pytest.Config, error: pytest.UsageError) -> None:
    """Pass a worker's refusal to the first process, because a worker's output is not shown.

    Args:
        config: The configuration of pytest. Nothing happens in a process that is not a worker.
        error: The reason for which the worker has refused the collection.
    """
    output = getattr(config, "workeroutput", None)
    if output is not None:
        output[REFUSED] = [str(line) for line in error.args]
