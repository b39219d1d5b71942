"""``--shard I/N``: the tests of one server configuration stay together, in one shard."""

import hashlib
import json

import pytest

from sm121.core.errors import UsageError
from sm121.plugin.matrix import PLAN
from sm121.plugin.stash import LEVEL, SETTINGS, SHARD
from sm121.run import verdict_file

#: The servers of all levels but the matrix: the configuration under test, and those beside it.
_UNDER_TEST = "under-test"
#: The group of tests that judge all that ran. Each shard has them, for its own part.
_EVERYWHERE = "everywhere"


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
    part = parse(config.getoption("--shard"))
    if part is None:
        return
    index, of = part
    tests = [item for item in items if LEVEL in item.stash]
    whole = [verdict_file.ShardTest(id=t.nodeid, level=t.stash[LEVEL]) for t in tests]
    config.stash[SHARD] = verdict_file.ShardReport(index=index, of=of, tests=whole)
    group_of = {item.nodeid: _server_group(config, item) for item in tests}
    divided = [group for group in dict.fromkeys(group_of.values()) if group != _EVERYWHERE]
    # Parts take whole groups in turns, in the order of the tests.
    groups = {_EVERYWHERE, *divided[index - 1 :: of]}
    items[:] = [item for item in items if group_of.get(item.nodeid, _EVERYWHERE) in groups]


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
        return _UNDER_TEST
    callspec = getattr(item, "callspec", None)
    planned = callspec.params.get("cell") if callspec is not None else None
    plan = config.stash.get(PLAN, None)
    if planned is None or plan is None:
        return _EVERYWHERE
    started_with = plan.of_cell(planned.cell)
    if started_with == plan.under_test(config.stash[SETTINGS].configuration):
        return _UNDER_TEST
    made_of = json.dumps(started_with)
    return f"server-{hashlib.sha256(made_of.encode()).hexdigest()[:10]}"
