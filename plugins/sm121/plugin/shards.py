"""``--shard I/N``: runs a part of the tests, with all tests of one server in the same shard."""

import hashlib
import json
import re
from dataclasses import dataclass

import pytest

from sm121.core.errors import UsageError
from sm121.plugin import selection
from sm121.plugin.matrix import PLAN
from sm121.plugin.stash import LEVEL, SETTINGS, SHARD
from sm121.run import shard_report

#: The group of tests that use the profile's configurations: all levels except the matrix.
_UNDER_TEST = "under-test"
#: The group of tests that judge all other tests of a run. Each shard runs them for its own part.
_EVERYWHERE = "everywhere"
_SHARD = re.compile(r"([0-9]{1,4})/([0-9]{1,4})")
#: The selected tests of the whole run, before they are divided.
WHOLE = pytest.StashKey[list[pytest.Item]]()


@dataclass(frozen=True)
class Shard:
    """A shard of a run.

    Attributes:
        index: The number of this shard, from 1.
        of: The number of shards.
    """

    index: int
    of: int


def parse(text: str | None) -> Shard | None:
    """Parse the value of ``--shard``.

    Args:
        text: The value; None without the option.

    Returns:
        The shard; None without the option.

    Raises:
        UsageError: The value is not I/N with I from 1 to N.
    """
    if text is None:
        return None
    match = _SHARD.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(
            f"--shard {text}: expected I/N with I from 1 to N, as in 1/2, and N of at most 4 digits"
        )
    return Shard(int(match[1]), int(match[2]))


def divide(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests by server, and keep the groups of this shard.

    Args:
        config: The configuration of pytest.
        items: The selected tests. Only those of this shard remain in the list.

    Raises:
        UsageError: ``--shard`` is not I/N.
    """
    shard = parse(config.getoption("--shard"))
    if shard is None:
        return
    whole = []
    group_of = {}
    for item in items:
        if LEVEL in item.stash:
            whole.append(shard_report.ShardTest(id=item.nodeid, level=item.stash[LEVEL]))
            group_of[item.nodeid] = _server_group(config, item)
    config.stash[WHOLE] = [*items]
    config.stash[SHARD] = shard_report.ShardReport(
        index=shard.index, of=shard.of, tests=whole, compared=selection.compares(config)
    )
    divided = [group for group in dict.fromkeys(group_of.values()) if group != _EVERYWHERE]
    # The groups are dealt to the shards in turn, in the order of the tests.
    groups = {_EVERYWHERE, *divided[shard.index - 1 :: shard.of]}
    items[:] = [item for item in items if group_of.get(item.nodeid, _EVERYWHERE) in groups]


def lines(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Return a line which says how many tests of the run this shard has; none without ``--shard``.

    Args:
        config: The configuration of pytest.
        items: The selected tests.
    """
    shard = config.stash.get(SHARD, None)
    if shard is None:
        return []
    count = sum(LEVEL in item.stash for item in items)
    return [f"shard {shard.index}/{shard.of}: {count} of {len(shard.tests)} tests are run here"]


def _server_group(config: pytest.Config, item: pytest.Item) -> str:
    """Return the name of the group of tests that need the same server as the given test."""
    level = item.stash[LEVEL]
    if level == "kernel":
        return level
    if level != "matrix":
        return _UNDER_TEST
    callspec = getattr(item, "callspec", None)
    plan = config.stash.get(PLAN, None)
    if callspec is None or plan is None:
        return _EVERYWHERE
    planned = callspec.params.get("cell")
    if planned is None:
        return _EVERYWHERE
    started_with = plan.of_cell(planned.cell)
    if started_with == plan.under_test(config.stash[SETTINGS].target.configuration):
        return _UNDER_TEST
    made_of = json.dumps(started_with)
    return f"server-{hashlib.sha256(made_of.encode()).hexdigest()[:10]}"
