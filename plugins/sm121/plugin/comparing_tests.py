"""Collects the tests that compare a run with a stored one, whatever is selected otherwise."""

from collections.abc import Sequence

import pytest

from sm121.core import own_tests
from sm121.plugin import expressions, selection
from sm121.plugin.stash import LEVEL

_LEVEL = "regression"
_COMPARED_IN = "test_regression.py"
#: Its tests that hold for a part of what was stored. What a named part leaves out is not missing.
_COMPARED_BY = ("test_no_metric_is_worse", "test_no_level_came_down")


def name_comparison(config: pytest.Config) -> None:
    """Collect the tests that compare for ``--benchmark-compare``, if paths name others alone.

    Args:
        config: pytest's. The tests are added to its arguments.
    """
    if not selection.compares(config):
        return
    own = own_tests.folder() / "tests"
    paths = [path.resolve() for path in expressions.files(config)]
    if not any(path.is_relative_to(own) for path in paths):
        return
    module = own / _COMPARED_IN
    if module in paths or any(own_tests.has_every_level(path) for path in paths):
        return
    config.args += [f"{module}::{name}" for name in _COMPARED_BY]


def hold_comparison(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Take the tests that compare out of a ``-k`` or ``-m`` that does not name their level.

    Args:
        config: pytest's.
        items: The collected tests; the others are left in it.

    Returns:
        The tests that were taken out.
    """
    words = f"{config.getoption('keyword', '')} {config.getoption('markexpr', '')}"
    if not selection.compares(config) or _LEVEL in words:
        return []
    deselected = tuple(config.getoption("deselect", None) or ())
    held = []
    for item in items:
        is_comparing = (
            item.stash.get(LEVEL, "") == _LEVEL and selection.function_name(item) in _COMPARED_BY
        )
        if is_comparing and not item.nodeid.startswith(deselected):
            held.append(item)
    items[:] = [item for item in items if item not in held]
    return held


def put_back(items: list[pytest.Item], held: Sequence[pytest.Item]) -> None:
    """Put the tests of `hold_comparison` back: before the matrix.

    Args:
        items: The selected tests.
        held: The tests that were taken out.
    """
    if not held:
        return
    items += held
    items.sort(key=selection.place_of_level)
