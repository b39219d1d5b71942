"""``--shard I/N`` and pytest-xdist: tests of one server configuration stay together.

A group is what shares a server. Shards get whole groups; xdist's workers get those that need a
server as they have time.
"""

from __future__ import annotations

import hashlib
import json

import pytest

from sm121.core.errors import UsageError
from sm121.plugin.matrix import plan_of_items
from sm121.plugin.options import SETTINGS
from sm121.plugin.run import SHARD
from sm121.plugin.selection import LEVEL
from sm121.plugin.workers import CONFIGURATION, GROUP, UNDER_TEST
from sm121.run.shards import EVERYWHERE, parse
from sm121.run.verdict_file import ShardReport, ShardTest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("sm121").addoption(
        "--shard",
        metavar="I/N",
        help="run the I-th of N parts; tests of one server configuration are in one part; "
        "`sm121 merge DIR...` makes one verdict of the parts",
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        shard = parse(config.getoption("--shard"))
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error
    if shard is not None and config.getoption("--certify"):
        raise pytest.UsageError("--shard with --certify: a certificate is about a whole run")


@pytest.hookimpl(trylast=True)  # what is left by -m, -k and the levels' own choices is divided
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = [item for item in items if LEVEL in item.stash]
    for item in tests:
        item.stash[GROUP] = _group(config, item)
    shard = parse(config.getoption("--shard"))
    if shard is None:
        return
    whole = [ShardTest(id=t.nodeid, level=t.stash[LEVEL]) for t in tests]
    config.stash[SHARD] = ShardReport(index=shard.index, of=shard.of, tests=whole)
    own = shard.groups(item.stash[GROUP] for item in tests)
    items[:] = [item for item in items if item.stash.get(GROUP, EVERYWHERE) in own]


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Nothing is left out without a word."""
    shard = config.stash.get(SHARD, None)
    if shard is None:
        return []
    own = sum(LEVEL in item.stash for item in items)
    return [f"shard {shard.index}/{shard.of}: {own} of {len(shard.tests)} tests are run here"]


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
        return EVERYWHERE
    started_with = plan.arguments(planned.cell), plan.environment(planned.cell)
    if started_with == plan.under_test(config.stash[SETTINGS].configuration):
        return UNDER_TEST
    made_of = json.dumps(started_with)
    return f"{CONFIGURATION}{hashlib.sha256(made_of.encode()).hexdigest()[:10]}"
