"""Tests that take minutes: left out unless asked for, which is no gap in a certificate."""

from __future__ import annotations

import pytest

_LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("sm121").addoption(
        "--slow",
        action="store_true",
        help="also run the tests that take minutes each (FlashInfer's modules compiled by nvcc)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow(why): takes minutes; left out unless --slow is given")


def is_left_out(item: pytest.Item) -> bool:
    """True for a slow test when ``--slow`` was not given."""
    return item.get_closest_marker("slow") is not None and not item.config.getoption("--slow")


@pytest.hookimpl(trylast=True)  # after -m and -k, so that what they removed is not counted here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.stash[_LEFT_OUT] = len(left_out)
        config.hook.pytest_deselected(items=left_out)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Nothing is left out without a word."""
    count = config.stash.get(_LEFT_OUT, 0)
    return [f"{count} slow tests are left out; --slow runs them"] if count else []
