"""``--shard I/N`` and pytest-xdist: tests of one server configuration stay together. A shard gets
whole groups; xdist gives a group to the next worker that is free."""

import hashlib
import json

import pytest

from sm121.core.errors import UsageError
from sm121.plugin.matrix import plan_of_items
from sm121.plugin.stash import LEVEL, SETTINGS, SHARD
from sm121.plugin.workers import CONFIGURATION, GROUP, UNDER_TEST
from sm121.run import verdict_file

#: The group of tests that judge all that ran. Each shard has them, for its own part.
_EVERYWHERE = "everywhere"


def parse(text: str | None) -> tuple[int, int] | None:
    """I and N of ``--shard I/N``; None where it was not given. Raises UsageError: the value is not
    I/N with 1 <= I <= N."""
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
        item.stash[GROUP] = _group(config, item)
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


def _group(config: pytest.Config, item: pytest.Item) -> str:
    level = item.stash[LEVEL]
    if level == "kernel":
        return level
    if level != "matrix":
        return UNDER_TEST
    callspec = getattr(item, "callspec", None)
    planned = callspec.params.get("cell") if callspec is not None else None
    plan = plan_of_items(config)
    if planned is None or plan is None:
        return _EVERYWHERE
    started_with = plan.arguments(planned.cell), plan.environment(planned.cell)
    if started_with == plan.under_test(config.stash[SETTINGS].configuration):
        return UNDER_TEST
    made_of = json.dumps(started_with)
    return f"{CONFIGURATION}{hashlib.sha256(made_of.encode()).hexdigest()[:10]}"
